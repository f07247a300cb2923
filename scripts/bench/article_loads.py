"""Loads of article.py, each series in a fresh process: what is in memory, and what is shared."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.process_memory import pss, settle
from tensor_dedup import report, shares_memory

Named = dict[str, torch.Tensor]


@dataclass
class Loaded:
    """One model of a series. Sizes in bytes.

    `memory` is what the process, or the device, has more than before, every page touched;
    `weights` what its tensors take, by component. `same` of its `tensors` are the physical memory
    of tensors of a model before, and `same_address` of these begin at the same address.
    """

    memory: int
    tensors: int
    weights: dict[str, int]
    same: dict[str, int] = field(default_factory=dict)
    same_tensors: int = 0
    same_address: int = 0
    reported_bytes: int = 0
    reported_tensors: int = 0


def diffusion(paths: list[Path], dtypes: list[torch.dtype], *, dedup: bool) -> list[Loaded]:
    """Load pipelines, or models of Transformers, one after the other into this process."""
    for path in paths:
        _kind(path)  # what is imported is no model's
    each = zip(paths, dtypes, strict=True)
    return _series([partial(_pipeline, path, dtype, dedup) for path, dtype in each], dedup=dedup)


def engines(path: Path, *, dedup: bool) -> list[Loaded]:
    """Load one model twice through vLLM into this process."""
    from bench import loading

    loading.prepare_process(path)  # what the first engine of a process needs is no model's

    def load() -> tuple[Any, dict[str, Named]]:
        llm = loading.engine(path, dedup=dedup)
        executor: Any = llm.llm_engine.model_executor
        model = executor.driver_worker.worker.model_runner.model
        return llm, {"model": dict(model.named_parameters())}

    return _series([load, load], dedup=dedup)


def _series(loads: list[Any], *, dedup: bool) -> list[Loaded]:
    found: list[Loaded] = []
    before: list[dict[str, Named]] = []
    kept = []
    for load in loads:
        settle()
        memory = _used()
        model, parts = load()
        kept.append(model)
        for tensor in _all(parts):
            _touch(tensor)
        settle()
        one = Loaded(
            _used() - memory,
            sum(map(len, parts.values())),
            {name: sum(t.nbytes for t in part.values()) for name, part in parts.items()},
        )
        _compare(one, parts, before)
        if dedup:
            last = report().models[-1]
            one.reported_bytes, one.reported_tensors = last.shared_bytes, last.tensors_shared
        before.append(parts)
        found.append(one)
    return found


def _compare(one: Loaded, parts: dict[str, Named], before: list[dict[str, Named]]) -> None:
    for name, part in parts.items():
        for key, tensor in part.items():
            others = [other[key] for each in before for other in each.values() if key in other]
            twin = next((each for each in others if shares_memory(tensor, each)), None)
            if twin is not None:
                one.same[name] = one.same.get(name, 0) + tensor.nbytes
                one.same_tensors += 1
                one.same_address += tensor.data_ptr() == twin.data_ptr()


def _pipeline(path: Path, dtype: torch.dtype, dedup: bool) -> tuple[Any, dict[str, Named]]:
    kind = _kind(path)
    options: dict[str, Any] = {"dtype": dtype, "local_files_only": True}
    if dedup:
        options["tensor_dedup"] = True
    loaded = kind.from_pretrained(path, **options)
    if torch.cuda.is_available():
        loaded.to("cuda")
    if isinstance(loaded, nn.Module):
        return loaded, {"text_encoder": _tensors(loaded)}
    modules = {n: c for n, c in loaded.components.items() if isinstance(c, nn.Module)}
    return loaded, {name: _tensors(module) for name, module in modules.items()}


def _kind(path: Path) -> Any:
    """Import the class of a pipeline, or CLIP's text encoder."""
    import diffusers
    import transformers
    from diffusers.pipelines.deepfloyd_if import safety_checker

    # Diffusers 0.42's class lacks what Transformers 5 has every model set when it is built.
    checker: Any = safety_checker.IFSafetyChecker
    if not hasattr(checker, "all_tied_weights_keys"):
        checker.all_tied_weights_keys = {}
    index = path / "model_index.json"
    if not index.exists():
        return transformers.CLIPTextModel
    found = json.loads(index.read_text())
    for library, name in (each for each in found.values() if isinstance(each, list) and each[0]):
        getattr({"transformers": transformers}.get(library, diffusers), name, None)
    return getattr(diffusers, found["_class_name"])


def _tensors(module: nn.Module) -> Named:
    saved = module.state_dict(keep_vars=True)
    once = {id(tensor): name for name, tensor in reversed(saved.items())}
    return {name: saved[name] for name in reversed(once.values())}


def _all(parts: dict[str, Named]) -> Iterator[torch.Tensor]:
    for part in parts.values():
        yield from part.values()


def _touch(tensor: torch.Tensor) -> None:
    """Read every page: the kernel counts only those that were used."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))
    flat[:: os.sysconf("SC_PAGE_SIZE")].sum()


def _used() -> int:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free
    return pss()
