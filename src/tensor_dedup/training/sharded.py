"""Steps saved by several ranks: each rank stores its tensors, and one manifest refers to all.

Each rank commits its part of the step under a separate name. While this name exists, a gc does not
delete any data of the part. The names of the parts are removed when the step is committed. A
checkpoint of another run may happen to have the name that a part needs. Such a checkpoint is
neither replaced nor deleted: the notes in its manifest show that it is not a part.
"""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

from tensor_dedup.store.errors import (
    DamagedFileError,
    MissingObjectError,
    NameTakenError,
    UnknownNameError,
)
from tensor_dedup.store.format.manifests import (
    PAGE_ENTRIES,
    Manifest,
    Piece,
    encode_manifest,
    encode_page,
)
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.steps.errors import NotATrainingError, UnknownStepError
from tensor_dedup.store.steps.notes import Notes
from tensor_dedup.store.steps.runs import (
    StepOrder,
    check_replaceable,
    manifest_of,
    parse_step_name,
    step_name,
)
from tensor_dedup.store.store import LocalStore
from tensor_dedup.store.writing.transaction import OrderedTransaction
from tensor_dedup.training.errors import NamedTwiceError

# What the manifest of a part names as its adapter; a finished step's is another.
PART_ADAPTER: Final = "dcp part"


class TakenPartError(NameTakenError):
    """Another checkpoint has the name under which a rank is to store its part of a step."""

    advice = "call no run RUN/part-... while StoreWriter saves into RUN"


def part_run(run: str, rank: int | str) -> str:
    """Return the name of the run under which `rank` stores its parts of the steps of `run`."""
    return f"{run}/part-{rank}"


def order_of(store: LocalStore, run: str) -> StepOrder:
    """Return an object that gives each step of a run its place in the order of saving.

    Keep the object for as long as the run is saved, because it remembers what it has read.
    """
    return StepOrder(store.handle.objects, run)


def merge(store: LocalStore, notes: Notes, ranks: Iterable[int | str], order: StepOrder) -> None:
    """Commit a step that consists of the parts of all `ranks`.

    `notes` has the run and the number of the step. The small files are those of the first part.
    `order` is the result of `order_of` for the run.

    Raises:
        NamedTwiceError: Two ranks have saved tensors with the same name.
        UnknownNameError: A part is missing.
        KeptStepError: The step exists and is kept.
        NotATrainingError: An imported checkpoint has the step's name.
    """
    objects, names = store.handle.objects, [part_run(notes.run, rank) for rank in ranks]

    def check_name() -> None:
        check_replaceable(objects, notes.run, notes.step)

    with store.handle.locked():
        check_name()  # before the work; it is looked at again after it
        parts = [objects.ref(step_name(name, notes.step)) for name in names]
        contents = [objects.manifest(part) for part in parts]
        pieces = [
            piece
            for part, content in zip(parts, contents, strict=True)
            for piece in objects.pieces(part, content)
        ]
        _check(notes, pieces)
        with OrderedTransaction(objects) as transaction:
            pages = []
            for start in range(0, len(pieces), PAGE_ENTRIES):
                page, blob = encode_page(pieces[start : start + PAGE_ENTRIES])
                transaction.add_object(page, blob)
                pages.append(bytes.fromhex(page))
            nbytes = sum(piece.nbytes for piece in pieces)
            texts = order.placed(notes).to_texts()
            content = Manifest(contents[0].files, pages, len(pieces), nbytes, texts)
            manifest, blob = encode_manifest(content)
            transaction.add_object(manifest, blob)
            name = step_name(notes.run, notes.step)
            transaction.commit(name, manifest, check_name=check_name)


def check_free(store: LocalStore, part: str, step: int) -> None:
    """Check that the name for a rank's part of a step is not taken by another checkpoint.

    `part` is the run name from `part_run`. The name PART@STEP may be free, or may be that of a part
    that was saved before.

    Raises:
        TakenPartError: A checkpoint that is not a part has the name PART@STEP.
    """
    with store.handle.locked():
        try:
            _, _, notes = manifest_of(store.handle.objects, part, step)
        except UnknownStepError:
            return
        except NotATrainingError:
            notes = None
    if notes is None or notes.adapter != PART_ADAPTER:
        name = step_name(part, step)
        raise TakenPartError.at(store.path, f"{name!r} is no part of a step", name=name)


def forget_parts(store: LocalStore, run: str) -> None:
    """Delete the names of all parts that ranks have saved for the steps of a run.

    This includes the parts of unfinished steps. Checkpoints that are not parts are left alone.
    """
    called_so = re.compile(re.escape(part_run(run, "")) + r"(meta|0|[1-9][0-9]*)")
    with store.handle.locked():
        for name in store.handle.objects.names():
            step = parse_step_name(name)
            if step is None or step.kept or called_so.fullmatch(step.run) is None:
                continue
            if _is_part(store.handle.objects, step.run, step.step):
                with suppress(UnknownNameError):
                    store.handle.objects.drop_ref(name)


def _is_part(objects: Objects, run: str, step: int) -> bool:
    """What cannot be read may be anybody's."""
    with suppress(UnknownStepError, NotATrainingError, DamagedFileError, MissingObjectError):
        return manifest_of(objects, run, step)[2].adapter == PART_ADAPTER
    return False


def _check(notes: Notes, pieces: Sequence[Piece]) -> None:
    names = [piece.name for piece in pieces if piece.name is not None]
    if len(set(names)) != len(names):
        what = f"{len(names)} tensors of all ranks have {len(set(names))} names"
        raise NamedTwiceError.at(step_name(notes.run, notes.step), what)
