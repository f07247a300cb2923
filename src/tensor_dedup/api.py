"""The `Store` of the public API: a local store of checkpoints, with push and pull to remotes."""

from typing import TYPE_CHECKING

from tensor_dedup.store.store import LocalStore

if TYPE_CHECKING:
    from tensor_dedup.remote.remote import Remote
    from tensor_dedup.remote.results import TransferListener, TransferResult
    from tensor_dedup.types import StrPath


class Store(LocalStore):
    """A content-addressed store of checkpoints in one folder; `Store.open` opens or creates one.

    Any number of objects, threads and processes may use the same folder at once, and a forked child
    may go on using the object, because no file stays open between calls.

    A `Store` is a `LocalStore` that also has `push` and `pull`, and can be passed wherever a
    `LocalStore` is expected, for example to `CheckpointStore`.

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
        dry_run: bool = False,
    ) -> "TransferResult":
        """Push the checkpoint or run `name` to a remote; send only data that the remote lacks.

        `url` is a URL that `Remote.open` takes, the folder of another store, or an OCI artifact,
        `oci://REGISTRY/REPOSITORY:TAG`, which any registry client can pull. A training run is
        pushed with all its steps, except for steps that are deleted during the push. `progress` is
        a listener to the progress in bytes.

        The name appears on the remote only after all of its data. With `replace`, it may take the
        place of another checkpoint on the remote. If a push was interrupted, the same call
        continues it. Objects that `Remote.verify` found damaged are sent again. With `dry_run`,
        nothing is written, and the result counts what would be sent.

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

        return transfer.push(self, url, name, replace=replace, progress=progress, dry_run=dry_run)

    def pull(
        self,
        url: "StrPath | Remote",
        name: str,
        *,
        replace: bool = False,
        progress: "TransferListener | None" = None,
        dry_run: bool = False,
    ) -> "TransferResult":
        """Pull the checkpoint or run `name` from a remote; fetch only data that is missing here.

        `url` is a URL that `Remote.open` takes, the folder of another store, or an OCI artifact,
        `oci://REGISTRY/REPOSITORY:TAG`. An OCI artifact is stored under `name`; if another program
        made it, its layers are downloaded whole and imported. A training run is pulled with all its
        steps, including those that retention rules deleted from this store. `progress` is a
        listener to the progress in bytes.

        With `replace`, the checkpoint may take the place of another one of this name in the store.
        If a pull was interrupted, the same call continues it. With `dry_run`, nothing is written,
        and the result counts what would be fetched.

        Every byte is compared with its digest before it can be used. An attacker who can write to
        the remote can therefore withhold a checkpoint or give its name to another one, but cannot
        change a tensor.

        Raises:
            UnknownRemoteNameError: The remote has neither a checkpoint nor a run of this name.
            RemoteNameTakenError: This store has another checkpoint of this name, and `replace` is
                False.
            MissingRemoteError, DamagedRemoteError, CorruptRemoteTensorError: Objects of the remote
                are missing or damaged. A single checkpoint is then not stored. The undamaged steps
                of a run are stored, and the error names the others.
            RemoteUrlError, RemoteUnreachableError, RemoteAccessError, NotARemoteError: The remote
                cannot be reached, or there is no remote at `url`.
        """
        from tensor_dedup.remote import transfer  # and with it what speaks to servers

        return transfer.pull(self, url, name, replace=replace, progress=progress, dry_run=dry_run)
