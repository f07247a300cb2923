"""What a handle keeps open between its saves, when something fails."""

import errno
from pathlib import Path

import pytest

from store_runs.stores import assert_same, handle, network, train
from tensor_dedup.store.files import Handle, RealFiles


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
