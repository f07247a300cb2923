"""Tokens a second of a model that shares its weights, against the same model loaded plainly."""

import statistics
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from bench.fresh_start import require_nothing_resident
from bench.loading import engine, let_go, make_known
from bench.process_memory import settle
from bench.results import Row
from bench.stats import estimate, verdict
from bench.turns import say
from tensor_dedup import UnsupportedError, report

NEW_TOKENS = 32
BATCHES = (1, 4)
WITHIN = 0.02
_PROMPT_TOKENS = 8
_CALLS = "ABBA"  # of the two engines: a drift in one direction meets both

Rates = dict[int, list[list[float]]]  # by batch: plain, sharing; tokens a second


def decode(base: Path, fine_tuned: Path, pairs: int) -> list[Row]:
    """Per pair three new engines: the base, the fine-tune sharing with it, the fine-tune plainly.

    New ones, because engines loaded the same way differ by where in memory they come to lie.
    """
    require_nothing_resident()
    make_known(base)
    make_known(fine_tuned)
    rates: Rates = {size: [[], []] for size in BATCHES}
    share = 0.0
    for number in range(pairs):
        share = _pair(base, fine_tuned, rates, plain_first=number % 2 == 1)
        say(f"decode: {number + 1} of {pairs}")
    more = f", {share:.0%} of the weights shared"
    return [_row(f"decode, batch {size}", rates[size], more) for size in BATCHES]


def _pair(base: Path, fine_tuned: Path, rates: Rates, *, plain_first: bool) -> float:
    """Enter the rates of one pair; returns how much of the sharing engine's weights is shared."""
    require_nothing_resident()
    engines: list[LLM] = []
    if plain_first:
        engines.append(engine(fine_tuned, dedup=False))
    engines += [engine(base, dedup=True), engine(fine_tuned, dedup=True)]
    mine = report().models[-1]
    if not mine.shared_bytes:
        raise UnsupportedError(f"{fine_tuned} shares nothing with {base}; nothing to measure")
    if not plain_first:
        engines.append(engine(fine_tuned, dedup=False))
    _compare(engines[0 if plain_first else 2], engines[2 if plain_first else 1], rates)
    _end(engines)
    return mine.shared_bytes / mine.total_bytes


def _compare(plain: LLM, ours: LLM, rates: Rates) -> None:
    """Enter the rates of these two, for each batch."""
    sides = {"A": plain, "B": ours}
    for size in BATCHES:
        for llm in sides.values():
            _rate(llm, size)  # what a first call builds is not the weights'
        seen: dict[str, list[float]] = {"A": [], "B": []}
        for side in _CALLS:
            seen[side].append(_rate(sides[side], size))
        for values, side in zip(rates[size], "AB", strict=True):
            values.append(statistics.mean(seen[side]))


def _end(engines: list[LLM]) -> None:
    while engines:
        let_go(engines.pop())
    settle()


def plain_weights(path: Path, pairs: int) -> list[Row]:
    """What `cpu_weights="plain"` costs: per pair two new engines, with it and without us.

    Nothing is shared in it: it is the form that processes can share, in one process.
    """
    require_nothing_resident()
    make_known(path)
    rates: Rates = {size: [[], []] for size in BATCHES}
    for number in range(pairs):
        order = (False, {"cpu_weights": "plain"})
        engines = [engine(path, dedup=each) for each in (order if number % 2 else order[::-1])]
        mine = report().models[-1]
        if any(name == "<model>" for name, _ in mine.skipped):
            raise UnsupportedError(f"{path} was loaded by vLLM alone: {mine.skipped}")
        plain, ours = engines if number % 2 else engines[::-1]
        _compare(plain, ours, rates)
        del plain, ours
        _end(engines)
        say(f"plain weights: {number + 1} of {pairs}")
    return [_row(f"decode, batch {size}, all weights plain", rates[size]) for size in BATCHES]


def _row(name: str, rates: list[list[float]], more: str = "") -> Row:
    plain, ours = rates
    ratio = estimate([b / a for a, b in zip(plain, ours, strict=True)])
    return Row(
        name,
        f"{estimate(plain).text(1)} tokens/s",
        f"{estimate(ours).text(1)} tokens/s",
        f"{ratio.text()} x{more}",
        f"1.00 ± {WITHIN}" if more else "",
        verdict(ratio, least=1 - WITHIN, most=1 + WITHIN) if more else "",
        rates,
    )


def _rate(llm: LLM, size: int) -> float:
    """New tokens a second of one call with `size` prompts."""
    prompts: Any = [
        {"prompt_token_ids": [5 + 37 * i + j for i in range(_PROMPT_TOKENS)]} for j in range(size)
    ]
    sampling = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0, detokenize=False, ignore_eos=True
    )
    began = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return size * NEW_TOKENS / (time.perf_counter() - began)
