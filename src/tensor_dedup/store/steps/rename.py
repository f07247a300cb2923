"""Renames a run: each of its steps gets a manifest and a reference with the new name.

The pieces of the steps, and the pages that list them, stay as they are.
"""

from msgspec import structs

from tensor_dedup.store import rename_journal
from tensor_dedup.store.errors import NameTakenError
from tensor_dedup.store.format.manifests import encode_manifest
from tensor_dedup.store.format.names import file_of
from tensor_dedup.store.format.references import MovedReference, Renaming
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.steps.errors import DrainedRunError, UnknownStepError
from tensor_dedup.store.steps.notes import Notes
from tensor_dedup.store.steps.runs import (
    check_no_step_s_name,
    check_run,
    parse_step_name,
    step_name,
)


def rename_run(objects: Objects, run: str, new_run: str) -> int:
    """Rename `run` to `new_run`, with its kept steps; return the number of its steps.

    Imported checkpoints that are named like a step stay. Call it inside `with objects.sweep(...):`.

    Raises:
        UnknownStepError: There is no such run.
        NameTakenError: The store has a checkpoint with the name of a step of `new_run`.
        DrainedRunError: The run is drained to or from this store, and its steps have the same name
            on the other tier.
        BadNameError, BadOptionError: `new_run` cannot be the name of a run.
        DamagedFileError, MissingObjectError, NewerFormatError: A step cannot be read. Nothing was
            renamed.
    """
    check_run(new_run)
    check_no_step_s_name(new_run)
    root = objects.layout.root
    _check_not_drained(objects, run)
    names = {name: found for name in objects.references() if (found := parse_step_name(name))}
    for name, found in names.items():
        if found.run == new_run:
            raise NameTakenError.at(root, f"{name!r} is there already", name=name)
    manifests: dict[str, tuple[str, bytes]] = {}
    moves, count = [], 0
    for name, found in names.items():
        if found.run != run:
            continue
        manifest = objects.ref(name)
        content = objects.manifest(manifest)
        notes = Notes.from_texts(content.notes)
        if notes is None or (notes.run, notes.step) != (run, found.step):
            continue  # imported, or the work of another program
        if manifest not in manifests:
            texts = {**content.notes, **Notes.named(new_run)}
            manifests[manifest] = encode_manifest(structs.replace(content, notes=texts))
        new_name = step_name(new_run, found.step, kept=found.kept)
        file_of(new_name)  # raises if a file cannot be called so
        moves.append(MovedReference(name, manifest, new_name, manifests[manifest][0]))
        count += not found.kept
    if not count:
        raise UnknownStepError.at(root, f"no run {run!r}", run=run)
    for new_manifest, blob in manifests.values():
        objects.publish(blob, objects.layout.manifest(new_manifest))
    token = objects.files.token()
    with objects.naming():
        rename_journal.carry_out(objects, Renaming(run, new_run, token, tuple(moves)))
    return count


def _check_not_drained(objects: Objects, run: str) -> None:
    layout, file = objects.layout, file_of(run)
    tier = None
    if objects.files.status(layout.tiers / file) is not None:
        tier = "is drained to a second tier, where"
    elif objects.files.status(layout.writers / file) is not None:
        tier = "is drained to this store from another one, where"
    if tier is not None:
        what = f"the run {run!r} {tier} its steps have this name"
        raise DrainedRunError.at(layout.root, what, run=run)
