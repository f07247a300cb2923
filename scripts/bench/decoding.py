"""Tokens a second of a model that shares its weights, against the same model loaded plainly."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from loading import engine, in_pairs, let_go, make_known, require_nothing_resident
from memory import settle
from results import Row
from stats import estimate, verdict
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.report import report

NEW_TOKENS = 64
BATCHES = (1, 4)
WITHIN = 0.02
_PROMPT_TOKENS = 8


def decode(base: Path, fine_tuned: Path, pairs: int) -> list[Row]:
    """Three engines are alive: the base, the fine-tune sharing with it, the fine-tune plainly."""
    require_nothing_resident()
    make_known(fine_tuned)
    engines = [engine(base, dedup=True), engine(fine_tuned, dedup=True)]
    mine = report().models[-1]
    if not mine.shared_bytes:
        raise UnsupportedError(f"{fine_tuned} shares nothing with {base}; nothing to measure")
    engines.append(engine(fine_tuned, dedup=False))
    _, sharing, plain = engines
    share = mine.shared_bytes / mine.total_bytes
    rows = [_batch(size, share, plain, sharing, pairs) for size in BATCHES]
    for llm in engines:
        let_go(llm)
    del sharing, plain, llm
    engines.clear()
    settle()
    return rows


def _batch(size: int, share: float, plain: LLM, sharing: LLM, pairs: int) -> Row:
    sides = [_rate(llm, size) for llm in (plain, sharing)]
    for run in sides:
        run()  # what a first call builds is not the weights'
    a, b = in_pairs(pairs, f"decode, batch {size}", *sides)
    ratio = estimate([ours / theirs for theirs, ours in zip(a, b, strict=True)])
    return Row(
        f"decode, batch {size}, {share:.0%} of the weights shared",
        f"{estimate(a).text(1)} tokens/s",
        f"{estimate(b).text(1)} tokens/s",
        f"{ratio.text()} x",
        f"1.00 ± {WITHIN}",
        verdict(ratio, least=1 - WITHIN, most=1 + WITHIN),
    )


def _rate(llm: LLM, size: int) -> Callable[[], float]:
    """New tokens a second of one call with `size` prompts."""
    prompts: Any = [
        {"prompt_token_ids": [5 + 37 * i + j for i in range(_PROMPT_TOKENS)]} for j in range(size)
    ]
    sampling = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0, detokenize=False, ignore_eos=True
    )

    def run() -> float:
        began = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return size * NEW_TOKENS / (time.perf_counter() - began)

    return run
