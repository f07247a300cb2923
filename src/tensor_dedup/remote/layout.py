"""The layout of a remote: the keys of its objects, and the texts of references. No I/O.

A remote has the same files as a store, except for the index, and each file is an object. FORMAT.md
specifies the layout.
"""

import re
from typing import Final

from tensor_dedup.remote.errors import DamagedRemoteError, remote_damage
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import DamagedFileError
from tensor_dedup.store.format import frames
from tensor_dedup.store.format import layout as store_layout
from tensor_dedup.store.format.names import file_of, name_in
from tensor_dedup.store.format.references import ref_text

MARKER: Final = store_layout.MARKER
MARKER_LINES: Final = ["tensor-dedup remote", "version 1"]
STORE_TITLE: Final = f"{store_layout.MARKER_LINES[0]}\n".encode()
IDENTITY: Final = store_layout.IDENTITY
HEAD: Final = "catalog/HEAD"
REFS, MANIFESTS, CONTAINERS, TABLES = "refs/", "manifests/", "containers/", "tables/"
CATALOG, TRASH, PROBE, WRITERS = "catalog/", "trash/", "probe/", f"{store_layout.WRITERS}/"
# The direct differences of steps from the step before.
STEPS: Final = "steps/"
# Where a folder has what is being written.
TMP: Final = "tmp/"
KINDS: Final = frozenset({"slab", "pack", "delta", "mixed"})
# The layers of an artifact are files as they are.
READABLE: Final = KINDS | {"raw"}
# What an object of a kind may hold at most; a larger one is no object of ours.
TEXT_BYTES: Final = 1 << 12
PAGE_BYTES: Final = 1 << 26
HEAD_BYTES: Final = 1 << 24
FRAME_BYTES: Final = 1 << 28
# A container is full with this, less than twice as large, or holds one piece that is larger.
CONTAINER_BYTES: Final = 64 << 20

_DELETED: Final = "tensor-dedup deleted reference"
_HEX: Final = re.compile("[0-9a-f]{64}")
# No PurePosixPath, which takes five times as long: a sweep asks this of all objects of a remote.
_OBJECT: Final = re.compile(r"[^/]+/([0-9a-f]{2})/((?=\1)[0-9a-f]{64})(?:\.([a-z]+))?")
_PASSING: Final = re.compile(
    "(catalog|trash)/[0-9a-f]{64}|probe/[0-9a-f]{16}|tmp/[0-9]+-[0-9a-f]{12}"
    r"|steps/([0-9a-f]{2})/(?=\2)[0-9a-f]{64}(\.mixed)?"
)


def ref_key(name: str) -> str:
    """Return the key of the reference of the checkpoint `name`.

    Raises:
        BadNameError: The name is not valid.
    """
    return f"{REFS}{file_of(name)}"


def name_of_ref(key: str) -> str | None:
    """Return the checkpoint name whose reference has the key `key`, or None if there is none.

    `key` must be in the folder `refs/`.
    """
    return name_in(key.removeprefix(REFS))


def writer_key(run: str) -> str:
    """Return the key of the object that names the writer of the run `run`.

    Raises:
        BadNameError: The name is not valid.
    """
    return f"{WRITERS}{file_of(run)}"


def manifest_key(name: str) -> str:
    """Return the key of the manifest or manifest page `name`."""
    return f"{MANIFESTS}{name[:2]}/{name}"


def container_key(container: ContainerId) -> str:
    """Return the key of a container."""
    return f"{CONTAINERS}{container.name[:2]}/{container.name}.{container.kind}"


def table_key(name: str) -> str:
    """Return the key of the table of the container `name`."""
    return f"{TABLES}{name[:2]}/{name}"


def step_key(manifest: str) -> str:
    """Return the key of the table of the direct differences of the step `manifest`."""
    return f"{STEPS}{manifest[:2]}/{manifest}"


def step_data_key(manifest: str) -> str:
    """Return the key of the data of the direct differences of the step `manifest`."""
    return f"{step_key(manifest)}.mixed"


def segment_key(name: str) -> str:
    """Return the key of the catalog segment `name`."""
    return f"{CATALOG}{name}"


def trash_key(name: str) -> str:
    """Return the key of the list of condemned objects `name`."""
    return f"{TRASH}{name}"


def object_of(key: str) -> str | None:
    """Return the name in the key of a manifest, page or table, or None for another key."""
    found = _OBJECT.fullmatch(key)
    return found[2] if found is not None and found[3] is None else None


def is_passing(key: str) -> bool:
    """Return whether `key` is that of a short-lived object.

    These are catalog segments, lists of condemned objects, direct differences of steps, and
    temporary objects.
    """
    return _PASSING.fullmatch(key) is not None


def container_of(key: str) -> ContainerId | None:
    """Return the container that `key` names, or None for any other key.

    None is also returned for a container of an unknown kind.
    """
    found = _OBJECT.fullmatch(key) if key.startswith(CONTAINERS) else None
    return ContainerId(found[2], found[3]) if found is not None and found[3] in KINDS else None


def is_known(key: str) -> bool:
    """Return whether `key` has the form of a key for one of the objects of a checkpoint.

    These objects are references, manifests, pages, containers and tables. Whether there is an
    object with this key is not checked.
    """
    if key.startswith(CONTAINERS):
        return container_of(key) is not None
    if key.startswith(REFS):
        return name_of_ref(key) is not None
    return object_of(key) is not None


def reference(name: str, manifest: str | None) -> bytes:
    """Return the text of a reference, which says that the checkpoint `name` has this `manifest`.

    If `manifest` is None, the text says that the name was deleted.
    """
    if manifest is None:
        return frames.encode_text([_DELETED, f"name {name}"])
    return ref_text(name, manifest)


def referred(text: bytes, name: str, where: str) -> str | None:
    """Return the manifest that a reference names, or None if the name was deleted.

    `text` is the content of the reference of `name`, read at the URL `where`.

    Raises:
        DamagedRemoteError: The text is not a reference, or is the reference of another name.
    """
    if text == reference(name, None):
        return None
    with remote_damage(where) as path:
        lines = frames.decode_text(text, path)
        manifest = lines[-1].rpartition(" ")[2] if lines else ""
        if not _HEX.fullmatch(manifest) or text != ref_text(name, manifest):
            raise DamagedFileError.at(path, f"it is no reference of {name!r}", name=name)
    return manifest


def damaged_state(tag: str) -> str:
    """Return a placeholder for the manifest name that cannot be read from a damaged reference.

    `tag` is the tag of the reference.
    """
    return f"damaged {tag}"


def state_of(found: tuple[bytes, str], name: str, where: str) -> str | None:
    """Parse the reference of `name`; return a placeholder if the reference is damaged.

    `found` is the result of `Bucket.get` for the reference, and `where` is its URL. The result is:

    * the name of the manifest that the reference names;
    * None if the checkpoint's name was deleted;
    * a placeholder (`damaged_state`) if the reference is damaged.
    """
    try:
        return referred(found[0], name, where)
    except DamagedRemoteError:
        return damaged_state(found[1])
