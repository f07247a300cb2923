"""Several engines in one process: quickly, and compared tensor by tensor.

The environment that `plain` asks for applies.
"""

import gc
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn

import tensor_dedup
from processes import process_state
from tensor_dedup.loader.checkpoint_io.hints import QUIET_NS
from tensor_dedup.loader.report import ModelReport
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.residents.resident import shares_memory, tensor_bytes
from vllm_runs import plain

if TYPE_CHECKING:
    from vllm import LLM

# How a parameter's packed form is called beside the parameter itself.
PACKED = " (packed)"


def warm_up(first: Path, *, pooling: bool = False) -> None:
    """Make one engine, so that the next ones take a fraction of a second."""
    llm = plain.engine(first, pooling=pooling)
    plain.outputs(llm, pooling=pooling)
    plain.let_go(llm)
    del llm
    gc.collect()
    # What is set aside is never freed. Engines import modules, each kind of model some of its own.
    if not registry.residents():
        process_state.set_aside()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with so many threads while active."""
    before = torch.get_num_threads()
    torch._C.set_num_threads(count)  # vLLM replaces the public name by a function that refuses
    try:
        yield
    finally:
        torch._C.set_num_threads(before)


def sharing(path: str | Path, *, pooling: bool = False, **config: Any) -> "LLM":
    """An engine with `tensor_dedup=config`, as a user makes it."""
    return plain.engine(path, pooling=pooling, tensor_dedup=config)


def last_report() -> ModelReport:
    """The report of the latest load."""
    return tensor_dedup.report().models[-1]


def drop(*llms: "LLM") -> None:
    """End these engines; the caller must have no other reference, or gives it up next."""
    for llm in llms:
        plain.let_go(llm)


def leave_alone(*files: Path) -> None:
    """Wait until hints of these files may be kept: they must not have changed for a while."""
    states = [file.stat() for file in files]
    newest = max(max(state.st_mtime_ns, state.st_ctime_ns) for state in states)
    time.sleep(max(0, newest + QUIET_NS - time.time_ns()) / 1e9 + 0.01)


@contextmanager
def assembled() -> Iterator[dict[str, str]]:
    """What plain vLLM's loading code puts together: a digest of each parameter of the models that
    are loaded plainly in the block, before any is packed. By name, every name of a tied one."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    found: dict[str, str] = {}
    original = DefaultModelLoader.load_weights

    def load_weights(self: Any, model: nn.Module, model_config: Any) -> None:
        original(self, model, model_config)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            found[name] = fingerprint(parameter)

    with mock.patch.object(DefaultModelLoader, "load_weights", load_weights):
        yield found


def fingerprint(tensor: torch.Tensor) -> str:
    """Type, geometry and bytes of a tensor, in short."""
    shape = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} "
    return hashlib.sha256(shape.encode() + tensor_bytes(tensor.detach().contiguous())).hexdigest()


def equal(one: dict[str, str], other: dict[str, str]) -> set[str]:
    """The names under which both hold the same."""
    return {name for name in one.keys() & other.keys() if one[name] == other[name]}


def forms(one: nn.Module, other: nn.Module) -> dict[str, bool]:
    """For each parameter of `one`, by name: does `other` use the same memory for it?

    A packed form is an entry of its own, under the name and PACKED: is it the same object? What is
    nothing but packed has no entry for the plain form, which is then empty.
    """
    theirs = dict(other.named_parameters(remove_duplicate=False))
    shared = {
        name: name in theirs and shares_memory(parameter, theirs[name])
        for name, parameter in one.named_parameters(remove_duplicate=False)
        if parameter.numel()
    }
    packed = dict(_packed(other))
    for name, linear in _packed(one):
        shared[name + PACKED] = packed.get(name) is linear
    return shared


def _packed(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Every packed weight's function, by the name of the weight."""
    for name, module in model.named_modules(remove_duplicate=False):
        linear = getattr(module, "cpu_linear", None)
        # A weight that is not packed has torch's own function there, which everybody has.
        if isinstance(linear, FunctionType) and linear.__closure__:
            yield f"{name}.weight", linear
        kernel = getattr(getattr(module, "scheme", None), "kernel", None)
        if (handler := getattr(kernel, "dnnl_handler", None)) is not None:  # of an int8 weight
            yield f"{name}.weight", handler
