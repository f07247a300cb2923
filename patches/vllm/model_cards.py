"""Show in vLLM's `/v1/models` the base from which a model takes layers. Imports no vllm."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from tensor_dedup.patches.vllm.load_formats import KEY, LOAD_FORMAT, split
from tensor_dedup.patches.vllm.seams import usable

_CLASS: Final = "OpenAIServingModels"
_METHOD: Final = "show_available_models"


def patch(serving: ModuleType) -> None:
    """Wrap the method of vLLM's server that lists models. Idempotent.

    For a model that takes layers from another one (`frozen_base`), the wrapper adds that base to
    each listed model. `serving` is the module vllm.entrypoints.openai.models.serving. If it has no
    such method, nothing is done.
    """
    found = getattr(serving, _CLASS, None)
    original = getattr(found, _METHOD, None)
    if original is None or original.__code__.co_filename == __file__:
        return
    setattr(found, _METHOD, _wrapped(original))


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def show_available_models(self: Any, *args: Any, **options: Any) -> Any:
        cards = await original(self, *args, **options)
        found = _substituted(self)
        # The base models come first; adapters follow, which work on the substituted weights too.
        for card in cards.data if found is not None else ():
            card.tensor_dedup = found
        return cards

    return show_available_models


def _substituted(models: Any) -> dict[str, Any] | None:
    """Return what the card says, or None where every layer is the checkpoint's own."""
    vllm_config = getattr(getattr(models, "engine_client", None), "vllm_config", None)
    loading = getattr(vllm_config, "load_config", None)
    if loading is None or str(loading.load_format) != LOAD_FORMAT:
        return None
    config, _ = split((loading.model_loader_extra_config or {}).get(KEY))
    usable("cards")
    return {"frozen_base": config.to_dict()["frozen_base"]} if config.frozen_base else None
