"""The codecs `step1` and `step2`: differences from a base, one byte for each element.

They suit fine-tunes in 16 bits or fewer, where most changed weights move by a few units in the last
place. Differences that do not fit a signed byte are stored in full, after the others. A fine-tune
of MiniLM in bf16 takes 11.7 % of its size in this form, and 11.9 % with the codec `diff`.
"""

from dataclasses import dataclass

import numpy as np

from tensor_dedup.store.codecs.interface import Effort
from tensor_dedup.store.codecs.sparse import read_places, streams_of
from tensor_dedup.store.codecs.streams import SIGNED, Reader, join, pack, split, words

_BLOCK = 256 << 10  # elements: what two passes find in a processor's cache


@dataclass(frozen=True, slots=True)
class ByteDelta:
    """The codecs `step1` and `step2`, which store differences from a base as signed bytes.

    The base is the tensor that the encoded one is compared with.
    """

    name: str
    width: int
    against_base: bool = True

    def encode(self, data: memoryview, base: memoryview | None, effort: Effort) -> bytes:
        # docstring inherited
        values, rest = words(data, self.width)
        if base is not None:
            values = values - words(base, self.width)[0]
        signed = values.view(SIGNED[self.width])
        steps = signed.astype(np.int8)
        far = np.flatnonzero(steps != signed)
        steps[far] = 0
        return pack([steps.view(np.uint8), *streams_of(far), *split(values[far]), rest], effort)

    def decode(self, blob: memoryview, base: memoryview | None, out: memoryview) -> None:
        # docstring inherited
        values, rest = words(out, self.width)
        under = words(base, self.width)[0] if base is not None else np.zeros_like(values)
        reader = Reader(blob, self.name)
        steps = reader.take(len(values)).view(np.int8)
        far = read_places(reader, len(values))
        differences = np.empty(len(far), values.dtype)
        join([reader.take(len(far)) for _ in range(self.width)], differences)
        rest[:] = reader.take(len(rest))
        reader.end()
        signed = values.view(SIGNED[self.width])
        for at in range(0, len(values), _BLOCK):
            signed[at : at + _BLOCK] = steps[at : at + _BLOCK]
            sums = values[at : at + _BLOCK]
            np.add(sums, under[at : at + _BLOCK], out=sums)
        values[far] = under[far] + differences
