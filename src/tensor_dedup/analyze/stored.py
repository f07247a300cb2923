"""Checkpoints of a store: their digests are in the manifests, so nothing is read or hashed."""

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensor_dedup.analyze.tensors import AnalyzedTensor, Measured
from tensor_dedup.digest import combine, leaf_places
from tensor_dedup.errors import CheckpointNotFoundError, ConfigError, StoreError
from tensor_dedup.formats.hub_cache import locate
from tensor_dedup.settings import remote_url
from tensor_dedup.store import LocalStore
from tensor_dedup.store.errors import NoStoreError, UnknownNameError
from tensor_dedup.store.files import RealFiles
from tensor_dedup.store.init import default_path
from tensor_dedup.store.reading.reader import StoredCheckpoint, StoredTensor
from tensor_dedup.types import Fingerprint

SCHEME = "store://"
_STEP = re.compile(r"[^@]+@\d+")
_SHORT = re.compile(r".+@[0-9a-f]{4,39}")
_LONG = re.compile(r".+@[0-9a-f]{40}")

StrPath = str | os.PathLike[str]


def find(path: StrPath, store: StrPath | None = None) -> Path | str:
    """Return where a checkpoint is: a path, or `store://NAME`.

    What is given is `store://NAME`; a file or folder; a name in the Hugging Face cache (`locate`);
    or the name of a checkpoint or a training step RUN@STEP of the store in the folder `store`. The
    first of these that is there counts, and a path is returned where nothing is.

    Raises:
        NoSuchPathError: the cache has other revisions of that name.
    """
    given = os.fspath(path)
    if given.startswith(SCHEME):
        return given
    try:
        found = locate(given)
    except CheckpointNotFoundError:
        if not _is_stored(given, store):
            raise
        return SCHEME + given
    if not os.path.lexists(found) and _is_stored(given, store):
        return SCHEME + given
    return found


def full_name(store: LocalStore, given: str) -> str:
    """Return the name of the stored checkpoint `NAME` or `store://NAME`.

    Of ORG/NAME@REVISION the beginning of the revision is enough, where it is that of one only; a
    name that the store does not have is returned as it is.
    """
    name = given.removeprefix(SCHEME)
    if _SHORT.fullmatch(name) is None:
        return name
    names = store.names()
    found = [each for each in names if each.startswith(name) and _LONG.fullmatch(each)]
    return found[0] if len(found) == 1 and name not in names else name


@contextmanager
def pull_suggested(name: str) -> Iterator[None]:
    """Let an error about `NAME` or `store://NAME`, which is not here, say how to pull it.

    For what looks at checkpoints and loads none: it pulls nothing, and asks no remote. Where no
    remote is configured the error stays as it is.
    """
    try:
        yield
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
        command = ["tensor-dedup", "pull", url, name.removeprefix(SCHEME)]
        where = Path(error.facts["path"]).absolute()
        if where != default_path().absolute():
            command += ["--store", str(where)]
        said = f"{error.message}; if the remote has it, run `{shlex.join(command)}`"
        raise type(error)(said, **error.facts) from error


def looks_like_step(path: str) -> bool:
    """Return whether a checkpoint is called as a step of a training: RUN@STEP."""
    return _STEP.fullmatch(path.removeprefix(SCHEME)) is not None


def _is_stored(name: str, store: StrPath | None) -> bool:
    try:
        opened = LocalStore.open(store, create=False)
        return opened.manifest(full_name(opened, name)) is not None
    except StoreError:
        return False


def measure_stored(path: str, shown: str, store: LocalStore, min_tensor_bytes: int) -> Measured:
    """Return the checkpoint `store://NAME`, from its manifest; `shown` is what it was called.

    Raises:
        StoreError: the checkpoint is missing or damaged.
    """
    name = full_name(store, path)
    tensors, small = [], []
    with pull_suggested(name), store.checkpoint(name) as checkpoint:
        for tensor in checkpoint:
            if tensor.alias_of is not None:
                continue  # in a file it is counted once too
            if tensor.nbytes < min_tensor_bytes:
                small.append(tensor.name)
                continue
            found = Fingerprint(tensor.shape, tensor.dtype, tensor.digest)
            leaves = _leaves(checkpoint, tensor)
            tensors.append(AnalyzedTensor(tensor.name, found, tensor.nbytes, leaves))
    return Measured(shown, tensors, small)


def _leaves(checkpoint: StoredCheckpoint, tensor: StoredTensor) -> tuple[str, ...]:
    places = leaf_places(0, tensor.nbytes)
    records = checkpoint.records(bytes.fromhex(tensor.digest)) if places else []
    leaves = records[0].leaf_list if records else []
    return tuple(combine(size, [leaf]) for (_, size), leaf in zip(places, leaves, strict=False))


def open_store(store: StrPath | None, algorithm: str) -> LocalStore:
    """Open the store that `store://` refers to.

    Raises:
        ConfigError: digests of an algorithm other than the store's are requested.
    """
    if algorithm != "blake3":
        raise ConfigError(
            f"a store names bytes by blake3, not {algorithm}; leave the hash algorithm as it is",
            algorithm=algorithm,
        )
    return LocalStore.open(Path(store) if store is not None else None, create=False)
