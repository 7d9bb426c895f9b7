# The HTTP server. The build downloads only from the package index.
#   docker build -t nextscale .
#   docker build -t nextscale --build-arg BASE=nvidia/cuda:13.0.2-base-ubuntu24.04 .
# BASE: an image with Python 3.11 or newer, or with apt to install it. torch's wheels include the CUDA libraries, so both run on a GPU if the
# host has NVIDIA's container toolkit (docker run --gpus all).
# TORCH, TORCH_INDEX: requirement and index of torch, for example for CPU wheels. The default is the tested version from the default index.
ARG BASE=python:3.12-slim
FROM ${BASE}

ARG TORCH=
ARG TORCH_INDEX=
RUN if ! command -v python3 >/dev/null; then \
        apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*; \
    fi
RUN python3 -m venv /opt/nextscale
ENV PATH=/opt/nextscale/bin:$PATH PYTHONUNBUFFERED=1
COPY constraints.txt /src/
# torch is installed first, so that its layer is reused when the package changes; it also selects the version of Triton
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "${TORCH:-$(grep '^torch==' /src/constraints.txt)}"
COPY . /src
RUN grep -Ev '^(torch|triton)==' /src/constraints.txt > /tmp/constraints.txt \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt "/src[serve,text]" && rm -rf /src /tmp/constraints.txt

RUN useradd --create-home --uid 10001 nextscale && install --directory --owner nextscale /models
USER nextscale
# downloads are stored in the volume
ENV NEXTSCALE_HOME=/models HF_HOME=/models/huggingface
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
# uses the port of the server's command line
HEALTHCHECK --start-period=120s CMD python3 -c "import re, urllib.request as web; \
    ports = re.findall('--port.([0-9]+)', open('/proc/1/cmdline').read()); \
    web.urlopen('http://127.0.0.1:' + (ports or ['8000'])[-1] + '/livez')"
# reachable from other machines, so it requires keys; a second --api-key-file overrides this one
ENTRYPOINT ["nextscale", "serve", "--host", "0.0.0.0", "--api-key-file", "/models/keys"]
