"""Engines in processes of their own follow a published run while they answer.

The oracle is an engine that has loaded the step: plain vLLM with an export of it, or, of several
ranks, one of the same kind that follows nothing.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from manager_runs import managers
from models import tiny_checkpoints as checkpoints
from processes import fresh
from processes.levels import Level, family, growth, levels
from tensor_dedup import Publisher, Store
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.publishing import subscriber
from vllm_runs import engines, fleet, following, plain

pytestmark = pytest.mark.vllm

_RUN = "policy"
_LONG = (pytest.mark.long, pytest.mark.timeout(2000))
_SETTLES_S = 0.2  # what goes on after an update has ended then
_WARM = 10  # steps, after which nothing grows
_VARIES = 24 << 20  # bytes, less than a step has times the steps after that
Seen = tuple[tuple[plain.Answer, ...], list[dict[str, str]]]


def publish(root: Path, steps: int) -> str:
    """The URL of a remote with so many steps of a training, in bf16 with AdamW."""
    base = checkpoints.make("llama", root / "checkpoints").base
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    url = f"file://{root}/remote"
    with Publisher(url, run=_RUN, config=base, work=root / "work", keep_last=None) as policy:
        for step in range(steps):
            policy.publish(model, step)
            tokens = torch.randint(model.config.vocab_size, (2, 16))
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
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


def _grown(seen: list[dict[int, Level]]) -> tuple[int, ...]:
    """What a process holds more after the last step than after the first ones, at most."""
    return tuple(growth(seen[min(_WARM, len(seen) // 2)], seen[-1]))


def _is_level(grown: tuple[int, ...]) -> bool:
    """Does nothing grow with the steps?"""
    files, threads, anonymous, shared = grown
    return files <= 2 and threads <= 2 and anonymous <= _VARIES and shared <= 2


def follow_in_one_process(root: str, steps: int) -> tuple[list[bool], tuple[int, ...]]:
    """An engine in this process follows a run; is it as the oracle, and what does it hold more?

    In the end, one begins at the last step but some, with a store of its own.
    """
    folder = Path(root)
    url = publish(folder, steps)
    expected = [*plainly(folder, url, iter(range(steps)))]
    assert len({repr(each) for each in expected}) == steps
    config: dict[str, Any] = {"remote": url, "cpu_weights": "plain"}

    def engine(step: int, store: str) -> Any:
        return plain.engine(
            f"store://{_RUN}@{step}",
            tensor_dedup={**config, "store": str(folder / store)},
            weight_transfer_config=following.BACKEND,
        )

    def seen(llm: Any) -> Seen:
        llm.llm_engine.reset_prefix_cache()
        prompts = [[{"prompt_token_ids": list(prompt)}] for prompt in plain.PROMPTS]
        named = plain.model(llm).named_parameters(remove_duplicate=False)
        digests = {name: engines.fingerprint(each) for name, each in named}
        return tuple(plain.outputs(llm, prompts=each)[0] for each in prompts), [digests]

    llm, found, held = engine(0, "host"), list[bool](), list[dict[int, Level]]()
    for step in range(1, steps):
        llm.update_weights({"step": step})
        found.append(seen(llm) == expected[step])
        time.sleep(_SETTLES_S)
        held.append(levels([os.getpid()]))
    plain.let_go(llm)
    joins = min(40, steps - 2)
    late = subscriber.fetch(Store.open(folder / "late"), url, _RUN, joins)
    assert late.transfer is not None
    pieces = late.transfer
    # Each tensor that has changed is one anchor and one delta; the header of the file is beside.
    found.append(0 < pieces.anchor_pieces <= len(expected[0][1][0]) + 1)
    found.append(pieces.moved_pieces == pieces.pieces)
    llm = engine(joins, "late")
    found.append(seen(llm) == expected[joins])
    llm.update_weights({"step": joins + 1})
    found.append(seen(llm) == expected[joins + 1])
    plain.let_go(llm)
    return found, _grown(held)


@pytest.mark.parametrize("steps", [5, pytest.param(50, marks=_LONG)])
def test_an_engine_in_one_process_follows(steps: int, tmp_path: Path) -> None:
    found, grown = fresh.call_patiently(follow_in_one_process, str(tmp_path), steps)
    assert found == [True] * (steps - 1 + 4)
    assert _is_level(grown), grown


async def _seen(engine: following.Engine) -> Seen:
    return await engine.outputs(), await engine.digests()


def follow_together(root: str, steps: int) -> tuple[list[list[bool]], tuple[int, ...]]:
    """Two engines follow a run; did tokens come, are both as the oracle, and what is held more?

    The manager has one step after each.
    """
    folder = Path(root)
    url = publish(folder, steps)
    expected = [*plainly(folder, url, iter(range(steps)))]
    assert len({repr(each) for each in expected}) == steps
    found, held = [], list[dict[int, Level]]()

    async def follow(socket: Path) -> None:
        config = {"store": str(folder / "host"), "remote": url, "cpu_weights": "plain"}
        config["memory_manager"] = str(socket)
        async with AsyncExitStack() as stack:
            both = [
                await stack.enter_async_context(following.engine(f"store://{_RUN}@0", config))
                for _ in range(2)
            ]
            for each in both:
                # Or a collection now and then lets everybody wait.
                assert min(await each.llm.collective_rpc("frozen")) > 100_000
            once = _resident(socket)
            for step in range(1, steps):
                came = await asyncio.gather(*(each.update(step) for each in both))
                seen = [await _seen(each) for each in both]
                managers.until(lambda: _resident(socket) == once)
                found.append([all(came), seen == [expected[step]] * 2])
                held.append(levels(family(os.getpid())))

    with fleet.manager(folder) as manager:
        asyncio.run(follow(manager.socket))
    return found, _grown(held)


def _resident(socket: Path) -> tuple[int, int]:
    """How many residents there are, and their bytes."""
    with Admin(socket) as admin:
        totals = admin.totals()
        return totals.residents, totals.resident_bytes


@pytest.mark.parametrize("steps", [4, pytest.param(50, marks=_LONG)])
def test_two_engines_and_a_manager_follow(steps: int, tmp_path: Path) -> None:
    found, grown = fresh.call_patiently(follow_together, str(tmp_path), steps)
    assert found == [[True] * 2] * (steps - 1)
    assert _is_level(grown), grown


def follow_in_ranks(root: str, steps: int) -> tuple[list[list[bool]], tuple[int, ...]]:
    """An engine of two ranks follows a run; did tokens come, is it as the oracle, and so on?

    The oracle is another one, whose weights vLLM loads in place from an export of each step. The
    last item is whether that is what one has that has loaded the last step.
    """
    folder = Path(root)
    url = publish(folder, steps)
    config = {"store": str(folder / "host"), "remote": url, "cpu_weights": "plain"}
    ranks: dict[str, Any] = {"tensor_parallel_size": 2}
    alone: dict[str, Any] = {**ranks, "weight_transfer_config": None}
    found, expected, held = [], list[Seen](), list[dict[int, Level]]()

    async def foresee() -> None:
        store = Store.open(folder / "oracle")
        async with following.engine(f"store://{_RUN}@0", config, **alone) as engine:
            for step in range(steps):
                store.pull(url, f"{_RUN}@{step}")
                store.export(f"{_RUN}@{step}", folder / f"export-{step}")
                path = {"weights_path": str(folder / f"export-{step}")}
                await engine.llm.collective_rpc("reload_weights", kwargs=path)
                expected.append(await _seen(engine))

    async def follow() -> None:
        async with following.engine(f"store://{_RUN}@0", config, **ranks) as engine:
            for step in range(1, steps):
                came = await engine.update(step)
                seen = await _seen(engine)
                assert len(seen[1]) == 2
                found.append([came > 0, seen == expected[step]])
                held.append(levels(family(os.getpid())))

    async def load() -> None:
        last = f"store://{_RUN}@{steps - 1}"
        async with following.engine(last, config, **alone) as engine:
            found.append([await _seen(engine) == expected[-1]])

    for each in (foresee, follow, load):
        asyncio.run(each())
    assert len({repr(each) for each in expected}) == steps
    return found, _grown(held)


@pytest.mark.long
@pytest.mark.timeout(2000)
def test_an_engine_of_two_ranks_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    found, grown = fresh.call_patiently(follow_in_ranks, str(tmp_path), 50)
    assert found == [*[[True] * 2] * 49, [True]]
    assert _is_level(grown), grown


async def _looks_of_replicas(engine: following.Engine) -> list[list[dict[str, str]]]:
    looks = await engine.llm.engine_core.call_utility_all_async(
        "collective_rpc", "look", None, (), None
    )
    return [[each["digests"] for each in workers] for workers in looks]


def follow_in_replicas(root: str, steps: int) -> list[list[bool]]:
    """Two replicas of one engine follow a run; did tokens come, and are both as the oracle?"""
    folder = Path(root)
    url = publish(folder, steps)
    expected = [*plainly(folder, url, iter(range(steps)))]
    config = {"store": str(folder / "host"), "remote": url, "cpu_weights": "plain"}
    found = []

    async def follow() -> None:
        replicas: dict[str, Any] = {"data_parallel_size": 2}
        async with following.engine(f"store://{_RUN}@0", config, **replicas) as engine:
            for step in range(1, steps):
                came = await engine.update(step)
                looks = await _looks_of_replicas(engine)
                found.append([came > 0, looks == [expected[step][1]] * 2])

    asyncio.run(follow())
    return found


@pytest.mark.long
@pytest.mark.timeout(2000)
def test_two_replicas_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    found = fresh.call_patiently(follow_in_replicas, str(tmp_path), 4)
    assert found == [[True] * 2] * 3
