"""Steps that each change another leaf: what they cost, and that no part of them is ever lost."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from store_runs.disk_faults import Crash, Faults, FaultyFiles
from store_runs.parted_runs import (
    BASE,
    BOOKS,
    LEAVES,
    TAIL,
    all_tables,
    check,
    containers,
    data_of,
    in_parts,
    model,
    parted_run,
    save_parted_run,
)
from store_runs.stores import Model, assert_same, handle, memory_folder, noise, open_store
from tensor_dedup.digest import LEAF_BYTES, digest, leaf_digests
from tensor_dedup.store import LocalStore
from tensor_dedup.store.codecs.parts import codec_of, numbers_in, part_digest
from tensor_dedup.store.errors import (
    CorruptTensorError,
    DamagedFileError,
    MissingObjectError,
    NewerFormatError,
    UnfitForCollectionError,
)
from tensor_dedup.store.format import tables
from tensor_dedup.store.format.tables import Table
from tensor_dedup.store.writing.deltas import EncodedWriter
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.encoding import decisions, in_save


@pytest.fixture(scope="module", params=[None, "auto"])
def saved(request: pytest.FixtureRequest) -> Iterator[tuple[Path, str | None]]:
    with memory_folder() as folder:
        save_parted_run(folder / "store", request.param)
        yield folder / "store", request.param


@pytest.fixture
def run(saved: tuple[Path, str | None], tmp_path: Path) -> Iterator[CheckpointStore]:
    template, compress = saved
    with parted_run(template, tmp_path / "store", compress) as run:
        yield run


# What they cost.


@pytest.mark.parametrize("compress", [None, "auto", "always"])
@pytest.mark.parametrize("background", [False, True])
def test_each_step_costs_the_leaf_that_it_touches(
    tmp_path: Path, compress: str | None, background: bool
) -> None:
    with handle(tmp_path / "store", compress=compress) as run:
        run.save({"embedding": model(0)["embedding"]}, 0)
        for step in range(1, LEAVES):
            before = containers(run.store)
            only = {"embedding": model(step)["embedding"]}
            run.save_async(only, step).wait() if background else run.save(only, step)
            assert containers(run.store) - before <= LEAF_BYTES + BOOKS, step
            record = in_parts(run.store)[bytes.fromhex(digest(data_of(step)))]
            assert list(record.parts) == list(range(1, step + 1))
        for step in range(LEAVES):
            assert_same(run.load(step), {"embedding": model(step)["embedding"]})
    assert run.store.verify(full=True).faults == []


@pytest.mark.parametrize("kept", [1, 2])
def test_what_a_run_keeps_takes_no_more_than_three_tensors(tmp_path: Path, kept: int) -> None:
    """An anchor, its parts, and the next one: half of all leaves are new in each step."""
    nbytes, dice = len(BASE), np.random.default_rng(7)
    data = np.frombuffer(BASE, np.uint8).copy()
    with handle(tmp_path / "store", compress=None, keep_last=kept) as run:
        for step in range(12):
            run.save({"embedding": data}, step)
            run.gc(0)
            assert containers(run.store) <= 3 * nbytes + LEAF_BYTES + BOOKS, step
            assert step != 1 or in_parts(run.store)
            for number in dice.choice(LEAVES, LEAVES // 2, replace=False):
                at = number * LEAF_BYTES
                data[at : at + LEAF_BYTES] = dice.integers(0, 256, LEAF_BYTES, np.uint8)


def test_a_part_is_not_taken_for_the_base_of_the_last_step(tmp_path: Path) -> None:
    """The anchor has the last leaf in common, and the part of the first leaf has that one."""
    data = np.frombuffer(BASE[: LEAVES * LEAF_BYTES], np.uint8).copy()
    with handle(tmp_path / "store", compress=None) as run:
        run.save({"embedding": data}, 0)
        anchor = bytes.fromhex(digest(data.tobytes()))
        for step in range(1, LEAVES):
            at, before = (step - 1) * LEAF_BYTES, containers(run.store)
            data[at : at + LEAF_BYTES] = np.frombuffer(noise(700 + step, LEAF_BYTES), np.uint8)
            run.save({"embedding": data}, step)
            record = in_parts(run.store)[bytes.fromhex(digest(data.tobytes()))]
            assert record.base == anchor
            assert containers(run.store) - before <= LEAF_BYTES + BOOKS, step


def test_a_leaf_that_changes_again_and_again_begins_no_star(tmp_path: Path) -> None:
    """All that was stored of it before is not what the tensor needs."""
    data = np.frombuffer(BASE, np.uint8).copy()
    with handle(tmp_path / "store", compress=None) as run:
        for step in range(3 * LEAVES):
            data[: LEAF_BYTES // 2] = np.frombuffer(noise(500 + step, LEAF_BYTES // 2), np.uint8)
            run.save({"embedding": data}, step)
        steps = 3 * LEAVES - 1
        assert len(in_parts(run.store)) == steps
        assert containers(run.store) <= len(BASE) + steps * (LEAF_BYTES + BOOKS) + BOOKS


def test_the_next_star_is_stored_before_it_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To encode all of a tensor in a save would take its memory again, and its time."""
    monkeypatch.setattr(decisions, "_MOST_PARTS", 2)
    monkeypatch.setattr(in_save, "_FEW", 1.0)
    dice, mine, planned = np.random.default_rng(3), threading.current_thread(), list[bool]()
    real = EncodedWriter.encode_all

    def noted(writer: EncodedWriter, pieces: Any) -> Any:
        if threading.current_thread() is mine:
            planned.extend(plan.in_parts for _, plan in pieces)
        return real(writer, pieces)

    monkeypatch.setattr(EncodedWriter, "encode_all", noted)
    weights = dice.standard_normal(LEAVES * LEAF_BYTES // 4, np.float32)
    with handle(tmp_path / "store", compress="auto") as run:
        for step in range(6):
            run.save({"embedding": weights}, step)
            at = step * LEAF_BYTES // 4
            weights[at : at + LEAF_BYTES // 4] = dice.standard_normal(LEAF_BYTES // 4, np.float32)
        assert planned == [True] * len(planned)
        assert 3 <= len(planned) < 5, "one of the steps was stored whole"
        run.gc(0)
        assert run.store.verify(full=True).faults == []


def test_a_tensor_lies_in_few_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a file that a reader has open, and another leaf is new in each step."""
    monkeypatch.setattr(decisions, "_MOST_PARTS", 3)
    with handle(tmp_path / "store", compress=None) as run:
        for step in range(LEAVES):
            run.save({"embedding": model(step)["embedding"]}, step)
        most = max(len(record.parts) for record in in_parts(run.store).values())
        assert most == 4
        for step in range(LEAVES):
            assert_same(run.load(step), {"embedding": model(step)["embedding"]})


def test_a_part_that_is_also_a_difference_or_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    """A tensor of one leaf, stored against another, is not what a part is read from."""
    one = np.frombuffer(noise(31, LEAF_BYTES), np.uint8)
    two = one.copy()
    two[:8] += 1
    data = np.frombuffer(BASE, np.uint8).copy()
    with handle(tmp_path / "store", compress="always") as run:
        run.save({"one": one}, 0)
        run.save({"one": two}, 1)
        run.save({"embedding": data}, 2)
        data[LEAF_BYTES : 2 * LEAF_BYTES] = two
        run.save({"embedding": data}, 3)
        record = in_parts(run.store)[bytes.fromhex(digest(data.tobytes()))]
        [part] = record.parts.values()
        kept = [r for t in all_tables(run.store).values() for r in t.records if r.digest == part]
        assert {each.base is None for each in kept} == {True, False}
        with run.store.checkpoint("run@3") as opened:
            assert record.digest in opened
            assert opened._copies._searched is None, "nothing had to be looked for in all tables"
        assert_same(run.load(3), {"embedding": data})


def test_a_leaf_that_comes_back_costs_nothing(tmp_path: Path) -> None:
    """A step that is between two others, by what it has of each."""
    with handle(tmp_path / "store", compress=None) as run:
        for step in range(4):
            run.save(model(step), step)
        mixed = bytearray(data_of(3))
        mixed[LEAF_BYTES : 2 * LEAF_BYTES] = BASE[LEAF_BYTES : 2 * LEAF_BYTES]
        again = {**model(3), "embedding": np.frombuffer(bytes(mixed), np.uint8).copy()}
        before = containers(run.store)
        run.save(again, 4)
        assert containers(run.store) - before <= BOOKS
        record = in_parts(run.store)[bytes.fromhex(digest(bytes(mixed)))]
        assert list(record.parts) == [2, 3]
        assert_same(run.load(4), again)


def test_two_tensors_have_a_part_in_common(tmp_path: Path) -> None:
    """Tied or not: equal leaves of two tensors are stored once, in one save too."""
    one, two = BASE, noise(2, 3 * LEAF_BYTES)

    def step(number: int) -> Model:
        found = {"one": bytearray(one), "two": bytearray(two)}
        if number:
            for name, at in (("one", 1), ("two", 2)):
                found[name][at * LEAF_BYTES : (at + 1) * LEAF_BYTES] = noise(9, LEAF_BYTES)
        return {name: np.frombuffer(bytes(data), np.uint8) for name, data in found.items()}

    with handle(tmp_path / "store", compress=None) as run:
        run.save(step(0), 0)
        before = containers(run.store)
        run.save(step(1), 1)
        assert len(in_parts(run.store)) == 2
        assert containers(run.store) - before <= LEAF_BYTES + BOOKS
        assert_same(run.load(1), step(1))
        assert run.store.verify(full=True).faults == []


def test_parts_are_encoded_alone_where_that_is_worth_it(tmp_path: Path) -> None:
    """Of weights a codec saves a fifth of each leaf, and saves it once."""
    dice = np.random.default_rng(0)
    table = dice.standard_normal((LEAVES, LEAF_BYTES // 4)).astype(np.float32)
    with handle(tmp_path / "store", compress="auto") as run:
        run.save({"embedding": table}, 0)
        for step in range(1, LEAVES):
            before = containers(run.store)
            table[step] = dice.standard_normal(LEAF_BYTES // 4)
            run.save({"embedding": table}, step)
            assert containers(run.store) - before <= 0.9 * LEAF_BYTES + BOOKS, step
        assert_same(run.load(LEAVES - 1), {"embedding": table})
        assert len(in_parts(run.store)) == LEAVES - 1
    assert run.store.verify(full=True).faults == []
    assert run.store.stats().codecs["parts"].pieces == LEAVES - 1


def test_sizes_count_parts(run: CheckpointStore) -> None:
    grown = run.store.run_growth("run")
    for each in grown[1:]:
        assert LEAF_BYTES <= each.stored_bytes <= LEAF_BYTES + 200_000 + BOOKS
    [usage] = run.store.usage().checkpoints
    assert usage.unique_bytes >= len(BASE) + (LEAVES - 1) * LEAF_BYTES
    assert usage.reclaimable_bytes is not None
    assert usage.reclaimable_bytes >= usage.unique_bytes
    assert run.store.run_stats("run").total_bytes >= len(BASE) + (LEAVES - 1) * LEAF_BYTES


# That nothing is lost.


@pytest.mark.parametrize("gone", [[0], [1], [0, 1, 2], [0, 1, 2, 3, 4], [5], [1, 3]])
def test_gc_keeps_what_steps_consist_of(run: CheckpointStore, gone: list[int]) -> None:
    for step in gone:
        run.delete(step)
        run.gc(0)
    left = [step for step in range(LEAVES) if step not in gone]
    check(run, left)
    # And the run goes on, as cheaply as before: it stores its own leaf, and that of step 5 again
    # where nobody needed it any more.
    before = containers(run.store)
    run.save(model(LEAVES), LEAVES)
    again = LEAF_BYTES if 5 in gone else 0
    assert containers(run.store) - before <= TAIL + 200_000 + again + BOOKS
    run.gc(0)
    check(run, [*left, LEAVES])


def test_what_nothing_needs_goes(run: CheckpointStore) -> None:
    for step in range(LEAVES - 1):
        run.delete(step)
    run.delete(LEAVES - 1)
    run.gc(0)
    assert containers(run.store) == 0


def test_a_part_does_not_keep_the_rest_of_its_step(tmp_path: Path) -> None:
    """A container stays as a whole, so parts are in none with what changes in each step."""
    dense = 3 * LEAF_BYTES

    def step(number: int) -> Model:
        return {**model(number), "dense": np.frombuffer(noise(50 + number, dense), np.uint8)}

    with handle(tmp_path / "store", compress=None) as run:
        for number in range(LEAVES):
            run.save(step(number), number)
        assert len(in_parts(run.store)) == LEAVES - 1
        for number in range(LEAVES - 1):
            run.delete(number)
        run.gc(0)
        # The first step's is in one container with the anchor.
        kept = len(BASE) + 2 * dense + (LEAVES - 1) * LEAF_BYTES
        assert containers(run.store) <= kept + LEAVES * BOOKS
        assert_same(run.load(LEAVES - 1), step(LEAVES - 1))


def test_a_dead_step_whose_part_is_gone_is_stored_anew(tmp_path: Path) -> None:
    """Its record may stay in a container that another piece keeps; it can be read no more."""
    other = noise(7, 4 * LEAF_BYTES)

    def step(number: int) -> Model:
        second = bytearray(other)
        if number:
            second[:100] = noise(8, 100)
        return {**model(number), "second": np.frombuffer(bytes(second), np.uint8)}

    with handle(tmp_path / "store", compress=None) as run:
        run.save(step(0), 0)
        run.save(step(1), 1)
        found = in_parts(run.store)
        [container] = [
            each
            for each, table in all_tables(run.store).items()
            if any(record.parts for record in table.records)
        ]
        assert len(found) == 2  # in one container
        # What is alive keeps it: the second tensor of step 1, in another run.
        with handle(tmp_path / "store", "other", compress=None) as more:
            more.save({"second": step(1)["second"]}, 0)
        run.delete(1)
        run.gc(0)
        assert container in all_tables(run.store)
        # Its part shares a container with the one that is alive; so take that away, too.
        [part] = found[bytes.fromhex(digest(data_of(1)))].parts.values()
        forget(run.store, part)
        with run.store.handle.session() as (index, _):
            assert not index.find([bytes.fromhex(digest(data_of(1)))])
        run.save(model(1), 2)
        assert_same(run.load(2), model(1))


def forget(store: LocalStore, digest_: bytes) -> None:
    """List a piece as bad wherever it is."""
    for container, table in all_tables(store).items():
        for record in table.records:
            if record.digest == digest_:
                store.handle.objects.add_bad_offset(container.name, record.offset)


def part_file(store: LocalStore, step: int) -> tuple[Path, int]:
    """Where the leaf lies that a step has changed: its container, and the offset in it."""
    leaf = leaf_digests(data_of(step))[step]
    wanted = part_digest(leaf, LEAF_BYTES)
    for container, table in all_tables(store).items():
        for record in table.records:
            if record.digest == wanted:
                return store.handle.objects.layout.container(
                    container.name, container.kind
                ), record.offset
    raise AssertionError("it is no piece of its own")


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset + 9] ^= 4
    path.chmod(0o600)
    path.write_bytes(data)


def test_damage_to_a_part_is_said_of_all_that_need_it(run: CheckpointStore, tmp_path: Path) -> None:
    store = run.store
    store.export("run@4", tmp_path / "out")
    flip(*part_file(store, 3))
    for step in (0, 1, 2):
        assert_same(run.load(step), model(step))
    for step in (3, 4, 5):
        with pytest.raises((CorruptTensorError, MissingObjectError)):  # which is listed by then
            run.load(step)
    with store.checkpoint("run@4") as checkpoint:
        # The other leaves can be read.
        start, stop = 4 * LEAF_BYTES, len(BASE)
        assert checkpoint.read_range("embedding", start, stop) == data_of(4)[start:stop]
    result = open_store(store.path).verify(full=True)
    lost = {name for fault in result.faults for name in fault.affected}
    assert lost == {f"run@{step}: embedding" for step in (3, 4, 5)}
    with pytest.raises(UnfitForCollectionError):
        run.gc(0)
    # A leaf of one step's export heals them all.
    repaired = store.repair([tmp_path / "out"])
    assert repaired.whole
    check(run, list(range(LEAVES)))
    run.gc(0)
    check(run, list(range(LEAVES)))


def test_verify_names_a_damaged_part(run: CheckpointStore) -> None:
    flip(*part_file(run.store, 3))
    [fault] = [each for each in run.store.verify(full=True).faults if each.kind == "tensor"]
    assert fault.path == str(part_file(run.store, 3)[0])
    assert set(fault.affected) == {f"run@{step}: embedding" for step in (3, 4, 5)}


def test_damage_to_a_record_is_damage_to_no_part(run: CheckpointStore) -> None:
    wanted = bytes.fromhex(digest(data_of(3)))
    for container, table in all_tables(run.store).items():
        for record in (each for each in table.records if each.digest == wanted):
            path = run.store.handle.objects.layout.container(container.name, container.kind)
            flip(path, record.offset - 9)  # the size of the first chunk
    with pytest.raises(CorruptTensorError):
        run.load(3)
    for step in (2, 4, 5):
        assert_same(run.load(step), model(step))
    before = containers(run.store)
    run.save(model(3), 9)
    assert containers(run.store) - before <= BOOKS  # all of its leaves are there
    for step in (3, 9):
        assert_same(run.load(step), model(3))


def test_a_part_comes_back_from_the_trash(run: CheckpointStore) -> None:
    path, _ = part_file(run.store, 2)
    aside = run.store.path / "trash" / f"1.{path.name}"
    path.rename(aside)
    faults = run.store.verify(full=True).faults
    assert {name for fault in faults for name in fault.affected} == {
        f"run@{step}: embedding" for step in (2, 3, 4, 5)
    }
    assert run.store.repair([]).from_trash == 1
    check(run, list(range(LEAVES)))


def test_a_damaged_part_is_stored_again_by_the_next_save(run: CheckpointStore) -> None:
    flip(*part_file(run.store, 3))
    assert run.store.verify(full=True).faults
    run.save(model(LEAVES), LEAVES)
    check(run, list(range(LEAVES + 1)))


# Reading.


def test_single_leaves_are_read_and_compared(run: CheckpointStore) -> None:
    """As `store://` reads them, each with the digest that it was compared with."""
    data = data_of(4)
    key = bytes.fromhex(digest(data))
    with run.store.open_pieces([digest(data)]) as pieces:
        assert pieces.records(key)[0].parts
        for number, expected in enumerate(leaf_digests(data)):
            at = number * LEAF_BYTES
            view = memoryview(bytearray(min(LEAF_BYTES, len(data) - at)))
            assert pieces.read_piece_into(key, at, view, len(data)) == expected
            assert view == data[at : at + LEAF_BYTES]
        start, stop = 2 * LEAF_BYTES - 3, 4 * LEAF_BYTES + 7
        assert pieces.read_piece(key, start, stop, len(data)) == data[start:stop]


@pytest.mark.parametrize("options", [{}, {"verify": False}, {"mapped": True}])
def test_torch_loads_what_has_parts(run: CheckpointStore, options: dict[str, bool]) -> None:
    load_tensors = pytest.importorskip("tensor_dedup.store.reading.tensors").load_tensors
    with run.store.checkpoint("run@5") as checkpoint:
        loaded = load_tensors(checkpoint, **options)
    assert loaded["embedding"].numpy().tobytes() == data_of(5)


def test_who_has_a_step_open_reads_it_whatever_gc_does(run: CheckpointStore) -> None:
    with run.store.checkpoint("run@5") as checkpoint:
        for step in range(LEAVES):
            run.delete(step)
        run.gc(0)
        assert containers(run.store) == 0
        assert checkpoint.read("embedding") == data_of(5)


def test_an_import_of_an_export_refers_to_it(run: CheckpointStore, tmp_path: Path) -> None:
    """And keeps the parts for as long as it is there."""
    run.store.export("run@5", tmp_path / "out")
    run.store.import_(tmp_path / "out", "copy")
    for step in range(LEAVES):
        run.delete(step)
    run.gc(0)
    assert bytes.fromhex(digest(data_of(5))) in in_parts(run.store)
    with run.store.checkpoint("copy") as checkpoint:
        [name] = [each.name for each in checkpoint if each.nbytes == len(BASE)]
        assert checkpoint.read(name) == data_of(5)
    assert run.store.verify(full=True).faults == []


# The index.


def test_the_index_asks_for_every_part(run: CheckpointStore) -> None:
    """A record is there only with all of its parts, as the index says it and as gc does."""
    wanted = bytes.fromhex(digest(data_of(4)))
    with run.store.handle.session() as (index, _):
        [place] = index.find([wanted])[wanted]
        assert set(place.bases) == set(in_parts(run.store)[wanted].bases)
    path, _ = part_file(run.store, 2)
    path.rename(path.with_name(path.name + ".away").parent.parent.parent / "tmp" / path.name)
    with run.store.handle.session() as (index, _):
        assert wanted not in index.find([wanted])
        first = bytes.fromhex(digest(data_of(1)))
        assert first in index.find([first])


def test_a_part_that_the_index_lacks_is_a_fault_of_the_index(run: CheckpointStore) -> None:
    run.close()
    with run.store.handle.session() as (index, _):
        index._db.execute("DELETE FROM part WHERE number = 1")
    faults = open_store(run.store.path).verify().faults
    assert [fault.kind for fault in faults] == ["index"]
    check(run, list(range(LEAVES)))


# Others.


def test_two_writers_add_parts_of_the_same_tensor(tmp_path: Path) -> None:
    with (
        handle(tmp_path / "store", "one", compress=None) as one,
        handle(tmp_path / "store", "two", compress=None) as two,
    ):
        one.save(model(0), 0)
        for step in range(1, LEAVES):
            (one if step % 2 else two).save(model(step), step)
            (two if step % 2 else one).save(model(step), step)
        assert len(in_parts(one.store)) == LEAVES - 1
        for step in range(LEAVES):
            assert_same(one.load(step), model(step))
        for run in (one, two):
            for step in range(1, 4):
                run.delete(step)
        one.gc(0)
        for step in (4, 5):
            assert_same(one.load(step), model(step))
            assert_same(two.load(step), model(step))
        assert one.store.verify(full=True).faults == []


def test_a_writer_that_dies_before_its_manifest(tmp_path: Path) -> None:
    """Its containers are garbage that the next save may use, and no gc takes what that does."""
    with handle(tmp_path / "store", compress=None) as run:
        for step in range(3):
            run.save(model(step), step)
    (tmp_path / "limbo").mkdir()
    files = FaultyFiles(tmp_path / "limbo")
    shutil.copytree(tmp_path / "store", tmp_path / "trial")
    with handle(tmp_path / "trial", files=files, compress=None) as trial:
        trial.save(model(3), 3)
        operations = [*files.log]
    renames = [n for n, operation in enumerate(operations) if operation == "rename"]
    assert len(renames) >= 4  # containers, page, manifest, reference
    for number in renames:
        root = tmp_path / f"died{number}"
        shutil.copytree(tmp_path / "store", root)
        limbo = tmp_path / f"limbo{number}"
        limbo.mkdir()
        dying = FaultyFiles(limbo, Faults(stop_at=number))
        with pytest.raises(Crash):
            handle(root, files=dying, compress=None).save(model(3), 3)
        dying.lose("everything")
        with handle(root, compress=None) as after:
            steps = after.steps()
            after.save(model(4), 4)
            after.gc(0)
            check(after, [*steps, 4])


@pytest.mark.parametrize("kept", [1, 3])
def test_a_drain_brings_parts(tmp_path: Path, kept: int) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    with handle(fast, compress=None, keep_fast=kept, drain=slow) as run:
        costs = []
        for step in range(LEAVES):
            before = containers(open_store(slow)) if slow.exists() else 0
            run.save(model(step), step)
            run.drain()
            costs.append(containers(open_store(slow)) - before)
    assert all(cost <= LEAF_BYTES + 200_000 + 2 * BOOKS for cost in costs[1:]), costs
    assert len(in_parts(open_store(slow))) == LEAVES - 1
    check(run, list(range(LEAVES)), slow)
    second = open_store(slow)
    for step in range(LEAVES - 1):
        second.delete(f"run@{step}")
    second.gc(0)
    check(run, [LEAVES - 1], slow)
    # A new machine has an empty fast tier.
    with handle(tmp_path / "new", compress=None, drain=slow) as after:
        assert_same(after.load(LEAVES - 1), model(LEAVES - 1))


# Records that nobody writes.


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"codec": codec_of(range(7))}, DamagedFileError),
        ({"codec": codec_of([7])}, DamagedFileError),
        ({"base": None}, DamagedFileError),
        ({"stored": 17}, DamagedFileError),
        ({"codec": "parts:0"}, NewerFormatError),
        ({"codec": "parts:"}, NewerFormatError),
        ({"codec": "parts:A"}, NewerFormatError),
    ],
)
def test_a_record_that_contradicts_itself(
    run: CheckpointStore, change: dict[str, object], error: type[Exception]
) -> None:
    record = next(iter(in_parts(run.store).values()))
    right = Table("delta", record.stored + 64, [replace(record, offset=0)], None)
    name, blob = tables.encode(right)
    assert tables.decode(blob, name, "delta", Path("it")) == right
    wrong = Table("delta", record.stored + 64, [replace(record, offset=0, **change)], None)
    name, blob = tables.encode(wrong)
    with pytest.raises(error):
        tables.decode(blob, name, "delta", Path("it"))


@pytest.mark.parametrize("numbers", [[0], [3], [1, 2, 64, 700]])
def test_a_codec_says_which_leaves_are_parts(numbers: list[int]) -> None:
    assert numbers_in(codec_of(numbers)) == numbers
