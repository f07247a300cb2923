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
DEFAULT = ("auto", "hf", "safetensors")
SAVED_STATE = "sharded_state"
OWN = ("runai_streamer", SAVED_STATE)


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
