"""Ways to save a model step by step, each in a folder of its own: ours and the others."""

import hashlib
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import state_dict_loader as dcp_loader
from torch.distributed.checkpoint import state_dict_saver as dcp_saver

from bench import tensorcas_method as tensorcas
from tensor_dedup import CheckpointStore
from tensor_dedup.training.adapters import ModelAdapter

OURS: Final = "tensor-dedup"
RAW: Final = "tensor-dedup, compress=None"
TENSORCAS: Final = "TensorCAS's method"
DVC_FILES: Final = "DVC, whole files by MD5"
Writer = Callable[[Any, Path], object]
Reader = Callable[[Path, Any], Any]


@dataclass(frozen=True)
class Size:
    """What files hold, and what the file system gave them, in bytes."""

    apparent: int
    allocated: int

    def __add__(self, other: "Size") -> "Size":
        return Size(self.apparent + other.apparent, self.allocated + other.allocated)


class Method:
    """A way to save. `save` is what is timed; `settle` waits for what goes on behind it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        folder.mkdir(parents=True)

    def save(self, model: Any, step: int) -> None:
        """Save the model, whole or what is new of it."""
        raise NotImplementedError

    def load(self, step: int, original: Any) -> Any:
        """The model of a step that was saved."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait for what the last save left to be done."""

    def close(self) -> None:
        """Let go of what is held."""

    def size(self) -> Size:
        """What all steps together take. Only after `close`."""
        return size_of(self.folder)


class Ours(Method):
    """A store of ours: durable when `save` returns, every byte verified by `load`."""

    def __init__(
        self, folder: Path, *, raw: bool = False, appended: ModelAdapter | None = None
    ) -> None:
        """`appended`: an adapter that was told that ensembles only grow."""
        name = RAW if raw else OURS
        super().__init__(f"{name}, append_only" if appended else name, folder)
        self.store = CheckpointStore(folder, "run", appended, compress=None if raw else "auto")

    def save(self, model: Any, step: int) -> None:
        self.store.save(model, step)

    def load(self, step: int, original: Any) -> Any:
        return self.store.load(step, original)

    def close(self) -> None:
        self.store.close()


@dataclass(frozen=True)
class Kind:
    """Models of a framework: how others write them to a file, and how TensorCAS sees them."""

    files: Mapping[str, tuple[Writer, Reader]]
    arrays: Callable[[Any], dict[str, tensorcas.Array]]
    fill: Callable[[Mapping[str, tensorcas.Array], Any], Any]
    frozen: str = "\0"

    @property
    def plain(self) -> str:
        """The way to a file that people take first."""
        return next(iter(self.files))


class Chunks(Method):
    """TensorCAS's method; not durable when `save` returns."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        super().__init__(TENSORCAS, folder)
        self._kind = kind
        self._store = tensorcas.TensorCas(folder)

    def save(self, model: Any, step: int) -> None:
        self._store.save(self._kind.arrays(model), step, self._kind.frozen)

    def load(self, step: int, original: Any) -> Any:
        return self._kind.fill(self._store.load(step), original)

    def close(self) -> None:
        self._store.close()


class Files(Method):
    """A file a step, of which only the last one is kept; `size` is the sum of all."""

    def __init__(self, name: str, folder: Path, kind: Kind, *, synced: bool = False) -> None:
        super().__init__(f"{name} + fsync" if synced else name, folder)
        self._write, self._read = kind.files[name]
        self._path = folder / "model"
        self._synced = synced
        self._sizes: list[Size] = []

    def save(self, model: Any, step: int) -> None:
        self._write(model, self._path)
        if self._synced:
            sync(self._path)
        self._sizes.append(size_of(self._path))

    def load(self, step: int, original: Any) -> Any:
        return self._read(self._path, original)

    def size(self) -> Size:
        return sum(self._sizes, Size(0, 0))


class WholeFiles(Files):
    """What DVC keeps: each distinct file once, under its MD5."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        super().__init__(kind.plain, folder, kind)
        self.name = DVC_FILES
        self._kept: dict[bytes, Size] = {}

    def save(self, model: Any, step: int) -> None:
        super().save(model, step)
        digest = hashlib.md5(self._path.read_bytes(), usedforsecurity=False).digest()
        self._kept[digest] = self._sizes[-1]

    def size(self) -> Size:
        return sum(self._kept.values(), Size(0, 0))


class Distributed(Method):
    """PyTorch Distributed Checkpoint on one rank; `async_save` blocks while it copies."""

    def __init__(self, folder: Path, *, behind: bool) -> None:
        super().__init__("DCP async_save, blocking" if behind else "DCP save", folder)
        self._behind = behind
        self._pending: Any = None

    def save(self, model: Any, step: int) -> None:
        state, path = model.state_dict(), str(self.folder / str(step % 2))
        if self._behind:
            self._pending = dcp_saver.async_save(state, checkpoint_id=path)
        else:
            dcp_saver.save(state, checkpoint_id=path)

    def settle(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def load(self, step: int, original: Any) -> Any:
        state = original.state_dict()
        dcp_loader.load(state, checkpoint_id=str(self.folder / str(step % 2)))
        original.load_state_dict(state)
        return original


def size_of(path: Path) -> Size:
    """Of a file, or of all files and folders in a folder."""
    found = [path, *path.rglob("*")] if path.is_dir() else [path]
    states = [each.lstat() for each in found]
    apparent = sum(state.st_size for each, state in zip(found, states, strict=True) if _file(each))
    return Size(apparent, sum(state.st_blocks for state in states) * 512)


def emptied(folder: Path) -> Path:
    """The folder's path, with nothing there."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def _file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def sync(path: Path) -> None:
    """Make a file's bytes durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _torch_save(model: Any, path: Path) -> None:
    torch.save(model.state_dict(), path)


def _torch_load(path: Path, original: Any) -> Any:
    original.load_state_dict(torch.load(path))
    return original


def _safetensors_save(model: Any, path: Path) -> None:
    save_file(model.state_dict(), path)


def _safetensors_load(path: Path, original: Any) -> Any:
    original.load_state_dict(load_file(path))
    return original


def _pickle_save(model: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(model))


def _pickle_load(path: Path, original: Any) -> Any:
    return pickle.loads(path.read_bytes())


def _raw_save(model: Any, path: Path) -> None:
    path.write_bytes(model.save_raw("ubj"))


def _raw_load(path: Path, original: Any) -> Any:
    original.load_model(bytearray(path.read_bytes()))
    return original


TORCH: Final = Kind(
    {
        "torch.save": (_torch_save, _torch_load),
        "safetensors": (_safetensors_save, _safetensors_load),
    },
    tensorcas.torch_arrays,
    tensorcas.into_torch,
)
SKLEARN: Final = Kind(
    {"pickle": (_pickle_save, _pickle_load)},
    tensorcas.sklearn_arrays,
    tensorcas.into_sklearn,
    "tree_",
)
XGBOOST: Final = Kind(
    {"save_raw": (_raw_save, _raw_load)},
    tensorcas.xgboost_arrays,
    tensorcas.into_xgboost,
    "tree_",
)
