"""The tracer records what a model's own `load_weights` does with deferred tensors.

Deferred tensors are meta tensors, which have a shape and no memory. A `TorchDispatchMode` sees
every operation:

- Views need no record.
- Writes, and operations that create a storage, are recorded (`storage.py`).
- An operation that depends on data is executed with real data, which is read for it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.deferred.operations import (
    OVERWRITERS,
    Op,
    is_random,
    kind_of,
    needs_data,
    varies,
    written,
)
from tensor_dedup.loader.deferred.storage import (
    Const,
    ExpressionKind,
    Operation,
    Target,
    View,
    VirtualStorage,
    Write,
    span_of,
)

if TYPE_CHECKING:
    from tensor_dedup.loader.checkpoint_io.sources import SourceTensor

aten = torch.ops.aten


class UntraceableError(UnsupportedError):
    """The model's loading code does something that cannot be traced.

    Load the model without deferred tensors instead.
    """


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
    """The tracer of one load, with all its deferred storages. For one thread.

    - `evaluate` computes a deferred tensor as a real CPU tensor, for operations that need its data.
    - `data_reads` names the operations that needed data.
    - `wrote_memory` is True if an operation wrote to a real tensor.
    - Deferred parameters are on the "meta" device. If loading code asks for a new tensor on that
      device (`device="meta"`), the tensor is created on `device` instead.
    """

    def __init__(self, evaluate: Callable[[View], torch.Tensor], device: torch.device) -> None:
        self._evaluate = evaluate
        self._device = device
        self._evaluating = False
        self._storages: dict[int, VirtualStorage] = {}
        self.data_reads: list[str] = []
        self.wrote_memory = False

    def source(self, source: SourceTensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a new deferred tensor that stands for `source`, which is not read.

        `dtype` is the torch dtype of the source tensor.
        """
        with torch._C._DisableTorchDispatch():  # our own meta tensor, made in the model's code
            meta = torch.empty(source.spec.shape, dtype=dtype, device="meta")
        self._add(ExpressionKind.SOURCE, meta).source = source
        return meta

    def parameter(self, initial: torch.Tensor) -> torch.Tensor:
        """Return a new deferred tensor (flat, uint8) for the storage of a parameter.

        `initial` has the bytes that the constructor left in the storage.
        """
        meta = torch.empty(initial.numel(), dtype=torch.uint8, device="meta")
        self._add(ExpressionKind.PARAMETER, meta).initial = initial
        return meta

    def find(self, tensor: torch.Tensor) -> VirtualStorage | None:
        """Return the deferred storage of `tensor`, or None for a real tensor."""
        if not tensor.is_meta:
            return None
        return self._storages.get(tensor.untyped_storage()._cdata)

    def view(self, tensor: torch.Tensor) -> View | None:
        """Return a view that describes `tensor` in its current state, or None if it is real.

        Raises:
            UntraceableError: The deferred tensor is lazily negated or conjugated.
        """
        storage = self.find(tensor)
        return None if storage is None else _plain_view(storage, tensor)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager: while it is active, this thread's deferred operations are recorded.

        Deferred operations are those with a deferred tensor among their arguments.

        Raises:
            UntraceableError: Code in the `with` block starts a thread, which could not be recorded.
        """
        with _no_new_threads(lambda: self._evaluating), _Mode(self):
            yield

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Context manager: while it is active, the code may start threads.

        `recording` does not allow this otherwise. Code of this package may hash in a thread pool.
        """
        before, self._evaluating = self._evaluating, True
        try:
            yield
        finally:
            self._evaluating = before

    def held(self) -> int:
        """Return the number of deferred storages that tensors still refer to."""
        return sum(
            torch._C._storage_Use_Count(storage.untyped._cdata) > 1
            for storage in self._storages.values()
        )

    def close(self) -> None:
        """Forget everything that was recorded.

        This frees storages, which would otherwise keep each other alive in cycles.
        """
        for storage in self._storages.values():
            storage.writes.clear()
            storage.initial = storage.operation = storage.reached = storage.ordered = None
        self._storages.clear()

    def on_real_device(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return `kwargs` with the tracer's `device` in place of the device "meta"."""
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "meta":
            return kwargs
        return {**kwargs, "device": self._device}

    def _add(self, kind: ExpressionKind, meta: torch.Tensor) -> VirtualStorage:
        untyped = meta.untyped_storage()
        storage = VirtualStorage(kind, untyped.nbytes(), untyped)
        self._storages[untyped._cdata] = storage
        return storage

    def _snapshot(self, tensor: torch.Tensor) -> View | Const:
        storage = self.find(tensor)
        if storage is not None:
            return _plain_view(storage, tensor)
        _refuse_foreign(tensor)
        with self.own_work():  # hashing may start the pool: those threads are ours
            return Const(tensor)

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = self.find(tensor)
        if storage is None:
            _refuse_foreign(tensor)
            return tensor
        with self.own_work():
            return self._evaluate(_plain_view(storage, tensor))

    def run(self, func: Any, kind: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record or execute `func`, an operation of the kind `kind` with a deferred argument.

        Returns the result for the loading code.

        Raises:
            UntraceableError: The operation cannot be deferred.
        """
        if kind is Op.REFUSED:
            raise UntraceableError(f"{func} replaces the memory of a deferred tensor")
        if kind is Op.DATA and needs_data(func, args):
            self.data_reads.append(str(func))
            return func(
                *_map(args, self._real), **{k: _map(v, self._real) for k, v in kwargs.items()}
            )
        if kind is Op.MUTATE:
            return self._mutate(func, args, kwargs)
        return self._fresh(func, args, kwargs, kind)

    def copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record or execute a `copy_`, the most frequent operation of loading code.

        Returns the result for the loading code.

        Raises:
            UntraceableError: A tensor is copied over a part of itself.
        """
        target, value = args[0], args[1]
        storage = self.find(target)
        if storage is None:
            self.wrote_memory = True
            if self.find(value) is None:
                return func(*args, **kwargs)
            _refuse_foreign(target)
            return func(target, self._real(value), **kwargs)
        if value.shape != target.shape:
            value = value.expand(target.shape)  # the error plain loading would raise
        if value is target or not target.numel():
            return target
        place, taken = _plain_view(storage, target), self._snapshot(value)
        if isinstance(taken, View) and taken.storage is storage and _overlap(place, taken):
            # What it gives follows from the order in which elements are copied, which torch does
            # not promise.
            raise UntraceableError("a tensor is copied over a part of itself")
        storage.writes.append(Write(func, place, (Target.HERE, taken), {}, True))
        return target

    def _mutate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        touched = [args[i] if i < len(args) else kwargs.get(n) for i, n in written(func)]
        if len(touched) != 1 or not isinstance(touched[0], torch.Tensor):
            raise UntraceableError(f"{func} writes several tensors at once")
        target = touched[0]
        storage = self.find(target)
        if storage is None:
            return self._write_real(func, target, args, kwargs)
        self._rehearse(func, target, args, kwargs)
        if not target.numel():
            return target
        if is_random(func):
            return self._write_random(func, storage, target, args, kwargs)
        place = lambda t: Target.HERE if t is target else self._snapshot(t)  # noqa: E731
        write = Write(
            func,
            _plain_view(storage, target),
            _map(args, place),
            {k: _map(v, place) for k, v in kwargs.items()},
            func in OVERWRITERS,
        )
        storage.writes.append(write)
        if varies(func, args, kwargs):
            storage.private = f"{func} is not deterministic"
        return target

    def _rehearse(
        self, func: Any, target: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Run the operation on meta tensors, for the errors that plain loading would raise here."""
        shape, nbytes = target.shape, target.untyped_storage().nbytes()
        func(*_map(args, _to_meta), **{k: _map(v, _to_meta) for k, v in kwargs.items()})
        if target.shape != shape or target.untyped_storage().nbytes() != nbytes:
            raise UntraceableError(f"{func} resizes a deferred tensor")

    def _write_real(
        self, func: Any, target: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Write into a real tensor, now and with real data."""
        _refuse_foreign(target)
        self.wrote_memory = True
        keep = lambda t: t if t is target else self._real(t)  # noqa: E731
        return func(*_map(args, keep), **{k: _map(v, keep) for k, v in kwargs.items()})

    def _write_random(
        self,
        func: Any,
        storage: VirtualStorage,
        target: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Draw random numbers now, in the program's order, and record what was drawn."""
        # With the strides of the target, which decide which element gets which number.
        value = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype)
        value.copy_(self._real(target))
        swap = lambda t: value if t is target else self._real(t)  # noqa: E731
        func(*_map(args, swap), **{k: _map(v, swap) for k, v in kwargs.items()})
        drawn = (Target.HERE, Const(value))
        storage.writes.append(
            Write(aten.copy_.default, _plain_view(storage, target), drawn, {}, True)
        )
        storage.private = f"{func} is not deterministic"
        return target

    def _fresh(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Op) -> Any:
        if is_random(func):
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
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, kind: Op
    ) -> None:
        snapshots = _map(args, self._snapshot)
        named = {k: _map(v, self._snapshot) for k, v in kwargs.items()}
        inputs = [self.find(t) for t in (*_tensors(args), *_tensors(list(kwargs.values())))]
        private = next((s.private for s in inputs if s is not None and s.private), None)
        if private is None and varies(func, args, kwargs):
            private = f"{func} is not deterministic"
        for index, tensor in enumerate(_tensors(out)):
            if self.find(tensor) is None:
                storage = self._add(
                    ExpressionKind.EMPTY if kind is Op.EMPTY else ExpressionKind.NODE, tensor
                )
                layout = _plain_view(storage, tensor)
                storage.operation = Operation(func, snapshots, named, index, layout)
                storage.private = private


class _Dispatch:
    """The dispatch of the mode, in a class of its own.

    A mode that defines `__torch_dispatch__` itself gets it wrapped for the compiler, which costs
    more than everything that is done here.
    """

    _tracer: Tracer

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kind = kind_of(func)
        # Four in five operations of a mixture of experts. To leave them out, the methods of
        # torch.Tensor would have to be patched, for every thread.
        if kind is Op.VIEW:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if kind is Op.COPY:
            return self._tracer.copy(func, args, kwargs)
        if _has_deferred(self._tracer, args, kwargs):
            return self._tracer.run(func, kind, args, kwargs)
        if kind is Op.MUTATE or kind is Op.REFUSED:
            self._tracer.wrote_memory = True
        return func(*args, **self._tracer.on_real_device(kwargs))


class _Mode(_Dispatch, TorchDispatchMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer


def _has_deferred(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if any(tracer.find(t) is not None for t in _tensors(args)):
        return True
    return any(tracer.find(t) is not None for t in _tensors(list(kwargs.values())))


def _plain_view(storage: VirtualStorage, tensor: torch.Tensor) -> View:
    """Return a snapshot of a deferred tensor whose elements are what its memory holds."""
    if tensor.is_neg() or tensor.is_conj():
        raise UntraceableError("a lazily negated or conjugated tensor is not what its memory holds")
    return storage.view(tensor)


def _overlap(a: View, b: View) -> bool:
    """Return whether two different views of one storage may have bytes in common."""
    if (a.dtype, a.shape, a.stride, a.offset) == (b.dtype, b.shape, b.stride, b.offset):
        return False
    (first, last), (start, stop) = span_of(a), span_of(b)
    return first < stop and start < last


def _refuse_foreign(tensor: torch.Tensor) -> None:
    """Raise UntraceableError for a meta tensor of the model's own: its content is unknown."""
    if tensor.is_meta:
        raise UntraceableError("a meta tensor of the model's own has no content to record")


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@contextmanager
def _no_new_threads(ours: Callable[[], bool]) -> Iterator[None]:
    """Refuse threads started by the traced code: a dispatch mode is active in one thread only.

    Otherwise a loader that copies from a pool would silently leave its parameters as they were.
    `ours` tells whether the code that runs now is this package's, which may use a pool.
    """
    tracing = threading.get_ident()
    original = threading.Thread.start

    @functools.wraps(original)
    def start(self: threading.Thread) -> None:
        if threading.get_ident() == tracing and not ours():
            raise UntraceableError(f"the model's loading code starts threads ({self.name})")
        original(self)

    threading.Thread.start = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = original  # type: ignore[method-assign]
