"""Wrappers of vLLM's weight iterators, which yield deferred tensors during a load.

Deferred tensors have a shape but no data. `DefaultModelLoader` calls the wrappers after it has
chosen, filtered and downloaded the files, so vLLM still does all of that. If no load with this
package is active in the thread, for example in a reload, the original iterators run.
`stored_tensors` yields the tensors of checkpoints in a store.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.model_executor.model_loader import default_loader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.model_executor.model_loader.weight_utils import _natural_sort_key

from tensor_dedup.loader.checkpoint_io.frozen_layers import taken_plainly
from tensor_dedup.loader.deferred.trace import UntraceableError
from tensor_dedup.loader.torch_dtypes import torch_dtype

if TYPE_CHECKING:
    from tensor_dedup.loader.checkpoint_io.from_store import OpenCheckpoint
    from tensor_dedup.loader.checkpoint_io.frozen_layers import FrozenLayers
    from tensor_dedup.loader.checkpoint_io.sources import SourceFile
    from tensor_dedup.types import TensorSpec

Deferred = Iterator[tuple[str, torch.Tensor]]
OpenFiles = Callable[[list[str], Callable[[str], bool]], Deferred]

Wanted = Callable[[str], bool]
_active: ContextVar[OpenFiles | None] = ContextVar("tensor_dedup_open_files", default=None)


@contextmanager
def deferring(open_files: OpenFiles) -> Iterator[None]:
    """Context manager: while it is active, vLLM's weight iterators yield deferred tensors.

    A deferred tensor has a shape but no data. The iterators get these tensors from
    `open_files(paths, wanted)`, where `wanted(name)` says which ones to yield. Only the current
    thread is affected.
    """
    token = _active.set(open_files)
    try:
        yield
    finally:
        _active.reset(token)


def active() -> OpenFiles | None:
    """Return the argument of the `deferring` block that is active, or None if none is active."""
    return _active.get()


def _safetensors(
    original: Callable[..., Any],
    hf_weights_files: list[str],
    use_tqdm_on_load: bool,
    safetensors_load_strategy: str | None = None,
    local_expert_ids: set[int] | None = None,
    *args: Any,
    **options: Any,
) -> Any:
    open_files = _active.get()
    if open_files is None:
        return original(
            hf_weights_files,
            use_tqdm_on_load,
            safetensors_load_strategy,
            local_expert_ids,
            *args,
            **options,
        )
    if safetensors_load_strategy == "torchao":
        raise UntraceableError("torchao tensors are rebuilt from several tensors while reading")
    return open_files(
        in_order(hf_weights_files), lambda name: not should_skip_weight(name, local_expert_ids)
    )


def _whole(
    original: Callable[..., Any], hf_weights_files: list[str], *args: Any, **kwargs: Any
) -> Any:
    """Read all of safetensors files, which vLLM reads with several threads, or by a library."""
    open_files = _active.get()
    if open_files is None:
        return original(hf_weights_files, *args, **kwargs)
    return open_files(in_order(hf_weights_files), _every)


def _pickled(
    original: Callable[..., Any], hf_weights_files: list[str], *args: Any, **kwargs: Any
) -> Any:
    """Read files of torch.save in the order given, as vLLM does, and yield all of their tensors."""
    open_files = _active.get()
    if open_files is None:
        return original(hf_weights_files, *args, **kwargs)
    return open_files(list(hf_weights_files), _every)


def _cached(
    original: Callable[..., Any],
    model_name_or_path: str,
    cache_dir: str | None,
    hf_folder: str,
    hf_weights_files: list[str],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Read files of torch.save themselves, not the copies that vLLM makes of them in `np/`."""
    open_files = _active.get()
    if open_files is None:
        named = (model_name_or_path, cache_dir, hf_folder, hf_weights_files)
        return original(*named, *args, **kwargs)
    return open_files(list(hf_weights_files), _every)


def _every(_name: str) -> bool:
    return True


def in_order(files: Iterable[str]) -> list[str]:
    """Return `files` of a checkpoint in the order in which vLLM reads them."""
    return sorted(files, key=_natural_sort_key)


# By the name that `DefaultModelLoader` calls it by.
REPLACEMENTS: Final[Mapping[str, Callable[..., Any]]] = {
    "safetensors_weights_iterator": _safetensors,
    "multi_thread_safetensors_weights_iterator": _whole,
    "fastsafetensors_weights_iterator": _whole,
    "instanttensor_weights_iterator": _whole,
    "pt_weights_iterator": _pickled,
    "multi_thread_pt_weights_iterator": _pickled,
    "np_cache_weights_iterator": _cached,
}


@functools.cache
def install() -> None:
    """Wrap vLLM's weight iterators. Idempotent.

    Iterators that the installed vLLM lacks are left out.
    """
    for name, replacement in REPLACEMENTS.items():
        original = getattr(default_loader, name, None)
        if original is not None:
            wrapper = functools.wraps(original)(functools.partial(replacement, original))
            setattr(default_loader, name, wrapper)


def stored_tensors(
    paths: list[str], opening: Callable[[], OpenCheckpoint], wanted: Wanted
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of a stored checkpoint with its name, if `wanted(name)` is True.

    `paths` are the checkpoint's weight files in its stub folder. Inside a `deferring` block, the
    tensors are deferred: they have a shape but no data. Otherwise `opening()` opens the checkpoint,
    and the tensors are read from the store.
    """
    open_files = active()
    if open_files is not None:
        yield from open_files(paths, wanted)
        return
    with closing(opening()) as opened:
        for path in paths:
            file = opened.open(Path(path))
            for name in sorted(file.tensors):
                if wanted(name):
                    yield name, _read_stored(file, file.tensors[name].spec)


def with_frozen_layers(
    found: Iterable[tuple[str, torch.Tensor]],
    frozen: FrozenLayers,
    paths: Sequence[str],
    opening: Callable[[], OpenCheckpoint],
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield the tensors in `found`, but read those in frozen layers from the base model.

    Frozen layers are the layers that `frozen_base` takes from another checkpoint. `opening()` opens
    the model's own checkpoint, whose weight files are `paths`. Do not call this function in a load
    with deferred tensors.
    """
    with taken_plainly(frozen, [Path(path) for path in paths], opening()) as instead:
        for name, tensor in found:
            source = instead(name)
            yield name, tensor if source is None else _read_stored(source.file, source.spec)


def _read_stored(file: SourceFile, spec: TensorSpec) -> torch.Tensor:
    flat = torch.empty(spec.nbytes, dtype=torch.uint8)
    file.read_into(spec, flat.numpy().data)
    return flat.view(torch_dtype(spec.dtype)).reshape(spec.shape)
