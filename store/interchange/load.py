"""Reading a folder of data files with an index back to tensors. Needs torch."""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TypeAlias

import torch

from tensor_dedup.errors import ConfigError, IntegrityError
from tensor_dedup.formats.artifact import (
    CANONICAL,
    HASH_LEAF_BYTES,
    Verifier,
    multihash,
    parse_verification,
    tree_root,
    verification_name,
)
from tensor_dedup.formats.storage_graph import StorageGraph, graph_of
from tensor_dedup.formats.tensor_index import IndexEntry, StorageExtent
from tensor_dedup.store.buffers import allocate_all
from tensor_dedup.store.errors import os_errors
from tensor_dedup.store.files import Files, RealFiles
from tensor_dedup.store.init import workers
from tensor_dedup.store.interchange.artifact_folder import ArtifactFolder
from tensor_dedup.store.interchange.storages import TORCH_DTYPES
from tensor_dedup.store.interchange.stored_artifact import StoredArtifact
from tensor_dedup.store.reading.reader import StoredCheckpoint

_Folder: TypeAlias = ArtifactFolder | StoredArtifact


def load_dict(
    path: str | PathLike[str] | StoredCheckpoint,
    *,
    names: Collection[str] | None = None,
    view: str | None = None,
    verify: bool = True,
    files: Files | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of a folder, by name, on the CPU; views of one storage share it again.

    Reads folders of `save_dict`, tensorcast and ServerlessLLM, and such a folder from a store: then
    `path` is the open checkpoint, and every byte is compared with its digest. `names` selects some,
    and only their storages are read. What is read is compared with what the folder says of it: all
    of it with the descriptor's SHA-256 where there is one, else with `verification.json`; a `view`
    (the id under which `names` was saved) with its own file, never with that of the whole. A
    selection without a `view` is compared with nothing, and so is a folder of ServerlessLLM.
    `verify=False` compares nothing. Any thread. CheckpointNotFoundError, FormatError,
    ChangedFileError, IntegrityError, StoreError.
    """
    if view is not None and names is None:
        raise ConfigError(f"load the view {view!r} with the names of its tensors")
    with _opened(path, files or RealFiles()) as folder:
        loading = _Loading(folder, names)
        loading.read(hashed=verify and names is None and folder.descriptor is not None)
        if verify and (view is not None or not folder.verified):
            loading.check(view)
        return loading.tensors()


@contextmanager
def _opened(path: str | PathLike[str] | StoredCheckpoint, files: Files) -> Iterator[_Folder]:
    if isinstance(path, StoredCheckpoint):
        with os_errors(Path(path.name)), StoredArtifact(path) as stored:
            yield stored
    else:
        with os_errors(Path(path)), ArtifactFolder(files, Path(path)) as folder:
            yield folder


class _Loading:
    """One load: the storages that are wanted, in memory."""

    def __init__(
        self, folder: ArtifactFolder | StoredArtifact, names: Collection[str] | None
    ) -> None:
        self._folder = folder
        self._all = names is None
        chosen = None if names is None else set(names)
        self._entries = [e for e in folder.index.entries if chosen is None or e.name in chosen]
        missing = (chosen or set()) - {entry.name for entry in self._entries}
        if missing:
            raise ConfigError(f"{folder.path}: no tensor {min(missing)!r}; see its index")
        wanted = {entry.offset for entry in self._entries}
        self._storages = [s for s in folder.index.storages if s.offset in wanted]
        sizes = [storage.nbytes for storage in self._storages]
        self._places = [storage.offset for storage in self._storages]
        self._memory = dict(zip(self._places, allocate_all(sizes), strict=True))

    def read(self, *, hashed: bool) -> None:
        """Fill the storages; with `hashed`, compare all bytes with the descriptor's multihash."""
        total = self._folder.index.total_size
        with ThreadPoolExecutor(workers(), "tensor-dedup-load") as pool:
            if not hashed:
                list(pool.map(self._fill, self._storages))
                return
            leaves = list(pool.map(self._leaf, range(0, total, HASH_LEAF_BYTES)))
        descriptor, found = self._folder.descriptor, multihash(tree_root(leaves))
        if descriptor is not None and descriptor.data_multihash != found:
            raise self._wrong(f"its data hashes to {found}, not {descriptor.data_multihash}")

    def _fill(self, storage: StorageExtent) -> None:
        self._folder.read(self._memory[storage.offset], storage.offset)

    def _leaf(self, start: int) -> bytes:
        """Read one piece of the data into its storages, and hash it while it is in the cache."""
        stop = min(start + HASH_LEAF_BYTES, self._folder.index.total_size)
        digest = hashlib.sha256()
        first = bisect_right(self._places, start) - 1
        for at, part in self._parts(max(0, first), start, stop):
            self._folder.read(part, at)
            digest.update(part)
        return digest.digest()

    def _parts(self, first: int, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        """The memory of a range of the data, which no storage before the `first` reaches.

        For what lies between storages, some of its own.
        """
        at = start
        last = bisect_left(self._places, stop)
        for storage in self._storages[first:last]:
            begin, end = max(storage.offset, at), min(storage.end, stop)
            if begin >= end:
                continue
            if begin > at:
                yield at, memoryview(bytearray(begin - at))
            memory = self._memory[storage.offset]
            yield begin, memory[begin - storage.offset : end - storage.offset]
            at = end
        if at < stop:
            yield at, memoryview(bytearray(stop - at))

    def check(self, view: str | None) -> None:
        """Compare with a verification file, where nothing better was compared."""
        if view is None and (not self._all or self._folder.descriptor is not None):
            return
        path, blob = self._folder.optional(verification_name(view or CANONICAL))
        if blob is None:
            if view is not None:
                raise ConfigError(f"{path}: the view {view!r} was not saved; load without view")
            return
        expected = parse_verification(blob, str(path), view or CANONICAL)
        graph = graph_of(self._folder.index).select([entry.name for entry in self._entries])
        found = self._verifier(graph, view).result()
        if found != expected:
            raise self._wrong(f"its bytes are not those {path.name} is about")

    def _verifier(self, graph: StorageGraph, view: str | None) -> Verifier:
        places = {f"s{n}": s.offset for n, s in enumerate(self._folder.index.storages)}
        layout = [
            (offset, self._memory[places[storage_id]])
            for storage_id, offset in graph.offsets().items()
        ]
        if view is None:
            layout = [(s.offset, self._memory[s.offset]) for s in self._storages]
        total = max((offset + memory.nbytes for offset, memory in layout), default=0)
        verifier, at = Verifier(total, view or CANONICAL), 0
        for offset, memory in layout:
            verifier.update(memoryview(bytes(offset - at)))
            verifier.update(memory)
            at = offset + memory.nbytes
        return verifier

    def _wrong(self, what: str) -> IntegrityError:
        path = self._folder.path
        return IntegrityError(f"{path}: {what}; copy or save this folder again", path=str(path))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors, as views of the storages."""
        storages = {
            offset: torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
            if memory.nbytes
            else torch.empty(0).untyped_storage()
            for offset, memory in self._memory.items()
        }
        return {entry.name: _view(entry, storages) for entry in self._entries}


def _view(entry: IndexEntry, storages: Mapping[int, torch.UntypedStorage]) -> torch.Tensor:
    empty = torch.empty(0, dtype=TORCH_DTYPES[entry.dtype])
    return empty.set_(storages[entry.offset], entry.storage_offset, entry.shape, entry.stride)
