# The image server; the build uses the package index and nothing else.
#   docker build -t nextscale .
#   docker build -t nextscale --build-arg BASE=nvidia/cuda:13.0.2-base-ubuntu24.04 .
# BASE: any image with Python 3.11 or newer, or with apt, which then installs it. torch's wheels bring the CUDA libraries, so that the GPU works
# in both where the host has NVIDIA's container toolkit (docker run --gpus all).
# TORCH, TORCH_INDEX: what pip installs as torch, and from where. By default it is the tested version, from the default index; there are indexes
# of CPU wheels.
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
# torch comes first and alone: its layer stays when the package changes. It brings the Triton that it was built with
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "${TORCH:-$(grep '^torch==' /src/constraints.txt)}"
COPY . /src
RUN grep -Ev '^(torch|triton)==' /src/constraints.txt > /tmp/constraints.txt \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt "/src[serve,text]" && rm -rf /src /tmp/constraints.txt

RUN useradd --create-home --uid 10001 nextscale && install --directory --owner nextscale /models
USER nextscale
# what is fetched stays in the volume too
ENV NEXTSCALE_HOME=/models HF_HOME=/models/huggingface
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
# the port that the server was started with
HEALTHCHECK --start-period=120s CMD python3 -c "import re, urllib.request as web; \
    ports = re.findall('--port.([0-9]+)', open('/proc/1/cmdline').read()); \
    web.urlopen('http://127.0.0.1:' + (ports or ['8000'])[-1] + '/livez')"
# other machines reach it, so it does not start without keys; a later --api-key-file takes the place of this one
ENTRYPOINT ["nextscale", "serve", "--host", "0.0.0.0", "--api-key-file", "/models/keys"]
