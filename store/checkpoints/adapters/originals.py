"""What of an original is filled: each of its parts by one place, each of its bytes with one value.

Parts of an original may lie in one memory: weights that are tied, views of a buffer. Then what is
filled last is what all of them show, so whether that is what was saved is looked at in the end.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from tensor_dedup.store.checkpoints.adapters import arrays
from tensor_dedup.store.checkpoints.adapters.base import ValuePath
from tensor_dedup.store.checkpoints.state import is_array, is_tensor, raw
from tensor_dedup.store.checkpoints.state_errors import MismatchedOriginalError


class _Fill(NamedTuple):
    """A part that was filled, and how to make again what it was filled with."""

    place: ValuePath
    part: Any
    make: Callable[[], Any]


class _Span(NamedTuple):
    device: str
    start: int
    stop: int
    number: int


class Originals:
    """The parts of one original. One thread."""

    def __init__(self) -> None:
        # Kept: what took the place of a part in memory would have its identity.
        self._used: Final[dict[int, object]] = {}
        self._fills: Final[list[_Fill]] = []

    def unused(self, container: Any) -> Any:
        """The dict or list; None when it stands at another place too, and is filled there."""
        if not isinstance(container, dict | list):
            return container
        if id(container) in self._used:
            return None
        self._used[id(container)] = container
        return container

    def restored(self, part: object, place: ValuePath) -> None:
        """An object has been given its state. MismatchedOriginalError when it had another's."""
        if isinstance(part, dict | list):
            return  # a state dict: what it is made of was `unused`
        if id(part) in self._used:
            what = "one object in `original`, and two objects in what was saved"
            raise MismatchedOriginalError.at(str(place), what)
        self._used[id(part)] = part

    def fill(self, part: Any, place: ValuePath, make: Callable[[], Any]) -> bool:
        """Put what `make` makes into a tensor or an array; False when it does not take it."""
        made = make()
        put = _fill_tensor if is_tensor(made) else _fill_array
        if not put(made, part):
            return False
        self._fills.append(_Fill(place, part, make))
        return True

    def check(self) -> None:
        """MismatchedOriginalError when a part shows what another was filled with."""
        for fill in _overlapping(self._fills):
            if not _equal(fill.part, fill.make()):
                what = "shares one memory with another part of `original`, which is another value"
                raise MismatchedOriginalError.at(str(fill.place), what)


def _overlapping(fills: Sequence[_Fill]) -> Iterator[_Fill]:
    """Those whose memory may be that of others too, in their order."""
    found: set[int] = set()
    last = None
    for span in sorted(_spans(fills)):
        if last and last.device == span.device and span.start < last.stop:
            found |= {last.number, span.number}
            last = max(last, span, key=lambda each: each.stop)
        else:
            last = span
    return (fills[number] for number in sorted(found))


def _spans(fills: Sequence[_Fill]) -> Iterator[_Span]:
    for number, (_, part, _) in enumerate(fills):
        if is_tensor(part):
            device, start, size = str(part.device), part.data_ptr(), part.element_size()
            strides = [step * size for step in part.stride()]
        else:
            device, start, size = "cpu", part.ctypes.data, part.itemsize
            strides = part.strides
        if 0 not in part.shape:
            reach = [step * (count - 1) for step, count in zip(strides, part.shape, strict=True)]
            below, above = sum(min(0, each) for each in reach), sum(max(0, each) for each in reach)
            yield _Span(device, start + below, start + above + size, number)


def _equal(part: Any, made: Any) -> bool:
    import numpy as np

    shown, meant = (np.frombuffer(_bits(held), np.uint8) for held in (part, made))
    return bool(np.array_equal(shown, meant))


def _bits(held: Any) -> memoryview:
    import numpy as np

    return raw(held if is_tensor(held) else arrays.storable(np.asarray(held))[0])


def _fill_tensor(made: Any, part: Any) -> bool:
    import torch

    if not is_tensor(part) or part.is_meta or part.layout != torch.strided:
        return False
    if (part.shape, part.dtype) != (made.shape, made.dtype):
        return False
    if any(size > 1 and not step for size, step in zip(part.shape, part.stride(), strict=True)):
        return False  # expanded: several elements are one place in memory
    with torch.no_grad():
        part.copy_(made)
    return True


def _fill_array(made: Any, part: Any) -> bool:
    if not is_array(part) or not part.flags.writeable:
        return False
    if (part.shape, part.dtype) != (made.shape, made.dtype):
        return False
    part[...] = made
    return True
