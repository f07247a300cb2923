# vLLM's own image with tensor-dedup in it, for engines that share the memory of a manager.
# Build it from the root of a clone, with BuildKit:
#   docker build -f docs/deploy/engine.Dockerfile -t tensor-dedup-engine:0.1.0 .

ARG PYTHON=python:3.12.11-slim-bookworm
# The version of vLLM that tensor-dedup was checked with; for CPUs name an image of vLLM's CPU build.
ARG VLLM=vllm/vllm-openai:v0.32.0

FROM ${PYTHON} AS build
COPY . /src
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM ${VLLM}
# The image has torch and vLLM, and what we need beside them is small. cuda-bindings map memory of a GPU.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir /wheels/*.whl "cuda-bindings>=13,<14" nvidia-ml-py

# The uid of the manager's image: the manager hangs up on every other, and vLLM's image runs as root.
# HOME is for vLLM's caches; USER is what Python calls a uid without an entry in /etc/passwd.
ARG UID=1000
RUN install -d -o "$UID" -g "$UID" -m 0700 /home/engine /run/tensor-dedup
ENV HOME=/home/engine USER=engine TENSOR_DEDUP_SOCKET=/run/tensor-dedup/manager.sock
USER ${UID}:${UID}

ENTRYPOINT ["vllm", "serve"]
CMD ["--help"]
