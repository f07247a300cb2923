"""Published steps as slime writes them, for the endpoint `/pull_weights` of SGLang.

    slime/weight_v000001/          a whole checkpoint, as an export of the step
    slime/weight_v000002/          what changed since the version before:
        model-00000-of-00001.safetensors    for each changed tensor, XOR with the version before,
                                            compressed by zstd, as bytes; the metadata has the
                                            xxh3-128 of each tensor as it is then
        model.safetensors.index.json        which version it is, and from which it differs

Versions are counted from 1 without gaps, whatever the numbers of the steps. Version 0 is what the
engine was started with. The index is written last.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
import zstandard

from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.errors import StoreError
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.store.format.manifests import STATE_MARK
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint, StoredTensor
from tensor_dedup.store.store import LocalStore

_FOLDER: Final = "slime/"
_INDEX: Final = "model.safetensors.index.json"
_FILE: Final = "model-00000-of-00001.safetensors"
_LEVEL: Final = 1
_INDEX_BYTES: Final = 64 << 20
# Where the step is noted that a version was made of, beside the fields that slime defines.
_STEP: Final = "tensor_dedup_manifest"
_CHUNK_BYTES: Final = 8 << 20


class SlimeFolder:
    """The versions of one run. Use it from one thread at a time, and close it.

    The step of the last version stays open, because the next one is compared with it.
    """

    def __init__(self, bucket: Bucket, store: LocalStore) -> None:
        """Continue the versions in `bucket`. `store` has the last steps of the run."""
        self._bucket, self._store = bucket, store
        self._before: StoredCheckpoint | None = None
        self.version = self._last_version()

    def _last_version(self) -> int:
        keys = (status.key.split("/") for status in self._bucket.list(_FOLDER))
        complete = [key[1] for key in keys if len(key) == 3 and key[2] == _INDEX]
        return max((int(name.removeprefix("weight_v")) for name in complete), default=0)

    def close(self) -> None:
        """Close the step of the last version."""
        if self._before is not None:
            self._before.close()
        self._before = None

    def resume(self, name: str) -> None:
        """Compare the next version with the step `name`, if the last version was made of it."""
        with suppress(StoreError, ValueError, KeyError, TypeError):
            found = self._bucket.get(f"{_of_version(self.version)}{_INDEX}", _INDEX_BYTES)
            step = self._store.checkpoint(name)
            if found is not None and json.loads(found[0])["metadata"][_STEP] == step.manifest:
                self._before = step
            else:
                step.close()

    def write(self, name: str) -> int:
        """Write the step `name` as the next version, and return its number.

        Raises:
            StoreError: The store or the place of the versions failed.
        """
        step = self._store.checkpoint(name)
        try:
            if self._before is None or not _fit(self._before, step):
                self._write_whole(name, step.manifest)
            else:
                self._write_changes(self._before, step)
        except BaseException:
            step.close()
            raise
        self.close()
        self._before = step
        self.version += 1
        return self.version

    @property
    def _next(self) -> str:
        return _of_version(self.version + 1)

    def _write_whole(self, name: str, manifest: str) -> None:
        with tempfile.TemporaryDirectory(dir=self._store.path / "tmp") as folder:
            target = Path(folder, "export")
            self._store.export(name, target)
            files = [path for path in target.rglob("*") if path.is_file()]
            for path in files:
                self._bucket.put(f"{self._next}{path.relative_to(target)}", _chunks(path))
            tensors = [each.name for each in _weights(self._store, name)]
        self._put_index({"format": "pt", _STEP: manifest}, tensors, "model.safetensors")

    def _write_changes(self, before: StoredCheckpoint, step: StoredCheckpoint) -> None:
        blobs: dict[str, bytes] = {}
        checks: dict[str, str] = {}
        for tensor in _tensors(step):
            if before[tensor.name].digest != tensor.digest:
                blobs[tensor.name], checks[tensor.name] = _changes(before, step, tensor)
        if blobs:
            self._bucket.put(f"{self._next}{_FILE}", [*_safetensors(blobs, checks)])
        metadata = {
            "version": f"{self.version + 1:06d}",
            "base_version": f"{self.version:06d}",
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
            _STEP: step.manifest,
        }
        self._put_index(metadata, list(blobs), _FILE)

    def _put_index(self, metadata: dict[str, str], names: list[str], file: str) -> None:
        index = {"metadata": metadata, "weight_map": dict.fromkeys(names, file)}
        self._bucket.put(f"{self._next}{_INDEX}", [memoryview(json.dumps(index).encode())])


def _of_version(version: int) -> str:
    return f"{_FOLDER}weight_v{version:06d}/"


def _tensors(step: StoredCheckpoint) -> list[StoredTensor]:
    return [each for each in step if not each.name.startswith(STATE_MARK)]


def _weights(store: LocalStore, name: str) -> list[StoredTensor]:
    with store.checkpoint(name) as step:
        return _tensors(step)


def _fit(one: StoredCheckpoint, other: StoredCheckpoint) -> bool:
    """Whether both have the same tensors, so that one can be patched to be the other."""
    both = ({t.name: (t.dtype, t.shape) for t in _tensors(each)} for each in (one, other))
    return next(both) == next(both)


def _changes(
    before: StoredCheckpoint, step: StoredCheckpoint, tensor: StoredTensor
) -> tuple[bytes, str]:
    """What changed in a tensor, compressed, and the checksum of the new one."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj(size=tensor.nbytes)
    check, parts = xxhash.xxh3_128(), list[bytes]()
    for start in range(0, tensor.nbytes, LEAF_BYTES):
        stop = min(start + LEAF_BYTES, tensor.nbytes)
        new, old = (each.read_range(tensor.name, start, stop) for each in (step, before))
        check.update(new)
        changed = np.frombuffer(new, np.uint8) ^ np.frombuffer(old, np.uint8)
        parts.append(compressor.compress(changed.tobytes()))
    parts.append(compressor.flush())
    return b"".join(parts), check.hexdigest()


def _safetensors(blobs: dict[str, bytes], metadata: dict[str, str]) -> Iterator[memoryview]:
    """A file of safetensors with these bytes, as tensors of one dimension."""
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, blob in blobs.items():
        header[name] = {"dtype": "U8", "shape": [len(blob)], "data_offsets": [at, at + len(blob)]}
        at += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    yield from (memoryview(blob) for blob in blobs.values())


def _chunks(path: Path) -> Iterator[memoryview]:
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            yield memoryview(data)
