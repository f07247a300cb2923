"""Read the tensors of a checkpoint from a store.

- `FromDisk` is for a folder of weights files. If the store cannot return the bytes of a tensor
  intact, they are read from the folder's files.
- `FromStore` is for a checkpoint that exists in the store only. If the store cannot return the
  bytes of a tensor intact, the load fails.

The store verifies the bytes that it returns, leaf by leaf (2 MiB).
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from tensor_dedup.digest import LEAF_BYTES, combine, leaf_places
from tensor_dedup.errors import ChangedFileError, FormatError, StoreError
from tensor_dedup.formats.safetensors import parse_header
from tensor_dedup.loader.checkpoint_io.hints import FileIdentity, HintIndex
from tensor_dedup.loader.checkpoint_io.sources import SourceFile, SourceTensor
from tensor_dedup.store.store import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from tensor_dedup.config import TensorDedupConfig
    from tensor_dedup.loader.checkpoint_io.sources import Read, Reread
    from tensor_dedup.loader.checkpoint_io.stub_folder import Checkout
    from tensor_dedup.store.reading.checkpoint import StoredCheckpoint
    from tensor_dedup.store.reading.checkpoint import StoredFile as Stored
    from tensor_dedup.store.reading.reader import StoredPieces
    from tensor_dedup.types import TensorSpec

_log = logging.getLogger(__name__)


def store_behind(config: TensorDedupConfig) -> LocalStore | None:
    """Open the store that `config` names, and return it, or None.

    Returns None if `config` names no store, or if the store cannot be opened. The failure to open
    it is logged, and the load then reads only the checkpoint's files.
    """
    if config.store is None:
        return None
    try:
        return LocalStore.open(config.store_folder, create=False)
    except (StoreError, OSError) as error:
        # With store_writes this load makes it.
        level = logging.DEBUG if config.store_writes else logging.WARNING
        _log.log(level, "nothing is read from a store: %s", str(error))
        return None


class OpenCheckpoint(Protocol):
    """An interface to the weights files of a checkpoint, for one load.

    Call `close` after the last read.
    """

    @property
    def bytes_from_store(self) -> int:
        """The number of bytes read from a store so far."""

    def open(self, path: Path) -> SourceFile:
        """Open the weights file at `path` and return it; the caller closes it.

        Raises:
            FormatError: The file's header is not valid, or a stored checkpoint has no file at
                `path`.
            OSError: A file on disk cannot be opened.
            StoreError: The store cannot read the file's header.
        """

    def close(self) -> None:
        """Close the store's files, but not the files that `open` returned."""


class CheckpointFiles:
    """A reader of tensors from a store, by digest, for one load. Safe from any thread.

    The store is opened at the first `fill`. If the store fails, the failure is logged, and `fill`
    returns None.
    """

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._expected: set[str] = set()
        self._open: list[StoredPieces] = []
        self.bytes_read = 0

    def expect(self, digests: Iterable[str]) -> None:
        """Announce the `digests` of tensors that `fill` may be asked for.

        `fill` finds only announced tensors. Later calls add more digests.
        """
        with self._lock:
            self._expected.update(digests)

    def fill(self, digest: str, nbytes: int, offset: int, piece: memoryview) -> bytes | None:
        """Fill `piece` with verified bytes of the tensor `digest`, from byte `offset` on.

        `offset` is counted from the beginning of the tensor, and `nbytes` is the tensor's whole
        size. Returns one of these values:

        - The concatenated digests of the leaves in the range, if it consists of whole leaves
          (2 MiB).
        - b"", if the range does not consist of whole leaves.
        - None, if the store does not have the tensor or cannot read it. The caller then reads the
          tensor from the checkpoint's file.
        """
        name = bytes.fromhex(digest)
        try:
            pieces = next((each for each in self._opened() if name in each), None)
            if pieces is None:
                return None
            leaves = pieces.read_piece_into(name, offset, piece, nbytes)
        except (StoreError, OSError, sqlite3.Error, RuntimeError) as error:
            # As text: whoever keeps log records must not keep the frames, and memory, of a load.
            _log.warning("%s; the checkpoint's own file is read instead", str(error))
            return None
        with self._lock:
            self.bytes_read += piece.nbytes
        return leaves

    def _opened(self) -> list[StoredPieces]:
        with self._lock:
            # Once for all files as a rule: their digests are known before anything is read.
            expected, self._expected = self._expected, set()
            if expected:
                self._open.append(self._store.open_pieces(expected))
            return list(self._open)

    def close(self) -> None:
        """Close the store's files. No `fill` may be in progress.

        Closing twice has no effect.
        """
        for pieces in self._open:
            pieces.close()
        self._open.clear()


class StoreBackedSource(SourceFile):
    """A weights file on disk whose tensors are read from a store if the store has them."""

    reads_any_range = False

    def __init__(
        self,
        path: Path,
        hints: HintIndex,
        algorithm: str,
        stored_files: CheckpointFiles,
        *,
        trust: bool,
    ) -> None:
        super().__init__(path, hints, algorithm, trust=trust)
        self._stored_files = stored_files
        # Only what is known before it is read: nothing but its digest says what the store has.
        self._known = {s.spec.name: s.digest for s in self.tensors.values() if s.digest}
        stored_files.expect(self._known.values())

    def has_parts(self, source: SourceTensor) -> bool:
        """Return whether `part` may be called for `source`: not if the store may have it."""
        return source.spec.name not in self._known

    def read_into(self, spec: TensorSpec, piece: memoryview, offset: int = 0) -> bytes | None:
        """Fill `piece` with the tensor's bytes from byte `offset` on. Safe from any thread.

        The store is asked first if the tensor's digest was known when the file was opened. Returns
        one of these values:

        - None, if the bytes were read from the file.
        - The concatenated digests of the leaves in the range, if the store returned the bytes and
          the range consists of whole leaves (2 MiB).
        - b"", if the store returned the bytes and the range does not consist of whole leaves.

        Raises:
            FormatError: The file was truncated.
            UnreadableFileError: Reading the file failed.
        """
        digest = self._known.get(spec.name)
        leaves = None
        if digest is not None:
            leaves = self._stored_files.fill(digest, spec.nbytes, offset, piece)
        return super().read_into(spec, piece, offset) if leaves is None else leaves


class StoredSource(SourceFile):
    """A weights file of a stored checkpoint, read from the store.

    The object has no file descriptor. Offsets are those in the file that an export of the
    checkpoint would write.
    """

    reads_any_range = False

    def __init__(
        self,
        store: LocalStore,
        checkpoint: StoredCheckpoint,
        file: Stored,
        path: Path,
        *,
        trust: bool,
    ) -> None:
        """Read the header; with `trust`, take the digests of the tensors from the manifest.

        Without `trust`, the digest of a tensor is known only after the tensor has been read.
        """
        self.path = path
        self._fd = -1
        self._hints = None
        self.hashed = {}
        self.identity = FileIdentity(0, 0, file.nbytes, 0, 0)
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._store, self._checkpoint = store, checkpoint
        self._digests: dict[int, bytes] = {}
        at = 0
        for piece in file.pieces:
            if piece.name is not None:
                self._digests[at] = piece.digest
            at += piece.nbytes
        self.header = parse_header(_header(checkpoint, file), file.nbytes, str(path))
        self.tensors = {spec.name: self._source(spec, trust) for spec in self.header.tensors}

    def has_parts(self, source: SourceTensor) -> bool:
        """Return False: the store knows and verifies whole tensors."""
        return False

    def _source(self, spec: TensorSpec, trust: bool) -> SourceTensor:
        if not spec.nbytes or not trust:
            return SourceTensor(self, spec, None, trust)
        digest = self._digests[spec.start]
        return SourceTensor(self, spec, digest.hex(), trust, self._leaves(digest, spec.nbytes))

    def _leaves(self, digest: bytes, nbytes: int) -> tuple[str, ...]:
        """Return the digests that the leaves of a tensor have by themselves."""
        record = next(iter(self._checkpoint.records(digest)), None)
        if nbytes <= LEAF_BYTES or record is None or record.nbytes != nbytes:
            return ()
        places = leaf_places(0, nbytes)
        return tuple(
            combine(size, [leaf]) for (_, size), leaf in zip(places, record.leaf_list, strict=True)
        )

    def read_into(self, spec: TensorSpec, piece: memoryview, offset: int = 0) -> bytes | None:
        """Fill `piece` with verified bytes of the tensor, from byte `offset` on.

        Returns the concatenated digests of the leaves in the range, or b"" if the range does not
        consist of whole leaves (2 MiB). For an empty `piece`, the result is None.

        Raises:
            StoreError: The store cannot read the bytes, or they are damaged.
        """
        if not piece.nbytes:
            return None
        name = self._digests[spec.start]
        leaves = self._checkpoint.read_piece_into(name, offset, piece, spec.nbytes)
        with self._lock:
            self.bytes_read += piece.nbytes
        return leaves

    def read_range(self, start: int, nbytes: int) -> bytes:
        """Return up to `nbytes` verified bytes from file offset `start`.

        `start` must lie in a tensor. The result ends at the end of that tensor at the latest.
        """
        spec = next(s for s in self.header.tensors if s.start <= start < s.start + s.nbytes)
        data = bytearray(min(nbytes, spec.start + spec.nbytes - start))
        self.read_into(spec, memoryview(data), start - spec.start)
        return bytes(data)

    def reread(self, spec: TensorSpec) -> Reread | None:
        """Return a function that opens the tensor in the store again, also after `close`.

            with file.reread(spec)() as read:
                data = read(offset, nbytes)

        Reading raises StoreError if the store no longer has the tensor.
        """
        store, digest, nbytes = self._store, self._digests[spec.start], spec.nbytes

        @contextmanager
        def opened() -> Iterator[Read]:
            with store.open_pieces([digest.hex()]) as pieces:
                yield lambda at, size: bytes(pieces.read_piece(digest, at, at + size, nbytes))

        return opened

    def check_unchanged(self) -> None:
        """Do nothing, because stored files never change and all reads are verified."""

    def tells_changes(self, since_ns: int | None = None) -> bool:
        """Return True: stored bytes have a name that is their digest."""
        return True

    def remember(self) -> None:
        """Do nothing: no hints are needed, because the manifest has the digests."""

    def forget(self) -> None:
        """Do nothing, because a stored file has no hints."""


class FromDisk:
    """The weights files of a checkpoint on disk.

    With `store`, a tensor is read from that store if the store has it and a hint gives its digest.
    All other tensors are read from the files.
    """

    def __init__(
        self, hints: HintIndex, algorithm: str, *, trust: bool, store: LocalStore | None = None
    ) -> None:
        self._hints, self._algorithm, self._trust = hints, algorithm, trust
        self._stored_files = CheckpointFiles(store) if store is not None else None

    @property
    def bytes_from_store(self) -> int:
        """The number of bytes read from the store."""
        return self._stored_files.bytes_read if self._stored_files is not None else 0

    def open(self, path: Path) -> SourceFile:
        """Open the weights file at `path` and return it; the caller closes it.

        Raises:
            FormatError: The file's header is not valid.
            OSError: The file cannot be opened.
        """
        if self._stored_files is None:
            return SourceFile(path, self._hints, self._algorithm, trust=self._trust)
        return StoreBackedSource(
            path, self._hints, self._algorithm, self._stored_files, trust=self._trust
        )

    def close(self) -> None:
        """Close the store's files, if a store is used."""
        if self._stored_files is not None:
            self._stored_files.close()


class FromStore:
    """The weights files of a stored checkpoint, whose tensors are read from the store.

    `checkout` describes the checkpoint and its stub folder. Files are opened by their paths in that
    folder, although it holds no weights.
    """

    def __init__(self, store: LocalStore, checkout: Checkout, *, trust: bool) -> None:
        """Open the stored checkpoint that `checkout` describes.

        With `trust`, the digests of tensors are taken from the manifest.

        Raises:
            StoreError: The checkpoint cannot be read.
            ChangedFileError: The name of the checkpoint now refers to another checkpoint.
        """
        self._store, self._checkout, self._trust = store, checkout, trust
        self._files: list[StoredSource] = []
        self._checkpoint = store.checkpoint(checkout.name)
        if self._checkpoint.manifest != checkout.manifest:
            self._checkpoint.close()
            raise ChangedFileError(
                f"{checkout.url}: it was replaced since this engine was configured; "
                "make the engine anew",
                path=checkout.url,
            )

    @property
    def bytes_from_store(self) -> int:
        """The number of bytes read so far, all of them from the store."""
        return sum(file.bytes_read for file in self._files)

    def open(self, path: Path) -> SourceFile:
        """Open the stored weights file whose path in the stub folder is `path`, and return it.

        Raises:
            FormatError: The checkpoint has no file at `path`.
            StoreError: The store cannot read the file's header.
        """
        name = path.relative_to(self._checkout.folder).as_posix()
        for file in self._checkpoint.files:
            if file.path == name:
                opened = StoredSource(self._store, self._checkpoint, file, path, trust=self._trust)
                self._files.append(opened)
                return opened
        raise FormatError(
            f"{self._checkout.url} has no file {name!r}; see `tensor-dedup show`", path=str(path)
        )

    def close(self) -> None:
        """Close the stored checkpoint."""
        self._checkpoint.close()


def _header(checkpoint: StoredCheckpoint, file: Stored) -> bytes:
    piece = file.pieces[0]
    return bytes(checkpoint.read_piece(piece.digest, 0, piece.nbytes, piece.nbytes))
