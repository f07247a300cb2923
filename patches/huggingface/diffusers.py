"""The functions of Diffusers that are replaced during a load.

A seam describes one of these functions, with the signature that was recorded for it. A function
with another signature is not replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from tensor_dedup.patches.huggingface.transformers import Note, Wrap, idle
from tensor_dedup.seams import Seam

if TYPE_CHECKING:
    from torch import nn

_VERSIONS: Final = "diffusers 0.42 with accelerate 1.15"

SET_TENSOR: Final = Seam(
    "diffusers.models.model_loading_utils:set_module_tensor_to_device",
    "weights are shared when their model is complete, with a higher peak",
    (
        "accelerate's function, as files of every kind are loaded with it: a tensor becomes a "
        "parameter here, after the cast; sharing it at once keeps a model from being there twice"
    ),
    (
        "(module, tensor_name, device, value=None, dtype=None, fp16_statistics=None, "
        "tied_params_map=None, non_blocking=False, clear_cache=True)"
    ),
    versions=(_VERSIONS,),
)
WARM_UPS: Final = tuple(
    Seam(
        f"{module}:_caching_allocator_warmup",
        "the allocator of a device is warmed up for whole models",
        "reserves device memory for half a model, before it is known which weights are there",
        "(model, expanded_device_map, dtype, hf_quantizer)",
        versions=(_VERSIONS,),
    )
    for module in ("diffusers.models.modeling_utils", "diffusers.loaders.single_file_model")
)


def replacements(note: Note) -> Iterator[tuple[Seam, Wrap]]:
    """Yield pairs: a function of Diffusers to replace, and the function that wraps it.

    A Seam names the function to replace. Where Diffusers sets a tensor, the wrapper also calls
    `note(model, name)`. The functions that warm up the device allocator are replaced by one that
    does nothing, because they would reserve memory for weights that may be shared.
    """

    def notes(original: Callable[..., Any]) -> Callable[..., Any]:
        def set_tensor(module: nn.Module, tensor_name: str, *args: Any, **kwargs: Any) -> Any:
            result = original(module, tensor_name, *args, **kwargs)
            note(module, tensor_name)
            return result

        return set_tensor

    yield SET_TENSOR, notes
    for seam in WARM_UPS:
        yield seam, idle
