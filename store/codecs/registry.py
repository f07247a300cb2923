"""The codecs themselves."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tensor_dedup.store.codecs.byte_delta import ByteDelta
from tensor_dedup.store.codecs.interface import Codec
from tensor_dedup.store.codecs.names import FAMILIES
from tensor_dedup.store.codecs.planes import Planes
from tensor_dedup.store.codecs.sparse import Sparse

_MAKERS: Mapping[str, Callable[[str, int], Codec]] = {
    "planes": lambda name, width: Planes(name, width, "nothing"),
    "xor": lambda name, width: Planes(name, width, "xor"),
    "diff": lambda name, width: Planes(name, width, "difference"),
    "step": ByteDelta,
    "sparse": Sparse,
}
CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        f"{name}{width}": _MAKERS[name](f"{name}{width}", width)
        for name, family in FAMILIES.items()
        for width in family.widths
    }
)
