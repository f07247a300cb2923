"""One process that loads several checkpoints and answers with each: plain vLLM, or ours.

Run as a script with one argument, a job in JSON; what happens goes to the descriptor it names, one
JSON object a line. It imports this package only where sharing is asked for, so plain is plain.
"""

import contextlib
import ctypes
import gc
import json
import mmap
import os
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from vllm import LLM

NEW_TOKENS = 32
_LOGPROBS = 3


class Job(TypedDict):
    """What one process does. `config` None: plain vLLM; else the tensor_dedup argument."""

    models: list[str]
    config: dict[str, Any] | None
    kv_cache_bytes: int
    events: int


def main() -> None:
    """Load all, then answer with each; the last line said is the result."""
    job: Job = json.loads(sys.argv[1])
    with os.fdopen(job["events"], "w", buffering=1) as events:

        def say(**event: Any) -> None:
            events.write(json.dumps(event) + "\n")

        run(job, say)


def run(job: Job, say: Any) -> None:
    """Do the job, telling `say` each step."""
    say(event="starting")
    import vllm  # noqa: F401 (its cost is not the first model's)

    before = memory()
    loads, engines = [], []
    for path in job["models"]:
        say(event="loading", model=path)
        began = time.perf_counter()
        engines.append(_engine(path, job))
        seconds = time.perf_counter() - began
        cache = kv_cache(engines[-1])
        loads.append({"model": path, "seconds": seconds, "memory": memory(), "kv_cache": cache})
        say(event="loaded", model=path)
    answers = []
    for path, engine in zip(job["models"], engines, strict=True):
        say(event="answering", model=path)
        answers.append(_answer(engine, prompts(Path(path))))
        say(event="answered", model=path)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {"before": before, "loads": loads, "answers": answers, "peak_rss": peak}
    say(event="result", **result, report=_report(job))


def prompts(path: Path) -> list[list[int]]:
    """Two prompts of token numbers that every vocabulary has."""
    config = json.loads((path / "config.json").read_text())
    inner = config.get("text_config") or config
    limit = min(int(inner.get("vocab_size") or 512), 1000) - 10
    return [[5 + 37 * i % limit for i in range(length)] for length in (7, 65)]


def memory() -> dict[str, int]:
    """Bytes this process has resident; PSS counts a page mapped twice once. Zeros off Linux."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what the allocator keeps is not the model's
    sizes = dict.fromkeys(("rss", "pss", "anonymous"), 0)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
            name, value = line.split()[:2]
            if name.rstrip(":").lower() in sizes:
                sizes[name.rstrip(":").lower()] = int(value) * 1024
    return sizes


def kv_cache(engine: "LLM") -> int:
    """Bytes of an engine's KV cache that are resident: part of what its load has added."""
    storages: dict[int, int] = {}

    def look(model: Any) -> None:
        for module in model.modules():
            held = getattr(module, "kv_cache", None)
            for tensor in held if isinstance(held, list | tuple) else [held]:
                if tensor is not None and tensor.device.type == "cpu":
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()

    engine.apply_model(look)
    return sum(_resident(address, nbytes) for address, nbytes in storages.items() if nbytes)


def _resident(address: int, nbytes: int) -> int:
    """Bytes of the pages of this range that are in memory."""
    page = mmap.PAGESIZE
    start = address // page * page
    pages = -(-(address + nbytes - start) // page)
    flags = ctypes.create_string_buffer(pages)
    libc = ctypes.CDLL("libc.so.6", use_errno=True)
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * page), flags):
        return 0
    return page * sum(byte & 1 for byte in flags.raw[:pages])


def _engine(path: str, job: Job) -> "LLM":
    from vllm import LLM

    options: dict[str, Any] = {
        "model": path,
        "skip_tokenizer_init": True,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "enforce_eager": True,
        "disable_log_stats": True,
        "kv_cache_memory_bytes": job["kv_cache_bytes"],
        "seed": 0,
    }
    if job["config"] is not None:
        from tensor_dedup import TensorDedupConfig

        options["tensor_dedup"] = TensorDedupConfig(**job["config"])
    return LLM(**options)


def _answer(engine: "LLM", tokens: list[list[int]]) -> dict[str, Any]:
    from vllm import SamplingParams

    inputs: Any = [{"prompt_token_ids": prompt} for prompt in tokens]
    greedy: dict[str, Any] = {"temperature": 0, "detokenize": False, "ignore_eos": True}
    engine.generate(inputs, SamplingParams(max_tokens=1, **greedy), use_tqdm=False)
    began = time.perf_counter()
    sampling = SamplingParams(max_tokens=NEW_TOKENS, logprobs=_LOGPROBS, **greedy)
    done = engine.generate(inputs, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    first = [request.outputs[0] for request in done]
    return {
        "seconds": seconds,
        "tokens": [list(completion.token_ids) for completion in first],
        "logprobs": [
            [sorted((token, entry.logprob) for token, entry in step.items()) for step in steps]
            for completion in first
            if (steps := completion.logprobs) is not None
        ],
    }


def _report(job: Job) -> dict[str, Any] | None:
    if job["config"] is None:
        return None
    from tensor_dedup import report

    return report().to_dict()


if __name__ == "__main__":
    main()
