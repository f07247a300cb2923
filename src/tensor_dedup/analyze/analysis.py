"""The analysis of `tensor-dedup analyze`: what checkpoints share, and what sharing saves."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from tensor_dedup.analyze.changes import Reasons, reasons
from tensor_dedup.analyze.contributions import Contribution, contributions
from tensor_dedup.analyze.digests import Digests, read_digests
from tensor_dedup.analyze.fusion import Fused, survives
from tensor_dedup.analyze.layers import SharedLayer, shared_layers
from tensor_dedup.analyze.marker_checks import CheckedMarker, check_markers
from tensor_dedup.analyze.stored import (
    find,
    looks_like_step,
    measure_stored,
    open_store,
    pull_suggested,
)
from tensor_dedup.analyze.tensors import AnalyzedTensor, Measured
from tensor_dedup.digest import ALGORITHMS, leaf_places
from tensor_dedup.errors import (
    CheckpointError,
    ConfigError,
    SeveralModelsError,
    TensorDedupError,
    UnsupportedError,
)
from tensor_dedup.formats.checkpoint import Checkpoint, open_checkpoint
from tensor_dedup.formats.hub_cache import snapshot_in
from tensor_dedup.formats.layers.layer_names import natural, split
from tensor_dedup.formats.left_out import LeftOut, LeftOutReason, NotIndexed
from tensor_dedup.formats.links import LinkBoundary
from tensor_dedup.formats.markers import SIDECAR, Marker, in_files, in_header
from tensor_dedup.loader.checkpoint_io.hints import HintIndex
from tensor_dedup.store.hashing import ProgressListener, SilentListener
from tensor_dedup.types import Fingerprint, StrPath, TensorSpec

# Of the JSON document; docs/analyze.schema.json describes it.
SCHEMA = 3


@dataclass(frozen=True, slots=True)
class PairOverlap:
    """The tensors that checkpoints `a` and `b` have in common. Sizes are in bytes.

    A tensor that occurs twice in one of them and three times in the other counts twice.
    """

    a: str
    b: str
    shared_tensors: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A tensor that occurs more than once.

    `places` are pairs of checkpoint path and tensor name.
    """

    fingerprint: Fingerprint
    nbytes: int
    places: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Analysis:
    """The result of an analysis: what checkpoints have in common. Sizes are in bytes.

    * Tensors smaller than `min_tensor_bytes` are left out, and nothing is said of them.
    * `contributions` says what each checkpoint adds when the checkpoints are loaded in this order,
      and `reasons` says why.
    * `unique_bytes` counts equal tensors once.
    * `markers` has the results of checking markers, which are claims in a checkpoint that some of
      its tensors come from another one.
    * `bytes_hashed` is 0 if all digests were already known.
    * `failed` maps the path of each model that could not be opened, one of several in a folder, to
      the message of the error.
    """

    checkpoints: tuple[Measured, ...]
    contributions: tuple[Contribution, ...]
    reasons: tuple[Reasons, ...]
    unique_bytes: int
    pairs: tuple[PairOverlap, ...]
    shared_layers: tuple[SharedLayer, ...]
    shared_tensors: tuple[SharedTensor, ...]
    vllm: Fused
    markers: tuple[CheckedMarker, ...]
    bytes_read: int
    bytes_hashed: int
    min_tensor_bytes: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return sum(checkpoint.nbytes for checkpoint in self.checkpoints)

    @property
    def shared_bytes(self) -> int:
        return self.total_bytes - self.unique_bytes

    @property
    def leaf_shared_bytes(self) -> int:
        """The bytes that sharing single leaves (2 MiB) of tensors saves beyond `shared_bytes`.

        Only leaves whose digests are known are counted.
        """
        return sum(each.leaf_shared_bytes for each in self.contributions)

    @property
    def saving(self) -> float:
        """The fraction of `total_bytes` that sharing saves, from 0.0 to 1.0."""
        return self.shared_bytes / self.total_bytes if self.total_bytes else 0.0

    def to_dict(self, top: int = 10) -> dict[str, Any]:
        """Return the analysis as a JSON object, with at most `top` entries in `largest_shared`.

        docs/analyze.schema.json describes the object.
        """
        return {
            "schema": SCHEMA,
            "checkpoints": [
                {
                    "path": checkpoint.path,
                    "name": checkpoint.name,
                    "tensors": len(checkpoint.tensors),
                    "bytes": checkpoint.nbytes,
                    "small_tensors": len(checkpoint.small),
                    "small_bytes": checkpoint.small_bytes,
                    "adds_bytes": added.adds_bytes,
                    "leaf_shared_bytes": added.leaf_shared_bytes,
                    "changes": list(why.changes),
                    "left_out": [each.to_dict() for each in checkpoint.left_out],
                    "not_indexed": [each.to_dict() for each in checkpoint.not_indexed],
                    "layers": [
                        {
                            "name": layer.name,
                            "bytes": layer.nbytes,
                            "shared_bytes": layer.shared_bytes,
                        }
                        for layer in added.layers
                    ],
                }
                for checkpoint, added, why in zip(
                    self.checkpoints, self.contributions, self.reasons, strict=True
                )
            ],
            "total_bytes": self.total_bytes,
            "unique_bytes": self.unique_bytes,
            "shared_bytes": self.shared_bytes,
            "leaf_shared_bytes": self.leaf_shared_bytes,
            "saving": self.saving,
            "pairs": [
                {
                    "a": pair.a,
                    "b": pair.b,
                    "shared_tensors": pair.shared_tensors,
                    "shared_bytes": pair.shared_bytes,
                }
                for pair in self.pairs
            ],
            "shared_layers": [_layer_dict(layer) for layer in self.shared_layers],
            "largest_shared": [_tensor_dict(tensor) for tensor in self.shared_tensors[:top]],
            "tensors": _tensors_dict(self.checkpoints),
            "vllm": _vllm_dict(self.vllm),
            "markers": [marker.to_dict() for marker in self.markers],
            "bytes_read": self.bytes_read,
            "bytes_hashed": self.bytes_hashed,
            "min_tensor_bytes": self.min_tensor_bytes,
            "failed": dict(self.failed),
        }


def analyze(
    paths: Sequence[StrPath],
    *,
    min_tensor_bytes: int = 0,
    hash_algorithm: str = "blake3",
    hints: HintIndex | None = None,
    store: StrPath | None = None,
    progress: ProgressListener | None = None,
    follow_links: bool = False,
    all_models: bool = False,
) -> Analysis:
    """Hash each tensor of the checkpoints in `paths` once, and return what they have in common.

    Each path is one of these:

    - a file, or a folder with its sub-folders;
    - a name in the Hugging Face cache, `ORG/NAME` or `ORG/NAME@REVISION`;
    - a checkpoint `store://NAME` or a training step `RUN@STEP` in a store.

    `store` is the folder of the store, by default the user's own. Tensors smaller than
    `min_tensor_bytes` are left out of every number. Files whose digests `hints` remembers, and
    checkpoints in the store, are not read. `progress` is a listener to the progress in bytes.
    Symbolic links are followed within a folder and, in a Hugging Face cache, to the blobs of the
    same repository and to the shared ones. With `follow_links`, they are followed anywhere. With
    `all_models`, a folder of several models stands for each of them; those that cannot be opened
    are left out and are in `failed` of the result, unless none can. Safe from any thread.

    Raises:
        ConfigError: A setting is invalid.
        SeveralModelsError: A folder holds several models, and `all_models` is False.
        CheckpointError: A checkpoint is missing, malformed, or changed while it was read, or a link
            leads out of it.
        StoreError: The store, or the checkpoint in it, is missing or damaged.
    """
    failed: dict[str, str] = {}
    measured, digests = measure(
        paths,
        min_tensor_bytes=min_tensor_bytes,
        hash_algorithm=hash_algorithm,
        hints=hints,
        store=store,
        progress=progress,
        follow_links=follow_links,
        all_models=all_models,
        failed=failed,
    )
    found = compare(measured, digests.bytes_read, digests.bytes_hashed, min_tensor_bytes)
    return replace(found, failed=failed)


def measure(
    paths: Sequence[StrPath],
    *,
    min_tensor_bytes: int = 0,
    hash_algorithm: str = "blake3",
    hints: HintIndex | None = None,
    store: StrPath | None = None,
    progress: ProgressListener | None = None,
    follow_links: bool = False,
    all_models: bool = False,
    failed: dict[str, str] | None = None,
) -> tuple[list[Measured], Digests]:
    """Return the tensors of each checkpoint with their digests, and how much was read and hashed.

    This is the first step of `analyze`, with the same arguments and errors. What `Analysis` calls
    `failed` is added to `failed`.
    """
    failed = {} if failed is None else failed
    _check(min_tensor_bytes, hash_algorithm)
    named = [(os.fspath(path), find(path, store)) for path in paths]
    where, stored = None, next((each for _, each in named if isinstance(each, str)), None)
    if stored is not None:
        with pull_suggested(stored):
            where = open_store(store, hash_algorithm)
    given: list[str] = []
    opened: dict[int, Checkpoint] = {}
    left_out: dict[int, tuple[LeftOut, ...]] = {}
    held: dict[int, Measured] = {}
    for path, each in named:
        if isinstance(each, Path):
            for shown, checkpoint, others in _opened(path, each, follow_links, all_models, failed):
                opened[len(given)], left_out[len(given)] = checkpoint, others
                given.append(shown)
        elif where is not None:
            shown = path if looks_like_step(path) else each
            held[len(given)] = measure_stored(each, shown, where, min_tensor_bytes)
            given.append(path)
    files: dict[Path, list[TensorSpec]] = {}
    for checkpoint in opened.values():
        twice = {name for name, _, _ in checkpoint.not_indexed()}
        for file in checkpoint.files:
            # Of a name that is there twice, both are compared, whatever their size.
            files[file.path] = [
                spec
                for spec in file.header.tensors
                if spec.nbytes >= min_tensor_bytes or file.prefix + spec.name in twice
            ]
    links = {file.path: each.links for each in opened.values() for file in each.files}
    digests = read_digests(files, hash_algorithm, hints, progress or SilentListener(), links)
    measured = [
        _measure(path, opened[number], left_out[number], digests, min_tensor_bytes)
        if number in opened
        else held[number]
        for number, path in enumerate(given)
    ]
    return measured, digests


def compare(
    checkpoints: Sequence[Measured],
    bytes_read: int = 0,
    bytes_hashed: int = 0,
    min_tensor_bytes: int = 0,
) -> Analysis:
    """Return the analysis of checkpoints whose digests are known. No I/O.

    All arguments but the first are only copied to the result.
    """
    sizes = {t.fingerprint.digest: t.nbytes for c in checkpoints for t in c.tensors}
    added, fused = contributions(checkpoints), survives(checkpoints)
    return Analysis(
        checkpoints=tuple(checkpoints),
        contributions=tuple(added),
        reasons=tuple(reasons(checkpoints, added, fused.lost)),
        unique_bytes=sum(sizes.values()),
        pairs=tuple(_pairs(checkpoints)),
        shared_layers=tuple(shared_layers(checkpoints)),
        shared_tensors=tuple(_shared_tensors(checkpoints)),
        vllm=fused,
        markers=tuple(check_markers(checkpoints)),
        bytes_read=bytes_read,
        bytes_hashed=bytes_hashed,
        min_tensor_bytes=min_tensor_bytes,
    )


def _check(min_tensor_bytes: int, hash_algorithm: str) -> None:
    if min_tensor_bytes < 0:
        raise ConfigError(
            f"min_tensor_bytes is {min_tensor_bytes}; give 0 or more", value=min_tensor_bytes
        )
    if hash_algorithm not in ALGORITHMS:
        raise ConfigError(
            f"no hash algorithm {hash_algorithm!r}; use one of {', '.join(ALGORITHMS)}",
            algorithm=hash_algorithm,
        )


def _opened(
    path: str, place: Path, follow_links: bool, all_models: bool, failed: dict[str, str]
) -> list[tuple[str, Checkpoint, tuple[LeftOut, ...]]]:
    """The checkpoint at a place or, with `all_models`, each of several.

    Each comes with what to call it, and with the files of its folder that are left out. Of several,
    those that cannot be opened are entered into `failed`. If none can be, the error of the first is
    raised.
    """
    try:
        checkpoint = open_checkpoint(place, follow_links=follow_links)
        return [(path, checkpoint, checkpoint.left_out())]
    except SeveralModelsError as error:
        if not all_models:
            raise
        several, beside = error.models, error.left_out
    others = tuple(each for each in beside if each.reason is not LeftOutReason.BESIDE_MODELS)
    # A file that is named alone may be a link to anywhere; one that its folder names may not.
    links = LinkBoundary.around(place)
    models: list[tuple[str, Checkpoint, tuple[LeftOut, ...]]] = []
    errors: dict[str, TensorDedupError] = {}
    for each in several:
        inner = Path(each)
        try:
            found = _opened(each, snapshot_in(inner), follow_links, all_models, failed)
        except (CheckpointError, UnsupportedError) as error:
            errors[each] = error
            continue
        if inner.is_file():
            found = [
                (shown, held if held.name or follow_links else replace(held, links=links), others)
                for shown, held, _ in found
            ]
        models += found
    if not models:
        raise next(iter(errors.values()))
    failed.update((each, str(error)) for each, error in errors.items())
    return models


def _measure(
    path: str,
    checkpoint: Checkpoint,
    left_out: tuple[LeftOut, ...],
    digests: Digests,
    min_tensor_bytes: int,
) -> Measured:
    tensors, small, small_bytes = [], [], 0
    for name, file, spec in checkpoint.tensors():
        if spec.nbytes < min_tensor_bytes:
            small.append(name)
            small_bytes += spec.nbytes
            continue
        known = digests.by_file[file.path]
        found = Fingerprint(spec.shape, spec.dtype, known[spec.start, spec.nbytes])
        places = leaf_places(spec.start, spec.nbytes)
        leaves = tuple(known[place] for place in places if place in known)
        if len(leaves) < len(places):
            leaves = ()
        tensors.append(AnalyzedTensor(name, found, spec.nbytes, leaves))
    copies = tuple(_not_indexed(checkpoint, digests))
    markers, name = _markers(checkpoint), checkpoint.name
    return Measured(path, tensors, small, markers, left_out, copies, name, small_bytes)


def _not_indexed(checkpoint: Checkpoint, digests: Digests) -> Iterator[NotIndexed]:
    copies = list(checkpoint.not_indexed())
    wanted = {name for name, _, _ in copies}
    counted = {
        name: (spec.dtype, spec.shape, digests.by_file[file.path].get((spec.start, spec.nbytes)))
        for name, file, spec in checkpoint.tensors()
        if name in wanted
    }
    for name, file, spec in copies:
        found = digests.by_file[file.path].get((spec.start, spec.nbytes))
        if found is None:
            continue  # below the minimum: whether it differs is not known
        differs = (spec.dtype, spec.shape, found) != counted.get(name)
        yield NotIndexed(name, checkpoint.relative(file), differs)


def _markers(checkpoint: Checkpoint) -> list[Marker]:
    found = [in_header(file.header) for file in checkpoint.files]
    beside = in_files([checkpoint.path / SIDECAR]) if checkpoint.path.is_dir() else []
    return [*beside, *(marker for marker in found if marker is not None)]


def _pairs(checkpoints: Sequence[Measured]) -> Iterable[PairOverlap]:
    counts = [Counter(t.fingerprint for t in c.tensors) for c in checkpoints]
    sizes = {t.fingerprint: t.nbytes for c in checkpoints for t in c.tensors}
    for (a, left), (b, right) in combinations(zip(checkpoints, counts, strict=True), 2):
        common = left & right
        shared_bytes = sum(sizes[key] * count for key, count in common.items())
        yield PairOverlap(a.path, b.path, common.total(), shared_bytes)


def _shared_tensors(checkpoints: Sequence[Measured]) -> list[SharedTensor]:
    places: defaultdict[Fingerprint, list[tuple[str, str]]] = defaultdict(list)
    sizes = {}
    for checkpoint in checkpoints:
        for tensor in checkpoint.tensors:
            places[tensor.fingerprint].append((checkpoint.path, tensor.name))
            sizes[tensor.fingerprint] = tensor.nbytes
    shared = [
        SharedTensor(fingerprint, sizes[fingerprint], tuple(where))
        for fingerprint, where in places.items()
        if len(where) > 1
    ]
    return sorted(shared, key=lambda tensor: (-tensor.nbytes, natural(tensor.places[0][1])))


def _layer_dict(layer: SharedLayer) -> dict[str, Any]:
    return {
        "layer": layer.places[0][1],
        "digest": layer.digest,
        "tensors": layer.tensors,
        "bytes": layer.nbytes,
        "places": [{"path": path, "layer": name} for path, name in layer.places],
    }


def _tensor_dict(tensor: SharedTensor) -> dict[str, Any]:
    return {
        "digest": tensor.fingerprint.digest,
        "dtype": tensor.fingerprint.dtype,
        "shape": list(tensor.fingerprint.shape),
        "bytes": tensor.nbytes,
        "places": [{"path": path, "name": name} for path, name in tensor.places],
    }


def _tensors_dict(checkpoints: Sequence[Measured]) -> list[dict[str, Any]]:
    """Each distinct tensor and all places it has: the number of the checkpoint, layer and name."""
    places: defaultdict[Fingerprint, list[dict[str, Any]]] = defaultdict(list)
    sizes = {}
    for number, checkpoint in enumerate(checkpoints):
        for tensor in checkpoint.tensors:
            sizes[tensor.fingerprint] = tensor.nbytes
            layer = split(tensor.name)[0]
            place = {"checkpoint": number, "layer": layer, "name": tensor.name}
            places[tensor.fingerprint].append(place)
    return [
        {
            "digest": kind.digest,
            "dtype": kind.dtype,
            "shape": list(kind.shape),
            "bytes": sizes[kind],
            "places": where,
        }
        for kind, where in places.items()
    ]


def _vllm_dict(fused: Fused) -> dict[str, Any]:
    return {
        "final_tensors": fused.tensors,
        "final_shared_tensors": fused.shared_tensors,
        "final_shared_bytes": fused.shared_bytes,
        "lost_to_fusing_bytes": fused.lost_bytes,
        "leaf_shared_bytes": fused.leaf_shared_bytes,
        "groups_broken": fused.broken,
        "groups": [
            {
                "suffix": group.suffix,
                "fused": group.fused,
                "followers": group.followers,
                "shared": group.shared,
                "broken": group.broken,
                "lost_bytes": group.lost_bytes,
            }
            for group in fused.groups
        ],
    }
