"""Pull a checkpoint automatically when it is loaded by name and the store does not have it."""

import logging
import threading
import time
from typing import Final

from tensor_dedup.remote.errors import UnknownRemoteNameError
from tensor_dedup.remote.remote import Remote
from tensor_dedup.remote.results import TransferResult
from tensor_dedup.remote.transfer import pull
from tensor_dedup.store.format.names import check_name
from tensor_dedup.store.locks import pulling
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
