"""Layers that checkpoints share as a whole: all tensors of a numbered layer, or of a module."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tensor_dedup.analyze.tensors import AnalyzedTensor, Measured
from tensor_dedup.formats.layers.layer_names import natural, split


@dataclass(frozen=True, slots=True)
class SharedLayer:
    """A layer that is equal in several checkpoints, with the same tensor names within the layer.

    Tensors that the analysis leaves out are not compared. `tensors` is the number of the others.
    `digest` identifies its content, whatever the layer is
    called. `places` are pairs of checkpoint path and layer name.
    """

    digest: str
    tensors: int
    nbytes: int
    places: tuple[tuple[str, str], ...]


def shared_layers(checkpoints: Sequence[Measured]) -> list[SharedLayer]:
    """Return the layers that at least two checkpoints have in common, largest first."""
    found: defaultdict[str, list[tuple[int, str, list[AnalyzedTensor]]]] = defaultdict(list)
    for number, checkpoint in enumerate(checkpoints):
        for layer, tensors in _layers(checkpoint).items():
            found[_digest(tensors)].append((number, layer, tensors))
    shared = [
        SharedLayer(
            digest,
            len(places[0][2]),
            sum(tensor.nbytes for tensor in places[0][2]),
            tuple((checkpoints[number].path, layer) for number, layer, _ in places),
        )
        for digest, places in found.items()
        if len({number for number, _, _ in places}) > 1
    ]
    return sorted(shared, key=lambda layer: (-layer.nbytes, natural(layer.places[0][1])))


def _layers(checkpoint: Measured) -> dict[str, list[AnalyzedTensor]]:
    layers: defaultdict[str, list[AnalyzedTensor]] = defaultdict(list)
    for tensor in checkpoint.tensors:
        layers[split(tensor.name)[0]].append(tensor)
    return layers


def _digest(tensors: Sequence[AnalyzedTensor]) -> str:
    known = hashlib.blake2b(digest_size=32)
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        same = tensor.fingerprint
        known.update(repr((split(tensor.name)[1], same.dtype, same.shape, same.digest)).encode())
    return known.hexdigest()
