"""The `Store` of the public API: a local store of checkpoints, with push and pull to remotes."""

from typing import TYPE_CHECKING

from tensor_dedup.store.store import LocalStore

if TYPE_CHECKING:
    from tensor_dedup.remote.remote import Remote
    from tensor_dedup.remote.results import TransferListener, TransferResult
    from tensor_dedup.types import StrPath


class Store(LocalStore):
    """A content-addressed store of checkpoints in one folder; `Store.open` opens or creates one.

    It keeps no file open between calls, so any number of objects, threads and processes may use one
    folder at once, and a forked child may go on using the object. It is a `LocalStore` with `push`
    and `pull`, and is accepted wherever a `LocalStore` is, as by `CheckpointStore`.

    Raises:
        StoreError: The store, its files or its disk failed; the subclass says how.
        CheckpointError: A path passed to a method holds no checkpoint.
    """

    def push(
        self,
        url: "StrPath | Remote",
        name: str,
        *,
        replace: bool = False,
        progress: "TransferListener | None" = None,
    ) -> "TransferResult":
        """Push a checkpoint, or all steps of a training run, to a remote; send only what it lacks.

        `url` is a URL that `Remote.open` takes, the folder of another store, or an OCI artifact,
        `oci://REGISTRY/REPOSITORY:TAG`, which any registry client can pull. The name appears on the
        remote only after all of its data. A push that was interrupted continues when it is called
        again. Objects that `Remote.verify` found damaged are sent again. Steps of a run that are
        deleted during the push are left out.

        Raises:
            UnknownNameError: The store has no checkpoint and no run of this name, or all of it was
                deleted during the push.
            RemoteNameTakenError: The remote has another checkpoint of this name, and `replace` is
                False.
            NoConditionsError: The server does not honour conditional writes, so names could be
                lost; no checkpoint was written.
            RemoteUrlError, RemoteUnreachableError, RemoteAccessError, NotARemoteError: The remote
                cannot be reached, or there is no remote at `url`.
        """
        from tensor_dedup.remote import transfer  # and with it what speaks to servers

        return transfer.push(self, url, name, replace=replace, progress=progress)

    def pull(
        self,
        url: "StrPath | Remote",
        name: str,
        *,
        replace: bool = False,
        progress: "TransferListener | None" = None,
    ) -> "TransferResult":
        """Pull a checkpoint, or all steps of a training run, from a remote; fetch what is missing.

        `url` is as for `push`. An OCI artifact is stored under `name`; if another program made it,
        its layers are downloaded whole and imported. All steps of a run are pulled, including those
        that retention rules deleted from this store.

        Every byte is compared with its digest before it can be used. An attacker who can write to
        the remote can therefore withhold a checkpoint or give its name to another one, but cannot
        change a tensor. A pull that was interrupted continues when it is called again.

        Raises:
            UnknownRemoteNameError: The remote has neither a checkpoint nor a run of this name.
            RemoteNameTakenError: This store has another checkpoint of this name, and `replace` is
                False.
            MissingRemoteError, DamagedRemoteError, CorruptRemoteTensorError: Objects of the remote
                are missing or damaged. A checkpoint is not stored then; of a run, the undamaged
                steps are stored, and the error names the others.
            RemoteUrlError, RemoteUnreachableError, RemoteAccessError, NotARemoteError: The remote
                cannot be reached, or there is no remote at `url`.
        """
        from tensor_dedup.remote import transfer  # and with it what speaks to servers

        return transfer.pull(self, url, name, replace=replace, progress=progress)
