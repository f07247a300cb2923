"""Writing a state dict as numbered data files with an index. Needs torch."""

import json
from collections.abc import Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch

from tensor_dedup.errors import ConfigError, UnsupportedError
from tensor_dedup.formats.artifact import (
    CANONICAL,
    TreeHash,
    Verifier,
    describe,
    index_multihash,
    verification_name,
)
from tensor_dedup.formats.storage_graph import StorageGraph
from tensor_dedup.formats.tensor_index import (
    ALIGNMENT,
    Fields,
    IndexEntry,
    encode_index,
    encode_index_cbor,
)
from tensor_dedup.store.buffers import allocate
from tensor_dedup.store.errors import os_errors
from tensor_dedup.store.files import Files, RealFiles
from tensor_dedup.store.interchange.data_files import DataFiles, Stream, StreamingConfig
from tensor_dedup.store.interchange.folder import new_folder, write_file
from tensor_dedup.store.interchange.storages import HeldStorages, copy_into, hold

MAX_FILE_BYTES: Final = 10_000_000_000
_VIEW_STEP = 8 << 20


def save_dict(
    state_dict: Mapping[str, torch.Tensor],
    path: str | PathLike[str],
    streaming_config: Mapping[str, Any] | StreamingConfig | None = None,
    *,
    views: Mapping[str, Collection[str]] | None = None,
    fields: Fields = 6,
    max_file_bytes: int = MAX_FILE_BYTES,
    files: Files | None = None,
) -> dict[str, Any]:
    """Write tensors to a new folder, each storage once; return the descriptor.

    `path` is a folder that is empty or not there; it appears when all is durable, or not at all.
    `streaming_config`: num_buffers (4), buffer_size_mb (256), enable_async_write (True); memory is
    that of the buffers. `views` names selections of tensors that get a verification file of their
    own. `fields` is 6, or 5 for ServerlessLLM, which knows no storage offsets. `max_file_bytes`
    bounds each data file; `files` is the way to the disk (tests).

    The descriptor holds tensorcast's fields, and `storage_entries` and `tensor_aliases`, of which
    `rebuild_index` makes `tensor_index.json` again. Nobody may write the tensors meanwhile. Call it
    from one thread per folder. ConfigError, UnsupportedError, ExportTargetError, StoreError.
    """
    config = StreamingConfig.of(streaming_config)
    held = hold(state_dict)
    entries = held.graph.index_entries()
    _check(held.graph, entries, fields, views or {})
    target, door = Path(path).absolute(), files or RealFiles()
    with os_errors(target), new_folder(door, target) as folder:
        data = DataFiles(door, folder, max_file_bytes)
        hashes = _Hashes(max((e.offset + e.size for e in entries), default=0))
        _write_data(held, Stream(data, hashes.update, config, hashes.total))
        index = encode_index(entries, fields)
        descriptor = describe(index_multihash(index), hashes.tree.multihash(), hashes.total)
        descriptor |= held.graph.to_json()
        blobs = {
            "tensor_index.json": index,
            "tensor_index.cbor": encode_index_cbor(entries, fields),
            "artifact_descriptor.json": json.dumps(descriptor, indent=2).encode(),
            verification_name(CANONICAL): hashes.verifier.result().encode(),
        }
        for view, names in (views or {}).items():
            blobs[verification_name(view)] = _verify_view(held, view, names)
        for name, blob in blobs.items():
            write_file(door, folder / name, blob)
    return descriptor


class _Hashes:
    """What is computed of the data on its way. What fills up the last page is not part of it."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.tree = TreeHash()
        self.verifier = Verifier(total)
        self._left = total

    def update(self, view: memoryview) -> None:
        """Take the next bytes."""
        with view[: self._left] as part:
            self.tree.update(part)
            self.verifier.update(part)
            self._left -= part.nbytes


def _check(
    graph: StorageGraph,
    entries: Collection[IndexEntry],
    fields: Fields,
    views: Mapping[str, Collection[str]],
) -> None:
    for entry in entries:
        if fields == 5 and entry.storage_offset:
            raise UnsupportedError(
                f"{entry.name!r} begins {entry.storage_offset} elements into its storage, which 5 "
                "fields cannot say; save 6 fields, or a copy of the tensor",
                tensor=entry.name,
            )
    known = {alias.name for alias in graph.tensor_aliases}
    for view, names in views.items():
        missing = set(names) - known
        if missing or view == CANONICAL:
            what = f"has no tensor {min(missing)!r}" if missing else "needs a name"
            raise ConfigError(f"the view {view!r} {what}; name tensors of the state dict")
    if len({verification_name(view) for view in views}) != len(views):
        raise ConfigError(
            "two views would have one file name; use letters, digits, '.', '_' and '-' in their ids"
        )


def _write_data(held: HeldStorages, stream: Stream) -> None:
    try:
        for storage_id in held.graph.offsets():
            _copy(held.storages[storage_id], stream)
        stream.finish()
    finally:
        stream.close()


def _copy(storage: torch.Tensor, stream: Stream) -> None:
    done = 0
    while done < storage.nbytes:
        with stream.room() as room:
            copied = copy_into(room, storage, done)
        done += copied
        stream.commit(copied)
    stream.pad(-done % ALIGNMENT)


def _verify_view(held: HeldStorages, view: str, names: Collection[str]) -> bytes:
    """The verification file of a view: its storages laid out as if they were all there is."""
    graph = held.graph.select(list(names))
    offsets = graph.offsets()
    total = max((offsets[e.storage_id] + e.nbytes for e in graph.storage_entries), default=0)
    verifier = Verifier(total, view)
    buffer, at = allocate(_VIEW_STEP), 0
    for storage_id, offset in offsets.items():
        verifier.update(memoryview(bytes(offset - at)))
        storage, at = held.storages[storage_id], offset
        while at < offset + storage.nbytes:
            copied = copy_into(buffer, storage, at - offset)
            verifier.update(buffer[:copied])
            at += copied
    return verifier.result().encode()
