"""The load format `tensor_dedup`, and the formats of vLLM that can be used with it.

The inner format is the vLLM load format that reads the files. It is sent to every process of an
engine in `model_loader_extra_config`, together with the configuration. This module imports no vllm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tensor_dedup.config import TensorDedupConfig

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader


LOAD_FORMAT = "tensor_dedup"
KEY = "tensor_dedup"  # of model_loader_extra_config
BACKEND = "tensor_dedup"  # of weight_transfer_config
# Formats that vLLM's default loader reads: they differ in the files that count.
DEFAULT = (
    "auto", "hf", "safetensors", "mistral", "pt", "npcache", "fastsafetensors", "instanttensor",
)  # fmt: skip
SAVED_STATE = "sharded_state"
OWN = ("runai_streamer", SAVED_STATE)
# Formats of vLLM's plug-ins, which bring loaders of their own, and the quantisation that means one.
OTHER_LOADERS = ("gguf", "bitsandbytes")
# With these, models share; with any other they load plainly.
SHARED = (*DEFAULT, *OWN, *OTHER_LOADERS)
# With URLs of other schemes vLLM keeps the load format, and so does this package.
_STREAMED = ("s3://", "gs://", "az://")
_WHY_NOT: Mapping[str, str] = {
    "runai_streamer": "its weights are streamed from object storage",  # from folders it is in OWN
    "dummy": "load_format='dummy' makes weights up",
    "ipc_cache": "load_format='ipc_cache' takes weights from another process's memory",
    "modelexpress": "load_format='modelexpress' takes weights from another machine's memory",
    "runai_streamer_sharded": "load_format='runai_streamer_sharded' streams each rank's state",
    "tensorizer": "load_format='tensorizer' fills the model past vLLM's loading code",
}


def follows_steps(vllm_config: VllmConfig) -> bool:
    """Return whether an engine changes to other steps by this package's weight transfer engine."""
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    return getattr(transfer, "backend", None) == BACKEND


def keeps_addresses(vllm_config: VllmConfig) -> bool:
    """Return whether an engine changes to other steps and has captured graphs.

    On a GPU, each of its tensors gets the contents of another step where it is.
    """
    return follows_steps(vllm_config) and not vllm_config.model_config.enforce_eager


def is_written_later(vllm_config: VllmConfig) -> bool:
    """Return whether weights may be written in place after the load (`weight_transfer_config`).

    This package's own weight transfer engine writes nothing in place.
    """
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    return transfer is not None and not follows_steps(vllm_config)


def is_remote(model: object) -> bool:
    """Return whether a `model` argument is a URL from which vLLM streams, such as "s3://b/m"."""
    return isinstance(model, str) and model.lower().startswith(_STREAMED)


def why_not_shared(load_format: str) -> str:
    """Return why a model is not shared that vLLM loads by `load_format` itself."""
    return _WHY_NOT.get(load_format, f"load_format={load_format!r} was not tried")


def split(mine: object) -> tuple[TensorDedupConfig, str]:
    """Split this package's entry in model_loader_extra_config into configuration and inner format.

    The inner format is the load format of vLLM that reads the files, by default "auto". The entry
    `mine` is one of these:

    * anything that `TensorDedupConfig.from_any` takes;
    * a dict of the fields of a TensorDedupConfig, with the inner format as "inner".

    Raises:
        ConfigError: The configuration is not valid.
    """
    if not isinstance(mine, Mapping):
        return TensorDedupConfig.from_any(mine), "auto"
    fields = {name: mine[name] for name in mine if name not in ("inner", "stored")}
    return TensorDedupConfig.from_any(fields), str(mine.get("inner", "auto"))


def loader_of(load_format: str, load_config: LoadConfig) -> BaseModelLoader | None:
    """Return a loader for `load_format`, or None if vLLM's default loader reads this format.

    The loader is a subclass of vLLM's loader for the format.
    """
    if load_format not in OWN:
        return None
    # Here, because an older vLLM may lack what hardly anybody asks for.
    from tensor_dedup.patches.vllm.own_loaders import LOADERS

    return LOADERS[load_format](load_config)


def tie_again(load_format: str, model_config: ModelConfig) -> None:
    """Mark the embeddings in `model_config` as tied again, if vLLM took them for untied.

    This is done for a saved state, which has tied weights only once. vLLM knows this only if its
    own load format is `sharded_state`. If the inner format `load_format` is not `sharded_state`,
    nothing is done.
    """
    untied = getattr(model_config, "word_embeddings_untied_by_checkpoint", False)
    if load_format == SAVED_STATE and untied:
        model_config.hf_config.tie_word_embeddings = True
        model_config.hf_config.get_text_config().tie_word_embeddings = True
        model_config.word_embeddings_untied_by_checkpoint = False


def is_draft(vllm_config: VllmConfig, model_config: ModelConfig) -> bool:
    """Return whether a model is a speculative draft, which may use weights of its target model."""
    speculative = vllm_config.speculative_config
    if speculative is None or model_config is speculative.target_model_config:
        return False  # without a draft model the target stands for it
    return model_config is speculative.draft_model_config
