"""Describes in words how a checkpoint differs from the most similar one before it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import eq, ne

from tensor_dedup.analyze.contributions import Contribution
from tensor_dedup.analyze.fusion import LostPart
from tensor_dedup.analyze.tensors import AnalyzedTensor, Measured
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.formats.hub_cache import name_parts
from tensor_dedup.formats.layers.layer_names import natural, split, unwrapped
from tensor_dedup.text_table import human

_KINDS_SHOWN = 3
_GROUPS_SHOWN = 2
# Of a layer or a checkpoint: more than this is all of it, whatever buffers stayed the same.
_WHOLE = 0.95
_MOST_DIGITS = 18  # of a layer's number


@dataclass(frozen=True, slots=True)
class Reasons:
    """Why a checkpoint adds bytes: how it differs from the most similar checkpoint before it.

    `changes` describes the differences in words. `nearest` is the position of the most similar
    checkpoint, or None for the first checkpoint. `full` is True if nearly all tensors have other
    bytes but the same names, shapes and dtypes. The checkpoint is then a full fine-tune or an
    unrelated model.
    """

    nearest: int | None
    changes: tuple[str, ...]
    full: bool = False


def reasons(
    checkpoints: Sequence[Measured],
    added: Sequence[Contribution],
    lost: Sequence[Sequence[LostPart]],
) -> list[Reasons]:
    """Return, for each checkpoint, how it differs from the most similar checkpoint before it.

    `added` comes from `contributions(checkpoints)`, and `lost` from `survives(checkpoints).lost`.
    """
    found = [Reasons(None, ())] if checkpoints else []
    for number in range(1, len(checkpoints)):
        nearest = _nearest(checkpoints[number], checkpoints[:number])
        one = _reasons(
            checkpoints[number], checkpoints[nearest], nearest, added[number], lost[number]
        )
        found.append(one)
    return found


def _nearest(checkpoint: Measured, before: Sequence[Measured]) -> int:
    """The one with most bytes in common, else with most names; of equal ones the first."""
    sizes = {tensor.fingerprint.digest: tensor.nbytes for tensor in checkpoint.tensors}
    names = {unwrapped(tensor.name) for tensor in checkpoint.tensors}

    def common(other: Measured) -> tuple[int, int]:
        digests = {tensor.fingerprint.digest for tensor in other.tensors}
        return (
            sum(size for digest, size in sizes.items() if digest in digests),
            len(names & {unwrapped(tensor.name) for tensor in other.tensors}),
        )

    ranks = [common(other) for other in before]
    return ranks.index(max(ranks))


def _reasons(
    checkpoint: Measured,
    other: Measured,
    nearest: int,
    added: Contribution,
    lost: Sequence[LostPart],
) -> Reasons:
    there = {unwrapped(tensor.name): tensor for tensor in other.tensors}
    own = added.own
    changed = [t for t in own if unwrapped(t.name) in there]
    alike = [t for t in changed if _form(t) == _form(there[unwrapped(t.name)])]
    whole = added.adds_bytes - added.leaf_shared_bytes >= _WHOLE * checkpoint.nbytes
    # Nothing is said of what was not compared, so no claim may include it.
    compared = "" if checkpoint.is_whole and other.is_whole else " that was compared"
    if not own:
        words = _equality(checkpoint, other, compared)
        return Reasons(nearest, (words, *_lost(lost)))
    if whole and len(changed) < len(own) / 2:
        return Reasons(nearest, (f"another model: no tensor{compared} is shared",))
    if whole and _size(alike) >= _WHOLE * checkpoint.nbytes:
        # Digests do not tell them apart.
        what = f"every tensor{compared} changed: fine-tuned in full, or unrelated"
        return Reasons(nearest, (what,), True)
    types = _types(changed, there)
    if whole and types:
        return Reasons(nearest, (types,))
    new = [t for t in own if unwrapped(t.name) not in there]
    resized = [t for t in changed if _form(t) != _form(there[unwrapped(t.name)])]
    found = [_resized(resized, there), _places("changed", alike, checkpoint)]
    found += [_places("added", new, checkpoint), *_lost(lost)]
    found.append(_by_leaf(added, there))
    return Reasons(nearest, tuple(filter(None, found)))


def _equality(checkpoint: Measured, other: Measured, compared: str) -> str:
    """How a checkpoint without tensors of its own relates to the most similar one."""
    name, count = other.name or name_shown(other.path), len(checkpoint.tensors)
    if _content(checkpoint) != _content(other):
        return f"all{compared or ' of it'} is there already"
    if not compared:
        return f"equals {name}"
    if not count:
        return "nothing of it was compared"
    compared = f"{count:,} tensors that were" if count > 1 else "tensor that was"
    return f"no difference from {name} in the {compared} compared"


def _by_leaf(added: Contribution, there: Mapping[str, AnalyzedTensor]) -> str:
    """What sharing by leaf leaves of the tensors that have leaves in common with others, and why.

    The reason is that of the tensors with leaves of their namesakes: rows, and leaves that differ.
    """
    if not added.leaf_shared_bytes:
        return ""
    rows, leaves = set[int](), 0
    for tensor in added.own:
        old = there.get(unwrapped(tensor.name))
        if old is None or not any(map(eq, tensor.leaves, old.leaves)):
            continue
        whole = min(tensor.nbytes, old.nbytes) // LEAF_BYTES
        leaves += sum(map(ne, tensor.leaves[:whole], old.leaves[:whole]))
        if tensor.nbytes == old.nbytes:
            leaves += tensor.leaves[whole:] != old.leaves[whole:]
        elif tensor.shape[1:] == old.shape[1:] and tensor.dtype == old.dtype:
            rows.add(tensor.shape[0] - old.shape[0])
    why = [
        f"{abs(n):,} {'new' if n > 0 else 'fewer'} row{'s' * (abs(n) > 1)}" for n in sorted(rows)
    ]
    if leaves:
        why.append(f"{leaves:,} changed lea{'ves' if leaves > 1 else 'f'}")
    rest = added.adds_bytes - added.leaf_shared_bytes
    text = f"shared by leaf: + {human(rest)} instead of {human(added.adds_bytes)}"
    return f"{text}: {', '.join(why)}" if why else text


def name_shown(path: str) -> str:
    """Return the name of a checkpoint for a sentence: the last of `hub_cache.name_parts`."""
    return name_parts(path)[-1]


def _content(checkpoint: Measured) -> Counter[str]:
    return Counter(tensor.fingerprint.digest for tensor in checkpoint.tensors)


def _form(tensor: AnalyzedTensor) -> tuple[tuple[int, ...], str]:
    return tensor.fingerprint.shape, tensor.fingerprint.dtype


def _size(tensors: Iterable[AnalyzedTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _types(changed: Iterable[AnalyzedTensor], there: Mapping[str, AnalyzedTensor]) -> str:
    """That most of it is of another dtype, or ""."""
    sizes = Counter[tuple[str, str]]()
    for tensor in changed:
        old = there[unwrapped(tensor.name)].fingerprint.dtype
        sizes[old, tensor.fingerprint.dtype] += tensor.nbytes
    ((old, new), _), *_ = sizes.most_common(1) or [(("", ""), 0)]
    return f"stored as {new} instead of {old}" if old != new else ""


def _resized(resized: Sequence[AnalyzedTensor], there: Mapping[str, AnalyzedTensor]) -> str:
    """The first tensor of another shape or dtype, and how many more; a longer first one in rows."""
    if not resized:
        return ""
    rows, others = dict[tuple[int, int], None](), []
    for tensor in sorted(resized, key=lambda each: -each.nbytes):
        old, new = there[unwrapped(tensor.name)].fingerprint, tensor.fingerprint
        if old.dtype == new.dtype and old.shape[1:] == new.shape[1:] and old.shape and new.shape:
            rows[old.shape[0], new.shape[0]] = None
        else:
            others.append(f"{_kind(tensor.name)} {_shape(old.shape)} -> {_shape(new.shape)}")
    vocabulary = any(map(_is_vocabulary, resized))
    found = [f"{'vocabulary ' if vocabulary else ''}{a} -> {b} rows" for a, b in rows] + others
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return found[0] + more


def _is_vocabulary(tensor: AnalyzedTensor) -> bool:
    return any(each in tensor.name for each in ("embed", "wte", "lm_head"))


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _places(verb: str, tensors: Sequence[AnalyzedTensor], checkpoint: Measured) -> str:
    """Where these tensors are: `changed: layers 3..5; q_proj, v_proj in layers 7..9; lm_head`."""
    if not tensors:
        return ""
    sizes = Counter[str]()
    for tensor in checkpoint.tensors:
        sizes[split(tensor.name)[0]] += tensor.nbytes
    blocks = [layer for layer in sizes if _number(layer) is not None]
    several = len({_prefix(layer) for layer in blocks}) > 1
    of: defaultdict[str, list[AnalyzedTensor]] = defaultdict(list)
    for tensor in tensors:
        of[split(tensor.name)[0]].append(tensor)
    groups: defaultdict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    outside: list[str] = []
    for layer in sorted(of, key=natural):
        whole = _size(of[layer]) >= _WHOLE * sizes[layer]
        kinds = () if whole else tuple(sorted({_kind(t.name) for t in of[layer]}))
        if _number(layer) is None:
            outside.append(layer.rpartition(".")[2].rpartition("/")[2])
        else:
            groups[_prefix(layer) if several else "", kinds].append(layer)
    found = []
    for (prefix, kinds), layers in sorted(groups.items(), key=lambda each: -len(each[1])):
        where = _layers(prefix, layers)
        everywhere = len(layers) == len(blocks)
        found.append(
            where if not kinds else _kinds(kinds, tensors) + f" in {where}" * (not everywhere)
        )
    found += _listed(outside)
    more = f" and {len(found) - _GROUPS_SHOWN} more" if len(found) > _GROUPS_SHOWN else ""
    return f"{verb}: {'; '.join(found[:_GROUPS_SHOWN])}{more}"


def _number(layer: str) -> int | None:
    last = layer.rpartition(".")[2]
    return int(last) if last.isdecimal() and len(last) <= _MOST_DIGITS else None


def _prefix(layer: str) -> str:
    return unwrapped(layer).rpartition(".")[0]


def _listed(names: Sequence[str]) -> list[str]:
    more = f" and {len(names) - _KINDS_SHOWN} more" if len(names) > _KINDS_SHOWN else ""
    return [", ".join(dict.fromkeys(names[:_KINDS_SHOWN])) + more] if names else []


def _kinds(kinds: Sequence[str], tensors: Iterable[AnalyzedTensor]) -> str:
    """Names of modules, the largest first."""
    sizes = Counter[str]()
    for tensor in tensors:
        sizes[_kind(tensor.name)] += tensor.nbytes
    largest = sorted(kinds, key=lambda kind: (-sizes[kind], kind))
    return "".join(_listed(largest))


def _kind(name: str) -> str:
    """The module that a tensor belongs to, without where it stands: `q_proj`."""
    rest = split(name)[1] or name
    parts = [part for part in rest.split(".") if not part.isdecimal()]
    module = parts[-2] if len(parts) > 1 else split(name)[0].rpartition(".")[2]
    return module.rpartition("/")[2]


def _layers(prefix: str, names: Sequence[str]) -> str:
    """Numbered layers as ranges: `layers 3, 7..9`, or `encoder.layers 3`."""
    numbers = sorted({number for number in map(_number, names) if number is not None})
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    shown = [f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    more = f" and {len(shown) - _KINDS_SHOWN} more" if len(shown) > _KINDS_SHOWN else ""
    title = prefix or ("layers" if len(numbers) > 1 else "layer")
    return f"{title} {', '.join(shown[:_KINDS_SHOWN])}{more}"


def _lost(lost: Iterable[LostPart]) -> list[str]:
    """What is there already, and no use to vLLM, which has it inside of other parameters."""
    by_target: defaultdict[tuple[str, bool], set[str]] = defaultdict(set)
    for part in lost:
        by_target[part.suffix.removesuffix("_proj"), part.by_leaf].add(_kind(part.tensor.name))
    return [
        f"{', '.join(sorted(kinds))} lost to vLLM's fused {target}"
        + " unless its weights are plain" * by_leaf
        for (target, by_leaf), kinds in sorted(by_target.items())
    ]
