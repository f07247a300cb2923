"""How much sharing is left in vLLM, which fuses several tensors into one parameter.

A fused parameter is shared only if all its parts are equal, so a changed q_proj also makes k_proj
and v_proj private. Which tensors vLLM fuses is guessed from their names, without vLLM, so this is
an estimate. `tensor_dedup.report()` says what a load really shared.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tensor_dedup.analyze.contributions import LEAF_SHARED_FROM
from tensor_dedup.analyze.tensors import AnalyzedTensor, Measured, Residents
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.formats.layers.layer_names import natural
from tensor_dedup.types import Fingerprint

# Module name in the checkpoint -> the fused module that takes it.
FUSED: Mapping[str, str] = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "query": "qkv_proj",
    "key": "qkv_proj",
    "value": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj",
}
# Of a numbered expert: its module -> the tensor that stacks all experts of the block.
STACKED: Mapping[str, str] = {
    "w1": "w13",
    "w3": "w13",
    "gate_proj": "w13",
    "up_proj": "w13",
    "w2": "w2",
    "down_proj": "w2",
}
_EXPERT = re.compile(r"^(.*\bexperts)\.\d+\.(\w+)\.(.+)$")
_MODULE = re.compile(r"^(.*\.)?(\w+)\.(\w+)$")


@dataclass(frozen=True, slots=True)
class Final:
    """A parameter of the loaded model, made of one or more tensors of the checkpoint (`parts`).

    If vLLM fuses several tensors, `suffix` is the name of the fused module, such as `qkv_proj`.
    Otherwise it is "". Tensors that are too small to be shared are left out of `parts`. `complete`
    is False if any were left out.
    """

    name: str
    suffix: str
    parts: tuple[AnalyzedTensor, ...]
    complete: bool = True

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def key(self) -> tuple[Fingerprint, ...]:
        return tuple(part.fingerprint for part in self.parts)

    @property
    def form(self) -> tuple[object, ...]:
        """The suffix, and the shape and dtype of each part.

        If two parameters have equal forms, their parts lie at equal offsets.
        """
        return self.suffix, *((part.shape, part.dtype) for part in self.parts)


@dataclass(slots=True)
class FusedGroup:
    """Counts for all fused parameters of one kind, such as `qkv_proj`, in all checkpoints.

    * `fused` is the number of these parameters.
    * `followers` is their number without those in the first checkpoint that has any. That
      checkpoint finds none of them in memory.
    * `shared` is the number of shared parameters.
    * `broken` is the number of parameters that are private although some of their parts are in
      memory. Without fusing, these parts would be shared. `lost_bytes` is their size.
    """

    suffix: str
    fused: int = 0
    followers: int = 0
    shared: int = 0
    broken: int = 0
    lost_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LostPart:
    """A tensor that is in memory, but not shared, because its fused parameter is not in memory.

    `suffix` is the kind of the fused parameter, such as `qkv_proj`. `by_leaf` is True if the leaves
    of the tensor can still be shared. They are shared only if vLLM keeps weights unpacked.
    """

    tensor: AnalyzedTensor
    suffix: str
    by_leaf: bool = False


@dataclass(frozen=True, slots=True)
class Fused:
    """What vLLM shares when these checkpoints are loaded in this order.

    * `tensors` is the number of parameters after fusing.
    * `shared_tensors` and `shared_bytes` are the number and size of parameters that an earlier
      checkpoint has already.
    * `lost` has, for each checkpoint, the tensors that are not shared because of fusing.
      `lost_bytes` is the size of all of them. `broken` is the number of parameters that they are
      fused into.
    * `leaf_shared_bytes` is the part of `lost_bytes` whose leaves are still shared if vLLM keeps
      weights unpacked.
    """

    tensors: int
    shared_tensors: int
    shared_bytes: int
    groups: tuple[FusedGroup, ...]
    lost: tuple[tuple[LostPart, ...], ...] = ()

    @property
    def lost_bytes(self) -> int:
        return sum(group.lost_bytes for group in self.groups)

    @property
    def leaf_shared_bytes(self) -> int:
        return sum(part.tensor.nbytes for each in self.lost for part in each if part.by_leaf)

    @property
    def broken(self) -> int:
        return sum(group.broken for group in self.groups)


def fuse(checkpoint: Measured) -> list[Final]:
    """Return the parameters that vLLM makes of a checkpoint's tensors, as guessed from names."""
    members: defaultdict[tuple[str, str], list[AnalyzedTensor]] = defaultdict(list)
    for tensor in checkpoint.tensors:
        members[_target(tensor.name)].append(tensor)
    small = {_target(name) for name in checkpoint.small}
    finals = []
    for (name, suffix), parts in members.items():
        alone = len(parts) == 1 and (name, suffix) not in small
        ordered = tuple(sorted(parts, key=lambda part: natural(part.name)))
        finals.append(
            Final(
                parts[0].name if alone else name,
                "" if alone else suffix,
                ordered,
                (name, suffix) not in small,
            )
        )
    return finals


def survives(checkpoints: Sequence[Measured]) -> Fused:
    """Return what vLLM shares, and what fusing prevents, when `checkpoints` are loaded in order."""
    finals_held, sources_held = Residents(), Residents()
    groups: dict[str, FusedGroup] = {}
    total = shared_tensors = shared_bytes = 0
    lost: list[tuple[LostPart, ...]] = []
    held_parts: set[tuple[object, ...]] = set()
    for checkpoint in checkpoints:
        seen = frozenset(groups)
        finals = fuse(checkpoint)
        found = finals_held.take(final.key for final in finals if final.complete)
        sources = sources_held.take(tensor.fingerprint for tensor in checkpoint.tensors)
        private = []
        for final, shared in _settle(finals, found):
            if shared:
                shared_bytes += final.nbytes
                shared_tensors += 1
                sources.subtract(final.key)
            else:
                private.append(final)
            if final.suffix:
                group = groups.setdefault(final.suffix, FusedGroup(final.suffix))
                group.fused += 1
                group.followers += final.suffix in seen
                group.shared += shared
        lost.append(
            tuple(part for each in private for part in _lose(each, sources, groups, held_parts))
        )
        held_parts.update(place for final in finals for place in _places(final))
        total += len(finals)
    ordered = tuple(groups[suffix] for suffix in sorted(groups))
    return Fused(total, shared_tensors, shared_bytes, ordered, tuple(lost))


def _settle(
    finals: Sequence[Final], found: Counter[tuple[Fingerprint, ...]]
) -> Iterator[tuple[Final, bool]]:
    for final in finals:
        shared = final.complete and found[final.key] > 0
        if shared:
            found[final.key] -= 1
        yield final, shared


def _places(final: Final) -> list[tuple[object, ...]]:
    """Return where the parts are, in terms that are equal for what lies at one offset."""
    return [(final.form, *each) for each in enumerate(final.key)]


def _lose(
    final: Final,
    sources: Counter[Fingerprint],
    groups: Mapping[str, FusedGroup],
    held: Container[tuple[object, ...]],
) -> list[LostPart]:
    """Count and return the parts of a private parameter that are in memory within another one.

    `held` are the `_places` of those in memory.
    """
    lost = []
    for part, place in zip(final.parts, _places(final), strict=True):
        if sources[part.fingerprint] > 0:
            sources[part.fingerprint] -= 1
            large = final.nbytes >= LEAF_SHARED_FROM and part.nbytes >= LEAF_BYTES
            lost.append(LostPart(part, final.suffix, large and place in held))
    # A tensor alone is private only if nobody holds it, or holds it inside a fused parameter;
    # the latter is counted where that parameter's kind is.
    if not final.suffix:
        return []
    if any(part.tensor.nbytes for part in lost):
        groups[final.suffix].broken += 1
        groups[final.suffix].lost_bytes += sum(part.tensor.nbytes for part in lost)
    return lost


def _target(name: str) -> tuple[str, str]:
    """The final tensor a source goes to, and the fused module it is ("" when none)."""
    expert = _EXPERT.match(name)
    if expert and expert[2] in STACKED:
        suffix = STACKED[expert[2]]
        return f"{expert[1]}.{suffix}_{expert[3]}", suffix
    module = _MODULE.match(name)
    if module and module[2] in FUSED:
        suffix = FUSED[module[2]]
        return f"{module[1] or ''}{suffix}.{module[3]}", suffix
    return name, ""
