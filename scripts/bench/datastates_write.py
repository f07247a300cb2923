"""What a write costs: by a tensor's size beside what the disk can do, and tensor by tensor."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.checkpoint import state_dict_saver as dcp_saver

from bench.checkpoint_methods import sync
from bench.datastates_engines import Training, seconds, serialise, sync_all
from tensor_dedup import Store
from tensor_dedup.store.buffers import allocate
from tensor_dedup.store.files import Handle, RealFiles
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.capture import HostPool

OURS: Final = "ours, save, compress=None"
BUFFERED: Final = "as many threads, page cache and fsync"
DIRECT: Final = "as many threads, O_DIRECT and fsync"
SERIALISE: Final = "torch.save to nowhere"
CACHED: Final = "torch.save"
_CHUNK: Final = 8 << 20
Values = dict[str, list[float]]


def by_size(sizes: Sequence[int], folder: Path, until: float) -> dict[str, Values]:
    """Seconds until one changed tensor is durable, by its bytes and by the way; in turns.

    `torch.save` alone is there without fsync, and to nowhere, for the share of its serialising.
    """
    found = {}
    for number, size in enumerate(sizes):
        share = (until - time.monotonic()) / (len(sizes) - number)
        found[str(size)] = _of_size(size, folder / str(size), time.monotonic() + share)
        shutil.rmtree(folder / str(size))
    return found


def _of_size(size: int, folder: Path, until: float) -> Values:
    folder.mkdir(parents=True)
    tensor = torch.randn(size // 4)
    state, path = {"tensor": tensor}, folder / "file"
    source = allocate(size)
    np.copyto(np.frombuffer(source, np.uint8)[:size], tensor.numpy().view(np.uint8)[:size])
    times: Values = {}
    with closing(CheckpointStore(folder / "ours", "run", keep_last=1, compress=None)) as run:
        threads = run.store.worker_count

        def synced() -> None:
            torch.save(state, path)
            sync(path)

        def others(name: str, work: Callable[[Path], object]) -> Callable[[], object]:
            where = folder / name
            return lambda: (work(where), sync_all(where))

        ways: dict[str, Callable[[], object]] = {
            OURS: lambda: run.save(state, len(times[OURS])),
            BUFFERED: lambda: ideal(path, source, threads, direct=False),
            DIRECT: lambda: ideal(path, source, threads, direct=True),
            SERIALISE: lambda: serialise(state),
            CACHED: lambda: torch.save(state, path),
            "torch.save + fsync": synced,
            "DCP save": others("dcp", lambda at: dcp_saver.save(state, checkpoint_id=str(at))),
        }
        if find_spec("torchsnapshot"):
            library: Any = import_module("torchsnapshot")
            held = {"state": library.StateDict(tensor=tensor)}
            ways["torchsnapshot take + fsync"] = others(
                "snapshot", lambda at: library.Snapshot.take(str(at), held)
            )
        times.update((name, []) for name in ways)
        rounds = 0
        while rounds < 3 or (rounds < 12 and time.monotonic() < until):
            for name in np.random.default_rng(rounds).permutation([*ways]):
                tensor.add_(1)  # all of it changed
                times[str(name)].append(seconds(ways[str(name)]))
                path.unlink(missing_ok=True)
                sync_all(folder)  # what a way left to the kernel is not the next one's
                run.gc(0)
            rounds += 1
    return {name: each[1:] for name, each in times.items()}  # the first round is warm-up


def ideal(path: Path, source: memoryview, threads: int, *, direct: bool) -> None:
    """Write these bytes by so many threads, each a part of one new file, and fsync it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
    fd = os.open(path, flags, 0o644)
    page = os.sysconf("SC_PAGE_SIZE")
    part = -(-source.nbytes // threads // page) * page

    def write(begin: int) -> None:
        end = min(begin + part, source.nbytes)
        for at in range(begin, end, _CHUNK):
            os.pwrite(fd, source[at : min(at + _CHUNK, end)], at)

    try:
        if direct:
            os.posix_fallocate(fd, 0, source.nbytes)
        workers = [
            threading.Thread(target=write, args=(begin,)) for begin in range(0, source.nbytes, part)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass
class _Block:
    """A copy of a large tensor: where it is, and seconds since the save began."""

    address: int
    nbytes: int
    taken: float
    writes: list[tuple[float, float, int]] = field(default_factory=list)


class _Seen:
    """What a pool and a disk were asked to do, by block."""

    def __init__(self) -> None:
        self.began, self.blocks = time.perf_counter(), list[_Block]()

    def now(self) -> float:
        return time.perf_counter() - self.began


class _Pool(HostPool):
    """A pool that notes when a tensor's copy begins."""

    def __init__(self, capacity: int, seen: _Seen) -> None:
        super().__init__(capacity)
        self._seen = seen

    def take(
        self, nbytes: int, *, page_locked: bool = False, beyond: bool = False
    ) -> memoryview | None:
        taken = self._seen.now()
        block = super().take(nbytes, page_locked=page_locked, beyond=beyond)
        if block is not None:
            self._seen.blocks.append(_Block(_address(block), nbytes, taken))
        return block


class _Disk(RealFiles):
    """The disk, noting when which copy is written."""

    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self._seen = seen

    def pwrite(self, handle: Handle, data: bytes | memoryview, offset: int) -> None:
        begin = self._seen.now()
        super().pwrite(handle, data, offset)
        view, end = memoryview(data), self._seen.now()
        at = _address(view) if view.nbytes else 0
        for block in self._seen.blocks:
            if block.address <= at < block.address + block.nbytes:
                block.writes.append((begin, end, view.nbytes))


def timeline(training: Training, folder: Path) -> dict[str, Any]:
    """When five of the largest tensors of a step in the background are copied and written.

    The second of two saves, so that the pool has its blocks; seconds since `save_async` was called.
    """
    seen, state = _Seen(), training.objects
    pool = _Pool(8 << 30, seen)
    store = Store.open(folder, files=_Disk(seen))
    with closing(CheckpointStore(store, "run", compress=None, pool_bytes=pool)) as run:
        run.save_async(state, 0, lazy=True).wait()
        training.step(lambda: None)
        seen.began, seen.blocks = time.perf_counter(), []
        pending = run.save_async(state, 1, lazy=True)
        called = seen.now()
        pending.wait()
        durable = seen.now()
    least = sorted(each.nbytes for each in seen.blocks)[-5:][0]
    largest = [each for each in seen.blocks if each.nbytes >= least]  # many may be equal
    spread = [largest[at] for at in np.linspace(0, len(largest) - 1, 5).astype(int)]
    return {
        "returned": called,
        "captured": pending.times.metadata + pending.times.copy,
        "durable": durable,
        "tensors": [
            {
                "nbytes": each.nbytes,
                "copied_from": each.taken,
                "written_from": min((w[0] for w in each.writes), default=None),
                "written_to": max((w[1] for w in each.writes), default=None),
                "written_bytes": sum(w[2] for w in each.writes),
            }
            for each in spread
        ],
    }


def leisure(training: Training, folder: Path) -> dict[str, float]:
    """What a step takes on the disk after `save`, and after `close`, which encodes what is left."""
    run = CheckpointStore(folder, "run", keep_last=1)
    with closing(run):
        run.save(training.objects, 0)
        run.gc(0)
        training.step(lambda: None)
        save = seconds(lambda: run.save(training.objects, 1))
        stored = run.stats()["total_bytes"]
        close = seconds(run.close)
        left = run.stats()["total_bytes"]
    sizes = {"stored": stored, "left": left}
    return {
        "nbytes": training.nbytes,
        "save": save,
        "close": close,
        **{name: int(str(size)) / 1e6 for name, size in sizes.items()},
    }


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
