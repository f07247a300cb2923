"""The layers of a fine-tune beside those of its base, and which of them the base's can replace."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.layer_names import meant, split, unwrapped
from tensor_dedup.natural import natural

_SHOWN: Final = 4


class NamedTensor(Protocol):
    """A tensor of a checkpoint by its name, type and shape; `nbytes` is its size in the file."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


_T = TypeVar("_T", bound=NamedTensor)


@dataclass(frozen=True, slots=True)
class Layer(Generic[_T]):
    """A layer of a fine-tune, or some of its tensors, and what stands for them in the base.

    `found` are tensors of the fine-tune, each with its counterpart in the base or None; `left` are
    the names of those in the base's layer for which the fine-tune has nothing.
    """

    name: str
    found: tuple[tuple[_T, _T | None], ...]
    left: tuple[str, ...] = ()

    @property
    def pairs(self) -> tuple[tuple[_T, _T], ...]:
        return tuple((tensor, old) for tensor, old in self.found if old is not None)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor, _ in self.found)

    @property
    def obstacle(self) -> str | None:
        """Why the base's tensors cannot stand here, or None."""
        alone = [tensor.name for tensor, old in self.found if old is None]
        if alone:
            return f"the base has no {_listed(alone)}"
        if self.left:
            return f"the fine-tune has no {_listed(self.left)}, which this layer of the base has"
        for tensor, old in self.pairs:
            if (old.dtype, old.shape) != (tensor.dtype, tensor.shape):
                was, now = f"{old.dtype} {[*old.shape]}", f"{tensor.dtype} {[*tensor.shape]}"
                return f"{tensor.name} is {was} in the base and {now} in the fine-tune"
        return None

    def part(self, names: Collection[str]) -> "Layer[_T]":
        """Return only these tensors of it; of all of them, the layer itself."""
        kept = tuple(pair for pair in self.found if pair[0].name in names)
        return self if len(kept) == len(self.found) else Layer(self.name, kept)


def layers_of(tune: Sequence[_T], base: Sequence[_T]) -> dict[str, Layer[_T]]:
    """Return the layers of a fine-tune by name, in natural order.

    Tensors belong together by name; names of modules that only wrap the model do not count.
    """
    there = {tensor.name: tensor for tensor in base}
    names = [unwrapped(tensor.name) for tensor in tune], [unwrapped(name) for name in there]
    wrappers = {_wrapper(*names), _wrapper(*reversed(names))}

    def plain_name(name: str) -> str:
        first, _, rest = unwrapped(name).partition(".")
        return rest if first in wrappers else unwrapped(name)

    plain = {plain_name(tensor.name): tensor for tensor in base}
    layers = defaultdict[str, list[tuple[_T, _T | None]]](list)
    taken: set[str] = set()
    for tensor in tune:
        old = there.get(tensor.name) or plain.get(plain_name(tensor.name))
        layers[split(tensor.name)[0]].append((tensor, old))
        if old is not None:
            taken.add(old.name)
    left = defaultdict[str, list[str]](list)
    for tensor in base:
        if tensor.name not in taken:
            left[split(plain_name(tensor.name))[0]].append(tensor.name)
    return {
        name: Layer(name, tuple(layers[name]), tuple(left.get(plain_name(name), ())))
        for name in sorted(layers, key=natural)
    }


def _wrapper(names: Sequence[str], others: Sequence[str]) -> str | None:
    """Return the module that holds, in `names`, what stands by itself in `others`, if it is one.

    `bert` of BertForSequenceClassification beside BertModel, whatever transformers calls it.
    """
    known, theirs = set(others), {name.partition(".")[0] for name in others}
    parts = (name.partition(".") for name in names)
    found = {first for first, _, rest in parts if first not in theirs and rest in known}
    return found.pop() if len(found) == 1 else None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def chosen(layers: Mapping[str, Layer[_T]], spec: str) -> list[Layer[_T]]:
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
