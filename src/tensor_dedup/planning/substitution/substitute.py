"""Writes a copy of a fine-tune in which chosen layers are those of its base."""

import math
import os
import shlex
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tensor_dedup.analyze.analysis import analyze
from tensor_dedup.analyze.contributions import contributions
from tensor_dedup.analyze.difference import ReadRange, reading
from tensor_dedup.analyze.stored import find, full_name, latest, looks_like_step
from tensor_dedup.analyze.tensors import AnalyzedTensor, Measured
from tensor_dedup.errors import ChangedFileError, ConfigError, UnsupportedError
from tensor_dedup.formats.checkpoint import open_checkpoint
from tensor_dedup.formats.layers.layer_pairs import Layer, check_whole, chosen, layers_of
from tensor_dedup.formats.layers.quantisation import FILES, difference, settings, settings_in
from tensor_dedup.formats.markers import KEY, Marker, content_digest
from tensor_dedup.loader.checkpoint_io.hints import HintIndex
from tensor_dedup.planning.substitution.distance import distance
from tensor_dedup.planning.substitution.output import write_files
from tensor_dedup.planning.substitution.samples import Movement, Samples
from tensor_dedup.store import LocalStore
from tensor_dedup.store.hashing import ProgressListener
from tensor_dedup.text_table import human
from tensor_dedup.types import STORE_SCHEME, StrPath

# Of the JSON document.
SCHEMA: Final = 1
_COPY_BYTES: Final = 8 << 20
_Layer = Layer[AnalyzedTensor]


@dataclass(frozen=True, slots=True)
class SubstitutedLayer:
    """A layer, or some of its tensors, whose bytes are taken from the base.

    * `distance` is |tune - base| / |base|, where `tune` and `base` are the values of these tensors
      in the two checkpoints. It is None if it is infinite, or if the values are packed.
    * `output_distance` is the relative change of the outputs on samples if only this layer is
      replaced. It is None if it is infinite or NaN, or if there are no samples.
    """

    name: str
    tensors: tuple[str, ...]
    nbytes: int
    distance: float | None
    output_distance: float | None


@dataclass(frozen=True, slots=True)
class Substitution:
    """The result of a substitution: `output` is `tune` with `layers` taken from `base`.

    * `adds_bytes` is the size of the distinct tensors of `output` that `base` does not have;
      `tune_adds_bytes` is the same for `tune`.
    * `left_out` are files of `tune` that were not copied, because they hold weights in other
      formats, or are downloads that are not finished.
    * `outputs` says how much the outputs on samples change. It is None without samples.
    """

    base: str
    tune: str
    output: str
    layers: tuple[SubstitutedLayer, ...]
    total_bytes: int
    tune_adds_bytes: int
    adds_bytes: int
    left_out: tuple[str, ...]
    outputs: Movement | None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        document = {"schema": SCHEMA, **asdict(self)}
        for layer in document["layers"]:
            layer["bytes"] = layer.pop("nbytes")
        return document


def substitute(
    base: StrPath,
    tune: StrPath,
    output: StrPath,
    *,
    layers: str | None = None,
    budget: int | None = None,
    samples: Sequence[str] = (),
    hints: HintIndex | None = None,
    store: StrPath | None = None,
    progress: ProgressListener | None = None,
) -> Substitution:
    """Write a copy of `tune` to the folder `output`, with some layers replaced by those of `base`.

    The layers are chosen in one of these ways:

    - `layers` selects them, with the syntax of `tensor_dedup.formats.layers.layer_names.meant`.
    - `budget` is the number of bytes that the output may add beside the base. Layers are replaced
      until the output fits. Those whose values differ least for their size come first.
    - With `budget` and `samples`, which are texts, each layer is tried alone. Layers that change
      the model's outputs least for their size come first.

    With `samples`, transformers loads both checkpoints, and the result says how much the outputs
    change.

    `base` and `tune` are given as for `analyze`; the fine-tune's weights must be safetensors. A
    checkpoint in the store is first exported beside `output`, so its size is needed on disk once
    more. Neither checkpoint is changed. `output` appears once it is complete and its bytes have
    been read back and compared.

    Raises:
        ConfigError: Both or neither of `layers` and `budget` are given, a layer does not exist, the
            budget cannot be kept, or the output exists already.
        UnsupportedError: A layer cannot be taken from the base, or the fine-tune is in another
            format; the message says why.
        CheckpointError: A checkpoint is missing, malformed, or changed while it was read.
        StoreError: The store, or the checkpoint in it, is missing or damaged.
    """
    if (layers is None) == (budget is None):
        raise ConfigError("give either layers or a budget")
    target = Path(output)
    base, tune = latest(base, store), latest(tune, store)  # they are read more than once
    found, origin = find(tune, store), find(base, store)
    _check_target(target, [each for each in (found, origin) if isinstance(each, Path)])
    if isinstance(found, str) and looks_like_step(found):
        why = "in a step of a training tensors are called otherwise than in"
        found = _folder(found, store, why)
    runs = None
    if samples:
        why = "samples need"
        runs = Samples(_folder(found, store, why), _folder(origin, store, why), samples)
    compared = analyze([base, tune], hints=hints, store=store, progress=progress)
    one, two = compared.checkpoints
    otherwise = difference(_settings(origin, store), _settings(found, store))
    every = layers_of(two.tensors, one.tensors, otherwise)
    with reading(base, store) as read_base, reading(tune, store) as read_tune:
        if layers is not None:
            taken = {layer.name: layer for layer in chosen(every, layers)}
        else:
            assert budget is not None
            able = [each for each in every.values() if _differs(each) and each.obstacle is None]
            costs = {
                layer.name: _infinite(runs.moved([layer]).distance)
                if runs is not None
                else distance(layer.pairs, read_tune, read_base)
                for layer in able
            }
            taken = _within(budget, every, costs, one, two)
            check_whole(every, taken.values())
        said = [
            SubstitutedLayer(
                layer.name,
                tuple(tensor.name for tensor, _ in layer.pairs),
                layer.nbytes,
                _moved(layer, read_tune, read_base),
                runs.moved([layer]).distance if runs is not None else None,
            )
            for layer in taken.values()
        ]
        new = _with(two, taken)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _files(found, store, target) as files:
            left_out = _write(target, files, base, one, new, taken, read_base)
    return Substitution(
        base=one.path,
        tune=two.path,
        output=str(target),
        layers=tuple(said),
        total_bytes=new.nbytes,
        tune_adds_bytes=_added(one, two),
        adds_bytes=_added(one, new),
        left_out=tuple(left_out),
        outputs=runs.moved([*taken.values()]) if runs is not None else None,
    )


def _folder(found: Path | str, store: StrPath | None, why: str) -> Path:
    """The path of a checkpoint that has one."""
    if isinstance(found, Path):
        return found
    command = f"tensor-dedup export {shlex.quote(found.removeprefix(STORE_SCHEME))} DIR"
    if store is not None:
        command += f" --store {shlex.quote(str(store))}"
    raise ConfigError(f"{found}: {why} its files; run `{command}`, and give DIR", path=found)


@contextmanager
def _files(found: Path | str, store: StrPath | None, target: Path) -> Iterator[Path]:
    """The files of a checkpoint; of a stored one, beside the target for as long as this lasts."""
    if isinstance(found, Path):
        yield found
        return
    with TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        opened = LocalStore.open(store, create=False)
        opened.export(full_name(opened, found), folder)
        yield Path(folder)


def _check_target(target: Path, sources: Sequence[Path]) -> None:
    for source in sources:
        if target.resolve().is_relative_to(source.resolve()):
            raise ConfigError(
                f"{target}: lies in {source}; name a folder outside", path=str(target)
            )
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            f"{target}: is there already; name a folder that is empty or not there",
            path=str(target),
        )


def _settings(found: Path | str, store: StrPath | None) -> dict[str, Any] | None:
    if isinstance(found, Path):
        return settings_in(found if found.is_dir() else found.parent)
    opened = LocalStore.open(store, create=False)
    with opened.checkpoint(full_name(opened, found)) as held:
        files = {file.path: file.pieces for file in held.files if file.path in FILES}
        return settings(
            {
                name: b"".join(held.read_piece(p.digest, 0, p.nbytes, p.nbytes) for p in pieces)
                for name, pieces in files.items()
            }
        )


def _differs(layer: _Layer) -> bool:
    return any(tensor.fingerprint != old.fingerprint for tensor, old in layer.pairs)


def _infinite(distance: float | None) -> float:
    return math.inf if distance is None else distance


def _moved(layer: _Layer, read_tune: ReadRange, read_base: ReadRange) -> float | None:
    if not _differs(layer):
        return 0.0
    try:
        found = distance(layer.pairs, read_tune, read_base)
    except UnsupportedError:
        return None
    return found if math.isfinite(found) else None


def _added(base: Measured, tune: Measured) -> int:
    return contributions([base, tune])[1].adds_bytes


def _with(tune: Measured, taken: Mapping[str, _Layer]) -> Measured:
    """The fine-tune with the content of these layers' counterparts."""
    instead = {
        tensor.name: AnalyzedTensor(tensor.name, old.fingerprint, old.nbytes)
        for layer in taken.values()
        for tensor, old in layer.pairs
    }
    return Measured(tune.path, [instead.get(tensor.name, tensor) for tensor in tune.tensors])


def _within(
    budget: int,
    every: Mapping[str, _Layer],
    costs: Mapping[str, float],
    base: Measured,
    tune: Measured,
) -> dict[str, _Layer]:
    """The layers to take so that the rest fits; greedy, as for a knapsack.

    Those that cost least for each byte come first; then those are given back, the dearest
    first, without which it fits, too.
    """
    saves = {
        name: sum(t.nbytes for t, old in every[name].pairs if t.fingerprint != old.fingerprint)
        for name in costs
    }
    taken: dict[str, _Layer] = {}
    for name in sorted(costs, key=lambda name: costs[name] / saves[name]):
        if _added(base, _with(tune, taken)) <= budget:
            break
        taken[name] = every[name]
    least = _added(base, _with(tune, taken))
    if least > budget:
        raise ConfigError(
            f"with every layer that can be taken from the base, the fine-tune still adds "
            f"{human(least)} ({least} bytes); the budget is {budget} bytes: give a larger one",
            budget=budget,
            least=least,
        )
    for name in sorted(taken, key=lambda name: -costs[name]):
        fewer = {other: layer for other, layer in taken.items() if other != name}
        if _added(base, _with(tune, fewer)) <= budget:
            taken = fewer
    return {name: taken[name] for name in every if name in taken}


def _write(
    target: Path,
    found: Path,
    base: StrPath,
    one: Measured,
    new: Measured,
    taken: Mapping[str, _Layer],
    read_base: ReadRange,
) -> list[str]:
    pairs = {tensor.name: old for layer in taken.values() for tensor, old in layer.pairs}
    content = content_digest((t.name, t.fingerprint.digest) for t in one.tensors)
    given = os.fspath(base).removeprefix(STORE_SCHEME)
    called = Path(given).name if os.path.lexists(given) else given

    def metadata(names: Sequence[str]) -> dict[str, str]:
        return {KEY: Marker(called, content, {n: pairs[n].name for n in names}).text()}

    work = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    work.mkdir()
    try:
        bytes_of = {name: partial(_pieces, read_base, old) for name, old in pairs.items()}
        left_out = write_files(open_checkpoint(found), work, bytes_of, metadata)
        _check(work, new)
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return left_out


def _pieces(read: ReadRange, tensor: AnalyzedTensor) -> Iterator[bytes]:
    for start in range(0, tensor.nbytes, _COPY_BYTES):
        yield read(tensor.name, start, min(start + _COPY_BYTES, tensor.nbytes))


def _check(written: Path, wanted: Measured) -> None:
    """Read what was written: a checkpoint may have changed since its digests were noted."""
    (found,) = analyze([written]).checkpoints
    there = {tensor.name: tensor.fingerprint for tensor in found.tensors}
    for tensor in wanted.tensors:
        if there.get(tensor.name) != tensor.fingerprint:
            raise ChangedFileError(
                f"{tensor.name}: a checkpoint changed while it was being read; try again when "
                "nobody writes it",
                tensor=tensor.name,
            )
