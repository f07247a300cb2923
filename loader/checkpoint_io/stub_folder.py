"""The stub folder of a stored checkpoint, which holds everything but the weights.

Engines read configuration and tokenizer from a folder and tensors from the store. Of each weights
file the folder holds only the header: a reader that asks the header for types gets them, and one
that reads weights without going through this package finds a truncated file instead of wrong
weights. The folder is named after the manifest, is restored from the store each time, and may be
deleted at any time.
"""

import os
import tempfile
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import platformdirs

from tensor_dedup.errors import ConfigError, UnsupportedError
from tensor_dedup.settings import remote_url
from tensor_dedup.store.reading.reader import StoredCheckpoint, StoredFile
from tensor_dedup.store.store import LocalStore

SCHEME = "store://"
ENVIRONMENT = "TENSOR_DEDUP_CACHE"
_WEIGHTS = ".safetensors"
_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Checkout:
    """A stored checkpoint that an engine loads, and the folder that stands for it.

    `store` is the path of the store; `weights` are the names of the files that hold the tensors.
    """

    url: str
    store: str
    name: str
    manifest: str
    folder: str
    weights: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Return the fields as values that JSON can hold."""
        return asdict(self) | {"weights": list(self.weights)}

    @classmethod
    def from_any(cls, value: object) -> "Checkout":
        """Return the checkout that `to_dict` described.

        Raises:
            ConfigError: The value is not valid.
        """
        try:
            return msgspec.convert(value, cls, strict=True)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"'stored' is {value!r} ({error}); give model={SCHEME}NAME and leave it out",
                value=repr(value),
            ) from error


def check_out(store: LocalStore, url: str, *, folders: bool = False) -> Checkout:
    """Create or restore the folder of a stored checkpoint.

    With `folders`, weights in its folders count, too, as pipelines have them; otherwise only those
    at its top, beside a configuration, where engines look for them.

    Raises:
        StoreError: The checkpoint does not exist or is damaged.
        UnsupportedError: No engine can load the checkpoint.
    """
    name = url.removeprefix(SCHEME)
    with store.checkpoint(name) as checkpoint:
        weights = _weights(url, checkpoint, folders=folders)
        folder = _root() / checkpoint.manifest / PurePosixPath(name).name
        for file in checkpoint.files:
            _make_good(folder.joinpath(file.path), _shown(checkpoint, file))
        return Checkout(url, str(store.path), name, checkpoint.manifest, str(folder), weights)


def resolve(
    url: str,
    store: str | None,
    remote: str | PathLike[str] | None = None,
    *,
    folders: bool = False,
) -> Checkout:
    """Return the checkout of `store://NAME`, of the store in a folder or the user's own.

    What the store does not have is pulled first, from `remote` or the one that the environment or
    a configuration file names.

    Raises:
        RemoteError: The remote cannot be used.
        StoreError, UnsupportedError: As of `check_out`, and of opening the store.
    """
    there = remote_url(remote)
    opened = LocalStore.open(store, create=there is not None)
    if there is not None and opened.manifest(name := url.removeprefix(SCHEME)) is None:
        # Here, not above: a load of what is in the store imports nothing of remotes.
        from tensor_dedup.remote.on_demand import pull_missing

        pull_missing(opened, name, there)
    return check_out(opened, url, folders=folders)


def _weights(url: str, checkpoint: StoredCheckpoint, *, folders: bool) -> tuple[str, ...]:
    """Return the weights files, where the loader looks for them."""
    names = [file.path for file in checkpoint.files]
    if folders and (every := tuple(name for name in names if name.endswith(_WEIGHTS))):
        return every
    if folders:
        raise UnsupportedError(
            f"{url} has no *{_WEIGHTS}; save it as safetensors and import that, or export it and "
            "load the folder",
            url=url,
            files=names,
        )
    weights = tuple(name for name in names if name.endswith(_WEIGHTS) and "/" not in name)
    if _CONFIG in names and weights:
        return weights
    what = f"no {_CONFIG}" if weights else f"no *{_WEIGHTS} at its top"
    raise UnsupportedError(
        f"{url} has {what}, so no engine can load it; import the folder that holds both",
        url=url,
        files=names,
    )


def _shown(checkpoint: StoredCheckpoint, file: StoredFile) -> bytes:
    """Return a small file in full, or the header of a file with tensors."""
    data = bytearray()
    for piece in file.pieces:
        if piece.name is not None:
            break
        data += checkpoint.read_piece(piece.digest, 0, piece.nbytes, piece.nbytes)
    return bytes(data)


def _make_good(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically unless it is there; another process may do the same."""
    try:
        if path.read_bytes() == data and not path.is_symlink():
            return
    except OSError:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, partial = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _root() -> Path:
    named = os.environ.get(ENVIRONMENT)
    cache = Path(named) if named else platformdirs.user_cache_path("tensor-dedup", appauthor=False)
    return cache.absolute() / "stored"


def stored_in(entry: object) -> Checkout | None:
    """Return the checkout that an entry of a loader's configuration names, or None.

    Raises:
        ConfigError: The entry is not valid.
    """
    found: Any = entry.get("stored") if isinstance(entry, dict) else None
    return None if found is None else Checkout.from_any(found)
