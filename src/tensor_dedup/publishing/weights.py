"""The weights of a model under the names that its checkpoint has, and its config as files.

An engine finds weights by the names in the checkpoint, as `save_pretrained` of Transformers writes
them. In a training they may have others: tied weights have several, and a wrapped or converted
module has names of its own.
"""

import re
import sys
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tensor_dedup.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

# A part of the name of a tensor, by which only a module in a wrapper or with an adapter has it.
_OF_WRAPPERS: Final = re.compile(r"(^|\.)(_orig_mod|base_layer|lora_(A|B|embedding_[AB]))(\.|$)")


def checkpoint_weights(model: Any) -> "dict[str, torch.Tensor]":
    """Return the weights of `model` by their names in a checkpoint. They share its memory.

    `model` is a module or a mapping from names to tensors. The names of a mapping stay as they are;
    those that wrappers and adapters give are refused.
    Wrappers of data parallelism and of `torch.compile` are looked through. A model of Transformers
    gets the names that its `save_pretrained` writes. Of tied weights, one name is returned.

    Raises:
        UnsupportedError: The model has adapters beside its weights, is empty, or is neither a
            module nor a mapping to tensors.
    """
    import torch

    if isinstance(model, Mapping):
        wrong = [name for name, each in model.items() if not isinstance(each, torch.Tensor)]
        if wrong:
            what = f"{wrong[0]!r} is no tensor"
            raise UnsupportedError(f"a model as a mapping: {what}; pass weights by their names")
        weights = {str(name): tensor for name, tensor in model.items()}
        if not weights:
            raise UnsupportedError("a model as a mapping: it is empty; pass weights by their names")
        if wrapped := [name for name in weights if _OF_WRAPPERS.search(name)]:
            what = f"{min(wrapped)!r} is a name of a wrapper or adapter, which no checkpoint has"
            raise UnsupportedError(f"{what}; pass the module, or weights by their names")
        return weights
    module = unwrapped(model)
    if not isinstance(module, torch.nn.Module):
        what = f"a {type(model).__name__} has no weights to publish"
        raise UnsupportedError(f"{what}; pass a torch module, or weights by their names")
    if hasattr(module, "merge_and_unload") or getattr(module, "_hf_peft_config_loaded", False):
        what = "the model has adapters, which an engine would have to merge"
        raise UnsupportedError(f"{what}; publish a merged copy (merge_and_unload)")
    state = {
        name: tensor
        for name, tensor in module.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }
    if _is_pretrained(module):
        return _as_saved(module, state)
    return _untied(state)


def unwrapped(model: Any) -> Any:
    """Return the module within wrappers of data parallelism and of `torch.compile`."""
    import torch

    parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    while True:
        if isinstance(model, parallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def config_files(model: Any) -> dict[str, bytes]:
    """Return the config of a model of Transformers as files by name; of another one, nothing."""
    module = None if isinstance(model, Mapping) else unwrapped(model)
    if module is None or not _is_pretrained(module):
        return {}
    config = deepcopy(module.config)
    config.architectures = [type(module).__name__]
    config.dtype = str(module.dtype).removeprefix("torch.")
    parts = [config]
    if module.can_generate():
        parts.append(module.generation_config)
    with tempfile.TemporaryDirectory(prefix="tensor-dedup-") as folder:
        for part in parts:
            part.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _is_pretrained(module: Any) -> bool:
    """Whether it is a model of Transformers, which is not imported for that."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def _as_saved(module: Any, state: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """The weights as `save_pretrained` writes them: without tied ones, under the original names."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = module._keys_to_ignore_on_save or ()
    state = {name: tensor for name, tensor in state.items() if name not in ignored}
    untied = remove_tied_weights_from_state_dict(state, module)
    saved: dict[str, torch.Tensor] = revert_weight_conversion(module, untied)
    return saved


def _untied(state: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Of names for one tensor, the first."""
    found: dict[tuple[object, ...], str] = {}
    for name, tensor in state.items():
        place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        found.setdefault(place if tensor.numel() else (name,), name)
    return {name: state[name] for name in found.values()}
