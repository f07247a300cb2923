"""What each checkpoint adds when checkpoints are loaded one after another."""

from collections.abc import Sequence
from dataclasses import dataclass

from tensor_dedup.analyze.natural import natural
from tensor_dedup.analyze.tensors import AnalyzedTensor, Measured
from tensor_dedup.digest import leaf_places
from tensor_dedup.layer_names import split


@dataclass(frozen=True, slots=True)
class LayerShare:
    """A layer of a checkpoint: its size in bytes, and how much of it is there already.

    That is content of the checkpoints before, or of an earlier tensor of the same one.
    """

    name: str
    nbytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a checkpoint adds to those before it.

    `own` are the tensors whose bytes none of those have, each content once; `adds_bytes` is their
    size, so that all checkpoints together add the distinct bytes. `layers` are in natural order.
    `leaf_shared_bytes` are the leaves (2 MiB) of `own` that a tensor of a checkpoint before has at
    the same offset, so far as leaves are known.
    """

    own: tuple[AnalyzedTensor, ...]
    layers: tuple[LayerShare, ...]
    leaf_shared_bytes: int = 0

    @property
    def adds_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.own)


def contributions(checkpoints: Sequence[Measured]) -> list[Contribution]:
    """Return what each checkpoint adds, in this order."""
    held: set[str] = set()
    leaves: set[tuple[int, str]] = set()
    found = []
    for checkpoint in checkpoints:
        found.append(_contribution(checkpoint, held, leaves))
        for tensor in checkpoint.tensors:
            leaves |= set(enumerate(tensor.leaves))
    return found


def _contribution(
    checkpoint: Measured, held: set[str], leaves: set[tuple[int, str]]
) -> Contribution:
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
        for leaf, (_, nbytes) in zip(
            enumerate(tensor.leaves), leaf_places(0, tensor.nbytes), strict=False
        )
        if leaf in leaves
    )
    return Contribution(
        tuple(own), tuple(sorted(layers, key=lambda each: natural(each.name))), by_leaf
    )
