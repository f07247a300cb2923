"""Reads a file of torch.save: the names of its tensors and where their bytes are. Runs no code."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from tensor_dedup.formats.errors import PytorchError, PytorchFault, shorten
from tensor_dedup.formats.files import ReadableFile, opened
from tensor_dedup.formats.pytorch.archive import ENTRY_BYTES, Entry, read_archive
from tensor_dedup.formats.pytorch.budget import Budget
from tensor_dedup.formats.pytorch.geometry import PickledTensor, place
from tensor_dedup.formats.pytorch.machine import evaluate
from tensor_dedup.formats.pytorch.naming import named_tensors
from tensor_dedup.formats.pytorch.values import PickledTensorView, PlainDict
from tensor_dedup.types import TensorSpec

MAX_PICKLE_BYTES = 100_000_000
ZIP_MAGIC = b"PK\x03\x04"

_PICKLE = "data.pkl"
_BYTE_ORDER = "byteorder"
_PROGRAM = ("constants.pkl", "code")
# The first bytes of what was written before torch.save made archives.
_LEGACY = (b"\x80\x01", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_TAR_AT, _TAR = 257, b"ustar"


@dataclass(frozen=True, slots=True)
class PytorchHeader:
    """The checked content of a file of torch.save, without the tensor data.

    * `tensors` are byte ranges that do not overlap, ordered by offset.
    * `members` are the tensors under all their names. Each lies in one of the byte ranges.
    * `header_bytes` counts the bytes that belong to no tensor.
    * `flat` is True if the pickled value is one dict from strings to tensors, as model loaders
      expect.
    * `sparse` maps the name of each part of a sparse tensor to the name of the sparse tensor. The
      parts, such as the indices, are listed as tensors.
    """

    path: str
    file_size: int
    header_bytes: int
    tensors: tuple[TensorSpec, ...]
    members: tuple[PickledTensor, ...]
    flat: bool
    sparse: Mapping[str, str] = field(default_factory=dict)


def read_header(path: str | os.PathLike[str], *, fd: int | None = None) -> PytorchHeader:
    """Read and check all of a file except its tensor data. Runs no pickled code, needs no torch.

    If the open descriptor `fd` is given, the file is read through it, and `path` is used in error
    messages only. The position of `fd` does not change.

    Raises:
        CheckpointNotFoundError: The file cannot be opened.
        PytorchError: The file is malformed, was written by PyTorch before 1.6
            (`PytorchFault.LEGACY_PYTORCH`) or holds more than tensors and plain values
            (`PytorchFault.FORBIDDEN_GLOBAL`).
        ChangedFileError: The file became shorter while it was read.
    """
    with opened(path, fd) as file:
        return parse_file(file)


def parse_file(file: ReadableFile) -> PytorchHeader:
    """Read and check all of a file of torch.save except its tensor data. Runs no pickled code.

    Raises:
        PytorchError: The file is malformed, was written by PyTorch before 1.6, or holds more than
            tensors and plain values.
        ChangedFileError: The file became shorter while it was read.
    """
    _check_kind(file)
    entries = read_archive(file)
    root = _root(entries, file.path)
    _check_byte_order(file, entries.get(f"{root}/{_BYTE_ORDER}"))
    blob = _pickle(file, entries[f"{root}/{_PICKLE}"])
    budget = Budget(len(blob) + ENTRY_BYTES * len(entries), file.path)
    value = evaluate(blob, file.path, budget)
    named = named_tensors(value, file.path, budget)
    specs, members = place(named.tensors, entries, root, file.path)
    rest = file.size - sum(spec.nbytes for spec in specs)
    return PytorchHeader(
        file.path,
        file.size,
        rest,
        tuple(specs),
        tuple(members),
        _is_flat(value),
        named.sparse,
    )


def _is_flat(value: object) -> bool:
    return (
        isinstance(value, PlainDict)
        and all(isinstance(key, str) for key in value.items[::2])
        and all(isinstance(held, PickledTensorView) for held in value.items[1::2])
    )


def _check_kind(file: ReadableFile) -> None:
    head = file.read(0, min(file.size, _TAR_AT + len(_TAR)))
    if head.startswith(ZIP_MAGIC):
        return
    if head.startswith(_LEGACY) or head[_TAR_AT:] == _TAR:
        raise PytorchError.at(
            PytorchFault.LEGACY_PYTORCH, file.path, "written by PyTorch before 1.6, or as if"
        )
    raise PytorchError.at(
        PytorchFault.NOT_PYTORCH,
        file.path,
        f"it begins with {head[:4]!r}, which no file of torch.save does",
        begins=head[:4].hex(),
    )


def _root(entries: Mapping[str, Entry], path: str) -> str:
    """Return the one folder of the archive."""
    roots = [name.removesuffix(f"/{_PICKLE}") for name in entries if name.endswith(f"/{_PICKLE}")]
    if len(roots) != 1 or "/" in roots[0]:
        raise PytorchError.at(
            PytorchFault.MISSING_ENTRY,
            path,
            f"{len(roots)} entries are called FOLDER/{_PICKLE}, not one",
            found=len(roots),
        )
    root = roots[0]
    for name in entries:
        if not name.startswith(f"{root}/"):
            raise PytorchError.at(
                PytorchFault.STRAY_ENTRY,
                path,
                f"the entry {shorten(name)!r} is not in {root!r}",
                entry=shorten(name),
            )
        if name.removeprefix(f"{root}/").split("/")[0] in _PROGRAM:
            raise PytorchError.at(
                PytorchFault.TORCH_SCRIPT,
                path,
                f"the entry {shorten(name)!r} is part of a program",
                entry=shorten(name),
            )
    return root


def _check_byte_order(file: ReadableFile, entry: Entry | None) -> None:
    # Without the entry the writer was older than big-endian machines were thought of.
    if entry is None:
        return
    order = file.read(entry.start, min(entry.nbytes, len(b"little") + 1))
    if order != b"little":
        raise PytorchError.at(
            PytorchFault.BYTE_ORDER, file.path, f"its byte order is {order!r}", order=order
        )


def _pickle(file: ReadableFile, entry: Entry) -> bytes:
    if entry.nbytes > MAX_PICKLE_BYTES:
        raise PytorchError.at(
            PytorchFault.PICKLE_TOO_LARGE,
            file.path,
            f"a pickle of {entry.nbytes} bytes, the limit is {MAX_PICKLE_BYTES}",
            nbytes=entry.nbytes,
            limit=MAX_PICKLE_BYTES,
        )
    return file.read(entry.start, entry.nbytes)
