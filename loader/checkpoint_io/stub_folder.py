"""The stub folder of a stored checkpoint, which holds everything but the weights.

Engines read configuration and tokenizer from this folder, and tensors from the store. Each weights
file in the folder consists of its header only. So code that reads dtypes from the header works,
whereas code that reads weights without this package fails on a truncated file. The folder is named
after the checkpoint's manifest. Each load restores the folder from the store, so it may be deleted
at any time.
"""

import os
import tempfile
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from tensor_dedup.errors import ConfigError, UnsupportedError
from tensor_dedup.settings import cache_folder, remote_url
from tensor_dedup.store.format.names import check_name, run_of_latest
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint, StoredFile
from tensor_dedup.store.store import LocalStore
from tensor_dedup.types import STORE_SCHEME

_FOLDER = "stored"
_WEIGHTS = ".safetensors"
_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Checkout:
    """A stored checkpoint that an engine loads, with the stub folder that the engine sees.

    - `url` is `store://NAME`, and `name` is NAME.
    - `store` is the path of the store.
    - `manifest` identifies the checkpoint's manifest.
    - `folder` is the path of the stub folder.
    - `weights` has the paths of the weights files within the folder.
    """

    url: str
    store: str
    name: str
    manifest: str
    folder: str
    weights: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Return the fields as a dict of values that JSON can hold."""
        return asdict(self) | {"weights": list(self.weights)}

    @classmethod
    def from_any(cls, value: object) -> "Checkout":
        """Return the `Checkout` that `value`, a result of `to_dict`, describes.

        Raises:
            ConfigError: `value` does not describe a `Checkout`.
        """
        try:
            return msgspec.convert(value, cls, strict=True)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"'stored' is {value!r} ({error}); give model={STORE_SCHEME}NAME and leave it out",
                value=repr(value),
            ) from error


def check_out(store: LocalStore, url: str, *, folders: bool = False) -> Checkout:
    """Create or restore the stub folder of the stored checkpoint `url` (`store://NAME`).

    Returns the checkpoint and its stub folder as a `Checkout`. With `folders`, weights files in
    subfolders are accepted, as in a pipeline. Without it, the weights must lie at the top, beside
    `config.json`, where engines look for them.

    Raises:
        StoreError: The checkpoint does not exist or is damaged.
        UnsupportedError: No engine can load the checkpoint.
    """
    name = url.removeprefix(STORE_SCHEME)
    with store.checkpoint(name) as checkpoint:
        weights = _weights(url, checkpoint, folders=folders)
        folder = cache_folder() / _FOLDER / checkpoint.manifest / PurePosixPath(name).name
        for file in _read_by_engines(checkpoint):
            _make_good(folder.joinpath(file.path), _shown(checkpoint, file))
        return Checkout(url, str(store.path), name, checkpoint.manifest, str(folder), weights)


def resolve(
    url: str,
    store: str | None,
    remote: str | PathLike[str] | None = None,
    *,
    folders: bool = False,
    latest: bool = True,
) -> Checkout:
    """Find the stored checkpoint `url` (`store://NAME`), and create or restore its stub folder.

    Returns both as a `Checkout`. `store` is the path of the store, or None for the user's default
    one. A checkpoint that the store does not have is pulled from `remote`, which defaults to the
    remote that the environment or a configuration file names. The latest step of a run,
    `store://RUN@latest`, is looked up there, too, or in the store if there is no remote; the URL of
    the result names the step. Without `latest`, RUN@latest is a name like any other. With
    `folders`, weights files in subfolders are accepted, as in a pipeline.

    Raises:
        RemoteError: The remote cannot be used.
        StoreError: The store cannot be opened, or the checkpoint does not exist or is damaged.
        UnsupportedError: No engine can load the checkpoint.
    """
    there = remote_url(remote)
    opened = LocalStore.open(store, create=there is not None)
    name = check_name(url.removeprefix(STORE_SCHEME))
    opened.hold_step(name)  # first: from here on it stays if it is there
    is_latest = latest and run_of_latest(name) is not None
    if is_latest or (there is not None and opened.manifest(name) is None):
        # Here, not above: a load of what is in the store imports nothing of remotes.
        from tensor_dedup.remote.on_demand import fetch_latest, pull_missing

        if is_latest:
            name = fetch_latest(opened, name, there)
        else:
            pull_missing(opened, name, there)
    return check_out(opened, STORE_SCHEME + name, folders=folders)


def _read_by_engines(checkpoint: StoredCheckpoint) -> list[StoredFile]:
    """Return the files without those that only an export brings back, such as optimizer states."""
    return [file for file in checkpoint.files if not file.opaque]


def _weights(url: str, checkpoint: StoredCheckpoint, *, folders: bool) -> tuple[str, ...]:
    """Return the weights files, where the loader looks for them."""
    names = [file.path for file in _read_by_engines(checkpoint)]
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


def stored_in(entry: object) -> Checkout | None:
    """Return the `Checkout` under the key `stored` of `entry`, a loader's configuration, or None.

    Returns None if `entry` is no dict or does not have the key.

    Raises:
        ConfigError: The value under the key does not describe a `Checkout`.
    """
    found: Any = entry.get("stored") if isinstance(entry, dict) else None
    return None if found is None else Checkout.from_any(found)
