"""The data files of ServerlessLLM and tensorcast (`tensor.data_N`), each as a file with tensors.

The `tensor_index.json` beside the data files says which tensors they hold. A tensor is listed if
its elements lie contiguously in one file and no listed tensor overlaps them. These are not listed:

- a second name of a storage, or a view of a part of a storage;
- a tensor that extends into the next file;
- a tensor whose dtype safetensors cannot name.

Bytes that no listed tensor holds count as `header_bytes`.
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tensor_dedup.formats.errors import TensorIndexError, TensorIndexFault
from tensor_dedup.formats.files import OpenFile, opened
from tensor_dedup.formats.safetensors import MAX_HEADER_BYTES
from tensor_dedup.formats.serverless.tensor_index import (
    DTYPES,
    IndexEntry,
    TensorIndex,
    check_data,
    parse_index,
)
from tensor_dedup.formats.weight_choice import WeightFiles
from tensor_dedup.types import TensorSpec

INDEX_NAME: Final = "tensor_index.json"
DATA_FILE: Final = re.compile(r"tensor\.data_(0|[1-9][0-9]{0,5})")


@dataclass(frozen=True, slots=True)
class DataFileHeader:
    """The tensors of a data file, ordered by offset; `header_bytes` counts all other bytes."""

    path: str
    file_size: int
    header_bytes: int
    tensors: tuple[TensorSpec, ...]


def data_files(names: Iterable[str]) -> WeightFiles:
    """Return the data files among `names`, the file names of a folder.

    If the folder has no `tensor_index.json`, the result is empty. If there are gaps in the numbers
    of the files, the result's `missing` is the first missing file.
    """
    known = set(names)
    numbers = sorted(int(match[1]) for match in map(DATA_FILE.fullmatch, known) if match)
    if INDEX_NAME not in known or not numbers:
        return WeightFiles()
    gaps = (number for number in range(numbers[-1]) if number not in numbers)
    missing = next((f"tensor.data_{number}" for number in gaps), None)
    return WeightFiles(files=tuple(f"tensor.data_{number}" for number in numbers), missing=missing)


def read_header(path: str | os.PathLike[str], *, fd: int | None = None) -> DataFileHeader:
    """Return the tensors of the data file `path`, as the `tensor_index.json` beside it lists them.

    If `fd`, an open descriptor of the data file, is given, the file is not opened again.

    Raises:
        CheckpointNotFoundError: The data file, the index or an earlier data file is missing.
        FormatError: The index is malformed or does not fit the data files, or `path` is not named
            `tensor.data_N`.
        ChangedFileError: The index became shorter while it was read.
    """
    where = Path(path)
    match = DATA_FILE.fullmatch(where.name)
    if match is None:
        raise TensorIndexError.at(
            TensorIndexFault.DATA_FILES,
            str(path),
            "it is not called tensor.data_0, tensor.data_1, ...",
        )
    with opened(where.parent / INDEX_NAME) as file:
        index = parse_index(_whole(file), file.path)
    with opened(path, fd) as data:
        size = data.size
    starts = [0]
    for number in range(int(match[1])):
        with opened(where.with_name(f"tensor.data_{number}")) as other:
            starts.append(starts[-1] + other.size)
    end = starts[-1] + size
    last = not where.with_name(f"tensor.data_{int(match[1]) + 1}").exists()
    if last:
        check_data(index, end, str(path))
    specs = tuple(_specs(index, range(starts[-1], end + last)))
    header_bytes = size - sum(spec.nbytes for spec in specs)
    return DataFileHeader(str(path), size, header_bytes, specs)


def _whole(file: OpenFile) -> bytes:
    if file.size > MAX_HEADER_BYTES:
        what = f"larger than {MAX_HEADER_BYTES} bytes"
        raise TensorIndexError.at(TensorIndexFault.TOO_LARGE, file.path, what)
    return file.read(0, file.size)


def _specs(index: TensorIndex, places: range) -> Iterator[TensorSpec]:
    """Yield the tensors that begin at one of these places; the last holds no byte of the file."""
    end = 0
    for entry in sorted(index.entries, key=_order):
        dtype, at = DTYPES[entry.dtype][0], _place(entry) - places.start
        inside = _place(entry) in places and _place(entry) + entry.nbytes <= places.stop
        if dtype is not None and inside and at >= end and entry.contiguous:
            yield TensorSpec(entry.name, dtype, entry.shape, at, entry.nbytes)
            end = at + entry.nbytes


def _order(entry: IndexEntry) -> tuple[int, bool, int, str]:
    return _place(entry), entry.nbytes > 0, -entry.nbytes, entry.name


def _place(entry: IndexEntry) -> int:
    # Where one without elements begins may lie anywhere.
    return entry.start if entry.nbytes else entry.offset
