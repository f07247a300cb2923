"""What a save takes of memory, measured at the process: its pool, and little that does not grow.

A model of six tensors is saved with a pool that has room for two of them.
"""

import shutil
import threading
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from processes import fresh
from processes.process_state import forked
from store_runs.stores import Gate, gated, handle, memory_folder
from tensor_dedup.store.buffers import PAGE
from tensor_dedup.store.files import Handle, RealFiles
from tensor_dedup.store.steps.notes import Notes
from tensor_dedup.store.writing.containers import PACK_BELOW
from tensor_dedup.training import CheckpointStore, state
from tensor_dedup.training.adapters import StateChunk
from tensor_dedup.training.capture import CaptureContext, StepCapture
from tensor_dedup.training.host_pool import HostPool
from tensor_dedup.training.snapshot import ExtractedStep

MIB = 1 << 20
TENSOR, COUNT = 16 * MIB, 6
POOL = 2 * TENSOR
# Blocks of some MiB that threads hash, write and drain, and what the allocator keeps.
SCRATCH = 48 * MIB
# Decoded leaves of anchors, 64 MiB at most, and the leaves that are being encoded.
ENCODING = 96 * MIB


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


RECORD = np.dtype([("flag", "u1"), ("number", "<f8")], align=True)


def of_order(weight: torch.Tensor, order: str) -> Any:
    """Something of the size of a tensor that lies in memory in this way."""
    ways: dict[str, Callable[[], Any]] = {
        "C": lambda: weight,
        "device": lambda: weight,
        "turned": lambda: weight.T,
        "big-endian": lambda: weight.numpy().astype(">f4"),
        "conjugate": lambda: torch.view_as_complex(weight.view(-1, 512, 2)).conj(),
        "negative": lambda: torch._neg_view(weight),
        "dates": lambda: weight.numpy().view(">M8[us]").T,
        "texts": lambda: weight.numpy().view("S16").T,
        "records": lambda: weight.numpy().view(RECORD),
    }
    return ways[order]()


def change(weight: Any) -> None:
    """Change it in place, without a copy of it."""
    kind = weight.dtype.kind if isinstance(weight, np.ndarray) else "f"
    if kind == "f":
        weight *= 1.0001
    elif kind == "V":
        weight["number"] += 1
    else:
        numbers = weight.view(">i8") if kind == "M" else weight.T.view(np.uint8)
        numbers += 1


def plain(value: Any) -> Any:
    """The same numbers in an array; NaT is not itself."""
    if isinstance(value, torch.Tensor):
        return value.resolve_conj().resolve_neg().numpy()
    return value.view("i8") if value.dtype.kind == "M" else value


def growth(root: str, way: str, count: int, options: dict[str, Any], order: str = "C") -> int:
    """By how many bytes the process grew, at most, while steps were saved after the first.

    Two of them where something of one may be left for the next.
    """
    steps = 3 if order == "C" or "in_flight" in options else 2
    torch.set_num_threads(1)
    if order == "device":  # there is none here: what lies there is read the same way
        state._is_elsewhere = lambda tensor: tensor is not None
    rows = torch.arange(TENSOR // 4.0).view(-1, 1024)
    model: Any = {f"weight{n}": rows + n + 1 for n in range(count)}
    model = {name: of_order(weight, order) for name, weight in model.items()}
    assert all(each.nbytes == TENSOR for each in model.values())
    with CheckpointStore(root, "run", pool_bytes=POOL, **options) as run:
        for step in range(steps):
            if step == 1:
                run._saves.finish()  # what it has beside its pool is let go of
                base = _status("VmRSS") - run._saves._pool.allocated
                expected = plain(model[f"weight{count - 1}"][:9]).copy()
                Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            if way == "save":
                run.save(model, step)
            elif way == "frozen":
                run.save_async(StateChunk(model, frozen=True), step).wait()
            else:
                run.save_async(model, step, lazy=way == "lazy")
                run.before_update()
                assert way == "eager" or 0 < run._saves._pool.allocated <= POOL
            for weight in model.values():
                change(weight)
    found = _status("VmHWM") - base
    assert run.steps() == list(range(steps))
    assert (plain(run.load(1)[f"weight{count - 1}"][:9]) == expected).all()
    return found


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("save", {}, "C"),
    ("lazy", {}, "C"),
    ("eager", {"in_flight": 2}, "C"),
    ("lazy", {"in_flight": 2, "drain": True}, "C"),
    ("save", {}, "turned"),
    ("lazy", {"in_flight": 2}, "turned"),
    ("frozen", {}, "turned"),
    ("eager", {}, "big-endian"),
    ("save", {}, "device"),
    ("lazy", {"in_flight": 2}, "device"),
    ("save", {}, "conjugate"),
    ("lazy", {}, "conjugate"),
    ("eager", {}, "negative"),
    ("save", {}, "dates"),
    ("save", {}, "texts"),
    ("eager", {}, "records"),
]


def growths(root: str) -> list[int | str]:
    """Of each case in a process of its own, forked from one that has done nothing: or what it says.

    So torch is imported once.
    """
    found: list[int | str] = []
    for number, (way, options, order) in enumerate(CASES):
        store = f"{root}/{number}"
        more: dict[str, Any] = {**options, "compress": None}
        if "drain" in options:
            more["drain"] = f"{store}-second"
        call = partial(growth, store, way, COUNT, more, order)
        try:
            found.append(forked(call))
        except AssertionError as error:
            found.append(str(error))
        for path in Path(root).iterdir():
            shutil.rmtree(path)
    return found


@pytest.fixture(scope="module")
def found() -> list[int | str]:
    with memory_folder() as folder:
        return fresh.call(growths, str(folder))


@pytest.mark.parametrize("number", range(len(CASES)), ids=["-".join(map(str, c)) for c in CASES])
def test_a_save_takes_its_pool_and_no_copy_beside_it(found: list[int | str], number: int) -> None:
    grown = found[number]
    assert isinstance(grown, int), grown
    assert grown <= POOL + SCRATCH < COUNT * TENSOR


def in_the_pool(root: str, kind: str) -> tuple[int, int]:
    """The sizes of a model and of the pool while it is saved, once it may be changed again."""
    rows = torch.arange(COUNT * MIB, dtype=torch.float32).view(COUNT, 1024, 1024)
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "transposed": lambda: {f"t{n}": each.T for n, each in enumerate(rows)},
        "channels_last": lambda: {
            f"c{n}": each.view(16, 64, 32, 32).contiguous(memory_format=torch.channels_last)
            for n, each in enumerate(rows)
        },
        "fortran": lambda: {
            f"f{n}": np.asfortranarray(each) for n, each in enumerate(rows.numpy())
        },
        "big_endian": lambda: {
            f"b{n}": each.astype(">f4").T for n, each in enumerate(rows.numpy())
        },
        "small": lambda: {f"s{n}": each for n, each in enumerate(rows.view(-1, 8 << 10))},
    }
    model = ways[kind]()
    expected = deepcopy(model)
    with CheckpointStore(root, "run", compress=None) as run:
        pending = run.save_async(model, 0)
        run.before_update()
        allocated = run._saves._pool.allocated
        for each in model.values():
            each[:] = 0
        pending.wait()
        found = run.load(0)
        for name, each in expected.items():
            assert np.array_equal(np.asarray(found[name]), np.asarray(each))
    return sum(each.nbytes for each in expected.values()), allocated


@pytest.mark.parametrize("kind", ["transposed", "channels_last", "fortran", "small", "big_endian"])
def test_what_is_small_or_in_another_order_is_copied_into_the_pool(
    tmp_path: Path, kind: str
) -> None:
    size, allocated = in_the_pool(str(tmp_path / "s"), kind)
    assert size == COUNT * 4 * MIB
    assert size <= allocated <= 1.1 * size


def test_what_is_small_waits_for_room_that_other_saves_have(tmp_path: Path) -> None:
    gate = Gate()
    large, small = torch.randn(200, 200), torch.randn(9)
    room = large.nbytes // PAGE * PAGE + PAGE + PACK_BELOW
    run = gated(tmp_path, gate, in_flight=2, pool_bytes=room, compress=None)
    pool = run._saves._pool
    run.save_async({"large": large, "small": small}, 0)
    assert pool.allocated == room
    small.fill_(1)
    thread = threading.Thread(target=lambda: run.save_async({"small": small}, 1))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert pool.allocated == room
    gate.opened.set()
    thread.join()
    small.fill_(2)
    run.close()
    assert (run.load(1)["small"] == 1).all()


class _InTurn(RealFiles):
    """A disk at which each thread that makes something durable has a gate of its own, in order."""

    def __init__(self) -> None:
        self.gates = [threading.Event() for _ in range(3)]
        self._threads: list[int] = []

    def fsync(self, handle: Handle) -> None:
        thread = threading.get_ident()
        if thread not in self._threads:
            self._threads.append(thread)
        assert self.gates[self._threads.index(thread)].wait(60)
        super().fsync(handle)


def test_what_is_small_waits_for_no_more_saves_than_give_it_room(tmp_path: Path) -> None:
    handle(tmp_path).close()
    large, small, files = torch.randn(200, 200), torch.randn(9), _InTurn()
    room = 2 * (large.nbytes // PAGE * PAGE + PAGE + PACK_BELOW)
    run = handle(tmp_path, files=files, in_flight=3, pool_bytes=room, compress=None)
    for step in range(2):
        pending = run.save_async({"large": large, "small": small}, step)
        large.add_(1)
    assert run._saves._pool.allocated == room
    thread = threading.Thread(target=lambda: run.save_async({"small": small}, 2))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    files.gates[0].set()
    thread.join(60)
    assert not thread.is_alive()
    assert not pending.done()
    assert run._saves._pool.allocated <= room
    for gate in files.gates:
        gate.set()
    run.close()
    assert run.steps() == [0, 1, 2]


def test_what_is_small_makes_a_pool_grow_that_has_not_so_much_in_all() -> None:
    pool, small = HostPool(2 * PACK_BELOW), [np.full(9 << 10, n, np.uint8) for n in range(100)]
    for _ in range(2):
        chunks = [StateChunk(each, str(number)) for number, each in enumerate(small)]
        step = ExtractedStep(Notes("run", 0, "numpy", {}), chunks, {})
        capture = StepCapture(step, CaptureContext(pool, [], set(), {}))
        assert pool.capacity < pool.allocated <= 100 * (10 << 10) + PACK_BELOW
        capture.hold()
        assert not capture.lacks_room()
        pieces = capture.snapshot().pieces
        assert [bytes(each.data) for each in pieces] == [each.tobytes() for each in small]
        capture.release()
        assert pool.allocated <= pool.capacity


@pytest.mark.parametrize("lazy", [False, True])
def test_a_pool_that_has_room_for_what_is_large_is_enough_with_what_is_small(
    tmp_path: Path, lazy: bool
) -> None:
    large = {f"large{n}": torch.full((256, 256), 10 * n) for n in range(4)}
    model = {"turned": torch.arange(256.0 * 256).view(256, 256).T, **large}
    # In every order: what is small first, between, and last.
    small = {f"small{n}": torch.full((2000,), 10 * n) for n in range(60)}
    names = [*[*small][:20], *model, *[*small][20:]]
    state = {name: {**small, **model}[name] for name in names}
    room = sum(each.nbytes for each in model.values())
    with CheckpointStore(tmp_path, "run", pool_bytes=room, compress=None) as run:
        for step in range(3):
            expected = deepcopy(state)
            run.save_async(state, step, lazy=lazy)
            run.before_update()
            assert 0 < run._saves._pool.allocated <= room
            for each in state.values():
                each += 1
            assert run.latest() == step  # what had no room was waited for
        found = run.load(2)
    assert all(torch.equal(found[name], each) for name, each in expected.items())


@pytest.mark.long
@pytest.mark.parametrize("compress", ["auto", "always"])
@pytest.mark.parametrize("order", ["C", "turned"])
@pytest.mark.parametrize("way", ["save", "lazy", "eager"])
def test_encoding_takes_no_more_for_a_larger_model(
    tmp_path: Path, way: str, order: str, compress: str
) -> None:
    count = 2 * COUNT
    found = fresh.call(growth, str(tmp_path / "s"), way, count, {"compress": compress}, order)
    assert found <= POOL + SCRATCH + ENCODING < count * TENSOR
