"""What each checkpoint adds when checkpoints are loaded one after another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from tensor_dedup.analyze.tensors import AnalyzedTensor, Measured
from tensor_dedup.digest import LEAF_BYTES, leaf_places
from tensor_dedup.formats.layers.layer_names import natural, split

# That of the loader, whose module needs torch: smaller tensors are shared whole or not at all.
LEAF_SHARED_FROM: Final = 4 * LEAF_BYTES
# A leaf by its place and digest, and what a load looks at before it compares: dtype, shape of rows.
_Leaf: TypeAlias = tuple[str, tuple[int, ...], int, str]


@dataclass(frozen=True, slots=True)
class LayerShare:
    """A layer of a checkpoint: its size, and the size of its shared tensors, in bytes.

    A tensor is shared if an earlier checkpoint, or an earlier tensor of the same checkpoint, has
    the same bytes.
    """

    name: str
    nbytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a checkpoint adds to the checkpoints before it.

    `own` are the tensors whose bytes no earlier checkpoint has; of equal tensors, only the first is
    listed. `adds_bytes` is their size. `layers` are in natural order.

    `leaf_shared_bytes` is the part of `adds_bytes` in leaves (2 MiB) that an earlier checkpoint has
    at the same offset, in a tensor of equal dtype and row shape. Only leaves with known digests, in
    tensors of 8 MiB and more, are counted.
    """

    own: tuple[AnalyzedTensor, ...]
    layers: tuple[LayerShare, ...]
    leaf_shared_bytes: int = 0

    @property
    def adds_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.own)


def contributions(checkpoints: Sequence[Measured]) -> list[Contribution]:
    """Return what each checkpoint adds when `checkpoints` are loaded in this order."""
    held: set[str] = set()
    leaves: set[_Leaf] = set()
    found = []
    for checkpoint in checkpoints:
        found.append(_contribution(checkpoint, held, leaves))
        for tensor in checkpoint.tensors:
            leaves.update(_leaves(tensor))
    return found


def _leaves(tensor: AnalyzedTensor) -> list[_Leaf]:
    if tensor.nbytes < LEAF_SHARED_FROM:
        return []
    return [(tensor.dtype, tensor.shape[1:], *leaf) for leaf in enumerate(tensor.leaves)]


def _contribution(checkpoint: Measured, held: set[str], leaves: set[_Leaf]) -> Contribution:
    own, sizes, shared = [], dict[str, int](), dict[str, int]()
    for tensor in checkpoint.tensors:
        layer = split(tensor.name)[0]
        sizes[layer] = sizes.get(layer, 0) + tensor.nbytes
        if tensor.fingerprint.digest in held:
            shared[layer] = shared.get(layer, 0) + tensor.nbytes
        else:
            held.add(tensor.fingerprint.digest)
            own.append(tensor)
    layers = (LayerShare(name, sizes[name], shared.get(name, 0)) for name in sizes)
    by_leaf = sum(
        nbytes
        for tensor in own
        for leaf, (_, nbytes) in zip(_leaves(tensor), leaf_places(0, tensor.nbytes), strict=False)
        if leaf in leaves
    )
    return Contribution(
        tuple(own), tuple(sorted(layers, key=lambda each: natural(each.name))), by_leaf
    )
