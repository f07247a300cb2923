"""Loads through vLLM's own model loaders, timed alike for both sides, without an engine for each.

Import it only after the environment is set: it loads vllm.
"""

import functools
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from vllm import LLM
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import base_loader, get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model

from bench.process_memory import settle, trim
from tensor_dedup import UnsupportedError, report
from tensor_dedup.loader.report import ModelReport
from tensor_dedup.patches.vllm import versions

KV_CACHE_BYTES = 64 << 20
_ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "enforce_eager": True,
    "use_tqdm_on_load": False,
    "kv_cache_memory_bytes": KV_CACHE_BYTES,
    "seed": 0,
}


@dataclass(frozen=True)
class Load:
    """One load, in seconds: all of it; without collecting; from the built module tree to the end.

    Plain vLLM calls gc.collect twice in each load, we do not; a call takes as long as the process
    has objects, whatever is loaded. The last two leave such calls out, for both sides.
    """

    seconds: float
    net: float
    weights: float
    report: ModelReport | None


def engine(path: Path, *, dedup: bool | dict[str, Any], **more: Any) -> LLM:
    """A whole engine in this process; `dedup` may be a configuration, `more` engine arguments."""
    options = dict(_ENGINE, model=str(path), disable_log_stats=True, **more)
    if dedup is not False:
        options["tensor_dedup"] = dedup
    return LLM(**options)


def let_go(llm: LLM) -> None:
    """End one engine of several, without its finalizer, which ends what all of them use."""
    client: Any = llm.llm_engine.engine_core
    if hasattr(client, "_finalizer"):  # vLLM 0.26 and 0.28 have none
        client._finalizer.detach()
    client.engine_core.model_executor.shutdown()
    gc.unfreeze()  # an engine freezes all objects there are, its own model among them


def prepare_process(path: Path, **more: Any) -> None:
    """Make what a loader needs around it (process groups, threads): an engine does, then goes."""
    llm = engine(path, dedup=False, **more)
    let_go(llm)
    del llm
    settle()


def configuration(path: Path, *, dedup: bool, **more: Any) -> VllmConfig:
    """A new configuration, as a model's layers enter themselves in it."""
    options = dict(_ENGINE, model=str(path), **more)
    if dedup:
        options.setdefault("tensor_dedup", {})
    return EngineArgs(**options).create_engine_config()


def load(path: Path, *, dedup: bool, **more: Any) -> tuple[nn.Module, Load]:
    """Load one model, alone of what is timed; `more` are engine arguments."""
    config = configuration(path, dedup=dedup, **more)
    trim()
    loader = get_model_loader(config.load_config)
    with set_current_vllm_config(config), _clocked() as clock:
        began = time.perf_counter()
        model = loader.load_model(vllm_config=config, model_config=config.model_config)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a copy that was only begun is no load
        ended = time.perf_counter()
    mine = report().models[-1] if dedup else None
    if mine is not None and any(name == "<model>" for name, _ in mine.skipped):
        raise UnsupportedError(f"{path} was loaded plainly, nothing to measure: {mine.skipped}")
    seconds, weights = ended - began, ended - clock.created
    return model, Load(seconds, seconds - clock.collecting, weights - clock.collecting, mine)


def load_and_drop(path: Path, *, dedup: bool, **more: Any) -> Load:
    """Load one model and let go of it."""
    model, found = load(path, dedup=dedup, **more)
    del model
    settle()
    return found


def make_known(path: Path, **more: Any) -> None:
    """Load a checkpoint until its digests are remembered. UnsupportedError if they never are."""
    # A file is remembered only when it was not written in the two seconds before.
    for _ in range(3):
        load_and_drop(path, dedup=True, **more)
        found = load_and_drop(path, dedup=True, **more)
        if found.report is not None and found.report.known:
            return
        time.sleep(2)
    raise UnsupportedError(f"{path}: no hints are kept for its file system; name another --work")


@dataclass
class _Clock:
    created: float = 0.0
    collecting: float = 0.0


@contextmanager
def _clocked() -> Iterator[_Clock]:
    """Note when the module tree was built, and the time explicit collections took since."""
    clock = _Clock()
    build, collect = initialize_model, gc.collect

    @functools.wraps(build)
    def built(*args: Any, **kwargs: Any) -> nn.Module:
        model: nn.Module = build(*args, **kwargs)
        clock.created, clock.collecting = time.perf_counter(), 0.0
        return model

    def collected(*args: int) -> int:
        began = time.perf_counter()
        try:
            return collect(*args)
        finally:
            clock.collecting += time.perf_counter() - began

    with (
        patch.object(base_loader, "initialize_model", built),
        patch.object(versions, "initialize_model", built),  # ours, with vLLM 0.26
        patch.object(gc, "collect", collected),
    ):
        yield clock
