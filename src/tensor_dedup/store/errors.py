"""The errors of a store, one class for each way in which it can fail.

StoreError
  - of its use:    NotAStoreError, NoStoreError, BadNameError, NotTextError, NameTakenError,
                   UnknownNameError, UnknownTensorError, BadDigestError, BadRangeError,
                   ExportTargetError, NotAFolderError, ClosedCheckpointError
  - of the world:  StoreBusyError, NoSpaceError, StoreAccessError, StoreIOError, LostHitError,
                   ChangedModelError
  - of a bug:      ContradictoryManifestError
  - of its files:  NewerFormatError
                   DamagedFileError         a file of the store is not what it was written as
                     - ForeignFileError       a file that no store has
                     - EscapingPathError      a manifest names a path outside the export
                     - CorruptFrameError       encoded bytes that cannot be decoded
                   MissingObjectError       a manifest, a page or a tensor's bytes are gone
                     - ChangedExternalError   because a file that was indexed in place changed
                   CorruptTensorError       bytes that do not have their digest, and no others
                   UnfitForCollectionError  what is in use is uncertain, so nothing is deleted

Each error carries the file, the numbers and the next step to take, in its message and in `facts`.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import ClassVar, Self

from tensor_dedup.errors import WRONG_USE, StoreError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
# What a read ends with when the medium cannot give back what was written there: a bad sector (EIO,
# and ENODATA where the driver knows that it was the medium), a block whose protection data is wrong
# (EILSEQ), and bytes or an inode that the file system's own checksums refuse (EBADMSG, EUCLEAN).
# Another attempt with more rights, descriptors or space would not help, and another copy does. What
# speaks of the way to the device (ETIMEDOUT, ENOLINK, ENODEV) says nothing against the bytes.
_UNREADABLE = {errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EBADMSG, errno.EUCLEAN}


class AdvisedError(StoreError):
    """The base of a store's errors, which name the file, the fault and the next step to take."""

    advice: ClassVar[str]

    @classmethod
    def at(cls, path: PurePath | str, what: str, **facts: object) -> Self:
        """Return the error about the file at `path`; its message ends in the next step."""
        return cls(f"{path}: {what}; {cls.advice}", path=str(path), **facts)


class NotAStoreError(AdvisedError):
    """The folder is not a store."""

    exit_status = WRONG_USE
    advice = "name the folder of a store, or a new one, with --store or TENSOR_DEDUP_STORE"


class NoStoreError(NotAStoreError):
    """There is no store in the folder yet: it is empty, or does not exist."""

    advice = (
        "`tensor-dedup import` makes one; to use another, name it with --store or "
        "TENSOR_DEDUP_STORE"
    )


class BadNameError(AdvisedError):
    """A checkpoint cannot have this name."""

    exit_status = WRONG_USE
    advice = (
        "use at most 200 letters, digits and . _ - + @ =, in parts separated by /, each of which "
        "begins with a letter, a digit or _"
    )


class NotTextError(AdvisedError):
    """The name of a tensor or of a file is not Unicode: it holds half of a surrogate pair."""

    advice = "give it another name"


class NameTakenError(AdvisedError):
    """A checkpoint of this name is there already."""

    exit_status = WRONG_USE
    advice = "choose another name, or replace it with `import --replace`"


class UnknownNameError(AdvisedError):
    """No checkpoint has this name."""

    exit_status = WRONG_USE
    advice = "see `tensor-dedup list`"


class UnknownTensorError(AdvisedError):
    """The checkpoint has no tensor of this name."""

    exit_status = WRONG_USE
    advice = "see `tensor-dedup show NAME`"


class BadDigestError(AdvisedError):
    """This is neither a digest nor the beginning of one."""

    exit_status = WRONG_USE
    advice = "give 4 to 64 hex digits, as `tensor-dedup show` and `analyze` print them"


class BadRangeError(AdvisedError):
    """A range of bytes lies outside its tensor."""

    exit_status = WRONG_USE
    advice = "give 0 <= start <= stop <= nbytes"


class ExportTargetError(AdvisedError):
    """The folder to export to is not empty."""

    exit_status = WRONG_USE
    advice = "give a folder that is empty or does not exist"


class NotAFolderError(AdvisedError):
    """A path leads through a file, as through a folder."""

    exit_status = WRONG_USE
    advice = "a part of this path is a file: name another path, or move that file away"


class ClosedCheckpointError(AdvisedError):
    """A checkpoint was read after it had been closed, which is a bug in the caller."""

    advice = "open it again with Store.checkpoint"


class StoreBusyError(AdvisedError):
    """Another process holds a lock on the store that excludes this operation."""

    advice = "try again when they have ended"


class NoSpaceError(AdvisedError):
    """The file system is full. Nothing that was committed is affected."""

    advice = "free space (`tensor-dedup gc`) and do it again"


class StoreAccessError(AdvisedError):
    """This user has no permission for this operation on that file."""

    advice = "check the owner and the permissions"


class StoreIOError(AdvisedError):
    """The disk failed. Nothing that was committed is affected."""

    advice = "do it again; if it fails again, check the disk and run `tensor-dedup verify --full`"


class LostHitError(AdvisedError):
    """A piece that an import or a save found in the store was gone before it was referenced."""

    advice = "import or save it again: nothing was committed"


class ChangedModelError(AdvisedError):
    """A tensor was written to while it was being saved. Nothing was committed."""

    advice = "save between two steps of the optimizer, call `before_update()` first, or save a copy"


class ContradictoryManifestError(AdvisedError):
    """What a writer was about to commit is nothing that a reader accepts. Nothing was committed."""

    advice = "nothing was committed; report this, with the names of the checkpoint's files"


class NewerFormatError(AdvisedError):
    """The file was written by a later version of this program."""

    advice = "use a newer tensor-dedup"


class DamagedFileError(AdvisedError):
    """A file of the store is not what it was written as."""

    advice = "run `tensor-dedup verify --full`, then `tensor-dedup repair --from PATH`"


class ForeignFileError(DamagedFileError):
    """A file in a store that no store has: whose it is, and what it means, is not known."""

    advice = "move it out of the store"


class EscapingPathError(DamagedFileError):
    """A manifest contains a path outside the folder it is exported to."""

    advice = "delete this checkpoint: nothing this program writes has such a path"


class CorruptFrameError(DamagedFileError):
    """Encoded bytes that no encoder wrote, or that decode to another number of bytes."""


class MissingObjectError(AdvisedError):
    """A part of a checkpoint is no longer in the store."""

    advice = "run `tensor-dedup repair --from PATH` with a path that holds this checkpoint"


class ChangedExternalError(MissingObjectError):
    """A file that was indexed in place was removed or changed, so its tensors are absent."""

    advice = (
        "import it again with --external --replace, or run `tensor-dedup repair --from PATH` with "
        "a path that holds what it held"
    )


class CorruptTensorError(AdvisedError):
    """The bytes do not match their digest, and no other container holds them. None are returned."""

    advice = "run `tensor-dedup repair --from PATH` with a path that holds this tensor"


class UnfitForCollectionError(AdvisedError):
    """What is in use cannot be determined with certainty, so nothing is deleted."""

    advice = "run `tensor-dedup repair --from PATH`, or delete the checkpoint that is broken"


def is_unreadable(error: OSError) -> bool:
    """Return whether a read failed because the medium lost the bytes: they count as damaged."""
    return error.errno in _UNREADABLE


@contextmanager
def unreadable_as_damage(path: PurePath) -> Iterator[None]:
    """Turn an OSError of a medium that lost the file's bytes into a DamagedFileError."""
    try:
        yield
    except OSError as error:
        if not is_unreadable(error):
            raise
        what = f"the disk cannot read it ({error.strerror})"
        raise DamagedFileError.at(path, what, errno=error.errno) from error


@contextmanager
def os_errors(root: Path) -> Iterator[None]:
    """Turn an OSError into a StoreError about its file, or about `root` if it names none."""
    try:
        yield
    except OSError as error:
        path = error.filename if isinstance(error.filename, str | Path) else root
        what = error.strerror or str(error)
        if error.errno in _FULL:
            raise NoSpaceError.at(path, what, errno=error.errno) from error
        if error.errno in _DENIED:
            raise StoreAccessError.at(path, what, errno=error.errno) from error
        if error.errno == errno.ENOTDIR:
            raise NotAFolderError.at(path, what, errno=error.errno) from error
        raise StoreIOError.at(path, what, errno=error.errno) from error
