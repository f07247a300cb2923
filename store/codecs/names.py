"""Which codecs there are, without what they are made of: that loads numpy and zstandard."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Family:
    """Codecs that differ in the width of the words they are made for."""

    against_base: bool
    widths: tuple[int, ...] = (1, 2, 4, 8)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "planes": Family(against_base=False),
        "xor": Family(against_base=True),
        "diff": Family(against_base=True),
        "step": Family(against_base=True, widths=(1, 2)),
        "sparse": Family(against_base=True),
    }
)
AGAINST_BASE: Mapping[str, bool] = MappingProxyType(
    {
        f"{name}{width}": family.against_base
        for name, family in FAMILIES.items()
        for width in family.widths
    }
)
"""Every name a record may have, and whether its base is needed."""
