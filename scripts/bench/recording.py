"""What tracing costs a source tensor, beside vLLM's own loading code over tensors without data."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader import get_model_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from bench.fine_tunes import WEIGHTS
from bench.loading import configuration, in_pairs, make_known
from bench.results import Row
from bench.stats import Estimate, estimate, verdict
from tensor_dedup.config import TensorDedupConfig
from tensor_dedup.formats.safetensors import read_header
from tensor_dedup.loader.checkpoint_io.from_store import FromDisk
from tensor_dedup.loader.checkpoint_io.hints import HintIndex
from tensor_dedup.loader.checkpoint_io.sources import SourceFile
from tensor_dedup.loader.process_state import WITHOUT_FULL_COLLECTIONS
from tensor_dedup.loader.torch_dtypes import torch_dtype
from tensor_dedup.patches.vllm import weight_iterators
from tensor_dedup.patches.vllm.run import LoadRun

MOST_US = 50.0
Work = Callable[[LoadRun, Any, Any, Path], float]
Opened = Callable[[list[str], Callable[[str], bool]], Iterator[tuple[str, torch.Tensor]]]


def tracing(base: Path, pairs: int) -> list[Row]:
    """Microseconds a source tensor: recording alone, and all that comes before sharing.

    Processor time of this thread, which does all of it: other work on the machine matters little.
    """
    make_known(base)  # so that hints are there to look up, as they are when tracing counts most
    count = len(read_header(base / WEIGHTS).tensors)
    empty, recorded = in_pairs(
        pairs,
        "tracing",
        lambda: _microseconds(base, count, over_empty),
        lambda: _microseconds(base, count, _recorded),
    )
    whole = [_microseconds(base, count, whole) for _ in range(pairs)]
    extra = estimate([b - a for a, b in zip(empty, recorded, strict=True)])
    return [
        Row(
            f"recording, a source tensor (of {count})",
            _us(estimate(empty)),
            _us(estimate(recorded)),
            f"{_us(extra)} more",
            f"≤ {MOST_US:.0f} µs",
            verdict(extra, most=MOST_US),
        ),
        Row(
            "the same, with opening the file, hints and recipes",
            "",
            _us(estimate(whole)),
            "",
            "",
            "",
        ),
    ]


def _us(found: Estimate) -> str:
    return found.text(1) + " µs"


def _microseconds(path: Path, count: int, work: Work) -> float:
    return seconds(path, work) / count * 1e6


def seconds(path: Path, work: Work) -> float:
    """Processor time of `work` for a model without weights, whose building is not counted."""
    config = configuration(path, dedup=True)
    model_config: Any = config.model_config
    loader: Any = get_model_loader(config.load_config)
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(config))
        opening = FromDisk(HintIndex(), "blake3", trust=True)
        run = stack.enter_context(
            LoadRun(TensorDedupConfig(), model_config.dtype, opening, "bench")
        )
        stack.enter_context(set_default_torch_dtype(model_config.dtype))
        model = loader.create_model(vllm_config=config, model_config=model_config)
        load_weights = functools.partial(loader.load_weights, model, model_config)
        return work(run, model, load_weights, path)


def over_empty(run: LoadRun, model: Any, load_weights: Callable[[], None], path: Path) -> float:
    """vLLM's own code, parameters and sources without data, and nobody watching."""
    run.defer(model)
    specs = read_header(path / WEIGHTS).tensors

    def opened(paths: list[str], wanted: Callable[[str], bool]) -> Any:
        for spec in specs:
            yield spec.name, torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")

    began = time.thread_time()
    with weight_iterators.deferring(opened):
        load_weights()
    return time.thread_time() - began


def _recorded(run: LoadRun, model: Any, load_weights: Callable[[], None], path: Path) -> float:
    """The same, recorded; the file is open already."""
    run.defer(model)
    file = SourceFile(path / WEIGHTS, None, "blake3")

    def opened(paths: list[str], wanted: Callable[[str], bool]) -> Any:
        for name, source in file.tensors.items():
            yield name, run.tracer.source(source, torch_dtype(source.spec.dtype))

    began = time.thread_time()
    with WITHOUT_FULL_COLLECTIONS, weight_iterators.deferring(opened), run.tracer.recording():
        load_weights()
    taken = time.thread_time() - began
    file.close()
    return taken


def whole(run: LoadRun, model: Any, load_weights: Callable[[], None], path: Path) -> float:
    """All that a load does before it shares."""
    began = time.thread_time()
    with WITHOUT_FULL_COLLECTIONS:  # as a load is
        run.defer(model)
        with weight_iterators.deferring(run.open_files), run.tracer.recording():
            load_weights()
        run.conclude(model)
    return time.thread_time() - began
