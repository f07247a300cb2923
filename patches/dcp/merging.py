"""One step of what several ranks have saved: their tensors are stored, a manifest refers to them.

Each rank commits its part under a name of its own. While those names are there, gc takes nothing
of it; when the step has its name they go.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from tensor_dedup.store.checkpoints.errors import NamedTwiceError
from tensor_dedup.store.checkpoints.naming import parse, step_name
from tensor_dedup.store.checkpoints.notes import Notes
from tensor_dedup.store.errors import UnknownNameError
from tensor_dedup.store.manifests import PAGE_ENTRIES, Manifest, Piece, encode_manifest, encode_page
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.store import Store


def part_run(run: str, rank: int | str) -> str:
    """The run that the part of a rank belongs to until its step is finished."""
    return f"{run}/part-{rank}"


def merge(store: Store, notes: Notes, ranks: Iterable[int | str]) -> None:
    """Commit the step of these notes: all parts of the ranks, the first one's files.

    NamedTwiceError: two ranks have saved one name. UnknownNameError: a part is missing.
    """
    objects, names = store.objects, [part_run(notes.run, rank) for rank in ranks]
    with store.locked():
        parts = [objects.ref(step_name(name, notes.step)) for name in names]
        contents = [objects.manifest(part) for part in parts]
        pieces = [
            piece
            for part, content in zip(parts, contents, strict=True)
            for piece in objects.pieces(part, content)
        ]
        _check(notes, pieces)
        pages = list(_pages(objects, pieces))
        nbytes = sum(piece.nbytes for piece in pieces)
        files = contents[0].files
        manifest, blob = encode_manifest(
            Manifest(files, pages, len(pieces), nbytes, notes.to_texts())
        )
        objects.publish(blob, objects.layout.manifest(manifest))
        objects.set_ref(step_name(notes.run, notes.step), manifest, replace=True)


def forget_parts(store: Store, run: str) -> None:
    """Forget all parts of a run: those of a finished step, and those of steps nobody finished."""
    start = part_run(run, "")
    with store.locked():
        for name in store.objects.names():
            step = parse(name)
            if step is not None and step.run.startswith(start):
                with suppress(UnknownNameError):
                    store.objects.drop_ref(name)


def _check(notes: Notes, pieces: Sequence[Piece]) -> None:
    names = [piece.name for piece in pieces if piece.name is not None]
    if len(set(names)) != len(names):
        what = f"{len(names)} tensors of all ranks have {len(set(names))} names"
        raise NamedTwiceError.at(step_name(notes.run, notes.step), what)


def _pages(objects: Objects, pieces: Sequence[Piece]) -> Iterable[bytes]:
    for start in range(0, len(pieces), PAGE_ENTRIES):
        name, blob = encode_page(pieces[start : start + PAGE_ENTRIES])
        objects.publish(blob, objects.layout.manifest(name))
        yield bytes.fromhex(name)
