# The memory manager alone, without torch and vLLM: one image for the machine's memory and for GPUs.
# Build it from the root of a clone, with BuildKit:
#   docker build -f docs/deploy/manager.Dockerfile -t tensor-dedup-manager:0.1.0 .

# Pinned to a release; pin the digest that your registry shows as well, as in python:...@sha256:....
ARG PYTHON=python:3.12.11-slim-bookworm

FROM ${PYTHON} AS build
COPY . /src
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM ${PYTHON}
# cuda-bindings and nvidia-ml-py are for `serve --device`; the driver comes from the host.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir /wheels/*.whl "cuda-bindings>=13,<14" nvidia-ml-py

# The manager serves processes of its own uid only, whatever container they are in: build the image
# of the engines with the same one. A number needs no entry in /etc/passwd, and lets Kubernetes see
# that it is not root.
ARG UID=1000
# A named volume that is mounted here takes over the owner and the mode, which the manager checks.
RUN install -d -o "$UID" -g "$UID" -m 0700 /run/tensor-dedup
ENV TENSOR_DEDUP_SOCKET=/run/tensor-dedup/manager.sock
USER ${UID}:${UID}

# Exec form: the manager gets SIGTERM itself and ends within ten seconds.
ENTRYPOINT ["tensor-dedup"]
CMD ["serve"]
HEALTHCHECK --interval=30s --timeout=10s CMD ["tensor-dedup", "status", "--json"]
