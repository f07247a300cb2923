"""The weights of a stored checkpoint, where vLLM asks for files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.torch_dtypes import torch_dtype
from tensor_dedup.patches.vllm import weight_iterators

if TYPE_CHECKING:
    from tensor_dedup.loader.checkpoint_io.from_store import OpenCheckpoint
    from tensor_dedup.loader.checkpoint_io.sources import SourceFile
    from tensor_dedup.loader.checkpoint_io.stub_folder import Checkout
    from tensor_dedup.types import TensorSpec

Wanted = Callable[[str], bool]


def tensors(
    checkout: Checkout,
    opening: Callable[[], OpenCheckpoint],
    wanted: Wanted,
    *,
    subfolder: str | None,
    patterns: Sequence[str] | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every wanted tensor by name: deferred while a load of ours asks, else read from the store."""
    paths = weight_iterators.in_order(_paths(checkout, subfolder, patterns))
    open_files = weight_iterators.active()
    if open_files is not None:
        yield from open_files(paths, wanted)
        return
    with closing(opening()) as opened:
        for path in paths:
            file = opened.open(Path(path))
            for name in sorted(file.tensors):
                if wanted(name):
                    yield name, _read(file, file.tensors[name].spec)


def _paths(checkout: Checkout, subfolder: str | None, patterns: Sequence[str] | None) -> list[str]:
    if subfolder is not None:
        raise UnsupportedError(
            f"{checkout.url}: this model reads weights from the folder {subfolder!r} too, which a "
            "stored checkpoint does not give; export it and load the folder",
            url=checkout.url,
        )
    names = [
        n for n in checkout.weights if patterns is None or any(fnmatch(n, p) for p in patterns)
    ]
    return [str(Path(checkout.folder, name)) for name in names]


def _read(file: SourceFile, spec: TensorSpec) -> torch.Tensor:
    flat = torch.empty(spec.nbytes, dtype=torch.uint8)
    file.read_into(spec, flat.numpy().data)
    return flat.view(torch_dtype(spec.dtype)).reshape(spec.shape)
