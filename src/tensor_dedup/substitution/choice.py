"""Which layers of a fine-tune can be taken from its base, and which ones a user means."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tensor_dedup.analyze.natural import natural
from tensor_dedup.analyze.picture import unwrapped
from tensor_dedup.analyze.tensors import AnalyzedTensor
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.layer_names import meant, split

_SHOWN: Final = 4

Pair = tuple[AnalyzedTensor, AnalyzedTensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of a fine-tune, or some of its tensors, and what stands for them in the base.

    `found` are tensors of the fine-tune, each with its counterpart in the base or None; `left` are
    the names of those in the base's layer for which the fine-tune has nothing.
    """

    name: str
    found: tuple[tuple[AnalyzedTensor, AnalyzedTensor | None], ...]
    left: tuple[str, ...] = ()

    @property
    def pairs(self) -> tuple[Pair, ...]:
        return tuple((tensor, old) for tensor, old in self.found if old is not None)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor, _ in self.found)

    @property
    def differs(self) -> bool:
        """Whether any tensor of it has other bytes in the base."""
        return any(tensor.fingerprint != old.fingerprint for tensor, old in self.pairs)

    @property
    def obstacle(self) -> str | None:
        """Why the base's tensors cannot stand here, or None."""
        alone = [tensor.name for tensor, old in self.found if old is None]
        if alone:
            return f"the base has no {_listed(alone)}"
        if self.left:
            return f"the fine-tune has no {_listed(self.left)}, which this layer of the base has"
        for tensor, old in self.pairs:
            one, two = old.fingerprint, tensor.fingerprint
            if (one.dtype, one.shape) != (two.dtype, two.shape):
                was, now = f"{one.dtype} {[*one.shape]}", f"{two.dtype} {[*two.shape]}"
                return f"{tensor.name} is {was} in the base and {now} in the fine-tune"
        return None

    def part(self, names: Collection[str]) -> "Layer":
        """Return only these tensors of it; of all of them, the layer itself."""
        kept = tuple(pair for pair in self.found if pair[0].name in names)
        return self if len(kept) == len(self.found) else Layer(self.name, kept)


def layers_of(tune: Sequence[AnalyzedTensor], base: Sequence[AnalyzedTensor]) -> dict[str, Layer]:
    """Return the layers of a fine-tune by name, in natural order.

    Tensors belong together by name; names of modules that only wrap the model do not count.
    """
    there = {tensor.name: tensor for tensor in base}
    plain = {unwrapped(tensor.name): tensor for tensor in base}
    layers = defaultdict[str, list[tuple[AnalyzedTensor, AnalyzedTensor | None]]](list)
    taken: set[str] = set()
    for tensor in tune:
        old = there.get(tensor.name) or plain.get(unwrapped(tensor.name))
        layers[split(tensor.name)[0]].append((tensor, old))
        if old is not None:
            taken.add(old.name)
    left = defaultdict[str, list[str]](list)
    for tensor in base:
        if tensor.name not in taken:
            left[split(unwrapped(tensor.name))[0]].append(tensor.name)
    return {
        name: Layer(name, tuple(layers[name]), tuple(left.get(unwrapped(name), ())))
        for name in sorted(layers, key=natural)
    }


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def chosen(layers: Mapping[str, Layer], spec: str) -> list[Layer]:
    """Return the layers that `spec` means, in the order of `layers`.

    `tensor_dedup.layer_names.meant` has the grammar.

    Raises:
        ConfigError: a part of it means nothing here, or could mean several stacks of blocks.
        UnsupportedError: a chosen layer cannot be taken from the base; the message says why.
    """
    names = {name: [tensor.name for tensor, _ in layer.found] for name, layer in layers.items()}
    wanted = meant(names, spec)
    taken = [layer.part(wanted[name]) for name, layer in layers.items() if name in wanted]
    for layer in taken:
        if layer.obstacle is not None:
            raise UnsupportedError(
                f"layer {layer.name} cannot be taken from the base: {layer.obstacle}; leave it out",
                layer=layer.name,
                reason=layer.obstacle,
            )
    return taken
