"""The digest of a whole checkpoint, of which a load may have hashed only a part.

A load knows the digests of the tensors that it used, or that it had hints of. A rank that used
parts of tensors does not know those of the whole ones, and nobody hashes a tensor that the model
does not need. What is missing is hashed when the digest is asked for, from the files, if they are
still what was loaded.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

from tensor_dedup.digest import StreamDigest, checkpoint_root, digest
from tensor_dedup.errors import ChangedFileError, TensorDedupError
from tensor_dedup.loader.checkpoint_io.hints import FileIdentity, HintIndex
from tensor_dedup.loader.checkpoint_io.sources import SourceFile, SourceReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from tensor_dedup.loader.checkpoint_io.sources import Placed, Reread, SourceTensor

# How much of a stored tensor is in memory at once.
_PIECE_BYTES = 64 << 20


@dataclass(slots=True)
class _Unhashed:
    """Tensors of one file whose digests are missing, and how to tell that it is still that file.

    `tensors` has the names of source tensors in the file, each with the entries that wait for its
    digest. `certain` is False if the file may have changed without another identity.
    """

    path: Path
    identity: FileIdentity
    certain: bool
    tensors: dict[str, list[list[Any]]] = field(default_factory=dict)
    stored: dict[str, tuple[Reread, int]] = field(default_factory=dict)


class CheckpointContents:
    """All tensors of a checkpoint as a load opened it, and their digest. Safe from any thread."""

    def __init__(
        self,
        named: Iterable[tuple[str, SourceTensor, Placed | None]],
        algorithm: str,
        *,
        trust: bool,
        since_ns: int | None = None,
    ) -> None:
        """Take the digests that are known; the files of the tensors must be open.

        `named` are the tensors as `SourceFile.named` yields them, of all files. `algorithm` is the
        hash algorithm of their digests. With `trust`, remembered digests (hints) are believed.
        `since_ns` is when the files were first seen, if that is before they were opened.
        """
        self._algorithm = algorithm
        self._trust = trust
        self._since_ns = since_ns
        self._lock = threading.Lock()
        self._entries: list[list[Any]] = []
        self._unhashed: dict[Path, _Unhashed] = {}
        self._digest: str | None = None
        for name, source, placed in named:
            self._add(name, source, placed)
        self._conclude()

    @classmethod
    def of_files(
        cls,
        seen: Mapping[Path, FileIdentity],
        since_ns: int,
        algorithm: str,
        *,
        trust: bool,
    ) -> Self | None:
        """Return the contents of files that somebody else has read, or None if they have changed.

        `seen` are the paths of all files of a checkpoint, with their identities before they were
        read, and `since_ns` was time.time_ns() then. Nothing but headers is read.
        """
        with ExitStack() as opened:
            try:
                files = [
                    opened.enter_context(
                        closing(SourceFile(path, HintIndex(), algorithm, trust=trust))
                    )
                    for path in seen
                ]
            except (TensorDedupError, OSError):
                return None
            if not files or any(file.identity != seen[file.path] for file in files):
                return None
            named = chain.from_iterable(file.named() for file in files)
            return cls(named, algorithm, trust=trust, since_ns=since_ns)

    def _add(self, name: str, source: SourceTensor, placed: Placed | None) -> None:
        spec = source.spec
        known = digest(b"", self._algorithm) if not spec.nbytes else source.digest
        entry: list[Any] = [name, spec.dtype, spec.shape, known]
        if placed is not None:
            entry[1:3] = placed.dtype, placed.shape
            entry += placed.start, placed.stride, placed.lazy
        self._entries.append(entry)
        if known is not None:
            return
        file = source.file
        if file.path not in self._unhashed:
            unhashed = _Unhashed(file.path, file.identity, file.tells_changes(self._since_ns))
            self._unhashed[file.path] = unhashed
        unhashed = self._unhashed[file.path]
        unhashed.tensors.setdefault(spec.name, []).append(entry)
        again = file.reread(spec)
        if again is not None:
            unhashed.stored[spec.name] = again, spec.nbytes

    def _conclude(self) -> str | None:
        """Compute the root if every digest is known now, and let go of what it is made of."""
        if self._digest is None and not self._unhashed:
            self._digest = checkpoint_root(self._entries)
            self._entries = []
        return self._digest

    @property
    def known(self) -> str | None:
        """The digest, or None if some tensors were not hashed yet."""
        return self._digest

    def digest(self) -> str:
        """Return the digest of the checkpoint; hash what was not hashed yet, and remember it.

        Raises:
            ChangedFileError: A file has changed since it was loaded, or this cannot be excluded.
            FormatError, OSError, StoreError: It can no longer be read.
        """
        with self._lock:
            for path, unhashed in list(self._unhashed.items()):
                found = self._hashed(unhashed)
                for name, entries in unhashed.tensors.items():
                    for entry in entries:
                        entry[3] = found[name]
                del self._unhashed[path]
            root = self._conclude()
            assert root is not None
            return root

    def _hashed(self, unhashed: _Unhashed) -> dict[str, str]:
        if unhashed.stored:
            return {name: self._hash_stored(*each) for name, each in unhashed.stored.items()}
        with closing(
            SourceFile(unhashed.path, HintIndex(), self._algorithm, trust=self._trust)
        ) as file:
            if not unhashed.certain or file.identity != unhashed.identity:
                raise ChangedFileError(
                    f"{unhashed.path} may have changed since it was loaded, so the digest of what "
                    "was loaded is not known; load it again",
                    path=str(unhashed.path),
                )
            found = {name: self._hash(file.tensors[name]) for name in unhashed.tensors}
            file.check_unchanged()
            file.remember()
        return found

    def _hash(self, source: SourceTensor) -> str:
        if source.digest is not None:
            return source.digest
        if self._algorithm == "blake3":
            return SourceReader(self._algorithm).read_pieces(source, lambda *_: None)
        spec = source.spec
        data = bytearray(spec.nbytes)
        source.read_into(memoryview(data))
        found = digest(data, self._algorithm)
        source.file.hashed[spec.start, spec.nbytes] = found
        return found

    def _hash_stored(self, again: Reread, nbytes: int) -> str:
        found = StreamDigest(self._algorithm, nbytes)
        with again() as read:
            for at in range(0, nbytes, _PIECE_BYTES):
                found.update(read(at, min(_PIECE_BYTES, nbytes - at)))
        return found.hexdigest()
