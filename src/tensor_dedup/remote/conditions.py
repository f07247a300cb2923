"""Check that a server keeps conditions of writes, without which two pushes could lose a name.

The first push to a remote races writers for one object. Each later push sends two writes that the
server must refuse, one for each condition, because the remote may have been copied to another
server. A server that answers missing keys as if there were objects is refused, too. The object
`FORMAT`, called the marker, marks a bucket as a remote.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tensor_dedup.errors import StoreError
from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import NO_TAG, Bucket
from tensor_dedup.remote.catalog import Catalog, read_catalog
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    MissingRemoteError,
    NoConditionsError,
    NotARemoteError,
    RemoteUnreachableError,
    TakenPlaceError,
    as_far_as_allowed,
    remote_damage,
)
from tensor_dedup.store.errors import NewerFormatError
from tensor_dedup.store.format import frames

_WRITERS = 8
_MARKER_TEXT = frames.encode_text(layout.MARKER_LINES)


def prepare(bucket: Bucket) -> bool:
    """Make a remote in an empty bucket, or check an existing remote; return whether it is new.

    Raises the errors of `is_free`, too.

    Raises:
        NoConditionsError: The server does not keep a condition of writes.
    """
    if not is_free(bucket):
        check_still(bucket)
        return False
    _probe(bucket)
    if not bucket.put_if(layout.MARKER, _MARKER_TEXT, None):
        found = bucket.get(layout.MARKER, layout.TEXT_BYTES)
        if found is None:
            raise RemoteUnreachableError.at(bucket.at(layout.MARKER), "it could not be written")
        check_marker(bucket, found[0])
    return True


def is_free(bucket: Bucket) -> bool:
    """Return whether a push would make a remote here, False if there is one. Writes nothing.

    Raises:
        NotARemoteError: The bucket holds something else, lies in a remote or a store, or has lost
            its marker `FORMAT`.
        NewerFormatError: The marker has a later version.
        DamagedRemoteError: The marker is damaged.
        NoConditionsError: The server answers missing keys as if there were objects.
    """
    if _has_marker(bucket):
        return False
    first = next(iter(bucket.list(layout.REFS)), None)
    if first is not None:
        # Another first push may have come so far in between; what was cut short leaves no names.
        if bucket.get(layout.MARKER, layout.TEXT_BYTES) is not None:
            return is_free(bucket)
        if bucket.head(layout.HEAD) is None:
            # `verify` goes by the catalog, so it would write nothing again.
            what = f"it holds {first.key}, and neither {layout.MARKER} nor {layout.HEAD}"
            raise TakenPlaceError.at(bucket.url, what)
        raise _without_marker(bucket, first.key)
    if (obstacle := bucket.obstacle()) is not None:
        raise TakenPlaceError.at(bucket.url, obstacle)
    return True


def check_still(bucket: Bucket) -> None:
    """Check with two requests that an existing remote can be written to.

    Both are writes that the server must refuse. They write the marker as it is, so that nothing is
    lost on a server that carries them out. The remote's version is not checked.

    Raises:
        NotARemoteError: The marker `FORMAT` of the remote is gone.
        NoConditionsError: The server does not keep a condition of writes.
    """
    if bucket.put_if(layout.MARKER, _MARKER_TEXT, None):
        if bucket.put_if(layout.MARKER, _MARKER_TEXT, None):
            raise _ignored(bucket, "If-None-Match")
        bucket.delete(layout.MARKER)
        raise _without_marker(bucket, layout.HEAD)
    if bucket.put_if(layout.MARKER, _MARKER_TEXT, NO_TAG):
        raise _ignored(bucket, "If-Match")


def check_remote(bucket: Bucket) -> None:
    """Check that a bucket holds a remote of this version.

    Raises:
        NotARemoteError: The bucket is empty, holds something else, or has lost its marker `FORMAT`.
        NewerFormatError: The marker has a later version.
        DamagedRemoteError: The marker is damaged.
        NoConditionsError: The server answers missing keys as if there were objects.
    """
    if not _has_marker(bucket):
        if bucket.head(layout.HEAD) is not None:
            raise _without_marker(bucket, layout.HEAD)
        raise NotARemoteError.at(bucket.url, "there is no remote")


def _has_marker(bucket: Bucket) -> bool:
    with genuine_damage(bucket):
        found = bucket.get(layout.MARKER, layout.TEXT_BYTES)
        if found is not None:
            check_marker(bucket, found[0])
    return found is not None


@contextmanager
def genuine_damage(bucket: Bucket) -> Iterator[None]:
    """Context manager that lets a DamagedRemoteError pass only if it can be about an object.

    Some gateways answer a missing key with success: with an empty body, or with a page. There, any
    missing object looks like a damaged one.

    Raises:
        NoConditionsError: There was a DamagedRemoteError, and the server answers a key that surely
            is missing as if there were an object.
    """
    try:
        yield
    except DamagedRemoteError:
        if not _answers_missing_keys(bucket):
            raise
        what = "the server answers a key that is not there as if it were"
        raise NoConditionsError.at(bucket.url, what, condition="404") from None


def _answers_missing_keys(bucket: Bucket) -> bool:
    try:
        return bucket.get(_probe_key(), layout.TEXT_BYTES) is not None
    except DamagedRemoteError:  # with more than a text can have
        return True
    except StoreError:  # S3 refuses to say it to clients that may not list
        return False


def _without_marker(bucket: Bucket, held: str) -> NotARemoteError:
    what = f"it holds {held} and no {layout.MARKER}"
    advice = "if it is a remote, `tensor-dedup remote verify URL` writes that again"
    return NotARemoteError(f"{bucket.url}: {what}; {advice}", path=bucket.url)


def restore_marker(bucket: Bucket) -> str | None:
    """Write the marker `FORMAT` of a remote again if it is missing or damaged.

    Returns the fault of the marker as a text, or None if the marker is intact. Without write
    access, only the fault is returned.

    The function writes a marker only if the other objects show that the bucket is a remote. For
    this, the catalog must be readable, and at least one reference, too. An empty catalog is
    sufficient if there are no references.

    Raises:
        NotARemoteError: The bucket is empty, its marker is that of a store or of something else,
            or the other objects do not show that it is a remote.
        NewerFormatError: The bucket holds a remote of a later version.
    """
    # Whatever it was overwritten with.
    found, what = bucket.get(layout.MARKER, layout.HEAD_BYTES), "it was gone"
    try:
        if found is not None:
            check_marker(bucket, found[0])
            return None
    except DamagedRemoteError:
        what = "it was damaged"
    try:
        catalog, why = read_catalog(bucket), f"{layout.HEAD} is gone"
    except (DamagedRemoteError, MissingRemoteError) as error:
        catalog, why = None, f"{error.facts['path']} cannot be read"
    if catalog is None and found is None and bucket.head(layout.HEAD) is None:
        check_remote(bucket)
    if catalog is None or (why := _unreadable_references(bucket, catalog)):
        lost = f"{layout.MARKER}: {what}, and {why}: nobody can tell whether this is a remote"
        advice = "run `tensor-dedup push NAME` with another URL, from a store that has it"
        raise NotARemoteError(f"{bucket.url}: {lost}; {advice}", path=bucket.url)
    with as_far_as_allowed():
        if not bucket.put_if(layout.MARKER, _MARKER_TEXT, None if found is None else found[1]):
            check_remote(bucket)
    return f"{what}, and all else says that this is a remote"


def _unreadable_references(bucket: Bucket, catalog: Catalog) -> str:
    """Say that no reference can be read; empty where one can, or there is nothing to refer to."""
    # None is ever deleted. Where all are lost, the next gc would take everything for garbage.
    why = "there is no reference to what the catalog names" if catalog.containers else ""
    for status in bucket.list(layout.REFS):
        name, found = layout.name_of_ref(status.key), bucket.get(status.key, layout.TEXT_BYTES)
        if name is not None and found is not None:
            with suppress(DamagedRemoteError):
                layout.referred(found[0], name, bucket.at(status.key))
                return ""
        why = f"{status.key} cannot be read, nor any other reference"
    return why


def check_marker(bucket: Bucket, text: bytes) -> None:
    """Check `text`, the content of a remote's marker.

    Raises:
        NotARemoteError: The marker is that of a store or of something else.
        NewerFormatError: The marker has a later version.
        DamagedRemoteError: The marker is damaged.
    """
    if text.startswith(layout.STORE_TITLE):
        raise NotARemoteError.at(bucket.url, "it is the folder of a store, not a remote")
    with remote_damage(bucket.at(layout.MARKER)) as path:
        lines = frames.decode_text(text, path)
    if lines[:1] != layout.MARKER_LINES[:1]:
        raise NotARemoteError.at(bucket.url, "its FORMAT is that of something else")
    if lines != layout.MARKER_LINES:
        what = f"{', '.join(lines[1:])}, this program knows version 1"
        raise NewerFormatError.at(bucket.at(layout.MARKER), what)


def _probe_key() -> str:
    return f"{layout.PROBE}{secrets.token_hex(8)}"


def _probe(bucket: Bucket) -> None:
    key = _probe_key()
    try:
        texts = [f"writer {number}".encode() for number in range(_WRITERS)]
        won = [*bucket.each(lambda text: bucket.put_if(key, text, None), texts)]
        found = bucket.get(key, layout.TEXT_BYTES)
        if found is None:
            raise RemoteUnreachableError.at(bucket.at(key), "what was written is not there")
        # Of a write whose answer was lost, the next attempt says that somebody was first.
        if sum(won) > 1 or (sum(won) == 1 and texts[won.index(True)] != found[0]):
            raise _ignored(bucket, "If-None-Match")
        text, tag = found
        if not bucket.put_if(key, b"next", tag):
            again = bucket.get(key, layout.TEXT_BYTES)
            if again is None or again[0] != b"next":
                raise _ignored(bucket, "If-Match (it refuses the right tag)")
        if bucket.put_if(key, text, tag):
            raise _ignored(bucket, "If-Match")
    except BaseException:
        # That it cannot be tidied up either is not what went wrong.
        with suppress(StoreError):
            bucket.delete(key)
        raise
    bucket.delete(key)


def _ignored(bucket: Bucket, condition: str) -> NoConditionsError:
    return NoConditionsError.at(bucket.url, f"the server ignores {condition}", condition=condition)
