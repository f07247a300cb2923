"""A client that is killed at any step of a put in parts leaves nothing half there.

Every request is a step, before it is sent, while it is under way and after it is answered, and so
is every piece that is written into the slab or read from the file. What the steps are is asserted,
so that none is left out that comes later.
"""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from manager_runs import managers
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.loader.checkpoint_io.sources import SourceReader
from tensor_dedup.memory_manager.client import Put, connect
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.client.connection import Connection
from tensor_dedup.memory_manager.protocol import wire
from vllm_runs import deferring
from vllm_runs.lent_tensors import Process, changed, load_file_of_qkv, rows

BASE = {name: rows(4, 200 + n) for n, name in enumerate("qkv")}
TUNE = {**BASE, "q": rows(4, 203), "v": changed(BASE["v"], 1)}
WHOLE, TUNED = (torch.cat([*each.values()]) for each in (BASE, TUNE))
RECIPE = "of the fine-tune"
State = dict[str, Any]


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[managers.Manager]:
    folder = tmp_path_factory.mktemp("manager")
    folder.chmod(0o700)
    with managers.running(folder) as running:
        yield running


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("files")
    return [
        deferring.save(folder / f"{n}.safetensors", each) for n, each in enumerate((BASE, TUNE))
    ]


class Steps:
    """What a process does of a put, noted; it kills itself at the step of a number."""

    def __init__(self, last: int | None) -> None:
        self.last, self.noted = last, list[str]()

    def step(self, name: str) -> None:
        self.noted.append(name)
        if len(self.noted) - 1 == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: type, method: str, name: Callable[..., str]) -> None:
        true = getattr(owner, method)

        def noting(*args: Any, **more: Any) -> Any:
            self.step(f"before {name(*args)}")
            found = true(*args, **more)
            self.step(f"after {name(*args)}")
            return found

        setattr(owner, method, noting)


def watched(state: State, last: int | None) -> Steps:
    """Note what this process, which a test has forked, does from now on."""
    process = Process(connect(Path(state["path"]), keep_connected=False))
    steps = Steps(last)
    steps.around(Connection, "ask", lambda _, request, *__: type(request).__name__)
    receive = wire.receive

    def receive_later(*args: Any) -> wire.Datagram:
        steps.step("sent")
        return receive(*args)

    vars(wire)["receive"] = receive_later
    steps.around(Put, "write", lambda *_: "write")
    steps.around(
        SourceReader, "read_pieces", lambda *_: "read"
    )  # of a source, and of leaves of one
    steps.around(SourceReader, "read_leaves", lambda *_: "read")
    state["process"] = process
    return steps


def put(last: int | None) -> Callable[[State], object]:
    """Load the fine-tune from memory."""

    def load(state: State) -> object:
        steps = watched(state, last)
        state["kept"] = state["process"].load(TUNED, recipe=RECIPE)
        return steps.noted

    return load


def read_and_put(path: Path, last: int | None) -> Callable[[State], object]:
    """Load the fine-tune from its file, whose digests are known."""

    def load(state: State) -> object:
        steps = watched(state, last)
        state["kept"] = load_file_of_qkv(state["process"], path, known=True)
        return steps.noted

    return load


def hold(path: Path) -> Callable[[State], object]:
    def load(state: State) -> object:
        process = Process(connect(Path(state["path"]), keep_connected=False))
        state["kept"] = process, load_file_of_qkv(process, path, known=False)
        return None

    return load


def around(*names: str) -> list[str]:
    return [
        step
        for name in names
        for step in (f"before {name}", *["sent"] * name[0].isupper(), f"after {name}")
    ]


_LAST = ("Seal", "LookupDigests", "Publish", "Publish")  # the leases; the recipe, and the marks
PUT = around(
    *("LookupDigests", "Lookup", "Lookup"),  # whether it is there, and who has its leaves
    *("Reserve", "LookupDigests", "Allocate"),
    *["write"] * 5,
    *_LAST,
)
READ_AND_PUT = around(
    *("Lookup", "Lookup", "Lookup", "Reserve", "Allocate", "read", "read", "LookupDigests"),
    *("Lookup", *["write"] * 5, *_LAST, "Lookup"),  # which marks are the base's
    *("Publish", "Lookup", "Publish"),  # the marks of contents, and these
)
Load = Callable[[int | None], Callable[[State], object]]


@pytest.fixture(scope="module")
def holder(manager: managers.Manager, files: list[Path]) -> Iterator[managers.Actor]:
    """A process that has the base."""
    actor = managers.Actor(manager.socket, hold(files[0]))
    assert actor.step() is None
    yield actor
    actor.kill()


def loads(files: list[Path]) -> dict[str, Load]:
    return {"put": put, "read": lambda last: read_and_put(files[1], last)}


def free(manager: managers.Manager) -> None:
    """Evict what nobody uses, once only the base is in use; nothing else is left then."""
    managers.until(lambda: in_use(manager) == (1, 0, 0, 0))
    with Admin(manager.socket) as admin:
        admin.evict("a checkpoint")
    totals = manager.overview().totals
    assert (totals.slabs, totals.resident_bytes) == (1, WHOLE.nbytes)
    assert totals.charged < WHOLE.nbytes + (64 << 10)


def in_use(manager: managers.Manager) -> tuple[int, int, int, int]:
    totals = manager.overview().totals
    return totals.leases, totals.builds, totals.lingering_bytes, totals.waiting


def all_or_nothing(manager: managers.Manager) -> bool:
    totals = manager.overview().totals
    rest = 5 * LEAF_BYTES
    return (totals.slabs, totals.resident_bytes - WHOLE.nbytes) in ((1, 0), (2, rest))


@pytest.mark.parametrize(("kind", "expected"), [("put", PUT), ("read", READ_AND_PUT)])
def test_these_are_the_steps(
    kind: str,
    expected: list[str],
    manager: managers.Manager,
    holder: managers.Actor,
    files: list[Path],
) -> None:
    actor = managers.Actor(manager.socket, loads(files)[kind](None))
    try:
        assert actor.step() == expected
        assert manager.overview().totals.resident_bytes == WHOLE.nbytes + 5 * LEAF_BYTES
    finally:
        actor.kill()
    free(manager)


def moments(names: list[str]) -> list[tuple[str, str]]:
    """Each step, with what was asked where the step is that it was sent."""
    return [(names[n - 1] if name == "sent" else "", name) for n, name in enumerate(names)]


def short_form(kind: str) -> set[int]:
    """Each request and piece once, at each of its moments, and all that comes after the seal.

    Until then a put is the same in both kinds. Before a request everything is as it was after the
    one that came before it.
    """
    names = PUT if kind == "put" else READ_AND_PUT
    ends = len(names) - names[::-1].index("after Seal")
    within, elsewhere = moments(names), moments(PUT) if kind == "read" else []
    return {
        n
        for n, each in enumerate(within)
        if n == 0 or not names[n].startswith("before")
        if n >= ends or (within.index(each) == n and each not in elsewhere)
    }


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        pytest.param(
            kind,
            last,
            id=f"{kind}-{last}-{name.replace(' ', '-')}",
            marks=[] if last in short_form(kind) else pytest.mark.long,
        )
        for kind, names in (("put", PUT), ("read", READ_AND_PUT))
        for last, name in enumerate(names)
    ],
)
def test_who_is_killed_at_a_step_leaves_nothing_half_there(
    kind: str,
    last: int,
    manager: managers.Manager,
    holder: managers.Actor,
    files: list[Path],
) -> None:
    names = PUT if kind == "put" else READ_AND_PUT
    doomed = managers.Actor(manager.socket, loads(files)[kind](last))
    assert doomed.ended() == -signal.SIGKILL
    managers.until(lambda: in_use(manager) == (1, 0, 0, 0))
    sealed = names.index("after Seal")
    by_recipe, by_content, *_ = [n for n, name in enumerate(names) if name == "after Publish"]
    # A request that is under way is served or is not. A job for who has gone ends a bit later.
    managers.until(lambda: all_or_nothing(manager))
    if last != sealed - 1:
        assert manager.overview().totals.slabs == 1 + (last >= sealed)
    with connect(manager.socket, keep_connected=False) as client:
        process = Process(client)
        for known, published in ((False, by_recipe), (True, by_content)):
            found = process.find(TUNED, RECIPE, known=known)
            assert found is None or torch.equal(found.map(), TUNED)
            if last != published - 1 and (known or kind == "put"):  # a session's recipe is its own
                assert (found is not None) == (last >= published)
            del found
        [(resident, _)] = process.load(TUNED, recipe=RECIPE)
        assert resident.leaf_shared_bytes in (0, 7 * LEAF_BYTES)
        assert torch.equal(resident.map(), TUNED)
        totals = manager.overview().totals
        assert totals.slabs == 2
        assert totals.resident_bytes == WHOLE.nbytes + 5 * LEAF_BYTES
        del resident
        gc.collect()
    free(manager)
