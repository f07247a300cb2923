"""Where symbolic links in a checkpoint's folder may lead.

A downloaded folder is somebody else's: a link in it to a private key, followed, would put the key
into a store and into everything that is exported from it. Links are followed within the folder
and, in a snapshot of a hub cache, to the blobs of the same repository; where else they lead to is
refused unless the caller allows it. The folder itself, or a file that is named alone, may be
reached by any links: that path is the user's own.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from tensor_dedup.formats.errors import CheckpointFault, CheckpointFilesError, shorten

_REPOSITORY = re.compile(r"[a-z]+--.+")
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


@dataclass(frozen=True, slots=True)
class LinkBoundary:
    """The folders that links of the checkpoint in `folder` may lead into; None: anywhere."""

    folder: Path
    inside: tuple[Path, ...] | None

    @classmethod
    def around(cls, folder: Path) -> Self:
        """Return the boundary of the checkpoint in `folder`."""
        real = Path(os.path.realpath(folder))
        return cls(folder, (real, *_blobs_of(real)))

    def check(self, path: Path) -> None:
        """Check where a path below the folder leads, by its links, before it is opened.

        Raises:
            CheckpointFilesError: it leads out of the checkpoint.
        """
        real = Path(os.path.realpath(path))
        if not self._holds(real):
            self._refuse(path, real)

    def check_open(self, path: Path, fd: int) -> None:
        """Check which file a path below the folder has led to, now that it is open as `fd`.

        This is about the very file whose bytes are read, whatever happens to the links meanwhile.

        Raises:
            CheckpointFilesError: it lies outside the checkpoint.
        """
        try:
            real = Path(f"/proc/self/fd/{fd}").readlink()
        except OSError:  # no /proc: then a link could be exchanged just now
            real = Path(os.path.realpath(path))
        if not self._holds(real):
            self._refuse(path, real)

    def _holds(self, real: Path) -> bool:
        return self.inside is None or any(real.is_relative_to(folder) for folder in self.inside)

    def _refuse(self, path: Path, real: Path) -> None:
        link = self._outermost(path)
        raise CheckpointFilesError.at(
            CheckpointFault.LINK_OUTSIDE,
            str(link),
            f"a link to {shorten(str(real))}, which is outside {self.folder}",
            link=str(link),
            target=str(real),
        )

    def _outermost(self, path: Path) -> Path:
        """The first part of a path that leads outside: a folder on the way may be the link."""
        below = [part for part in path.parents if part.is_relative_to(self.folder)]
        outside = (
            part for part in reversed(below) if not self._holds(Path(os.path.realpath(part)))
        )
        return next(outside, path)


ANYWHERE: Final = LinkBoundary(Path(), None)


def _blobs_of(real: Path) -> tuple[Path, ...]:
    """The blobs of the repository in whose snapshots a folder is, if it is in a hub cache."""
    for folder in (real, *real.parents):
        repository = folder.parent.parent
        if folder.parent.name == _SNAPSHOTS and _REPOSITORY.fullmatch(repository.name):
            return (repository / _BLOBS,)
    return ()
