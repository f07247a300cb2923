"""The codec objects, and the choice of the codec that makes samples of a tensor smallest.

A codec is chosen only if it saves a tenth of the bytes; otherwise the tensor is stored unencoded.
Importing this module loads numpy and zstandard. `interface` knows the names of all codecs and loads
neither.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from tensor_dedup.store.codecs.interface import FAMILIES, WORTH, Codec, Effort
from tensor_dedup.store.codecs.planes import Planes
from tensor_dedup.store.codecs.sparse import Sparse
from tensor_dedup.store.codecs.steps import SmallSteps
from tensor_dedup.store.codecs.streams import words

SAMPLE_BYTES = 128 << 10
_SAMPLES = 3
_MATCHES_COST = 1.03
# Where no more elements than the first share differ, `sparse` is the smallest and by far the
# quickest. What a chunk takes beside its elements hides that: it is a third of a sample of 32 KiB,
# and nothing in a leaf. Where more than the second share differ, `sparse` takes three times as long
# to decode as others that are as small.
_FEW, _MANY = 1 / 32, 1 / 4
_AGAINST = ("nibble", "step", "xor", "diff")
_MAKERS: Mapping[str, Callable[[str, int], Codec]] = {
    "planes": lambda name, width: Planes(name, width, "nothing"),
    "xor": lambda name, width: Planes(name, width, "xor"),
    "diff": lambda name, width: Planes(name, width, "difference"),
    "nibble": lambda name, width: SmallSteps(name, width, 4),
    "step": lambda name, width: SmallSteps(name, width, 8),
    "sparse": Sparse,
}
CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        f"{name}{width}": _MAKERS[name](f"{name}{width}", width)
        for name, family in FAMILIES.items()
        for width in family.widths
    }
)


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of a tensor's bytes, for choosing a codec.

    `base` has the bytes at the same place in another tensor, for codecs that store differences. It
    is None if there is no such tensor.
    """

    data: memoryview
    base: memoryview | None = None


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """A chosen codec, its compression effort, and the size it achieved on the samples.

    `share` is the encoded size of the samples divided by their original size.
    """

    codec: Codec
    effort: Effort
    share: float


def places(nbytes: int, width: int) -> list[tuple[int, int]]:
    """Return the (start, stop) byte ranges to sample: at the start, the middle and the end.

    `nbytes` is the size of the tensor. Each range starts at a multiple of `width`, the size of an
    element in bytes.
    """
    size = min(SAMPLE_BYTES, nbytes)
    step = (nbytes - size) // (_SAMPLES - 1)
    starts = sorted({step * n // width * width for n in range(_SAMPLES)})
    return [(start, start + size) for start in starts]


def choose(samples: Sequence[Sample], width: int) -> CodecChoice | None:
    """Return the best codec for elements of `width` bytes, or None if no codec saves a tenth.

    Codecs that store differences are tried only if every sample has a `base`. Without samples, the
    result is None.
    """
    total = sum(sample.data.nbytes for sample in samples)
    if not total:
        return None
    found = [
        CodecChoice(codec, effort, _size(codec, effort, samples) / total)
        for codec, effort in _candidates(width, samples)
    ]
    best = min(found, key=_cost)
    return best if best.share <= WORTH else None


def distance(sample: Sample) -> float:
    """Return the share of bits in which `sample` differs from its base, from 0.0 to 1.0.

    If the sample is empty or has no base, the result is 1.0.
    """
    if sample.base is None or not sample.data.nbytes:
        return 1.0
    differing = int.from_bytes(sample.data, "little") ^ int.from_bytes(sample.base, "little")
    return differing.bit_count() / (8 * sample.data.nbytes)


def _cost(choice: CodecChoice) -> float:
    """Return the share, with a surcharge for matches: searching them, and decoding, take longer."""
    return choice.share * (_MATCHES_COST if choice.effort == "matches" else 1)


def _candidates(width: int, samples: Sequence[Sample]) -> Iterator[tuple[Codec, Effort]]:
    """Yield the codecs to try, the quickest to decode first: it wins among equally small ones."""
    differing = _differing(samples, width)
    if differing is not None and differing <= _MANY:
        yield CODECS[f"sparse{width}"], "entropy"
        if differing <= _FEW:
            return
    families = () if differing is None else _AGAINST
    for name in [*(f"{family}{width}" for family in families), f"planes{width}"]:
        if name in CODECS:
            yield CODECS[name], "entropy"
    for name in sorted({f"planes{width}", "planes1"}, reverse=True):
        yield CODECS[name], "matches"


def _differing(samples: Sequence[Sample], width: int) -> float | None:
    """The share of elements that differ from their bases, or None if a sample has no base."""
    count = differing = 0
    for sample in samples:
        if sample.base is None:
            return None
        (values, _), (under, _) = words(sample.data, width), words(sample.base, width)
        count += len(values)
        differing += int(np.count_nonzero(values != under))
    return differing / max(count, 1)


def _size(codec: Codec, effort: Effort, samples: Sequence[Sample]) -> int:
    return sum(
        len(codec.encode(sample.data, sample.base if codec.against_base else None, effort))
        for sample in samples
    )
