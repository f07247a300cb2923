"""Tensorcast's descriptor and verification files, which lie beside a `tensor_index`. No I/O.

An artifact is named `mi2:INDEX:DATA`. Both parts are SHA-256 multihashes in base32. INDEX is the
hash of the index file. DATA is the hash at the root of a binary tree over leaves of 4 MiB of the
data.

A verification file has xxHash64 sums of eight segments of the data and of all of it, and some
sampled values. Each sum is chained over chunks of 256 KiB. The file's `byte_space_id` says which
bytes it covers. "" means all bytes. Any other id means a view, which is a selection of tensors laid
out as data of their own.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from tensor_dedup.formats.errors import TensorIndexError, TensorIndexFault
from tensor_dedup.formats.json import decode_object

HASH_LEAF_BYTES: Final = 4 << 20
SCHEMA: Final = "v3"
CANONICAL: Final = ""
_SEGMENTS, _SAMPLES = 8, 16
_CHUNK = 256 << 10
_U64 = 1 << 64
_MULTIHASH = re.compile(r"b[a-z2-7]{55}")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_SHA256_PREFIX = b"\x12\x20"


def multihash(digest: bytes) -> str:
    """Return a 32-byte SHA-256 digest as a base32 multihash text of 56 characters."""
    return "b" + base64.b32encode(_SHA256_PREFIX + digest).decode().lower().rstrip("=")


def index_multihash(blob: bytes) -> str:
    """Return the multihash of an index, given the bytes of its `tensor_index.json`."""
    return multihash(hashlib.sha256(blob).digest())


def tree_root(leaves: Sequence[bytes]) -> bytes:
    """Return the SHA-256 root of a binary tree over the leaf digests `leaves`.

    An odd digest at the end of a level moves up unchanged. Without leaves, the root is 32 zero
    bytes.
    """
    level = list(leaves) or [bytes(32)]
    while len(level) > 1:
        pairs = [level[at : at + 2] for at in range(0, len(level), 2)]
        level = [hashlib.sha256(b"".join(p)).digest() if len(p) == 2 else p[0] for p in pairs]
    return level[0]


class TreeHash:
    """The hash tree over the data of an artifact, from which its data multihash is computed.

    The data can be passed in two ways:

    * to `update`, in order and from one thread;
    * to `leaf`, as whole leaves in any order and from any thread.

    If both are used, the first leaves must be passed to `update` and all later ones to `leaf`.
    """

    def __init__(self) -> None:
        self._leaves: dict[int, bytes] = {}
        self._open = hashlib.sha256()
        self._at = 0

    def leaf(self, number: int, data: memoryview) -> None:
        """Hash leaf `number`, whose `data` is HASH_LEAF_BYTES long, or less for the last leaf."""
        self._leaves[number] = hashlib.sha256(data).digest()

    def update(self, data: memoryview) -> None:
        """Hash the next bytes of the data."""
        at = 0
        while at < data.nbytes:
            with data[at : at + HASH_LEAF_BYTES - self._at % HASH_LEAF_BYTES] as part:
                self._open.update(part)
                at += part.nbytes
                self._at += part.nbytes
            if self._at % HASH_LEAF_BYTES == 0:
                self._close_leaf()

    def _close_leaf(self) -> None:
        self._leaves[(self._at - 1) // HASH_LEAF_BYTES] = self._open.digest()
        self._open = hashlib.sha256()

    def multihash(self) -> str:
        """Return the multihash of all bytes. Nothing may be added afterwards."""
        if self._at % HASH_LEAF_BYTES:
            self._close_leaf()
        return multihash(tree_root([self._leaves[number] for number in sorted(self._leaves)]))


@dataclass(frozen=True, slots=True)
class ArtifactDescriptor:
    """The checked content of `artifact_descriptor.json`; sizes in bytes."""

    artifact_id: str
    index_multihash: str
    data_multihash: str
    schema_version: str
    encoding: str
    total_size: int
    leaf_bytes: int


def describe(index_name: str, data_name: str, total_size: int) -> dict[str, Any]:
    """Return the content of `artifact_descriptor.json` as a JSON object.

    `index_name` and `data_name` are the multihashes of index and data, `total_size` is in bytes.
    """
    return {
        "artifact_id": f"mi2:{index_name}:{data_name}",
        "data_multihash": data_name,
        "encoding": "json",
        "hash_params": {"algorithm": "sha2-256", "chunk_size": HASH_LEAF_BYTES, "fanout": 2},
        "index_multihash": index_name,
        "schema_version": SCHEMA,
        "total_size": total_size,
    }


def parse_descriptor(blob: bytes, path: str) -> ArtifactDescriptor:
    """Parse and check the content of `artifact_descriptor.json`.

    `path` is used in error messages only.

    Raises:
        JsonTextError: The file is not JSON.
        TensorIndexError: The file is not a valid descriptor.
    """
    found = decode_object(blob, path)
    for key in ("artifact_id", "index_multihash", "data_multihash", "schema_version", "encoding"):
        if not isinstance(found.get(key), str):
            raise TensorIndexError.at(TensorIndexFault.DESCRIPTOR, path, f"it has no text {key!r}")
    names = found["index_multihash"], found["data_multihash"]
    if not all(_MULTIHASH.fullmatch(name) for name in names):
        raise TensorIndexError.at(
            TensorIndexFault.DESCRIPTOR, path, "its multihashes are not SHA-256 in base32"
        )
    if found["artifact_id"] != f"mi2:{names[0]}:{names[1]}":
        raise TensorIndexError.at(
            TensorIndexFault.DESCRIPTOR, path, "its artifact_id does not consist of its multihashes"
        )
    total = found.get("total_size")
    if type(total) is not int or not 0 <= total < _U64:
        raise TensorIndexError.at(TensorIndexFault.DESCRIPTOR, path, "its total_size is no size")
    leaf = _leaf_bytes(found.get("hash_params"), path)
    return ArtifactDescriptor(
        found["artifact_id"], *names, found["schema_version"], found["encoding"], total, leaf
    )


def _leaf_bytes(parameters: object, path: str) -> int:
    known = {"algorithm": "sha2-256", "chunk_size": HASH_LEAF_BYTES, "fanout": 2}
    given = known if parameters is None else parameters
    if not isinstance(given, dict) or {**known, **given} != known:
        raise TensorIndexError.at(
            TensorIndexFault.DESCRIPTOR,
            path,
            "its data was hashed in another way than is known here",
        )
    return HASH_LEAF_BYTES


@dataclass(frozen=True, slots=True)
class ArtifactVerification:
    """The checked content of a verification file.

    `full_hash` and `segment_hashes` are xxHash64 sums, as integers. `sample_values` are 64-bit
    words at even distances in the data; `key_values` are those at its beginning, middle and end.
    """

    byte_space_id: str
    artifact_size: int
    full_hash: int
    segment_hashes: tuple[int, ...]
    sample_values: tuple[int, ...]
    key_values: tuple[int, ...]

    def encode(self) -> bytes:
        """Return the verification file as bytes of JSON."""
        fields = {
            "artifact_size": self.artifact_size,
            "byte_space_id": self.byte_space_id,
            "full_hash": self.full_hash,
            "key_values": self.key_values,
            "sample_values": self.sample_values,
            "segment_hashes": self.segment_hashes,
            "version": "1.0",
        }
        return json.dumps(fields, indent=2).encode()


def parse_verification(
    blob: bytes, path: str, byte_space_id: str = CANONICAL
) -> ArtifactVerification:
    """Parse and check a verification file for the bytes that `byte_space_id` names.

    A file without an id is for all bytes. `path` is used in error messages only.

    Raises:
        JsonTextError: The file is not JSON.
        TensorIndexError: The file is not a valid verification file, or is for other bytes.
    """
    found = decode_object(blob, path)
    of = found.get("byte_space_id", CANONICAL)
    if of != byte_space_id:
        raise TensorIndexError.at(
            TensorIndexFault.VERIFICATION_FILE, path, f"it is about {of!r}, not {byte_space_id!r}"
        )
    size, full = (_numbers([found.get(key)], 1, path)[0] for key in ("artifact_size", "full_hash"))
    lists = (("segment_hashes", _SEGMENTS), ("sample_values", _SAMPLES), ("key_values", 3))
    numbers = [_numbers(found.get(key), count, path) for key, count in lists]
    return ArtifactVerification(byte_space_id, size, full, *numbers)


def _numbers(value: object, count: int, path: str) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or len(value) != count
        or not all(type(number) is int and 0 <= number < _U64 for number in value)
    ):
        raise TensorIndexError.at(
            TensorIndexFault.VERIFICATION_FILE, path, f"{count} whole numbers of 64 bits expected"
        )
    return tuple(value)


def verification_name(byte_space_id: str) -> str:
    """Return the file name of the verification file for a `byte_space_id`."""
    if byte_space_id == CANONICAL:
        return "verification.json"
    return f"verification.view_{_UNSAFE.sub('_', byte_space_id)}.json"


class Verifier:
    """The sums and sampled values of a verification file, computed from data passed in order.

    `total_size` is the size of the data in bytes. `byte_space_id` says which bytes of the artifact
    the data is, and "" means all of them. For one thread.
    """

    def __init__(self, total_size: int, byte_space_id: str = CANONICAL) -> None:
        self._total = total_size
        self._space = byte_space_id
        self._chunks = _chunks(total_size)
        self._segment, self._left = next(self._chunks, (0, 0))
        self._pending = bytearray()
        self._segments = [0] * _SEGMENTS
        self._full = 0
        self._at = 0
        self._values = {place: bytearray() for place in {*_samples(total_size), *_keys(total_size)}}

    def update(self, data: memoryview) -> None:
        """Add the next bytes of the data."""
        self._note_values(data)
        at = 0
        while at < data.nbytes and self._left:
            with data[at : at + self._left - len(self._pending)] as part:
                at += part.nbytes
                if part.nbytes == self._left:
                    self._hash(part)
                    continue
                self._pending += part
            if len(self._pending) == self._left:
                self._hash(memoryview(self._pending))
                self._pending = bytearray()
        self._at += data.nbytes

    def _hash(self, chunk: memoryview) -> None:
        self._segments[self._segment] = xxhash.xxh64_intdigest(chunk, self._segments[self._segment])
        self._full = xxhash.xxh64_intdigest(chunk, self._full)
        self._segment, self._left = next(self._chunks, (0, 0))

    def _note_values(self, data: memoryview) -> None:
        for place, value in self._values.items():
            start = max(place + len(value), self._at) - self._at
            stop = min(place + 8, self._at + data.nbytes) - self._at
            if start < stop:
                value += data[start:stop]

    def result(self) -> ArtifactVerification:
        """Return the content of the verification file, once all `total_size` bytes were added."""

        def values(places: Sequence[int]) -> tuple[int, ...]:
            return tuple(int.from_bytes(self._values[place], "little") for place in places)

        return ArtifactVerification(
            self._space,
            self._total,
            self._full,
            tuple(self._segments),
            values(_samples(self._total)),
            values(_keys(self._total)),
        )


def _samples(total: int) -> list[int]:
    return [total * number // _SAMPLES for number in range(_SAMPLES)]


def _keys(total: int) -> list[int]:
    return [0, total // 2, max(0, total - 8)]


def _chunks(total: int) -> Iterator[tuple[int, int]]:
    """Yield segment and size of each piece that is hashed: pieces begin anew with each segment."""
    length = total // _SEGMENTS
    for segment in range(_SEGMENTS):
        nbytes = length if segment < _SEGMENTS - 1 else total - length * (_SEGMENTS - 1)
        for done in range(0, nbytes, _CHUNK):
            yield segment, min(_CHUNK, nbytes - done)
