"""One load's use of a GPU's manager, which may fail at any moment: the rest is then made here."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from tensor_dedup.loader.cuda.manager_residents import DeviceManagerResidents
from tensor_dedup.loader.residents.manager import client_of
from tensor_dedup.memory_manager.client.names import checkpoint_name
from tensor_dedup.memory_manager.errors import MemoryManagerError, RefusedError

if TYPE_CHECKING:
    from tensor_dedup.loader.cuda.gpu import Gpu
    from tensor_dedup.loader.cuda.requests import DeviceRequest
    from tensor_dedup.loader.cuda.residents import DeviceResident
    from tensor_dedup.types import ResidentKey

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Borrowing:
    """See the module. One thread. `failed`: why nothing is asked of a manager, or not any more.

    Without a manager, and none asked for, it finds nothing and has no reason.
    """

    def __init__(
        self, lender: DeviceManagerResidents | None = None, failed: str | None = None
    ) -> None:
        self._lender: Final = lender
        self.failed = failed
        self.refused: str | None = None  # why the first that it had no room for was made here

    def by_content(self, keys: Sequence[ResidentKey]) -> list[DeviceResident | None]:
        """The residents with these bytes, where there are any."""
        nothing: list[DeviceResident | None] = [None] * len(keys)
        return self._ask(lambda lender: lender.all_by_content(keys), nothing) if keys else nothing

    def by_recipe(self, recipe: str, geometry: ResidentKey) -> DeviceResident | None:
        """The resident that a recipe leads to; of `geometry` the digest does not count."""
        return self._ask(lambda lender: lender.by_recipe(recipe, geometry), None)

    def put(self, wanted: Sequence[DeviceRequest]) -> list[DeviceResident | None]:
        """A resident for each; None: make it here."""
        nothing: list[DeviceResident | None] = [None] * len(wanted)
        return self._ask(lambda lender: lender.put(wanted), nothing) if wanted else nothing

    def _ask(self, ask: Callable[[DeviceManagerResidents], _T], nothing: _T) -> _T:
        if self._lender is None or self.failed is not None:
            return nothing
        lender = self._lender
        try:
            # What nobody here refers to any more is leased until it is unmapped.
            return lender.gpu.with_room(lambda: ask(lender), RefusedError)
        except RefusedError as error:
            # No room for these: what is resident can still be borrowed.
            self.refused = self.refused or str(error)
            _log.warning("not all of it can be lent: %s", str(error))
        except MemoryManagerError as error:
            self.failed = str(error)
            _log.warning("going on without the GPU's memory manager: %s", str(error))
        return nothing


def borrowing_from(where: str | os.PathLike[str] | None, checkpoint: str, gpu: Gpu) -> Borrowing:
    """What a load of `checkpoint` uses of the manager of `gpu` at, or beside, `where`."""
    if where is None:
        return Borrowing()
    try:
        client = client_of(os.fspath(where), gpu.device.uuid)
        return Borrowing(DeviceManagerResidents(client, gpu, checkpoint_name(checkpoint)))
    except MemoryManagerError as error:
        _log.warning("%s: loading without the GPU's memory manager: %s", checkpoint, str(error))
        return Borrowing(failed=str(error))
