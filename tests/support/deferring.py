"""The same loading code run twice: on real tensors, which is the oracle, and deferred.

def load(model, weights): model.weight.data.copy_(weights["w"])
with deferring.deferred(model(), path, load) as run:
    assert run.bytes("weight") == deferring.real(model(), path, load)["weight"]
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from tensor_dedup.loader.checkpoint_io.hints import HintIndex
from tensor_dedup.loader.checkpoint_io.sources import SourceFile, SourceReader
from tensor_dedup.loader.deferred.evaluate import Evaluator, Scratch
from tensor_dedup.loader.deferred.parameters import DeferredParameter, conclude, defer
from tensor_dedup.loader.deferred.recipe import RecipeBook, reason_to_keep_private
from tensor_dedup.loader.deferred.storage import View, as_view
from tensor_dedup.loader.deferred.trace import Tracer
from tensor_dedup.loader.torch_dtypes import torch_dtype
from tensor_dedup.types import TensorSpec

Weights = Mapping[str, torch.Tensor]
Load = Callable[[Any, Weights], object]


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    safetensors.torch.save_file(dict(tensors), path)
    return path


def module(**parameters: torch.Tensor) -> nn.Module:
    """A module with these parameters."""
    made = nn.Module()
    for name, tensor in parameters.items():
        made.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return made


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of the elements, row by row."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def real(model: nn.Module, path: Path, load: Load) -> dict[str, bytes]:
    """Load for real; the bytes of every parameter and buffer."""
    load(model, {k: v.clone() for k, v in safetensors.torch.load_file(path).items()})
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: raw(tensor) for name, tensor in named.items()}


class CountedFile(SourceFile):
    """Counts how often each tensor is read."""

    def __init__(self, path: Path, hints: HintIndex | None = None) -> None:
        self.reads: Counter[str] = Counter()
        super().__init__(path, hints, "blake3")

    def read_into(self, spec: TensorSpec, piece: memoryview, offset: int = 0) -> None:
        self.reads[spec.name] += offset == 0
        super().read_into(spec, piece, offset)


@dataclass
class Deferred:
    """A model loaded over deferred tensors, whose parameters have no memory yet."""

    model: nn.Module
    file: CountedFile
    reader: SourceReader = field(default_factory=lambda: SourceReader("blake3"))
    book: RecipeBook = field(default_factory=RecipeBook)
    parameters: dict[str, DeferredParameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.evaluator = Evaluator(self.reader, Scratch())
        self.tracer = Tracer(self.evaluator.value, torch.device("cpu"))

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            name: self.tracer.source(source, torch_dtype(source.spec.dtype))
            for name, source in self.file.tensors.items()
        }

    def trace(self, load: Load) -> None:
        deferred = defer(self.model, self.tracer)
        with self.tracer.recording():
            load(self.model, self.weights())
        conclude(self.model, deferred, self.tracer)
        self.parameters = {each.name: each for each in deferred.values()}
        for each in deferred.values():
            if each.view is not None:
                self.evaluator.expect(each.view)

    def view(self, name: str) -> View:
        view = self.parameters[name].view
        assert view is not None
        return view

    def make(self, name: str) -> torch.Tensor:
        """The final tensor, computed; what only it needed is let go."""
        each = self.parameters[name]
        if each.view is None:
            return each.parameter
        flat = torch.empty(each.view.storage.nbytes, dtype=torch.uint8)
        self.evaluator.fill(each.view, flat)
        self.evaluator.release(each.view)
        return as_view(flat, each.view)

    def bytes(self, name: str) -> bytes:
        return raw(self.make(name))

    def recipe(self, name: str) -> str:
        """The recipe's digest, once the sources it needs were read."""
        self.evaluator.digest_sources(self.view(name))
        return self.book.digest(self.view(name))

    def reason(self, name: str) -> str | None:
        return reason_to_keep_private(self.view(name))


@contextmanager
def deferred(model: nn.Module, path: Path, load: Load) -> Iterator[Deferred]:
    """Load deferred; nothing is read but what the loading code asked for."""
    file = CountedFile(path)
    try:
        run = Deferred(model, file)
        run.trace(load)
        yield run
        run.reader.abandon()
    finally:
        file.close()
