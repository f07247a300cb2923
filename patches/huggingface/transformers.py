"""The functions of Transformers that are replaced during a load.

A seam describes one of these functions, with the signature that was recorded for it. A function
with another signature is not replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from tensor_dedup.seams import Seam

if TYPE_CHECKING:
    from torch import nn

_VERSIONS: Final = "transformers 5.19"

SET_PARAMETER: Final = Seam(
    "transformers.core_model_loading:set_param_for_module",
    "weights are shared when their model is complete, with a higher peak",
    (
        "a tensor becomes a parameter here, after casts, merges of experts and renamings; sharing "
        "it at once keeps a model from being in memory twice"
    ),
    "(model, target_name, param_value, loading_info, hf_quantizer)",
    versions=(_VERSIONS,),
)
WARM_UP: Final = Seam(
    "transformers.modeling_utils:caching_allocator_warmup",
    "the allocator of a device is warmed up for whole models",
    "reserves device memory for all weights of a model, before it is known which are there",
    "(model, expanded_device_map, hf_quantizer)",
    versions=(_VERSIONS,),
)

Note = Callable[["nn.Module", str], None]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def replacements(note: Note) -> Iterator[tuple[Seam, Wrap]]:
    """Yield pairs: a function of Transformers to replace, and the function that wraps it.

    A Seam names the function to replace. Where Transformers sets a tensor, the wrapper also calls
    `note(model, name)`. The function that warms up the device allocator is replaced by one that
    does nothing, because it would reserve memory for weights that may be shared.
    """

    def notes(original: Callable[..., Any]) -> Callable[..., Any]:
        def set_param_for_module(model: nn.Module, target_name: str, *args: Any, **kw: Any) -> Any:
            result = original(model, target_name, *args, **kw)
            note(model, target_name)
            return result

        return set_param_for_module

    yield SET_PARAMETER, notes
    yield WARM_UP, idle


def idle(_original: Callable[..., Any]) -> Callable[..., None]:
    """Return a function that takes any arguments and does nothing, to replace `_original`."""
    return lambda *_args, **_kwargs: None
