"""Finds checkpoints and measures those in a store, whose manifests have all digests."""

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tensor_dedup.analyze.tensors import AnalyzedTensor, Measured
from tensor_dedup.digest import combine, leaf_places
from tensor_dedup.errors import CheckpointNotFoundError, ConfigError, StoreError
from tensor_dedup.formats.hub_cache import locate
from tensor_dedup.settings import remote_url
from tensor_dedup.store import LocalStore
from tensor_dedup.store.errors import NoStoreError, RunNameError, UnknownNameError
from tensor_dedup.store.files import RealFiles
from tensor_dedup.store.format.names import run_of_latest
from tensor_dedup.store.init import default_path
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint, StoredTensor
from tensor_dedup.types import STORE_SCHEME, Fingerprint, StrPath

_STEP = re.compile(r"[^@]+@\d+")
_SHORT = re.compile(r".+@[0-9a-f]{4,39}")
_LONG = re.compile(r".+@[0-9a-f]{40}")


def find(path: StrPath, store: StrPath | None = None) -> Path | str:
    """Return the path of the checkpoint that `path` means, or `store://NAME` if it is in a store.

    The first of these that fits is meant:

    1. `store://NAME`;
    2. a file or folder;
    3. a name in the Hugging Face cache;
    4. the name of a checkpoint or of a training step `RUN@STEP` in the store in the folder `store`;
    5. `RUN@latest`, with which the result is the step, even if the store does not have it.

    If none fits, `path` is returned unchanged.

    Raises:
        NoSuchPathError: The cache has the repository, but not this revision.
        RunNameError: `path` is the name of a training run in that store.
    """
    given = os.fspath(latest(path, store))
    if given.startswith(STORE_SCHEME):
        return given
    try:
        found = locate(given)
    except CheckpointNotFoundError:
        if not _is_stored(given, store):
            raise
        return STORE_SCHEME + given
    if not os.path.lexists(found) and _is_stored(given, store):
        return STORE_SCHEME + given
    return found


def latest(path: StrPath, store: StrPath | None = None) -> StrPath:
    """Return `store://RUN@STEP` if `path` means the latest step of a run, else `path` unchanged.

    `path` is RUN@latest or `store://RUN@latest`. What is also a path, or a name in the Hugging Face
    cache, means that. Call it once where a checkpoint is read several times: a later step may come.

    Raises:
        UnknownNameError: `path` begins with `store://`, and there is no such run.
        RemoteError: The remote that is configured cannot be used.
    """
    given = os.fspath(path)
    is_stored = given.startswith(STORE_SCHEME)
    if run_of_latest(given) is None or not (is_stored or _is_nowhere_else(given)):
        return path
    try:
        opened = LocalStore.open(store, create=False)
    except NoStoreError:
        return path
    try:
        return STORE_SCHEME + resolved_name(opened, given)
    except UnknownNameError:
        if is_stored:
            raise
        return path


def _is_nowhere_else(given: str) -> bool:
    with suppress(CheckpointNotFoundError):
        return not os.path.lexists(locate(given))
    return True


def resolved_name(store: LocalStore, given: str) -> str:
    """Return the name of the checkpoint that `given` means now, in the store or on a remote.

    For RUN@latest, it is that of the step that was saved last, on the remote if one is configured,
    or else in the store. For any other name, the result is that of `full_name`.

    Raises:
        UnknownNameError: There is no such run.
        RemoteError: The remote that is configured cannot be used.
    """
    name = full_name(store, given)
    if run_of_latest(name) is None:
        return name
    from tensor_dedup.remote.latest import latest_name  # as in pull_suggested
    from tensor_dedup.remote.remote import Remote

    url = remote_url()
    return latest_name(store, name, None if url is None else Remote.open(url))


def full_name(store: LocalStore, given: str) -> str:
    """Return the full name of the checkpoint that `given` means in the store, without `store://`.

    `given` is `NAME` or `store://NAME`. The revision in ORG/NAME@REVISION may be shortened if it is
    unambiguous. If the store does not have the checkpoint, NAME is returned as it is.
    """
    name = given.removeprefix(STORE_SCHEME)
    if _SHORT.fullmatch(name) is None:
        return name
    names = store.names()
    found = [each for each in names if each.startswith(name) and _LONG.fullmatch(each)]
    return found[0] if len(found) == 1 and name not in names else name


@contextmanager
def pull_suggested(name: str) -> Iterator[None]:
    """Context manager: if the store lacks the checkpoint `name`, add the pull command to the error.

    If no remote is configured, the error stays unchanged. No remote is contacted.
    """
    try:
        yield
    except RunNameError:  # which is here
        raise
    except (NoStoreError, UnknownNameError) as error:
        # Here: remotes need NumPy, and what is measured does not.
        from tensor_dedup.remote.errors import RemoteUrlError
        from tensor_dedup.remote.urls import open_bucket

        if (url := remote_url()) is None:
            raise
        try:
            open_bucket(url, RealFiles())
        except RemoteUrlError as wrong:  # and may hold a secret
            said = f"{error.message}; the remote that is configured cannot be one: {wrong.message}"
            raise type(error)(said, **error.facts) from error
        command = ["tensor-dedup", "pull", url, name.removeprefix(STORE_SCHEME)]
        where = Path(error.facts["path"]).absolute()
        if where != default_path().absolute():
            command += ["--store", str(where)]
        said = f"{error.message}; if the remote has it, run `{shlex.join(command)}`"
        raise type(error)(said, **error.facts) from error


def looks_like_step(path: str) -> bool:
    """Return whether a name has the form of a training step, RUN@STEP."""
    return _STEP.fullmatch(path.removeprefix(STORE_SCHEME)) is not None


def _is_stored(name: str, store: StrPath | None) -> bool:
    try:
        opened = LocalStore.open(store, create=False)
        opened.check_exists(full_name(opened, name))
        return True
    except RunNameError:
        raise
    except StoreError:
        return False


def measure_stored(path: str, shown: str, store: LocalStore, min_tensor_bytes: int) -> Measured:
    """Return the tensors and digests of a checkpoint in the store, from its manifest.

    `path` is the name of the checkpoint, with or without `store://`. `shown` is the path to put
    into the result. Of tensors smaller than `min_tensor_bytes`, the result has only the names
    and the sum of their sizes.

    Raises:
        StoreError: The checkpoint is missing or damaged.
    """
    name = full_name(store, path)
    tensors, small, small_bytes = [], [], 0
    with pull_suggested(name), store.checkpoint(name) as checkpoint:
        for tensor in checkpoint:
            if tensor.alias_of is not None:
                continue  # in a file it is counted once too
            if tensor.nbytes < min_tensor_bytes:
                small.append(tensor.name)
                small_bytes += tensor.nbytes
                continue
            found = Fingerprint(tensor.shape, tensor.dtype, tensor.digest)
            leaves = _leaves(checkpoint, tensor)
            tensors.append(AnalyzedTensor(tensor.name, found, tensor.nbytes, leaves))
        copies = checkpoint.not_indexed
    return Measured(shown, tensors, small, not_indexed=copies, small_bytes=small_bytes)


def _leaves(checkpoint: StoredCheckpoint, tensor: StoredTensor) -> tuple[str, ...]:
    places = leaf_places(0, tensor.nbytes)
    records = checkpoint.records(bytes.fromhex(tensor.digest)) if places else []
    leaves = records[0].leaf_list if records else []
    return tuple(combine(size, [leaf]) for (_, size), leaf in zip(places, leaves, strict=False))


def open_store(store: StrPath | None, algorithm: str) -> LocalStore:
    """Open the existing store in the folder `store`, by default the user's own, to read digests.

    Raises:
        ConfigError: `algorithm` is not "blake3", the only one in a store.
        StoreError: There is no store.
    """
    if algorithm != "blake3":
        raise ConfigError(
            f"a store names bytes by blake3, not {algorithm}; leave the hash algorithm as it is",
            algorithm=algorithm,
        )
    return LocalStore.open(Path(store) if store is not None else None, create=False)
