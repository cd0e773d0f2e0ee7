# A server for CPUs. docs/deploy.md says how to build and run it.
FROM python:3.12-slim AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
# all: the image may run on another machine than the one that builds it
RUN SOOTHSAY_KERNELS=all pip wheel --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# An index with PyTorch's CPU builds, whose local version is preferred. Without it, several GB of CUDA come along.
ARG PIP_EXTRA_INDEX_URL
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels pip install --no-cache-dir /wheels/*.whl
RUN useradd --uid 1000 --create-home soothsay && mkdir /cache && chown soothsay /cache
# soothsay; Kubernetes sees that a number is not root
USER 1000
# downloaded models, and what was measured of this machine
ENV XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["soothsay"]
CMD ["serve", "smollm2", "--host", "0.0.0.0"]
