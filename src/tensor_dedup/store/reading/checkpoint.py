"""A stored checkpoint, open for reading: its tensors by name, and its files."""

from collections.abc import ItemsView, Iterator, KeysView, Sequence, ValuesView
from dataclasses import dataclass, replace

from tensor_dedup.store.codecs.parts import leaf_bytes
from tensor_dedup.store.errors import BadRangeError, UnknownTensorError
from tensor_dedup.store.format.manifests import (
    PART,
    Manifest,
    Piece,
    aliases,
    by_file,
    counted_files,
    loose,
    named_tensors,
    not_indexed,
    opaque_files,
    synthesized_files,
)
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.reader import StoredPieces


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a stored checkpoint. `digest` is 64 hex digits.

    If `alias_of` is not None, `name` is an additional name of the tensor called `alias_of`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: str
    alias_of: str | None = None


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in a stored checkpoint, as an export writes it.

    A tensor's name in the checkpoint is `prefix` followed by its name in the file. An `opaque` file
    is one that only an import of all files keeps: it is never read as weights or configuration.
    """

    path: str
    nbytes: int
    pieces: tuple[Piece, ...]
    prefix: str = ""
    opaque: bool = False


class StoredCheckpoint(StoredPieces):
    """A stored checkpoint, open for reading: its tensors by name, and its files.

    It works like a mapping from names to StoredTensor (`in`, `[]`, `len`, `keys()`, `values()`,
    `items()`), with two exceptions: iteration yields the tensors, not their names, and `in` also
    accepts a digest (32 bytes). The order is that of the files. `not_indexed` has the copies of
    tensors in files that the index does not name for them.

    Any thread may read, but no forked child. The checkpoint stays readable while `gc` runs. Close
    the checkpoint, or leave its `with` statement, only when no read is running any more.
    """

    def __init__(
        self,
        objects: Objects,
        index: StoreIndex,
        name: str,
        found: tuple[str, Manifest, Sequence[Piece]] | None = None,
    ) -> None:
        """Open the checkpoint `name`. Call it inside `with locks.session(...):`.

        If the checkpoint is in another store or a remote, `found` has the name of its manifest, the
        manifest, and its pieces.

        Raises:
            UnknownNameError: No checkpoint has this name.
            MissingObjectError, DamagedFileError: The reference, the manifest or one of its pages is
                missing or damaged.
        """
        if found is None:
            manifest = objects.ref(name)
            content = objects.manifest(manifest)
            found = manifest, content, objects.pieces(manifest, content)
        self.manifest, content, pieces = found
        self.notes = content.notes
        held = list(by_file(content, pieces))
        free, self._made = loose(content, pieces), dict[bytes, bytes]()
        opaque = opaque_files(content.notes)
        self.files = (
            *(
                StoredFile(file.path, file.nbytes, tuple(part), file.prefix, file.path in opaque)
                for file, part in held
            ),
            *self._make_files(free, [file.path for file in content.files]),
        )
        self._counted = counted_files(content.notes)
        self.not_indexed = not_indexed(content.files, pieces, self._counted)
        self._tensors = {
            name: _tensor(name, piece) for name, piece in named_tensors(content, pieces)
        }
        for alias, name_ in aliases(content).items():
            if name_ in self._tensors and alias not in self._tensors:
                self._tensors[alias] = replace(self._tensors[name_], name=alias, alias_of=name_)
        super().__init__(objects, index, {piece.digest for piece in pieces if piece.nbytes}, name)

    def _make_files(self, free: Sequence[Piece], taken: Sequence[str]) -> Iterator[StoredFile]:
        for made in synthesized_files(free, self.notes.get(PART, ""), taken):
            self._made[made.head.digest] = made.header
            yield StoredFile(made.path, made.nbytes, (made.head, *made.pieces))

    def read_piece(self, digest: bytes, start: int, stop: int, nbytes: int) -> bytearray:
        made = self._made.get(digest)
        if made is not None:  # the header of a file that is nowhere
            return bytearray(made[start:stop])
        return super().read_piece(digest, start, stop, nbytes)

    def counts(self, file: StoredFile, name: str) -> bool:
        """Return whether the tensor called `name` in `file` is the checkpoint's tensor.

        Otherwise the index names another file for it, and it is one of `not_indexed`.
        """
        return self._counted.get(file.prefix + name, file.path) == file.path

    def __iter__(self) -> Iterator[StoredTensor]:
        return iter(self._tensors.values())

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, wanted: object) -> bool:
        """Return whether there is a tensor of this name or, if `wanted` is bytes, such a piece.

        The bytes are the digest of the piece.
        """
        return wanted in self._tensors if isinstance(wanted, str) else super().__contains__(wanted)

    def __repr__(self) -> str:
        root, state = str(self._objects.layout.root), "" if self._open else ", closed"
        counts = f"tensors={len(self)}, files={len(self.files)}, nbytes={self.nbytes}"
        return f"StoredCheckpoint({self.name!r} of {root!r}, {counts}{state})"

    def keys(self) -> KeysView[str]:
        """Return the tensors' names, in the order of the files."""
        return self._tensors.keys()

    def values(self) -> ValuesView[StoredTensor]:
        """Return the tensors, in the order of the files."""
        return self._tensors.values()

    def items(self) -> ItemsView[str, StoredTensor]:
        """Return the tensors with their names, in the order of the files."""
        return self._tensors.items()

    def __getitem__(self, name: str) -> StoredTensor:
        """Return the tensor called `name`.

        Raises:
            UnknownTensorError: The checkpoint has no tensor of this name.
        """
        try:
            return self._tensors[name]
        except KeyError:
            raise UnknownTensorError.at(self.name, f"no tensor {name!r}", tensor=name) from None

    @property
    def nbytes(self) -> int:
        """The size in bytes of all files: headers, tensors and small files."""
        return sum(file.nbytes for file in self.files)

    def read(self, tensor: StoredTensor | str) -> bytearray:
        """Return all bytes of a tensor, verified.

        Raises:
            CorruptTensorError, MissingObjectError: No intact copy of the bytes is in the store.
            UnknownTensorError: The checkpoint has no tensor of this name.
            ClosedCheckpointError: The checkpoint was closed.
        """
        wanted = self[tensor] if isinstance(tensor, str) else tensor
        return self.read_piece(bytes.fromhex(wanted.digest), 0, wanted.nbytes, wanted.nbytes)

    def read_range(self, tensor: StoredTensor | str, start: int, stop: int) -> bytearray:
        """Return the bytes from `start` to `stop` of a tensor, verified.

        All leaves (2 MiB each) that the range touches are read as a whole. Raises the errors of
        `read`, too.

        Raises:
            BadRangeError: The range lies outside the tensor.
        """
        wanted = self[tensor] if isinstance(tensor, str) else tensor
        if not 0 <= start <= stop <= wanted.nbytes:
            raise BadRangeError(
                f"{self.name}: tensor {wanted.name!r}: bytes {start} to {stop} of {wanted.nbytes}; "
                f"give 0 <= start <= stop <= {wanted.nbytes}",
                start=start,
                stop=stop,
                nbytes=wanted.nbytes,
            )
        return self.read_piece(bytes.fromhex(wanted.digest), start, stop, wanted.nbytes)

    def stored(self, tensor: StoredTensor) -> tuple[str, int, str | None]:
        """Return how a tensor is stored: the codec, the bytes on disk, and the digest of its base.

        If the tensor is encoded against another piece, that piece is its base. Otherwise the digest
        is None. Leaves that are stored as separate pieces count in full, even if other tensors use
        them. If the store does not hold the tensor, the codec is "" and the size is 0.
        """
        records = self.records(bytes.fromhex(tensor.digest))
        if not records:
            return "", 0, None
        best = min(records, key=lambda record: record.stored)
        stored = best.stored + sum(leaf_bytes(number, best.nbytes) for number in best.parts)
        return best.codec_name, stored, None if best.base is None else best.base.hex()

    def _names_of(self, digest: bytes) -> list[str]:
        return [t.name for t in self._tensors.values() if t.digest == digest.hex()]


def _tensor(name: str, piece: Piece) -> StoredTensor:
    # A page that was decoded gives a dtype and a shape to every piece with a name.
    return StoredTensor(
        name, piece.dtype or "", piece.shape or (), piece.nbytes, piece.digest.hex()
    )
