"""What fails while an engine follows a run: it stays wholly at its step, and the next one repairs.

Killed are whoever fetches, an engine, and the memory manager; a remote loses answers, or gives old
or wrong ones; a disk is full. That a trainer may be killed is tested in tests/publishing.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from models import tiny_checkpoints as checkpoints
from processes import fresh
from remote_runs import remotes
from remote_runs.remotes import Faulty, Killed, MemoryBucket
from store_runs import disk_faults
from store_runs.disk_faults import Crash, Faults, FaultyFiles
from tensor_dedup import Publisher, Store, TensorDedupError
from tensor_dedup.publishing import subscriber
from tensor_dedup.remote import Remote
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.store import LocalStore
from vllm_runs import engines, fleet, following, plain

pytestmark = pytest.mark.vllm

_RUN = "policy"
_FAULTS = (*remotes.FAULTS, *remotes.READ_FAULTS)


def publish(where: Remote | Path, root: Path, steps: int = 2) -> None:
    """Publish so many steps, each with other bits in one element of a hundred."""
    base = checkpoints.make("llama", root / "checkpoints").base
    weights = {name: each.clone() for name, each in checkpoints.tensors(base).items()}
    draw = torch.Generator().manual_seed(0)
    work = root / "work" if isinstance(where, Remote) else None
    with Publisher(where, run=_RUN, config=base, work=work) as policy:
        for step in range(steps):
            policy.publish(weights, step)
            for each in weights.values():
                few = torch.randint(each.numel(), (each.numel() // 100 + 1,), generator=draw)
                each.view(torch.int16).view(-1)[few] += 1 << 6


class Host:
    """An engine in this process at step 0, and its store, which lacks step 1."""

    def __init__(self, root: Path) -> None:
        self.folder, self._root = root / "host", root
        self.bucket = MemoryBucket()
        publish(Remote(self.bucket), root)
        subscriber.fetch(LocalStore.open(self.folder), Remote(self.bucket), _RUN, 0)
        shutil.copytree(self.folder, root / "kept")
        config = {"store": str(self.folder), "cpu_weights": "plain"}
        self.llm = plain.engine(
            f"store://{_RUN}@0", tensor_dedup=config, weight_transfer_config=following.BACKEND
        )
        self.at_0 = self.seen()
        self.update()
        self.at_1 = self.seen()
        assert self.at_0 != self.at_1

    def seen(self) -> dict[str, str]:
        """A digest of each parameter."""
        named = plain.model(self.llm).named_parameters(remove_duplicate=False)
        return {name: engines.fingerprint(each) for name, each in named}

    def reset(self) -> None:
        """The engine at step 0, and a store without step 1."""
        self.llm.update_weights({"step": 0})
        shutil.rmtree(self.folder)
        shutil.copytree(self._root / "kept", self.folder)
        assert self.seen() == self.at_0

    def update(self, bucket: Bucket | None = None, files: FaultyFiles | None = None) -> None:
        """Let the engine fetch step 1, from this bucket to this disk, and change to it."""
        remote = Remote(bucket or self.bucket)
        opened = Store.open(self.folder, files=files, worker_count=1)
        with (
            mock.patch.object(subscriber, "remote_url", return_value=remote),
            mock.patch.object(LocalStore, "open", return_value=opened),
            # There is nothing to let go of, and a thread would use the disk at any time.
            mock.patch.object(subscriber, "_let_go_later"),
        ):
            self.llm.update_weights({"step": 1})


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    made = Host(tmp_path_factory.mktemp("faults"))
    yield made
    plain.let_go(made.llm)


def _repaired(host: Host, fails: Callable[[], None]) -> bool:
    """Let an update fail, and see that the next one repairs; return whether it has failed.

    What is not told as an error must have been overcome.
    """
    host.reset()
    try:
        fails()
    except (TensorDedupError, OSError, Killed, Crash):
        failed = True
        assert host.seen() == host.at_0
        host.update()
    else:
        failed = False
    assert host.seen() == host.at_1
    return failed


def _requests(host: Host) -> list[str]:
    """The requests of a fetch that nothing befalls."""
    host.reset()
    bucket = Faulty(host.bucket)
    host.update(bucket)
    assert bucket.calls
    return bucket.calls


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("fault", _FAULTS)
def test_a_remote_that_fails_during_a_fetch(host: Host, fault: str, *, every: bool) -> None:
    calls = _requests(host)
    data = max(number for number, call in enumerate(calls) if call.startswith("get_range"))
    failed = []
    for number in range(len(calls)) if every else (0, data):
        bucket = Faulty(host.bucket, number, fault)
        failed.append(_repaired(host, lambda bucket=bucket: host.update(bucket)))  # type: ignore[misc]
        assert bucket.struck
    assert any(failed) or fault in ("twice", "stale", "truncated")


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["full", "killed"])
def test_a_disk_that_fills_and_a_fetch_that_is_killed(
    host: Host, kind: str, tmp_path: Path, *, every: bool
) -> None:
    host.reset()
    files = FaultyFiles(tmp_path)
    host.update(files=files)
    changes = disk_faults.some_changes(enumerate(files.log), 1 if every else 1000)
    assert changes
    failed = 0
    for number in sorted(changes):
        faults = Faults(full_from=number) if kind == "full" else Faults(stop_at=number)
        broken = FaultyFiles(tmp_path, faults)

        def fetch(broken: FaultyFiles = broken) -> None:
            try:
                host.update(files=broken)
            finally:
                broken.lose("nothing")  # and its locks

        failed += _repaired(host, fetch)
    assert failed


def test_a_damaged_difference_on_the_remote(host: Host) -> None:
    host.reset()
    before = dict(host.bucket.objects)
    for key, (blob, *more) in before.items():
        spoilt = bytearray(blob)
        spoilt[len(spoilt) // 2] ^= 1
        if len(blob) > 1000:
            host.bucket.objects[key] = (bytes(spoilt), *more)  # type: ignore[assignment]
    assert host.bucket.objects != before
    with pytest.raises(TensorDedupError):
        host.update()
    assert host.seen() == host.at_0
    host.bucket.objects = before
    host.update()
    assert host.seen() == host.at_1


# --- processes that are killed


async def _ends(engine: following.Engine) -> bool:
    """Does an engine whose process is gone say so?"""
    from vllm.v1.engine.exceptions import EngineDeadError

    with suppress(EngineDeadError):
        await engine.outputs()
        return False
    return True


def kill_engines_and_managers(root: str) -> dict[str, bool]:
    """What became of two engines of which one is killed, and the other loses its manager thrice."""
    folder, found = Path(root), {}
    publish(folder / "store", folder, 5)
    config: dict[str, Any] = {"store": str(folder / "store"), "cpu_weights": "plain"}
    expected = []
    for step in range(5):
        name = f"store://{_RUN}@{step}"
        llm = plain.engine(name, tensor_dedup=config)
        prompts = [[{"prompt_token_ids": list(prompt)}] for prompt in plain.PROMPTS]
        expected.append(tuple(plain.outputs(llm, prompts=each)[0] for each in prompts))
        plain.let_go(llm)
    assert len(set(expected)) == 5

    async def follow() -> None:
        async with AsyncExitStack() as stack:
            manager = fleet.manager(folder)
            running = manager.__enter__()
            config["memory_manager"] = str(running.socket)
            stays, goes = [
                await stack.enter_async_context(following.engine(f"store://{_RUN}@0", config))
                for _ in range(2)
            ]
            updating = asyncio.create_task(goes.update(1))
            await asyncio.sleep(0.05)  # it is fetched, or loaded
            os.kill(goes.pid, signal.SIGKILL)
            await asyncio.gather(updating, return_exceptions=True)
            found["one engine is gone"] = await _ends(goes)
            found["the other is where it was"] = await stays.outputs() == expected[0]
            await stays.update(1)
            found["and goes on"] = await stays.outputs() == expected[1]
            running.kill()
            await stays.update(2)
            found["without a manager"] = await stays.outputs() == expected[2]
            manager.__exit__(None, None, None)
            with fleet.manager(folder) as running:
                updating = asyncio.create_task(stays.update(3))
                await asyncio.sleep(0.05)
                running.kill()
                [failed] = await asyncio.gather(updating, return_exceptions=True)
                at = 2 if isinstance(failed, Exception) else 3
                found["without one in the middle"] = await stays.outputs() == expected[at]
            with fleet.manager(folder) as running:
                await stays.update(4)
                running.kill()
                found["without one afterwards"] = await stays.outputs() == expected[4]

    asyncio.run(follow())
    return found


def test_an_engine_or_a_manager_that_is_killed(tmp_path: Path) -> None:
    found = fresh.call_forked(kill_engines_and_managers, str(tmp_path))
    assert len(found) == 6
    assert all(found.values()), found


def kill_a_rank(root: str) -> list[bool]:
    """Of an engine of two ranks, one is killed when the other has the weights of the next step.

    Did tokens come before, is the engine gone, and did none come afterwards?
    """
    folder = Path(root)
    publish(folder / "store", folder)
    config: dict[str, Any] = {"store": str(folder / "store"), "cpu_weights": "plain"}

    async def follow() -> list[bool]:
        one = following.engine(f"store://{_RUN}@0", config, tensor_parallel_size=2)
        async with one as engine:
            await engine.llm.collective_rpc("die_in_the_change", args=(1,))
            [failed] = await asyncio.gather(engine.update(1), return_exceptions=True)
            assert isinstance(failed, BaseException)
            came = engine.came
            return [came > 0, await _ends(engine), engine.came == came]

    return asyncio.run(follow())


@pytest.mark.long
def test_a_rank_that_is_killed_in_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    assert fresh.call_forked(kill_a_rank, str(tmp_path)) == [True] * 3
