"""The files from which parameters are mapped, and the remembered digests (hints) of their ranges.

If a loader maps a checkpoint without copying, parameters are ranges of a file. Such a range is
found by its address, because the kernel tells which file (by device and inode) is mapped there, and
from which offset. If a hint has the digest of the range, this is the digest of the parameter. The
parameter need not be read if a resident (shared tensor) has the same digest, dtype, shape and
stride.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from tensor_dedup.digest import digests_by_place, leaf_places
from tensor_dedup.errors import ChangedFileError, UnreadableFileError
from tensor_dedup.loader.checkpoint_io.hints import QUIET_NS, FileIdentity, HintIndex
from tensor_dedup.loader.checkpoint_io.sources import StaleHintError
from tensor_dedup.loader.residents.mappings import is_as_mapped
from tensor_dedup.loader.residents.param_data import param_data

if TYPE_CHECKING:
    import torch

    from tensor_dedup.loader.residents.process_mappings import FileMapping, ProcessMappings

# How much of a file the kernel is asked to read beyond what is hashed now.
_AHEAD_BYTES: Final = 64 << 20
# Of what it is asked for at once it reads no more than a device's read_ahead_kb.
_ASK_BYTES: Final = 1 << 20


@dataclass(slots=True)
class _File:
    """An open mapped file.

    `known` are the digests that hints give, by (start, nbytes), and `learned` those that this load
    computed. `asked` is the end of the part that the kernel was asked to read.
    """

    fd: int
    path: str
    identity: FileIdentity
    began_ns: int
    known: Mapping[tuple[int, int], str]
    learned: dict[tuple[int, int], str] = field(default_factory=dict)
    asked: int = 0

    @property
    def quiet(self) -> bool:
        """Whether the file was unmodified for so long that a change would show in its times."""
        return self.began_ns - max(self.identity.mtime_ns, self.identity.ctime_ns) >= QUIET_NS


class FileRange(NamedTuple):
    """The range of an open file, in bytes, from which a tensor is mapped."""

    file: _File
    start: int
    nbytes: int

    @property
    def remembered(self) -> str | None:
        """The remembered digest (hint) of the range, or None."""
        return self.file.known.get((self.start, self.nbytes))

    @property
    def remembered_leaves(self) -> tuple[str, ...]:
        """The remembered digests (hints) of all leaves of the range, or () if one is unknown.

        A range of a single leaf (at most 2 MiB) gives (), too.
        """
        return self._leaves_in(self.file.known)

    @property
    def learned_leaves(self) -> tuple[str, ...]:
        """The digests of all leaves of the range if this load has computed them, or ().

        A range of a single leaf (at most 2 MiB) gives (), too.
        """
        return self._leaves_in(self.file.learned)

    def _leaves_in(self, digests: Mapping[tuple[int, int], str]) -> tuple[str, ...]:
        places = leaf_places(self.start, self.nbytes)
        found = tuple(digests[place] for place in places if place in digests)
        return found if len(found) == len(places) else ()

    def read(self, into: memoryview, offset: int) -> None:
        """Fill the buffer `into` with bytes of the range, from `offset` on. Safe from any thread.

        Raises:
            ChangedFileError: The file has become shorter.
            UnreadableFileError: The file cannot be read.
        """
        done = 0
        while done < len(into):
            count = self._read(into[done:], offset + done)
            if not count:
                raise ChangedFileError(
                    f"{self.file.path} became shorter while it was being loaded; load it again",
                    path=self.file.path,
                )
            done += count

    def _read(self, into: memoryview, offset: int) -> int:
        try:
            return os.preadv(self.file.fd, [into], self.start + offset)
        except OSError as error:
            raise UnreadableFileError(
                f"{self.file.path} cannot be read at byte {self.start + offset} "
                f"({error.strerror}); look at the disk or share it is on",
                path=self.file.path,
                errno=error.errno,
            ) from error


class MappedFiles:
    """The mapped files that one load has found, kept open until `close`. For one thread."""

    def __init__(self, algorithm: str, *, trust: bool) -> None:
        """Open nothing yet. `algorithm` is that of the digests to record and to look up.

        Without `trust`, hints are recorded but not used.
        """
        self._algorithm = algorithm
        self._trust = trust
        self._hints = HintIndex()
        self._files: dict[tuple[str, int], _File | None] = {}

    def range_of(self, tensor: torch.Tensor, memory: ProcessMappings) -> FileRange | None:
        """Return the file range from which `tensor`, which must have no gaps, is mapped.

        `memory` looks up the mappings of this process. Returns None in these cases:

        - The tensor does not lie in a mapped file.
        - The tensor was written to since it was mapped.
        - The file is no longer at its path.
        """
        mapped = memory.file(tensor)
        if mapped is None:
            return None
        address, nbytes = param_data(tensor).data_ptr(), tensor.nbytes
        if address + nbytes > mapped.end or not is_as_mapped(address, nbytes):
            return None
        file = self._file(mapped)
        return (
            None
            if file is None
            else FileRange(file, mapped.offset + address - mapped.start, nbytes)
        )

    def _file(self, mapped: FileMapping) -> _File | None:
        which = mapped.device, mapped.inode
        if which not in self._files:
            self._files[which] = self._open(mapped)
        return self._files[which]

    def _open(self, mapped: FileMapping) -> _File | None:
        """Open the mapped file, or return None if its path is gone or leads to another file."""
        try:
            fd = os.open(mapped.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        identity = FileIdentity.of(fd)
        major, minor = os.major(identity.device), os.minor(identity.device)
        if (f"{major:02x}:{minor:02x}", identity.inode) != (mapped.device, mapped.inode):
            os.close(fd)
            return None
        known = self._hints.lookup(fd, self._algorithm) if self._trust else {}
        return _File(fd, mapped.path, identity, time.time_ns(), known)

    def prefetch(self, ranges: Iterable[FileRange]) -> None:
        """Have the kernel read `ranges`, and some bytes after each, into the page cache.

        Without this call, a file that is not cached is read in pieces that are too small for the
        disk. For a cached file the cost is small.
        """
        for each in sorted(ranges, key=lambda each: (id(each.file), each.start)):
            stop = each.start + each.nbytes
            if stop > each.file.asked:
                start = max(each.start, each.file.asked)
                each.file.asked = min(stop + _AHEAD_BYTES, each.file.identity.size)
                for at in range(start, each.file.asked, _ASK_BYTES):
                    os.posix_fadvise(each.file.fd, at, _ASK_BYTES, os.POSIX_FADV_WILLNEED)

    def learn(self, hashed: FileRange, digest: str, leaves: Sequence[bytes] = ()) -> None:
        """Record `digest`, which was computed for the range `hashed`. `finish` stores it as a hint.

        `leaves` are the leaf digests of the range, and are recorded, too. If a hint gave another
        digest for the range, all hints of the file are deleted.

        Raises:
            StaleHintError: A hint gave another digest.
        """
        remembered = hashed.remembered
        if remembered is None:
            hashed.file.learned[hashed.start, hashed.nbytes] = digest
        elif remembered != digest:
            self._hints.forget(hashed.file.fd)
            raise StaleHintError(
                f"{hashed.file.path}: bytes {hashed.start} to {hashed.start + hashed.nbytes} hash "
                f"to {digest}, remembered as {remembered}; something wrote to the file without "
                "changing its times",
                path=hashed.file.path,
            )
        if leaves and not hashed.remembered_leaves:  # perhaps only the whole was remembered
            hashed.file.learned |= digests_by_place(hashed.start, hashed.nbytes, leaves)

    def finish(self) -> None:
        """Store the digests that `learn` has recorded as hints.

        Raises:
            ChangedFileError: A file has changed since it was opened.
        """
        for file in self._files.values():
            if file is None:
                continue
            if FileIdentity.of(file.fd) != file.identity:
                raise ChangedFileError(
                    f"{file.path} changed while it was being loaded; load it again", path=file.path
                )
            if file.learned:
                self._hints.record(
                    file.fd, file.identity, file.began_ns, self._algorithm, file.learned
                )

    def close(self) -> None:
        """Close all files. Closing twice has no effect."""
        files, self._files = self._files, {}
        with contextlib.ExitStack() as closing:
            for file in files.values():
                if file is not None:
                    closing.callback(os.close, file.fd)
