"""Pull automatically what is loaded by name: what the store lacks, and the latest step of a run."""

import logging
import threading
import time
from dataclasses import dataclass
from typing import Final

from tensor_dedup.remote.errors import UnknownRemoteNameError
from tensor_dedup.remote.latest import ATTEMPTS, find_step, step_here
from tensor_dedup.remote.remote import Remote
from tensor_dedup.remote.results import TransferListener, TransferResult
from tensor_dedup.remote.transfer import pull
from tensor_dedup.store.format.names import LATEST, check_name, run_of_latest
from tensor_dedup.store.locks import pulling
from tensor_dedup.store.steps import followed
from tensor_dedup.store.steps.runs import check_run
from tensor_dedup.store.store import LocalStore
from tensor_dedup.text_table import human

_EVERY_S: Final = 10.0
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


@dataclass(frozen=True, slots=True)
class FetchedStep:
    """A step that was fetched, by its name RUN@STEP.

    `transfer` is what travelled for it, or None if the store had the step.
    """

    name: str
    transfer: TransferResult | None


def fetch_step(
    store: LocalStore,
    remote: Remote | str | None,
    run: str,
    step: int | None = None,
    *,
    progress: TransferListener | None = None,
) -> FetchedStep:
    """Pull the step `step` of `run` into `store`, or the latest step.

    What the store has already of the step does not travel, and what the remote has decides: a step
    that was pulled as the latest is pulled again if it was saved anew meanwhile. Of the steps that
    this process has fetched, the last two of each run are kept from being deleted by others that
    follow the run. If `remote` is None, the step must be in the store. If several processes need
    the same step, one pulls and the others wait. Progress is logged, unless there is a listener
    `progress`.

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
        name, _ = step_here(store, run, step)
        store.hold_step(name)
        return FetchedStep(name, None)
    return _fetch(store, _opened(store, remote), (run, step), progress)


def fetch_latest(store: LocalStore, name: str, remote: Remote | str | None) -> str:
    """Pull the checkpoint that `name`, RUN@latest, means now, and return its name.

    The name is that of `latest_name`, and errors are those of `fetch_step`. Any other name than
    RUN@latest is returned as it is.
    """
    run = run_of_latest(name)
    if run is None or store.manifest(name) is not None:
        return name
    if remote is None:
        found = fetch_step(store, None, run).name
    else:
        found = _fetch(store, _opened(store, remote), (run, None), None, named=True).name
    _log.warning("%s is %s%s", name, found, "" if remote is None else f" of {_url(remote)}")
    return found


def _url(remote: Remote | str) -> str:
    return remote.url if isinstance(remote, Remote) else remote


def _opened(store: LocalStore, remote: Remote | str) -> Remote:
    if isinstance(remote, Remote):
        return remote
    return Remote.open(remote, files=store.handle.files)


def _fetch(
    store: LocalStore,
    remote: Remote,
    wanted: tuple[str, int | None],
    progress: TransferListener | None,
    *,
    named: bool = False,
) -> FetchedStep:
    run, step = wanted
    for attempts_left in reversed(range(ATTEMPTS if step is None else 1)):
        name, manifest = find_step(store, remote, run, step, named=named)
        try:
            if name == run + LATEST:
                return FetchedStep(name, pull_missing(store, name, remote))
            return FetchedStep(name, _bring(store, remote, name, manifest, progress))
        except UnknownRemoteNameError:
            if not attempts_left:
                raise
    raise AssertionError  # the last attempt returns or raises


def _bring(
    store: LocalStore,
    remote: Remote,
    name: str,
    manifest: str | None,
    progress: TransferListener | None,
) -> TransferResult | None:
    """Pull a step unless the store has it, and keep it from being deleted."""
    objects = store.handle.objects
    store.hold_step(name)  # first: from here on it stays if it is there
    if manifest is not None and store.manifest(name) == manifest:
        return None
    with store.handle.translated(), pulling(objects.files, objects.layout):
        held, result = store.manifest(name), None
        if held is None or held != manifest:
            # What was saved here, or pulled by name, is another's to replace.
            is_ours = held is not None and held in followed.noted(objects, name)
            if manifest is not None and (held is None or is_ours):
                followed.note(objects, name, manifest)
            what = f"{name} is not in {objects.layout.root}"
            said = progress or _LoggedTransfer(what, remote.url)
            result = pull(store, remote, name, replace=is_ours, progress=said, follows=True)
            came = store.manifest(name)
            # Noted before is noted: a pull by name may have taken that note away meanwhile.
            if came is not None and came != manifest and (held is None or is_ours):
                followed.note(objects, name, came)
        followed.hold(objects, name)
        return result


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
