"""Manifests: the files of a checkpoint, each a sequence of pieces named by digest. No I/O.

A piece is a tensor, or bytes that are kept verbatim: a safetensors header or a whole small file. A
file consists of its pieces, one after the other. The pieces of a checkpoint are listed in pages of
256, and the manifest lists its files and its pages. Manifests and pages are named by the digest of
their frame, which is their encoded form.

The tensors of a training step belong to no file. When a step is exported, its files and their
headers are generated from the names, dtypes and shapes in the manifest. The result is always the
same.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath, PurePosixPath

import msgspec
from msgspec import structs

from tensor_dedup.digest import digest
from tensor_dedup.formats.left_out import NotIndexed
from tensor_dedup.formats.safetensors import DTYPE_BITS
from tensor_dedup.store.errors import DamagedFileError
from tensor_dedup.store.format import frames
from tensor_dedup.store.format.names import check_path
from tensor_dedup.store.format.tables import DIGEST_BYTES

MANIFEST = b"mani"
PAGE = b"page"
PAGE_ENTRIES = 256
_ALIAS = "alias "
_FILE = "file "
_OPAQUE = "opaque "

# The files of a step, which an export synthesises.
WEIGHTS = "model.safetensors"
# In a folder of its own, where no engine looks for weights.
STATE = "training/state.safetensors"
STATE_MARK = "#"
# The note of a manifest that says which part of the tensors an engine loads.
PART = "weights"
RESERVED = frozenset({WEIGHTS, STATE})
# What safetensors keeps in its header beside the tensors.
METADATA = "__metadata__"
_ALIGNMENT = 8
_NAME_END = re.compile("[./]")


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A piece in a manifest: a tensor, or bytes that are kept verbatim.

    Only a tensor has a name, a dtype and a shape.
    """

    digest: bytes
    nbytes: int
    name: str | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


class FileEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A file in a manifest: its path, its size, and how many of the manifest's pieces it has.

    A tensor's name in the checkpoint is `prefix` followed by its name in the file.
    """

    path: str
    nbytes: int
    pieces: int
    prefix: str


class Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The manifest of a checkpoint: its files, the digests of its pages, totals, and notes.

    `pieces` is the number of pieces, and `nbytes` is the sum of their sizes. The pieces themselves
    are listed in the pages.
    """

    files: list[FileEntry]
    pages: list[bytes]
    pieces: int
    nbytes: int
    notes: dict[str, str]


class ManifestPage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A page of a manifest, which lists 256 of the manifest's pieces, or fewer in the last page."""

    pieces: list[Piece]


Objects = Mapping[str, bytes]


def build(
    files: Sequence[FileEntry],
    pieces: Sequence[Piece],
    notes: Mapping[str, str] | None = None,
) -> tuple[str, dict[str, bytes]]:
    """Build a manifest and its pages; return its name, and a dict of the encoded objects.

    The dict maps names to encoded bytes: first those of the pages, then that of the manifest.
    `notes` are those of an import, from `import_notes`.
    """
    objects: dict[str, bytes] = {}
    pages = []
    for start in range(0, len(pieces), PAGE_ENTRIES):
        name, blob = encode_page(pieces[start : start + PAGE_ENTRIES])
        pages.append(bytes.fromhex(name))
        objects[name] = blob
    nbytes = sum(piece.nbytes for piece in pieces)
    content = Manifest(list(files), pages, len(pieces), nbytes, dict(notes or {}))
    name, blob = encode_manifest(content)
    objects[name] = blob
    return name, objects


def import_notes(
    second_names: Mapping[str, str], counted: Mapping[str, str], opaque: Iterable[str]
) -> dict[str, str]:
    """Return the notes of an imported checkpoint.

    - `second_names` maps aliases, which are additional names of tensors, to the names under which
      the tensors are stored.
    - `counted` maps the names of tensors that several files have to the path of the file whose
      tensor counts.
    - `opaque` has the paths of files that only an import of all files keeps.
    """
    notes = {f"{_ALIAS}{alias}": name for alias, name in second_names.items()}
    notes |= {f"{_FILE}{name}": path for name, path in counted.items()}
    return notes | {f"{_OPAQUE}{path}": "" for path in opaque}


def check_built(manifest: str, objects: Objects, path: PurePath) -> None:
    """Check that the manifest called `manifest` and its pages can be decoded and agree.

    `objects` maps the names of the manifest and the pages to their frames. Errors name `path`.

    Raises:
        DamagedFileError: A frame is damaged, or manifest and pages contradict each other.
    """
    content = decode_manifest(objects[manifest], manifest, path)
    pages = (page.hex() for page in content.pages)
    pieces = [piece for page in pages for piece in decode_page(objects[page], page, path).pieces]
    check_pieces(content, pieces, path)


def check_object(name: str, blob: bytes, path: PurePath) -> None:
    """Check that `blob` is a valid manifest or page of a manifest, and has the digest `name`.

    Raises:
        DamagedFileError: The check failed; the error names `path`.
        NewerFormatError: A later version of this program wrote `blob`.
    """
    if frames.kind_of(blob) == MANIFEST:
        decode_manifest(blob, name, path)
    else:
        decode_page(blob, name, path)


def encode_page(pieces: Sequence[Piece]) -> tuple[str, bytes]:
    """Return the name and the frame of the page that lists `pieces`, at most PAGE_ENTRIES."""
    blob = frames.encode(PAGE, ManifestPage(list(pieces)))
    return digest(blob), blob


def encode_manifest(manifest: Manifest) -> tuple[str, bytes]:
    """Return the name and the frame of a manifest."""
    blob = frames.encode(MANIFEST, manifest)
    return digest(blob), blob


def decode_manifest(blob: bytes, name: str, path: PurePath) -> Manifest:
    """Decode and check the manifest `blob`, whose digest must be `name`.

    The check ensures that an export of the manifest writes no file outside its folder.

    Raises:
        DamagedFileError: The manifest is damaged; the error names `path`.
        NewerFormatError: A later version of this program wrote the manifest.
    """
    manifest = frames.decode(_named(blob, name, path), MANIFEST, Manifest, path)
    expected = -(-manifest.pieces // PAGE_ENTRIES)
    if len(manifest.pages) != expected or any(len(p) != DIGEST_BYTES for p in manifest.pages):
        raise DamagedFileError.at(path, f"{len(manifest.pages)} pages, {expected} expected")
    # Texts first: a million paths take half a minute.
    names = {file.path for file in manifest.files}
    paths = {check_path(name, path) for name in names} if len(names) == len(manifest.files) else ()
    within = {parent for file in paths for parent in file.parents}
    if len(paths) != len(manifest.files) or within.intersection(paths):
        raise DamagedFileError.at(path, "two of its files have one path")
    if any(file.pieces < 0 for file in manifest.files):
        raise DamagedFileError.at(path, "one of its files has fewer pieces than none")
    if sum(file.pieces for file in manifest.files) > manifest.pieces:
        raise DamagedFileError.at(path, "its files have more pieces than it has")
    return manifest


def aliases(manifest: Manifest) -> dict[str, str]:
    """Return the aliases in a manifest, which are additional names of tensors.

    Each alias is mapped to the name under which the tensor is stored.
    """
    notes = manifest.notes.items()
    return {key.removeprefix(_ALIAS): name for key, name in notes if key.startswith(_ALIAS)}


def counted_files(notes: Mapping[str, str]) -> dict[str, str]:
    """Return which file's tensor counts, by the name of each tensor that several files have.

    `notes` are those of a manifest. A file is given as its path.
    """
    return {key.removeprefix(_FILE): path for key, path in notes.items() if key.startswith(_FILE)}


def opaque_files(notes: Mapping[str, str]) -> frozenset[str]:
    """Return the paths of the files that only an import of all files keeps.

    `notes` are those of a manifest. The files come back in an export and are never read as weights.
    """
    return frozenset(key.removeprefix(_OPAQUE) for key in notes if key.startswith(_OPAQUE))


def decode_page(blob: bytes, name: str, path: PurePath) -> ManifestPage:
    """Decode and check the manifest page `blob`, whose digest must be `name`.

    Raises:
        DamagedFileError: The page is damaged; the error names `path`.
        NewerFormatError: A later version of this program wrote the page.
    """
    page = frames.decode(_named(blob, name, path), PAGE, ManifestPage, path)
    if len(page.pieces) > PAGE_ENTRIES:
        raise DamagedFileError.at(path, f"{len(page.pieces)} pieces, a page has {PAGE_ENTRIES}")
    for piece in page.pieces:
        named = piece.name is not None
        alike = named == (piece.dtype is not None) == (piece.shape is not None)
        if len(piece.digest) != DIGEST_BYTES or piece.nbytes < 0 or not alike:
            raise DamagedFileError.at(path, "one of its pieces contradicts itself")
    return page


def _named(blob: bytes, name: str, path: PurePath) -> bytes:
    if digest(blob) != name:
        raise DamagedFileError.at(path, "its bytes do not have the digest it is named by")
    return blob


def check_pieces(manifest: Manifest, pieces: Sequence[Piece], path: PurePath) -> None:
    """Check that the counts and sizes in `manifest` match `pieces`, all pieces of the manifest.

    Raises:
        DamagedFileError: A count or a size differs; the error names `path`.
    """
    if len(pieces) != manifest.pieces or sum(p.nbytes for p in pieces) != manifest.nbytes:
        raise DamagedFileError.at(path, f"{manifest.pieces} pieces expected, {len(pieces)} found")
    for file, held in by_file(manifest, pieces):
        if sum(piece.nbytes for piece in held) != file.nbytes:
            raise DamagedFileError.at(path, f"{file.path} is not {file.nbytes} bytes")


def by_file(
    manifest: Manifest, pieces: Sequence[Piece]
) -> Iterator[tuple[FileEntry, Sequence[Piece]]]:
    """Return an iterator over each file of `manifest` with its pieces.

    `pieces` are all pieces of the manifest. Pieces that belong to no file are left out.
    """
    return _cut(manifest.files, pieces)


def _cut(
    files: Sequence[FileEntry], pieces: Sequence[Piece]
) -> Iterator[tuple[FileEntry, Sequence[Piece]]]:
    at = 0
    for file in files:
        yield file, pieces[at : at + file.pieces]
        at += file.pieces


def loose(manifest: Manifest, pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Return the pieces of `manifest` that belong to no file: the tensors of a training step.

    `pieces` are all pieces of the manifest.
    """
    return pieces[sum(file.pieces for file in manifest.files) :]


def named_tensors(manifest: Manifest, pieces: Sequence[Piece]) -> Iterator[tuple[str, Piece]]:
    """Yield each tensor of the checkpoint with its full name, file by file, loose ones last.

    `pieces` are all pieces of the manifest. Where several files have a tensor of one name, only the
    one that counts is yielded.
    """
    counted = counted_files(manifest.notes)
    for file, held in by_file(manifest, pieces):
        for piece in held:
            if piece.name is not None:
                name = file.prefix + piece.name
                if not counted or counted.get(name, file.path) == file.path:
                    yield name, piece
    yield from ((piece.name, piece) for piece in loose(manifest, pieces) if piece.name is not None)


def not_indexed(
    files: Sequence[FileEntry], pieces: Sequence[Piece], counted: Mapping[str, str]
) -> tuple[NotIndexed, ...]:
    """Return the copies of tensors that do not count, by name and in the order of `files`.

    `pieces` are those of `files`, and `counted` is what `counted_files` returns.
    """
    if not counted:
        return ()
    found: dict[str, dict[str, object]] = {name: {} for name in counted}
    for file, held in _cut(files, pieces):
        for piece in held:
            if piece.name is not None and file.prefix + piece.name in counted:
                content = piece.dtype, piece.shape, piece.digest
                found[file.prefix + piece.name][file.path] = content
    return tuple(
        NotIndexed(name, path, content != held.get(counted[name]))
        for name, held in found.items()
        for path, content in held.items()
        if path != counted[name]
    )


@dataclass(frozen=True, slots=True)
class SynthesizedFile:
    """A safetensors file that an export generates. `pieces` are its tensors in file order."""

    path: str
    header: bytes
    pieces: tuple[Piece, ...]

    @property
    def head(self) -> Piece:
        """The header as a piece: its digest and its size."""
        return Piece(bytes.fromhex(digest(self.header)), len(self.header))

    @property
    def nbytes(self) -> int:
        """The size of the file in bytes."""
        return len(self.header) + sum(piece.nbytes for piece in self.pieces)


def synthesized_files(
    loose: Sequence[Piece], part: str, taken: Collection[str]
) -> Iterator[SynthesizedFile]:
    """Generate the safetensors files for `loose`, the tensors of a training step.

    The weights go to one file and all other tensors to another. A file without tensors is left out.
    The files avoid the paths in `taken`. A tensor is a weight if all of these are true:

    - Its name begins with `part` and a dot, or `part` is empty.
    - Its name does not begin with `#`, which marks training state.
    - The rest of its name, after `part` and the dot, is neither empty nor `__metadata__`.
    - safetensors knows its dtype.

    The file of weights has only the rest of each name. Tensors that safetensors has no dtype for
    are written as U8.
    """
    start = f"{part}." if part else ""
    weights = [
        structs.replace(piece, name=piece.name.removeprefix(start))
        for piece in loose
        if piece.name is not None and _is_weight(piece.name, piece.dtype, start)
    ]
    state = [
        piece
        for piece in loose
        if piece.name is not None and not _is_weight(piece.name, piece.dtype, start)
    ]
    for path, pieces in ((WEIGHTS, weights), (STATE, state)):
        if pieces:
            # Wide elements first: each then lies at a multiple of its size.
            ordered = sorted(pieces, key=lambda piece: -_bits(piece))
            yield SynthesizedFile(free_path(path, taken), _header(ordered), tuple(ordered))


def free_path(path: str, taken: Collection[str]) -> str:
    """Return `path`, or a similar path if it collides with a path in `taken`.

    The first name in the path gets underscores: `a.bin` becomes `a_.bin`, for example. Two paths
    collide if they are equal, or if one of them is a folder in the other path.
    """
    others = [PurePosixPath(other) for other in taken]
    while any(_collide(PurePosixPath(path), other) for other in others):
        end = _NAME_END.search(path)
        at = end.start() if end is not None else len(path)
        path = f"{path[:at]}_{path[at:]}"
    return path


def _collide(one: PurePosixPath, other: PurePosixPath) -> bool:
    return one == other or one in other.parents or other in one.parents


def _is_weight(name: str, dtype: str | None, start: str) -> bool:
    fit = name.startswith(start) and not name.startswith(STATE_MARK) and name != start
    return fit and dtype in DTYPE_BITS and name != f"{start}{METADATA}"


def _bits(piece: Piece) -> int:
    return DTYPE_BITS.get(piece.dtype or "", 8)


def _header(pieces: Sequence[Piece]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for piece in pieces:
        known = piece.dtype in DTYPE_BITS
        entries[piece.name or ""] = {
            "dtype": piece.dtype if known else "U8",
            "shape": list(piece.shape or ()) if known else [piece.nbytes],
            "data_offsets": [at, at + piece.nbytes],
        }
        at += piece.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
