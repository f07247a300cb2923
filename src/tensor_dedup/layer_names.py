"""The layers of a model by the names of its tensors, and how a user says which ones."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Final

from tensor_dedup.errors import ConfigError

_WITHIN: Final = re.compile(r"^(.*?\.\d+)\.(.+)$")
_BLOCK: Final = re.compile(r"(?:(?P<stack>.*)\.)?(?P<number>\d+)")
_NUMBERS: Final = re.compile(r"(?:(?P<stack>.+)\.)?(?P<first>\d+)(?:-(?P<last>\d+))?")
# What wraps the modules of one model and not of another with the same weights.
_WRAPPER: Final = re.compile(r"^(?:(?:model|module|transformer)\.)+(?=.)")
_SHOWN: Final = 4

# The names of tensors, by layer.
Names = Mapping[str, Sequence[str]]


def split(name: str) -> tuple[str, str]:
    """Return a tensor's layer and its name within: `model.layers.7` and `mlp.up_proj.weight`.

    Outside numbered blocks a layer is a module: `lm_head` and `weight`.
    """
    block = _WITHIN.match(name)
    if block:
        return block[1], block[2]
    module, dot, last = name.rpartition(".")
    return (module, last) if dot else (name, "")


def unwrapped(name: str) -> str:
    """Return a tensor's name without the names of modules that only wrap the model."""
    component, slash, rest = name.rpartition("/")
    return component + slash + _WRAPPER.sub("", rest)


def by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of tensors by their layers."""
    found = defaultdict[str, list[str]](list)
    for name in names:
        found[split(name)[0]].append(name)
    return dict(found)


def meant(layers: Names, spec: str) -> dict[str, set[str]]:
    """Return the tensors that `spec` means, by their layers.

    `spec` is a list with commas of numbers and ranges of blocks (`0-7,12`, `encoder.layers.0-3`)
    and of patterns of names (`*embed*`, `*.mlp.*`). A pattern that fits a layer's name takes the
    whole layer, else the tensors whose names it fits. Nothing means nothing.

    Raises:
        ConfigError: a part of it fits nothing, or could mean several stacks of blocks.
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
        near = get_close_matches(part, list(layers), 1)
        some = ", ".join([*layers][:_SHOWN])
        advice = f"did you mean {near[0]!r}?" if near else f"there are {some}"
        raise ConfigError(f"no layer and no tensor is called {part!r}; {advice}", layers=part)
    return found


def _blocks(layers: Names, part: str, stack: str | None, first: int, last: int) -> list[str]:
    stacks = defaultdict[str, dict[int, str]](dict)
    for name in layers:
        block = _BLOCK.fullmatch(name)
        if block is not None:
            stacks[block["stack"] or ""][int(block["number"])] = name
    if stack is None:
        if len(stacks) > 1:
            some = ", ".join(f"{name}.{part}" for name in sorted(stacks))
            what = f"{part!r} could mean blocks of {len(stacks)} stacks; say which: {some}"
            raise ConfigError(what, layers=part)
        stack = next(iter(stacks), "")
    blocks = stacks.get(stack, {})
    if first > last or any(number not in blocks for number in range(first, last + 1)):
        have = _numbers(blocks)
        where = f" in {stack}" if stack else ""
        what = f"{part!r} does not fit: there are {have}{where}; give others"
        raise ConfigError(what, layers=part)
    return [blocks[number] for number in range(first, last + 1)]


def _numbers(blocks: Mapping[int, str]) -> str:
    if not blocks:
        return "no numbered blocks"
    first, last = min(blocks), max(blocks)
    if len(blocks) == last + 1 - first:
        return f"numbers {first} to {last}"
    return f"numbers {', '.join(map(str, sorted(blocks)))}"  # others have no tensors
