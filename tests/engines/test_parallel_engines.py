"""Engines of several processes each, for real: what their ranks load, hold and answer.

Every engine here is two workers below one process: half a minute of work on an idle machine. What
each rank loads is in test_parallel too, quickly and in one process.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from models import tiny_checkpoints as checkpoints
from processes import fresh
from tensor_dedup.loader.report import REPORT_DIR_VARIABLE, report
from tensor_dedup.memory_manager.client.admin import Admin
from vllm_runs import fleet, shared

pytestmark = [pytest.mark.vllm, pytest.mark.long]

# A core for each of two ranks.
ENVIRON = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
LOOKING = {"worker_extension_cls": fleet.LOOKING}
# Not a pipeline, nor experts in parallel: plain vLLM 0.32 fails there, see docs/compatibility.md.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("llama", {"tensor_parallel_size": 2}),
    "experts": ("mixtral", {"tensor_parallel_size": 2}),
}


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[fleet.Fleet]:
    with fleet.fleet(tmp_path) as found:
        yield found


@dataclass
class Mode:
    """A pair of checkpoints, the arguments of an engine of two ranks, and plain vLLM's answers."""

    pair: checkpoints.Pair
    options: dict[str, Any]
    plain: dict[Path, dict[str, Any]]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, tmp_path: Path, engines: fleet.Fleet) -> Mode:
    arch, options = MODES[request.param]
    found = Mode(checkpoints.make(arch, tmp_path), {**options, **LOOKING}, {})
    for path in (found.pair.base, found.pair.fine_tune):
        engine = engines.start(path, None, ENVIRON, **found.options)
        found.plain[path] = engine.loaded
        engine.end()
    return found


def digests(loaded: dict[str, Any]) -> list[dict[str, str]]:
    """By rank; a parameter that nobody could look at fails here."""
    looks = sorted(loaded["looks"], key=lambda look: look["rank"])
    assert [look["rank"] for look in looks] == [0, 1]
    assert all(all(look["digests"].values()) for look in looks)
    return [look["digests"] for look in looks]


def made(loaded: dict[str, Any]) -> int:
    """Bytes that the ranks of an engine made, and did not find."""
    return sum(report["private_bytes"] for report in loaded["reports"])


def test_ranks_hold_what_plain_ranks_hold_once(
    mode: Mode, tmp_path: Path, engines: fleet.Fleet
) -> None:
    base, fine_tune = mode.pair.base, mode.pair.fine_tune
    with fleet.manager(tmp_path) as manager:
        config = {"memory_manager": str(manager.socket)}
        first, tuned = (
            engines.start(path, config, ENVIRON, **mode.options) for path in (base, fine_tune)
        )
        for engine, path in ((first, base), (tuned, fine_tune)):
            assert digests(engine.loaded) == digests(mode.plain[path])
            assert engine.loaded["outputs"] == mode.plain[path]["outputs"]
        assert first.loaded["outputs"] != tuned.loaded["outputs"]
        with Admin(manager.socket) as admin:
            assert sum(bool(row.leases) for row in admin.overview().clients) == 4
        # Whichever came first: of every content one was made, by one rank of one engine.
        assert len(manager.built()) == len(set(manager.built())) > 0
        total = sum(report["total_bytes"] for report in first.loaded["reports"])
        changed = [
            {n for n, digest in mine.items() if digest != theirs[n]}
            for mine, theirs in zip(digests(first.loaded), digests(tuned.loaded), strict=True)
        ]
        assert any(changed)
        assert all("layers.2." in name for names in changed for name in names)
        # The one matrix that is changed, and what vLLM stacks with it.
        assert made(first.loaded) + made(tuned.loaded) < 1.4 * total
        again = [first.outputs(), tuned.outputs()]
        assert again == [mode.plain[path]["outputs"] for path in (base, fine_tune)]


def versions(base: str, other: str) -> dict[str, Any]:
    """In a process of its own: what an engine of two ranks says of its weights, over a reload."""
    from vllm import LLM, SamplingParams

    llm: Any = LLM(
        base,
        skip_tokenizer_init=True,
        max_model_len=256,
        enforce_eager=True,
        kv_cache_memory_bytes=16 << 20,
        tensor_parallel_size=2,
        enable_prefix_caching=True,
        block_size=32,
        tensor_dedup={"cpu_weights": "plain"},
    )

    def cached() -> int:
        greedy = SamplingParams(max_tokens=2, temperature=0, detokenize=False)
        prompt = {"prompt_token_ids": list(range(3, 99))}
        (found,) = llm.generate(prompt, greedy, use_tqdm=False)
        return int(found.num_cached_tokens)

    hits = [cached(), cached()]
    said = [llm.get_weight_version()]
    hits.append(cached())
    llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
    hits += [cached(), cached()]
    said.append(llm.get_weight_version())
    known = [each.known_checkpoint_digest for each in report().models]
    return {"hits": hits, "said": said, "known": known}


def test_ranks_agree_on_the_version_of_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = checkpoints.make("llama", tmp_path).base
    other = checkpoints.same_header(base, tmp_path / "other")
    shared.quiet(base, other)
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    found = fresh.call(versions, str(base), str(other))
    assert found["known"] == [None, None], "a rank knows the whole checkpoint, so nothing is asked"
    assert found["hits"] == [0, 64, 64, 0, 64]
    first, second = found["said"]
    assert len(first) == 16
    assert second.startswith("weights:")


# --- replicas


async def _answers(engine: Any) -> list[list[int]]:
    """What the replicas answer to several requests at once: each has some of them."""
    from vllm import SamplingParams

    greedy = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, detokenize=False)

    async def ask(number: int) -> list[int]:
        tokens: list[int] = []
        prompt = {"prompt_token_ids": list(range(5 + number, 60 + number, 3))}
        async for output in engine.generate(prompt, greedy, request_id=str(number)):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    return list(await asyncio.gather(*(ask(number) for number in range(8))))


def replicas(path: str, size: int, socket: str | None) -> dict[str, Any]:
    """In a process of its own: so many replicas of a model; `socket` None is plain vLLM."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    settings: dict[str, Any] = {
        "model": path,
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "enforce_eager": True,
        "disable_log_stats": True,
        "kv_cache_memory_bytes": 16 << 20,
        "data_parallel_size": size,
        "tensor_dedup": {"memory_manager": socket} if socket else False,
    }

    async def run() -> dict[str, Any]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
        try:
            found: dict[str, Any] = {"answers": await _answers(engine)}
            if socket:
                found["reports"] = [model.to_dict() for model in report().models]
                with Admin(socket) as admin:
                    overview = admin.overview()
                found["charged"] = overview.totals.charged
                found["holders"] = {row.pid for row in overview.clients if row.leases}
            return found
        finally:
            engine.shutdown()

    return asyncio.run(run())


def test_replicas_of_a_model_hold_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model without experts: those of a mixture plain vLLM 0.32 cannot run on the CPU."""
    base = str(checkpoints.make("llama", tmp_path).base)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", ENVIRON["VLLM_CPU_OMP_THREADS_BIND"])
    monkeypatch.delenv(REPORT_DIR_VARIABLE, raising=False)
    with fleet.manager(tmp_path) as manager:
        found = fresh.call_forked(replicas, base, 2, str(manager.socket))
        built = manager.built()
    first, second = sorted(found["reports"], key=lambda each: -int(each["private_bytes"]))
    assert {first["pid"], second["pid"]} == found["holders"]
    total = first["total_bytes"]
    assert first["private_bytes"] + second["private_bytes"] == total == second["total_bytes"]
    assert first["shared_bytes"] + second["shared_bytes"] == total
    assert found["charged"] <= 1.2 * total  # with what the manager remembers of each tensor
    assert len(built) == len(set(built)) > 0
    assert found["answers"] == fresh.call_forked(replicas, base, 2, None)["answers"]
