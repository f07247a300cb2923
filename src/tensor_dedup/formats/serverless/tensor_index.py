"""The index of a folder of `tensor.data_N` files, as ServerlessLLM and tensorcast write it.

An entry is `[offset, size, shape, stride, dtype]`; tensorcast adds `storage_offset`. The entry
describes a tensor as a view of a storage. The storage has `size` bytes and begins at byte `offset`
of all data files put together. The view begins `storage_offset` elements into the storage. Tensors
of one storage have equal offsets.

The index is not trusted: numbers are bounded, views must lie inside their storages, storages must
not overlap, and all storages must lie in the data. The encoders write the same bytes as tensorcast.
This module does no I/O and does not import torch.
"""

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import cbor2

from tensor_dedup.dtypes import BITS, SAFETENSORS, TORCH_NAMES
from tensor_dedup.formats.errors import JsonFault, JsonTextError, TensorIndexError, TensorIndexFault
from tensor_dedup.formats.json import decode_object

ALIGNMENT: Final = 8
# O_DIRECT writers fill up to a page at the end of a file.
MAX_PADDING: Final = 4096
Fields = Literal[5, 6]

# torch's name: the name in safetensors, where it has one, and bytes an element.
DTYPES: Final[Mapping[str, tuple[str | None, int]]] = {
    f"torch.{torch_name}": (name if name in SAFETENSORS else None, BITS[name] // 8)
    for name, torch_name in TORCH_NAMES.items()
} | {"torch.float4_e2m1fn_x2": (None, 1)}

_LIMIT = 1 << 63
_MAX_DIMENSIONS = 64
_CBOR_DEPTH = 3
# The heads of short lists, empty maps and dates: as Python's objects they take up to 90 times the
# byte or two that they are. An index has three in the 22 bytes of its shortest entry, or more. In a
# name these bytes are parts of letters.
_SHORT_LISTS = bytes((*range(0x80, 0x88), 0xA0, 0xC0, 0xC1))
_LEAST_BYTES = 4
_FEW_LISTS = 100_000


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A tensor in the index, as a view of a storage.

    The storage begins at byte `offset` of the data and has `size` bytes. `shape`, `stride` and
    `storage_offset` are in elements.
    """

    name: str
    offset: int
    size: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    storage_offset: int = 0

    @property
    def itemsize(self) -> int:
        """The size of an element in bytes."""
        return DTYPES[self.dtype][1]

    @property
    def elements(self) -> int:
        """The number of elements of the tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """The size in bytes of the tensor's elements, without gaps between them."""
        return self.elements * self.itemsize

    @property
    def start(self) -> int:
        """The byte offset of the tensor's first element in the data."""
        return self.offset + self.storage_offset * self.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie in order and without gaps; True if there are none."""
        expected = 1
        if not self.elements:
            return True
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class StorageExtent:
    """The byte range of a storage in the data.

    Each tensor's entry in the index states the size of its storage. If the entries of a storage
    state different sizes, `nbytes` is the largest of them.
    """

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The byte offset of the end of the storage in the data."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """The checked content of an index: `entries` sorted by name, `storages` by offset.

    `fields` is the number of fields in each entry, 5 or 6.
    """

    path: str
    fields: Fields
    entries: tuple[IndexEntry, ...]
    storages: tuple[StorageExtent, ...]

    @property
    def total_size(self) -> int:
        """The size of the data in bytes, to the end of the last storage."""
        return max((storage.end for storage in self.storages), default=0)


def parse_index(blob: bytes, path: str) -> TensorIndex:
    """Parse and check the content of `tensor_index.json`; `path` is used in error messages only.

    Raises:
        JsonTextError: The file is not JSON.
        TensorIndexError: The file is not a valid index.
    """
    return _index(decode_object(blob, path), path)


def parse_index_cbor(blob: bytes, path: str) -> TensorIndex:
    """Parse and check the content of `tensor_index.cbor`; `path` is used in error messages only.

    Raises:
        JsonTextError: The file does not hold a CBOR map, or would exhaust the reader's memory.
        TensorIndexError: The file is not a valid index.
    """
    found = len(blob) - len(blob.translate(None, _SHORT_LISTS))
    if found > len(blob) // _LEAST_BYTES + _FEW_LISTS:
        raise JsonTextError.at(
            JsonFault.BOMB,
            path,
            f"{found} of its {len(blob)} bytes begin short lists: far more than an index has",
            found=found,
        )
    try:
        value = cbor2.loads(
            blob,
            max_depth=_CBOR_DEPTH,
            allow_indefinite=False,
            allow_duplicate_keys=False,
            strict_hashable_types=True,
        )
        # One encoding for one index: no tag, no second way to write a number, nothing behind it.
        canonical = cbor2.dumps(value) == blob
    except (cbor2.CBORError, RecursionError, MemoryError, OverflowError) as error:
        raise TensorIndexError.at(
            TensorIndexFault.CBOR, path, f"not the CBOR of an index: {error}"
        ) from error
    if not isinstance(value, dict):
        raise JsonTextError.at(
            JsonFault.NOT_AN_OBJECT, path, f"it is a CBOR {type(value).__name__}, not a map"
        )
    if not canonical:
        raise TensorIndexError.at(
            TensorIndexFault.CBOR, path, "it is not in the shortest form, or not an index's only"
        )
    return _index(value, path)


def check_same(index: TensorIndex, other: TensorIndex) -> None:
    """Check that two indexes have equal entries, for example one in JSON and one in CBOR.

    Raises:
        TensorIndexError: The indexes differ.
    """
    if index.entries != other.entries:
        names = {entry.name for entry in set(index.entries) ^ set(other.entries)}
        raise TensorIndexError.at(
            TensorIndexFault.INDEXES_DIFFER, other.path, f"it differs from {index.path}", min(names)
        )


def check_data(index: TensorIndex, data_bytes: int, path: str) -> None:
    """Check that an index fits data files of `data_bytes` bytes together.

    `path` is used in error messages only.

    Raises:
        TensorIndexError: A storage ends beyond the data, or more bytes follow the last storage than
            alignment requires.
    """
    total = index.total_size
    if total > data_bytes:
        raise TensorIndexError.at(
            TensorIndexFault.STORAGE_BEYOND_DATA,
            path,
            f"its storages end at {total}, the data files at {data_bytes}",
            expected=total,
            got=data_bytes,
        )
    if data_bytes - total > MAX_PADDING:
        raise TensorIndexError.at(
            TensorIndexFault.TRAILING_DATA,
            path,
            f"{data_bytes - total} bytes after the last storage belong to none",
            trailing=data_bytes - total,
        )


def encode_index(entries: Iterable[IndexEntry], fields: Fields = 6) -> bytes:
    """Return `entries` as the bytes of `tensor_index.json`, sorted by name.

    `fields` is the number of fields in an entry, 5 or 6.
    """
    rows = _rows(entries, fields)
    return json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()


def encode_index_cbor(entries: Iterable[IndexEntry], fields: Fields = 6) -> bytes:
    """Return `entries` as the bytes of `tensor_index.cbor`, sorted by name.

    `fields` is the number of fields in an entry, 5 or 6.
    """
    return cbor2.dumps(_rows(entries, fields))


def _rows(entries: Iterable[IndexEntry], fields: Fields) -> dict[str, list[object]]:
    ordered = sorted(entries, key=lambda entry: entry.name)
    return {entry.name: _row(entry)[:fields] for entry in ordered}


def _row(entry: IndexEntry) -> list[object]:
    shape, stride = list(entry.shape), list(entry.stride)
    return [entry.offset, entry.size, shape, stride, entry.dtype, entry.storage_offset]


def _index(rows: Mapping[str, object], path: str) -> TensorIndex:
    lengths = {len(row) if isinstance(row, list) else 0 for row in rows.values()}
    fields: Fields = 5 if lengths == {5} else 6
    entries = [_entry(name, row, fields, path) for name, row in rows.items()]
    entries.sort(key=lambda entry: entry.name)
    return TensorIndex(path, fields, tuple(entries), _storages(entries, path))


def _entry(name: object, row: object, fields: Fields, path: str) -> IndexEntry:
    if not isinstance(name, str):
        raise TensorIndexError.at(
            TensorIndexFault.FIELDS, path, f"a name is a {type(name).__name__}, not text"
        )
    if not isinstance(row, list) or len(row) != fields:
        what = f"a list of {len(row)}" if isinstance(row, list) else f"a {type(row).__name__}"
        raise TensorIndexError.at(
            TensorIndexFault.FIELDS, path, f"its entry is {what}, not a list of {fields}", name
        )
    offset, size, shape, stride, dtype = row[:5]
    for what, number in zip(
        ("offset", "size", "storage offset"), (*row[:2], *row[5:]), strict=False
    ):
        if not _is_number(number):
            raise TensorIndexError.at(
                TensorIndexFault.NUMBER, path, f"bad {what} {reprlib.repr(number)}", name
            )
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise TensorIndexError.at(
            TensorIndexFault.DTYPE, path, f"unknown dtype {reprlib.repr(dtype)}", name
        )
    _check_numbers(name, shape, TensorIndexFault.SHAPE, path)
    _check_numbers(name, stride, TensorIndexFault.STRIDE, path)
    if len(stride) != len(shape):
        what = f"{len(stride)} strides for {len(shape)} dimensions"
        raise TensorIndexError.at(TensorIndexFault.STRIDE, path, what, name)
    entry = IndexEntry(name, offset, size, tuple(shape), tuple(stride), dtype, *row[5:])
    _check_view(entry, path)
    return entry


def _is_number(value: object) -> bool:
    # type() and not isinstance: True is an int.
    return type(value) is int and 0 <= value < _LIMIT


def _check_numbers(name: str, value: Any, fault: TensorIndexFault, path: str) -> None:
    if (
        not isinstance(value, list)
        or len(value) > _MAX_DIMENSIONS
        or not all(map(_is_number, value))
    ):
        what = f"not a list of numbers: {reprlib.repr(value)}"
        raise TensorIndexError.at(fault, path, what, name)


def _check_view(entry: IndexEntry, path: str) -> None:
    if entry.offset % ALIGNMENT:
        raise TensorIndexError.at(
            TensorIndexFault.MISALIGNED,
            path,
            f"its storage begins at {entry.offset}",
            entry.name,
            offset=entry.offset,
        )
    if entry.elements >= _LIMIT:
        raise TensorIndexError.at(
            TensorIndexFault.SHAPE, path, f"too large: {reprlib.repr(entry.shape)}", entry.name
        )
    if entry.elements == 0:  # it reaches nowhere
        return
    steps = zip(entry.shape, entry.stride, strict=True)
    reach = entry.storage_offset + sum((n - 1) * step for n, step in steps) + 1
    if reach * entry.itemsize > entry.size:
        raise TensorIndexError.at(
            TensorIndexFault.VIEW_BEYOND_STORAGE,
            path,
            f"it needs {reach * entry.itemsize} bytes of a storage of {entry.size}",
            entry.name,
            expected=reach * entry.itemsize,
            got=entry.size,
        )


def _storages(entries: Sequence[IndexEntry], path: str) -> tuple[StorageExtent, ...]:
    sizes: dict[int, int] = {}
    owners: dict[int, str] = {}
    for entry in entries:
        sizes[entry.offset] = max(entry.size, sizes.get(entry.offset, 0))
        owners.setdefault(entry.offset, entry.name)
    found = tuple(StorageExtent(*item) for item in sorted(sizes.items()))
    end = 0
    for storage in found:
        if (fault := _fault(end, storage)) is not None:
            raise TensorIndexError.at(
                fault,
                path,
                f"its storage begins at {storage.offset}, the one before it ends at {end}",
                owners[storage.offset],
                begins=storage.offset,
                expected=end,
            )
        end = max(end, storage.end)
    return found


def _fault(end: int, storage: StorageExtent) -> TensorIndexFault | None:
    # One without bytes may stand anywhere: it claims none.
    if storage.nbytes and storage.offset < end:
        return TensorIndexFault.STORAGE_OVERLAP
    return TensorIndexFault.STORAGE_HOLE if storage.offset - end > MAX_PADDING else None
