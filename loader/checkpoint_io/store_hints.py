"""What the store tells of the files it imports, as hints. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tensor_dedup.loader.checkpoint_io.hints import FileIdentity, HintIndex
from tensor_dedup.store.files import FileStatus

_ALGORITHM = "blake3"  # the store knows no other


@dataclass(frozen=True, slots=True)
class StoreHints:
    """Remembers the files an import has hashed: loading them later hashes nothing.

    The import itself trusts no hint: what is in the store was read. Safe from any thread.
    """

    index: HintIndex = field(default_factory=HintIndex)

    def imported(
        self, fd: int, before: FileStatus, began_ns: int, digests: Mapping[tuple[int, int], str]
    ) -> None:
        """Enter what was hashed; the index refuses what cannot be relied on later."""
        identity = FileIdentity(
            before.device, before.inode, before.size, before.mtime_ns, before.ctime_ns
        )
        self.index.record(fd, identity, began_ns, _ALGORITHM, digests)

    def known(self, _: Path, fd: int) -> Mapping[tuple[int, int], str]:
        """The digests remembered of an open file."""
        return self.index.lookup(fd, _ALGORITHM)
