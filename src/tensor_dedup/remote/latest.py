"""Find a step of a run by its number, or the latest step, in a store or on a remote.

The latest step is the one that was saved last, in the order of saving. It is looked up each time,
so it is never one that a store happens to have.
"""

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
from tensor_dedup.remote.run_steps import RemoteSteps, RunContent, StepMemory
from tensor_dedup.store.format.names import LATEST, run_of_latest
from tensor_dedup.store.steps.runs import (
    in_save_order,
    latest_step,
    manifest_of,
    step_name,
)
from tensor_dedup.store.store import LocalStore

# A retention may delete the latest step just after a later one has come.
ATTEMPTS: Final = 5


def latest_name(store: LocalStore, name: str, remote: Remote | None) -> str:
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
        return step_here(store, run, None)[0]
    return find_step(store, remote, run, None, named=True)[0]


def latest_on(remote: Remote, name: str) -> str:
    """Return the name of the checkpoint that `name` means now on `remote`, as `latest_name` does.

    Raises:
        UnknownNameError: There is no step of this run.
        RemoteError: The remote cannot be used.
    """
    run = run_of_latest(name)
    return name if run is None else find_step(None, remote, run, None, named=True)[0]


def step_here(store: LocalStore, run: str, step: int | None) -> tuple[str, str | None]:
    """Return the name of a step in a store, or of the latest, and of its manifest if it has one."""
    objects = store.handle.objects
    with store.handle.locked():
        if step is None:
            name = latest_step(objects, run).name
            with suppress(StoreError):
                return name, objects.ref(name)
            return name, None
        return step_name(run, step), manifest_of(objects, run, step)[0]


def find_step(
    store: LocalStore | None, remote: Remote, run: str, step: int | None, *, named: bool = False
) -> tuple[str, str | None]:
    """Return the name of a step on a remote, or of the latest, and of its manifest if it has one.

    With `named`, the name is RUN@latest if that is what a checkpoint on the remote is called. What
    `store` has of manifests is not read from the remote.
    """
    with _naming_what_is_here(store, run):
        folder = remote.store_folder()
        if folder is not None:
            there = LocalStore.open(folder, create=False)
            if named and (found := there.manifest(run + LATEST)) is not None:
                return run + LATEST, found
            return step_here(there, run, step)
        if step is not None:
            name = step_name(run, step)
            manifest = find_ref(remote.bucket, name)
            if manifest is None:
                check_remote(remote.bucket)
                what = f"no step {step} of a run {run!r}"
                raise UnknownRemoteNameError.at(remote.url, what, name=name, run=run, step=step)
            return name, manifest
        here = None if store is None else partial(manifest_here, store.handle.objects)
        memory = _memory(remote.url, run)
        steps = RemoteSteps(remote.bucket, run, memory=memory, here=here)
        content = _settled(remote, steps, memory)
        memory.forget_others(content)
        if named and run + LATEST in content.refs.others:
            return run + LATEST, None
        if not content.places:
            check_remote(remote.bucket)
            is_name = find_ref(remote.bucket, run) is not None
            what = f"no step of a run {run!r}{', which is a checkpoint' if is_name else ''}"
            raise UnknownRemoteNameError.at(remote.url, what, name=run, run=run)
        last = _last(content)
        return step_name(run, last), content.places[last].manifest


def _settled(remote: Remote, steps: RemoteSteps, memory: StepMemory) -> RunContent:
    """Return steps of a run of which the last was the latest one at some time during this call.

    A listing is no snapshot: where it finds a step deleted, a later one may have come after its
    place was listed. So one listing is enough only if it finds no other names deleted than one
    that ended before, be it in an earlier call. Else, the last step is taken that came during this
    call, as steps come in the order of saving.

    Raises:
        RemoteBusyError: Steps were deleted during each of several listings.
    """
    listed: RunContent | None = None
    for _ in range(ATTEMPTS):
        before = memory.gone  # now: another thread's listing may end during this one
        content = steps.content()
        if content.refs.gone == before:
            return content
        if listed is not None and content.places and _last(content) not in listed.places:
            return content
        listed = content
    raise RemoteBusyError.at(remote.url, "the steps of the run change while they are listed")


def _last(content: RunContent) -> int:
    return in_save_order(content.places)[-1]


@lru_cache(maxsize=64)
def _memory(url: str, run: str) -> StepMemory:
    """What this process has read of the steps of a run: who follows it reads what is new."""
    return StepMemory()


@contextmanager
def _naming_what_is_here(store: LocalStore | None, run: str) -> Iterator[None]:
    """Add to the error of a remote that does not answer what the store has, which is not used."""
    try:
        yield
    except (RemoteUnreachableError, RemoteAccessError) as error:
        if store is None:
            raise
        try:
            with store.handle.locked():
                here = latest_step(store.handle.objects, run).name
        except StoreError:
            raise error from None
        said = f"{error.message}; {here!r}, which is in {store.path}, may be an old one: name it"
        raise type(error)(f"{said} to use it", **{**error.facts, "here": here}) from error
