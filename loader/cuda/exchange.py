"""Give the tensors of a model other contents at the addresses that they have.

Captured graphs have the addresses of a model's tensors in them, so a model with graphs takes over
the weights of another one in this way:

- Where all of a mapping changes to one mapping of the other model that is laid out alike, the slabs
  of that one are mapped at the old address. Nothing is copied, and the slabs stay shared.
- Every other tensor gets a copy of the contents. A mapping becomes the model's own before it is
  written to. This concerns slabs of several tensors of which some have changed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

import torch

from tensor_dedup.errors import TensorDedupError, UnsupportedError
from tensor_dedup.loader.cuda.residents import DeviceResident
from tensor_dedup.loader.residents.param_data import param_data

if TYPE_CHECKING:
    from tensor_dedup.loader.cuda.gpu import DeviceMapping
    from tensor_dedup.loader.cuda.openers import MappedExtent, Opener
    from tensor_dedup.loader.cuda.shared import SharedGpu

_log = logging.getLogger(__name__)
Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor, and another one of the same geometry whose contents it is to have."""
# So many exceptions may arrive while weights are exchanged, which takes milliseconds.
MOST_ARRIVE: Final = 9


class LostWeightsError(TensorDedupError):
    """The weights of a model are neither those from before nor the new ones; end the engine."""


def require_own_places(pairs: Iterable[Pair]) -> None:
    """Check that each first tensor of `pairs` can get the contents of the second where it is.

    Tensors of equal bytes may lie at one address. This is right only while they stay equal: the
    new ones must then lie together in the same way.

    Raises:
        UnsupportedError: Two first tensors overlap and the second ones do not overlap in the same
            way, or a first tensor is expanded, to which torch copies nothing.
    """
    ranges = []
    for own, new in ((param_data(own), param_data(new)) for own, new in pairs):
        if own.layout is not torch.strided or not own.numel():
            continue
        start = own.data_ptr()
        if any(not step and size > 1 for step, size in zip(own.stride(), own.shape, strict=True)):
            raise UnsupportedError(
                "the running model cannot take over these weights: a tensor is expanded to "
                f"{tuple(own.shape)}, so nothing can be copied to it, and captured graphs use it; "
                "start a new engine, or one with enforce_eager=True"
            )
        ranges.append((start, start + _extent(own), new.data_ptr() - start))
    reach, distance = 0, 0
    for start, end, moved in sorted(ranges):
        if start < reach and moved != distance:
            raise UnsupportedError(
                "the running model cannot take over these weights: tensors that were equal, and "
                "have one address in captured graphs, differ from each other now; start a new "
                "engine, or one with enforce_eager=True"
            )
        reach, distance = max(reach, end), moved


def _extent(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the first to the last element of a tensor."""
    lasts = ((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (sum(lasts) + 1) * tensor.itemsize


class _Memory(NamedTuple):
    """What a mapping maps, and what it holds meanwhile."""

    extents: tuple[MappedExtent, ...]
    opener: Opener
    owners: list[object]

    @classmethod
    def of(cls, mapping: DeviceMapping) -> _Memory:
        return cls(mapping.extents, mapping.opener, mapping.owners())


@dataclass(frozen=True, slots=True)
class _Swap:
    """A mapping that is to map the slabs of another one."""

    mapping: DeviceMapping
    before: _Memory
    after: _Memory


class AddressExchange:
    """The exchange of one model's contents for those of another one. For one thread.

    No thread may use either model from the beginning of `prepare` to the end of `change`.
    `ended` says that the change has failed for good: all contents are those from before, or lost.
    """

    ended = False

    def __init__(self, gpu: SharedGpu, pairs: Iterable[Pair]) -> None:
        """Describe the exchange of the contents of `pairs`, whose tensors lie on `gpu`."""
        self._gpu: Final = gpu.gpu
        self._swaps: list[_Swap] = []
        self._copies: list[Pair] = []
        # By the mapping of first tensors: the pairs, and where the first of the second ones lies.
        self._inside: dict[DeviceMapping, tuple[list[Pair], DeviceMapping | None]] = {}
        self._swapped = False
        data = [(param_data(own), param_data(new)) for own, new in pairs]
        self._own: Final = [own.data_ptr() for own, _ in data]
        moved = [pair for pair in data if pair[0].data_ptr() != pair[1].data_ptr()]
        behind = self._gpu.mappings_at([own.data_ptr() for own, _ in moved])
        others = self._gpu.mappings_at([new.data_ptr() for _, new in moved])
        for pair, mapping, other in zip(moved, behind, others, strict=True):
            if mapping is None or mapping.private:
                self._copies.append(pair)
            else:
                self._inside.setdefault(mapping, ([], other))[0].append(pair)

    def prepare(self) -> None:
        """Do all that may find no room. The contents stay as they are, also after an error.

        Raises:
            BackendError: The GPU has no room, or its driver refuses.
            UnsupportedError: The backend cannot put other memory at an address.
        """
        for mapping, (pairs, other) in self._inside.items():
            if other is None or not _is_like(mapping, pairs, other):
                mapping.make_private()
                self._copies += pairs
            elif other.serials != mapping.serials:
                self._swaps.append(_Swap(mapping, _Memory.of(mapping), _Memory.of(other)))
        self._inside = {}

    def change(self) -> None:
        """Change all contents. Waits for all work of the GPU. Call `prepare` before.

        If another exception arrives in the middle, as from a signal handler, call it again.

        Raises:
            BackendError: The driver refused to map the new slabs, and all contents are those from
                before (`ended`); or it refused to copy.
            LostWeightsError: The driver refused to map the former slabs, too.
        """
        if not self._swapped:
            self.ended = False
            self._swap()
            self._swapped = True
        self._copy()

    def _swap(self) -> None:
        try:
            with self._gpu.entered():
                self._gpu.driver.synchronize()
            for each in self._swaps:
                _map(each.mapping, each.after)
        except TensorDedupError as error:
            self._swap_back(error)
            self.ended = True
            raise

    def _swap_back(self, error: TensorDedupError) -> None:
        for _ in range(MOST_ARRIVE):
            try:
                for each in reversed(self._swaps):
                    _map(each.mapping, each.before)
            except TensorDedupError as another:
                another.__context__ = error
                self.lose(another)
            except BaseException as arrived:  # noqa: BLE001  # it goes on
                error.__context__ = arrived
            else:
                return
        self.lose(error)

    def _copy(self) -> None:
        # On one GPU, between tensors of one geometry, it fails only if the GPU does.
        with torch.inference_mode():  # in which some tensors were made
            for own, new in self._copies:
                own.copy_(new)
        with self._gpu.entered():
            self._gpu.driver.synchronize()

    def lose(self, error: BaseException) -> NoReturn:
        """Unmap all memory of the model, so that nothing computes with weights of both models.

        Raises:
            LostWeightsError: Always, from `error`.
        """
        self.ended = True
        for mapping in {*self._gpu.mappings_at(self._own)} - {None}:
            assert mapping is not None
            for _ in range(MOST_ARRIVE):
                try:
                    mapping.clear()
                    break
                except TensorDedupError as failed:
                    _log.warning("weights of two steps stay mapped: %s", str(failed))
                    break
                except BaseException:  # noqa: BLE001  # the engine ends by what is raised below
                    continue
        raise LostWeightsError(
            f"the weights of this engine are lost, and it must be started anew: {error}"
        ) from error


def _is_like(mapping: DeviceMapping, pairs: Sequence[Pair], other: DeviceMapping) -> bool:
    """Return whether `other` has all new contents where `mapping` has the old ones."""
    if other.private or other.asleep:
        return False
    # Of the sizes that `DeviceMapping.wake` takes.
    if [each.nbytes for each in other.extents] != [each.nbytes for each in mapping.extents]:
        return False
    moved = other.address - mapping.address
    if any(new.data_ptr() - own.data_ptr() != moved for own, new in pairs):
        return False
    # Nothing may lie there that no pair is about.
    places = {own.data_ptr() - mapping.address for own, _ in pairs}
    held = (each for each in mapping.owners() if isinstance(each, DeviceResident))
    return all(not each.nbytes or each.offset in places for each in held)


def _map(mapping: DeviceMapping, memory: _Memory) -> None:
    """Let a mapping map other slabs at its address, whatever an interrupted call has left there.

    Nothing is done if it maps them already. After an error or interruption, it may be asleep.
    """
    if mapping.asleep:
        mapping.clear()
    elif mapping.extents == memory.extents:
        return
    else:
        mapping.sleep(waited=True)
    mapping.wake(memory.extents, memory.opener, *memory.owners)
