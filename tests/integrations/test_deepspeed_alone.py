"""The pointer files of DeepSpeed's checkpoints, also where DeepSpeed is not installed."""

import json
from pathlib import Path

import pytest

from store_runs.disk_faults import Crash, Faults, FaultyFiles, Loss
from tensor_dedup.integrations.deepspeed import TITLE, Pointer, publish


def pointer_to(name: str) -> str:
    return json.dumps([TITLE, name, f"manifest of {name}"])


def crashed(
    folder: Path, loss: Loss, stop_at: int | None, *, torn: bool, saved_before: bool
) -> str | None:
    """What a pointer names after a crash in place of an operation, or after all of them."""
    (folder / "limbo").mkdir(parents=True)
    (folder / "files").mkdir()
    target = folder / "files" / "mp_rank_00_model_states.pt"
    if saved_before:
        target.write_text(pointer_to("run@0"))
    files = FaultyFiles(folder / "limbo", Faults(stop_at=stop_at, torn=torn))
    try:
        publish(files, pointer_to("run@1"), target)
    except Crash:
        assert stop_at is not None
    else:
        assert stop_at is None or stop_at >= len(files.log)
    files.lose(loss)
    pointer = Pointer.read(target)
    assert target.exists() is (pointer is not None)  # it is no file that DeepSpeed would load
    return None if pointer is None else pointer.name


@pytest.mark.parametrize("saved_before", [True, False])
@pytest.mark.parametrize("loss", ["nothing", "bytes", "everything"])
def test_a_crash_leaves_a_pointer_that_names_a_step(
    tmp_path: Path, loss: Loss, saved_before: bool
) -> None:
    before = "run@0" if saved_before else None
    found = set()
    for number in range(8):
        for torn in (False, True):
            folder = tmp_path / f"{number} {torn}"
            found.add(crashed(folder, loss, number, torn=torn, saved_before=saved_before))
    assert found == {before, "run@1"}
    done = crashed(tmp_path / "whole", loss, None, torn=False, saved_before=saved_before)
    assert done == "run@1"


def test_what_a_kill_left_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "latest.pt"
    (tmp_path / ".latest.pt.part").write_text("a longer text than the pointer" * 10)
    publish(FaultyFiles(tmp_path), pointer_to("run@1"), target)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".pt"] == ["latest.pt"]
    assert target.read_text() == pointer_to("run@1")
    assert not (tmp_path / ".latest.pt.part").exists()
