"""What a save makes of a provider's chunks: their order, and each of their hints."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from store_runs.stores import PageablePool
from tensor_dedup.store.steps.notes import Notes, content_name
from tensor_dedup.store.writing.containers import PACK_BELOW
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.adapters import (
    NumpyAdapter,
    PieceSeries,
    StateChunk,
    StateProvider,
    chunks_of,
    register_provider,
)
from tensor_dedup.training.capture import CaptureContext, StepCapture
from tensor_dedup.training.devices import host_tensor
from tensor_dedup.training.errors import StateError, UnsupportedValueError
from tensor_dedup.training.host_pool import HostPool
from tensor_dedup.training.snapshot import ExtractedStep
from tensor_dedup.training.state import NamedValue, raw

NOTES = Notes("run", 0, "numpy", {})
LARGE = 4 * PACK_BELOW


class Corpus:
    """A user's own class, whose provider yields its parts one by one."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self.parts = parts


class Reader:
    """Holds a corpus, and is composed of its provider's chunks and its own."""

    def __init__(self, corpus: Corpus, place: int) -> None:
        self.corpus, self.place = corpus, place


def parts_of(corpus: Corpus) -> Iterator[tuple[str, Any]]:
    yield from corpus.parts.items()


def state_of(reader: Reader) -> Iterator[tuple[str, Any]]:
    yield "corpus", StateChunk(reader.corpus, group="corpus")
    yield "place", reader.place


register_provider(Corpus, StateProvider("test.corpus", parts_of, lambda state, _: Corpus(state)))
register_provider(Reader, StateProvider("test.reader", state_of, lambda state, _: Reader(**state)))


def names_of(run: CheckpointStore, step: int) -> list[str]:
    with run.store.checkpoint(f"{run.run_id}@{step}") as checkpoint:
        return [tensor.name for tensor in checkpoint]


def capture_of(chunks: Iterator[StateChunk], pool: HostPool, *devices: Any) -> StepCapture:
    step = ExtractedStep(NOTES, chunks, {})
    return StepCapture(step, CaptureContext(pool, devices, set(), {}))


def held(capture: StepCapture) -> dict[str, bytes]:
    return {piece.name: bytes(piece.data) for piece in capture.snapshot().pieces}


def golden_state() -> dict[str, Any]:
    weight = torch.arange(30.0).reshape(5, 6)
    masked: Any = np.ma.MaskedArray([1.0, 2.0], mask=[False, True])  # type: ignore[no-untyped-call]
    return {
        "layer.weight": weight,
        "tied": weight,
        "turned": weight.T,
        "half": torch.arange(7).bfloat16(),
        "series": PieceSeries("tree", [bytes([number]) * number for number in range(12)]),
        "series_tree_000001": np.ones(2),
        "objects": np.array(["x", None, np.arange(3)], object),
        "masked": masked,
        "strings": np.array(["a", "bc"]),
        "plain": {"a.b": 1, "a": [1, (2.5, None), {"é": {3}}], "": [1, 2, 3, 4, 5]},
        "sparse": torch.eye(3).to_sparse(),
    }


def test_what_was_saved_before_there_were_chunks_has_the_same_name(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, "run", compress=None) as run:
        run.save(golden_state(), 1)
        run.save_async(golden_state(), 2).wait()
        objects = run.store.handle.objects
        contents = [objects.manifest(objects.ref(f"run@{step}")) for step in (1, 2)]
    assert [content_name(each) for each in contents] == GOLDEN


# As saved at 6fe7289, without what says when.
GOLDEN = [
    "5c3a83735ae08ab57b705685cdae5af8588c09995c55e6b7d23c290d151b55c9",
    "26ec428b426b7f33a2ac0be5d4f6798bceb901b1511054762d5db2c1d4d9db89",
]


def test_each_chunk_is_captured_before_the_next_is_made() -> None:
    buffer = np.zeros(100, np.uint8)

    def chunks() -> Iterator[StateChunk]:
        for number in range(3):
            buffer.fill(number)
            yield StateChunk(buffer, str(number))

    assert buffer.nbytes < PACK_BELOW
    found = held(capture_of(chunks(), HostPool(0)))
    assert found == {str(number): bytes([number]) * 100 for number in range(3)}


class Refilled:
    """An object whose provider fills one buffer for each of its values."""

    def __init__(self, buffer: Any, filled: list[int]) -> None:
        self.buffer, self.filled = buffer, filled


def refill(held: Refilled) -> Iterator[tuple[str, Any]]:
    buffer, last = held.buffer, 0
    for number, value in enumerate(held.filled):
        if value != last:  # torch counts every write
            buffer[:] = bytes([value]) * len(buffer) if isinstance(buffer, bytearray) else value
            last = value
        yield f"part{number}", StateChunk(buffer)


register_provider(
    Refilled, StateProvider("test.refilled", refill, lambda state, _: [*state.values()])
)


@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize("make", [np.zeros, torch.zeros, bytearray])
def test_a_buffer_that_a_provider_fills_again_is_an_error(
    tmp_path: Path, make: Callable[[int], Any], size: int
) -> None:
    with CheckpointStore(tmp_path, "run", compress=None) as run:
        for save in (run.save, run.save_async):
            with pytest.raises(StateError, match=r"part1: its memory held 'object\.part0'"):
                save({"object": Refilled(make(size), [1, 2, 3])}, 0)
        assert run.steps() == []
        # The same values in one memory are one value with several names.
        held = Refilled(make(size), [7, 7])
        run.save_async({"object": held}, 1).wait()
        found = run.load(1)["object"]
    assert [bytes(raw(each)) for each in found] == [raw(StateChunk(held.buffer).value())] * 2


class Device:
    """A device whose copies are made as they are asked for, and listed."""

    def __init__(self) -> None:
        self.copied: list[memoryview] = []

    def takes(self, _: torch.Tensor) -> bool:
        return True

    def begin(self, _: torch.Tensor) -> "Device":
        return self

    def copy(
        self, tensor: torch.Tensor, into: memoryview
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        self.copied.append(into)
        return host_tensor(tensor, into).copy_(tensor), self.hold

    def hold(self) -> None:
        """Nothing is under way."""


def test_small_tensors_of_a_device_are_packed_while_more_are_made() -> None:
    tensors = [torch.full((8000,), number, dtype=torch.float32) for number in range(50)]
    device, pool, begun = Device(), PageablePool(1 << 30), []

    def chunks() -> Iterator[StateChunk]:
        for number, tensor in enumerate(tensors):
            begun.append(len(device.copied))
            yield StateChunk(tensor, str(number))
        yield StateChunk(torch.tensor(7, dtype=torch.uint8), "odd")
        yield StateChunk(torch.tensor(8.0, dtype=torch.float64), "aligned")

    assert tensors[0].nbytes < PACK_BELOW
    capture = capture_of(chunks(), pool, device)
    assert begun[0] == 0
    assert 0 < begun[-1] < len(device.copied) == 52  # a first block, before all are there
    assert len({id(into.obj) for into in device.copied}) == 2
    expected = {str(number): tensor.numpy().tobytes() for number, tensor in enumerate(tensors)}
    odd = {"odd": b"\7", "aligned": np.float64(8).tobytes()}
    capture.hold()
    assert held(capture) == expected | odd
    capture.release()
    pool.clear()
    assert pool.allocated == 0


def test_small_tensors_of_a_device_without_room_are_copied_one_by_one() -> None:
    device = Device()
    chunks = iter([StateChunk(torch.ones(9), "a"), StateChunk(torch.zeros(9), "b")])
    found = held(capture_of(chunks, PageablePool(0), device))
    assert not device.copied
    assert found == {"a": np.ones(9, np.float32).tobytes(), "b": bytes(36)}


@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_memory_is_not_copied(tmp_path: Path, frozen: bool) -> None:
    array = np.arange(LARGE, dtype=np.uint8)
    with CheckpointStore(tmp_path, "run") as run:
        for step in range(2):
            run.save_async({"x": StateChunk(array, frozen=frozen)}, step).wait()
            array = array + np.uint8(1)
        assert bool(run._saves._pool.allocated) is not frozen
        run.save({"x": array - np.uint8(1)}, 2)
        with run.store.checkpoint("run@1") as one, run.store.checkpoint("run@2") as other:
            assert [each.digest for each in one] == [each.digest for each in other]
        assert (run.load(1)["x"] == array - np.uint8(1)).all()


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_made_from_frozen_parts_is_made_in_the_background(
    tmp_path: Path, frozen: bool
) -> None:
    threads: list[str] = []

    def make() -> bytes:
        threads.append(threading.current_thread().name)
        return b"serialised"

    corpus = Corpus({"words": np.ones(3), "index": StateChunk(make=make, frozen=frozen)})
    with CheckpointStore(tmp_path, "run") as run:
        run.save_async({"corpus": corpus}, 0).wait()
        assert threads == ["tensor-dedup-save" if frozen else threading.current_thread().name]
        run.save({"corpus": corpus}, 1)
        assert len(threads) == 2  # once in each save
        with run.store.checkpoint("run@0") as one, run.store.checkpoint("run@1") as other:
            assert [each.digest for each in one] == [each.digest for each in other]
        index = run.load(0)["corpus"].parts["index"]
    assert isinstance(index, NamedValue)
    assert bytes(index.data) == b"serialised"


def test_what_is_made_comes_in_its_turn() -> None:
    order: list[str] = []

    def maker(name: str) -> Callable[[], bytes]:
        def make() -> bytes:
            order.append(f"make {name}")
            return name.encode()

        return make

    def parts() -> Iterator[tuple[str, Any]]:
        for name in "ab":
            order.append(f"yield {name}")
            yield name, StateChunk(make=maker(name))

    provider = StateProvider("test.turns", lambda _: parts(), lambda state, _: state)
    kind = type("Turns", (), {})
    register_provider(kind, provider)
    found = held(capture_of(chunks_of(NumpyAdapter(), {"x": kind()}), HostPool(0)))
    assert order == ["yield a", "make a", "yield b", "make b"]
    assert (found["x.a"], found["x.b"]) == (b"a", b"b")


def test_the_pieces_of_a_group_lie_together_and_the_longest_comes_first(tmp_path: Path) -> None:
    def model(count: int, group: str) -> dict[str, Any]:
        log = [StateChunk(np.full(2, number), group=group) for number in range(count)]
        return {"a": np.ones(2), "log": log, "z": np.zeros(2)}

    with CheckpointStore(tmp_path, "run") as run:
        run.save(model(3, ""), 0)
        assert names_of(run, 0)[:5] == ["a", "log.0", "log.1", "log.2", "z"]
        run.save(model(3, "log"), 1)
        assert names_of(run, 1)[:5] == ["log.0", "log.1", "log.2", "a", "z"]
        run.save_async(model(2, "log"), 2).wait()  # of equal length: what has no name first
        assert names_of(run, 2)[:4] == ["a", "z", "log.0", "log.1"]
        for step, count in ((0, 3), (1, 3), (2, 2)):
            assert [each.tolist() for each in run.load(step)["log"]] == [
                [number, number] for number in range(count)
            ]


def test_providers_are_composed_and_hints_hold_for_all_within(tmp_path: Path) -> None:
    corpus = Corpus({"words": [np.ones(2), np.zeros(2)], "more": {"x": np.arange(3)}})
    model = {"first": np.ones(1), "reader": Reader(corpus, 5), "last": np.ones(1)}
    chunks = list(chunks_of(NumpyAdapter(), model))
    assert [(each.name, each.group) for each in chunks[:-2]] == [
        ("first", ""),
        ("reader.corpus.words.0", "corpus"),
        ("reader.corpus.words.1", "corpus"),
        ("reader.corpus.more.x", "corpus"),
        ("last", ""),
    ]
    assert [each.residence for each in chunks] == ["host"] * 5 + ["unmade", "host"]
    assert [each.nbytes for each in chunks[:-1]] == [8, 16, 16, 24, 8, None]
    with CheckpointStore(tmp_path, "run") as run:
        run.save_async(model, 0).wait()
        assert names_of(run, 0)[:2] == ["reader.corpus.words.0", "reader.corpus.words.1"]
        back = run.load(0)["reader"]
    assert (back.place, back.corpus.parts["more"]["x"].tolist()) == (5, [0, 1, 2])


def test_hinted_parts_are_restored_into_themselves(tmp_path: Path) -> None:
    layer, kept = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    kept.load_state_dict(layer.state_dict())
    model = {"frozen": StateChunk(layer, frozen=True), "bare": {"x": StateChunk(np.ones(3))}}
    with CheckpointStore(tmp_path, "run") as run:
        run.save(model, 0)
        plain = run.save({"frozen": layer, "bare": {"x": np.ones(3)}}, 1)
        assert plain.new_tensors == 0
        assert names_of(run, 0) == names_of(run, 1)
        with torch.no_grad():
            layer.weight.zero_()
        back = run.load(0, original=model)
    assert back["frozen"] is layer
    assert torch.equal(layer.weight, kept.weight)


def test_two_parts_of_one_key_are_refused() -> None:
    def state(_: object) -> Iterator[tuple[str, Any]]:
        yield from [("a", 1), ("a", 2)]

    kind = type("Twice", (), {})
    register_provider(kind, StateProvider("test.twice", state, lambda state, _: state))
    with pytest.raises(UnsupportedValueError, match="two parts of one key"):
        NumpyAdapter().extract({"x": kind()})


def test_an_adapter_of_ones_own_yields_chunks_or_extracts(tmp_path: Path) -> None:
    class Streams(NumpyAdapter):
        def chunks(self, model: Any) -> Iterator[StateChunk]:
            for chunk in super().chunks(model):
                yield StateChunk(chunk.source, chunk.name, chunk.group, make=chunk.make)
            yield StateChunk(b"more", "more")

    class Extracts(Streams):
        def extract(self, model: Any) -> Any:
            return {**NumpyAdapter().extract(model), "extracted": np.ones(1)}

    for step, (adapter, last) in enumerate([(Streams(), "more"), (Extracts(), "extracted")]):
        with CheckpointStore(tmp_path, "run", adapter=adapter) as run:
            run.save({"x": np.ones(2)}, step)
            run.save_async({"x": np.ones(2)}, 10 + step).wait()
            names = ["x", "#structure", "#values"]
            assert set(names_of(run, step)) == {*names, last}
            assert names_of(run, 10 + step) == names_of(run, step)
    assert set(Streams().extract({"x": np.ones(2)})) == {*names, "more"}


@pytest.mark.parametrize("frozen", [False, True])
def test_bytes_with_gaps_or_of_another_order_are_stored_as_they_read(
    tmp_path: Path, frozen: bool
) -> None:
    views = [
        np.arange(20)[::2].data,
        np.arange(12.0).reshape(3, 4).T.data,
        np.arange(20).data,
    ]
    run = CheckpointStore(tmp_path, "run")
    chunks = [StateChunk(view, str(n), frozen=frozen) for n, view in enumerate(views)]
    assert [view.c_contiguous for view in views] == [False, False, True]
    run.save({"part": [StateChunk(view, frozen=frozen) for view in views]}, 0)
    run.save_async({"part": [StateChunk(view, frozen=frozen) for view in views]}, 1).wait()
    for chunk, view in zip(chunks, views, strict=True):
        data = chunk.piece().data
        assert isinstance(data, memoryview)
        assert data.tobytes() == view.tobytes()
    run.close()
    for step in (0, 1):
        found = run.load(step)["part"]
        assert [bytes(memoryview(each.data)) for each in found] == [
            view.tobytes() for view in views
        ]
