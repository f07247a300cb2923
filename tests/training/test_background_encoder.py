"""What a step stored as it is is encoded while nobody waits, and then takes its space no more."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from store_runs.disk_faults import CHANGES, Crash, Faults, FaultyFiles, Loss, some_changes
from store_runs.stores import Model, assert_same
from tensor_dedup import Store
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.store.files import Handle, RealFiles
from tensor_dedup.store.format.tables import PLAIN
from tensor_dedup.store.locks import sweep
from tensor_dedup.store.steps.errors import BadOptionError
from tensor_dedup.store.writing.run_cache import RunCache
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.encoding import background
from tensor_dedup.training.encoding.background import BackgroundEncoder
from tensor_dedup.training.encoding.rewrite import EncodingJob, GivenUpError

ELEMENTS = 600_000
MOVING = ("one", "two")


@cache
def moved(name: str, steps: int) -> NDArray[np.float32]:
    """Weights that moved a little so many times; nothing changes them."""
    seed = 99 + steps if steps else [*MOVING, "frozen"].index(name)
    drawn = np.random.default_rng(seed).standard_normal(ELEMENTS).astype(np.float32)
    found = moved(name, steps - 1) + drawn * np.float32(1e-5) if steps else drawn
    found.flags.writeable = False
    return found


def model_of(step: int) -> Model:
    """Weights that move a little in each step, one that stays, and one that nothing makes small."""
    moves = {name: step if name in MOVING else 0 for name in (*MOVING, "frozen")}
    model: Model = {name: moved(name, steps) for name, steps in moves.items()}
    model["noise"] = np.random.default_rng(step).integers(0, 256, ELEMENTS, np.uint8)
    model["bias"] = np.full(10, step, np.float32)
    return model


def run_on(folder: Path, files: Any = None, **more: Any) -> CheckpointStore:
    return CheckpointStore(Store.open(folder / "store", files=files, worker_count=1), "run", **more)


def encoded(run: CheckpointStore, step: int) -> set[str]:
    """Which tensors are encoded."""
    with run.store.checkpoint(f"run@{step}") as opened:
        return {each.name for each in opened if opened.stored(each)[0] != PLAIN}


def slabs(run: CheckpointStore) -> set[Path]:
    return set(run.store.path.rglob("*.slab"))


def disk_bytes(run: CheckpointStore) -> int:
    return sum(path.stat().st_size for path in (run.store.path / "containers").rglob("*.*"))


def encoder_of(run: CheckpointStore) -> BackgroundEncoder:
    return run._saver._encoder.background


def check(run: CheckpointStore, *steps: int) -> None:
    assert run.steps() == list(steps)
    assert run.store.verify(full=True).faults == []
    for step in steps:
        assert_same(run.load(step), model_of(step))


def save_both(run: CheckpointStore) -> None:
    for step in range(2):
        run.save(model_of(step), step)


def test_a_save_is_done_before_its_tensors_are_encoded(tmp_path: Path) -> None:
    run = run_on(tmp_path)
    with encoder_of(run).saving():  # as if saves never ended
        save_both(run)
        assert encoded(run, 0) | encoded(run, 1) == set()
        before, written = disk_bytes(run), slabs(run)
        assert len(written) == 2
        check(run, 0, 1)
    run.close()
    assert encoded(run, 1) >= set(MOVING)
    assert not slabs(run) & written
    assert disk_bytes(run) < 0.9 * before
    check(run, 0, 1)


def test_it_begins_when_no_save_has_come_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    do = BackgroundEncoder._do

    def noted(self: BackgroundEncoder, cache: RunCache, job: EncodingJob) -> None:
        begun.append(job.name)
        do(self, cache, job)

    monkeypatch.setattr(BackgroundEncoder, "_do", noted)
    monkeypatch.setattr(background, "_REST_S", 3600.0)
    with run_on(tmp_path) as run:
        save_both(run)
        assert encoder_of(run).busy
        assert begun == []
        run.gc(0)  # which waits for it
        assert begun == ["run@0", "run@1"]
        monkeypatch.setattr(background, "_REST_S", 0.0)
        run.save(model_of(2), 2)
        encoder_of(run).wait_for("run@2", lambda: False)
    assert encoded(run, 2) >= set(MOVING)
    check(run, 0, 1, 2)


def test_a_training_that_saves_often_is_spared_until_many_steps_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_REST_S", 0.0)
    monkeypatch.setattr(background, "_RESTED_BYTES_PER_S", 1e3)  # hours for a step
    monkeypatch.setattr(background, "_MANY_WAITING", 2)
    with run_on(tmp_path) as run:
        encoder = encoder_of(run)
        save_both(run)
        time.sleep(0.2)
        assert encoder.busy
        assert [job.name for job in encoder._waiting] == ["run@0", "run@1"]
        run.save(model_of(2), 2)
        deadline = time.monotonic() + 60
        while not encoded(run, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert encoded(run, 0)
        assert [job.name for job in encoder._waiting] == ["run@1", "run@2"]
        assert (encoded(run, 1) | encoded(run, 2)).isdisjoint(MOVING)
    assert encoded(run, 1) & encoded(run, 2) >= set(MOVING)
    check(run, 0, 1, 2)


def test_it_takes_no_more_than_encoding_in_the_save(tmp_path: Path) -> None:
    sizes = {}
    for compress in ("auto", "always"):
        with run_on(tmp_path / compress, compress=compress) as run:
            for step in range(4):
                run.save(model_of(step), step)
        assert encoded(run, 3) >= set(MOVING)
        sizes[compress] = disk_bytes(run)
        assert run.gc(0).freed_bytes == 0
        shutil.rmtree(tmp_path / compress)
    assert sizes["auto"] <= 1.01 * sizes["always"]


def test_what_stayed_is_known_when_its_container_was_replaced(tmp_path: Path) -> None:
    with run_on(tmp_path) as run:
        run.save(model_of(0), 0)
        old = slabs(run)
        run._saver.finish_encoding()
        assert not slabs(run) & old
        last = run._saver._last
        assert all(path.exists() for path, _ in last.containers.values())
        assert {known.digest for known in last.known({*last.containers}).values()}
        saved = run.save(model_of(1), 1)
        assert saved.new_tensors == len(model_of(1)) - 1  # all but the frozen one
    check(run, 0, 1)


def test_a_save_is_stored_against_what_was_encoded_since(tmp_path: Path) -> None:
    """The run's index stays open, and still has the container that the encoding removed."""
    drawn = np.random.default_rng(7).standard_normal((6, LEAF_BYTES // 8)).astype(np.float32)
    model: Model = {f"weight{number}": rows for number, rows in enumerate(drawn)}
    run = run_on(tmp_path)
    run.save(model, 0)
    written = slabs(run)
    while encoder_of(run).busy:
        time.sleep(0.01)
    assert written
    assert not slabs(run) & written
    assert encoded(run, 0) == {*model}
    model["weight0"] = drawn[0] + np.float32(1e-6)
    run.save(model, 1)
    with run.store.checkpoint("run@1") as opened:
        assert opened.stored(opened["weight0"])[2] is not None  # a difference from the first
    assert_same(run.load(1), model)
    run.close()
    assert run.store.verify(full=True).faults == []


def test_an_open_checkpoint_stays_readable(tmp_path: Path) -> None:
    run = run_on(tmp_path)
    with encoder_of(run).saving():
        run.save(model_of(0), 0)
        old = slabs(run)
        opened = run.store.checkpoint("run@0")
    run.close()
    assert not slabs(run) & old
    with opened:
        for name, array in model_of(0).items():
            assert bytes(opened.read(name)) == array.tobytes()


def test_a_container_that_cannot_go_goes_with_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_LAST_WAIT_S", 0)
    run = run_on(tmp_path)
    with run.store.handle.locked():  # as an export does
        run.save(model_of(0), 0)
        run._saver.finish_encoding()
        kept = slabs(run)
        assert len(kept) == 2  # what was written and what is left of it
    run.save(model_of(1), 1)
    run.close()
    assert len(slabs(run) & kept) == 1
    check(run, 0, 1)


def import_against(run: CheckpointStore, folder: Path, name: str) -> None:
    """Import a checkpoint that is stored against a tensor of step 1, which is not encoded yet."""
    from safetensors.numpy import save_file

    folder.mkdir()
    near = model_of(1)["one"].copy()
    near[:9] += 1
    save_file({"one": near}, folder / "model.safetensors")
    run.store.import_(folder, name, compress="auto", base="run@1")
    with run.store.checkpoint(name) as opened:
        assert opened.stored(opened["one"])[0] != PLAIN


def test_what_others_have_stored_against_it_stays(tmp_path: Path) -> None:
    run = run_on(tmp_path)
    run.save(model_of(0), 0)
    run._saver.finish_encoding()
    there = slabs(run)
    with encoder_of(run).saving():
        run.save(model_of(1), 1)
        import_against(run, tmp_path / "other", "other")
        kept = slabs(run) - there
        assert len(kept) == 1
    run.close()
    assert not slabs(run) & kept
    with run.store.checkpoint("run@1") as opened:  # encoded, but against nothing
        assert [opened.stored(opened[name])[2] is None for name in MOVING] == [True, False]
    check(run, 0, 1)
    assert run.gc(0).done
    check(run, 0, 1)
    with run.store.checkpoint("other") as opened:
        assert len(opened.read("one")) == 4 * ELEMENTS


def test_what_others_have_stored_against_it_meanwhile_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on(tmp_path)
    run.save(model_of(0), 0)
    run._saver.finish_encoding()
    superseded = encoder_of(run).superseded
    remove = superseded._remove

    def late(*args: Any) -> bool:
        if not (tmp_path / "other").exists():
            import_against(run, tmp_path / "other", "other")
        return remove(*args)

    with encoder_of(run).saving():
        run.save(model_of(1), 1)
        kept = slabs(run)
    monkeypatch.setattr(superseded, "_remove", late)
    run.close()
    assert slabs(run) >= kept
    check(run, 0, 1)
    assert run.gc(0).done
    check(run, 0, 1)
    with run.store.checkpoint("other") as opened:
        assert len(opened.read("one")) == 4 * ELEMENTS


@cache
def leaf_model(step: int) -> Model:
    """Weights of one leaf each that move a little, and noise."""
    model: Model = {}
    for number, name in enumerate(MOVING):
        weights = np.random.default_rng(number).standard_normal(LEAF_BYTES // 4)
        move = np.random.default_rng(100 + step).standard_normal(LEAF_BYTES // 4) * 1e-5
        model[name] = (weights + (move if step else 0)).astype(np.float32)
    model["noise"] = np.random.default_rng(step).integers(0, 256, ELEMENTS, np.uint8)
    for array in model.values():
        array.flags.writeable = False
    return model


def table_of(step: int) -> Model:
    """Of another run: a table whose second leaf becomes what a tensor of `leaf_model(1)` is."""
    table = np.random.default_rng(9).integers(0, 256, 2 * LEAF_BYTES, np.uint8)
    if step:
        table[LEAF_BYTES:] = leaf_model(1)["one"].view(np.uint8)
    return {"table": table}


def save_table(run: CheckpointStore, step: int) -> None:
    with CheckpointStore(Store.open(run.store.path, worker_count=1), "other", compress=None) as own:
        own.save(table_of(step), step)
        if step:
            with own.store.checkpoint("other@1") as opened:
                [record] = opened.records(bytes.fromhex(opened["table"].digest))
                assert list(record.parts) == [1]
                # It is the tensor: it was not stored again.
                [(container, _)] = opened.plain_places(record.parts[1])
                assert len(own.store.handle.objects.containers.table(container).records) > 1


@pytest.mark.parametrize("when", ["before", "while", "after"])
def test_what_is_a_part_of_something_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A tensor that another run refers to as a leaf, before or while it is encoded, or after."""
    run = run_on(tmp_path)
    run.save(leaf_model(0), 0)
    run._saver.finish_encoding()
    save_table(run, 0)
    encoder = encoder_of(run)
    remove, stand_still = encoder.superseded._remove, encoder._stand_still
    done = list[bool]()

    def save_once() -> None:
        if not done:
            done.append(True)
            save_table(run, 1)

    def noted() -> None:
        save_once()
        stand_still()

    def late(*args: Any) -> bool:
        save_once()
        return remove(*args)

    with encoder.saving():
        run.save(leaf_model(1), 1)
        if when == "before":
            save_once()
    if when == "while":
        monkeypatch.setattr(encoder, "_stand_still", noted)
    elif when == "after":
        monkeypatch.setattr(encoder.superseded, "_remove", late)
    run.close()
    assert done
    for _ in range(2):
        assert run.store.verify(full=True).faults == []
        for step in range(2):
            assert_same(run.load(step), leaf_model(step))
            own = CheckpointStore(Store.open(run.store.path, worker_count=1), "other")
            assert_same(own.load(step), table_of(step))
            own.close()
        assert run.gc(0).done


def test_nothing_is_stored_against_what_waits_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_LAST_WAIT_S", 0)
    run = run_on(tmp_path)
    with run.store.handle.locked():
        for step in range(3):
            run.save(model_of(step), step)
            run._saver.finish_encoding()
    run.save(model_of(3), 3)
    run.close()
    assert encoded(run, 2) >= set(MOVING)
    assert len(slabs(run)) == 4  # the noise of each step
    check(run, 0, 1, 2, 3)


def test_nothing_is_removed_beside_files_nobody_knows(tmp_path: Path) -> None:
    run = run_on(tmp_path)
    with encoder_of(run).saving():
        run.save(model_of(0), 0)
        kept = slabs(run)
        (run.store.path / "containers" / "00").mkdir(exist_ok=True)
        (run.store.path / "containers" / "00" / "new.form").touch()
    run.close()
    assert slabs(run) == kept
    assert encoded(run, 0) == set()  # it would be there twice


def test_nothing_is_removed_when_a_gc_has_chosen_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on(tmp_path)
    superseded = encoder_of(run).superseded
    remove = superseded._remove
    gone = []

    def late(*args: Any) -> bool:
        gone.append(Store.open(run.store.path).gc(0))
        return remove(*args)

    monkeypatch.setattr(superseded, "_remove", late)
    run.save(model_of(0), 0)
    run.close()
    assert gone[0].trash  # what was encoded
    check(run, 0)


def test_a_container_that_cannot_go_goes_when_the_handle_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_LAST_WAIT_S", 0)
    run = run_on(tmp_path)
    with run.store.handle.locked():
        run.save(model_of(0), 0)
        run._saver.finish_encoding()
        assert len(slabs(run)) == 2
    run.close()
    assert len(slabs(run)) == 1
    check(run, 0)


def test_a_removal_that_fails_is_tried_again(tmp_path: Path) -> None:
    class Failing(RealFiles):
        left = 1

        def unlink(self, path: Path) -> None:
            if path.suffix == ".slab" and Failing.left:
                Failing.left -= 1
                raise OSError(errno.EIO, "failed", str(path))
            super().unlink(path)

    with run_on(tmp_path, Failing()) as run:
        save_both(run)
    assert Failing.left == 0
    assert len(slabs(run)) == 2
    check(run, 0, 1)


def test_a_save_has_the_disk_that_an_encoding_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding, refused = threading.Event(), threading.Event()

    class Full(RealFiles):
        def pwrite(self, handle: Handle, data: bytes | memoryview, offset: int) -> None:
            by_encoder = threading.current_thread().name == "tensor-dedup-encode"
            if encoding.is_set() and not by_encoder and encoder_of(run).busy:
                refused.set()
                raise OSError(errno.ENOSPC, "full", str(handle.path))
            super().pwrite(handle, data, offset)

    run = run_on(tmp_path, Full())
    stand_still = encoder_of(run)._stand_still

    def noted() -> None:
        encoding.set()
        refused.wait(60)
        stand_still()

    monkeypatch.setattr(encoder_of(run), "_stand_still", noted)
    run.save(model_of(0), 0)
    assert encoding.wait(60)
    run.save(model_of(1), 1)
    assert refused.is_set()
    run.close()
    check(run, 0, 1)


def test_what_is_stored_against_it_while_it_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on(tmp_path)
    run.save(model_of(0), 0)
    run._saver.finish_encoding()
    there, stand_still = slabs(run), encoder_of(run)._stand_still

    def noted() -> None:
        if not (tmp_path / "other").exists():
            import_against(run, tmp_path / "other", "other")
        stand_still()

    monkeypatch.setattr(encoder_of(run), "_stand_still", noted)
    with encoder_of(run).saving():
        run.save(model_of(1), 1)
        kept = slabs(run) - there
    run.close()
    assert not slabs(run) & kept
    check(run, 0, 1)


def test_a_thread_that_cannot_start_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: object) -> None:
        raise RuntimeError("can't start new thread")

    run = run_on(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        run.save(model_of(0), 0)
        run.close()
    assert encoded(run, 0) == set()
    check(run, 0)


def test_a_step_is_drained_as_it_was_encoded(tmp_path: Path) -> None:
    run = run_on(tmp_path, drain=tmp_path / "second", keep_fast=None)
    with encoder_of(run).saving():
        save_both(run)
        assert run.undrained() == [0, 1]
    run.close()
    second = CheckpointStore(tmp_path / "second", "run")
    assert encoded(second, 1) >= set(MOVING)
    assert disk_bytes(second) <= 1.01 * disk_bytes(run)
    check(second, 0, 1)


def test_a_drain_does_not_wait_for_ever_for_encoding(tmp_path: Path) -> None:
    run = run_on(tmp_path, drain=tmp_path / "second", drain_backlog=2)
    with encoder_of(run).saving():
        for step in range(4):  # each waits for room from the third on
            run.save(model_of(step), step)
        assert len(run.undrained()) <= 2
    run.close()
    check(CheckpointStore(tmp_path / "second", "run"), 0, 1, 2, 3)


def test_an_error_in_the_block_waits_for_no_encoding(tmp_path: Path) -> None:
    run = run_on(tmp_path)

    def training() -> None:
        with run, encoder_of(run).saving():
            save_both(run)
            raise KeyError

    with pytest.raises(KeyError):
        training()
    assert encoded(run, 0) | encoded(run, 1) == set()
    check(run, 0, 1)


def test_a_training_that_is_never_idle_piles_up_no_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_MOST_WAITING", 8)
    with run_on(tmp_path) as run:
        held = encoder_of(run)
        with held.saving():
            for step in range(12):
                left = run.save_async(model_of(step), step).wait()
                assert left.new_bytes > 4 << 20
            assert 8 <= len(held._waiting) <= 9
            assert held._waiting[-1].name == "run@11"
    assert encoded(run, 11) >= set(MOVING)
    check(run, *range(12))


def test_the_gc_of_others_does_not_wait_for_a_thread_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_PATIENCE_S", 0.05)
    run, began = run_on(tmp_path), threading.Event()
    stand_still = encoder_of(run)._stand_still
    ended = []

    def noted() -> None:
        began.set()
        try:
            stand_still()
        except GivenUpError:
            ended.append(1)
            raise

    monkeypatch.setattr(encoder_of(run), "_stand_still", noted)
    run.save(model_of(0), 0)
    assert began.wait(60)
    with (
        encoder_of(run).saving(),
        sweep(run.store.handle.files, run.store.handle.objects.layout, wait_s=60),
    ):
        pass  # it was let in
    run.close()
    assert encoded(run, 0) >= {"frozen"}
    check(run, 0)


def test_a_deleted_step_is_not_encoded(tmp_path: Path) -> None:
    run = run_on(tmp_path)
    with encoder_of(run).saving():
        save_both(run)
        run.save({"other": np.zeros(9)}, 2)
        run.delete(0)
        kept = slabs(run)
    run.close()
    assert len(slabs(run) & kept) == 1  # of the step that is gone
    assert run.steps() == [1, 2]


def test_who_wants_everything_encoded_gets_it(tmp_path: Path) -> None:
    with run_on(tmp_path, compress="always") as run, encoder_of(run).saving():
        save_both(run)
        assert encoded(run, 1) >= set(MOVING)


@pytest.mark.parametrize("compress", ["", "never", True, 3])
def test_what_is_no_way_to_compress_is_refused(tmp_path: Path, compress: Any) -> None:
    with pytest.raises(BadOptionError, match="compress"):
        run_on(tmp_path, compress=compress)


def test_a_fork_leaves_the_work_to_its_parent(tmp_path: Path) -> None:
    run = run_on(tmp_path)
    with encoder_of(run).saving():
        run.save(model_of(0), 0)
        child = os.fork()
        if not child:
            try:
                run.save(model_of(1), 1)
                run.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    run.close()
    assert encoded(run, 0)
    assert encoded(run, 1)
    check(run, 0, 1)


PROGRAM = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from test_background_encoder import model_of, run_on
run = run_on(Path(sys.argv[1]))
for step in range(3):
    run.save(model_of(step), step)
    print(step, flush=True)
if sys.argv[2] == "wait":
    run.close()
"""


def program(folder: Path, end: str) -> "subprocess.Popen[str]":
    code = [sys.executable, "-c", PROGRAM, str(folder), end, str(Path(__file__).parent), *sys.path]
    return subprocess.Popen(code, stdout=subprocess.PIPE, text=True)


def test_a_program_that_ends_without_closing_keeps_its_steps(tmp_path: Path) -> None:
    with program(tmp_path, "leave") as running:
        assert running.communicate()[0].split() == ["0", "1", "2"]
    assert running.returncode == 0
    check(run_on(tmp_path), 0, 1, 2)


@pytest.mark.parametrize(
    "delay", [0.0, 0.05, *(pytest.param(n / 50, marks=pytest.mark.long) for n in range(1, 40))]
)
def test_a_kill_loses_nothing(tmp_path: Path, delay: float) -> None:
    with program(tmp_path, "wait") as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.strip() == "2":
                break
        threading.Event().wait(delay)
        running.send_signal(signal.SIGKILL)
    run = run_on(tmp_path)
    if delay == 0:
        assert not encoded(run, 2) & set(MOVING)  # it died before
    check(run, 0, 1, 2)
    assert run.gc(0).done
    check(run, 0, 1, 2)


class Scene:
    """A step whose encoding is done by the calling thread, with a fault at one operation."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.jobs = folder, list[EncodingJob]()
        monkeypatch.setattr(BackgroundEncoder, "add", lambda _, job: self.jobs.append(job))
        with run_on(folder / "template") as run:
            run.save(model_of(0), 0)
            self.encode(run)
            run.save(model_of(1), 1)
        assert len(self.jobs) == 1

    def encode(self, run: CheckpointStore, *, keep: bool = False) -> None:
        encoder, job = encoder_of(run), self.jobs[0]
        if not keep:
            self.jobs.clear()
        with closing(RunCache(run.store.handle.objects, 1)) as cache:
            encoder._do(cache, job)

    def play(self, name: str, faults: Faults) -> tuple[FaultyFiles, CheckpointStore]:
        shutil.copytree(self.folder / "template", self.folder / name)
        limbo = self.folder / name / "limbo"
        limbo.mkdir()
        files = FaultyFiles(limbo, faults)
        return files, run_on(self.folder / name, files)


LESS: list[Loss] = ["bytes", "nothing"]


@pytest.mark.parametrize(
    ("loss", "one_in"),
    [
        ("everything", 6),
        *(pytest.param(each, 1, marks=pytest.mark.long) for each in ("everything", *LESS)),
    ],
)
def test_dying_at_every_change_of_an_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: Loss, one_in: int
) -> None:
    scene = Scene(tmp_path, monkeypatch)
    files, run = scene.play("undisturbed", Faults())
    old, began = slabs(run), len(files.log)
    scene.encode(run, keep=True)
    assert len(old - slabs(run)) == 1
    points = sorted(some_changes(enumerate(files.log[began:], began), one_in))
    assert {"unlink", "rename", "fsync"} <= {files.log[point] for point in points}
    run.close()
    for point in points:
        files, run = scene.play(f"{point}", Faults(stop_at=point, torn=True))
        with pytest.raises(Crash):
            scene.encode(run, keep=True)
        files.lose(loss)
        shutil.rmtree(tmp_path / f"{point}" / "limbo")
        after = run_on(tmp_path / f"{point}")
        check(after, 0, 1)
        assert after.gc(0).done
        check(after, 0, 1)
        shutil.rmtree(tmp_path / f"{point}")


@pytest.mark.parametrize(
    ("code", "one_in"),
    [
        (errno.ENOSPC, 13),
        (errno.EIO, 7),
        pytest.param(errno.ENOSPC, 5, marks=pytest.mark.long),
        pytest.param(errno.EIO, 3, marks=pytest.mark.long),
    ],
)
def test_an_operation_that_fails_costs_only_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, one_in: int
) -> None:
    scene = Scene(tmp_path, monkeypatch)
    files, run = scene.play("undisturbed", Faults())
    began = len(files.log)
    scene.encode(run, keep=True)
    points = [n for n, what in enumerate(files.log) if n >= began and what in CHANGES]
    run.close()
    for point in points[::one_in]:
        files, run = scene.play(f"{point}", Faults(fail={point: code}))
        scene.encode(run, keep=True)
        check(run, 0, 1)
        run.save(model_of(2), 2)
        check(run, 0, 1, 2)
        assert list((run.store.path / "tmp").iterdir()) == []
        run.close()
        shutil.rmtree(tmp_path / f"{point}")


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    names = [each.name for each in threading.enumerate()]
    assert "tensor-dedup-encode" not in names
