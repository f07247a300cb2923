"""The runs in a store: names and order of their steps, their metrics, sizes and differences.

A step is the checkpoint RUN@STEP, and RUN@STEP@pin is the reference that keeps one whatever the
retention rules say. Numbers are written without leading zeros, since a name is what people type
after store://; whoever lists steps sorts them by number.

The time of saving orders steps, not their numbers: when a training went back to step 5 and saved 6
again, the steps 8 to 10 of its first attempt are older than that. Of steps whose references have
the same time (the clocks of file systems tick every few milliseconds, some every second), the
greater one counts as the later. Nothing here writes.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

from tensor_dedup.errors import StoreError
from tensor_dedup.store.checkpoints.errors import (
    BadStepError,
    NotATrainingError,
    PinnedStepError,
    UnknownStepError,
)
from tensor_dedup.store.checkpoints.notes import Notes, shown
from tensor_dedup.store.errors import (
    BadNameError,
    DamagedFileError,
    MissingObjectError,
    NewerFormatError,
    UnknownNameError,
)
from tensor_dedup.store.files import FileStatus
from tensor_dedup.store.format.manifests import Manifest, Piece
from tensor_dedup.store.format.names import check_form, check_name, file_of
from tensor_dedup.store.objects import Objects

_LOG = logging.getLogger("tensor_dedup")
# Eighteen digits fit everywhere; nobody counts further.
_NAME = re.compile(r"(?P<run>.+)@(?P<step>0|[1-9][0-9]{0,17})(?P<pin>@pin)?", re.DOTALL)
_PIN = "@pin"
_LARGEST = 10**18 - 1


@dataclass(frozen=True, slots=True)
class StepName:
    """The parsed name of a run's reference: of a step, or the one that keeps a step."""

    run: str
    step: int
    kept: bool

    @property
    def name(self) -> str:
        """The name in the store."""
        return f"{self.run}@{self.step}{_PIN if self.kept else ''}"


def step_name(run: str, step: int, *, kept: bool = False) -> str:
    """Return the name of a step or, with `kept`, of the reference that keeps it.

    Raises:
        BadStepError: the step is not a whole number from 0 to 10**18 - 1.
        BadNameError: the run's name is invalid.
    """
    if type(step) is not int or not 0 <= step <= _LARGEST:
        raise BadStepError.at(f"run {run!r}", f"the step {step!r}", step=repr(step))
    return check_name(f"{run}@{step}{_PIN if kept else ''}")


def check_run(run: str) -> str:
    """Return `run` if it is a valid name of a run.

    Raises:
        BadNameError: it is not valid.
    """
    # With the longest step, so that a run that began can go on. Whether the file of a step can be
    # called so is for that step to say: steps with shorter numbers may be there, to be read.
    check_form(f"{run}@{_LARGEST}{_PIN}")
    return run


def parse_step_name(name: str) -> StepName | None:
    """Parse a name; return None if it is not that of a step."""
    found = _NAME.fullmatch(name)
    return StepName(found["run"], int(found["step"]), bool(found["pin"])) if found else None


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a run.

    `nbytes` counts its tensors and small files; `saved_at` is in seconds since 1970.
    """

    run: str
    step: int
    name: str
    manifest: str
    adapter: str
    metrics: dict[str, float]
    nbytes: int
    pinned: bool
    saved_at: int

    def to_dict(self) -> dict[str, object]:
        """Return the step as a JSON object."""
        return asdict(self) | {"metrics": shown(self.metrics)}


@dataclass(frozen=True, slots=True)
class RunStats:
    """The sizes of a run, or of all runs together (`run_id` is then None).

    `total_chunks` counts references to tensors in the manifests of its steps, `unique_chunks` the
    distinct digests among them; `dedup_ratio` is unique / total, where lower is more reuse;
    `total_bytes` is what the distinct tensors take on disk, encoded as they are.
    """

    run_id: str | None
    checkpoints: int
    total_chunks: int
    unique_chunks: int
    dedup_ratio: float
    total_bytes: int

    def to_dict(self) -> dict[str, object]:
        """Return the sizes as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Growth:
    """What a step added to its run: the tensors that no earlier step had, and their bytes.

    `stored_bytes` is what these take on disk; `dedup_ratio` is that of the run up to here, as in
    RunStats.
    """

    step: int
    tensors: int
    new_tensors: int
    nbytes: int
    new_bytes: int
    stored_bytes: int
    dedup_ratio: float

    def to_dict(self) -> dict[str, object]:
        """Return the growth as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Difference:
    """How two steps differ: names of tensors, and the bytes of those that differ."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    unchanged: int
    changed_bytes: int
    metrics: dict[str, tuple[float | None, float | None]]

    def to_dict(self) -> dict[str, object]:
        """Return the difference as a JSON object."""
        metrics = {
            name: [None if value is None else shown({"": value})[""] for value in both]
            for name, both in self.metrics.items()
        }
        return asdict(self) | {"metrics": metrics}


def step_numbers(objects: Objects, run: str) -> list[int]:
    """Return the numbers of all names that look like steps of a run, in order, imports included."""
    found = (parse_step_name(name) for name in objects.names())
    return sorted(each.step for each in found if each and each.run == run and not each.kept)


def kept_steps(objects: Objects, run: str) -> set[int]:
    """Return the steps of a run that are kept whatever the retention rules say."""
    found = (parse_step_name(name) for name in objects.names())
    return {each.step for each in found if each and each.run == run and each.kept}


def check_not_kept(objects: Objects, run: str, step: int) -> None:
    """Raise PinnedStepError if this step may be neither replaced nor deleted.

    The answer is stable only while the caller holds `naming`.
    """
    try:
        path = objects.layout.refs / file_of(step_name(run, step, kept=True))
    except BadNameError:  # too long a name for any file: nothing can pin the step
        return
    if objects.files.status(path) is not None:
        what = f"the step {step} of {run!r} is pinned"
        raise PinnedStepError.at(objects.layout.root, what, run=run, step=step)


def run_names(objects: Objects) -> list[str]:
    """Return the names of the runs in a store. An import under a step's name makes no run.

    A run of which no step can be read is left out.
    """
    found = {
        each.run for name in objects.names() if (each := parse_step_name(name)) and not each.kept
    }
    return sorted(run for run in found if _has_step(objects, run))


def _has_step(objects: Objects, run: str) -> bool:
    for step in step_numbers(objects, run):
        with suppress(StoreError):
            manifest_of(objects, run, step)
            return True
    return False


def manifests_of_run(objects: Objects, run: str) -> Iterator[tuple[int, Manifest]]:
    """Yield the steps of a run and their manifests, in order.

    Imported and missing ones are left out.
    """
    for step in step_numbers(objects, run):
        with suppress(UnknownStepError, NotATrainingError):
            yield step, manifest_of(objects, run, step)[1]


def manifest_of(objects: Objects, run: str, step: int) -> tuple[str, Manifest, Notes]:
    """Return the name of a step's manifest, the manifest, and its notes.

    Raises:
        UnknownStepError: the run has no such step.
        NotATrainingError: the checkpoint of this name was imported.
    """
    name = step_name(run, step)
    try:
        manifest = objects.ref(name)
    except UnknownNameError as error:
        known = step_numbers(objects, run)
        has = f"{len(known)} steps, from {known[0]} to {known[-1]}" if known else "none"
        has = f"step {known[0]} only" if len(known) == 1 else has
        what = f"the run {run!r} has no step {step}; it has {has}"
        raise UnknownStepError.at(objects.layout.root, what, run=run, step=step) from error
    content = objects.manifest(manifest)
    notes = Notes.from_texts(content.notes)
    if notes is None:
        raise NotATrainingError.at(objects.layout.root, f"{name!r} was imported", name=name)
    return manifest, content, notes


def saved_ns(objects: Objects, run: str, step: int) -> int:
    """Return the time at which a step was saved, in ns since 1970; 0 if it is gone."""
    status = objects.files.status(objects.layout.refs / file_of(step_name(run, step)))
    return status.mtime_ns if status is not None else 0


def by_save_time(saved: Mapping[int, int]) -> list[int]:
    """Return steps in the order of saving, those of equal time by number."""
    return sorted(saved, key=lambda step: (saved[step], step))


def describe(objects: Objects, run: str, step: int, kept: Iterable[int]) -> Step:
    """Describe a step without reading its tensors. Raises the errors of `manifest_of`."""
    manifest, content, notes = manifest_of(objects, run, step)
    name = step_name(run, step)
    saved_at = saved_ns(objects, run, step) // 10**9
    metrics = dict(notes.metrics)
    return Step(
        run, step, name, manifest, notes.adapter, metrics, content.nbytes, step in kept, saved_at
    )


def describe_all(objects: Objects, run: str) -> list[Step]:
    """Describe all steps of a run, in order; imported and missing ones are left out.

    A step that cannot be read is left out too, and logged, because the others are useful without
    it.
    """
    kept = kept_steps(objects, run)
    found = []
    for step in step_numbers(objects, run):
        try:
            found.append(describe(objects, run, step, kept))
        except (DamagedFileError, MissingObjectError) as error:
            _LOG.warning("left out step %d of run %r: %s", step, run, error)
        except (UnknownStepError, NotATrainingError):
            pass
    return found


def tensors_of(objects: Objects, content: Manifest, seen: dict[bytes, list[Piece]]) -> list[Piece]:
    """Return the tensors of a manifest. Pages in `seen` are not read again."""
    pieces: list[Piece] = []
    for page in content.pages:
        if page not in seen:
            seen[page] = list(objects.page(page.hex()).pieces)
        pieces += seen[page]
    return [piece for piece in pieces if piece.name is not None]


def latest_digests(objects: Objects, run: str) -> dict[str, bytes]:
    """Return the digests of a run's latest step, by tensor name, or none if it is unreadable."""
    times = {step: saved_ns(objects, run, step) for step in step_numbers(objects, run)}
    for step in reversed(by_save_time(times)):
        with suppress(StoreError):
            pieces = tensors_of(objects, manifest_of(objects, run, step)[1], {})
            return {piece.name: piece.digest for piece in pieces if piece.name is not None}
    return {}


def run_stats(objects: Objects, runs: Iterable[str], run_id: str | None) -> RunStats:
    """Measure the steps of some runs together, in a session. Reads no tensor data."""
    seen: dict[bytes, list[Piece]] = {}
    sizes: dict[bytes, int] = {}
    steps = total = 0
    for run in runs:
        for _, content in manifests_of_run(objects, run):
            tensors = tensors_of(objects, content, seen)
            steps += 1
            total += len(tensors)
            sizes |= {piece.digest: piece.nbytes for piece in tensors}
    stored = sum(stored_bytes(objects, sizes).values())
    ratio = len(sizes) / total if total else 1.0
    return RunStats(run_id, steps, total, len(sizes), round(ratio, 4), stored)


def stored_bytes(objects: Objects, wanted: Collection[bytes]) -> dict[bytes, int]:
    """Return the bytes that each of these pieces takes on disk, where it takes least."""
    least: dict[bytes, int] = {}
    for container in objects.containers():
        with suppress(MissingObjectError):
            for record in objects.table(container).records:
                if record.digest in wanted:
                    known = least.get(record.digest, record.stored)
                    least[record.digest] = min(known, record.stored)
    return least


def growth(objects: Objects, run: str) -> list[Growth]:
    """Measure what each step of a run added to it, in order, in a session. Reads no tensor data."""
    seen: dict[bytes, list[Piece]] = {}
    known: dict[bytes, int] = {}
    total = 0
    found: list[tuple[int, int, dict[bytes, int], int, float]] = []
    for step, content in manifests_of_run(objects, run):
        tensors = tensors_of(objects, content, seen)
        new = {piece.digest: piece.nbytes for piece in tensors if piece.digest not in known}
        known |= new
        total += len(tensors)
        ratio = len(known) / total if total else 1.0
        found.append((step, len(tensors), new, content.nbytes, ratio))
    stored = stored_bytes(objects, known)
    return [
        Growth(
            step,
            tensors,
            len(new),
            nbytes,
            sum(new.values()),
            sum(stored.get(digest, 0) for digest in new),
            round(ratio, 4),
        )
        for step, tensors, new, nbytes, ratio in found
    ]


def difference(objects: Objects, one: tuple[str, int], two: tuple[str, int]) -> Difference:
    """Compare two steps, in a session. Raises the errors of `manifest_of`."""
    seen: dict[bytes, list[Piece]] = {}
    (_, first, old_notes), (_, second, new_notes) = (
        manifest_of(objects, *one),
        manifest_of(objects, *two),
    )
    old = {piece.name: piece for piece in tensors_of(objects, first, seen)}
    new = {piece.name: piece for piece in tensors_of(objects, second, seen)}
    both = defaultdict(list)
    for name in new.keys() & old.keys():
        both[old[name] == new[name]].append(name or "")
    metrics = {
        name: (old_notes.metrics.get(name), new_notes.metrics.get(name))
        for name in sorted({*old_notes.metrics, *new_notes.metrics})
    }
    return Difference(
        tuple(name or "" for name in new if name not in old),
        tuple(name or "" for name in old if name not in new),
        tuple(sorted(both[False])),
        len(both[True]),
        sum(new[name].nbytes for name in both[False]),
        metrics,
    )


class StepOrder:
    """The order of the steps of a run, as one handle knows it. Any thread, in a session.

    An import may have a name like a step's; only the manifest tells, and it is read once.
    """

    def __init__(self, objects: Objects, run: str) -> None:
        self._objects, self._run = objects, run
        self._known: dict[int, tuple[FileStatus, bool]] = {}

    def saved(self, *, readable: bool = False) -> dict[int, int]:
        """Return each step, in order, with the time at which it was saved, in ns since 1970.

        With `readable`, a step whose manifest cannot be read is left out.
        """
        found: dict[int, int] = {}
        for step in step_numbers(self._objects, self._run):
            path = self._objects.layout.refs / file_of(step_name(self._run, step))
            status = self._objects.files.status(path)
            if status is not None and self._is_step(step, status, unreadable=not readable):
                found[step] = status.mtime_ns
        return found

    def _is_step(self, step: int, status: FileStatus, *, unreadable: bool) -> bool:
        known = self._known.get(step)
        if known is not None and known[0] == status:
            return known[1]
        try:
            manifest_of(self._objects, self._run, step)
        except UnknownStepError:  # deleted just now
            return False
        except (DamagedFileError, MissingObjectError, NewerFormatError):
            return unreadable
        except NotATrainingError:
            self._known[step] = (status, False)
            return False
        self._known[step] = (status, True)
        return True
