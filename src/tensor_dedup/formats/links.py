"""Where symbolic links in a checkpoint's folder may lead.

A downloaded folder may be hostile: if a link in it to a private key were followed, the key would be
copied into a store and into everything that is exported from the store. Links are followed within
the folder and, in a snapshot of a Hugging Face cache, to the blobs of the same repository and to
those of the cache's shared store. Other links are refused unless the caller allows them. The path
of the folder or file itself, which the user gives, may contain any links.
"""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from tensor_dedup.formats.errors import CheckpointFault, CheckpointFilesError, shorten

_REPOSITORY = re.compile(r"[a-z]+--.+")
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"
# Of huggingface_hub 2.2 and later: blobs/<2 hex>/<64 hex>, named by the hash of their Xet download.
_SHARED_MARKER = ".huggingface-shared-blobs"
_SHARED_BLOB = re.compile(r"(?P<prefix>[0-9a-f]{2})/(?P=prefix)[0-9a-f]{62}")


@dataclass(frozen=True, slots=True)
class LinkBoundary:
    """The folders in which the targets of a checkpoint's symbolic links must lie.

    `folder` is the checkpoint's folder. `inside` are the allowed folders, or None if every target
    is allowed. `shared` is the shared blob store of the checkpoint's Hugging Face cache, or None if
    there is none. In that store only blobs are allowed, which are recognised by their names.
    """

    folder: Path
    inside: tuple[Path, ...] | None
    shared: Path | None = None

    @classmethod
    def around(cls, folder: Path) -> Self:
        """Return the default boundary of the checkpoint in `folder`.

        The allowed folders are `folder` itself and, in a Hugging Face cache, the blobs of its
        repository and the shared blobs of the cache.
        """
        real = Path(os.path.realpath(folder))
        repository = _repository_of(real)
        if repository is None:
            return cls(folder, (real,))
        return cls(folder, (real, repository / _BLOBS), _shared_blobs_of(repository.parent))

    def check(self, path: Path) -> None:
        """Check that `path` leads into an allowed folder. Call it before the file is opened.

        Raises:
            CheckpointFilesError: The target of `path` lies outside the allowed folders.
        """
        real = Path(os.path.realpath(path))
        if not self._holds(real):
            self._refuse(path, real)

    def check_open(self, path: Path, fd: int) -> None:
        """Check that the file `fd`, which was opened as `path`, lies in the allowed folders.

        Because the open file itself is checked, links that change meanwhile make no difference.

        Raises:
            CheckpointFilesError: The file lies outside the allowed folders.
        """
        try:
            real = Path(f"/proc/self/fd/{fd}").readlink()
        except OSError:  # no /proc: then a link could be exchanged just now
            real = Path(os.path.realpath(path))
        if not self._holds(real):
            self._refuse(path, real)

    def _holds(self, real: Path) -> bool:
        if self.inside is None or any(real.is_relative_to(folder) for folder in self.inside):
            return True
        return self.shared is not None and self._is_shared_blob(real)

    def _is_shared_blob(self, real: Path) -> bool:
        # `real` has no links left, so neither the store, a folder in it nor the blob is one. Which
        # repository a blob belongs to is not asked: its manifest is a file that anybody may write,
        # and a folder that links to the blob of another repository has to know a hash of its bytes.
        assert self.shared is not None
        if not real.is_relative_to(self.shared):
            return False
        return _SHARED_BLOB.fullmatch(real.relative_to(self.shared).as_posix()) is not None

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


def _repository_of(real: Path) -> Path | None:
    """The repository in whose snapshots a folder is, if it is in a hub cache."""
    for folder in (real, *real.parents):
        repository = folder.parent.parent
        if folder.parent.name == _SNAPSHOTS and _REPOSITORY.fullmatch(repository.name):
            return repository
    return None


def _shared_blobs_of(cache: Path) -> Path | None:
    """The shared blob store of a cache, if huggingface_hub has marked it as its own.

    The marker's text, a version, is not compared: whatever a later one adds, only files with the
    name and place of a blob are allowed.
    """
    store = cache / _BLOBS
    try:
        marked = stat.S_ISREG((store / _SHARED_MARKER).lstat().st_mode)
    except OSError:
        return None
    return store if marked else None
