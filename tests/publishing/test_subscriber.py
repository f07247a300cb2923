"""A host brings the steps of a run here one after the other, and keeps what it needs."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from remote_runs import remotes
from remote_runs.subscribers import fetch
from store_runs.stores import KIB, open_store, three, tuned, weights
from tensor_dedup import Store, TensorDedupConfig
from tensor_dedup.publishing import subscriber
from tensor_dedup.publishing.subscriber import fetch_step, let_go
from tensor_dedup.remote import Remote
from tensor_dedup.remote.results import SilentTransfer
from tensor_dedup.store.errors import UnfitForCollectionError
from tensor_dedup.store.files import Files, Handle
from tensor_dedup.store.locks import lock_of, pulling
from tensor_dedup.store.steps import followed
from tensor_dedup.training import CheckpointStore

TENSORS, TENSOR_BYTES = 4, 256 * KIB


def model(step: int) -> dict[str, np.ndarray]:
    """Tensors of which each step changes a few elements."""
    made = {}
    for number in range(TENSORS):
        data = weights(number, TENSOR_BYTES)
        if step:
            data = tuned(data, 100 * number + step, share=0.01)
        made[f"w{number}"] = np.frombuffer(data, "<u2")
    return made


class Trainer:
    """Publishes steps of a run to a remote."""

    def __init__(self, folder: Path, url: str) -> None:
        self.store, self.url = open_store(folder), url

    def publish(self, *steps: int) -> None:
        options = {"drain": self.url, "keep_fast": None, "compress": "always"}
        with CheckpointStore(self.store, "policy", config={"config.json": "{}"}, **options) as run:  # type: ignore[arg-type]
            for step in steps:
                run.save(model(step), step=step)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "trainer", f"file://{tmp_path}/remote")


@pytest.fixture
def here(tmp_path: Path) -> Store:
    return open_store(tmp_path / "here")


def end_of_letting_go() -> None:
    for thread in threading.enumerate():
        if thread.name == "let go policy":
            thread.join()


def disk_bytes(store: Store) -> int:
    return sum(path.stat().st_size for path in store.path.rglob("*") if path.is_file())


def test_who_joins_late_fetches_one_anchor_and_one_delta_of_each_tensor(tmp_path: Path) -> None:
    with remotes.s3() as proxy:
        trainer = Trainer(tmp_path / "trainer", "s3://bucket/policy")
        with CheckpointStore(trainer.store, "policy", compress="always") as run:
            for step in range(41):
                run.save(model(step), step=step)
        trainer.store.push(trainer.url, "policy")
        here = open_store(tmp_path / "here")
        proxy.reset()
        found = fetch(here, trainer.url, "policy")
        assert found.name == "policy@40"
        assert found.transfer is not None
        assert found.transfer.anchor_pieces == TENSORS
        # Beside the tensors: what is no tensor in the state, and the header of the file.
        assert found.transfer.moved_pieces == found.transfer.pieces == TENSORS + 2
        whole = TENSORS * TENSOR_BYTES
        # An anchor is smaller than the tensor, and a delta of 1 % of its elements far smaller.
        assert whole / 2 < proxy.received < 1.05 * whole
        late = here.load("policy@40")
        # One that was there all the time has one delta for each step.
        proxy.reset()
        trainer.publish(41)
        proxy.reset()
        found = fetch(here, trainer.url, "policy")
        assert found.transfer is not None
        assert found.transfer.anchor_pieces == 0
        assert 0 < found.transfer.moved_bytes < 0.03 * whole
    for name, expected in model(40).items():
        assert late[name].numpy().tobytes() == expected.tobytes()
    assert here.verify(full=True).fine


def test_the_last_two_steps_stay_and_the_files_of_earlier_ones_go(
    trainer: Trainer, here: Store
) -> None:
    freed, sizes = 0, []
    for step in range(8):
        trainer.publish(step)
        found = fetch(here, trainer.url, "policy")
        assert (found.name, found.step) == (f"policy@{step}", step)
        assert here.names() == [f"policy@{each}" for each in (step - 1, step) if each >= 0]
        freed += found.freed_bytes
        sizes.append(disk_bytes(here))
    assert freed > 0
    assert max(sizes[2:]) < 1.2 * sizes[2]
    assert not [*(here.path / "trash").iterdir()]
    assert followed.names(here.handle.objects, "policy") == ["policy@6", "policy@7"]
    assert here.verify(full=True).fine
    assert fetch(here, trainer.url, "policy").transfer is None


def test_what_the_user_saved_pulled_or_keeps_stays(
    trainer: Trainer, here: Store, tmp_path: Path
) -> None:
    here.import_(three(tmp_path)["base"], "base")
    here.delete("base")  # its files wait for a gc of the user's, with its grace
    before = {path.name for path in (here.path / "containers").rglob("*")}
    assert before
    trainer.publish(0, 1, 2, 3)
    here.pull(trainer.url, "policy@0")
    for step in (1, 2, 3):
        fetch(here, trainer.url, "policy", step)
    assert here.names() == ["policy@0", "policy@2", "policy@3"]
    here.pull(trainer.url, "policy@2")  # from now on it is the user's
    CheckpointStore(here, "policy").keep(3)
    trainer.publish(4, 5, 6)
    for step in (4, 5, 6):
        fetch(here, trainer.url, "policy", step)
    assert here.names() == [f"policy@{step}" for step in (0, 2, 3, 5, 6)]
    assert before <= {path.name for path in (here.path / "containers").rglob("*")}
    assert here.verify(full=True).fine


def test_a_step_that_another_process_loads_stays_until_it_ends(
    trainer: Trainer, here: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(tmp_path / "cache"))
    trainer.publish(0)
    program = (
        "import signal, sys; from pathlib import Path;"
        "from tensor_dedup.loader.checkpoint_io import stub_folder;"
        "stub_folder.resolve('store://policy@latest', sys.argv[1], sys.argv[2]);"
        "print('ready', flush=True); signal.pause()"
    )
    engine = subprocess.Popen(
        [sys.executable, "-c", program, str(here.path), trainer.url],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"
        for step in (1, 2, 3):
            trainer.publish(step)
            fetch(here, trainer.url, "policy")
        assert here.names() == ["policy@0", "policy@2", "policy@3"]
    finally:
        engine.kill()
        engine.communicate()
    let_go(here, "policy")
    assert here.names() == ["policy@2", "policy@3"]


def test_a_child_of_a_process_holds_nothing_for_it(trainer: Trainer, here: Store) -> None:
    trainer.publish(0)
    fetch(here, trainer.url, "policy")
    child = multiprocessing.get_context("fork").Process(target=signal.pause)
    child.start()
    try:
        for step in (1, 2):
            trainer.publish(step)
            fetch(here, trainer.url, "policy")
        assert here.names() == ["policy@1", "policy@2"]
    finally:
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()


def test_a_store_that_is_busy_is_tidied_up_after_the_next_step(
    trainer: Trainer, here: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensor_dedup.publishing.subscriber._SWEEP_WAIT_S", 0.0)
    for step in (0, 1):
        trainer.publish(step)
        fetch(here, trainer.url, "policy")
    trainer.publish(2)
    with here.handle.locked():  # as during an import
        assert fetch(here, trainer.url, "policy").freed_bytes == 0
    assert here.names() == ["policy@1", "policy@2"]
    assert followed.names(here.handle.objects, "policy") == ["policy@0", "policy@1", "policy@2"]
    trainer.publish(3)
    objects = here.handle.objects
    assert fetch(here, trainer.url, "policy").freed_bytes > 0
    assert followed.names(objects, "policy") == ["policy@2", "policy@3"]
    trainer.publish(4)
    found = fetch(here, trainer.url, "policy")
    with pulling(objects.files, objects.layout):
        assert let_go(here, "policy") == 0
    assert found.name == "policy@4"


def test_where_it_is_uncertain_what_is_in_use_nothing_is_deleted(
    trainer: Trainer, here: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here.import_(three(tmp_path)["base"], "base")
    manifest = here.manifest("base")
    assert manifest is not None
    path = here.handle.objects.layout.manifest(manifest)
    whole = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(b"something else")
    with pytest.raises(UnfitForCollectionError):
        here.gc()
    for step in (0, 1, 2):
        trainer.publish(step)
        assert fetch(here, trainer.url, "policy").freed_bytes == 0
    assert "earlier steps of 'policy' are not deleted" in caplog.text
    path.write_bytes(whole)
    assert let_go(here, "policy") > 0
    assert here.verify(full=True).fine


def test_a_pull_that_was_killed_leaves_a_note_that_is_taken_away(
    trainer: Trainer, here: Store
) -> None:
    objects = here.handle.objects
    followed.note(objects, "policy@7", "0" * 64)
    trainer.publish(0)
    fetch(here, trainer.url, "policy")
    assert followed.names(objects, "policy") == ["policy@0"]
    with CheckpointStore(here, "policy") as run:  # saved here over what was pulled
        run.save(model(0), step=0)
    let_go(here, "policy")
    assert followed.names(objects, "policy") == []
    assert here.names() == ["policy@0"]


def test_an_engine_s_configuration_says_where_steps_come_from(
    trainer: Trainer, tmp_path: Path
) -> None:
    config = TensorDedupConfig(store=str(tmp_path / "made"), remote=trainer.url)
    for step in range(4):
        trainer.publish(step)
        assert fetch_step(config, "store://policy@latest") == f"store://policy@{step}"
        end_of_letting_go()
    assert Store.open(tmp_path / "made").names() == ["policy@2", "policy@3"]
    Remote.open(trainer.url).delete("policy@3")
    assert fetch_step(config, "store://policy@latest") == "store://policy@2"


def test_an_engine_has_its_step_before_earlier_ones_are_let_go_of(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TensorDedupConfig(store=str(tmp_path / "made"), remote=trainer.url)
    go, freed, original = threading.Event(), list[int](), subscriber.let_go

    def late(store: Store, run: str) -> int:
        assert go.wait(60)
        freed.append(original(store, run))
        return freed[-1]

    trainer.publish(0, 1)
    made = open_store(tmp_path / "made")
    for step in (0, 1):
        fetch(made, trainer.url, "policy", step)
    monkeypatch.setattr(subscriber, "let_go", late)
    trainer.publish(2)
    assert fetch_step(config, "store://policy@latest") == "store://policy@2"
    assert made.names() == ["policy@0", "policy@1", "policy@2"]
    go.set()
    end_of_letting_go()
    assert made.names() == ["policy@1", "policy@2"]
    assert freed[0] > 0


def test_what_a_step_had_before_it_was_saved_anew_is_let_go_of(
    trainer: Trainer, here: Store
) -> None:
    sizes = []
    for number in range(5):
        with CheckpointStore(trainer.store, "policy") as run:
            run.save({"w": np.frombuffer(weights(number, TENSOR_BYTES), "<u2")}, step=0)
        trainer.store.push(trainer.url, "policy@0", replace=True)
        found = fetch(here, trainer.url, "policy")
        assert found.transfer is not None
        assert (found.freed_bytes > 0) == (number > 0)
        sizes.append(disk_bytes(here))
    assert max(sizes) < 1.2 * sizes[0]
    assert here.names() == followed.names(here.handle.objects, "policy") == ["policy@0"]
    assert here.verify(full=True).fine


def test_a_step_that_is_being_pulled_by_name_is_not_let_go_of(
    trainer: Trainer, here: Store
) -> None:
    trainer.publish(0, 1, 2)
    for step in (0, 1):
        fetch(here, trainer.url, "policy", step)
    objects = here.handle.objects
    at_start = list[list[str]]()

    class Listener(SilentTransfer):
        """The run is pulled by name, and its last step is on its way."""

        def start(self, total_bytes: int) -> None:
            at_start.append(followed.names(objects, "policy"))

    assert followed.names(objects, "policy") == ["policy@0", "policy@1"]
    pulled = here.pull(trainer.url, "policy", progress=Listener())
    assert at_start[0] == []
    assert pulled.names == ("policy@0", "policy@1", "policy@2")
    for step in (3, 4, 5):
        trainer.publish(step)
        fetch(here, trainer.url, "policy")
    assert here.names() == [f"policy@{step}" for step in (0, 1, 2, 4, 5)]


def test_a_step_that_became_the_user_s_a_moment_ago_is_not_let_go_of(
    trainer: Trainer, here: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(2):
        trainer.publish(step)
        fetch(here, trainer.url, "policy")
    trainer.publish(2)
    subscriber.fetch(here, trainer.url, "policy")
    original = lock_of

    def late(files: Files, path: Path) -> Handle | None:
        here.pull(trainer.url, "policy@0")
        return original(files, path)

    monkeypatch.setattr(subscriber, "lock_of", late)
    assert let_go(here, "policy") == 0
    assert here.names() == ["policy@0", "policy@1", "policy@2"]
    assert followed.names(here.handle.objects, "policy") == ["policy@1", "policy@2"]
