"""The codecs of a store: bytes in, fewer bytes out, and the same bytes again.

    interface   what a codec is; contract.py has the tests that every one must pass
    streams     compressed byte streams with bounds        elements    words and their planes
    planes      planes: alone, of XOR, of differences      steps       small differences
    sparse      few differences                            records     a tensor, chunk by chunk
    choosing    which codec a tensor gets, by measurement on samples

Nothing here touches files, knows dtypes or trusts what it decodes: whoever reads a tensor compares
its bytes with its digest.
"""

from collections.abc import Mapping
from types import MappingProxyType

from tensor_dedup.store.codecs.interface import CHUNK_BYTES, Codec
from tensor_dedup.store.codecs.planes import Planes
from tensor_dedup.store.codecs.sparse import Sparse
from tensor_dedup.store.codecs.steps import Steps
from tensor_dedup.store.codecs.streams import Effort

__all__ = ["CHUNK_BYTES", "CODECS", "Codec", "Effort"]

_WIDTHS = (1, 2, 4, 8)
_ALL: tuple[Codec, ...] = (
    *(Planes(f"planes{width}", width, "nothing") for width in _WIDTHS),
    *(Planes(f"xor{width}", width, "xor") for width in _WIDTHS),
    *(Planes(f"diff{width}", width, "difference") for width in _WIDTHS),
    *(Steps(f"step{width}", width) for width in (1, 2)),
    *(Sparse(f"sparse{width}", width) for width in _WIDTHS),
)
CODECS: Mapping[str, Codec] = MappingProxyType({codec.name: codec for codec in _ALL})
