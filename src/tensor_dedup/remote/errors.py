"""The errors about remotes. Their messages name objects by URLs, and contain no credentials.

RemoteError
  - caused by use: RemoteUrlError, NotARemoteError (and TakenPlaceError, FormerRemoteError),
                   ReadOnlyRemoteError, UnlistedRemoteError
  - environment:   RemoteUnreachableError (and NoRangesError), RemoteAccessError, RemoteBusyError,
                   NoConditionsError

Subclasses of errors of the store: UnknownRemoteNameError, RemoteNameTakenError,
UncertainRemoteError, and the LostRemotelyErrors DamagedRemoteError, MissingRemoteError and
CorruptRemoteTensorError.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Final, Self

from tensor_dedup.errors import NOBODY_THERE, WRONG_USE
from tensor_dedup.store.errors import (
    AdvisedError,
    CorruptTensorError,
    DamagedFileError,
    MissingObjectError,
    NameTakenError,
    NewerFormatError,
    StoreAccessError,
    StoreIOError,
    UnfitForCollectionError,
    UnknownNameError,
)

# How each service takes credentials.
_CREDENTIALS: Final = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN, if they are "
    "temporary), or renew them",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or renew them",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or renew them",
    "oci": "run `docker login` or `oras login`",
    **dict.fromkeys(("http", "https"), "use the object storage or the folder that it serves"),
}


class RemoteError(AdvisedError):
    """Base of the errors that only remotes raise."""

    advice = "try again"


class RemoteUrlError(RemoteError):
    """The URL cannot name a remote."""

    exit_status = WRONG_USE
    advice = (
        "write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, file:///FOLDER, "
        "https://HOST/PREFIX (read only), or the folder of a store; push and pull also take "
        "oci://REGISTRY/REPOSITORY:TAG; keys belong in the environment"
    )


class NotARemoteError(RemoteError):
    """There is no remote at this URL, because the place is empty or holds something else."""

    exit_status = NOBODY_THERE
    advice = (
        "check the URL; `tensor-dedup push NAME URL` or a Publisher makes a remote where none is"
    )

    @classmethod
    def at(cls, path: PurePath | str, what: str, **facts: object) -> Self:
        # docstring inherited
        if str(path).startswith(("http://", "https://")):
            advice = "check the URL: it is that of the folder in which FORMAT and refs are"
        elif cls is NotARemoteError and str(path).startswith("file://"):
            advice = "check the URL, and that the disk is mounted; where nothing was ever pushed, "
            advice += "`tensor-dedup push NAME URL`, or a Publisher, makes a remote"
        else:
            return super().at(path, what, **facts)
        return cls(f"{path}: {what}; {advice}", path=str(path), **facts)


class TakenPlaceError(NotARemoteError):
    """A push cannot make a remote here, because the place is taken.

    The place holds something else, or lies inside a store or another remote.
    """

    exit_status = WRONG_USE
    advice = "push to an empty folder or to one to be made, outside it"


class FormerRemoteError(TakenPlaceError):
    """The remote has a format from before version 1, which is not supported."""

    advice = "pull with the program that wrote it, and push to an empty folder"


class ReadOnlyRemoteError(RemoteError):
    """A remote behind a plain web server cannot be written to."""

    exit_status = WRONG_USE
    advice = "push to the object storage or to the folder that the web server serves"


class RemoteUnreachableError(RemoteError):
    """The server does not answer, or its answer cannot be used."""

    exit_status = NOBODY_THERE
    advice = "check the URL, the endpoint and the network, and do it again: it goes on from there"


class NoRangesError(RemoteUnreachableError):
    """The server answers a request for a range of an object with the whole object."""

    advice = "pull from a server that knows ranges"


class UnlistedRemoteError(RemoteUnreachableError):
    """A plain web server cannot list objects, so checkpoints have to be requested by name."""

    exit_status = WRONG_USE
    advice = (
        "name the object storage or the folder that it serves; from here, `pull` and `remote show` "
        "take the name of a checkpoint or of a step (RUN@STEP)"
    )


class RemoteAccessError(RemoteError):
    """The server refuses the credentials, or no credentials were found."""

    exit_status = NOBODY_THERE
    advice = "give the credentials of this service, or renew them if they have expired"

    @classmethod
    def at(cls, path: PurePath | str, what: str, **facts: object) -> Self:
        # docstring inherited
        scheme = str(path).partition("://")[0]
        advice = _CREDENTIALS.get(scheme, cls.advice)
        return cls(f"{path}: {what}; {advice}", path=str(path), **facts)


class NoConditionsError(RemoteError):
    """The server does not keep what a push relies on, so that concurrent pushes could lose a name.

    The fact `condition` is `If-Match`, `If-None-Match`, or `404`, the answer for a missing key.
    """

    advice = (
        "push to a server that keeps If-Match and If-None-Match and answers 404 for a missing key; "
        "pulling from here is fine"
    )


class RemoteBusyError(RemoteError):
    """Other writers keep changing the remote, and waiting for them did not help."""

    advice = "do it again when they have ended"


class UnknownRemoteNameError(UnknownNameError):
    """The remote has no checkpoint of this name."""

    advice = "see `tensor-dedup remote list URL`"


class RemoteNameTakenError(NameTakenError):
    """At the destination of a push or pull, the name stands for another checkpoint."""

    advice = "choose another name, or replace it with --replace"


class LostRemotelyError(AdvisedError):
    """Base of the errors about missing or damaged content of a remote or an OCI artifact.

    The message has different advice for a remote and for an artifact.
    """

    advice = (
        "run `tensor-dedup remote verify URL --full`, then `tensor-dedup push NAME URL --replace` "
        "from a store that has it"
    )

    @classmethod
    def at(cls, path: PurePath | str, what: str, **facts: object) -> Self:
        # docstring inherited
        if not str(path).startswith("oci://"):
            return super().at(path, what, **facts)
        # There is nothing to verify there, and a registry does not say what it has damaged.
        advice = (
            "run `tensor-dedup push NAME URL --replace` from a store that has it, which sends what "
            "the registry lacks; what it has damaged has to be deleted there first"
        )
        return cls(f"{path}: {what}; {advice}", path=str(path), **facts)


class DamagedRemoteError(LostRemotelyError, DamagedFileError):
    """An object on a remote is damaged; none of its content was used."""


class MissingRemoteError(LostRemotelyError, MissingObjectError):
    """An object that a checkpoint on a remote needs is missing."""


class CorruptRemoteTensorError(LostRemotelyError, CorruptTensorError):
    """Bytes from a remote do not match their digest. Nothing was committed."""


class UncertainRemoteError(UnfitForCollectionError):
    """A gc cannot determine which objects on a remote are in use, so it deletes nothing."""

    advice = (
        "run `tensor-dedup push NAME URL --replace` from a store that has the broken checkpoint, "
        "or `tensor-dedup remote delete URL NAME`"
    )


@contextmanager
def remote_damage(where: str) -> Iterator[PurePath]:
    """Context manager that makes decoding errors name the remote object at the URL `where`.

    It yields a path to pass to the decoder. A DamagedFileError becomes a DamagedRemoteError with
    the URL. A NewerFormatError keeps its class, and gets the URL.
    """
    path = PurePath("object")
    try:
        yield path
    except DamagedFileError as error:
        what = str(error).removeprefix(f"{path}: ").removesuffix(f"; {error.advice}")
        facts = {key: value for key, value in error.facts.items() if key != "path"}
        raise DamagedRemoteError.at(where, what, **facts) from error
    except NewerFormatError as error:
        what = str(error).removeprefix(f"{path}: ").removesuffix(f"; {error.advice}")
        raise NewerFormatError.at(where, what) from error


@contextmanager
def as_far_as_allowed() -> Iterator[None]:
    """Context manager that skips the rest of its block if a write is refused, without an error.

    So a check that also makes repairs can be used with read access only.
    """
    try:
        yield
    except (RemoteAccessError, ReadOnlyRemoteError, StoreAccessError):
        pass
    except StoreIOError as error:
        if error.facts.get("errno") != errno.EROFS:
            raise
