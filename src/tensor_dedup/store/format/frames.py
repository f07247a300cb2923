"""Frames: the versioned and checksummed encoding of a store's metadata files. No I/O.

A frame is a head of 24 bytes (magic, kind, version, flags, length of the payload; little-endian),
the payload (MessagePack) and the BLAKE3-256 of both. The text files of a store (its marker and its
references) end in a line with the BLAKE3-256 of the lines before it.
"""

import struct
from pathlib import PurePath
from typing import TypeVar

import msgspec
from blake3 import blake3

from tensor_dedup.store.errors import DamagedFileError, NewerFormatError

VERSION = 1
MAX_FRAME_BYTES = 1 << 30

_MAGIC = b"TDST"
_HEAD = struct.Struct("<4s4sIIQ")
_CHECK_BYTES = 32
_CHECK_WORD = "check "
OVERHEAD = _HEAD.size + _CHECK_BYTES

_T = TypeVar("_T")


def encode(kind: bytes, payload: object) -> bytes:
    """Encode a payload as a frame; `kind` is four bytes. Equal payloads give equal frames."""
    body = msgspec.msgpack.encode(payload)
    head = _HEAD.pack(_MAGIC, kind, VERSION, 0, len(body))
    return head + body + blake3(head + body).digest()


def kind_of(blob: bytes) -> bytes:
    """Return the four-byte kind in the head of a frame, without checking the frame."""
    return blob[len(_MAGIC) :][:4]


def decode(blob: bytes, kind: bytes, form: type[_T], path: PurePath) -> _T:
    """Return the payload of a frame, validated as the type `form`. Errors name `path`.

    Raises:
        DamagedFileError: The frame is damaged, is not of the kind `kind`, or its payload is not
            valid.
        NewerFormatError: A later version of this program wrote the frame.
    """
    body = _checked_body(blob, kind, path)
    try:
        return msgspec.msgpack.decode(body, type=form)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DamagedFileError.at(path, f"its content has another form ({error})") from error


def _checked_body(blob: bytes, kind: bytes, path: PurePath) -> bytes:
    if len(blob) < OVERHEAD:
        raise DamagedFileError.at(path, f"{len(blob)} bytes hold no frame", size=len(blob))
    magic, found, version, flags, length = _HEAD.unpack_from(blob)
    # The checksum first: a flipped bit in the version does not make it a later one.
    if blake3(blob[:-_CHECK_BYTES]).digest() != blob[-_CHECK_BYTES:]:
        raise DamagedFileError.at(path, "its checksum is wrong", size=len(blob))
    if magic != _MAGIC or found != kind:
        raise DamagedFileError.at(path, f"it is {magic + found!r}, not {_MAGIC + kind!r}")
    if version != VERSION or flags:
        raise NewerFormatError.at(
            path, f"format {version} (flags {flags}), this program knows {VERSION}", version=version
        )
    if length != len(blob) - OVERHEAD:
        raise DamagedFileError.at(path, f"{len(blob) - OVERHEAD} bytes, it says {length}")
    return blob[_HEAD.size : -_CHECK_BYTES]


def encode_text(lines: list[str]) -> bytes:
    """Return the content of a text file with these lines and their checksum."""
    body = "".join(line + "\n" for line in lines)
    return f"{body}{_CHECK_WORD}{blake3(body.encode()).hexdigest()}\n".encode()


def decode_text(blob: bytes, path: PurePath) -> list[str]:
    """Return the lines of a text file without the checksum line. Errors name `path`.

    Raises:
        DamagedFileError: The file is not ASCII text, or the checksum does not match the lines.
    """
    try:
        lines = blob.decode("ascii").split("\n")
    except UnicodeDecodeError as error:
        raise DamagedFileError.at(path, "it is no text") from error
    if encode_text(lines[:-2]) != blob:
        raise DamagedFileError.at(path, "its checksum is wrong", size=len(blob))
    return lines[:-2]


def distance(a: bytes, b: bytes) -> int:
    """Return the number of bytes in which `a` and `b` differ.

    If their lengths differ, return the greater length.
    """
    if len(a) != len(b):
        return max(len(a), len(b))
    return sum(x != y for x, y in zip(a, b, strict=True))
