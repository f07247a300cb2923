"""Which of vLLM's loaders reads the files: its default one, or one of a load format's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

DEFAULT = ("auto", "hf", "safetensors")
SAVED_STATE = "sharded_state"
OWN = ("runai_streamer", SAVED_STATE)


def loader_of(load_format: str, load_config: LoadConfig) -> BaseModelLoader | None:
    """The loader of a format that vLLM's default loader does not read, or None."""
    if load_format not in OWN:
        return None
    # Here, because an older vLLM may lack what hardly anybody asks for.
    from tensor_dedup.patches.vllm.own_loaders import LOADERS

    return LOADERS[load_format](load_config)


def tie_again(load_format: str, model_config: ModelConfig) -> None:
    """Undo what vLLM concluded from a name in a saved state, which holds tied weights once.

    It leaves formats of saved states alone, but was told the name of ours.
    """
    untied = getattr(model_config, "word_embeddings_untied_by_checkpoint", False)
    if load_format == SAVED_STATE and untied:
        model_config.hf_config.tie_word_embeddings = True
        model_config.hf_config.get_text_config().tie_word_embeddings = True
        model_config.word_embeddings_untied_by_checkpoint = False


def is_draft(vllm_config: VllmConfig, model_config: ModelConfig) -> bool:
    """Is this a speculative draft? It may lack what it takes from its target afterwards."""
    speculative = vllm_config.speculative_config
    if speculative is None or model_config is speculative.target_model_config:
        return False  # without a draft model the target stands for it
    return model_config is speculative.draft_model_config
