"""A folder of data files with an index, as an import took it into a store. No torch."""

from bisect import bisect_right
from pathlib import Path
from typing import Self

from tensor_dedup.errors import CheckpointNotFoundError
from tensor_dedup.formats.artifact import ArtifactDescriptor
from tensor_dedup.formats.data_files import INDEX_NAME, data_files
from tensor_dedup.formats.tensor_index import check_data, parse_index
from tensor_dedup.store.format.manifests import Piece
from tensor_dedup.store.reading.reader import StoredCheckpoint


class StoredArtifact:
    """The same as ArtifactFolder, read from an open checkpoint, which compares every byte itself.

    Any thread may read. The checkpoint stays open.
    """

    verified = True
    descriptor: ArtifactDescriptor | None = None

    def __init__(self, checkpoint: StoredCheckpoint) -> None:
        """CheckpointNotFoundError: it was not such a folder. FormatError."""
        self.path = Path(checkpoint.name)
        self._checkpoint = checkpoint
        self._files = {file.path: file.pieces for file in checkpoint.files}
        _, blob = self.optional(INDEX_NAME)
        if blob is None:
            raise CheckpointNotFoundError(
                f"{checkpoint.name}: it has no {INDEX_NAME}; load it with load_tensors",
                path=checkpoint.name,
            )
        self.index = parse_index(blob, INDEX_NAME)
        self._pieces = [p for name in data_files(self._files).files for p in self._files[name]]
        self._starts: list[int] = []
        end = 0
        for piece in self._pieces:
            self._starts.append(end)
            end += piece.nbytes
        check_data(self.index, end, checkpoint.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""

    def optional(self, name: str) -> tuple[Path, bytes | None]:
        """A small file: its name, and its bytes where it is there."""
        pieces = self._files.get(name)
        if pieces is None:
            return self.path / name, None
        return self.path / name, b"".join(map(self._whole, pieces))

    def _whole(self, piece: Piece) -> bytes:
        return bytes(self._checkpoint.read_piece(piece.digest, 0, piece.nbytes, piece.nbytes))

    def read(self, view: memoryview, start: int) -> None:
        """Fill `view` from `start` of the data. CorruptTensorError, MissingObjectError."""
        done, number = 0, max(0, bisect_right(self._starts, start) - 1)
        while done < view.nbytes:
            piece, at = self._pieces[number], start + done - self._starts[number]
            with view[done : done + max(0, piece.nbytes - at)] as part:
                self._checkpoint.read_piece_into(piece.digest, at, part, piece.nbytes)
                done += part.nbytes
            number += 1
