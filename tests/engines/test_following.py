"""Engines in processes of their own follow a published run while they answer.

The oracle is an engine that has loaded the step: plain vLLM with an export of it, or, of several
ranks, one of the same kind that follows nothing.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch

from manager_runs import managers
from models import tiny_checkpoints as checkpoints
from processes import fresh
from tensor_dedup import Publisher, Store
from tensor_dedup.memory_manager.client.admin import Admin
from vllm_runs import engines, fleet, following, plain

pytestmark = pytest.mark.vllm

_RUN = "policy"
Seen = tuple[tuple[plain.Answer, ...], list[dict[str, str]]]


def publish(root: Path, steps: int) -> str:
    """The URL of a remote with so many steps, each with other bits in one element of a hundred."""
    base = checkpoints.make("llama", root / "checkpoints").base
    weights = {name: each.clone() for name, each in checkpoints.tensors(base).items()}
    draw = torch.Generator().manual_seed(0)
    url = f"file://{root}/remote"
    with Publisher(url, run=_RUN, config=base, work=root / "work", keep_last=None) as policy:
        for step in range(steps):
            policy.publish(weights, step)
            for each in weights.values():
                few = torch.randint(each.numel(), (each.numel() // 100 + 1,), generator=draw)
                each.view(torch.int16).view(-1)[few] += 1 << 6
    return url


def plainly(root: Path, url: str, steps: Iterator[int]) -> Iterator[Seen]:
    """What plain vLLM answers at each of the steps, and the digests of its parameters."""
    store = Store.open(root / "oracle")
    with plain.kept_as("plain"):
        for step in steps:
            store.pull(url, f"{_RUN}@{step}")
            store.export(f"{_RUN}@{step}", root / f"export-{step}")
            llm = plain.engine(root / f"export-{step}")
            prompts = [[{"prompt_token_ids": list(prompt)}] for prompt in plain.PROMPTS]
            outputs = tuple(plain.outputs(llm, prompts=each)[0] for each in prompts)
            named = plain.model(llm).named_parameters(remove_duplicate=False)
            yield outputs, [{name: engines.fingerprint(each) for name, each in named}]
            plain.let_go(llm)


async def _seen(engine: following.Engine) -> Seen:
    return await engine.outputs(), await engine.digests()


def follow_together(root: str, steps: int) -> list[list[bool]]:
    """Two engines follow a run; did tokens come, and are both as the oracle?

    The manager has one step after each.
    """
    folder = Path(root)
    url = publish(folder, steps)
    expected = [*plainly(folder, url, iter(range(steps)))]
    assert len({repr(each) for each in expected}) == steps
    found = []

    async def follow(socket: Path) -> None:
        config = {"store": str(folder / "host"), "remote": url, "cpu_weights": "plain"}
        config["memory_manager"] = str(socket)
        async with AsyncExitStack() as stack:
            both = [
                await stack.enter_async_context(following.engine(f"store://{_RUN}@0", config))
                for _ in range(2)
            ]
            once = _resident(socket)
            for step in range(1, steps):
                came = await asyncio.gather(*(each.update(step) for each in both))
                seen = [await _seen(each) for each in both]
                managers.until(lambda: _resident(socket) == once)
                found.append([all(came), seen == [expected[step]] * 2])

    with fleet.manager(folder) as manager:
        asyncio.run(follow(manager.socket))
    return found


def _resident(socket: Path) -> tuple[int, int]:
    """How many residents there are, and their bytes."""
    with Admin(socket) as admin:
        totals = admin.totals()
        return totals.residents, totals.resident_bytes


@pytest.mark.parametrize("steps", [4, pytest.param(50, marks=pytest.mark.long)])
def test_two_engines_and_a_manager_follow(steps: int, tmp_path: Path) -> None:
    found = fresh.call_forked(follow_together, str(tmp_path), steps)
    assert found == [[True] * 2] * (steps - 1)


def follow_in_ranks(root: str, steps: int) -> list[list[bool]]:
    """An engine of two ranks follows a run; did tokens come, and is it as the oracle?"""
    folder = Path(root)
    url = publish(folder, steps)
    config = {"store": str(folder / "host"), "remote": url, "cpu_weights": "plain"}
    found = []

    async def oracle(step: int) -> Seen:
        name, options = f"store://{_RUN}@{step}", {"tensor_parallel_size": 2}
        once = following.engine(name, config, weight_transfer_config=None, **options)
        async with once as engine:
            return await _seen(engine)

    async def follow() -> None:
        one = following.engine(f"store://{_RUN}@0", config, tensor_parallel_size=2)
        async with one as engine:
            for step in range(1, steps):
                came = await engine.update(step)
                seen = await _seen(engine)
                assert len(seen[1]) == 2
                if step in (1, steps - 1):  # each costs the start of an engine
                    found.append([came > 0, seen == await oracle(step)])

    asyncio.run(follow())
    return found


@pytest.mark.long
def test_an_engine_of_two_ranks_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    found = fresh.call_forked(follow_in_ranks, str(tmp_path), 50)
    assert found == [[True] * 2] * 2
