"""Compare residents that a look-up found with the checkpoint (`verify_bytes` and `audit`).

A *hit* is a resident (a shared tensor in memory) that was found for a tensor by its digest or
recipe. With `verify_bytes`, every hit is compared byte by byte; a hit that differs is a collision,
and the tensor stays private. With `audit`, a random share of the hits is compared, and a difference
ends the load.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tensor_dedup.loader.cuda.residents import DeviceResident
from tensor_dedup.loader.residents.compare import raise_audit, same_bytes
from tensor_dedup.loader.residents.resident import Resident

if TYPE_CHECKING:
    import torch

    from tensor_dedup.config import TensorDedupConfig
    from tensor_dedup.loader.not_shared import LoadLedger
    from tensor_dedup.loader.residents.provider import AnyResident, ResidentProvider


@dataclass(slots=True)
class HitChecks:
    """The comparisons of one load's hits with the checkpoint. For one thread.

    Collisions are counted in `ledger`.
    """

    config: TensorDedupConfig
    provider: ResidentProvider
    ledger: LoadLedger
    _rng: random.Random = field(default_factory=random.Random)

    def sampled(self) -> bool:
        """Decide at random, with the configured probability `audit`, whether to audit a hit.

        A hit is a resident that a look-up has found. Call this once for each hit, because every
        call decides anew.
        """
        return self.config.audit > 0 and self._rng.random() < self.config.audit

    def asked(self) -> bool:
        """Return whether a hit, a resident that a look-up has found, must be compared.

        With `verify_bytes`, every hit must be compared. Otherwise the method decides at random,
        with the configured probability `audit`. Call it once for each hit, because every call
        decides anew.
        """
        return self.config.verifies_bytes or self.sampled()

    def is_as_loaded(
        self,
        name: str,
        resident: AnyResident,
        tensor: torch.Tensor,
        shared: str = "the resident",
    ) -> bool:
        """Compare `resident` with `tensor`, which was computed from the checkpoint.

        Returns True if the bytes are equal. If they differ and `verify_bytes` is on, a collision is
        counted, and the result is False. `name` is the tensor's name, and `shared` describes the
        resident in error messages.

        Raises:
            AuditError: The bytes differ, and `verify_bytes` is off.
        """
        return self._same(resident, tensor, name, shared, "the tensor made from its checkpoint")

    def agrees(self, resident: AnyResident, tensor: torch.Tensor, *, new: bool = False) -> bool:
        """Return whether `resident`, which was found by digest, may be used for `tensor`.

        - With `verify_bytes`, the bytes are compared. If they differ, a collision is counted, and
          the result is False.
        - Without `verify_bytes`, the result is True. In some calls, chosen at random as an audit,
          the bytes are compared first.

        `new` says that the resident was just built from `tensor`. A new resident is compared only
        if it lies on a GPU and has parts of other residents.

        Raises:
            AuditError: The bytes differ in an audit.
        """
        if new and not (isinstance(resident, DeviceResident) and resident.leaf_shared_bytes):
            return True
        if not self.asked():
            return True
        name = f"a tensor of {resident.key.digest}"
        return self._same(resident, tensor.cpu(), name, "the resident", "its equal")

    def _same(
        self, resident: AnyResident, tensor: torch.Tensor, name: str, shared: str, rebuilt: str
    ) -> bool:
        if same_bytes(tensor, self._seen(resident)):
            return True
        if not self.config.verifies_bytes:
            raise_audit(name, shared, rebuilt)
        self.ledger.collisions += 1
        return False

    def _seen(self, resident: AnyResident) -> torch.Tensor:
        """Return the bytes of a resident in host memory, to be compared."""
        if isinstance(resident, Resident):
            return resident.seen()
        return self.provider.map(resident).cpu()
