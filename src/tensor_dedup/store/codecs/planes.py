"""The codecs `planes`, `xor` and `diff`: compressed byte planes of a tensor's elements.

Plane n has byte n of every element. `planes` encodes the elements themselves; `xor` and `diff`
encode their difference from a base.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tensor_dedup.store.codecs.interface import Effort
from tensor_dedup.store.codecs.streams import Reader, fold, join, pack, split, unfold, words

Against = Literal["nothing", "xor", "difference"]


@dataclass(frozen=True, slots=True)
class Planes:
    """The codecs `planes`, `xor` and `diff`; their names end in the element size in bytes.

    `planes` stores the elements themselves. `xor` stores their XOR with a base, and `diff` their
    difference from the base as integers. For a fine-tune in bf16, `diff` takes 11.9 % and `xor`
    13.6 % of the unencoded size.
    """

    name: str
    width: int
    against: Against

    @property
    def against_base(self) -> bool:
        # docstring inherited
        return self.against != "nothing"

    def encode(self, data: memoryview, base: memoryview | None, effort: Effort) -> bytes:
        # docstring inherited
        values, rest = words(data, self.width)
        if base is not None and self.against == "xor":
            values = values ^ words(base, self.width)[0]
        elif base is not None and self.against == "difference":
            values = fold(values - words(base, self.width)[0])
        return pack([*split(values), rest], effort)

    def decode(self, blob: memoryview, base: memoryview | None, out: memoryview) -> None:
        # docstring inherited
        values, rest = words(out, self.width)
        reader = Reader(blob, self.name)
        planes = [reader.take(len(values)) for _ in range(self.width)]
        rest[:] = reader.take(len(rest))
        reader.end()
        join(planes, values)
        if base is None or self.against == "nothing":
            return
        under = words(base, self.width)[0]
        if self.against == "xor":
            np.bitwise_xor(values, under, out=values)
        else:
            unfold(values)
            np.add(values, under, out=values)
