"""The memory that N variants of a model take: as they are, quantised, on a frozen base, shared.

The table is the one in the article "Tensor Deduplication for Multi-Model Inference" (section Frozen
Base Substitution), with the user's own checkpoints in place of a model of 7B.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tensor_dedup.analyze.tensors import Measured
from tensor_dedup.dtypes import BITS
from tensor_dedup.errors import ConfigError

# The article's share of a model that each variant has for itself, on one frozen base.
HEAD: Final = 0.1
# INT4 as GPTQ and AWQ write it: a scale of 16 bits for each 128 weights. INT8: one for each row.
_GROUP: Final = 128
_SCALE_BYTES: Final = 2
# Of what has eight bits already, INT8 is itself and INT4 the half. Of U8 nothing says whether there
# are two numbers in a byte, and I32 is packed, or counts.
_NUMBERS: Final = frozenset(
    {"F64", "F32", "F16", "BF16", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A row of the table: a way to keep the variants in memory, and the size of their weights.

    `measured` is True if the size follows from the bytes of these checkpoints. If False, the size
    follows from their shapes or from an assumption in the article. `answers` says how the outputs
    change.
    """

    approach: str
    nbytes: int
    measured: bool
    answers: str

    def to_dict(self) -> dict[str, object]:
        """Return the row as a JSON object."""
        return {
            "approach": self.approach,
            "bytes": self.nbytes,
            "measured": self.measured,
            "answers": self.answers,
        }


def variants(checkpoints: Sequence[Measured], count: int) -> list[Variant]:
    """Estimate the size of `count` variants of a model, for several ways to hold them. No I/O.

    Returns one row for each way, for example unquantised, quantised, or shared. The first
    checkpoint is the base. The others are examples of variants, and their average size is the size
    of each of the `count` variants. If there is only a base, its own size is used, and the row
    about sharing is left out.

    Quantised sizes are lower bounds, because all matrices count as quantised, embeddings included.
    Weights that are packed already keep their size.

    Raises:
        ConfigError: `count` is below 1.
    """
    if count < 1:
        raise ConfigError(f"variants are {count}; give 1 or more", value=count)
    base, *others = checkpoints
    examples = others or [base]

    def each(size: int) -> int:
        return round(count * size / len(examples))

    rows = [
        Variant(
            f"{count} independent models", each(sum(c.nbytes for c in examples)), True, "unchanged"
        ),
        *(
            Variant(f"INT{bits}", each(sum(_quantised(c, bits) for c in examples)), False, answers)
            for bits, answers in ((8, "approximate"), (4, "approximate, more so"))
        ),
        Variant(
            f"1 frozen base + {count} heads ({HEAD:.0%})",
            base.nbytes + each(round(HEAD * sum(c.nbytes for c in examples))),
            False,
            "changed, by layers of the base",
        ),
    ]
    if others:
        held = {tensor.fingerprint.digest for tensor in base.tensors}
        own = sum(
            nbytes
            for variant in others
            for digest, nbytes in {t.fingerprint.digest: t.nbytes for t in variant.tensors}.items()
            if digest not in held
        )
        distinct = sum({t.fingerprint.digest: t.nbytes for t in base.tensors}.values())
        rows.append(
            Variant("exact sharing, beside the base", distinct + each(own), True, "unchanged")
        )
    return rows


def _quantised(checkpoint: Measured, bits: int) -> int:
    total = 0
    for tensor in checkpoint.tensors:
        if tensor.dtype not in _NUMBERS or len(tensor.shape) < 2 or BITS[tensor.dtype] <= bits:
            total += tensor.nbytes
            continue
        rows, width = math.prod(tensor.shape[:-1]), tensor.shape[-1]
        scales = rows if bits == 8 else rows * math.ceil(width / _GROUP)
        total += math.ceil(rows * width * bits / 8) + scales * _SCALE_BYTES
    return total
