"""Comparison of residents with what they stand for, as `verify_bytes` and `audit` ask for it.

With `verify_bytes` every hit is compared, and one that differs is a collision: the tensor stays
private. With `audit` a share of the hits is, chosen at random, and a difference ends the load.
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
    """The checks of one load's hits; collisions are counted in its ledger. For one thread."""

    config: TensorDedupConfig
    provider: ResidentProvider
    ledger: LoadLedger
    _rng: random.Random = field(default_factory=random.Random)

    def sampled(self) -> bool:
        """Return whether this hit is one of those to audit, chosen at random."""
        return self.config.audit > 0 and self._rng.random() < self.config.audit

    def asked(self) -> bool:
        """Return whether this hit is to be compared with what its checkpoint gives."""
        return self.config.verifies_bytes or self.sampled()

    def is_as_loaded(
        self,
        name: str,
        resident: AnyResident,
        tensor: torch.Tensor,
        shared: str = "the resident",
    ) -> bool:
        """Compare a resident with the tensor `name` made from its checkpoint, after `asked`.

        False is a collision. `shared` says in an error what the resident is.

        Raises:
            AuditError: An audit found other bytes.
        """
        return self._same(resident, tensor, name, shared, "the tensor made from its checkpoint")

    def agrees(self, resident: AnyResident, tensor: torch.Tensor, *, new: bool = False) -> bool:
        """Compare a hit by content where that is asked for; return whether it may be used.

        `new` tells that the resident was built of this tensor by the call that returned it. Then
        its bytes are those of the tensor, unless some are those of a digest.

        Raises:
            AuditError: An audit found other bytes.
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
