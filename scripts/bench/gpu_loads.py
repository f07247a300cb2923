"""Loads in vLLM on a GPU against plain vLLM: the first, the same model again, a known fine-tune.

Import it only after the environment is set: it loads vllm.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from bench.fine_tunes import WEIGHTS
from bench.fresh_start import forget_hints
from bench.gpu_place import Serving
from bench.loading import Load, load, load_and_drop, make_known
from bench.process_memory import read_pages, settle
from bench.results import MIB, Row, ratio_row
from bench.stats import exact, verdict
from bench.turns import in_pairs
from tensor_dedup import UnsupportedError
from tensor_dedup.loader.cuda.devices import DEVICES
from tensor_dedup.memory_manager.client.names import checkpoint_name

FIRST_MOST: Final = 1.0
MANAGED_MOST: Final = 1.2
AGAIN_MOST: Final = {14e9: 0.1, 0: 0.3}  # from so many bytes on
# `scripts/test-gpu --gather` packs vLLM without flash attention, and a load uses none.
ON_CUDA: Final[dict[str, Any]] = {
    "attention_backend": "TRITON_ATTN",
    "gpu_memory_utilization": 0.3,
}


def engine_options() -> dict[str, Any]:
    """Engine arguments that only a GPU needs."""
    return ON_CUDA if torch.cuda.is_available() else {}


def again_most(nbytes: int) -> float:
    """How long a load of a resident model may take, against plain vLLM."""
    return next(most for least, most in AGAIN_MOST.items() if nbytes >= least)


def clear() -> None:
    """Give the memory of dropped models back, so that each load makes its own."""
    settle()
    for gpu in DEVICES.opened():
        gpu.gpu.reap(wait=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def first(base: Path, nbytes: int, pairs: int, serving: Serving | None = None) -> Iterator[Row]:
    """A checkpoint never seen, its file in the page cache; with a memory manager or without."""
    config = {} if serving is None else {"memory_manager": str(serving.socket)}
    what = "first load" if serving is None else "first load, with a memory manager"

    def ours() -> Load:
        forget_hints()
        found = _load(base, dedup=True, tensor_dedup=config)
        if found.report is None or found.report.known or found.report.shared_bytes:
            raise UnsupportedError(f"{base} was known or shared something; nothing to measure")
        if serving is not None:
            serving.forget(checkpoint_name(str(base)))
        return found

    read_pages(base / WEIGHTS)
    sides = in_pairs(pairs, what, lambda: _load(base, dedup=False), ours)
    yield _weights(what, sides, FIRST_MOST if serving is None else MANAGED_MOST)
    yield ratio_row(f"{what}: as a whole", [[each.seconds for each in side] for side in sides])
    yield _counted(f"{what}: bytes read", sides[1], "bytes_read", nbytes)
    yield _counted(f"{what}: bytes hashed", sides[1], "bytes_hashed", nbytes)


def _load(path: Path, *, dedup: bool, **more: Any) -> Load:
    found = load_and_drop(path, dedup=dedup, **engine_options(), **more)
    clear()
    return found


def again(base: Path, nbytes: int, pairs: int) -> Iterator[Row]:
    """A model that is resident already."""
    make_known(base, **engine_options())
    resident, _ = load(base, dedup=True, **engine_options())
    what = "the same model again"
    read_pages(base / WEIGHTS)
    sides = in_pairs(pairs, what, *_both(base))
    yield _weights(what, sides, again_most(nbytes))
    yield ratio_row(f"{what}: as a whole", [[each.seconds for each in side] for side in sides])
    yield _counted(f"{what}: bytes read", sides[1], "bytes_read", 0)
    del resident
    clear()


def known(base: Path, tuned: Path, nbytes: int, changed: int, pairs: int) -> Iterator[Row]:
    """A known fine-tune, of which `changed` bytes are in tensors that its resident base lacks."""
    make_known(base, **engine_options())
    make_known(tuned, **engine_options())
    resident, _ = load(base, dedup=True, **engine_options())
    what = "a known fine-tune"
    read_pages(tuned / WEIGHTS)
    sides = in_pairs(pairs, what, *_both(tuned))
    yield _weights(what, sides, again_most(nbytes))
    yield ratio_row(f"{what}: as a whole", [[each.seconds for each in side] for side in sides])
    yield _counted(f"{what}: bytes read", sides[1], "bytes_read", changed)
    del resident
    clear()


def _both(path: Path) -> tuple[Callable[[], Load], Callable[[], Load]]:
    return lambda: _load(path, dedup=False), lambda: _load(path, dedup=True)


def _weights(what: str, sides: list[list[Load]], most: float) -> Row:
    return ratio_row(f"{what}: weights", [[each.weights for each in side] for side in sides], most)


def _counted(name: str, loads: list[Load], field: str, most: float) -> Row:
    """A row of bytes that are counted, of ours alone; where there are too many, it says why."""
    reports = [each.report for each in loads if each.report is not None]
    found = [float(getattr(each, field)) for each in reports]
    largest = exact([max(found)])
    said = verdict(largest, most=most)
    why = "; ".join(str(each) for each in reports[-1].known_reads) if said == "missed" else ""
    ours = f"{largest.median / MIB:.2f} MiB"
    return Row(name, "", ours, why, f"≤ {most / MIB:.2f} MiB", said, ((), found))
