"""The header of a GGUF file (version 2 or 3, little-endian), read from an untrusted file.

File := `GGUF`, u32 version, u64 number of tensors, u64 number of metadata entries, the entries
(key, type, value), the tensors (name, dimensions, type, offset), padding, data. Offsets count from
the start of the data. The data and every tensor are aligned to `general.alignment` or, if the file
does not give it, to 32 bytes.

A tensor's dimensions are reversed, so that the last dimension is the contiguous one, as in every
other format. Types that are plain numbers have their safetensors names (`F32`, `BF16`, `I8`). Their
bytes are the same, so equal tensors of both formats are found to be equal. All others have names
such as `gguf:Q4_K`.

This module is stricter than common readers:

- tensors and padding must cover the data exactly, in any order;
- a key or a name may appear only once;
- a boolean is 0 or 1;
- lists nest at most MAX_NESTING deep.

Every number is compared with the file's size before memory is allocated for it.
"""

import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tensor_dedup.dtypes import BITS
from tensor_dedup.formats.errors import GgufError, GgufFault, shorten
from tensor_dedup.formats.files import opened
from tensor_dedup.types import TensorSpec

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 1024
MAX_NESTING = 4
DEFAULT_ALIGNMENT = 32
# Vocabularies make headers of some 10 MB; the largest known is far below this.
MAX_HEADER_BYTES = 100_000_000
_ALIGNMENT = "general.alignment"
_LIMIT = 1 << 63
_CHUNK = 1 << 20
_LENGTH = struct.Struct("<Q")
# The least a metadata entry and a tensor take: empty names, a value of one byte, no dimensions.
_LEAST_ENTRY = 8 + 4 + 1
_LEAST_TENSOR = 8 + 4 + 4 + 8
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
)
Value = int | float | str
Fetch = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The layout of a tensor type: `block_elements` adjacent elements take `block_bytes` bytes."""

    dtype: str
    block_elements: int
    block_bytes: int


# Numbers, names and sizes are those of the `gguf` package (GGMLQuantizationType, GGML_QUANT_SIZES),
# which a test compares with these tables; at run time the package, and the numpy it needs, is not.

# Plain little-endian numbers, the same bytes as in safetensors, and so called the same.
_PLAIN = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
_BLOCKS = {
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

DTYPES: Mapping[int, BlockLayout] = MappingProxyType(
    {
        **{kind: BlockLayout(name, 1, BITS[name] // 8) for kind, name in _PLAIN.items()},
        **{kind: BlockLayout(f"gguf:{name}", *sizes) for kind, (name, *sizes) in _BLOCKS.items()},
    }
)
# Numbers that were given once: nobody can say any more how large such a tensor is.
REMOVED: Mapping[int, str] = MappingProxyType(
    {
        4: "Q4_2",
        5: "Q4_3",
        31: "Q4_0_4_4",
        32: "Q4_0_4_8",
        33: "Q4_0_8_8",
        36: "IQ4_NL_4_4",
        37: "IQ4_NL_4_8",
        38: "IQ4_NL_8_8",
    }
)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The checked header of a GGUF file.

    `header_bytes` is the offset of the data. `metadata` maps keys to numbers and strings; entries
    whose value is a list are left out. `tensors` are ordered by offset, with only padding between
    them.
    """

    path: str
    file_size: int
    header_bytes: int
    version: int
    alignment: int
    metadata: Mapping[str, Value]
    tensors: tuple[TensorSpec, ...]


def read_header(path: str | os.PathLike[str], *, fd: int | None = None) -> GgufHeader:
    """Read and check the header of a GGUF file without reading tensor data.

    If the open descriptor `fd` is given, the file is read through it, and `path` is used in error
    messages only. The position of `fd` does not change.

    Raises:
        CheckpointNotFoundError: The file cannot be opened.
        FormatError: The file is malformed.
        ChangedFileError: The file became shorter while it was read.
    """
    with opened(path, fd) as file:
        return _parse(file.read, file.size, file.path)


def parse_header(blob: bytes, file_size: int, path: str) -> GgufHeader:
    """Parse and check a header in memory, without I/O.

    `blob` begins at the beginning of the file and must hold the whole header. `file_size` is the
    size of the whole file in bytes; `path` is used in error messages only. FormatError is the
    only error that a malformed header can cause.

    Raises:
        FormatError: The file is malformed.
    """
    return _parse(lambda start, nbytes: blob[start : start + nbytes], file_size, path)


class Cursor:
    """A read position in a GGUF header. The header is fetched in chunks as the position advances.

    A method that would read beyond the end of the file, or beyond MAX_HEADER_BYTES, raises
    GgufError instead.
    """

    def __init__(self, fetch: Fetch, file_size: int, path: str) -> None:
        self._fetch = fetch
        self._blob = b""
        self.size = file_size
        self.path = path
        self.at = 0

    def take(self, nbytes: int) -> bytes:
        """Return the next `nbytes` bytes and advance past them."""
        start = self.skip(nbytes)
        return self._blob[start : self.at]

    def skip(self, nbytes: int) -> int:
        """Advance past the next `nbytes` bytes, and return their offset."""
        start, end = self.at, self.at + nbytes
        if end > len(self._blob):
            self._load(end)
        self.at = end
        return start

    def _load(self, end: int) -> None:
        if end > self.size:
            raise GgufError.at(
                GgufFault.TRUNCATED,
                self.path,
                f"the header goes on to {end}, the file ends at {self.size}",
                offset=end,
                file_size=self.size,
            )
        if end > MAX_HEADER_BYTES:
            raise GgufError.at(
                GgufFault.HEADER_TOO_LARGE,
                self.path,
                f"a header beyond {MAX_HEADER_BYTES} bytes",
                limit=MAX_HEADER_BYTES,
            )
        # Doubling, or a header of many chunks would be copied once for each.
        wanted = min(max(end, 2 * len(self._blob), _CHUNK), self.size, MAX_HEADER_BYTES)
        have = len(self._blob)
        self._blob += self._fetch(have, wanted - have)

    def check_count(self, count: int, least: int, what: str) -> None:
        """Check that the rest of the file can hold `count` entries of at least `least` bytes each.

        `what` names the entries in the error.
        """
        if count * least > self.size - self.at:
            raise GgufError.at(
                GgufFault.COUNT,
                self.path,
                f"{count} {what} in the {self.size - self.at} bytes from {self.at}",
                count=count,
                left=self.size - self.at,
            )

    def number(self, code: str) -> int:
        """Read a little-endian number; `code` is the `struct` format character of its type."""
        found: int = struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]
        return found

    def length(self, what: str) -> int:
        """Read a u64 string length, and check that the file has that many bytes left.

        `what` names the string in the error.
        """
        found = self.number("Q")
        if found > self.size - self.at:
            raise self._too_long(what, found)
        return found

    def _too_long(self, what: str, length: int) -> GgufError:
        return GgufError.at(
            GgufFault.LENGTH,
            self.path,
            f"{what} of {length} bytes at {self.at}, the file ends at {self.size}",
            length=length,
            offset=self.at,
        )

    def text(self, what: str) -> str:
        """Read a string: its length and UTF-8 bytes. `what` names it in errors."""
        start = self.at
        raw = self.take(self.length(what))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise GgufError.at(
                GgufFault.TEXT, self.path, f"{what} at {start} is not UTF-8", offset=start
            ) from error

    def skip_texts(self, count: int) -> None:
        """Advance past `count` strings, which need not be UTF-8, such as those of a vocabulary."""
        for _ in range(count):
            if self.at + 8 > len(self._blob):
                self._load(self.at + 8)
            (length,) = _LENGTH.unpack_from(self._blob, self.at)
            self.at += 8
            if length > self.size - self.at:
                raise self._too_long("a text in a list", length)
            self.at += length


def _parse(fetch: Fetch, file_size: int, path: str) -> GgufHeader:
    cursor = Cursor(fetch, file_size, path)
    version = _version(cursor)
    tensor_count, entry_count = struct.unpack("<QQ", cursor.take(16))
    cursor.check_count(tensor_count, _LEAST_TENSOR, "tensors")
    cursor.check_count(entry_count, _LEAST_ENTRY, "metadata entries")
    metadata = _metadata(cursor, entry_count)
    alignment = int(metadata.get(_ALIGNMENT, DEFAULT_ALIGNMENT))
    cursor.check_count(tensor_count, _LEAST_TENSOR, "tensors")
    entries = _tensors(cursor, tensor_count)
    start = _padded(cursor.at, alignment)
    specs = _placed(entries, start, alignment, path)
    _check_cover(specs, start, alignment, file_size, path)
    header_bytes = min(start, file_size)
    return GgufHeader(
        path, file_size, header_bytes, version, alignment, MappingProxyType(metadata), specs
    )


def _version(cursor: Cursor) -> int:
    if cursor.size < 8 or (head := cursor.take(8))[:4] != MAGIC:
        raise GgufError.at(
            GgufFault.MAGIC, cursor.path, "it does not begin as a GGUF file", file_size=cursor.size
        )
    version = int.from_bytes(head[4:], "little")
    if version not in VERSIONS:
        if version and version & 0xFFFF == 0:
            raise GgufError.at(GgufFault.BIG_ENDIAN, cursor.path, "the file is big-endian")
        raise GgufError.at(
            GgufFault.VERSION,
            cursor.path,
            f"version {version} of the format, this version reads 2 and 3",
            version=version,
        )
    return version


def _metadata(cursor: Cursor, count: int) -> dict[str, Value]:
    found: dict[str, Value] = {}
    seen: set[str] = set()
    for _ in range(count):
        key = cursor.text("a key")
        if key in seen:
            raise GgufError.at(
                GgufFault.DUPLICATE_KEY,
                cursor.path,
                f"the key {shorten(key)!r} appears twice",
                key=shorten(key),
            )
        seen.add(key)
        kind = cursor.number("I")
        if key == _ALIGNMENT:
            found[key] = _alignment(cursor, kind)
        elif (value := _value(cursor, key, kind)) is not None:
            found[key] = value
    return found


def _alignment(cursor: Cursor, kind: int) -> int:
    if kind != _UINT32:
        raise GgufError.at(
            GgufFault.ALIGNMENT,
            cursor.path,
            f"{_ALIGNMENT} has the type {kind}, not {_UINT32} (uint32)",
            kind=kind,
        )
    alignment = cursor.number("I")
    if alignment.bit_count() != 1:
        raise GgufError.at(
            GgufFault.ALIGNMENT,
            cursor.path,
            f"{_ALIGNMENT} is {alignment}, no power of two",
            alignment=alignment,
        )
    return alignment


def _value(cursor: Cursor, key: str, kind: int) -> Value | None:
    """Return the value of a metadata entry, or None for a list."""
    if kind == _STRING:
        raw = cursor.take(cursor.length(f"the value of {shorten(key)!r}"))
        return raw.decode("utf-8", "replace")
    if kind == _ARRAY:
        _skip_list(cursor, key, 1)
        return None
    start = cursor.at
    value = cursor.number(_scalar(cursor, key, kind))
    if kind == _BOOL:
        _check_bools(cursor, key, start)
    return value


def _scalar(cursor: Cursor, key: str, kind: int) -> str:
    if kind not in _SCALARS:
        raise GgufError.at(
            GgufFault.VALUE_TYPE,
            cursor.path,
            f"the key {shorten(key)!r} has the unknown type {kind}",
            key=shorten(key),
            kind=kind,
        )
    return _SCALARS[kind]


def _skip_list(cursor: Cursor, key: str, depth: int) -> None:
    if depth > MAX_NESTING:
        raise GgufError.at(
            GgufFault.NESTING,
            cursor.path,
            f"the key {shorten(key)!r} nests lists deeper than {MAX_NESTING}",
            key=shorten(key),
        )
    kind, count = cursor.number("I"), cursor.number("Q")
    if kind == _STRING:
        _check_list(cursor, key, count, 8)
        cursor.skip_texts(count)
    elif kind == _ARRAY:
        _check_list(cursor, key, count, 4 + 8)
        for _ in range(count):
            _skip_list(cursor, key, depth + 1)
    else:
        size = struct.calcsize(_scalar(cursor, key, kind))
        _check_list(cursor, key, count, size)
        start = cursor.skip(count * size)
        if kind == _BOOL:
            _check_bools(cursor, key, start)


def _check_list(cursor: Cursor, key: str, count: int, least: int) -> None:
    if count * least > cursor.size - cursor.at:
        raise GgufError.at(
            GgufFault.LENGTH,
            cursor.path,
            f"the key {shorten(key)!r} lists {count} values at {cursor.at}, the file ends at "
            f"{cursor.size}",
            key=shorten(key),
            length=count,
            offset=cursor.at,
        )


def _check_bools(cursor: Cursor, key: str, start: int) -> None:
    cursor.at, end = start, cursor.at
    if cursor.take(end - start).strip(b"\0\1"):
        raise GgufError.at(
            GgufFault.BOOL,
            cursor.path,
            f"the key {shorten(key)!r} has a truth value that is neither 0 nor 1",
            key=shorten(key),
        )


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor as the header has it: its offset is that from the start of the data."""

    name: str
    layout: BlockLayout
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def _tensors(cursor: Cursor, count: int) -> list[_Entry]:
    entries: dict[str, _Entry] = {}
    for _ in range(count):
        entry = _tensor(cursor)
        if entry.name in entries:
            raise GgufError.at(
                GgufFault.DUPLICATE_TENSOR, cursor.path, "two tensors have this name", entry.name
            )
        entries[entry.name] = entry
    return list(entries.values())


def _tensor(cursor: Cursor) -> _Entry:
    name = cursor.text("a tensor's name")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise GgufError.at(
            GgufFault.NAME,
            cursor.path,
            f"a name of more than {MAX_NAME_BYTES} bytes",
            name,
            limit=MAX_NAME_BYTES,
        )
    dimensions = cursor.number("I")
    if dimensions > MAX_DIMENSIONS:
        raise GgufError.at(
            GgufFault.DIMENSIONS,
            cursor.path,
            f"{dimensions} dimensions, the format has at most {MAX_DIMENSIONS}",
            name,
            dimensions=dimensions,
        )
    sizes = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions))
    layout = _layout(cursor, name, cursor.number("I"))
    offset = cursor.number("Q")
    nbytes = _nbytes(name, layout, sizes, cursor.path)
    return _Entry(name, layout, tuple(reversed(sizes)), offset, nbytes)


def _layout(cursor: Cursor, name: str, kind: int) -> BlockLayout:
    if kind in DTYPES:
        return DTYPES[kind]
    what = (
        f"its type {kind} ({REMOVED[kind]}) is not used any more"
        if kind in REMOVED
        else f"its type {kind} is unknown"
    )
    raise GgufError.at(GgufFault.TENSOR_TYPE, cursor.path, what, name, type=kind)


def _nbytes(name: str, layout: BlockLayout, sizes: tuple[int, ...], path: str) -> int:
    elements = 1
    for size in sizes:
        elements *= size
        # Each one, so that a late 0 does not undo an overflow.
        if elements >= _LIMIT or size >= _LIMIT:
            raise GgufError.at(
                GgufFault.OVERFLOW,
                path,
                f"the dimensions {sizes} do not fit 63 bits",
                name,
                sizes=sizes,
            )
    row = sizes[0] if sizes else 1
    if row % layout.block_elements:
        raise GgufError.at(
            GgufFault.BLOCK,
            path,
            f"rows of {row}, but {layout.dtype} has blocks of {layout.block_elements}",
            name,
            row=row,
            block=layout.block_elements,
        )
    nbytes = elements // layout.block_elements * layout.block_bytes
    if nbytes >= _LIMIT:
        raise GgufError.at(GgufFault.OVERFLOW, path, f"{nbytes} bytes do not fit 63 bits", name)
    return nbytes


def _padded(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _placed(entries: list[_Entry], start: int, alignment: int, path: str) -> tuple[TensorSpec, ...]:
    for entry in entries:
        if entry.offset % alignment:
            raise GgufError.at(
                GgufFault.MISALIGNED,
                path,
                f"its offset {entry.offset} is no multiple of {alignment}",
                entry.name,
                offset=entry.offset,
                alignment=alignment,
            )
    ordered = sorted(entries, key=lambda entry: (entry.offset, entry.nbytes))
    return tuple(
        TensorSpec(e.name, e.layout.dtype, e.shape, start + e.offset, e.nbytes) for e in ordered
    )


def _check_cover(
    specs: tuple[TensorSpec, ...], start: int, alignment: int, file_size: int, path: str
) -> None:
    """Sorted, the tensors and their padding must cover the data: no second format hides there."""
    expected, before = start, "the header"
    for spec in specs:
        if spec.start != expected:
            fault = GgufFault.OVERLAP if spec.start < expected else GgufFault.HOLE
            word = "goes" if spec.start < expected else "ends"
            raise GgufError.at(
                fault,
                path,
                f"begins at {spec.start - start}, but {before} {word} with its padding "
                f"to {expected - start}",
                spec.name,
                begins=spec.start - start,
                expected=expected - start,
            )
        end = spec.start + spec.nbytes
        if end > file_size:
            raise GgufError.at(
                GgufFault.BEYOND_FILE,
                path,
                f"ends at {end}, the file at {file_size}",
                spec.name,
                ends=end,
                file_size=file_size,
            )
        expected, before = _padded(end, alignment), repr(shorten(spec.name))
    # The padding behind the last one, or behind a header without tensors, may be missing.
    if file_size > expected:
        raise GgufError.at(
            GgufFault.TRAILING_BYTES,
            path,
            f"{file_size - expected} bytes after the last tensor belong to none",
            trailing=file_size - expected,
        )
