"""A pull writes tensors while it reads on: nothing refers to what is not on the disk whole."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from remote_runs.remotes import MemoryBucket
from store_runs.stores import KIB, content, noise, open_store, safetensors, stored, u8, write
from tensor_dedup import Store
from tensor_dedup.errors import StoreError
from tensor_dedup.remote import Remote, layout
from tensor_dedup.remote.catalog import catalog_of, read_table
from tensor_dedup.remote.errors import CorruptRemoteTensorError
from tensor_dedup.store.errors import NoSpaceError, StoreIOError
from tensor_dedup.store.files import Handle, RealFiles


class SlowFiles(RealFiles):
    """A disk that takes its time for what another thread than the pull's writes.

    The write of that number fails with `code`. `stray` has files that were closed by then.
    """

    def __init__(self, fails: int | None = None, code: int = 0) -> None:
        self.late, self.stray = 0, list[Path]()
        self._closed = set[Handle]()
        self._fails, self._code = fails, code
        self._main, self._lock = threading.current_thread(), threading.Lock()

    def pwrite(self, handle: Handle, data: bytes | memoryview, offset: int) -> None:
        if threading.current_thread() is not self._main:
            with self._lock:
                number, self.late = self.late, self.late + 1
            time.sleep(0.1)
            if handle in self._closed:
                self.stray.append(handle.path)
            if number == self._fails:
                raise OSError(self._code, os.strerror(self._code), str(handle.path))
        super().pwrite(handle, data, offset)

    def close(self, handle: Handle) -> None:
        self._closed.add(handle)
        super().close(handle)


def pushed(tmp_path: Path, count: int) -> MemoryBucket:
    """A remote with a checkpoint of so many tensors in one container."""
    bucket, here = MemoryBucket(), open_store(tmp_path / "here")
    tensors = {f"w{n}": noise(n, 100 * KIB) for n in range(count)}
    here.import_(write(tmp_path / "w", {"m.safetensors": safetensors(u8(**tensors))}), "w")
    here.push(Remote(bucket), "w")
    return bucket


def opened(path: Path, files: SlowFiles) -> Store:
    """A store whose pulls write on threads."""
    return Store.open(path, files=files, worker_count=2)


def left(store: Store) -> list[Path]:
    """The files of containers, and those that were begun."""
    found = [*store.path.glob("containers/*/*"), *store.path.glob("tmp/*")]
    return [path for path in found if path.is_file() and path.suffix != ".pack"]


# With three it is told when the container ends, with nine before the next tensor is written.
@pytest.mark.parametrize("count", [3, 9])
@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize(
    ("code", "error"), [(errno.ENOSPC, NoSpaceError), (errno.EIO, StoreIOError)]
)
def test_a_write_that_fails_late_ends_the_pull_and_leaves_no_container(
    tmp_path: Path, count: int, number: int, code: int, error: type[StoreError]
) -> None:
    bucket, files = pushed(tmp_path, count), SlowFiles(number, code)
    there = opened(tmp_path / "there", files)
    with pytest.raises(error):
        there.pull(Remote(bucket), "w")
    assert files.late > number, "nothing was written late"
    assert files.stray == []
    assert there.names() == []
    assert left(there) == []
    again = opened(there.path, SlowFiles())
    again.pull(Remote(bucket), "w")
    assert again.verify(full=True).fine
    assert stored(again, "w") == content(tmp_path / "w")


def spoil(bucket: MemoryBucket) -> None:
    """Damage the last tensor of the one container of tensors."""
    slabs = [c for c in catalog_of(bucket).containers if c.kind == "slab"]
    (container,) = slabs or catalog_of(bucket).containers
    key, records = layout.container_key(container), read_table(bucket, container.name).records
    last = max(records, key=lambda record: record.offset)
    blob, tag, when = bucket.objects[key]
    at = last.offset + last.stored - 1
    bucket.objects[key] = (blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :], tag, when)


def test_what_is_kept_of_a_checkpoint_that_has_lost_a_tensor_waits_for_late_writes(
    tmp_path: Path,
) -> None:
    bucket, files = pushed(tmp_path, 4), SlowFiles()
    spoil(bucket)
    there = opened(tmp_path / "there", files)
    with pytest.raises(CorruptRemoteTensorError):
        there.pull(Remote(bucket), "w")
    assert files.late >= 3, "nothing was written late"
    assert len(left(there)) == 1
    assert there.verify(full=True).fine


def test_nothing_is_kept_of_it_where_a_late_write_fails(tmp_path: Path) -> None:
    bucket, files = pushed(tmp_path, 4), SlowFiles(1, errno.EIO)
    spoil(bucket)
    there = opened(tmp_path / "there", files)
    with pytest.raises(StoreIOError):
        there.pull(Remote(bucket), "w")
    assert files.late >= 3, "nothing was written late"
    assert left(there) == []
