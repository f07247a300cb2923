"""Loading of a state dict from a folder of numbered data files with an index. Needs torch.

The folder either lies on disk (ArtifactFolder) or was imported into a store (StoredArtifact).
"""

import hashlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Self, TypeAlias

import torch

from tensor_dedup.errors import (
    ChangedFileError,
    CheckpointNotFoundError,
    ConfigError,
    IntegrityError,
)
from tensor_dedup.formats.errors import (
    CheckpointFault,
    CheckpointFilesError,
    TensorIndexError,
    TensorIndexFault,
)
from tensor_dedup.formats.safetensors import MAX_HEADER_BYTES
from tensor_dedup.formats.serverless.artifact import (
    CANONICAL,
    HASH_LEAF_BYTES,
    ArtifactDescriptor,
    Verifier,
    index_multihash,
    multihash,
    parse_descriptor,
    parse_verification,
    tree_root,
    verification_name,
)
from tensor_dedup.formats.serverless.data_files import INDEX_NAME, data_files
from tensor_dedup.formats.serverless.storage_graph import StorageGraph, graph_of
from tensor_dedup.formats.serverless.tensor_index import (
    IndexEntry,
    StorageExtent,
    TensorIndex,
    check_data,
    check_same,
    parse_index,
    parse_index_cbor,
)
from tensor_dedup.store.buffers import allocate_all
from tensor_dedup.store.errors import os_errors
from tensor_dedup.store.files import Files, Handle, RealFiles
from tensor_dedup.store.format.manifests import Piece
from tensor_dedup.store.init import workers
from tensor_dedup.store.interchange.save import DATA_NAME
from tensor_dedup.store.interchange.storages import TORCH_DTYPES
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint

_DATA = re.compile(re.escape(DATA_NAME) + r"(0|[1-9][0-9]{0,5})")


class ArtifactFolder:
    """A folder on disk, open for reading: its index and descriptor, already checked, and its data.

    The data files are read as one range of `data_bytes`. Any thread may read. Close the folder, or
    use it as a context manager.
    """

    verified = False

    def __init__(self, files: Files, path: Path) -> None:
        """Open the folder at `path`.

        Raises:
            CheckpointNotFoundError: The folder has no index.
            FormatError: Index, descriptor and data contradict each other.
        """
        self.path = path
        self._files = files
        self._undo = ExitStack()
        self._starts: list[tuple[int, Handle]] = []
        self.data_bytes = 0
        index_path, blob = self.optional("tensor_index.json")
        self.index = self._index(index_path, blob)
        descriptor_path, text = self.optional("artifact_descriptor.json")
        self.descriptor = None if text is None else parse_descriptor(text, str(descriptor_path))
        if self.descriptor is not None and blob is not None:
            self._check_descriptor(descriptor_path, blob)
        try:
            self._open_data()
            check_data(self.index, self.data_bytes, str(path))
        except BaseException:
            self.close()
            raise

    def _index(self, path: Path, blob: bytes | None) -> TensorIndex:
        cbor_path, cbor = self.optional("tensor_index.cbor")
        index = None if blob is None else parse_index(blob, str(path))
        other = None if cbor is None else parse_index_cbor(cbor, str(cbor_path))
        if index is not None and other is not None:
            check_same(index, other)
        found = index or other
        if found is None:
            raise CheckpointNotFoundError(
                f"{path}: no such file; name a folder with a tensor_index.json", path=str(path)
            )
        return found

    def _check_descriptor(self, path: Path, blob: bytes) -> None:
        descriptor = self.descriptor
        if descriptor is None:
            return
        if descriptor.index_multihash != index_multihash(blob):
            raise TensorIndexError.at(
                TensorIndexFault.DESCRIPTOR, str(path), "it is about another index"
            )
        if descriptor.total_size != self.index.total_size:
            what = f"{descriptor.total_size} bytes, the index has {self.index.total_size}"
            raise TensorIndexError.at(TensorIndexFault.DESCRIPTOR, str(path), what)

    def _open_data(self) -> None:
        found = (_DATA.fullmatch(name) for name in self._files.listdir(self.path))
        numbers = sorted(int(match[1]) for match in found if match)
        if numbers != list(range(len(numbers))) or not numbers:
            what = f"there are data files {numbers[:8]}, which is not 0, 1, 2, ..."
            raise TensorIndexError.at(TensorIndexFault.DATA_FILES, str(self.path), what)
        for number in numbers:
            handle = self._open(self.path / f"{DATA_NAME}{number}")
            self._starts.append((self.data_bytes, handle))
            self.data_bytes += self._files.status_of(handle).size

    def _open(self, path: Path) -> Handle:
        handle = self._files.open(path, "read")
        self._undo.callback(self._files.close, handle)
        if self._files.status_of(handle).kind != "file":
            raise CheckpointFilesError.at(
                CheckpointFault.NOT_A_FILE, str(path), "not a regular file"
            )
        return handle

    def optional(self, name: str) -> tuple[Path, bytes | None]:
        """Return the path and the content of the small file `name`, which the folder may lack.

        The content is None if the file does not exist.
        """
        path = self.path / name
        try:
            handle = self._files.open(path, "read")
        except (FileNotFoundError, NotADirectoryError):
            return path, None
        try:
            status = self._files.status_of(handle)
            if status.kind != "file" or status.size > MAX_HEADER_BYTES:
                raise CheckpointFilesError.at(
                    CheckpointFault.NOT_A_FILE,
                    str(path),
                    f"not a file of {MAX_HEADER_BYTES} bytes at most",
                )
            blob = bytearray(status.size)
            return path, bytes(blob[: self._files.pread(handle, memoryview(blob), 0)])
        finally:
            self._files.close(handle)

    def read(self, view: memoryview, start: int) -> None:
        """Fill `view` with the data from offset `start`.

        Raises:
            ChangedFileError: A data file is now shorter than when the folder was opened.
        """
        done = 0
        ends = [at for at, _ in self._starts[1:]] + [self.data_bytes]
        for (at, handle), end in zip(self._starts, ends, strict=True):
            begin = start + done
            if not at <= begin < end or done == view.nbytes:
                continue
            with view[done : done + end - begin] as part:
                if self._files.pread(handle, part, begin - at) != part.nbytes:
                    raise ChangedFileError(
                        f"{handle.path}: it ends before {end - at} by now; load it again when "
                        "nobody writes it",
                        path=str(handle.path),
                    )
                done += part.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files. A second call has no effect."""
        self._undo.close()


class StoredArtifact:
    """A folder of data files that was imported into a store. Every byte read is verified.

    Any thread may read. Keep the checkpoint open while this object is in use; the object does not
    close it.
    """

    verified = True
    descriptor: ArtifactDescriptor | None = None

    def __init__(self, checkpoint: StoredCheckpoint) -> None:
        """Read the index from `checkpoint`.

        Raises:
            CheckpointNotFoundError: The checkpoint was not imported from a folder of this format.
            FormatError: Index and data contradict each other.
        """
        self.path = Path(checkpoint.name)
        self._checkpoint = checkpoint
        self._files = {file.path: file.pieces for file in checkpoint.files}
        _, blob = self.optional(INDEX_NAME)
        if blob is None:
            raise CheckpointNotFoundError(
                f"{checkpoint.name}: it has no {INDEX_NAME}; load it with load_tensors",
                path=checkpoint.name,
            )
        self.index = parse_index(blob, INDEX_NAME)
        self._pieces = [p for name in data_files(self._files).files for p in self._files[name]]
        self._starts: list[int] = []
        end = 0
        for piece in self._pieces:
            self._starts.append(end)
            end += piece.nbytes
        check_data(self.index, end, checkpoint.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing, because this object opened nothing."""

    def optional(self, name: str) -> tuple[Path, bytes | None]:
        """Return the path and the content of the small file `name`, which the folder may lack.

        The content is None if the file does not exist.
        """
        pieces = self._files.get(name)
        if pieces is None:
            return self.path / name, None
        return self.path / name, b"".join(map(self._whole, pieces))

    def _whole(self, piece: Piece) -> bytes:
        return bytes(self._checkpoint.read_piece(piece.digest, 0, piece.nbytes, piece.nbytes))

    def read(self, view: memoryview, start: int) -> None:
        """Fill `view` with the data from offset `start`, verified.

        Raises:
            CorruptTensorError, MissingObjectError: No intact copy of the bytes is in the store.
        """
        done, number = 0, max(0, bisect_right(self._starts, start) - 1)
        while done < view.nbytes:
            piece, at = self._pieces[number], start + done - self._starts[number]
            with view[done : done + max(0, piece.nbytes - at)] as part:
                self._checkpoint.read_piece_into(piece.digest, at, part, piece.nbytes)
                done += part.nbytes
            number += 1


_Folder: TypeAlias = ArtifactFolder | StoredArtifact


def load_dict(
    path: str | PathLike[str] | StoredCheckpoint,
    *,
    names: Collection[str] | None = None,
    view: str | None = None,
    verify: bool = True,
    files: Files | None = None,
) -> dict[str, torch.Tensor]:
    """Load the tensors in a folder by name, as CPU tensors. Safe from any thread.

    Tensors that shared a storage when they were saved share one again. `path` is a folder written
    by `save_dict`, tensorcast or ServerlessLLM, or an open checkpoint that was imported from such a
    folder. `names` selects tensors, and only their storages are read. If `save_dict` saved these
    names as a view, `view` can be the id of the view. `files` replaces the file system in tests.

    If `verify` is True, the data read from a folder is compared with checksums in the folder:

    - Data loaded with a `view` is compared with the verification file of that view.
    - Data loaded as a whole is compared with the SHA-256 in the descriptor. Without a descriptor,
      it is compared with `verification.json`.
    - Data selected by `names` without a `view` is not verified. Nor is data in folders of
      ServerlessLLM.

    Data from a store is always verified, whatever `verify` is.

    Raises:
        ConfigError: A name or a view does not exist, or `view` is given without `names`.
        CheckpointNotFoundError, FormatError: The folder has another format or is damaged.
        ChangedFileError: A file changed while it was read.
        IntegrityError: The data does not match its checksum.
        StoreError: The store or the disk failed.
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
        # Of this load: it may read a folder that belongs to no store.
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
        """Read one leaf of the data into its storages, and hash it while it is in the cache."""
        stop = min(start + HASH_LEAF_BYTES, self._folder.index.total_size)
        digest = hashlib.sha256()
        first = bisect_right(self._places, start) - 1
        for at, part in self._parts(max(0, first), start, stop):
            self._folder.read(part, at)
            digest.update(part)
        return digest.digest()

    def _parts(self, first: int, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        """Yield the memory for a range of the data, which no storage before the `first` reaches.

        What lies between storages gets some memory of its own.
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
        """Return the tensors as views of the storages."""
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
