"""Copy checkpoints between two store folders on one machine, as push and pull do for remotes."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from tensor_dedup.remote.errors import RemoteNameTakenError
from tensor_dedup.remote.pull import name_check, newly_seen
from tensor_dedup.remote.results import TransferListener, TransferResult
from tensor_dedup.store.errors import UnknownNameError
from tensor_dedup.store.hashing import Hasher
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.reader import StoredPieces
from tensor_dedup.store.writing.transfer import Transfer

Session = Callable[[], AbstractContextManager[tuple[StoreIndex, Hasher]]]


def copy_checkpoint(
    source: tuple[Objects, Session],
    target: tuple[Objects, Session],
    name: str,
    progress: TransferListener,
    *,
    replace: bool = False,
    seen: set[bytes] | None = None,
    dry_run: bool = False,
) -> TransferResult:
    """Copy the checkpoint `name` from the store `source` to the store `target`.

    Each store is a pair of its objects and a function that opens a session. `seen` has the digests
    of pieces that were counted in earlier results. They are not counted again. The digests of this
    checkpoint's pieces are added to `seen`. With `dry_run`, nothing is copied.

    Raises:
        UnknownNameError: The source has no checkpoint of this name.
        RemoteNameTakenError: The name stands for another checkpoint in the target, and `replace` is
            False.
        CorruptTensorError, MissingObjectError: The source has no intact copy of a piece.
    """
    began = time.monotonic()
    (objects, session), (there, session_there) = source, target
    with (
        session_there() as (index, hasher),
        Transfer(there, index, hasher, set()) as transfer,
    ):
        with session() as (near, _):
            manifest = objects.ref(name)
            content = objects.manifest(manifest)
            pieces = objects.pieces(manifest, content)
            parts = [*dict.fromkeys(page.hex() for page in content.pages), manifest]
            blobs = {part: objects.read(objects.layout.manifest(part)) for part in parts}
            wanted = {piece.digest: piece.nbytes for piece in pieces}
            held = _held(there, name)
            if held is not None and held != manifest and not replace:
                what = f"{name!r} stands for another checkpoint there"
                raise RemoteNameTakenError.at(there.layout.root, what, name=name)
            missing = transfer.missing(wanted, gather=False)
            if dry_run:
                moved_now = [digest for digest in missing if digest not in (seen or ())]
                return TransferResult(
                    url=f"file://{there.layout.root}",
                    names=(name,),
                    pieces=newly_seen(wanted, seen),
                    nbytes=content.nbytes,
                    moved_pieces=len(moved_now),
                    moved_bytes=sum(wanted[digest] for digest in moved_now),
                    wire_bytes=0,
                    requests=0,
                    seconds=time.monotonic() - began,
                    unchanged=held == manifest and not missing,
                    done=False,
                )
            # From here on gc may come: what is open can be read.
            opened = StoredPieces(objects, near, {*missing}, name)
        with opened:
            moved = sum(wanted[digest] for digest in missing)
            progress.saved(sum(wanted.values()) - moved)
            progress.start(moved)
            for digest in missing:
                transfer.send(opened, [digest])
                progress.advance(wanted[digest])
        unchanged = held == manifest and not missing
        if not unchanged:
            check = name_check(there, name, manifest, replace)
            transfer.publish(name, manifest, blobs, check)
    return TransferResult(
        url=f"file://{there.layout.root}",
        names=(name,),
        pieces=newly_seen(wanted, seen),
        nbytes=content.nbytes,
        moved_pieces=len(missing),
        moved_bytes=transfer.sent_bytes,
        wire_bytes=transfer.sent_bytes,
        requests=0,
        seconds=time.monotonic() - began,
        unchanged=unchanged,
    )


def _held(objects: Objects, name: str) -> str | None:
    try:
        return objects.ref(name)
    except UnknownNameError:
        return None
