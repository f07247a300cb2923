"""Many clients that come, build, read and are killed; at the end nothing is left but residents."""

import multiprocessing
import os
import random
import signal
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from manager_runs import managers
from tensor_dedup.digest import digest
from tensor_dedup.memory_manager.client import Client, connect
from tensor_dedup.memory_manager.errors import MemoryManagerError, RefusedError

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

LAYERS = 40
SIZES = (100, 5_000, 70_000, 1_000_000)
_FORK = multiprocessing.get_context("fork")


def weights(layer: int) -> list[bytes]:
    """The tensors of a layer: the first is everybody's, the others its own."""
    return [managers.pattern(0, SIZES[2]), managers.pattern(layer, SIZES[layer % len(SIZES)])]


def load(client: Client, layer: int) -> None:
    """As a loader does: look up, else build, else wait, else go without."""
    key = f"layer-{layer}"
    for _ in range(3):
        [found] = client.get([key], f"model-{layer % 3}")
        if found is not None:
            assert [managers.bytes_of(lease) for lease in found.leases] == weights(layer)
            return
        put = client.reserve([key], f"model-{layer % 3}").put
        if put is None:
            client.wait(key, 2.0)
            continue
        with put:
            datas = weights(layer)
            here = client.lease([digest(data) for data in datas])
            missing = [data for data, lease in zip(datas, here, strict=True) if lease is None]
            leases = []
            if missing:
                put.allocate([len(data) for data in missing], [digest(data) for data in missing])
                for index, data in enumerate(missing):
                    put.write(index, data)
                leases = put.seal()
            put.publish(key, b"record", [digest(data) for data in datas])
            del leases
        return


def live(path: Path, seed: int, deadline: float) -> None:
    """One client's life."""
    rng = random.Random(seed)
    try:
        with connect(path, name=f"soak {seed}", keep_connected=False) as client:
            while time.monotonic() < deadline:
                try:
                    load(client, rng.randrange(LAYERS))
                except RefusedError as error:
                    if error.code not in ("no_room", "stale_put", "no_memory"):
                        raise
    except MemoryManagerError:
        os._exit(3)  # the manager is gone or at fault: the test counts these
    os._exit(0)


def soak(folder: Path, clients: int, seconds: float, seed: int) -> None:
    rng = random.Random(seed)
    # Room for about a third of all layers: eviction all the time.
    with managers.running(folder, "--build-timeout", "1", "--budget", str(8 << 20)) as manager:
        idle = managers.steady(manager.descriptors), manager.threads()
        deadline = time.monotonic() + seconds
        alive: list[ForkProcess] = []
        numbers = iter(range(10**9))
        killed = 0
        while time.monotonic() < deadline:
            while len(alive) < clients:
                process = _FORK.Process(
                    target=live, args=(manager.socket, next(numbers), deadline), daemon=True
                )
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                alive.append(process)
            time.sleep(rng.uniform(0.01, 0.1))
            victim = alive.pop(rng.randrange(len(alive)))
            assert victim.pid is not None
            with suppress(ProcessLookupError):  # its time was up, and starting others has reaped it
                os.kill(victim.pid, rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
            victim.join(managers.PATIENCE_S)
            assert victim.exitcode in (-signal.SIGKILL, -signal.SIGTERM, 0), victim.exitcode
            killed += 1
        for process in alive:
            process.join(managers.PATIENCE_S)
            assert process.exitcode == 0
        check_what_is_left(manager, idle)
        assert killed > 0


def check_what_is_left(manager: managers.Manager, idle: tuple[int, int]) -> None:
    def settled() -> bool:
        totals = manager.overview().totals
        return (totals.leases, totals.builds, totals.lingering_bytes, totals.clients) == (
            0,
            0,
            0,
            1,
        )

    managers.until(settled)
    totals = manager.overview().totals
    assert 0 < totals.charged <= totals.budget
    assert totals.published > 0
    managers.until(lambda: manager.descriptors() == idle[0] + totals.slabs)
    assert manager.threads() <= 1 + 4 + len(os.sched_getaffinity(0))
    assert psutil.Process(manager.pid).memory_info().rss < 200 << 20
    with manager.client() as client:  # every resident verifies
        names = [row.digest for row in manager.overview().residents]
        for name, lease in zip(names, client.lease(names), strict=True):
            assert lease is not None
            assert digest(managers.bytes_of(lease)) == name


def test_a_short_soak(folder: Path) -> None:
    soak(folder, clients=12, seconds=3, seed=1)


@pytest.mark.long
def test_a_long_soak(folder: Path) -> None:
    soak(folder, clients=200, seconds=600, seed=2)
