"""Engines that share, and which of their bytes they really share.

A test about sharing asks here first: it would prove nothing where nothing is shared.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tensor_dedup import shares_memory
from vllm_runs import plain

if TYPE_CHECKING:
    from vllm import LLM

Linear = Callable[..., torch.Tensor]
# What a hint demands between the last change of a file and the beginning of its hashing.
_QUIET_SECONDS = 2.0


def engine(path: str | Path, *, pooling: bool = False, **config: Any) -> "LLM":
    """`plain.engine` with `tensor_dedup=config`."""
    return plain.engine(path, pooling=pooling, tensor_dedup=config)


def handlers(llm: "LLM") -> dict[str, Linear]:
    """The packed functions of every layer that has one.

    Where vLLM packs nothing, which depends on the CPU, it gives a layer `F.linear`, or a function
    that calls it: such a function holds nothing.
    """
    found: dict[str, Linear] = {}
    for name, module in plain.model(llm).named_modules():
        linear = getattr(module, "cpu_linear", None)
        if linear is not None and getattr(linear, "__closure__", None):
            found[name] = linear
    return found


def parameters(llm: "LLM") -> dict[str, nn.Parameter]:
    """Every parameter that has bytes, by name."""
    return {n: p for n, p in plain.model(llm).named_parameters() if p.numel()}


def shared_handlers(a: "LLM", b: "LLM") -> set[str]:
    """Layers whose packed weight is one object in both."""
    theirs = handlers(b)
    return {name for name, linear in handlers(a).items() if theirs.get(name) is linear}


def shared_parameters(a: "LLM", b: "LLM") -> set[str]:
    """Parameters that are the same physical memory in both."""
    theirs = parameters(b)
    return {n for n, p in parameters(a).items() if n in theirs and shares_memory(p, theirs[n])}


def nothing(a: "LLM", b: "LLM") -> bool:
    """Do they share nothing at all?"""
    return not shared_handlers(a, b) and not shared_parameters(a, b)


def everything(a: "LLM", b: "LLM") -> bool:
    """Do they share every parameter with bytes and every packed weight?"""
    every = parameters(a).keys() | handlers(a).keys()
    return bool(every) and shared_parameters(a, b) | shared_handlers(a, b) == every


def contents(llm: "LLM") -> dict[str, bytes]:
    """The bytes of every parameter, copied."""
    return {name: raw(parameter) for name, parameter in parameters(llm).items()}


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements, row by row, copied."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def reload(llm: "LLM", path: str | Path) -> None:
    """`reload_weights` in place, from another checkpoint."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})


def quiet(*folders: Path) -> None:
    """Wait until every file is old enough for a hint to be kept of it."""
    stats = [file.stat() for folder in folders for file in folder.iterdir()]
    newest = max(max(s.st_mtime, s.st_ctime) for s in stats)
    time.sleep(max(0.0, newest + _QUIET_SECONDS + 0.1 - time.time()))
