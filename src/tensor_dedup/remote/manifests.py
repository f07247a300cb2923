"""The references and manifests of a remote: which checkpoints it has, and of which pieces."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tensor_dedup.digest import combine
from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import Bucket, ObjectStatus
from tensor_dedup.remote.conditions import check_remote
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    MissingRemoteError,
    UnknownRemoteNameError,
    remote_damage,
)
from tensor_dedup.store.format import manifests
from tensor_dedup.store.format.manifests import Manifest, Piece
from tensor_dedup.store.format.names import check_name

_EMPTY: Final = bytes.fromhex(combine(0, []))


@dataclass(frozen=True, slots=True)
class RemoteManifest:
    """The manifest of a checkpoint on a remote, with all pieces of the checkpoint in order.

    * `name` is the name of the checkpoint.
    * `manifest` is the name of the manifest, and `content` is the decoded manifest.
    * `blobs` maps the names of the manifest and its pages to their encoded bytes.
    """

    name: str
    manifest: str
    content: Manifest
    pieces: Sequence[Piece]
    blobs: Mapping[str, bytes]


def read_ref(bucket: Bucket, name: str) -> str:
    """Return the name of the manifest of the checkpoint `name`, read from its reference.

    Raises:
        UnknownRemoteNameError: The remote has no checkpoint of this name.
        NotARemoteError: There is no remote.
        DamagedRemoteError: The reference is damaged.
    """
    manifest = find_ref(bucket, name)
    if manifest is None:
        check_remote(bucket)
        raise UnknownRemoteNameError.at(bucket.url, f"no checkpoint {name!r}", name=name)
    return manifest


def find_ref(bucket: Bucket, name: str) -> str | None:
    """Return the name of the manifest of the checkpoint `name`, read from its reference.

    Returns None if the remote does not have the name, or if the name was deleted.

    Raises:
        DamagedRemoteError: The reference is damaged.
    """
    key = layout.ref_key(check_name(name))
    found = bucket.get(key, layout.TEXT_BYTES)
    return None if found is None else layout.referred(found[0], name, bucket.at(key))


def list_refs(
    bucket: Bucket, run: str | None = None, *, thorough: bool = False
) -> dict[str, ObjectStatus]:
    """Return the checkpoint names on a remote, sorted, each with the status of its reference.

    With `run`, only steps and marks of this run are returned. A deleted name keeps a reference on
    the remote, but is left out. It is recognised by the size of that reference. So a damaged
    reference of the same size may be left out, too. If the remote is a folder, `thorough` prevents
    this: references of this size are then read.
    """
    return list_all_refs(bucket, run, thorough=thorough)[0]


def list_all_refs(
    bucket: Bucket, run: str | None = None, *, thorough: bool = False
) -> tuple[dict[str, ObjectStatus], dict[str, ObjectStatus]]:
    """Return what `list_refs` does, and the names that were deleted, with their references.

    Only the names of the run `run` are listed, if there is one.
    """
    found, deleted = dict[str, ObjectStatus](), dict[str, ObjectStatus]()
    for status in bucket.list(layout.REFS if run is None else f"{layout.ref_key(run)}@"):
        name = layout.name_of_ref(status.key)
        if name is not None:
            is_short = status.size == len(layout.reference(name, None))
            (deleted if is_short else found)[name] = status
    for name, status in [*_damaged(bucket, deleted, thorough and bucket.is_local)]:
        found[name] = status
        del deleted[name]
    return dict(sorted(found.items())), deleted


def _damaged(
    bucket: Bucket, deleted: Mapping[str, ObjectStatus], every: bool
) -> Iterator[tuple[str, ObjectStatus]]:
    """Iterate over those that do not say that their name was deleted; `every` one is read."""
    for name, status in deleted.items():
        text = layout.reference(name, None)
        if status.may_be(text) and not every:
            continue
        held = bucket.get(status.key, layout.TEXT_BYTES)
        if held is not None and held[0] != text:
            yield name, status
        elif not every:
            return  # what look like sums there are none, and say nothing of the others


def read_manifest(
    bucket: Bucket,
    name: str,
    manifest: str,
    known: Callable[[str], bytes | None] = lambda _: None,
) -> RemoteManifest:
    """Read the manifest of the checkpoint `name` and its pages, and compare each with its digest.

    `manifest` is the name of the manifest. `known(name)` returns the bytes of a page or a manifest
    if the store has it, else None. Pages and manifests in the store are not read from the remote.

    Raises:
        MissingRemoteError: The manifest or a page is missing.
        DamagedRemoteError: The manifest or a page is damaged.
        NewerFormatError: The manifest or a page has a later version.
    """
    blob, content = read_content(bucket, manifest, known)
    where = bucket.at(layout.manifest_key(manifest))
    names = [page.hex() for page in dict.fromkeys(content.pages)]

    def page(part: str) -> bytes:
        return known(part) or _object(bucket, part, layout.PAGE_BYTES)

    blobs, pages = dict[str, bytes](), dict[str, Sequence[Piece]]()
    for part, found in zip(names, bucket.each(page, names), strict=True):
        with remote_damage(bucket.at(layout.manifest_key(part))) as path:
            pages[part] = manifests.decode_page(found, part, path).pieces
        blobs[part] = found
    pieces = [piece for part in content.pages for piece in pages[part.hex()]]
    with remote_damage(where) as path:
        manifests.check_pieces(content, pieces, path)
    check_sizes(pieces, {_EMPTY: 0}, where)
    return RemoteManifest(name, manifest, content, pieces, {**blobs, manifest: blob})


def check_sizes(pieces: Sequence[Piece], known: Mapping[bytes, int], where: str) -> None:
    """Check that each digest in `pieces` has one size only, the `known` one if there is any.

    A digest depends on the number of bytes, so one of two sizes is a lie. `where` is the URL of the
    manifest.

    Raises:
        DamagedRemoteError: A digest has two sizes.
    """
    sizes = dict(known)
    for piece in pieces:
        expected = sizes.setdefault(piece.digest, piece.nbytes)
        name, hexed = piece.name or "a header or small file", piece.digest.hex()
        if piece.nbytes != expected:
            what = f"{piece.nbytes} bytes of {hexed} ({name}), {expected} expected"
        elif piece.nbytes == 0 and piece.digest != _EMPTY:
            what = f"{hexed} ({name}) is no digest of 0 bytes"
        else:
            continue
        raise DamagedRemoteError.at(where, what, digest=hexed, tensors=[name])


def read_content(
    bucket: Bucket, manifest: str, known: Callable[[str], bytes | None] = lambda _: None
) -> tuple[bytes, Manifest]:
    """Read a manifest without its pages; return its bytes and the decoded manifest.

    `known(name)` returns the bytes of a manifest if the store has it, else None. A manifest in the
    store is not read from the remote.

    Raises:
        MissingRemoteError: The manifest is missing.
        DamagedRemoteError: The manifest is damaged.
        NewerFormatError: The manifest has a later version.
    """
    blob = known(manifest) or _object(bucket, manifest, layout.FRAME_BYTES)
    with remote_damage(bucket.at(layout.manifest_key(manifest))) as path:
        return blob, manifests.decode_manifest(blob, manifest, path)


def _object(bucket: Bucket, name: str, limit: int) -> bytes:
    key = layout.manifest_key(name)
    found = bucket.get(key, limit)
    if found is None:
        raise MissingRemoteError.at(bucket.at(key), "this manifest or page is gone")
    return found[0]
