"""A folder of data files with an index, open for reading. No torch."""

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tensor_dedup.errors import ChangedFileError, CheckpointNotFoundError
from tensor_dedup.formats.artifact import index_multihash, parse_descriptor
from tensor_dedup.formats.errors import NotAFileError
from tensor_dedup.formats.safetensors import MAX_HEADER_BYTES
from tensor_dedup.formats.tensor_index import (
    TensorIndex,
    check_data,
    check_same,
    parse_index,
    parse_index_cbor,
)
from tensor_dedup.formats.tensor_index_errors import DataFilesError, DescriptorError
from tensor_dedup.store.files import Files, Handle
from tensor_dedup.store.interchange.data_files import DATA_NAME

_DATA = re.compile(re.escape(DATA_NAME) + r"(0|[1-9][0-9]{0,5})")


class ArtifactFolder:
    """The index and descriptor of a folder, checked, and its data as one run of bytes.

    Any thread may read. Close it, or use it as a context manager.
    """

    verified = False

    def __init__(self, files: Files, path: Path) -> None:
        """Open it. CheckpointNotFoundError, FormatError."""
        self.path = path
        self._files = files
        self._undo = ExitStack()
        self._starts: list[tuple[int, Handle]] = []
        self.data_bytes = 0
        index_path, blob = self.optional("tensor_index.json")
        self.index = self._index(index_path, blob)
        descriptor_path, text = self.optional("artifact_descriptor.json")
        self.descriptor = None if text is None else parse_descriptor(text, str(descriptor_path))
        if self.descriptor is not None and blob is not None:
            self._check_descriptor(descriptor_path, blob)
        try:
            self._open_data()
            check_data(self.index, self.data_bytes, str(path))
        except BaseException:
            self.close()
            raise

    def _index(self, path: Path, blob: bytes | None) -> TensorIndex:
        cbor_path, cbor = self.optional("tensor_index.cbor")
        index = None if blob is None else parse_index(blob, str(path))
        other = None if cbor is None else parse_index_cbor(cbor, str(cbor_path))
        if index is not None and other is not None:
            check_same(index, other)
        found = index or other
        if found is None:
            raise CheckpointNotFoundError(
                f"{path}: no such file; name a folder with a tensor_index.json", path=str(path)
            )
        return found

    def _check_descriptor(self, path: Path, blob: bytes) -> None:
        descriptor = self.descriptor
        if descriptor is None:
            return
        if descriptor.index_multihash != index_multihash(blob):
            raise DescriptorError.at(str(path), "it is about another index")
        if descriptor.total_size != self.index.total_size:
            what = f"{descriptor.total_size} bytes, the index has {self.index.total_size}"
            raise DescriptorError.at(str(path), what)

    def _open_data(self) -> None:
        found = (_DATA.fullmatch(name) for name in self._files.listdir(self.path))
        numbers = sorted(int(match[1]) for match in found if match)
        if numbers != list(range(len(numbers))) or not numbers:
            what = f"there are data files {numbers[:8]}, which is not 0, 1, 2, ..."
            raise DataFilesError.at(str(self.path), what)
        for number in numbers:
            handle = self._open(self.path / f"{DATA_NAME}{number}")
            self._starts.append((self.data_bytes, handle))
            self.data_bytes += self._files.status_of(handle).size

    def _open(self, path: Path) -> Handle:
        handle = self._files.open(path, "read")
        self._undo.callback(self._files.close, handle)
        if self._files.status_of(handle).kind != "file":
            raise NotAFileError.at(str(path), "not a regular file")
        return handle

    def optional(self, name: str) -> tuple[Path, bytes | None]:
        """A small file of the folder: its path, and its bytes where it is there."""
        path = self.path / name
        try:
            handle = self._files.open(path, "read")
        except (FileNotFoundError, NotADirectoryError):
            return path, None
        try:
            status = self._files.status_of(handle)
            if status.kind != "file" or status.size > MAX_HEADER_BYTES:
                raise NotAFileError.at(str(path), f"not a file of {MAX_HEADER_BYTES} bytes at most")
            blob = bytearray(status.size)
            return path, bytes(blob[: self._files.pread(handle, memoryview(blob), 0)])
        finally:
            self._files.close(handle)

    def read(self, view: memoryview, start: int) -> None:
        """Fill `view` from `start` of the data. ChangedFileError: there are fewer bytes now."""
        done = 0
        ends = [at for at, _ in self._starts[1:]] + [self.data_bytes]
        for (at, handle), end in zip(self._starts, ends, strict=True):
            begin = start + done
            if not at <= begin < end or done == view.nbytes:
                continue
            with view[done : done + end - begin] as part:
                if self._files.pread(handle, part, begin - at) != part.nbytes:
                    raise ChangedFileError(
                        f"{handle.path}: it ends before {end - at} by now; load it again when "
                        "nobody writes it",
                        path=str(handle.path),
                    )
                done += part.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; a second time does nothing."""
        self._undo.close()
