"""What each checkpoint adds when checkpoints are loaded one after another."""

from collections.abc import Sequence
from dataclasses import dataclass

from tensor_dedup.analyze.natural import natural
from tensor_dedup.analyze.tensors import AnalyzedTensor, Measured
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
    """

    own: tuple[AnalyzedTensor, ...]
    layers: tuple[LayerShare, ...]

    @property
    def adds_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.own)


def contributions(checkpoints: Sequence[Measured]) -> list[Contribution]:
    """Return what each checkpoint adds, in this order."""
    held: set[str] = set()
    return [_contribution(checkpoint, held) for checkpoint in checkpoints]


def _contribution(checkpoint: Measured, held: set[str]) -> Contribution:
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
    return Contribution(tuple(own), tuple(sorted(layers, key=lambda each: natural(each.name))))
