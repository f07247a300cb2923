"""Reads the header of a weight file of any supported format."""

import os
from collections.abc import Callable, Mapping
from pathlib import PurePath
from types import MappingProxyType
from typing import Protocol

from tensor_dedup.formats import gguf, safetensors
from tensor_dedup.formats.errors import LocatedError, PytorchError, PytorchFault
from tensor_dedup.formats.files import ReadableFile, opened
from tensor_dedup.formats.placeholders import HEAD_BYTES, placeholder
from tensor_dedup.formats.pytorch import reader as pytorch
from tensor_dedup.formats.pytorch.geometry import PickledTensor
from tensor_dedup.formats.serverless import data_files
from tensor_dedup.types import TensorSpec

PYTORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
GGUF_SUFFIX = ".gguf"
SAFETENSORS_SUFFIX = ".safetensors"
SUFFIXES = (SAFETENSORS_SUFFIX, GGUF_SUFFIX, *PYTORCH_SUFFIXES)

_HEAD = 9


class Header(Protocol):
    """The header of a weight file of any format. Sizes are in bytes.

    `tensors` are ordered by offset. They do not overlap and lie inside the file, possibly with
    unused bytes between them. `header_bytes` counts the bytes that belong to no tensor.
    """

    @property
    def path(self) -> str: ...
    @property
    def file_size(self) -> int: ...
    @property
    def header_bytes(self) -> int: ...
    @property
    def tensors(self) -> tuple[TensorSpec, ...]: ...


class _Read(Protocol):
    def __call__(self, path: str | os.PathLike[str], *, fd: int | None = None) -> Header: ...


_READERS: Mapping[str, _Read] = MappingProxyType(
    {
        SAFETENSORS_SUFFIX: safetensors.read_header,
        GGUF_SUFFIX: gguf.read_header,
        **dict.fromkeys(PYTORCH_SUFFIXES, pytorch.read_header),
    }
)


def read_header(path: str | os.PathLike[str], *, fd: int | None = None) -> Header:
    """Read and check the header of a safetensors, GGUF, torch.save or `tensor.data_N` file.

    The format is decided by the first of these that applies:

    1. the name `tensor.data_N`, or the suffix `.safetensors` or `.gguf`;
    2. the first bytes, if they are those of a GGUF file or of a zip archive;
    3. the suffix of a file of torch.save.

    Any other file is read as safetensors. A file that cannot be read because it is a pointer of Git
    LFS, or text, is called that in the error.

    If the open descriptor `fd` is given, the file is read through it, and the position of `fd` does
    not change. `path` is needed for the file's name, and for the index beside a `tensor.data_N`
    file.

    Raises:
        CheckpointNotFoundError: The file, or a file that it needs, cannot be opened.
        FormatError: The file is malformed.
        ChangedFileError: The file became shorter while it was read.
    """
    try:
        return _read_header(path, fd)
    except LocatedError as error:
        if isinstance(error, PytorchError) and error.kind is not PytorchFault.NOT_PYTORCH:
            raise  # a pickle may be text, too
        with opened(path, fd) as file:
            found = placeholder(file.read(0, min(file.size, HEAD_BYTES)), file.path)
        if found is None:
            raise
        raise found from error


def _read_header(path: str | os.PathLike[str], fd: int | None) -> Header:
    if data_files.DATA_FILE.fullmatch(PurePath(path).name):
        return data_files.read_header(path, fd=fd)
    suffix = PurePath(path).suffix
    if suffix in (SAFETENSORS_SUFFIX, GGUF_SUFFIX):
        return _READERS[suffix](path, fd=fd)
    with opened(path, fd) as file:
        read = _by_content(file) or _READERS.get(suffix, safetensors.read_header)
        return read(path, fd=file.fd)


def parse_pickled(file: ReadableFile) -> pytorch.PytorchHeader | None:
    """Return the header of a file of torch.save, or None if `file` has another format.

    The format is decided by the file's name and its first bytes.

    Raises:
        FormatError: The file is malformed.
        ChangedFileError: The file became shorter while it was read.
    """
    suffix = PurePath(file.path).suffix
    if suffix in (SAFETENSORS_SUFFIX, GGUF_SUFFIX):
        return None
    if data_files.DATA_FILE.fullmatch(PurePath(file.path).name):
        return None
    read = _by_content(file) or _READERS.get(suffix)
    return pytorch.parse_file(file) if read is pytorch.read_header else None


def aliases_in(header: Header) -> tuple[tuple[str, str], ...]:
    """Return the tied weights of a torch.save file, as pairs (alias, name).

    `header.tensors` lists the tensor only as `name`; `alias` is another name of the same tensor.
    For other formats the result is empty.
    """
    if not isinstance(header, pytorch.PytorchHeader):
        return ()
    specs = {spec.name: spec for spec in header.tensors}
    return tuple(
        (member.name, member.held_by)
        for member in header.members
        if member.plain and member.name not in specs
        for spec in [specs[member.held_by]]
        if (member.start, member.dtype, member.shape) == (spec.start, spec.dtype, spec.shape)
    )


def names_in(header: Header) -> set[str]:
    """Return all names of tensors in the file, including aliases in a torch.save file."""
    return {spec.name for spec in header.tensors} | members_in(header).keys()


def members_in(header: Header) -> Mapping[str, PickledTensor]:
    """Return the tensors of a torch.save file by name. For other formats the result is empty.

    Unlike `header.tensors`, the result includes aliases and overlapping views.
    """
    members = header.members if isinstance(header, pytorch.PytorchHeader) else ()
    return {member.name: member for member in members}


def _by_content(file: ReadableFile) -> Callable[..., Header] | None:
    head = file.read(0, min(file.size, _HEAD))
    if head.startswith(gguf.MAGIC):
        return gguf.read_header
    # A header of safetensors begins with its length, which these four bytes could be part of, and
    # then `{`; a local header of a zip has there how the entry is compressed.
    if head.startswith(pytorch.ZIP_MAGIC) and head[8:] != b"{":
        return pytorch.read_header
    return None
