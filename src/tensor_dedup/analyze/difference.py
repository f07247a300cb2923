"""How two checkpoints differ, tensor by tensor: renamed, changed, added, removed."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tensor_dedup.analyze.analysis import analyze
from tensor_dedup.analyze.stored import find, full_name, latest
from tensor_dedup.analyze.tensors import AnalyzedTensor, Measured
from tensor_dedup.dtypes import BITS
from tensor_dedup.formats.checkpoint import open_checkpoint
from tensor_dedup.formats.files import opened
from tensor_dedup.formats.layers.layer_names import natural, unwrapped
from tensor_dedup.loader.checkpoint_io.hints import HintIndex
from tensor_dedup.store import LocalStore
from tensor_dedup.store.format.manifests import STATE_MARK
from tensor_dedup.store.hashing import ProgressListener
from tensor_dedup.types import StrPath

# Of the JSON document.
SCHEMA: Final = 1
# A multiple of every element's size.
_PIECE_BYTES = 8 << 20

ReadRange = Callable[[str, int, int], bytes]


@dataclass(frozen=True, slots=True)
class TensorChange:
    """A tensor whose bytes, dtype or shape differ between two checkpoints.

    `old_name` is its name in the first checkpoint, and `name` in the second. `numbers` counts its
    elements, and `differing` counts those that differ. Both are None if the elements were not
    compared, for example because shape or dtype differ.
    """

    name: str
    old_name: str
    old_dtype: str
    dtype: str
    old_shape: tuple[int, ...]
    shape: tuple[int, ...]
    nbytes: int
    numbers: int | None = None
    differing: int | None = None


@dataclass(frozen=True, slots=True)
class CheckpointDiff:
    """The difference between two checkpoints: how `b` differs from `a`.

    * `unchanged` is the number of tensors with equal names, bytes, dtypes and shapes.
    * `renamed` has pairs of old and new names of tensors that are otherwise equal.
    * `added` and `removed` have names and sizes in bytes.
    * `state_differs` is True if `a` and `b` are training steps that differ in structure, or in
      values that are not tensors.
    """

    a: str
    b: str
    unchanged: int
    unchanged_bytes: int
    renamed: tuple[tuple[str, str], ...]
    renamed_bytes: int
    changed: tuple[TensorChange, ...]
    added: tuple[tuple[str, int], ...]
    removed: tuple[tuple[str, int], ...]
    state_differs: bool = False

    @property
    def changed_bytes(self) -> int:
        return sum(each.nbytes for each in self.changed)

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as a JSON object."""
        changed = [asdict(each) for each in self.changed]
        for each in changed:
            each["bytes"] = each.pop("nbytes")
        return {
            "schema": SCHEMA,
            "a": self.a,
            "b": self.b,
            "unchanged": {"tensors": self.unchanged, "bytes": self.unchanged_bytes},
            "renamed": [{"old_name": old, "name": new} for old, new in self.renamed],
            "renamed_bytes": self.renamed_bytes,
            "changed": changed,
            "changed_bytes": self.changed_bytes,
            "added": [{"name": name, "bytes": nbytes} for name, nbytes in self.added],
            "removed": [{"name": name, "bytes": nbytes} for name, nbytes in self.removed],
            "state_differs": self.state_differs,
        }


def diff(
    a: StrPath,
    b: StrPath,
    *,
    count: bool = True,
    hints: HintIndex | None = None,
    store: StrPath | None = None,
    progress: ProgressListener | None = None,
    follow_links: bool = False,
) -> CheckpointDiff:
    """Compare the checkpoints `a` and `b`, each given as for `analyze`.

    Two tensors are equal if their bytes, dtype and shape are equal. With `count`, changed tensors
    of the same shape and dtype are also read and compared element by element, 8 MiB at a time.
    Without `count`, only tensors whose digests are not known are read. The other arguments and the
    errors are those of `analyze`.
    """
    a, b = latest(a, store), latest(b, store)  # it is read twice
    found = analyze([a, b], hints=hints, store=store, progress=progress, follow_links=follow_links)
    one, two = found.checkpoints
    (held_a, state_a), (held_b, state_b) = _parted(one), _parted(two)
    pairs, unchanged, renamed, removed, added = _match(held_a, held_b)
    changed = [_change(old, new) for old, new in pairs]
    if count and changed:
        with reading(a, store, follow_links) as read_a, reading(b, store, follow_links) as read_b:
            changed = [_counted(each, read_a, read_b) for each in changed]
    return CheckpointDiff(
        one.path,
        two.path,
        len(unchanged),
        sum(tensor.nbytes for tensor in unchanged),
        tuple((old.name, new.name) for old, new in renamed),
        sum(new.nbytes for _, new in renamed),
        tuple(changed),
        tuple((tensor.name, tensor.nbytes) for tensor in added),
        tuple((tensor.name, tensor.nbytes) for tensor in removed),
        bool(state_a and state_b) and state_a != state_b,
    )


def _parted(checkpoint: Measured) -> tuple[list[AnalyzedTensor], dict[str, str]]:
    """The tensors, and the digests of what a training step has beside them."""
    tensors = [t for t in checkpoint.tensors if not t.name.startswith(STATE_MARK)]
    state = [t for t in checkpoint.tensors if t.name.startswith(STATE_MARK)]
    return tensors, {tensor.name: tensor.fingerprint.digest for tensor in state}


_Pairs = list[tuple[AnalyzedTensor, AnalyzedTensor]]
_Tensors = list[AnalyzedTensor]


def _match(
    one: Sequence[AnalyzedTensor], two: Sequence[AnalyzedTensor]
) -> tuple[_Pairs, _Tensors, _Pairs, _Tensors, _Tensors]:
    """Those of one name that changed; unchanged, renamed; left in the first, and in the second."""
    there = {tensor.name: tensor for tensor in one}
    unchanged = [
        new for new in two if new.name in there and there[new.name].fingerprint == new.fingerprint
    ]
    same = {tensor.name for tensor in unchanged}
    old = {tensor.name: tensor for tensor in one if tensor.name not in same}
    rest = [tensor for tensor in _sorted(two) if tensor.name not in same]
    # A tensor of equal bytes was renamed only if nothing of its name is left to compare with: two
    # norms that were all ones and changed places of content are not.
    free = defaultdict[object, _Tensors](list)
    names = {tensor.name for tensor in rest}
    for tensor in _sorted(old.values()):
        if tensor.name not in names:
            free[tensor.fingerprint].append(tensor)
    renamed: _Pairs = []
    for new in rest:
        if new.name not in old and free[new.fingerprint]:
            renamed.append((free[new.fingerprint].pop(0), new))
    gone = {before.name for before, _ in renamed}
    taken = {after.name for _, after in renamed}
    left = {name: tensor for name, tensor in old.items() if name not in gone}
    # All of one name, before a guess at another's old name takes one of them.
    kept = {name: left.pop(name) for name in names & left.keys()}
    by_name = _renaming(renamed, left)
    pairs: _Pairs = []
    added: _Tensors = []
    for new in rest:
        if new.name in taken:
            continue
        before = kept.get(new.name) or left.pop(by_name(new.name), None)
        if before is None:
            added.append(new)
        else:
            pairs.append((before, new))
    return pairs, unchanged, renamed, _sorted(left.values()), added


def _sorted(tensors: Iterable[AnalyzedTensor]) -> _Tensors:
    return sorted(tensors, key=lambda tensor: natural(tensor.name))


def prefixes_of(old: str, new: str) -> tuple[str, str]:
    """Return two names without the longest ending that both have in common.

    For example, `model.a.b` and `a.b` give `("model.", "")`.
    """
    common = 0
    for one, two in zip(reversed(old), reversed(new), strict=False):
        if one != two:
            break
        common += 1
    return old[: len(old) - common], new[: len(new) - common]


def _renaming(renamed: _Pairs, left: dict[str, AnalyzedTensor]) -> Callable[[str], str]:
    """What names that only the second checkpoint has were in the first: as most others changed."""
    prefixes = Counter(prefixes_of(old.name, new.name) for old, new in renamed)
    plain = {unwrapped(name): name for name in left}

    def old_name(name: str) -> str:
        for (old, new), _ in prefixes.most_common(1):
            if name.startswith(new) and (found := old + name.removeprefix(new)) in left:
                return found
        return plain.get(unwrapped(name), name)

    return old_name


def _change(old: AnalyzedTensor, new: AnalyzedTensor) -> TensorChange:
    return TensorChange(
        new.name,
        old.name,
        old.fingerprint.dtype,
        new.fingerprint.dtype,
        old.fingerprint.shape,
        new.fingerprint.shape,
        new.nbytes,
    )


def _counted(change: TensorChange, read_a: ReadRange, read_b: ReadRange) -> TensorChange:
    """With the count of numbers that differ; those of less than a byte are not told apart."""
    import numpy  # of the numbers only: analyze does without

    bits = BITS.get(change.dtype, 0)
    if (change.dtype, change.shape) != (change.old_dtype, change.old_shape) or bits % 8 or not bits:
        return change
    size = bits // 8
    differing = 0
    for start in range(0, change.nbytes, _PIECE_BYTES):
        stop = min(start + _PIECE_BYTES, change.nbytes)
        one = numpy.frombuffer(read_a(change.old_name, start, stop), numpy.uint8)
        two = numpy.frombuffer(read_b(change.name, start, stop), numpy.uint8)
        differing += int((one != two).reshape(-1, size).any(axis=1).sum())
    return TensorChange(
        change.name,
        change.old_name,
        change.old_dtype,
        change.dtype,
        change.old_shape,
        change.shape,
        change.nbytes,
        change.nbytes // size,
        differing,
    )


@contextmanager
def reading(
    path: StrPath, store: StrPath | None = None, follow_links: bool = False
) -> Iterator[ReadRange]:
    """Context manager: open a checkpoint and yield a function that reads ranges of its tensors.

    The function takes the tensor's name and the start and end of the range in bytes, and returns
    the bytes. `path`, `store` and `follow_links` are given as for `analyze`.
    """
    found = find(path, store)
    with ExitStack() as stack:
        if not isinstance(found, Path):
            where = LocalStore.open(store, create=False)
            held = stack.enter_context(where.checkpoint(full_name(where, found)))
            yield lambda tensor, start, stop: bytes(held.read_range(tensor, start, stop))
            return
        checkpoint = open_checkpoint(found, follow_links=follow_links)
        places = {name: (file, spec) for name, file, spec in checkpoint.tensors()}

        def read(tensor: str, start: int, stop: int) -> bytes:
            file, spec = places[tensor]
            with opened(file.path) as data:
                checkpoint.links.check_open(file.path, data.fd)
                return data.read(spec.start + start, stop - start)

        yield read
