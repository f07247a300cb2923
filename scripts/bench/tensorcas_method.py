"""The method of TensorCAS as its article describes it, for comparison; not their code.

Arrays by name are cut into chunks of 1 MiB. Each is named by its BLAKE3 digest, compressed with
zstd, written to a temporary file and renamed; a manifest in JSON says which chunks an array has;
SQLite says where the manifest of a step is. Arrays that have the digest of the last step are not
written. Nothing is synced to the disk: the article does not say that it is.
"""

import json
import sqlite3
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

CHUNK: Final = 1 << 20
_THREADS: Final = 8
Array = NDArray[Any]
Record = dict[str, Any]


class TensorCas:
    """A run in a store."""

    def __init__(self, root: Path, run: str = "run") -> None:
        self._root, self._run = root, run
        (root / "manifests" / run).mkdir(parents=True, exist_ok=True)
        self._registry = sqlite3.connect(root / "registry.db")
        self._registry.execute(
            "create table if not exists checkpoints (run text, step integer, manifest text,"
            " created text default current_timestamp, primary key (run, step))"
        )
        self._last: dict[str, Record] = {}
        self._pool = ThreadPoolExecutor(_THREADS)

    def close(self) -> None:
        """Give back the threads and the registry."""
        self._pool.shutdown()
        self._registry.close()

    def save(self, arrays: Mapping[str, Array], step: int, frozen: str = "\0") -> None:
        """Save a step. Arrays whose names begin with `frozen` are not hashed again once they are
        saved: the article's cache, which is right for trees only, as those never change.
        """
        known = {name: self._last[name] for name in arrays if name in self._last}
        kept = {name: each for name, each in known.items() if name.startswith(frozen)}
        fresh = [(name, array) for name, array in arrays.items() if name not in kept]
        records = kept | dict(self._pool.map(lambda pair: self._put(*pair), fresh))
        self._last = {name: records[name] for name in arrays}
        path = self._root / "manifests" / self._run / f"step_{step:06d}.json"
        text = json.dumps({"run": self._run, "step": step, "tensors": self._last})
        _replace(path, text.encode())
        self._registry.execute(
            "insert or replace into checkpoints (run, step, manifest) values (?, ?, ?)",
            (self._run, step, str(path)),
        )
        self._registry.commit()

    def load(self, step: int) -> dict[str, Array]:
        """The arrays of a step."""
        found = self._registry.execute(
            "select manifest from checkpoints where run = ? and step = ?", (self._run, step)
        ).fetchone()
        tensors = json.loads(Path(found[0]).read_bytes())["tensors"]
        chunks = {chunk for record in tensors.values() for chunk in record["chunks"]}
        if missing := [chunk for chunk in chunks if not self._path(chunk).exists()]:
            raise FileNotFoundError(missing[0])
        return dict(zip(tensors, self._pool.map(self._get, tensors.values()), strict=True))

    def _put(self, name: str, array: Array) -> tuple[str, Record]:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        digest = blake3(data).hexdigest()
        shape, dtype = list(array.shape), array.dtype.str
        last = self._last.get(name)
        if last and (last["hash"], last["shape"], last["dtype"]) == (digest, shape, dtype):
            return name, last
        chunks = [self._put_chunk(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)]
        return name, {"hash": digest, "shape": shape, "dtype": dtype, "chunks": chunks}

    def _put_chunk(self, data: memoryview) -> str:
        digest = blake3(data).hexdigest()
        path = self._path(digest)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, zstandard.ZstdCompressor().compress(data))
        return digest

    def _get(self, record: Record) -> Array:
        data = b"".join(
            zstandard.ZstdDecompressor().decompress(self._path(chunk).read_bytes())
            for chunk in record["chunks"]
        )
        array: Array = np.frombuffer(data, record["dtype"]).reshape(record["shape"]).copy()
        return array

    def _path(self, digest: str) -> Path:
        return self._root / "objects" / digest[:2] / digest[2:4] / f"{digest[4:]}.chunk"


def _replace(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    Path(file.name).replace(path)


def torch_arrays(model: Any) -> dict[str, Array]:
    """A module's state dict."""
    return {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


def sklearn_arrays(model: Any) -> dict[str, Array]:
    """Three arrays a tree, and the head of the ensemble."""
    found: dict[str, Array] = {}
    for number, estimator in enumerate(model.estimators_.reshape(-1)):
        tree = estimator.tree_
        found[f"tree_{number:06d}_features"] = tree.feature
        found[f"tree_{number:06d}_thresholds"] = tree.threshold
        found[f"tree_{number:06d}_values"] = tree.value
    return found


def xgboost_arrays(booster: Any) -> dict[str, Array]:
    """JSON of each tree, and the JSON that is left without them."""
    document = json.loads(booster.save_raw("json"))
    model = document["learner"]["gradient_booster"]["model"]
    trees, model["trees"] = model["trees"], []
    texts = {f"tree_{number:06d}": json.dumps(tree) for number, tree in enumerate(trees)}
    texts["__skeleton__"] = json.dumps(document)
    return {name: np.frombuffer(text.encode(), np.uint8) for name, text in texts.items()}


def into_torch(arrays: Mapping[str, Array], original: Any) -> Any:
    """Fill a module."""
    import torch

    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    original.load_state_dict(tensors)
    return original


def into_xgboost(arrays: Mapping[str, Array], original: Any) -> Any:
    """Put the document together again and let XGBoost read it."""
    texts = {name: array.tobytes() for name, array in arrays.items()}
    document = json.loads(texts.pop("__skeleton__"))
    model = document["learner"]["gradient_booster"]["model"]
    model["trees"] = [json.loads(texts[name]) for name in sorted(texts)]
    original.load_model(bytearray(json.dumps(document).encode()))
    return original


def into_sklearn(arrays: Mapping[str, Array], original: Any) -> Any:
    """Fill the trees of a fitted model that is alike, as far as they can be filled."""
    for number, estimator in enumerate(original.estimators_.reshape(-1)):
        estimator.tree_.value[...] = arrays[f"tree_{number:06d}_values"]
        estimator.tree_.threshold[...] = arrays[f"tree_{number:06d}_thresholds"]
    return original
