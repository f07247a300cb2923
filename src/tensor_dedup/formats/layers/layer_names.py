"""The layers of a model, found by tensor names, and the syntax in which users select layers.

A layer is a numbered part of the model (`model.layers.7`) or a module outside of these parts
(`lm_head`).
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

from tensor_dedup.errors import ConfigError
from tensor_dedup.suggestions import nearest

_WITHIN: Final = re.compile(r"^(.*?\.\d+)\.(.+)$")
_BLOCK: Final = re.compile(r"(?:(?P<stack>.*)\.)?(?P<number>\d{1,18})")
_NUMBERS: Final = re.compile(r"(?:(?P<stack>.+)\.)?(?P<first>\d{1,18})(?:-(?P<last>\d{1,18}))?")
# What wraps the modules of one model and not of another with the same weights.
_WRAPPER: Final = re.compile(r"^(?:(?:model|module|transformer)\.)+(?=.)")
_SHOWN: Final = 4
_DIGITS: Final = re.compile(r"(\d+)")

# The names of tensors, by layer.
Names = Mapping[str, Sequence[str]]


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key for `name` in natural order: layer 10 comes after layer 9."""
    return [_place(part) for part in _DIGITS.split(name)]


def _place(part: str) -> tuple[int, str]:
    if not part.isdecimal():
        return -1, part
    digits = part.lstrip("0")
    return len(digits), digits  # the longer number is greater; Python converts no very long ones


def split(name: str) -> tuple[str, str]:
    """Split a tensor's name into its layer and the name within the layer.

    `model.layers.7.mlp.up_proj.weight`, in a numbered layer, is split into `model.layers.7` and
    `mlp.up_proj.weight`. For other tensors the layer is the module: `lm_head.weight` is split into
    `lm_head` and `weight`. A name without a dot is a layer, and the name within it is "".
    """
    block = _WITHIN.match(name)
    if block:
        return block[1], block[2]
    module, dot, last = name.rpartition(".")
    return (module, last) if dot else (name, "")


def unwrapped(name: str) -> str:
    """Return a tensor's name without leading wrapper modules such as `model.` and `module.`."""
    component, slash, rest = name.rpartition("/")
    return component + slash + _WRAPPER.sub("", rest)


def by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """Return a dict that maps each layer to those of `names` that belong to it."""
    found = defaultdict[str, list[str]](list)
    for name in names:
        found[split(name)[0]].append(name)
    return dict(found)


def meant(layers: Names, spec: str) -> dict[str, set[str]]:
    """Return the names of the tensors that `spec` selects, by layer.

    `layers` maps all layers of the model to the names of their tensors. `spec` is a comma-separated
    list of layer numbers and ranges (`0-7,12`, `encoder.layers.0-3`) and of name patterns
    (`*embed*`, `*.mlp.*`). If a pattern matches a layer's name, the whole layer is selected. In all
    other layers, the tensors whose names match are selected. An empty `spec` selects nothing.

    Raises:
        ConfigError: A pattern matches nothing, a numbered layer does not exist, or a number is
            ambiguous because the model has several stacks of layers, such as an encoder and a
            decoder.
    """
    found = defaultdict[str, set[str]](set)
    for part in (each.strip() for each in spec.split(",")):
        for name, tensors in _meant(layers, part).items() if part else ():
            found[name].update(tensors)
    return dict(found)


def _meant(layers: Names, part: str) -> Names:
    numbers = _NUMBERS.fullmatch(part)
    if numbers is not None:
        first, last = int(numbers["first"]), int(numbers["last"] or numbers["first"])
        return {name: layers[name] for name in _blocks(layers, part, numbers["stack"], first, last)}
    found = {
        name: tensors if fnmatchcase(name, part) else [t for t in tensors if fnmatchcase(t, part)]
        for name, tensors in layers.items()
    }
    found = {name: tensors for name, tensors in found.items() if tensors}
    if not found:
        near = nearest(part, layers, most=1)
        some = ", ".join([*layers][:_SHOWN])
        advice = f"did you mean {near[0]!r}?" if near else f"there are {some}"
        what = f"no tensor, and no layer that has tensors, is called {part!r}"
        raise ConfigError(f"{what}; {advice}", layers=part)
    return found


def _blocks(layers: Names, part: str, stack: str | None, first: int, last: int) -> list[str]:
    stacks = defaultdict[str, dict[int, str]](dict)
    for name in layers:
        block = _BLOCK.fullmatch(name)
        if block is not None:
            stacks[block["stack"] or ""][int(block["number"])] = name
    prefix = f"{stack}." if stack is not None else ""
    if stack is None:
        if len(stacks) > 1:
            some = ", ".join(f"{name}.{part}" for name in sorted(stacks))
            what = f"{part!r} could mean blocks of {len(stacks)} stacks; say which: {some}"
            raise ConfigError(what, layers=part)
        stack = next(iter(stacks), "")
    blocks = stacks.get(stack, {})
    low, high = sorted((first, last))
    there = [number for number in sorted(blocks) if low <= number <= high]
    if first <= last and len(there) == last + 1 - first:
        return [blocks[number] for number in there]
    where = f" in {stack}" if stack else ""
    if not blocks:
        some = ", ".join([*layers][:_SHOWN])
        what = f"{part!r}: there are no numbered blocks{where}; give names of layers, as {some}"
        raise ConfigError(what, layers=part)
    if first > last:
        why = "it counts backwards"
    else:
        lacking = next(number for number in range(first, last + 1) if number not in blocks)
        name = f"{stack}.{lacking}" if stack else str(lacking)
        why = f"layer {name} has no tensors, or is not there"
    fitting = ",".join(prefix + each for each in _ranges(there))
    advice = f"write {fitting!r}" if fitting else "give some of these"
    have = ", ".join(_ranges(sorted(blocks)))
    raise ConfigError(f"{part!r}: {why}; there are {have}{where}: {advice}", layers=part)


def _ranges(numbers: Iterable[int]) -> list[str]:
    """Return ascending numbers as they are given in a list: `0-2` and `5`."""
    runs = list[list[int]]()
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
