"""Pull automatically what is loaded by name: what the store lacks, and the latest step of a run.

The latest step is the one that was saved last, in the order of saving. It is looked up on the
remote each time, so it is never one that the store happens to have.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Final

from tensor_dedup.errors import StoreError
from tensor_dedup.remote.conditions import check_remote
from tensor_dedup.remote.errors import (
    RemoteAccessError,
    RemoteBusyError,
    RemoteUnreachableError,
    UnknownRemoteNameError,
)
from tensor_dedup.remote.manifests import find_ref
from tensor_dedup.remote.pull import manifest_here
from tensor_dedup.remote.remote import Remote
from tensor_dedup.remote.results import TransferResult
from tensor_dedup.remote.run_steps import RemoteSteps, RunContent, StepMemory
from tensor_dedup.remote.transfer import pull
from tensor_dedup.store.format.names import LATEST, check_name, run_of_latest
from tensor_dedup.store.locks import pulling
from tensor_dedup.store.steps import followed
from tensor_dedup.store.steps.runs import (
    check_run,
    in_save_order,
    latest_step,
    manifest_of,
    step_name,
)
from tensor_dedup.store.store import LocalStore
from tensor_dedup.text_table import human

_EVERY_S: Final = 10.0
# A retention may delete the latest step just after a later one has come.
_ATTEMPTS: Final = 5
_log = logging.getLogger(__name__)


def pull_missing(
    store: LocalStore, name: str, remote: Remote | str | None
) -> TransferResult | None:
    """Pull the checkpoint `name` from `remote` if the store does not have it.

    If the store has the name, or if `remote` is None, the result is None and no request is sent. A
    checkpoint in the store is not compared with the one on the remote. If several processes need
    the same checkpoint, one pulls and the others wait. Progress is logged.

    Raises:
        UnknownRemoteNameError: The remote has no checkpoint of this name. The name of a run is not
            enough.
        RemoteError: The remote cannot be used.
        StoreError: The remote's content is damaged, or the store failed. Nothing was committed.
    """
    if remote is None or store.manifest(check_name(name)) is not None:
        return None
    files, layout = store.handle.files, store.handle.objects.layout
    with pulling(files, layout):
        if store.manifest(name) is not None:
            return None  # another process was first
        opened = remote if isinstance(remote, Remote) else Remote.open(remote, files=files)
        if not opened.has(name):
            raise UnknownRemoteNameError.at(opened.url, f"no checkpoint {name!r}", name=name)
        what = f"{name} is not in {layout.root}"
        result = pull(store, opened, name, progress=_LoggedTransfer(what, opened.url))
        _log.warning(
            "pulled %s: %s on the wire in %.1f s, %s saved",
            *(name, human(result.wire_bytes), result.seconds, human(result.saved_bytes)),
        )
        return result


def fetch_step(
    store: LocalStore, remote: Remote | str | None, run: str, step: int | None = None
) -> str:
    """Pull the step `step` of `run` into `store`, or the latest step, and return its name.

    What the store has already of the step does not travel, and what the remote has decides: a step
    that was pulled as the latest is pulled again if it was saved anew meanwhile. Of the steps that
    this process has fetched, the last two of each run are kept from being deleted by others that
    follow the run. If `remote` is None, the step must be in the store. If several processes need
    the same step, one pulls and the others wait. Progress is logged.

    Raises:
        UnknownNameError: The remote, or the store if there is no remote, has no such step. An
            UnknownRemoteNameError is one of these.
        RemoteNameTakenError: The name stands for another checkpoint in the store, which was not
            pulled as the latest step. It is not replaced.
        RemoteError: The remote cannot be used. The store may have steps of the run; they are not
            used in its place.
        StoreError: The remote's content is damaged, or the store failed. Nothing was committed.
    """
    check_run(run)
    if remote is None:
        name, _ = _step_here(store, run, step)
        followed.hold(store.handle.objects, name)
        return name
    return _fetch(store, _opened(store, remote), run, step)


def latest_name(store: LocalStore, name: str, remote: Remote | str | None) -> str:
    """Return the name of the checkpoint that `name` means now; nothing is pulled.

    RUN@latest means the step of RUN that was saved last: on `remote`, or in the store if `remote`
    is None. If the store, or else the remote, has a checkpoint that is really called RUN@latest,
    that is meant. Any other name is returned as it is.

    Raises:
        UnknownNameError: There is no step of this run.
        RemoteError: The remote cannot be used.
    """
    run = run_of_latest(name)
    if run is None or store.manifest(name) is not None:
        return name
    if remote is None:
        return _step_here(store, run, None)[0]
    return _find(store, _opened(store, remote), run, None, named=True)[0]


def fetch_latest(store: LocalStore, name: str, remote: Remote | str | None) -> str:
    """Pull the checkpoint that `name`, RUN@latest, means now, and return its name.

    The name is that of `latest_name`, and errors are those of `fetch_step`. Any other name than
    RUN@latest is returned as it is.
    """
    run = run_of_latest(name)
    if run is None or store.manifest(name) is not None:
        return name
    if remote is None:
        found = fetch_step(store, None, run)
    else:
        found = _fetch(store, _opened(store, remote), run, None, named=True)
    _log.warning("%s is %s%s", name, found, "" if remote is None else f" of {_url(remote)}")
    return found


def _url(remote: Remote | str) -> str:
    return remote.url if isinstance(remote, Remote) else remote


def _opened(store: LocalStore, remote: Remote | str) -> Remote:
    if isinstance(remote, Remote):
        return remote
    return Remote.open(remote, files=store.handle.files)


def _fetch(
    store: LocalStore, remote: Remote, run: str, step: int | None, *, named: bool = False
) -> str:
    for attempts_left in reversed(range(_ATTEMPTS if step is None else 1)):
        name, manifest = _find(store, remote, run, step, named=named)
        try:
            if name == run + LATEST:
                pull_missing(store, name, remote)
            else:
                _bring(store, remote, name, manifest)
            break
        except UnknownRemoteNameError:
            if not attempts_left:
                raise
    return name


def _step_here(store: LocalStore, run: str, step: int | None) -> tuple[str, str | None]:
    """Return the name of a step in a store, or of the latest, and of its manifest if it has one."""
    objects = store.handle.objects
    with store.handle.locked():
        if step is None:
            name = latest_step(objects, run).name
            with suppress(StoreError):
                return name, objects.ref(name)
            return name, None
        return step_name(run, step), manifest_of(objects, run, step)[0]


def _find(
    store: LocalStore, remote: Remote, run: str, step: int | None, *, named: bool = False
) -> tuple[str, str | None]:
    """Return the name of a step on a remote, or of the latest, and of its manifest if it has one.

    With `named`, the name is RUN@latest if that is what a checkpoint on the remote is called.
    """
    with _naming_what_is_here(store, run):
        folder = remote.store_folder()
        if folder is not None:
            there = LocalStore.open(folder, create=False, files=store.handle.files)
            if named and (found := there.manifest(run + LATEST)) is not None:
                return run + LATEST, found
            return _step_here(there, run, step)
        if step is not None:
            name = step_name(run, step)
            manifest = find_ref(remote.bucket, name)
            if manifest is None:
                check_remote(remote.bucket)
                what = f"no step {step} of a run {run!r}"
                raise UnknownRemoteNameError.at(remote.url, what, name=name, run=run, step=step)
            return name, manifest
        here = partial(manifest_here, store.handle.objects)
        steps = RemoteSteps(remote.bucket, run, memory=_memory(remote.url, run), here=here)
        content = _settled(remote, steps)
        if named and run + LATEST in content.refs.others:
            return run + LATEST, None
        if not content.places:
            check_remote(remote.bucket)
            is_name = find_ref(remote.bucket, run) is not None
            what = f"no step of a run {run!r}{', which is a checkpoint' if is_name else ''}"
            raise UnknownRemoteNameError.at(remote.url, what, name=run, run=run)
        last = in_save_order(content.places)[-1]
        return step_name(run, last), content.places[last].manifest


def _settled(remote: Remote, steps: RemoteSteps) -> RunContent:
    """Return the names of a run as they were at one time.

    Where a step was deleted since it was listed, a later one may have come before that.
    """
    before = None
    for _ in range(_ATTEMPTS):
        content = steps.content()
        if not content.refs.gone or content.refs.gone == before:
            return content
        before = content.refs.gone
    raise RemoteBusyError.at(remote.url, "the steps of the run change while they are listed")


@lru_cache(maxsize=64)
def _memory(url: str, run: str) -> StepMemory:
    """What this process has read of the steps of a run: who follows it reads what is new."""
    return StepMemory()


@contextmanager
def _naming_what_is_here(store: LocalStore, run: str) -> Iterator[None]:
    """Add to the error of a remote that does not answer what the store has, which is not used."""
    try:
        yield
    except (RemoteUnreachableError, RemoteAccessError) as error:
        try:
            with store.handle.locked():
                here = latest_step(store.handle.objects, run).name
        except StoreError:
            raise error from None
        said = f"{error.message}; {here!r}, which is in {store.path}, may be an old one: name it"
        raise type(error)(f"{said} to use it", **{**error.facts, "here": here}) from error


def _bring(store: LocalStore, remote: Remote, name: str, manifest: str | None) -> None:
    """Pull a step unless the store has it, and keep it from being deleted."""
    objects = store.handle.objects
    followed.hold(objects, name)  # first: from here on it stays if it is there
    if manifest is not None and store.manifest(name) == manifest:
        return
    with pulling(objects.files, objects.layout):
        held = store.manifest(name)
        if held is None or held != manifest:
            # What was saved here, or pulled by name, is another's to replace.
            is_ours = held is not None and followed.noted(objects, name) == held
            if manifest is not None and (held is None or is_ours):
                followed.note(objects, name, manifest)
            what = f"{name} is not in {objects.layout.root}"
            said = _LoggedTransfer(what, remote.url)
            pull(store, remote, name, replace=is_ours, progress=said, follows=True)
            came = store.manifest(name)
            if came is not None and (held is None or is_ours):
                followed.note(objects, name, came)
        followed.hold(objects, name)


class _LoggedTransfer:
    """A listener that logs the beginning of a transfer, and now and then how far it is.

    As warnings: an engine shows nothing lower of other packages, and a start that waits for a
    download must say so.
    """

    def __init__(self, what: str, url: str) -> None:
        self._what, self._url = what, url
        self._lock = threading.Lock()
        self._total = self._done = 0
        self._began = self._said = time.monotonic()

    def start(self, total_bytes: int) -> None:
        """Log what will travel."""
        self._total, self._began = total_bytes, time.monotonic()
        _log.warning("%s: pulling %s from %s", self._what, human(total_bytes), self._url)

    def advance(self, nbytes: int) -> None:
        """Log bytes, rate and time left, if that was not done a moment ago."""
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._said < _EVERY_S or self._done >= self._total:
                return
            self._said = now
            rate = self._done / max(now - self._began, 1e-9)
            left = (self._total - self._done) / max(rate, 1)
        _log.warning(
            "pulling: %s of %s, %s/s, %.0f s left",
            *(human(self._done), human(self._total), human(int(rate)), left),
        )

    def saved(self, nbytes: int) -> None:
        """Do nothing: the end says it."""
