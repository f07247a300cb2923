"""A remote: checkpoints in object storage, in a folder, or behind a plain web server."""

import shlex
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Self

from tensor_dedup.remote import layout, sweep, upkeep
from tensor_dedup.remote.buckets import Bucket, FolderBucket, ObjectStatus
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    NotARemoteError,
    RemoteUnreachableError,
    RemoteUrlError,
    UnknownRemoteNameError,
    UnlistedRemoteError,
)
from tensor_dedup.remote.lease import LEASE_S
from tensor_dedup.remote.pull import (
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
    """A remote that stores push to and pull from; `Remote.open` opens one.

    It holds nothing open, and is safe from any thread. Credentials are those that obstore finds in
    the environment; a URL never holds one.

    Raises:
        RemoteUnreachableError, RemoteAccessError: the server does not answer, or refuses.
    """

    def __init__(self, bucket: Bucket) -> None:
        # The other modules of this package use it, too.
        self.bucket = bucket

    @classmethod
    def open(cls, url: str | PathLike[str], *, files: Files | None = None) -> Self:
        """Open a remote: `s3://BUCKET/PREFIX`, `gs://`, `az://`, `file:///FOLDER`, a folder's path,
        or `https://` to read what a web server has.

        Nothing is asked yet, and nothing made. `files` is the file system interface, which tests
        replace.

        Raises:
            RemoteUrlError: the URL cannot name a remote, or holds a credential.
            NotInstalledError: obstore, of the extra `remote`, is not installed.
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
        """The URL, without anything that is secret."""
        return self.bucket.url

    def names(self) -> list[str]:
        """Return the names of all checkpoints whose manifests can be read, sorted.

        Raises:
            NotARemoteError: there is no remote.
        """
        return [each.name for each in self.checkpoints() if each.manifest]

    def checkpoints(self, names: Sequence[str] | None = None) -> list[upkeep.RemoteCheckpoint]:
        """Describe these checkpoints or all, by name; `damage` says which cannot be read, or not
        whole.
        """
        return upkeep.checkpoints(self.bucket, names)

    def steps(self, run: str) -> list[str]:
        """Return the names of the steps of a run, in order; none where no run is called so.

        Deleted steps are left out. Where a checkpoint has the name itself, it is not that of a run.
        A plain web server lists nothing, so none are known of it.
        """
        return self._of_run(run, kept=False)

    def pins(self, run: str) -> list[str]:
        """Return the names that pin steps of a run, in order, those whose step is gone too.

        As `steps` otherwise.
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
        """Read the manifest and the pieces of a checkpoint; no tensor data is read.

        Raises:
            UnknownRemoteNameError: the remote has no checkpoint of this name.
            MissingRemoteError, DamagedRemoteError: its bookkeeping is gone or damaged.
        """
        return read_manifest(self.bucket, name, read_ref(self.bucket, name))

    def usage(self) -> upkeep.RemoteUsage:
        """Measure what the remote takes, and what each checkpoint takes for itself alone."""
        return upkeep.usage(self.bucket)

    def delete(self, name: str) -> None:
        """Delete a name; of a step that is pinned, the pin too.

        The bytes stay until `gc` has found, twice, that nothing else needs them.

        The first time is when they are older than the lease, the second a lease later.

        Raises:
            UnknownRemoteNameError: the remote has no checkpoint of this name.
        """
        upkeep.delete(self.bucket, name)

    def gc(
        self, lease_hours: float = DEFAULT_LEASE_HOURS, *, dry_run: bool = False
    ) -> sweep.RemoteGcPlan:
        """Condemn what no name leads to, and delete what has been condemned for the lease.

        The lease is longer than any push takes. A shorter one is safe only while nobody pushes.
        What was written less than a lease ago is not condemned yet (`young`): until it is deleted,
        it can take two leases and three runs.

        Raises:
            UncertainRemoteError: something cannot be read; nothing was condemned or deleted.
        """
        return sweep.gc(self.bucket, lease_hours * 3600, dry_run=dry_run)

    def verify(
        self, *, full: bool = False, advance: Callable[[int], None] = lambda _: None
    ) -> upkeep.RemoteVerifyResult:
        """Check the bookkeeping and, with `full`, download and check every byte.

        Containers with faults leave the catalog, and lost manifests and pages are noted there: the
        next push of a checkpoint that needs them sends them again, also under the name that it has.
        Lost tables are written again from their containers, and so is a lost `FORMAT` where all
        else says that this is a remote.
        `advance` receives counts of bytes that were checked.
        """
        return upkeep.verify(self.bucket, full=full, advance=advance)

    def store_folder(self) -> Path | None:
        """Return the folder if this is that of a store, and no remote; else None."""
        bucket = self.bucket
        if isinstance(bucket, FolderBucket):
            found = bucket.get(layout.MARKER, layout.HEAD_BYTES)
            if found is not None and found[0].startswith(layout.STORE_TITLE):
                return bucket.root
        return None

    def has(self, name: str) -> bool:
        """Return whether there is a checkpoint of exactly this name, in a store's folder too.

        Raises:
            NotARemoteError: there is no remote.
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
        """Return the name, or the names of the steps and pins of the run that is called so.

        The same of a store's folder.

        Raises:
            UnknownRemoteNameError, UnknownNameError: the remote, or the store, has neither.
            NotARemoteError: there is no remote.
        """
        return [*self.refs_of(name)]

    def refs_of(self, name: str) -> dict[str, ObjectStatus | None]:
        """Return `names_of`, with what a list says of each reference; None where none was asked."""
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
