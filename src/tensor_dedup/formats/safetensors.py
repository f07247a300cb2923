"""The header of a safetensors file, read from an untrusted file.

File := u64le(n), n bytes of UTF-8 JSON that begin with `{`, data. The JSON maps each tensor's name
to its dtype, shape and data_offsets (begin, end: from the start of the data); `__metadata__` maps
text to text. Sorted by offsets the tensors cover the data without gap or overlap.

This module accepts what the safetensors library (0.8) accepts, except for the following. They are
refused because two readers may see two different checkpoints in them, or none at all:

- a key that appears twice in any object (the library takes the last one);
- anything before the `{` (the format forbids it, the library skips white space);
- a tensor's entry written as a list, a dtype written as {"F32": null} (a quirk of its JSON reader);
- a header with more braces, brackets or commas than a million tensors need.

Every number is compared with the file's size before memory is allocated for it.
"""

import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensor_dedup.dtypes import BITS, SAFETENSORS
from tensor_dedup.formats.errors import (
    JsonFault,
    JsonTextError,
    SafetensorsError,
    SafetensorsFault,
    shorten,
)
from tensor_dedup.formats.files import opened
from tensor_dedup.formats.json import MAX_DEPTH, decode_object, depth_of
from tensor_dedup.types import TensorSpec

MAX_HEADER_BYTES = 100_000_000
DTYPE_BITS: Mapping[str, int] = {name: bits for name, bits in BITS.items() if name in SAFETENSORS}

_LENGTH_BYTES = 8
_U64_LIMIT = 1 << 64
_ENTRY_DEPTH = 2


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The checked header of a safetensors file.

    `header_bytes` includes the 8 bytes of the length, so it is the offset of the data. `tensors`
    are ordered by offset and cover the data without gaps.
    """

    path: str
    file_size: int
    header_bytes: int
    metadata: Mapping[str, str]
    tensors: tuple[TensorSpec, ...]


def read_header(path: str | os.PathLike[str], *, fd: int | None = None) -> SafetensorsHeader:
    """Read and check the header of a safetensors file without reading tensor data.

    If the open descriptor `fd` is given, the file is read through it, and `path` is used in error
    messages only. The position of `fd` does not change.

    Raises:
        CheckpointNotFoundError: The file cannot be opened.
        FormatError: The file is malformed, or its header is longer than MAX_HEADER_BYTES.
        ChangedFileError: The file became shorter while it was read.
    """
    with opened(path, fd) as file:
        prefix = file.read(0, _LENGTH_BYTES) if file.size >= _LENGTH_BYTES else b""
        length = _header_length(prefix, file.size, file.path)
        return parse_header(prefix + file.read(_LENGTH_BYTES, length), file.size, file.path)


def parse_header(prefix_and_json: bytes, file_size: int, path: str) -> SafetensorsHeader:
    """Parse and check a header in memory, without I/O.

    `prefix_and_json` has the 8 bytes of the length and the JSON. `file_size` is the size of the
    whole file in bytes; `path` is used in error messages only. FormatError is the only error that a
    malformed header can cause.

    Raises:
        FormatError: The file is malformed.
    """
    length = _header_length(prefix_and_json[:_LENGTH_BYTES], file_size, path)
    blob = prefix_and_json[_LENGTH_BYTES : _LENGTH_BYTES + length]
    if len(blob) < length:
        raise SafetensorsError.at(
            SafetensorsFault.HEADER_TRUNCATED,
            path,
            f"the header has {len(blob)} of its {length} bytes",
            length=length,
            got=len(blob),
        )
    entries = decode_object(blob, path)
    if blob[:1] != b"{":
        raise SafetensorsError.at(
            SafetensorsFault.HEADER_START,
            path,
            f"the header begins with {blob[:1]!r}, not with '{{'",
        )
    metadata = _metadata(entries.pop("__metadata__", None), path)
    start = _LENGTH_BYTES + length
    specs = [_spec(name, entry, start, file_size, path) for name, entry in entries.items()]
    specs.sort(key=lambda spec: (spec.start, spec.nbytes))
    _check_cover(specs, start, file_size, path)
    return SafetensorsHeader(path, file_size, start, metadata, tuple(specs))


def _header_length(prefix: bytes, file_size: int, path: str) -> int:
    if file_size == 0:
        raise SafetensorsError.at(
            SafetensorsFault.EMPTY_FILE, path, "the file is empty", file_size=0
        )
    if file_size < _LENGTH_BYTES or len(prefix) < _LENGTH_BYTES:
        raise SafetensorsError.at(
            SafetensorsFault.FILE_TOO_SHORT,
            path,
            f"{file_size} bytes cannot hold a header",
            file_size=file_size,
        )
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise SafetensorsError.at(
            SafetensorsFault.HEADER_TOO_LARGE,
            path,
            f"a header of {length} bytes, the limit is {MAX_HEADER_BYTES}: damaged, or no "
            "safetensors file",
            length=length,
            limit=MAX_HEADER_BYTES,
        )
    if length > file_size - _LENGTH_BYTES:
        raise SafetensorsError.at(
            SafetensorsFault.HEADER_TRUNCATED,
            path,
            f"a header of {length} bytes in a file of {file_size}",
            length=length,
            file_size=file_size,
        )
    return length


def _metadata(value: object, path: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise SafetensorsError.at(
            SafetensorsFault.METADATA, path, f"__metadata__ is a JSON {type(value).__name__}"
        )
    for key, text in value.items():
        if not isinstance(text, str):
            raise SafetensorsError.at(
                SafetensorsFault.METADATA,
                path,
                f"__metadata__[{shorten(key)!r}] is a JSON {type(text).__name__}, not text",
                key=shorten(key),
            )
    return value


def _spec(name: str, entry: object, start: int, file_size: int, path: str) -> TensorSpec:
    fields = _fields(name, entry, path)
    dtype = fields["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        shown = reprlib.repr(dtype)
        raise SafetensorsError.at(
            SafetensorsFault.UNKNOWN_DTYPE, path, f"unknown dtype {shown}", name, dtype=shown
        )
    shape = _shape(name, fields["shape"], path)
    begin, end = _offsets(name, fields["data_offsets"], file_size - start, path)
    nbytes = _size(name, dtype, shape, path)
    if end - begin != nbytes:
        raise SafetensorsError.at(
            SafetensorsFault.SIZE_MISMATCH,
            path,
            f"{_kind(dtype, shape)} is {nbytes} bytes, data_offsets hold {end - begin}",
            name,
            expected=nbytes,
            got=end - begin,
        )
    return TensorSpec(name, dtype, shape, start + begin, nbytes)


def _fields(name: str, entry: object, path: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise SafetensorsError.at(
            SafetensorsFault.TENSOR_ENTRY, path, f"its entry is a JSON {type(entry).__name__}", name
        )
    missing = [field for field in ("dtype", "shape", "data_offsets") if field not in entry]
    if missing:
        raise SafetensorsError.at(
            SafetensorsFault.TENSOR_ENTRY,
            path,
            f"its entry has no {' and no '.join(missing)}",
            name,
            missing=missing,
        )
    if len(entry) > 3 and depth_of(entry.values()) + _ENTRY_DEPTH > MAX_DEPTH:
        raise JsonTextError.at(
            JsonFault.NESTING, path, f"nests deeper than {MAX_DEPTH} levels", name
        )
    return entry


def _is_u64(value: object) -> bool:
    # type() and not isinstance: True is an int.
    return type(value) is int and 0 <= value < _U64_LIMIT


def _shape(name: str, value: object, path: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(map(_is_u64, value)):
        shown = reprlib.repr(value)
        raise SafetensorsError.at(
            SafetensorsFault.BAD_SHAPE, path, f"bad shape {shown}", name, shape=shown
        )
    return tuple(value)


def _offsets(name: str, value: object, data_bytes: int, path: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(map(_is_u64, value)):
        shown = reprlib.repr(value)
        raise SafetensorsError.at(
            SafetensorsFault.BAD_OFFSETS,
            path,
            f"bad data_offsets {shown}",
            name,
            data_offsets=shown,
        )
    begin, end = value
    if end < begin:
        raise SafetensorsError.at(
            SafetensorsFault.OFFSETS_REVERSED,
            path,
            f"data_offsets {begin} to {end} end before they begin",
            name,
            data_offsets=value,
        )
    if end > data_bytes:
        raise SafetensorsError.at(
            SafetensorsFault.OFFSETS_BEYOND_FILE,
            path,
            f"data_offsets {begin} to {end} in {data_bytes} bytes of data",
            name,
            data_offsets=value,
            data_bytes=data_bytes,
        )
    return begin, end


def _size(name: str, dtype: str, shape: tuple[int, ...], path: str) -> int:
    bits = 1
    # In this order, as the library multiplies: a late 0 does not undo an overflow.
    for factor in (*shape, DTYPE_BITS[dtype]):
        bits *= factor
        if bits >= _U64_LIMIT:
            raise SafetensorsError.at(
                SafetensorsFault.SHAPE_OVERFLOW,
                path,
                f"{_kind(dtype, shape)} does not fit 64 bits",
                name,
                dtype=dtype,
            )
    if bits % 8:
        raise SafetensorsError.at(
            SafetensorsFault.SUB_BYTE,
            path,
            f"{dtype} of shape {reprlib.repr(list(shape))} is {bits} bits: no whole bytes",
            name,
            bits=bits,
        )
    return bits // 8


def _kind(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} of shape {reprlib.repr(list(shape))}"


def _check_cover(specs: list[TensorSpec], start: int, file_size: int, path: str) -> None:
    """Sorted, the tensors must cover the data exactly: no second format hides in this file."""
    expected, before = start, "the header"
    for spec in specs:
        if spec.start != expected:
            overlaps = spec.start < expected
            fault = SafetensorsFault.OVERLAP if overlaps else SafetensorsFault.HOLE
            word = "overlaps" if overlaps else "ends"
            raise SafetensorsError.at(
                fault,
                path,
                f"begins at {spec.start - start}, but {before} {word} at {expected - start}",
                spec.name,
                begins=spec.start - start,
                expected=expected - start,
            )
        expected, before = spec.start + spec.nbytes, repr(shorten(spec.name))
    if expected != file_size:
        raise SafetensorsError.at(
            SafetensorsFault.TRAILING_BYTES,
            path,
            f"{file_size - expected} bytes after the last tensor belong to none",
            trailing=file_size - expected,
        )
