"""Layer keys: digests of all inputs from which a layer's final tensors are computed.

Layers with equal keys share their tensors. A key therefore includes too much rather than too
little, because a missing input could give wrong weights, while a superfluous one only prevents
sharing. Inputs that are left out, for example some environment variables, are listed here with the
reason.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Final

import torch
from blake3 import blake3

_CONTEXT = "tensor-dedup layer key v1"
TRACER_VERSION = 1

# A layer's own attributes that name its place and not its content. Ranks: a slice is part of the
# recipe, so equal slices of different ranks meet.
_PLACE = frozenset({"prefix", "layer_name", "name", "training"})
_RANKS = frozenset({"tp_rank", "ep_rank", "dp_rank", "pcp_rank"})
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype)
# Every variable with one of these beginnings goes into the key ...
PREFIXES: Final = (
    "ATEN_",
    "CUBLAS_",
    "CUDA_",
    "CUDNN_",
    "DNNL_",
    "FLASHINFER_",
    "GLOO_",
    "KMP_",
    "MKL_",
    "NCCL_",
    "NVIDIA_TF32_",
    "OMP_",
    "ONEDNN_",
    "PYTORCH_",
    "TORCHINDUCTOR_",
    "TORCH_",
    "TRITON_",
    "VLLM_",
    "ZENDNN_",
    "ZENTORCH_",
)
# ... but these, which cannot touch a weight. With them in it replicas on two ports would never
# meet, and secrets would stand in preimages.
_EXEMPT_BY_REASON: Final[Mapping[str, str]] = {
    "addresses, ranks and identifiers": (
        "VLLM_DIST_IDENT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK "
        "VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT "
        "VLLM_ENABLE_V1_MULTIPROCESSING VLLM_HOST_IP VLLM_LOOPBACK_IP "
        "VLLM_MOONCAKE_BOOTSTRAP_PORT "
        "VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_SIDE_CHANNEL_HOST "
        "VLLM_P2P_SIDE_CHANNEL_PORT VLLM_PORT "
        "VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_PER_WORKER_GPUS "
        "VLLM_RPC_TIMEOUT VLLM_WORKER_MULTIPROC_METHOD "
    ),
    "paths, builds and caches of other things": (
        "CUDA_CACHE_PATH CUDA_HOME CUDA_PATH TORCHINDUCTOR_CACHE_DIR TORCH_EXTENSIONS_DIR "
        "TORCH_HOME TRITON_CACHE_DIR TRITON_DUMP_DIR TRITON_HOME "
        "VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_BUILD_COMMIT "
        "VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_CACHE_ROOT VLLM_CONFIG_ROOT "
        "VLLM_DOCKER_BUILD_CONTEXT VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR "
        "VLLM_IMAGE_TAG VLLM_LORA_RESOLVER_CACHE_DIR VLLM_MEDIA_CACHE "
        "VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS "
        "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_RPC_BASE_PATH VLLM_XLA_CACHE_PATH "
    ),
    "credentials and where files come from": (
        "VLLM_API_KEY VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MODEL_REDIRECT_PATH "
        "VLLM_S3_ACCESS_KEY_ID VLLM_S3_ENDPOINT_URL VLLM_S3_SECRET_ACCESS_KEY "
        "VLLM_USE_MODELSCOPE "
    ),
    "logs, telemetry and diagnosis": (
        "DNNL_VERBOSE KMP_WARNINGS MKL_VERBOSE NCCL_DEBUG NCCL_DEBUG_FILE "
        "OMP_DISPLAY_AFFINITY OMP_DISPLAY_ENV ONEDNN_VERBOSE TORCH_CPP_LOG_LEVEL "
        "TORCH_DISTRIBUTED_DEBUG TORCH_LOGS TORCH_LOGS_FORMAT TORCH_LOGS_OUT "
        "TORCH_SHOW_CPP_STACKTRACES TORCH_TRACE TRITON_PRINT_AUTOTUNING "
        "VLLM_COMPUTE_NANS_IN_LOGITS "
        "VLLM_CONFIGURE_LOGGING VLLM_DEBUG_DUMP_PATH VLLM_DEBUG_LOG_API_SERVER_RESPONSE "
        "VLLM_DEBUG_WORKSPACE VLLM_DISABLE_LOG_LOGO VLLM_DO_NOT_TRACK VLLM_GC_DEBUG "
        "VLLM_LOGGING_COLOR VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX "
        "VLLM_LOGGING_STREAM VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION "
        "VLLM_LOG_STATS_INTERVAL VLLM_NO_USAGE_STATS VLLM_RINGBUFFER_WARNING_INTERVAL "
        "VLLM_TORCH_PROFILER_DIR VLLM_TORCH_PROFILER_RECORD_SHAPES "
        "VLLM_TORCH_PROFILER_WITH_STACK VLLM_TRACE_FUNCTION VLLM_USAGE_SOURCE "
        "VLLM_USAGE_STATS_SERVER "
    ),
    "time-outs, sizes and processes": (
        "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_CPU_KVCACHE_SPACE "
        "VLLM_RANDOMIZE_DP_DUMMY_INPUTS "
        "VLLM_AUDIO_FETCH_TIMEOUT VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND "
        "VLLM_ENGINE_ITERATION_TIMEOUT_S VLLM_ENGINE_READY_TIMEOUT_S "
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_HTTP_TIMEOUT_KEEP_ALIVE "
        "VLLM_IMAGE_FETCH_TIMEOUT VLLM_KEEP_ALIVE_ON_ENGINE_DEATH "
        "VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_PLUGINS VLLM_PROCESS_NAME_PREFIX "
        "VLLM_SERVER_DEV_MODE VLLM_SLEEP_WHEN_IDLE VLLM_SYSTEM_START_DATE "
        "VLLM_VIDEO_FETCH_TIMEOUT "
    ),
}
EXEMPT: Final = frozenset(name for names in _EXEMPT_BY_REASON.values() for name in names.split())
# Preimages are kept, shown and compared, so no secret may stand in one, also of a name not known
# here. Whole words, for VLLM_..._TOKEN_THRESHOLD is a number that kernels read.
_SECRET: Final = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(API|ACCESS|PRIVATE|AUTH|SIGNING)_?KEY"
    r"|_(KEY|KEYS|TOKEN|AUTH|COOKIE)(_ID|_FILE|_PATH)?$"
)


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables that may affect weights, without secrets, sorted by name.

    They are selected from `variables`, by default the environment of this process.
    """
    variables = os.environ if variables is None else variables
    return {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(PREFIXES) and name not in EXEMPT and not _SECRET.search(name)
    }


@functools.cache
def _versions() -> dict[str, str]:
    return {
        "tensor_dedup": version("tensor-dedup"),
        "tracer": str(TRACER_VERSION),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
    }


def runtime() -> dict[str, Any]:
    """Return the settings of torch and the CPU on which packed weights depend."""
    return {
        "threads": torch.get_num_threads(),
        "mkldnn": [torch.backends.mkldnn.enabled, torch.backends.mkldnn.deterministic],
        "matmul": [
            torch.get_float32_matmul_precision(),
            str(getattr(torch.backends.mkldnn, "fp32_precision", None)),
        ],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "flush_denormal_default_dtype": str(torch.get_default_dtype()),
        "cpu": {name: str(value) for name, value in sorted(torch.cpu.get_capabilities().items())},
    }


def plain(value: Any, depth: int = 6) -> Any:
    """Convert `value` to JSON-compatible data for a layer key.

    Containers and dataclasses are converted down to `depth` levels. Any other object is represented
    by the name of its class.
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, _PLAIN):
        return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)
    if depth > 0:
        if isinstance(value, (list, tuple)):
            return [plain(item, depth - 1) for item in value]
        if isinstance(value, (set, frozenset)):
            return sorted(json.dumps(plain(item, depth - 1), sort_keys=True) for item in value)
        if isinstance(value, Mapping):
            return {str(k): plain(v, depth - 1) for k, v in value.items() if str(k) not in _RANKS}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
            return {"class": class_name(value), **plain(fields, depth)}
    return f"<{class_name(value)}>"


def attributes(thing: object, depth: int = 4) -> dict[str, Any]:
    """Return the attributes of `thing` for a layer key, converted by `plain` with `depth`.

    Attributes that give the layer's position in a model, for example its prefix, are left out, and
    so are parameters, buffers and submodules.
    """
    return {
        name: plain(value, depth)
        for name, value in sorted(vars(thing).items())
        if name not in _PLACE | _RANKS
        and not name.startswith(("_parameters", "_buffers", "_modules"))
    }


def class_name(thing: object) -> str:
    """Return the qualified name of a class or function, or of the class of an object."""
    kind = thing if isinstance(thing, type) or hasattr(thing, "__qualname__") else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def process_inputs() -> dict[str, Any]:
    """Return what every layer key in this process includes: versions, environment, settings."""
    return {"versions": _versions(), "environment": environment(), "runtime": runtime()}


def process_state() -> str:
    """Return a digest of the process-wide state on which the results of arithmetic may depend.

    The last bits of sums and products depend on threads, precision settings and libraries.
    """
    return blake3(process_text().encode(), derive_key_context=_CONTEXT).hexdigest()


def version_state() -> str:
    """Return a digest of the versions and the machine, on which the meaning of a recipe depends."""
    text = json.dumps(_versions(), sort_keys=True)
    return blake3(text.encode(), derive_key_context=_CONTEXT).hexdigest()


def process_text() -> str:
    """Return `process_inputs` as JSON text.

    The preimage (the hashed text) of every layer key begins with it.
    """
    return json.dumps(process_inputs(), sort_keys=True, default=str)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerKey:
    """A layer key: a digest, and its preimage, the JSON text that was hashed.

    The preimage contains no secrets.
    """

    digest: str
    preimage: str

    @classmethod
    def of(cls, process: str | None = None, **inputs: Any) -> LayerKey:
        """Return the layer key for `inputs` together with those of `process_inputs`.

        `process` is the text that `process_text` returned when the load began. By default,
        `process_text` is called now.
        """
        own = json.dumps(inputs, sort_keys=True, default=str)
        common = process_text() if process is None else process
        preimage = f"{common[:-1]}, {own[1:]}" if inputs else common  # one object of both
        return cls(blake3(preimage.encode(), derive_key_context=_CONTEXT).hexdigest(), preimage)
