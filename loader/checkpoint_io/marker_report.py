"""The `marked` entries of a load report: how many of the tensors that markers name were shared.

A marker is a list, in a checkpoint or beside it, of tensors that are equal to those of a base.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensor_dedup.formats.markers import SIDECAR, in_files, in_header

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tensor_dedup.loader.checkpoint_io.sources import SourceFile, SourceTensor


def marked(
    files: Sequence[SourceFile], is_shared: Callable[[SourceTensor], bool]
) -> list[dict[str, Any]]:
    """Return a report entry for each marker in `files` and beside them.

    A marker is a list of tensors that are equal to those of a base model. The entry has the
    marker's `base` and `digest`, the number of `tensors` that the marker names, and how many of
    these are `shared`. `is_shared` returns whether a tensor is shared.
    """
    own = {name: tensor for file in files for name, tensor in file.tensors.items()}
    beside = in_files(dict.fromkeys(file.path.parent / SIDECAR for file in files))
    inside = [in_header(file.header) for file in files]
    return [
        {
            "base": marker.base,
            "digest": marker.digest,
            "tensors": len(marker.tensors),
            "shared": sum(name in own and is_shared(own[name]) for name in marker.tensors),
        }
        for marker in (*beside, *inside)
        if marker is not None
    ]
