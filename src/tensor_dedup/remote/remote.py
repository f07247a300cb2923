"""A remote: checkpoints in object storage, in a folder, or behind a plain web server."""

import shlex
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Self

from tensor_dedup.remote import layout, step_costs, sweep, upkeep, verify
from tensor_dedup.remote.buckets import Bucket, ObjectStatus
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    NotARemoteError,
    RemoteUnreachableError,
    RemoteUrlError,
    UnknownRemoteNameError,
    UnlistedRemoteError,
)
from tensor_dedup.remote.folder_bucket import FolderBucket
from tensor_dedup.remote.lease import LEASE_S
from tensor_dedup.remote.manifests import (
    RemoteManifest,
    find_ref,
    list_refs,
    read_manifest,
    read_ref,
)
from tensor_dedup.remote.urls import open_bucket
from tensor_dedup.store.errors import NewerFormatError, UnknownNameError
from tensor_dedup.store.files import Files, RealFiles
from tensor_dedup.store.steps.runs import parse_step_name, step_name

DEFAULT_LEASE_HOURS = LEASE_S / 3600


class Remote:
    """A remote, to which stores push and from which they pull. Open one with `Remote.open`.

    The object keeps no connection open. Safe from any thread. Credentials are those that obstore
    finds in the environment; a URL must not contain credentials.

    Raises:
        RemoteUnreachableError: From any method, if the server does not answer.
        RemoteAccessError: From any method, if the server refuses the request.
    """

    def __init__(self, bucket: Bucket) -> None:
        # The other modules of this package use it, too.
        self.bucket = bucket

    @classmethod
    def open(cls, url: str | PathLike[str], *, files: Files | None = None) -> Self:
        """Open the remote at `url`; no request is sent, and nothing is created.

        The URL is one of:

        * `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX`;
        * `file:///FOLDER`, or the path of a folder;
        * `https://HOST/PREFIX`, for read access through a web server.

        `files` is the interface to the file system, which tests replace.

        Raises:
            RemoteUrlError: The URL cannot name a remote, or contains a credential.
            NotInstalledError: The package obstore, of the extra `remote`, is not installed.
        """
        if not isinstance(url, (str, PathLike)):
            raise RemoteUrlError.at(repr(url), "it is neither text nor a path")
        if isinstance(url, PathLike) and not Path(url).parts:
            what = "it is empty, as of a variable that is not set; Path.cwd() is where you are"
            raise RemoteUrlError.at(repr(url), what)
        return cls(open_bucket(str(url), files or RealFiles()))

    def __repr__(self) -> str:
        return f"Remote({self.url!r})"

    @property
    def url(self) -> str:
        """The URL of the remote. It contains no secret."""
        return self.bucket.url

    def names(self) -> list[str]:
        """Return the names of all checkpoints on the remote whose manifests can be read, sorted.

        Raises:
            NotARemoteError: There is no remote.
        """
        return [each.name for each in self.checkpoints() if each.manifest]

    def checkpoints(self, names: Sequence[str] | None = None) -> list[upkeep.RemoteCheckpoint]:
        """Return a description of each checkpoint, or of those in `names`, sorted by name.

        For a checkpoint that cannot be read completely, `damage` has the reason.
        """
        return upkeep.checkpoints(self.bucket, names)

    def steps(self, run: str) -> list[str]:
        """Return the names of the steps of a run in order, without deleted steps.

        The list is empty if there is no such run, if `run` is the name of a checkpoint, or if the
        remote is behind a plain web server, which cannot list objects.
        """
        return self._of_run(run, kept=False)

    def marks(self, run: str) -> list[str]:
        """Return the names of the marks of a run in order, including marks of deleted steps.

        The list is empty if there is no such run, if `run` is the name of a checkpoint, or if the
        remote is behind a plain web server, which cannot list objects.
        """
        return self._of_run(run, kept=True)

    def _of_run(self, run: str, *, kept: bool) -> list[str]:
        if self._is_there(run):
            return []
        try:
            there = list_refs(self.bucket, run)
        except RemoteUnreachableError:
            if not self.bucket.read_only:
                raise
            return []
        steps = [step for name in there if (step := parse_step_name(name)) and step.run == run]
        numbers = sorted(each.step for each in steps if each.kept == kept)
        return [step_name(run, n, kept=kept) for n in numbers]

    def _is_there(self, name: str) -> bool:
        try:
            return self.has(name)
        except (DamagedRemoteError, NewerFormatError):
            return True

    def read(self, name: str) -> RemoteManifest:
        """Read the manifest of the checkpoint `name` with its list of pieces, but no tensor data.

        Raises:
            UnknownRemoteNameError: The remote has no checkpoint of this name.
            MissingRemoteError, DamagedRemoteError: A part of the manifest is missing or damaged.
        """
        upkeep.check_no_mark(self.bucket, name)
        return read_manifest(self.bucket, name, read_ref(self.bucket, name))

    def usage(self) -> upkeep.RemoteUsage:
        """Measure the space that the remote takes, and what each checkpoint alone needs of it."""
        return upkeep.usage(self.bucket)

    def step_costs(self, run: str) -> step_costs.RemoteRun:
        """Return the steps of `run`, with what each costs on the remote. No tensor data is read.

        Raises:
            UnknownRemoteNameError: There is no step of this run.
            UnlistedRemoteError: The remote is behind a plain web server, which cannot list objects.
        """
        return step_costs.step_costs(self.bucket, run)

    def delete(self, name: str) -> None:
        """Delete the name of a checkpoint; for a kept step, delete the mark too.

        The data stays until `gc` deletes it: one run condemns unused data, and a run at least a
        lease later deletes it. Data younger than the lease is not condemned yet.

        Raises:
            UnknownRemoteNameError: The remote has no checkpoint of this name.
        """
        upkeep.delete(self.bucket, name)

    def gc(
        self, lease_hours: float = DEFAULT_LEASE_HOURS, *, dry_run: bool = False
    ) -> sweep.RemoteGcPlan:
        """Condemn unused objects, and delete those that were condemned at least a lease ago.

        The lease must be longer than any push takes; a shorter one is safe only while nothing is
        pushed. Objects younger than the lease are not condemned yet (`young` in the result). With
        `dry_run`, nothing is changed, and the result is the plan.

        Raises:
            UncertainRemoteError: An object that may be needed cannot be read, or was written by a
                later version; nothing was condemned or deleted.
        """
        return sweep.gc(self.bucket, lease_hours * 3600, dry_run=dry_run)

    def verify(
        self, *, full: bool = False, advance: Callable[[int], None] = lambda _: None
    ) -> verify.RemoteVerifyResult:
        """Check manifests, tables and references; with `full`, download and check all data too.

        `advance` receives the number of bytes after each container that was checked in full. The
        check also repairs the remote:

        * Containers with faults are removed from the catalog, and lost manifests and manifest pages
          are noted in it. The next push of a checkpoint that needs them sends them again, even if
          the remote has the name of the checkpoint.
        * A missing table is written again from its container.
        * A missing or damaged `FORMAT` is written again if the other objects show that this is a
          remote.
        """
        return verify.verify(self.bucket, full=full, advance=advance)

    def store_folder(self) -> Path | None:
        """If the URL names the folder of a store, return the path of the folder, else None."""
        bucket = self.bucket
        if isinstance(bucket, FolderBucket):
            found = bucket.get(layout.MARKER, layout.HEAD_BYTES)
            if found is not None and found[0].startswith(layout.STORE_TITLE):
                return bucket.root
        return None

    def has(self, name: str) -> bool:
        """Return whether there is a checkpoint called `name`.

        If the URL names the folder of a store, that store is searched.

        Raises:
            NotARemoteError: There is neither a remote nor a store.
        """
        try:
            read_ref(self.bucket, name)
        except UnknownRemoteNameError:
            return False
        except NotARemoteError:
            if self.store_folder() is None:
                raise
            return False  # of a store, whose references are the same
        return True

    def names_of(self, name: str) -> list[str]:
        """Return the names of the steps and marks of the run `name`; for a checkpoint, only `name`.

        If the URL names the folder of a store, that store is searched.

        Raises:
            UnknownRemoteNameError: The remote has no checkpoint and no run of this name.
            UnknownNameError: The store has no checkpoint and no run of this name.
            NotARemoteError: There is neither a remote nor a store.
            UnlistedRemoteError: There is no checkpoint of this name, and a plain web server cannot
                list the steps of a run.
        """
        return [*self.refs_of(name)]

    def refs_of(self, name: str) -> dict[str, ObjectStatus | None]:
        """Return the names of the steps and marks of the run `name`, with their references' status.

        If `name` is the name of a checkpoint, the result has only that name, with None as the
        status.

        Raises:
            UnknownRemoteNameError: The remote has no checkpoint and no run of this name.
            UnknownNameError: The URL is that of a store's folder, and the store has no such name.
            NotARemoteError: There is neither a remote nor a store.
            UnlistedRemoteError: There is no checkpoint of this name, and a plain web server cannot
                list the steps of a run.
        """
        upkeep.check_no_mark(self.bucket, name)
        if find_ref(self.bucket, name) is not None:
            return {name: None}
        what = f"no checkpoint {name!r}"
        try:
            if found := list_refs(self.bucket, name):
                return {**found}
        except UnlistedRemoteError:
            self.has(name)  # for the errors where there is no remote
            what += ", and a run cannot be looked for where nothing can be listed"
            raise UnlistedRemoteError.at(self.url, what) from None
        self.has(name)
        folder = self.store_folder()
        if folder is not None:
            look = f"see `tensor-dedup list --store {shlex.quote(str(folder))}`"
            raise UnknownNameError(f"{folder}: {what}; {look}", path=str(folder), name=name)
        raise UnknownRemoteNameError.at(self.url, what, name=name)
