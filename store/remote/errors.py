"""The errors of remotes. Each names the object by its URL, and never holds a credential.

RemoteError
  - of its use:    RemoteUrlError, NotARemoteError, NoBucketError, ReadOnlyRemoteError
  - of the world:  RemoteUnreachableError (and NoRangesError), RemoteAccessError, RemoteBusyError,
    NoConditionsError
  - with those of the store: UnknownRemoteNameError, RemoteNameTakenError, DamagedRemoteError,
    MissingRemoteError, CorruptRemoteTensorError, UncertainRemoteError
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Self

from tensor_dedup.errors import NOBODY_THERE, WRONG_USE
from tensor_dedup.store.errors import (
    AdvisedError,
    CorruptTensorError,
    DamagedFileError,
    MissingObjectError,
    NameTakenError,
    NewerFormatError,
    UnfitForCollectionError,
    UnknownNameError,
)


class RemoteError(AdvisedError):
    """The base of what only a remote can fail with."""

    advice = "try again"


class RemoteUrlError(RemoteError):
    """This URL cannot name a remote."""

    exit_status = WRONG_USE
    advice = (
        "write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, file:///FOLDER, "
        "https://HOST/PREFIX (read only), or the folder of a store; push and pull also take "
        "oci://REGISTRY/REPOSITORY:TAG; keys belong in the environment"
    )


class NotARemoteError(RemoteError):
    """There is no remote here: nothing at all, or something else."""

    exit_status = NOBODY_THERE
    advice = "check the URL; `tensor-dedup push NAME URL` makes a remote where nothing is"


class NoBucketError(NotARemoteError):
    """There is no such bucket, and a push makes none."""

    advice = "check its name; if it is right, create the bucket with its provider's own tools"


class ReadOnlyRemoteError(RemoteError):
    """A remote behind a plain web server cannot be written to."""

    exit_status = WRONG_USE
    advice = "push to the object storage or to the folder that the web server serves"


class RemoteUnreachableError(RemoteError):
    """The server does not answer, or answers nothing that can be used."""

    exit_status = NOBODY_THERE
    advice = "check the URL, the endpoint and the network, and do it again: it goes on from there"


class NoRangesError(RemoteUnreachableError):
    """The server answers a range of an object with the whole object."""

    advice = "pull from a server that knows ranges"


class RemoteAccessError(RemoteError):
    """The server refuses the credentials, or there are none."""

    exit_status = NOBODY_THERE
    advice = (
        "set the credentials of this service in the environment (for S3 AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN; for Azure AZURE_STORAGE_ACCOUNT_NAME, "
        "AZURE_STORAGE_ACCOUNT_KEY; for a registry `docker login` or `oras login`), "
        "or renew them if they have expired"
    )


class NoConditionsError(RemoteError):
    """The server does not keep the conditions of a write, so two pushes could lose a name."""

    advice = "push to a server that keeps If-Match and If-None-Match; pulling from here is fine"


class RemoteBusyError(RemoteError):
    """Others change the remote at the same time, in a way that cannot be waited out."""

    advice = "do it again when they have ended"


class UnknownRemoteNameError(UnknownNameError):
    """The remote has no checkpoint of this name."""

    advice = "see `tensor-dedup remote list URL`"


class RemoteNameTakenError(NameTakenError):
    """The name stands for another checkpoint on the other side."""

    advice = "choose another name, or replace it with --replace"


class _LostRemotelyError(AdvisedError):
    """A remote does not have what it should. Its next step depends on what kind it is."""

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


class DamagedRemoteError(_LostRemotelyError, DamagedFileError):
    """An object of a remote is not what it was written as; nothing of it was taken."""


class MissingRemoteError(_LostRemotelyError, MissingObjectError):
    """An object that a checkpoint of a remote needs is not there."""


class CorruptRemoteTensorError(_LostRemotelyError, CorruptTensorError):
    """Bytes that came from a remote do not have their digest. Nothing was committed."""


class UncertainRemoteError(UnfitForCollectionError):
    """It is not certain what is in use on a remote, so nothing is deleted there."""

    advice = "push the broken checkpoint again, or delete it with `tensor-dedup remote delete`"


@contextmanager
def remote_damage(where: str) -> Iterator[PurePath]:
    """Turn damage of what is decoded inside the block into that of the object `where`.

    Gives the path to decode it under.
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
