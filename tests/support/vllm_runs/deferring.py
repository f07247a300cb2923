"""The same loading code run twice: on real tensors, which is the oracle, and deferred.

    def load(model, weights): model.weight.data.copy_(weights["w"])
    with deferring.deferred(model(), path, load) as run:
        assert run.bytes("weight") == deferring.real(model(), path, load)["weight"]

A random program is what a model's `load_weights` might do, as data: a sequence of steps. A step
names an operation and numbers that choose its operands from a pool of tensors (sources,
parameters, a buffer, and what earlier steps made). What a step does depends on shapes and types
alone, so the same program runs on real and on deferred tensors. A step that real tensors refuse is
left out of both.
"""

import operator
import warnings
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


Step = tuple[int, int, int, int]
_REFUSALS = (RuntimeError, IndexError, ValueError, ArithmeticError)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def random_sources(seed: int) -> dict[str, torch.Tensor]:
    """The tensors of a small checkpoint; even seeds have `one` in common."""
    make = torch.Generator().manual_seed(seed)
    common = torch.Generator().manual_seed(seed % 2)
    return {
        "one": torch.randn(4, 6, generator=common),
        "two": torch.randn(4, 6, generator=make).to(torch.bfloat16),
        "square": torch.randn(4, 4, generator=make),
        "row": torch.randn(6, generator=make),
        "half": torch.randn(2, 6, generator=make),
        "scalar": torch.randn((), generator=make),
        "short": torch.randn(4, 6, generator=make).to(torch.float16),
        "bytes": torch.randint(-9, 9, (4, 6), generator=make, dtype=torch.int8),
    }


def random_model() -> nn.Module:
    """Parameters of several layouts: plain, transposed, tied, two on one storage; a buffer."""
    make = torch.Generator().manual_seed(99)
    made = nn.Module()

    def add(name: str, tensor: torch.Tensor) -> None:
        made.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    add("plain", torch.randn(4, 6, generator=make))
    add("turned", torch.randn(6, 4, generator=make).to(torch.bfloat16).t())
    add("square", torch.randn(4, 4, generator=make))
    add("long", torch.randn(7, generator=make))
    both = torch.randn(8, 6, generator=make)
    add("upper", both[:5])
    add("lower", both[3:])
    made.register_parameter("tied", made.get_parameter("plain"))
    made.register_buffer("buffer", torch.randn(4, 6, generator=make))
    return made


@dataclass
class Machine:
    """Runs a program once. `skip` holds the steps to leave out; the real run fills it."""

    pool: list[torch.Tensor]
    parameters: list[nn.Parameter]
    skip: set[int]
    real: bool
    constants: set[int] = field(default_factory=set)  # places in the pool of real tensors

    def run(self, program: list[Step]) -> None:
        for number, (what, a, b, c) in enumerate(program):
            if number in self.skip:
                continue
            operation = OPERATIONS[what % len(OPERATIONS)]
            try:
                # A warning that is an error is raised when the operation has been done: the real
                # run would leave out what it did.
                with warnings.catch_warnings(action="ignore"):
                    made = operation(self, a, b, c)
            except _REFUSALS:
                if not self.real:
                    raise
                self.skip.add(number)
                continue
            if made is not None:
                self.pool.append(made)

    def any(self, a: int) -> torch.Tensor:
        return self.pool[a % len(self.pool)]

    def fitting(self, target: torch.Tensor, b: int) -> torch.Tensor:
        """A tensor that `target` takes: its shape or one that broadcasts, no float into int."""
        found = [t for t in self.pool if _fits(t, target)]
        return found[b % len(found)]

    def floating(self, a: int) -> torch.Tensor:
        found = [t for t in self.pool if t.dtype in FLOATS]
        return found[a % len(found)]

    def written(self, a: int) -> torch.Tensor:
        """A parameter or a part of it more often than anything else."""
        if a % 3 == 0:
            return self.floating(a // 3)
        parameter = self.parameters[a // 3 % len(self.parameters)].data
        length = parameter.shape[0]
        start = a // 5 % length
        return parameter[start:] if a % 2 else parameter.narrow(0, 0, length - start)


def _fits(value: torch.Tensor, target: torch.Tensor) -> bool:
    if not target.dtype.is_floating_point and value.dtype.is_floating_point:
        return False
    missing = target.dim() - value.dim()
    pairs = zip(value.shape, target.shape[max(missing, 0) :], strict=False)
    return missing >= 0 and all(size in (1, wanted) for size, wanted in pairs)


def _shaped(machine: Machine, a: int) -> torch.Tensor:
    found = [t for t in machine.pool if t.dim()]
    return found[a % len(found)]


def _narrow(m: Machine, a: int, b: int, c: int) -> torch.Tensor:
    tensor = _shaped(m, a)
    dim = b % tensor.dim()
    start = c % tensor.shape[dim]
    return tensor.narrow(dim, start, tensor.shape[dim] - start)


def _copy_part(m: Machine, a: int, b: int, c: int) -> None:
    """Rows or columns of a source, as a tensor-parallel rank takes them, into a parameter."""
    part = m.pool[a % 8]
    for dim, size in enumerate(part.shape):
        start = b // (dim + 1) % size if (a // 8 + dim) % 2 else 0
        part = part.narrow(dim, start, c // (dim + 1) % (size - start) + 1 if start else size)
    part = part[0] if a % 5 == 0 and part.dim() > 1 else part
    target = m.parameters[c % len(m.parameters)].data
    if target.dim() != part.dim() or any(map(operator.lt, target.shape, part.shape)):
        return
    for dim, size in enumerate(part.shape):
        target = target.narrow(dim, (a + b) % (target.shape[dim] - size + 1), size)
    target.copy_(_apart(part, target))


def _step(m: Machine, a: int, b: int, c: int) -> torch.Tensor:
    return _shaped(m, a)[b % 2 :: 2]


def _turn(m: Machine, a: int, b: int, c: int) -> torch.Tensor:
    tensor = _shaped(m, a)
    return tensor.transpose(b % tensor.dim(), c % tensor.dim())


def _reshape(m: Machine, a: int, b: int, c: int) -> torch.Tensor:
    tensor = m.any(a)
    shapes: tuple[tuple[int, ...], ...] = ((-1,), (2, -1), (1, *tensor.shape), (-1, 1))
    shape = shapes[b % len(shapes)]
    return tensor.view(shape) if c % 2 else tensor.reshape(shape)


def _bits(m: Machine, a: int, b: int, c: int) -> torch.Tensor:
    """The same bytes as another type of the same width, and back, moved by one."""
    tensor = _shaped(m, a)
    view = tensor.view(torch.uint8 if b % 2 else torch.int16)
    return view[..., : view.shape[-1] // 4 * 4].view(tensor.dtype)


def _turn_in_place(m: Machine, a: int, b: int, c: int) -> torch.Tensor:
    tensor = m.floating(a).clone()
    if b % 2 and tensor.dim() > 1:
        return tensor.transpose_(0, 1)
    return tensor.unsqueeze_(0)


def _copy(m: Machine, a: int, b: int, c: int) -> None:
    target = m.written(a)
    target.copy_(_apart(m.fitting(target, b), target))


def _copy_anywhere(m: Machine, a: int, b: int, c: int) -> None:
    target = m.any(a)
    target.copy_(_apart(m.fitting(target, b), target))


def _apart(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Torch does not say what copying a tensor over a part of itself gives; loading refuses it."""
    same = value.untyped_storage()._cdata == target.untyped_storage()._cdata
    return value.clone() if same else value


def _arithmetic(m: Machine, a: int, b: int, c: int) -> None:
    target = m.written(a)
    if c % 4 == 0:
        target.fill_(0.5 * (b % 5))
    elif c % 4 == 1:
        target.mul_(-0.5)
    elif c % 4 == 2:
        target.add_(m.fitting(target, b), alpha=0.5)
    else:
        target.zero_()


def _source_in_place(m: Machine, a: int, b: int, c: int) -> None:
    m.floating(a).add_(0.25)


def _join(m: Machine, a: int, b: int, c: int) -> torch.Tensor:
    first = _shaped(m, a)
    second = [t for t in m.pool if t.shape == first.shape and t.dtype == first.dtype]
    parts = [first, second[b % len(second)]]
    return torch.stack(parts) if c % 3 == 0 else torch.cat(parts, dim=c % first.dim())


def _new(m: Machine, a: int, b: int, c: int) -> torch.Tensor:
    tensor = m.floating(a)
    makers: tuple[Callable[[], torch.Tensor], ...] = (
        tensor.clone,
        tensor.contiguous,
        lambda: tensor.to(FLOATS[c % 3]),
        lambda: torch.empty_like(tensor).copy_(tensor),
        lambda: tensor.new_zeros((2, 6)),
        lambda: torch.zeros_like(tensor),
        lambda: tensor * 0.5 + tensor,
        lambda: tensor.new_full(tuple(tensor.shape), 0.5),
    )
    return makers[b % len(makers)]()


def _constant(m: Machine, a: int, b: int, c: int) -> torch.Tensor:
    """A factory on the device of a parameter, and numbers that did not come from a tensor."""
    device = m.parameters[a % len(m.parameters)].device
    if b % 2:
        return torch.full((4, 6), 0.5 * (c % 3), device=device)
    return torch.arange(6.0, device=device) * 0.125


def _mixed(m: Machine, a: int, b: int, c: int) -> torch.Tensor:
    """A result whose layout follows from the strides of a constant."""
    square = torch.arange(16.0).view(4, 4)
    constant = square.t() if b % 2 else square
    return constant * m.pool[a % 8].reshape(-1)[0]


def _expand(m: Machine, a: int, b: int, c: int) -> torch.Tensor:
    return m.any(a).unsqueeze(0).expand(2, *m.any(a).shape)


def _assign(m: Machine, a: int, b: int, c: int) -> None:
    target = m.written(a)
    rows = target.shape[0]
    if b % 4 == 0:
        target[torch.tensor([c % rows, 0])] = 0.5
    elif b % 4 == 1:
        target[target > 0.25] = -1.0
    elif b % 4 == 2:
        target[c % rows] = m.fitting(target[0], b)
    else:
        target[..., ::2] = 2.0


def _pick(m: Machine, a: int, b: int, c: int) -> torch.Tensor:
    tensor = _shaped(m, a)
    return tensor[torch.tensor([b % tensor.shape[0], c % tensor.shape[0]])]


def _number(m: Machine, a: int, b: int, c: int) -> None:
    """Something read out of a tensor that steers or feeds what is written."""
    tensor = m.floating(a)
    target = m.written(b)
    if float(tensor.reshape(-1)[0]) > 0:
        target.mul_(tensor.reshape(-1)[-1].item())


def _where(m: Machine, a: int, b: int, c: int) -> torch.Tensor:
    tensor = m.floating(a)
    return torch.where(tensor > 0, tensor, m.fitting(tensor, b).to(tensor.dtype))


def _replace(m: Machine, a: int, b: int, c: int) -> None:
    """Other data for a parameter or for a tensor of the pool; the old storage may die."""
    if b % 2:
        tensor = m.floating(a)
        tensor.data = tensor.data.float() * 2
        return
    parameter = m.parameters[a % len(m.parameters)]
    parameter.data = (parameter.data * 0.5).t() if parameter.dim() == 2 else parameter.data + 1


OPERATIONS: tuple[Callable[[Machine, int, int, int], torch.Tensor | None], ...] = (
    _copy, _copy, _copy, _copy_anywhere, _narrow, _step, _turn, _reshape, _bits, _turn_in_place,
    _arithmetic, _arithmetic, _source_in_place, _join, _new, _new, _constant, _mixed, _expand,
    _assign, _pick, _number, _where, _replace, _copy_part, _copy_part, _copy_part,
)  # fmt: skip


def loader(
    program: list[Step], skip: set[int], *, real: bool
) -> Callable[[nn.Module, Mapping[str, torch.Tensor]], None]:
    """The program as loading code of `random_model()` over `random_sources()`."""

    def load(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
        parameters = list(module.parameters())
        pool = [weights[name] for name in sorted(weights)]
        pool += [p.data for p in parameters] + [module.get_buffer("buffer")]
        Machine(pool, parameters, skip, real).run(program)

    return load
