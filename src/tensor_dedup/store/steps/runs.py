"""The training runs in a store: names, order, metrics and differences of their steps.

A step is the checkpoint RUN@STEP. A further reference, its mark RUN@STEP@keep, keeps it: it is then
neither replaced nor deleted, whatever the retention rules say. Step numbers have no leading zeros.
References sort as text, so functions that list steps sort them by number.

Steps also have an order of saving. If a training went back to step 5 and saved step 6 again, the
steps 8 to 10 of the first attempt are older than the new step 6. Each step's manifest therefore has
a sequence number that is greater than those of all earlier steps. No clock is used, because clocks
may be set back. If two steps have the same sequence number, the step with the greater number counts
as later.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from typing import NamedTuple

from tensor_dedup.errors import StoreError
from tensor_dedup.store import rename_journal
from tensor_dedup.store.errors import (
    BadNameError,
    DamagedFileError,
    MissingObjectError,
    NewerFormatError,
    UnknownNameError,
)
from tensor_dedup.store.files import FileStatus
from tensor_dedup.store.format.manifests import Manifest, Piece
from tensor_dedup.store.format.names import (
    MARK,
    MAX_NAME,
    STEP_FORM,
    check_form,
    check_name,
    file_of,
)
from tensor_dedup.store.format.references import renamed_to
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.steps.errors import (
    BadOption,
    BadOptionError,
    BadStepError,
    KeptStepError,
    NotATrainingError,
    RenamedRunError,
    TakenStepError,
    UnknownStepError,
)
from tensor_dedup.store.steps.notes import Notes, content_name, shown
from tensor_dedup.store.steps.retention import Goals
from tensor_dedup.store.steps.sequence import next_sequence
from tensor_dedup.suggestions import perhaps

_log = logging.getLogger(__name__)
_LARGEST = 10**18 - 1


@dataclass(frozen=True, slots=True)
class StepName:
    """The parsed name of a step or, if `kept` is True, of the reference that keeps a step."""

    run: str
    step: int
    kept: bool

    @property
    def name(self) -> str:
        """The name as text: RUN@STEP or, for a mark, RUN@STEP@keep."""
        return f"{self.run}@{self.step}{MARK if self.kept else ''}"


def step_name(run: str, step: int, *, kept: bool = False) -> str:
    """Return the name of a step or, with `kept`, of the reference that keeps it.

    Raises:
        BadStepError: The step is not a whole number from 0 to 10**18 - 1.
        BadNameError: The run's name is invalid.
    """
    if type(step) is not int or not 0 <= step <= _LARGEST:
        raise BadStepError.at(f"run {run!r}", f"the step {step!r}", step=repr(step))
    return check_name(f"{run}@{step}{MARK if kept else ''}")


def check_run(run: object) -> str:
    """Return `run` if it is a valid name for a run.

    Raises:
        BadNameError: The value is not a string, is too long, or does not have the syntax of a name.
    """
    # With the longest step, so that a run that began can go on. Whether the file of a step can be
    # called so is for that step to say: steps with shorter numbers may be there, to be read.
    longest = f"@{_LARGEST}{MARK}"
    try:
        if isinstance(run, str):
            check_form(run + longest)
            return run
    except BadNameError:  # about a name that nobody has given
        pass
    most = MAX_NAME - len(longest)
    if isinstance(run, str) and len(run) > most:
        what = f"it has {len(run)} characters, and a run's name {most} at most; give a shorter one"
        raise BadNameError(f"{run[:most]!r}...: {what}", name=run)
    raise BadNameError.at(repr(run), "this cannot be the name of a run", name=run)


def check_no_step_s_name(run: str) -> None:
    """Check that the name of a run is not the name of a step (RUN@STEP).

    Raises:
        BadOptionError: The name is the name of a step.
    """
    found = parse_step_name(run)
    if found is not None and not found.kept:
        what = f"that is the name of the step {found.step} of the run {found.run!r}"
        raise BadOptionError.of(BadOption.RUN, f"run {run!r}", what, run=run)


def parse_step_name(name: str) -> StepName | None:
    """Return the parsed form of `name`, the name of a step or of a mark.

    Return None for any other name.
    """
    found = STEP_FORM.fullmatch(name)
    return StepName(found["run"], int(found["step"]), bool(found["mark"])) if found else None


@dataclass(frozen=True, slots=True)
class Step:
    """A step in a listing of a run.

    `nbytes` is the size of the step's tensors and small files. `saved_at` is in seconds since 1970,
    as the step's manifest says; for a step without that note, when its reference was written.
    `goals` says whether the least or the greatest value of a metric is best. It covers only the
    metric in the run's `keep_best`.
    """

    run: str
    step: int
    name: str
    manifest: str
    adapter: str
    metrics: dict[str, float]
    nbytes: int
    kept: bool
    saved_at: int
    goals: Goals = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Return all fields as a dict for JSON; metrics that are NaN or infinite become None."""
        return asdict(self) | {"metrics": shown(self.metrics)}


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between two steps in names of tensors, in bytes, and in metrics.

    - `changed_bytes` is the size of the changed tensors in the second step.
    - `metrics` maps each metric to its values in the two steps; a missing value is None.
    - `renamed` maps old to new names of tensors with equal content. These names are in neither
      `added` nor `removed`.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    unchanged: int
    changed_bytes: int
    metrics: dict[str, tuple[float | None, float | None]]
    renamed: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Return all fields as a dict for JSON; metrics that are NaN or infinite become None."""
        metrics = {
            name: [None if value is None else shown({"": value})[""] for value in both]
            for name, both in self.metrics.items()
        }
        return asdict(self) | {"metrics": metrics}


def steps_text(count: int) -> str:
    """Return a count of steps as text: "1 step", "2 steps"."""
    return f"{count} step{'s' * (count != 1)}"


def step_numbers(objects: Objects, run: str) -> list[int]:
    """Return the sorted numbers of all checkpoints that are named like a step of `run`.

    Imported checkpoints with such names are included.
    """
    found = (parse_step_name(name) for name in objects.names())
    return sorted(each.step for each in found if each and each.run == run and not each.kept)


def kept_steps(objects: Objects, run: str) -> set[int]:
    """Return the numbers of the kept steps of `run`."""
    found = (parse_step_name(name) for name in objects.references())
    return {each.step for each in found if each and each.run == run and each.kept}


def check_replaceable(objects: Objects, run: str, step: int) -> None:
    """Check that neither a mark nor another checkpoint prevents the saving of a step.

    An earlier save of the same step may be replaced, even if it is damaged. The answer holds only
    inside `with locks.naming(...):`.

    Raises:
        KeptStepError: The step is kept.
        NotATrainingError: A checkpoint that is not a step of this run has the name.
    """
    check_not_kept(objects, run, step)
    name = step_name(run, step)
    if objects.files.status(objects.layout.refs / file_of(name)) is None:
        return
    try:
        manifest_of(objects, run, step)
    except (UnknownStepError, DamagedFileError, MissingObjectError):
        pass
    except NotATrainingError as error:
        what = f"the step {step} of the run {run!r} would replace {name!r}, which was imported"
        raise NotATrainingError.at(
            objects.layout.root, what, name=name, run=run, step=step
        ) from error


def check_no_step(objects: Objects, name: str) -> None:
    """Check that an import under `name` would replace neither a step nor a mark.

    The answer holds only inside `with locks.naming(...):`.

    Raises:
        TakenStepError: The name is that of an existing step, or is the name of a mark.
    """
    found = parse_step_name(name)
    if found is None:
        return
    facts = {"name": name, "run": found.run, "step": found.step}
    if found.kept:
        what = f"{name!r} is what keeps the step {found.step} of the run {found.run!r}"
        raise TakenStepError.at(objects.layout.root, what, **facts)
    if objects.files.status(objects.layout.refs / file_of(name)) is None:
        return
    with suppress(UnknownStepError, NotATrainingError, DamagedFileError, MissingObjectError):
        manifest_of(objects, found.run, found.step)
        what = f"{name!r} is the step {found.step} of the run {found.run!r}"
        raise TakenStepError.at(objects.layout.root, what, **facts)


def check_mark(objects: Objects, run: str, step: int) -> None:
    """Check that the name for the mark of a step is not taken by an imported checkpoint.

    The answer holds only inside `with locks.naming(...):`.

    Raises:
        NotATrainingError: An imported checkpoint has the name.
    """
    name = step_name(run, step, kept=True)
    try:
        notes = Notes.from_texts(objects.manifest(objects.ref(name)).notes)
    except (UnknownNameError, DamagedFileError, MissingObjectError):
        return
    if notes is None or notes.run != run:
        what = f"{name!r} was imported, and keeps no step of the run {run!r}"
        raise NotATrainingError.at(objects.layout.root, what, name=name, run=run, step=step)


def keep_step(objects: Objects, run: str, step: int) -> None:
    """Mark a step, so that it stays whatever the retention rules say.

    Call it inside `with locks.session(...):`. Keeping a kept step has no effect.

    Raises:
        UnknownStepError: The run has no such step.
        NotATrainingError: The checkpoint with the name of the step or of its mark was imported.
    """
    name = step_name(run, step, kept=True)
    manifest, _, _ = manifest_of(objects, run, step)
    objects.set_ref(name, manifest, replace=True, check_name=lambda: check_mark(objects, run, step))
    try:
        found, _, _ = manifest_of(objects, run, step)
    except UnknownStepError:  # deleted just before
        objects.drop_ref(name)
        raise
    if found != manifest:  # replaced just before; from now on it is not
        objects.set_ref(name, found, replace=True)


def check_not_kept(objects: Objects, run: str, step: int) -> None:
    """Check that a step is not kept.

    The answer holds only inside `with locks.naming(...):`.

    Raises:
        KeptStepError: The step is kept.
    """
    try:
        path = objects.layout.refs / file_of(step_name(run, step, kept=True))
    except BadNameError:  # too long a name for any file: nothing can keep the step
        return
    if objects.files.status(path) is not None:
        what = f"the step {step} of {run!r} is kept"
        raise KeptStepError.at(objects.layout.root, what, run=run, step=step)


def check_no_kept_step(objects: Objects, name: str) -> None:
    """Check that `name` is not the name of a kept step.

    The answer holds only inside `with locks.naming(...):`.

    Raises:
        KeptStepError: The name is the name of a kept step.
    """
    found = parse_step_name(name)
    if found is not None and not found.kept:
        check_not_kept(objects, found.run, found.step)


def run_names(objects: Objects) -> list[str]:
    """Return the sorted names of the runs in a store that have at least one readable step.

    Imported checkpoints that are named like a step do not count.
    """
    found = {
        each.run for name in objects.names() if (each := parse_step_name(name)) and not each.kept
    }
    return sorted(run for run in found if is_run(objects, run))


def is_run(objects: Objects, run: str) -> bool:
    """Return whether a store has a run of this name: one with a step that can be read."""
    for step in step_numbers(objects, run):
        with suppress(StoreError):
            manifest_of(objects, run, step)
            return True
    return False


def manifests_of_run(objects: Objects, run: str) -> Iterator[tuple[int, Manifest]]:
    """Yield the number and the manifest of each step of a run, ordered by number.

    Left out are imported checkpoints that are named like a step, and steps deleted during the
    iteration.
    """
    for step in step_numbers(objects, run):
        with suppress(UnknownStepError, NotATrainingError):
            yield step, manifest_of(objects, run, step)[1]


def manifest_of(objects: Objects, run: str, step: int) -> tuple[str, Manifest, Notes]:
    """Return the name of a step's manifest, the manifest, and its parsed notes.

    Raises:
        UnknownStepError: The run has no such step.
        NotATrainingError: The checkpoint with the name of the step was not saved by this run.
    """
    name = step_name(run, step)
    try:
        manifest = objects.ref(name)
    except UnknownNameError as error:
        known = step_numbers(objects, run)
        has = f"{steps_text(len(known))}, from {known[0]} to {known[-1]}" if known else "none"
        has = f"step {known[0]} only" if len(known) == 1 else has
        raise UnknownStepError.of(objects.layout.root, run, step, has) from error
    content = objects.manifest(manifest)
    notes = Notes.from_texts(content.notes)
    if notes is None or (notes.run, notes.step) != (run, step):
        whose = "was imported" if notes is None else f"is step {notes.step} of {notes.run!r}"
        raise NotATrainingError.at(objects.layout.root, f"{name!r} {whose}", name=name)
    return manifest, content, notes


class StepPlace(NamedTuple):
    """The place of a step in the order of saving, and facts about its reference and manifest.

    - `sequence` is the place in the order, as a sequence number.
    - `reference` is a value that changes when the reference changes. In a store, it is the status
      of the reference's file. In a remote, it is the name of the manifest, or a placeholder if the
      reference is damaged.
    - `manifest` is the name of the step's manifest, and `content` the result of `content_name` for
      it. Both are None if the manifest cannot be read.
    """

    sequence: int
    reference: object
    manifest: str | None
    content: str | None = None

    @property
    def readable(self) -> bool:
        """Whether the step's manifest could be read."""
        return self.manifest is not None


def in_save_order(places: Mapping[int, StepPlace]) -> list[int]:
    """Return the steps in `places` in the order of saving.

    Steps with the same sequence number are sorted by step number, but steps whose manifest cannot
    be read come last.
    """

    def key(step: int) -> tuple[int, bool, int]:
        return places[step].sequence, not places[step].readable, step

    return sorted(places, key=key)


def describe(objects: Objects, run: str, step: int, kept: Iterable[int]) -> Step:
    """Return the description of a step, made without reading its tensors.

    `kept` has the numbers of the steps that are kept.

    Raises:
        UnknownStepError: The run has no such step.
        NotATrainingError: The checkpoint with the name of the step was not saved by this run.
    """
    manifest, content, notes = manifest_of(objects, run, step)
    name = step_name(run, step)
    status = objects.files.status(objects.layout.refs / file_of(name))
    referred_at = status.mtime_ns // 10**9 if status is not None else 0
    return Step(
        run,
        step,
        name,
        manifest,
        notes.adapter,
        dict(notes.metrics),
        content.nbytes,
        step in kept,
        notes.saved or referred_at,
        notes.goals,
    )


def describe_all(objects: Objects, run: str) -> list[Step]:
    """Return the descriptions of all steps of a run, ordered by number.

    Imported checkpoints that are named like a step are left out. Damaged steps are left out, too,
    and a warning is logged for each.

    Raises:
        NewerFormatError: A step was saved by a later version.
    """
    kept = kept_steps(objects, run)
    found = []
    for step in step_numbers(objects, run):
        try:
            found.append(describe(objects, run, step, kept))
        except (DamagedFileError, MissingObjectError) as error:
            _log.warning("left out step %d of run %r: %s", step, run, str(error))
        except (UnknownStepError, NotATrainingError):
            pass
    return found


def tensors_of(objects: Objects, content: Manifest, seen: dict[bytes, list[Piece]]) -> list[Piece]:
    """Return the tensors that the manifest `content` lists.

    `seen` maps the digests of manifest pages (lists of pieces) that were read earlier to their
    pieces. These pages are not read again. Pages that are read are added to `seen`.
    """
    pieces: list[Piece] = []
    for page in content.pages:
        if page not in seen:
            seen[page] = list(objects.page(page.hex()).pieces)
        pieces += seen[page]
    return [piece for piece in pieces if piece.name is not None]


def latest_digests(objects: Objects, order: "StepOrder", least: int) -> dict[str, bytes]:
    """Return the digests of the tensors in the latest readable step of a run, by name.

    `order` is the order of the run's steps. Tensors with fewer than `least` bytes are left out. If
    no step is readable, the result is empty.
    """
    for step in reversed(in_save_order(order.places(readable=True))):
        with suppress(StoreError):
            pieces = tensors_of(objects, manifest_of(objects, order.run, step)[1], {})
            large = (piece for piece in pieces if piece.nbytes >= least)
            return {piece.name: piece.digest for piece in large if piece.name is not None}
    return {}


def difference(objects: Objects, one: tuple[str, int], two: tuple[str, int]) -> Difference:
    """Compare the steps `one` and `two`, each given as a run and a step number.

    Call it inside `with locks.session(...):`.

    Raises:
        UnknownStepError: A run has no such step.
        NotATrainingError: A checkpoint with the name of a step was not saved by its run.
    """
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
    renamed = _renamed(
        [piece for name, piece in old.items() if name not in new],
        [piece for name, piece in new.items() if name not in old],
    )
    there = {*renamed.values()}
    return Difference(
        tuple(name or "" for name in new if name not in old and name not in there),
        tuple(name or "" for name in old if name not in new and name not in renamed),
        tuple(sorted(both[False])),
        len(both[True]),
        sum(new[name].nbytes for name in both[False]),
        metrics,
        renamed,
    )


def _renamed(removed: Iterable[Piece], added: Iterable[Piece]) -> dict[str, str]:
    """Pair tensors of equal content, each once; of several, those whose names end alike."""
    alike = defaultdict[tuple[object, ...], list[str]](list)
    for piece in removed:
        alike[piece.digest, piece.dtype, piece.shape].append(piece.name or "")
    found = {}
    for piece in added:
        names = alike.get((piece.digest, piece.dtype, piece.shape))
        if piece.name and names:
            _, name = max((_same_ending(name, piece.name), name) for name in names)
            names.remove(name)
            found[name] = piece.name
    return found


def _same_ending(one: str, other: str) -> int:
    """How many characters at the ends of two names are the same."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def latest_step(objects: Objects, run: str) -> StepName:
    """Return the step of `run` that was saved last, as `CheckpointStore.latest` does.

    Call it inside `with locks.session(...):`.

    Raises:
        UnknownNameError: The store has no step of the run.
    """
    before = None
    numbers = step_numbers(objects, check_run(run))
    order: list[int] = []
    while numbers != before:  # a retention may delete the latest step when a later one has come
        order = in_save_order(StepOrder(objects, run).places())
        before, numbers = numbers, step_numbers(objects, run)
    if not order:
        what = f"no step of a run {run!r}{perhaps(run, run_names(objects))}"
        raise UnknownNameError.at(objects.layout.root, what, name=run, run=run)
    return StepName(run, order[-1], kept=False)


class StepOrder:
    """The order in which the steps of a run were saved. Safe from any thread.

    Use it inside `with locks.session(...):`. Each manifest is read once and remembered.
    """

    def __init__(self, objects: Objects, run: str) -> None:
        self.run = run
        self._objects = objects
        # By step: the state of its reference, and its place, or None for an import.
        self._known: dict[int, tuple[FileStatus, StepPlace | None]] = {}
        self._note = rename_journal.note_of(objects, run)
        self._last: int | None = None
        self._lock = threading.Lock()

    def places(self, *, readable: bool = False) -> dict[int, StepPlace]:
        """Return the place of each step in the order of saving, by step number.

        A step whose manifest cannot be read is placed by the date of its reference. With
        `readable`, such a step is left out.
        """
        found: dict[int, StepPlace] = {}
        unreadable: dict[int, FileStatus] = {}
        for step in step_numbers(self._objects, self.run):
            status = self.status(step)
            if status is None:
                continue
            try:
                place = self._read(step, status)
            except (DamagedFileError, MissingObjectError, NewerFormatError):
                unreadable[step] = status
                continue
            if place is not None:
                found[step] = place
        if readable or not unreadable:
            return found
        dated = [(self._known[step][0].mtime_ns, place.sequence) for step, place in found.items()]
        for step, status in unreadable.items():
            before = (sequence for when, sequence in dated if when <= status.mtime_ns)
            found[step] = StepPlace(max(before, default=0), status, None)
        return {step: found[step] for step in sorted(found)}

    def place(self, step: int) -> StepPlace | None:
        """Return the place of a step in the order of saving, or None if the run has no such step.

        A step whose manifest cannot be read has the sequence number 0.
        """
        status = self.status(step)
        if status is None:
            return None
        try:
            return self._read(step, status)
        except (DamagedFileError, MissingObjectError, NewerFormatError):
            return StepPlace(0, status, None)

    def status(self, step: int) -> FileStatus | None:
        """Return the status of the file of a step's reference, or None if there is no such step."""
        return self._objects.files.status(
            self._objects.layout.refs / file_of(step_name(self.run, step))
        )

    def placed(self, notes: Notes) -> Notes:
        """Return `notes` with a new sequence number, and with the present as the time of saving."""
        return replace(notes, sequence=self.next(), saved=self._objects.files.now())

    def next(self) -> int:
        """Return a new sequence number, for the step that is saved next.

        It is greater than the sequence numbers of all steps in the run, whichever process saved
        them.
        """
        with self._lock:
            if self._last is None:
                self._last = self._greatest()
            self._last = next_sequence(self._objects, self._last, self._greatest)
            return self._last

    def check_name(self) -> None:
        """Check that the run was not renamed since this object was made.

        The answer holds only inside `with locks.session(...):`.

        Raises:
            RenamedRunError: It was; a step saved under the old name would begin another run.
        """
        note = rename_journal.note_of(self._objects, self.run)
        if note is not None and note != self._note:
            path = rename_journal.note_path(self._objects, self.run)
            new_run = renamed_to(note, path)
            what = f"the run {self.run!r} was renamed to {new_run!r} while it was open"
            root = self._objects.layout.root
            raise RenamedRunError.at(root, what, run=self.run, new_run=new_run)

    def at_least(self, sequence: int) -> None:
        """Make all numbers that `next` returns from now on greater than `sequence`."""
        with self._lock:
            self._last = max(self._greatest() if self._last is None else self._last, sequence)

    def _greatest(self) -> int:
        there = self.places(readable=True).values()
        return max((place.sequence for place in there), default=0)

    def renew_lock(self) -> None:
        """Replace the internal lock by a new one. Call it in a forked child."""
        self._lock = threading.Lock()

    def _read(self, step: int, status: FileStatus) -> StepPlace | None:
        known = self._known.get(step)
        if known is not None and known[0] == status:
            return known[1]
        try:
            manifest, content, notes = manifest_of(self._objects, self.run, step)
        except UnknownStepError:  # deleted just now
            return None
        except NotATrainingError:
            self._known[step] = (status, None)
            return None
        place = StepPlace(notes.sequence, status, manifest, content_name(content))
        self._known[step] = (status, place)
        return place
