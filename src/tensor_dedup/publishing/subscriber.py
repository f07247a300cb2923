"""Bring the steps of a run here as they are published, and let go of earlier ones.

A host needs the latest step of a run, and the one before while engines change from one to the
other. So of the steps that were pulled because they were the latest, two stay. A step that was
saved here, pulled by name or kept (`tensor-dedup runs keep`) stays in any case, and so does one
that an engine loads.
"""

import logging
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tensor_dedup.config import TensorDedupConfig
from tensor_dedup.errors import ConfigError, StoreError
from tensor_dedup.remote import on_demand
from tensor_dedup.remote.remote import Remote
from tensor_dedup.remote.results import TransferListener, TransferResult
from tensor_dedup.settings import remote_url
from tensor_dedup.store.errors import StoreBusyError, UnknownNameError
from tensor_dedup.store.format.names import run_of_latest
from tensor_dedup.store.locks import lock_of, pulling
from tensor_dedup.store.steps import followed
from tensor_dedup.store.steps.errors import KeptStepError
from tensor_dedup.store.steps.runs import (
    StepOrder,
    check_no_kept_step,
    in_save_order,
    parse_step_name,
    step_name,
)
from tensor_dedup.store.store import LocalStore
from tensor_dedup.store.upkeep.gc import sweep_former
from tensor_dedup.training.in_flight import BaseStep
from tensor_dedup.types import STORE_SCHEME

_log = logging.getLogger(__name__)
_STEPS_KEPT: Final = 2
# Others may use the store for long; what is not deleted now is deleted after the next step.
_SWEEP_WAIT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class NewStep:
    """A step of a run that is in the store now.

    - `name` is RUN@STEP, and `step` the number.
    - `manifest` is that of the step in the store, another one after it was saved anew. It is None
      if the step was deleted just after it came.
    - `transfer` is what travelled for it, or None if the store had it.
    """

    name: str
    step: int
    manifest: str | None
    transfer: TransferResult | None

    def is_same(self, other: "NewStep | None") -> bool:
        """Return whether `other` is the same step with the same content."""
        return other is not None and (self.name, self.manifest) == (other.name, other.manifest)


def is_of_step(url: str) -> bool:
    """Return whether `url` is that of a step of a run: `store://RUN@STEP` or `store://RUN@latest`.

    Other checkpoints may have names with an @, too, such as `store://ORG/NAME@REVISION`.
    """
    name = url.removeprefix(STORE_SCHEME)
    return parse_step_name(name) is not None or run_of_latest(name) is not None


def fetch_step(config: TensorDedupConfig, url: str) -> str:
    """Pull the step `url` into the store of `config`, and return its URL, `store://RUN@STEP`.

    `url` is `store://RUN@STEP` or `store://RUN@latest`, the step that was saved last. The remote is
    that of `config`, or else that of the environment or a configuration file. Only what the store
    lacks of the step travels. Without a remote, the step must be in the store.

    Earlier steps of the run that were fetched in this way are deleted from the store, except the
    last two and those that a process uses. A process uses the last two that it has fetched or
    loaded, until it ends. A thread deletes them while the caller goes on, because that takes the
    longer the more the store has. Other errors are those of `on_demand.fetch_step`.

    Raises:
        ConfigError: `url` names no step.
        StoreError: The step cannot be had. No other one is used in its place.
    """
    name = url.removeprefix(STORE_SCHEME)
    step = parse_step_name(name)
    run = run_of_latest(name) if step is None else step.run
    if run is None or not url.startswith(STORE_SCHEME) or (step is not None and step.kept):
        what = f"{url!r} names no step of a run; write {STORE_SCHEME}RUN@STEP or "
        raise ConfigError(f"{what}{STORE_SCHEME}RUN@latest", url=url)
    there = remote_url(config.remote)
    store = LocalStore.open(config.store_folder, create=there is not None)
    number = None if step is None else step.step
    found = fetch(store, there, run, number)
    _let_go_later(store, run)
    return STORE_SCHEME + found.name


def fetch(
    store: LocalStore,
    remote: Remote | str | None,
    run: str,
    step: int | None = None,
    *,
    progress: TransferListener | None = None,
) -> NewStep:
    """Pull a step of `run`, or the latest one, into `store`. Earlier ones stay until `let_go`.

    Arguments and errors are those of `on_demand.fetch_step`.
    """
    found = on_demand.fetch_step(store, remote, run, step, progress=progress)
    parsed = parse_step_name(found.name)
    assert parsed is not None
    return NewStep(found.name, parsed.step, store.manifest(found.name), found.transfer)


def _let_go_later(store: LocalStore, run: str) -> None:
    """Call `let_go` in a thread, which does nothing while another one does the same.

    If the process ends first, the files stay until a later call.
    """
    threading.Thread(target=let_go, args=(store, run), daemon=True, name=f"let go {run}").start()


def let_go(store: LocalStore, run: str) -> int:
    """Delete earlier steps of `run` that were pulled because they were the latest.

    Return the size of the files that were deleted. If the store is busy, or is damaged so that it
    is uncertain what is in use, the files stay until a later call.
    """
    objects = store.handle.objects
    try:
        # While nothing is pulled automatically, and so nothing that is new is taken for old.
        with store.handle.translated(), pulling(objects.files, objects.layout, wait_s=0):
            _drop_earlier(store, run)
            former = _former(store, run)
            theirs = [each for manifests in former.values() for each in manifests]
            plan = sweep_former(objects, theirs, _SWEEP_WAIT_S) if theirs else None
            for name in former:
                if store.manifest(name) is None:
                    followed.forget(objects, name)
            return 0 if plan is None else plan.freed_bytes
    except StoreBusyError:
        return 0
    except StoreError as error:
        what = "%s: earlier steps of %r are not deleted: %s"
        _log.warning(what, store.path, run, str(error))
        return 0


def _drop_earlier(store: LocalStore, run: str) -> None:
    """Remove the names of earlier steps. Their notes stay until their files are deleted."""
    objects = store.handle.objects
    with store.handle.locked():
        places = StepOrder(objects, run).places()
        ours = {
            step: place
            for step, place in places.items()
            if place.manifest in followed.noted(objects, step_name(run, step))
        }
        for step in in_save_order(ours)[:-_STEPS_KEPT]:
            name = step_name(run, step)
            if any(base.name == name for base in BaseStep.in_store(objects)):
                continue  # a save counts on it
            lock = lock_of(objects.files, followed.lock_path(objects, name))
            if lock is None:
                continue  # a process uses it
            try:
                # Read again under the lock: a pull by name may have made it the user's.
                if ours[step].manifest in followed.noted(objects, name):
                    _drop(store, name, ours[step].manifest)
            finally:
                objects.files.close(lock)


def _drop(store: LocalStore, name: str, manifest: str | None) -> None:
    objects = store.handle.objects

    def check() -> None:
        check_no_kept_step(objects, name)
        if objects.ref(name) != manifest:
            raise UnknownNameError.at(objects.layout.root, f"{name!r} was replaced", name=name)

    with suppress(KeptStepError, UnknownNameError):
        objects.drop_ref(name, check_name=check)


def _former(store: LocalStore, run: str) -> dict[str, list[str]]:
    """Return former manifests by the names of steps with a note, as far as their files are here.

    They are those of a step that is deleted, and those before a step was saved anew. The note about
    a step that was saved here since is removed, and one that cannot be read.
    """
    objects, found = store.handle.objects, dict[str, list[str]]()
    for name in followed.names(objects, run):
        noted, held = followed.noted(objects, name), store.manifest(name)
        if not noted or (held is not None and held not in noted):
            followed.forget(objects, name)
        else:
            former = (each for each in noted if each != held)
            found[name] = [each for each in former if followed.is_here(objects, each)]
    return found
