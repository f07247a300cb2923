"""What a handle keeps open between its saves, when something fails."""

import errno
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from store_runs.stores import assert_same, handle, network, train
from tensor_dedup.errors import StoreError
from tensor_dedup.store.files import Handle, RealFiles
from tensor_dedup.store.writing.deltas import LeafSharing
from tensor_dedup.training.encoding.in_save import CodecEncoding


class Failing(RealFiles):
    """A disk on which, once it is armed, a sync is interrupted and closing a lock fails."""

    armed = False

    def fsync(self, handle: Handle) -> None:
        if self.armed:
            raise KeyboardInterrupt
        super().fsync(handle)

    def close(self, handle: Handle) -> None:
        super().close(handle)
        if self.armed and "index" in handle.path.name:
            self.failed = True
            raise OSError(errno.EIO, "the disk is broken", str(handle.path))


def test_an_interrupt_is_raised_as_what_it_is_and_the_next_save_works(tmp_path: Path) -> None:
    handle(tmp_path).close()
    files, model = Failing(), network(1)
    run = handle(tmp_path, files=files)
    run.save(model, 0)
    train(model, 1, "layer1.weight")
    files.armed = True
    with pytest.raises(KeyboardInterrupt):
        run.save(model, 1)
    assert files.failed
    files.armed = False
    run.save(model, 1)
    assert run.steps() == [0, 1]
    assert_same(run.load(1), model)
    assert run.store.verify(full=True).faults == []


def open_in(folder: Path) -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of this listing
            if (target := link.readlink()).is_relative_to(folder):
                found.append(target.name)
    return found


def test_a_save_closes_what_it_was_encoded_against_if_something_else_cannot_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = handle(tmp_path, compress="always")
    dice = np.random.default_rng(0)
    model = {"a": dice.standard_normal(3 << 19, dtype=np.float32)}
    run.save(model, 0)
    close = CodecEncoding.close

    def fail(_: LeafSharing) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    def close_partly(encoding: CodecEncoding) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(LeafSharing, "close", fail)
            close(encoding)

    monkeypatch.setattr(CodecEncoding, "close", close_partly)
    model["a"] *= np.float32(1.00001)
    with pytest.raises(StoreError, match="the disk is broken"):
        run.save(model, 1)
    assert open_in(tmp_path / "containers") == []
