"""What the markers of a checkpoint say, beside what its load found to be shared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensor_dedup.formats.markers import SIDECAR, in_files, in_header

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tensor_dedup.loader.checkpoint_io.sources import SourceFile, SourceTensor


def marked(
    files: Sequence[SourceFile], is_shared: Callable[[SourceTensor], bool]
) -> list[dict[str, Any]]:
    """Return an entry for each marker in these files and beside them, for the report.

    A load hashes what it does not know, with or without a marker; so a marker that is wrong shows
    as fewer shared tensors than it names, and has no other effect.
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
