"""The errors of a store, one class for each way in which it can fail.

StoreError
  - wrong use:     NotAStoreError, NoStoreError, BadNameError, NotTextError, NameTakenError,
                   UnknownNameError, UnknownTensorError, BadDigestError, BadRangeError,
                   ExportTargetError, NotAFolderError, ClosedCheckpointError
  - environment:   StoreBusyError, NoSpaceError, StoreAccessError, StoreIOError, LostHitError,
                   ChangedModelError
  - a bug:         ContradictoryManifestError
  - stored files:  NewerFormatError
                   DamagedFileError         a file of the store has the wrong content
                     - EscapingPathError      a manifest names a path outside the export
                     - CorruptFrameError      encoded bytes cannot be decoded
                   MissingObjectError       a manifest, a page or a tensor's bytes are missing
                     - ChangedExternalError   a file that was indexed in place has changed
                   CorruptTensorError       no stored copy of a tensor matches its digest
                   UnfitForCollectionError  it is uncertain what is in use; nothing is deleted

The message of each error names the file, the fault and the next step to take. The attribute `facts`
maps names to the values in the message.
"""

import errno
from collections.abc import Iterator, Sequence
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
    """The base class of a store's errors. `advice` is the next step for the user."""

    advice: ClassVar[str]

    @classmethod
    def at(cls, path: PurePath | str, what: str, **facts: object) -> Self:
        """Return an error about the file at `path`, for the caller to raise.

        The message consists of the path, the fault `what` and the class's advice. The error's
        attribute `facts` holds the path and the given `facts`, for programs that handle the error.
        """
        return cls(f"{path}: {what}; {cls.advice}", path=str(path), **facts)


class NotAStoreError(AdvisedError):
    """The folder is not a store."""

    exit_status = WRONG_USE
    advice = "name the folder of a store, or a new one, with --store or TENSOR_DEDUP_STORE"


class NoStoreError(NotAStoreError):
    """There is no store in the folder yet: the folder is empty or does not exist."""

    advice = (
        "`tensor-dedup import` makes one; to use another, name it with --store or "
        "TENSOR_DEDUP_STORE"
    )


class BadNameError(AdvisedError):
    """The name cannot be the name of a checkpoint."""

    exit_status = WRONG_USE
    advice = (
        "use at most 200 ASCII letters, digits and . _ - + @ =, in parts separated by /, each of "
        "which begins with a letter, a digit or _"
    )


class NotTextError(AdvisedError):
    """The name of a tensor or file is not valid Unicode: it contains an unpaired surrogate."""

    advice = "give it another name"


class NameTakenError(AdvisedError):
    """The name is the name of another checkpoint already."""

    exit_status = WRONG_USE
    advice = "choose another name (`import --name`), or replace it with `import --replace`"


class LostFilesError(NameTakenError):
    """A replacement would lose files of a checkpoint that only an import of all files keeps.

    `facts` has their paths as `files`.
    """

    advice = (
        "add --all-files, choose another name (`import --name`), or take the checkpoint away first "
        "(`tensor-dedup delete`)"
    )


class UnknownNameError(AdvisedError):
    """No checkpoint has this name."""

    exit_status = WRONG_USE
    advice = "see `tensor-dedup list`"


class RunNameError(UnknownNameError):
    """The name is that of a training run, where one of its steps is wanted.

    `facts` has the name of the run as `run`, and the name of its greatest step as `step`.
    """

    @classmethod
    def of(cls, path: PurePath, run: str, steps: Sequence[str]) -> Self:
        """Return an error about the store at `path`, for the caller to raise.

        `steps` has the names of the run's steps, in order.
        """
        has = "1 step" if len(steps) == 1 else f"{len(steps)} steps"
        what = f"{run!r} is a training run with {has}, and no checkpoint"
        said = f"{path}: {what}; name a step, as in {steps[-1]!r}"
        return cls(said, path=str(path), name=run, run=run, step=steps[-1])


class UnknownTensorError(AdvisedError):
    """The checkpoint has no tensor of this name."""

    exit_status = WRONG_USE
    advice = "see `tensor-dedup show NAME`"


class BadDigestError(AdvisedError):
    """The text is neither a digest nor the beginning of a digest (4 to 64 hex digits)."""

    exit_status = WRONG_USE
    advice = "give 4 to 64 hex digits, as `tensor-dedup show` and `analyze` print them"


class BadRangeError(StoreError):
    """An argument is outside its range: a range of bytes, a share or a number of hours."""

    exit_status = WRONG_USE


class ExportTargetError(AdvisedError):
    """The target of an export is a file, or a folder that exists and is not empty."""

    exit_status = WRONG_USE
    advice = "give a folder that is empty or does not exist"


class NotAFolderError(AdvisedError):
    """A component of a path is a file where a folder is needed."""

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
    """The user has no permission for an operation on a file of the store."""

    advice = "check the owner and the permissions"


class StoreIOError(AdvisedError):
    """The disk failed to read or write. Nothing that was committed is affected."""

    advice = "do it again; if it fails again, check the disk and run `tensor-dedup verify --full`"


class LostHitError(AdvisedError):
    """A piece that was found in the store disappeared before the import or save was committed.

    The import or save committed nothing.
    """

    advice = "import or save it again: nothing was committed"


class ChangedModelError(AdvisedError):
    """A tensor was written to while it was being saved. Nothing was committed."""

    advice = "save between two steps of the optimizer, call `before_update()` first, or save a copy"


class ContradictoryManifestError(AdvisedError):
    """A new manifest did not pass the checks that readers make. Nothing was committed."""

    advice = "nothing was committed; report this, with the names of the checkpoint's files"


class NewerFormatError(AdvisedError):
    """The file was written by a later version of this program."""

    advice = "use a newer tensor-dedup"


class DamagedFileError(AdvisedError):
    """A file of the store lacks the content that was written, or the disk cannot read it."""

    advice = "run `tensor-dedup verify --full`, then `tensor-dedup repair --from PATH`"


class EscapingPathError(DamagedFileError):
    """A manifest contains a path that would lead out of the folder of an export."""

    advice = "delete this checkpoint: nothing this program writes has such a path"


class CorruptFrameError(DamagedFileError):
    """Encoded bytes are malformed, or decode to a wrong number of bytes."""


class MissingObjectError(AdvisedError):
    """A manifest, a page or a piece that a checkpoint needs is missing from the store."""

    advice = "run `tensor-dedup repair --from PATH` with a path that holds this checkpoint"


class ChangedExternalError(MissingObjectError):
    """A file that was indexed in place was changed or removed, so its tensors cannot be read."""

    advice = (
        "import it again with --external --replace, or run `tensor-dedup repair --from PATH` with "
        "a path that holds what it held"
    )


class CorruptTensorError(AdvisedError):
    """No stored copy of a tensor matches its digest, so no bytes are returned."""

    advice = "run `tensor-dedup repair --from PATH` with a path that holds this tensor"


class PathTooLongError(AdvisedError):
    """A path is longer than the file system takes, in one of its names or as a whole."""

    exit_status = WRONG_USE
    advice = "choose a shorter path, or another file system"


class UnfitForCollectionError(AdvisedError):
    """It is uncertain which files are in use, so garbage collection deletes nothing."""

    advice = "run `tensor-dedup repair --from PATH`, or delete the checkpoint that is broken"


def is_unreadable(error: OSError) -> bool:
    """Return whether `error` says that the medium lost the bytes (EIO, EBADMSG, ...)."""
    return error.errno in _UNREADABLE


@contextmanager
def unreadable_as_damage(path: PurePath) -> Iterator[None]:
    """Context manager: while it is active, an OSError about lost bytes becomes a DamagedFileError.

    An OSError is about lost bytes if `is_unreadable` says so. Any other OSError propagates. `path`
    is the file that the DamagedFileError names.
    """
    try:
        yield
    except OSError as error:
        if not is_unreadable(error):
            raise
        what = f"the disk cannot read it ({error.strerror})"
        raise DamagedFileError.at(path, what, errno=error.errno) from error


@contextmanager
def os_errors(root: Path) -> Iterator[None]:
    """Context manager: while it is active, an OSError becomes a StoreError about its file.

    If the OSError names no file, the StoreError names `root`.
    """
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
        if error.errno == errno.ENAMETOOLONG:
            raise PathTooLongError.at(path, what, errno=error.errno) from error
        raise StoreIOError.at(path, what, errno=error.errno) from error
