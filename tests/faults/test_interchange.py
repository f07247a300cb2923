"""A save that dies anywhere leaves all of a folder, or nothing of it that anybody would read."""

import errno
from pathlib import Path

import pytest
import torch

from store_runs.disk_faults import CHANGES, WRITES, Crash, Faults, FaultyFiles, Loss
from tensor_dedup.errors import StoreError
from tensor_dedup.store.errors import NoSpaceError
from tensor_dedup.store.files import RealFiles
from tensor_dedup.store.interchange import load_dict, save_dict

CONFIG = {"enable_async_write": False, "buffer_size_mb": 1}
LARGE = {"a": torch.arange((5 << 20) // 4 + 1, dtype=torch.int32), "b": torch.ones(7)}
TENSORS = {"a": torch.arange(1500.0), "b": torch.ones(7, dtype=torch.bfloat16)}
LOSSES: list[Loss] = ["everything", "bytes", "nothing"]


def save(folder: Path, faults: Faults) -> FaultyFiles:
    files = FaultyFiles(folder / "limbo", faults)
    run(folder, files)
    return files


def run(folder: Path, files: FaultyFiles) -> None:
    save_dict(TENSORS, folder / "root" / "saved", CONFIG, max_file_bytes=4096, files=files)


def fresh(tmp_path: Path, name: str) -> Path:
    for part in ("limbo", "root"):
        (tmp_path / name / part).mkdir(parents=True)
    return tmp_path / name


def assert_all_or_nothing(root: Path) -> bool:
    """Whether the folder is there. If so it is whole; nothing else is to be seen."""
    visible = [path.name for path in root.iterdir() if not path.name.startswith(".")]
    if not visible:
        return False
    assert visible == ["saved"]
    found = load_dict(root / "saved")
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    return True


def test_a_save_that_dies_anywhere(tmp_path: Path) -> None:
    log = save(fresh(tmp_path, "whole"), Faults()).log
    points, outcomes = 0, set()
    for number, operation in enumerate(log):
        for loss in LOSSES if operation in CHANGES else LOSSES[-1:]:
            for torn in {False, operation in WRITES}:
                folder = fresh(tmp_path, f"{number}-{loss}-{torn}")
                files = FaultyFiles(folder / "limbo", Faults(stop_at=number, torn=torn))
                with pytest.raises(Crash):
                    run(folder, files)
                files.lose(loss)
                outcomes.add(assert_all_or_nothing(folder / "root"))
                points += 1
    assert outcomes == {True, False}
    assert points >= 80


def test_a_save_past_the_page_cache_that_dies_anywhere(tmp_path: Path) -> None:
    def saved(folder: Path, files: FaultyFiles) -> None:
        config = {**CONFIG, "buffer_size_mb": 2}
        save_dict(LARGE, folder / "root" / "saved", config, max_file_bytes=3 << 20, files=files)

    whole = fresh(tmp_path, "whole")
    files = FaultyFiles(whole / "limbo")
    saved(whole, files)
    assert files.log.count("open") >= 2  # each data file once more, for direct writes
    files.lose("everything")
    found = load_dict(whole / "root" / "saved")
    assert all(torch.equal(found[name], tensor) for name, tensor in LARGE.items())
    for number, operation in enumerate(files.log):
        folder = fresh(tmp_path, str(number))
        dying = FaultyFiles(folder / "limbo", Faults(stop_at=number, torn=operation in WRITES))
        with pytest.raises(Crash):
            saved(folder, dying)
        dying.lose("everything" if number % 2 else "nothing")
        if (folder / "root" / "saved").exists():
            found = load_dict(folder / "root" / "saved")
            assert all(torch.equal(found[name], tensor) for name, tensor in LARGE.items())


def test_what_was_reported_survives_everything(tmp_path: Path) -> None:
    folder = fresh(tmp_path, "whole")
    save(folder, Faults()).lose("everything")
    assert assert_all_or_nothing(folder / "root")


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_leaves_nothing(tmp_path: Path, asynchronous: bool) -> None:
    log = save(fresh(tmp_path, "whole"), Faults()).log
    for number in range(0, len(log), 5):
        folder = fresh(tmp_path, str(number))
        files = FaultyFiles(folder / "limbo", Faults(full_from=number))
        config = {**CONFIG, "enable_async_write": asynchronous}
        try:
            save_dict(TENSORS, folder / "root" / "saved", config, max_file_bytes=4096, files=files)
        except NoSpaceError:
            # What was written is gone, hidden folders too.
            assert list((folder / "root").iterdir()) == []
        else:
            assert assert_all_or_nothing(folder / "root")


def test_an_error_at_any_operation_is_reported_and_leaves_all_or_nothing(tmp_path: Path) -> None:
    log = save(fresh(tmp_path, "whole"), Faults()).log
    for number in range(len(log)):
        folder = fresh(tmp_path, str(number))
        files = FaultyFiles(folder / "limbo", Faults(fail={number: errno.EIO}))
        with pytest.raises(StoreError):
            run(folder, files)
        assert_all_or_nothing(folder / "root")
        # The next attempt finds nothing in its way, unless only the last sync had failed.
        if not (folder / "root" / "saved").exists():
            run(folder, FaultyFiles(folder / "limbo"))
            assert assert_all_or_nothing(folder / "root")


def test_a_dead_writer_thread_ends_the_save(tmp_path: Path) -> None:
    class Broken(RealFiles):
        def pwrite(self, handle: object, data: object, offset: int) -> None:
            raise OSError(errno.EIO, "broken")

    tensors = {str(n): torch.zeros(1 << 20, dtype=torch.uint8) for n in range(8)}
    with pytest.raises(StoreError, match="broken"):
        save_dict(tensors, tmp_path / "a", {"buffer_size_mb": 1, "num_buffers": 2}, files=Broken())
    assert list(tmp_path.iterdir()) == []
