"""The tracer: runs a model's own `load_weights` over deferred tensors and logs what it does.

One `TorchDispatchMode` sees every operation. Views are left alone; writes and new storages are
recorded (`virtual.py`); what depends on data is answered with real data, read for the purpose.
"""

from __future__ import annotations

import enum
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.virtual import (
    Const,
    Kind,
    Operation,
    Target,
    View,
    VirtualStorage,
    Write,
)

if TYPE_CHECKING:
    from tensor_dedup.loader.sources import SourceTensor

aten = torch.ops.aten


class UntraceableError(UnsupportedError):
    """This model's loading code does something the tracer cannot defer: load it plainly."""


class _Op(enum.Enum):
    VIEW = 0
    COPY = 1
    MUTATE = 2
    FRESH = 3
    EMPTY = 4
    DATA = 5
    REFUSED = 6


_OVERWRITERS = {aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}
_EMPTY = {
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
# They replace or grow the memory itself; their content is not a function of what was written.
_REFUSED = {"aten::resize_", "aten::set_", "aten::resize_as_", "aten::set_data"}
_DATA_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@functools.cache
def _kind(func: torch._ops.OpOverload) -> _Op:
    schema = func._schema
    if schema.name in _REFUSED:
        return _Op.REFUSED
    if _DATA_TAGS & set(func.tags) or schema.name == "aten::is_nonzero":
        return _Op.DATA
    if func is aten.copy_.default:
        return _Op.COPY
    if torch.Tag.inplace_view in func.tags:
        return _Op.VIEW
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return _Op.MUTATE
    if func in _EMPTY:
        return _Op.EMPTY
    aliases = [r.alias_info is not None for r in schema.returns]
    return _Op.VIEW if aliases and all(aliases) else _Op.FRESH


@functools.cache
def _written(func: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of every argument `func` writes."""
    arguments = enumerate(func._schema.arguments)
    return tuple(
        (i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write
    )


@functools.cache
def _is_random(func: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _map(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Apply `change` to every tensor in nested lists and tuples of arguments."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, change) for item in value)
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


class Tracer:
    """The deferred storages of one load.

    `evaluate` turns a view into a real tensor on `device`, where the model will be; it is called
    for what depends on data.
    Used by one thread; `recording()` is active in that thread alone.
    """

    def __init__(self, evaluate: Callable[[View], torch.Tensor], device: torch.device) -> None:
        self._evaluate = evaluate
        self._device = device
        self._deferring = False
        self._storages: dict[int, VirtualStorage] = {}
        self.data_reads: list[str] = []

    def source(self, source: SourceTensor, dtype: torch.dtype) -> torch.Tensor:
        """A deferred tensor for `source`, whose bytes are not read."""
        self._deferring = True  # our own meta tensors, made inside the model's code
        try:
            meta = torch.empty(source.spec.shape, dtype=dtype, device="meta")
        finally:
            self._deferring = False
        self._add(Kind.SOURCE, meta).source = source
        return meta

    def parameter(self, initial: torch.Tensor) -> torch.Tensor:
        """A deferred flat byte tensor in place of `initial`, the bytes the constructor left."""
        meta = torch.empty(initial.numel(), dtype=torch.uint8, device="meta")
        self._add(Kind.PARAMETER, meta).initial = initial
        return meta

    def find(self, tensor: torch.Tensor) -> VirtualStorage | None:
        """The deferred storage under `tensor`, or None for a real tensor."""
        if not tensor.is_meta:
            return None
        return self._storages.get(tensor.untyped_storage()._cdata)

    def view(self, tensor: torch.Tensor) -> View | None:
        """A snapshot of a deferred tensor, or None for a real one."""
        storage = self.find(tensor)
        return None if storage is None else storage.view(tensor)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While active in this thread, operations on deferred tensors are logged.

        Raises UntraceableError when the code starts a thread: its writes would go unseen.
        """
        with _no_new_threads(), _Mode(self):
            yield

    def on_real_device(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Send `torch.zeros(..., device=param.device)` to the device the parameter stands for."""
        device = kwargs.get("device")
        if device is None or self._deferring or torch.device(device).type != "meta":
            return kwargs
        return {**kwargs, "device": self._device}

    def _add(self, kind: Kind, meta: torch.Tensor) -> VirtualStorage:
        untyped = meta.untyped_storage()
        storage = VirtualStorage(kind, untyped.nbytes(), meta)
        self._storages[untyped._cdata] = storage
        return storage

    def _snapshot(self, tensor: torch.Tensor) -> View | Const:
        storage = self.find(tensor)
        if storage is not None:
            return storage.view(tensor)
        if tensor.is_meta:
            raise UntraceableError("a meta tensor of the model's own has no content to record")
        return Const(tensor)

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        view = self.view(tensor)
        return tensor if view is None else self._evaluate(view)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do, record or answer one operation that has at least one deferred argument."""
        kind = _kind(func)
        if kind is _Op.COPY:
            return self._copy(func, args, kwargs)
        if kind is _Op.REFUSED:
            raise UntraceableError(f"{func} replaces the memory of a deferred tensor")
        if kind is _Op.DATA:
            self.data_reads.append(str(func))
            return func(
                *_map(args, self._real), **{k: _map(v, self._real) for k, v in kwargs.items()}
            )
        if kind is _Op.MUTATE:
            return self._mutate(func, args, kwargs)
        return self._fresh(func, args, kwargs, kind)

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target, value = args[0], args[1]
        storage = self.find(target)
        if storage is None:
            return func(target, self._real(value), **kwargs)
        if value.shape != target.shape:
            value = value.expand(target.shape)  # the error plain loading would raise
        if not target.numel():
            return target
        snapshots = (Target.HERE, self._snapshot(value))
        storage.writes.append(Write(func, storage.view(target), snapshots, {}, True))
        return target

    def _mutate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = [args[i] if i < len(args) else kwargs.get(n) for i, n in _written(func)]
        if len(written) != 1 or not isinstance(written[0], torch.Tensor):
            raise UntraceableError(f"{func} writes several tensors at once")
        target = written[0]
        storage = self.find(target)
        if storage is not None and not target.numel():
            return target
        if storage is None or _is_random(func):
            return self._write_now(func, target, args, kwargs)
        place = lambda t: Target.HERE if t is target else self._snapshot(t)  # noqa: E731
        write = Write(
            func,
            storage.view(target),
            _map(args, place),
            {k: _map(v, place) for k, v in kwargs.items()},
            func in _OVERWRITERS,
        )
        storage.writes.append(write)
        return target

    def _write_now(
        self, func: Any, target: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Write at once: into a real tensor, or random numbers (drawn in the program's order)."""
        storage = self.find(target)
        if storage is None:
            keep = lambda t: t if t is target else self._real(t)  # noqa: E731
            return func(*_map(args, keep), **{k: _map(v, keep) for k, v in kwargs.items()})
        value = self._evaluate(storage.view(target)).clone()
        swap = lambda t: value if t is target else self._real(t)  # noqa: E731
        func(*_map(args, swap), **{k: _map(v, swap) for k, v in kwargs.items()})
        write = Write(
            aten.copy_.default, storage.view(target), (Target.HERE, Const(value)), {}, True
        )
        storage.writes.append(write)
        storage.private = f"{func} is not deterministic"
        return target

    def _fresh(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: _Op) -> Any:
        if _is_random(func):
            raise UntraceableError(f"{func} makes random numbers out of a deferred tensor")
        meta_kwargs = {k: _map(v, _to_meta) for k, v in kwargs.items()}
        if meta_kwargs.get("device") is not None:
            meta_kwargs["device"] = torch.device("meta")
        meta_kwargs.pop("pin_memory", None)
        out = func(*_map(args, _to_meta), **meta_kwargs)
        new = [t for t in _tensors(out) if t.is_meta and self.find(t) is None]
        if new:
            self._record_outputs(func, args, kwargs, out, kind)
        return out

    def _record_outputs(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, kind: _Op
    ) -> None:
        snapshots = _map(args, self._snapshot)
        named = {k: _map(v, self._snapshot) for k, v in kwargs.items()}
        reasons = [s.private for s in map(self.find, _tensors(args)) if s is not None and s.private]
        for index, tensor in enumerate(_tensors(out)):
            if self.find(tensor) is None:
                storage = self._add(Kind.EMPTY if kind is _Op.EMPTY else Kind.NODE, tensor)
                storage.operation = Operation(func, snapshots, named, index)
                storage.private = reasons[0] if reasons else None


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tracer = self._tracer
        if _kind(func) is _Op.VIEW:
            return func(*args, **kwargs)
        if _has_deferred(tracer, args, kwargs):
            return tracer.run(func, args, kwargs)
        return func(*args, **tracer.on_real_device(kwargs))


def _has_deferred(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if any(tracer.find(t) is not None for t in _tensors(args)):
        return True
    return any(tracer.find(t) is not None for t in _tensors(list(kwargs.values())))


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@contextmanager
def _no_new_threads() -> Iterator[None]:
    """Refuse threads started by the traced code: a dispatch mode is active in one thread only.

    Without this a loader that copies from a pool would silently leave its parameters as they were.
    """
    tracing = threading.get_ident()
    original = threading.Thread.start

    @functools.wraps(original)
    def start(self: threading.Thread) -> None:
        if threading.get_ident() == tracing:
            raise UntraceableError("the model's loading code starts threads")
        original(self)

    threading.Thread.start = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = original  # type: ignore[method-assign]
