"""The store as users have it: a store of checkpoints on disk, and what travels to remotes."""

from typing import TYPE_CHECKING

from tensor_dedup.store.store import LocalStore

if TYPE_CHECKING:
    from tensor_dedup.remote.remote import Remote
    from tensor_dedup.remote.results import TransferListener, TransferResult
    from tensor_dedup.types import StrPath


class Store(LocalStore):
    """A content-addressed store of checkpoints in one folder; `Store.open` opens or makes one.

    It keeps nothing open between calls: any number of objects, threads and processes may use one
    folder at once, and it survives a fork. What takes a store, as `CheckpointStore` does, takes
    this one, and gives it back as its `store`; where it was given a path, that is a LocalStore,
    which is the same without `push` and `pull`.

    Raises:
        StoreError: the store, its files or its disk failed; the subclass says how.
        CheckpointError: a path passed to a method holds no checkpoint.
    """

    def push(
        self,
        url: "StrPath | Remote",
        name: str,
        *,
        replace: bool = False,
        progress: "TransferListener | None" = None,
    ) -> "TransferResult":
        """Push a checkpoint, or all steps of a run, to a remote: only what is missing there.

        `url` is what `Remote.open` takes, the folder of another store, or `oci://` and an artifact:
        `oci://REGISTRY/REPOSITORY:TAG`, which any client of registries can pull. Nobody sees the
        name there before everything it leads to. What was cut short goes on when it is done again,
        and what `Remote.verify` has found damaged there is sent again. Of a run, steps that are
        deleted here meanwhile are left out.

        Raises:
            UnknownNameError: no checkpoint and no run is called so, or all of it was deleted
                meanwhile.
            RemoteNameTakenError: the name stands for another one there, and `replace` is off.
            NoConditionsError: the server could lose names; nothing that counts was written.
            RemoteUrlError, RemoteUnreachableError, RemoteAccessError, NotARemoteError: it cannot
                be reached, or is something else.
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
        """Pull a checkpoint, or all steps of a run, from a remote: only what is nowhere here.

        `url` is what `push` takes. An artifact (`oci://`) is called `name` here; one that somebody
        else has made is pulled as whole layers, and imported. Of a run all steps come, also those
        that retention rules have deleted here.

        Every byte is compared with its digest before anything refers to it: whoever writes to the
        remote can withhold a checkpoint or name another one, and put no wrong tensor here. What was
        cut short goes on when it is done again.

        Raises:
            UnknownRemoteNameError: the remote has neither a checkpoint nor a run of this name.
            RemoteNameTakenError: the name stands for another one here, and `replace` is off.
            MissingRemoteError, DamagedRemoteError, CorruptRemoteTensorError: objects of the remote
                are gone or damaged; nothing was committed. Of a run the other steps come; the
                error names those that failed.
            RemoteUrlError, RemoteUnreachableError, RemoteAccessError, NotARemoteError: it cannot
                be reached, or is something else.
        """
        from tensor_dedup.remote import transfer  # and with it what speaks to servers

        return transfer.pull(self, url, name, replace=replace, progress=progress)
