"""Run both sides in processes of their own and compare what they answered and cost."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from demonstration import process
from tensor_dedup.errors import TensorDedupError

KV_CACHE_BYTES = 64 << 20
# Plain vLLM holds a model's weights packed, its embedding twice, and reads through the page cache;
# an engine has about 1 GB beside its weights.
_PLAIN_FACTOR = 1.6
_ENGINE_BYTES = 1 << 30
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}

Step = Callable[[str, str], None]


class EngineFailedError(TensorDedupError):
    """A process of the demonstration ended without a result; its last lines are in the message."""


@dataclass(frozen=True)
class Side:
    """One side of the comparison. Seconds and bytes; `together`: all models in one process."""

    loads: list[dict[str, Any]]
    answers: list[dict[str, Any]]
    before: Mapping[str, int]
    peak_rss: int
    together: bool
    report: dict[str, Any] | None

    @property
    def load_seconds(self) -> float:
        return float(sum(load["seconds"] for load in self.loads))

    @property
    def answer_seconds(self) -> float:
        return float(sum(answer["seconds"] for answer in self.answers))

    def added(self) -> list[dict[str, int]]:
        """What each load added to the memory of its process."""
        levels = [self.before, *(load["memory"] for load in self.loads)]
        if not self.together:
            return [{k: m["memory"][k] - self.before[k] for k in self.before} for m in self.loads]
        return [{k: b[k] - a[k] for k in a} for a, b in pairwise(levels)]

    def kept(self) -> list[int]:
        """What each load added to PSS beside its KV cache: weights, and what the engine needs."""
        caches = [load.get("kv_cache", 0) for load in self.loads]
        return [size["pss"] - cache for size, cache in zip(self.added(), caches, strict=True)]

    @property
    def kv_cache(self) -> int:
        """Bytes of all KV caches that were resident after loading."""
        return sum(load.get("kv_cache", 0) for load in self.loads)

    def total(self) -> dict[str, int]:
        """What a process with all models takes (estimated when they were not together)."""
        return {k: self.before[k] + sum(step[k] for step in self.added()) for k in self.before}

    def to_dict(self) -> dict[str, Any]:
        return {
            "load_seconds": self.load_seconds,
            "answer_seconds": self.answer_seconds,
            "together": self.together,
            "peak_rss": self.peak_rss,
            **self.total(),
            "models": [
                {
                    "model": load["model"],
                    "load_seconds": load["seconds"],
                    "answer_seconds": answer["seconds"],
                    **{f"added_{name}": size for name, size in added.items()},
                    "kv_cache": load.get("kv_cache", 0),
                }
                for load, answer, added in zip(self.loads, self.answers, self.added(), strict=True)
            ],
        }


def plain_fits(sizes: Sequence[int]) -> bool:
    """Whether plain vLLM can hold all these models (bytes of their weights) at one time."""
    needed = _PLAIN_FACTOR * sum(sizes) + _ENGINE_BYTES * (len(sizes) + 1)
    return needed < psutil.virtual_memory().available


def run_plain(models: Sequence[Path], log: Path, step: Step, kv: int, together: bool) -> Side:
    """Load and answer with plain vLLM; each model in a process of its own unless `together`."""
    jobs = [list(models)] if together else [[model] for model in models]
    # An empty list of plug-ins: ours must not even be asked.
    results = [_child(job, None, {"VLLM_PLUGINS": ""}, log, step, kv) for job in jobs]
    return Side(
        loads=[load for result in results for load in result["loads"]],
        answers=[answer for result in results for answer in result["answers"]],
        before=results[0]["before"],
        peak_rss=max(result["peak_rss"] for result in results),
        together=together,
        report=None,
    )


def one_process(result: Mapping[str, Any]) -> Side:
    """The side that one process was."""
    return Side(
        loads=result["loads"],
        answers=result["answers"],
        before=result["before"],
        peak_rss=result["peak_rss"],
        together=True,
        report=result["report"],
    )


def run_shared(
    models: Sequence[Path], log: Path, step: Step, kv: int, config: Mapping[str, Any]
) -> Side:
    """Load and answer with this package, all models in one process."""
    result = _child(list(models), config, {}, log, step, kv)
    return one_process(result)


def equal_tokens(plain: Side, shared: Side) -> list[bool]:
    """For each model: are all tokens of all answers the same?"""
    both = zip(plain.answers, shared.answers, strict=True)
    return [a["tokens"] == b["tokens"] for a, b in both]


def document(plain: Side, shared: Side) -> dict[str, Any]:
    """The report of our side with the verdict in each model, and what both sides cost."""
    report = shared.report or {"models": [], "registry_bytes": 0, "resident_bytes": 0}
    verdicts = equal_tokens(plain, shared)
    models = report["models"]
    if len(models) == len(verdicts):
        models = [
            {**model, "tokens_equal_plain": equal}
            for model, equal in zip(models, verdicts, strict=True)
        ]
    equal_logprobs = [
        a["logprobs"] == b["logprobs"] for a, b in zip(plain.answers, shared.answers, strict=True)
    ]
    return {
        **report,
        "models": models,
        "tokens_equal_plain": all(verdicts),
        "logprobs_equal_plain": all(equal_logprobs),
        "plain": plain.to_dict(),
        "dedup": shared.to_dict(),
    }


def _child(
    models: Sequence[Path],
    config: Mapping[str, Any] | None,
    environment: Mapping[str, str],
    log: Path,
    step: Step,
    kv: int,
) -> dict[str, Any]:
    return follow(
        "engine", models, config, {"kv_cache_bytes": kv}, {**_ENVIRONMENT, **environment}, log, step
    )


def follow(
    kind: str,
    models: Sequence[Path],
    config: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    environment: Mapping[str, str],
    log: Path,
    step: Step,
) -> dict[str, Any]:
    """Run one process (`process.Job`) and follow it event by event until its result.

    What the process says otherwise goes to `log`. Raises EngineFailedError.
    """
    reader, writer = os.pipe()
    # -P: the script's own folder must not shadow anybody's modules.
    job: process.Job = {
        "kind": kind,
        "models": [str(model) for model in models],
        "config": None if config is None else dict(config),
        "options": dict(options),
        "events": writer,
    }
    command = [sys.executable, "-P", process.__file__, json.dumps(job)]
    result = None
    with log.open("wb") as output, os.fdopen(reader) as events:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[writer],
            env={**os.environ, **environment},
        )
        os.close(writer)
        try:
            for event in _events(events):
                if event["event"] == "result":
                    result = event
                else:
                    step(event["event"], Path(event.get("model", "")).name)
            status = child.wait()
        finally:
            child.kill()
            child.wait()
    if result is None:
        raise _failed(status, log)
    return result


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        yield json.loads(line)


def _failed(status: int, log: Path) -> EngineFailedError:
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return EngineFailedError(
        f"an engine ended with status {status}: {said[-1] if said else 'it said nothing'}; "
        f"all it said is in {log}",
        status=status,
        log=str(log),
    )
