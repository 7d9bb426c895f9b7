# The image server; the build uses the package index and nothing else.
#   docker build -t nextscale .
#   docker build -t nextscale --build-arg BASE=nvidia/cuda:13.0.2-base-ubuntu24.04 .
# BASE: any image with Python 3.11 or newer, or with apt, which then installs it. torch's wheels bring the CUDA libraries, so that the GPU works
# in both where the host has NVIDIA's container toolkit (docker run --gpus all).
# TORCH, TORCH_INDEX: what pip installs as torch, and from where if not from the default index, such as an index of CPU wheels.
ARG BASE=python:3.12-slim
FROM ${BASE}

ARG TORCH=torch
ARG TORCH_INDEX=
RUN if ! command -v python3 >/dev/null; then \
        apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*; \
    fi
RUN python3 -m venv /opt/nextscale
ENV PATH=/opt/nextscale/bin:$PATH PYTHONUNBUFFERED=1
# torch comes first and alone: its layer stays when the package changes
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
COPY . /src
RUN pip install --no-cache-dir "/src[serve,text]" && rm -rf /src

RUN useradd --create-home --uid 10001 nextscale
USER nextscale
ENV NEXTSCALE_HOME=/models
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=120s CMD python3 -c "import urllib.request as web; web.urlopen('http://127.0.0.1:8000/livez')"
ENTRYPOINT ["nextscale", "serve", "--host", "0.0.0.0"]
