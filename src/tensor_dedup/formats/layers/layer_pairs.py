"""The layers of a fine-tune paired with those of its base model, tensor by tensor.

A paired layer says whether the base's tensors can replace those of the fine-tune.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Final, Generic, Protocol, TypeVar

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.formats.layers.layer_names import meant, natural, split, unwrapped
from tensor_dedup.formats.layers.quantisation import (
    CodedTensor,
    decodes,
    groups,
    is_quantised,
    module_of,
)

_SHOWN: Final = 4


class NamedTensor(CodedTensor, Protocol):
    """A tensor of a checkpoint: name, dtype, shape, and its size in the file, `nbytes`."""

    @property
    def nbytes(self) -> int: ...


_T = TypeVar("_T", bound=NamedTensor)


@dataclass(frozen=True, slots=True)
class Layer(Generic[_T]):
    """A layer of a fine-tune, or some of its tensors, with the matching tensors of the base.

    * `found` pairs each tensor of the fine-tune with its counterpart in the base, or with None if
      it has none.
    * `left` names the tensors of the base's layer that have no counterpart in the fine-tune.
    * If a tensor of the fine-tune could have several counterparts, `unclear` names these.
    * `quantised_otherwise` says how the quantisation settings of the two models differ. It is "" if
      they are equal or not known.
    """

    name: str
    found: tuple[tuple[_T, _T | None], ...]
    left: tuple[str, ...] = ()
    unclear: tuple[str, ...] = ()
    quantised_otherwise: str = ""

    @property
    def pairs(self) -> tuple[tuple[_T, _T], ...]:
        return tuple((tensor, old) for tensor, old in self.found if old is not None)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor, _ in self.found)

    @property
    def obstacle(self) -> str | None:
        """Why the base's tensors cannot replace those of the fine-tune, or None if they can."""
        alone = [tensor.name for tensor, old in self.found if old is None]
        if alone and self.unclear:
            could = " or ".join(self.unclear)
            return (
                f"the base has no {_listed(alone)}, and names do not decide whether {could} is it"
            )
        if alone:
            return f"the base has no {_listed(alone)}"
        if self.left:
            return f"the fine-tune has no {_listed(self.left)}, which this layer of the base has"
        for tensor, old in self.pairs:
            if self.quantised_otherwise and is_quantised(tensor):
                return f"base and fine-tune are quantised with {self.quantised_otherwise}"
            if (old.dtype, old.shape) != (tensor.dtype, tensor.shape):
                was, now = f"{old.dtype} {[*old.shape]}", f"{tensor.dtype} {[*tensor.shape]}"
                return f"{tensor.name} is {was} in the base and {now} in the fine-tune"
        return None

    def part(self, names: Collection[str]) -> "Layer[_T]":
        """Return a layer with only those tensors of the fine-tune whose names are in `names`."""
        kept = tuple(pair for pair in self.found if pair[0].name in names)
        if len(kept) == len(self.found):
            return self
        coded = {module_of(old.name) for tensor, old in kept if old and is_quantised(tensor)}
        left = tuple(name for name in self.left if any(decodes(name, each) for each in coded))
        return replace(self, found=kept, left=left)


def layers_of(
    tune: Sequence[_T], base: Sequence[_T], quantised_otherwise: str = ""
) -> dict[str, Layer[_T]]:
    """Return the layers of a fine-tune by name, in natural order, paired with those of its base.

    `tune` and `base` are the tensors of the two models. `quantised_otherwise` says how their
    quantisation settings differ, as `quantisation.difference` does.

    Tensors with equal names are counterparts. The names may also differ in a wrapper module at
    their beginning, such as `module.` or `bert.`. No tensor of the base is the counterpart of two
    tensors of the fine-tune.
    """
    there = {tensor.name: tensor for tensor in base}
    names, unclear = _counterparts([tensor.name for tensor in tune], list(there))
    layers = defaultdict[str, list[tuple[_T, _T | None]]](list)
    homes = defaultdict[str, set[str]](set)
    for tensor in tune:
        layer, old = split(tensor.name)[0], names.get(tensor.name)
        layers[layer].append((tensor, None if old is None else there[old]))
        if old is not None:
            homes[layer].add(split(old)[0])
    left = defaultdict[str, list[str]](list)
    for name in there.keys() - set(names.values()):
        left[split(name)[0]].append(name)
    return {
        name: Layer(
            name,
            tuple(layers[name]),
            tuple(sorted(chain.from_iterable(left[home] for home in homes[name]), key=natural)),
            next((unclear[t.name] for t, _ in layers[name] if t.name in unclear), ()),
            quantised_otherwise,
        )
        for name in sorted(layers, key=natural)
    }


def _counterparts(
    tune: Sequence[str], base: Sequence[str]
) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Return what names of a fine-tune are in the base, and those that could be several there.

    Each component of a pipeline (`unet/...`) is a model of its own.
    """
    found, unclear = dict[str, str](), dict[str, tuple[str, ...]]()
    ours, theirs = _by_component(tune), _by_component(base)
    for component in ours.keys() & theirs.keys():
        same, several = _renamed(ours[component], theirs[component])
        found |= {component + name: component + old for name, old in same.items()}
        unclear |= {
            component + name: tuple(component + each for each in some)
            for name, some in several.items()
        }
    return found, unclear


def _by_component(names: Iterable[str]) -> dict[str, list[str]]:
    found = defaultdict[str, list[str]](list)
    for name in names:
        component, slash, rest = name.rpartition("/")
        found[component + slash].append(rest)
    return found


def _renamed(
    tune: Sequence[str], base: Sequence[str]
) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Return the counterparts within one model: equal names, and those that one renaming relates.

    A renaming replaces one beginning of names by another. It counts only as a whole: one that
    leads anywhere to a tensor whose own name is in both models relates two different stacks, and
    of two that lead from or to the same tensor nothing says which is meant.
    """
    theirs = set(base)
    same = {name: name for name in tune if name in theirs}
    if len(same) == len(tune):
        return same, {}
    renamings = [
        pairs
        for pairs in _renamings(tune, base)
        if not any(name in same or old in same for name, old in pairs.items())
    ]
    best = max(renamings, key=len, default={})
    others = [each for each in renamings if each is not best]
    aims = {*best.values()}
    rivals = [
        each for each in others if not each.keys().isdisjoint(best) or aims & {*each.values()}
    ]
    if not rivals:
        return same | best, {}
    several = defaultdict[str, list[str]](list)
    for each in (best, *rivals):
        for name, old in each.items():
            several[name].append(old)
    return same, {name: tuple(sorted(olds, key=natural)) for name, olds in several.items()}


def _renamings(tune: Sequence[str], base: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield the names that belong together if one outer module is removed, added or replaced.

    The module of one side may have any name, as `bert` of BertForSequenceClassification beside
    BertModel; on the other side there is none, or one that is known only to wrap.
    """
    for (new, ours), (old, theirs) in product(_within(tune).items(), _within(base).items()):
        # What ends alike is the renaming of what is before that, and of more names.
        alike = new.split(".")[-2:] == old.split(".")[-2:]
        if not alike and (_wraps(new) or _wraps(old)) and (rests := ours & theirs):
            yield {new + rest: old + rest for rest in rests}


def _within(names: Sequence[str]) -> dict[str, set[str]]:
    """Return the names within each module that may hold a whole model; "" is none."""
    found = {"": set(names)}
    for name in names:
        outer = name.removesuffix(unwrapped(name)).count(".")
        parts = name.split(".")
        for depth in range(1, min(outer + 1, len(parts) - 1) + 1):
            found.setdefault(".".join(parts[:depth]) + ".", set()).add(".".join(parts[depth:]))
    return found


def _wraps(outer: str) -> bool:
    return not unwrapped(f"{outer}x").removesuffix("x")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def chosen(layers: Mapping[str, Layer[_T]], spec: str) -> list[Layer[_T]]:
    """Return the layers that `spec` selects, in the order of `layers`.

    `tensor_dedup.formats.layers.layer_names.meant` describes the syntax of `spec`.

    Raises:
        ConfigError: A part of `spec` matches nothing, or is ambiguous.
        UnsupportedError: The base's tensors cannot replace those of a selected layer, or only a
            part of a quantised weight is selected, such as its codes without its scales.
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
    check_whole(layers, taken)
    return taken


def check_whole(layers: Mapping[str, Layer[_T]], taken: Iterable[Layer[_T]]) -> None:
    """Check that each quantised weight is in `taken` with all its scales, or not at all.

    `layers` are all layers of the fine-tune. `taken` are the layers, or parts of layers, that are
    to be replaced by those of the base.

    Raises:
        UnsupportedError: `taken` has a part of a quantised weight, such as its codes without its
            scales.
    """
    names = {tensor.name for layer in taken for tensor, _ in layer.found}
    for group in groups(tensor for layer in layers.values() for tensor, _ in layer.found):
        without = sorted(group - names, key=natural)
        if without and not group.isdisjoint(names):
            some = sorted(group & names, key=natural)
            raise UnsupportedError(
                f"{_listed(some)} cannot be taken from the base without {_listed(without)}: they "
                "are quantised together; choose all of them or none",
                tensors=tuple(some),
                without=tuple(without),
            )
