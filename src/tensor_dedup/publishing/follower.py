"""Follow a run: pull each new step when it appears, and let engines load it."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from tensor_dedup.errors import WRONG_USE, StoreError, TensorDedupError
from tensor_dedup.publishing.engine_server import EngineServer
from tensor_dedup.publishing.errors import EngineError, EngineUnreachableError, OtherWeightsError
from tensor_dedup.publishing.subscriber import NewStep, fetch, let_go
from tensor_dedup.remote.errors import RemoteNameTakenError, UnknownRemoteNameError
from tensor_dedup.remote.remote import Remote
from tensor_dedup.remote.results import SilentTransfer
from tensor_dedup.store.store import LocalStore

_log = logging.getLogger(__name__)
_SCHEMA: Final = 1
# The pause after a failure doubles up to this, in seconds.
_LONGEST_PAUSE_S: Final = 60.0
# What is wrong use elsewhere, and here only means that the next step has to be waited for.
_TO_COME: Final = (UnknownRemoteNameError, RemoteNameTakenError)


@dataclass(frozen=True, slots=True)
class FetchedEvent:
    """A step is in the store now. `seconds` is how long that took, with its pull if it was one."""

    found: NewStep
    seconds: float

    def to_dict(self) -> dict[str, object]:
        """Return the event as a dict for JSON."""
        transfer = self.found.transfer
        return {
            "schema": _SCHEMA,
            "event": "step",
            "name": self.found.name,
            "step": self.found.step,
            "transfer": None if transfer is None else transfer.to_dict(),
            "seconds": self.seconds,
        }


@dataclass(frozen=True, slots=True)
class FreedEvent:
    """Files of earlier steps of a run, of so many bytes, were deleted."""

    run: str
    freed_bytes: int

    def to_dict(self) -> dict[str, object]:
        """Return the event as a dict for JSON."""
        return {"schema": _SCHEMA, "event": "freed", **asdict(self)}


@dataclass(frozen=True, slots=True)
class LoadedEvent:
    """An engine runs a step now."""

    engine: str
    name: str
    step: int
    seconds: float

    def to_dict(self) -> dict[str, object]:
        """Return the event as a dict for JSON."""
        return {"schema": _SCHEMA, "event": "engine", **asdict(self)}


@dataclass(frozen=True, slots=True)
class TroubleEvent:
    """Something failed and will be tried again. `where` is the URL of the remote or engine."""

    where: str
    error: TensorDedupError

    def to_dict(self) -> dict[str, object]:
        """Return the event as a dict for JSON."""
        kind = type(self.error).__name__
        return {
            "schema": _SCHEMA,
            "event": "trouble",
            "where": self.where,
            "kind": kind,
            "error": str(self.error),
        }


Event = FetchedEvent | FreedEvent | LoadedEvent | TroubleEvent


class Follower:
    """Follows `run` of `remote` into `store`, for `engines` by their URLs.

    `tell` is called with each event. `once` calls it in the thread of its caller, `until` in any.
    """

    def __init__(
        self,
        store: LocalStore,
        remote: Remote,
        run: str,
        engines: Sequence[str],
        tell: Callable[[Event], None],
    ) -> None:
        """Prepare to follow; nothing is asked or pulled yet.

        Raises:
            EngineUrlError: The URL of an engine cannot be one.
        """
        self._store, self._remote, self._run = store, remote, run
        self._servers = [EngineServer(url) for url in engines]
        self.tell = tell

    def once(self) -> None:
        """Pull the latest step if it is not here, let each engine load it, and delete earlier ones.

        Raises:
            StoreError: The step could not be pulled, or an engine has not loaded it. The other
                engines were asked all the same.
        """
        found = self._fetch()
        results: list[LoadedEvent | Exception] = []

        def ask(server: EngineServer) -> None:
            try:
                results.append(load(server, found))
            except Exception as error:  # noqa: BLE001 (raised where the round ends)
                results.append(error)

        threads = [threading.Thread(target=ask, args=(each,)) for each in self._servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failed = [each for each in results if isinstance(each, Exception)]
        for each in results:
            if not isinstance(each, Exception):
                self.tell(each)
        self._let_go()
        if failed:
            raise failed[0]

    def until(self, stop: threading.Event, every_s: float) -> None:
        """Look for a new step every `every_s` seconds until `stop` is set.

        What fails is tried again after a pause that doubles from time to time. Each engine is asked
        on a thread of its own, so that one that does not answer delays no other. An engine that is
        loading a step when `stop` is set goes on alone.

        Raises:
            StoreError: The URL, the run or the store cannot be used at all.
        """
        wakers = [_EngineThread(self, each, stop, every_s) for each in self._servers]
        for waker in wakers:
            waker.start()
        trouble = _Trouble(self, self._remote.url, every_s)
        latest: NewStep | None = None
        try:
            while not stop.is_set():
                try:
                    found = self._fetch(latest)
                    for waker in wakers:
                        waker.want(found)
                    latest = found
                    self._let_go()  # last: it takes the longer the more the store has
                    pause = trouble.over()
                except StoreError as error:
                    if error.exit_status == WRONG_USE and not isinstance(error, _TO_COME):
                        raise
                    pause = trouble.met(error)
                stop.wait(pause)
        finally:
            for waker in wakers:
                waker.end()

    def _fetch(self, latest: NewStep | None = None) -> NewStep:
        began = time.monotonic()
        found = fetch(self._store, self._remote, self._run, progress=SilentTransfer())
        if not found.is_same(latest) or found.transfer is not None:
            self.tell(FetchedEvent(found, time.monotonic() - began))
        return found

    def _let_go(self) -> None:
        if freed_bytes := let_go(self._store, self._run):
            self.tell(FreedEvent(self._run, freed_bytes))


def load(server: EngineServer, found: NewStep) -> LoadedEvent:
    """Let an engine load a step, and return the event.

    Raises:
        EngineError: The engine has not loaded the step.
    """
    began = time.monotonic()
    server.load(found.step)
    return LoadedEvent(server.url, found.name, found.step, time.monotonic() - began)


class _Trouble:
    """What goes wrong at one place: it is told once, and each time the pause is longer."""

    def __init__(self, follower: Follower, where: str, every_s: float) -> None:
        self._follower, self._where, self._every_s = follower, where, every_s
        self._said, self._pause_s = "", every_s

    def met(self, error: TensorDedupError) -> float:
        """Return the pause in seconds after an error."""
        if type(error).__name__ != self._said:
            self._said = type(error).__name__
            self._follower.tell(TroubleEvent(self._where, error))
        pause = self._pause_s
        self._pause_s = min(2 * pause, max(_LONGEST_PAUSE_S, self._every_s))
        return pause

    def over(self) -> float:
        """Return the pause in seconds after what went well."""
        self._said, self._pause_s = "", self._every_s
        return self._every_s


class _EngineThread(threading.Thread):
    """Lets one engine load the latest step, again and again until it has.

    An engine that was started anew may be at an earlier step. So whenever a step was found to be
    the latest, the engine is asked what it runs. If that is not what it ran after the last load,
    and still is not after a pause, in which a later step would have been found, the load is asked
    for again. The pause doubles, so that two who update one engine do not do so all the time.
    """

    def __init__(
        self, follower: Follower, server: EngineServer, stop: threading.Event, every_s: float
    ) -> None:
        super().__init__(daemon=True, name=f"engine {server.url}")
        self._follower, self._server, self._stop_event = follower, server, stop
        # Of loads, of what is run in place of the last one, and of asking what is run.
        self._loading, self._other, self._asking = (
            _Trouble(follower, server.url, every_s) for _ in range(3)
        )
        self._changed = threading.Condition()
        self._is_ended = self._is_latest = False
        self._wanted: NewStep | None = None
        self._done: NewStep | None = None
        # What the engine ran after that; None if it does not say, "" if it could not be asked.
        self._digest: str | None = None
        self._again_at: float | None = None

    def want(self, found: NewStep) -> None:
        """Let the engine load `found`, which is the latest step now, if it runs another one."""
        with self._changed:
            if not found.is_same(self._wanted):
                self._wanted = found
            self._is_latest = True
            self._changed.notify_all()

    def end(self) -> None:
        """Let the thread end; a load that is under way goes on."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def run(self) -> None:
        """Ask until the follower stops."""
        while not self._is_over():
            with self._changed:
                self._is_latest = False  # what was found during a load may be long ago
                self._changed.wait_for(self._has_more)
                wanted = self._wanted
            if wanted is None or self._is_over():
                continue
            try:
                if wanted != self._done or self._is_elsewhere(wanted):
                    self._load(wanted)
            except Exception:  # noqa: BLE001 (of `tell`; nobody else would ask this engine again)
                _log.exception("an event of %s could not be told", self._server.url)

    def _load(self, wanted: NewStep) -> None:
        try:
            loaded = load(self._server, wanted)
        except Exception as error:  # noqa: BLE001 (whatever it was, the engine is asked again)
            if not isinstance(error, EngineError):
                what = f"the load of {wanted.name!r} failed: {error!r}"
                error = EngineError.at(self._server.url, what, engine=self._server.url)
            self._stop_event.wait(self._loading.met(error))
            return
        if wanted != self._done:
            self._other.over()
        self._done, self._digest, self._again_at = wanted, "", None
        self._loading.over()
        self._follower.tell(loaded)
        self._digest = self._ask()

    def _ask(self) -> str | None:
        """Return what the engine runs; None if it does not say, "" if it could not be asked."""
        try:
            digest = self._server.checkpoint_digest()
        except EngineUnreachableError:  # which is told if it still is when it is to load a step
            return ""
        except EngineError as error:
            self._asking.met(error)  # and the next step is not to wait for that
            return ""
        self._asking.over()
        return digest

    def _is_elsewhere(self, wanted: NewStep) -> bool:
        """Whether the engine runs something else than after the last load, for a pause already."""
        if self._digest is None or not (digest := self._ask()):
            return False
        if digest == self._digest:
            self._again_at = None
        elif self._again_at is None:
            what = f"it may run something else than {wanted.name!r}, and if so is asked again"
            error = OtherWeightsError.at(self._server.url, what, engine=self._server.url)
            self._again_at = time.monotonic() + self._other.met(error)
        return self._again_at is not None and time.monotonic() >= self._again_at

    def _is_over(self) -> bool:
        return self._is_ended or self._stop_event.is_set()

    def _has_more(self) -> bool:
        return self._is_over() or self._is_latest or self._wanted not in (None, self._done)
