"""Published steps as slime writes them, for the endpoint `/pull_weights` of SGLang.

    slime/weight_v000001/          a whole checkpoint, as an export of the step
    slime/weight_v000002/          what changed since the version before:
        model-00000-of-00001.safetensors    for each changed tensor, XOR with the version before,
                                            compressed by zstd, as bytes; the metadata has the
                                            xxh3-128 of each tensor as it is then
        model.safetensors.index.json        which version it is, and from which it differs
    slime/writers/000002           who alone writes to that folder

Versions are counted from 1, whatever the numbers of the steps. Version 0 is what the engine was
started with. The index is written last. A reader takes all files of a folder, so each is written to
by one attempt of one trainer, which first makes the object in `writers`. Where an attempt did not
end, its number is left out, and the next version is whole: from there on no earlier one is read.
"""

import json
import re
import secrets
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
from tensor_dedup.publishing.errors import OtherVersionsError
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.store.errors import StoreBusyError
from tensor_dedup.store.format.manifests import STATE_MARK
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint, StoredTensor
from tensor_dedup.store.store import LocalStore

_FOLDER: Final = "slime/"
_INDEX: Final = "model.safetensors.index.json"
_FILE: Final = "model-00000-of-00001.safetensors"
_LEVEL: Final = 1
_INDEX_BYTES: Final = 64 << 20
# Where the step is noted that a version was made of, and its run, beside slime's own fields.
_STEP: Final = "tensor_dedup_manifest"
_RUN: Final = "tensor_dedup_run"
_INDEX_KEY: Final = re.compile(f"{_FOLDER}weight_v([0-9]{{6,}})/{re.escape(_INDEX)}")
_CHUNK_BYTES: Final = 8 << 20
_WRITER_BYTES: Final = 1 << 12


class SlimeFolder:
    """The versions of one run. Use it from one thread at a time, and close it.

    The step of the last version stays open, because the next one is compared with it.
    """

    def __init__(self, bucket: Bucket, store: LocalStore, run: str) -> None:
        """Continue the versions of `run` in `bucket`. `store` has the last steps of the run.

        Raises:
            OtherVersionsError: The versions there are those of another run.
        """
        self._bucket, self._store, self._run = bucket, store, run
        self._before: StoredCheckpoint | None = None
        self.version = self._last_version()

    def _last_version(self) -> int:
        """The number of the last complete version, or 0."""
        keys = (status.key for status in self._bucket.list(_FOLDER))
        complete = (match[1] for match in map(_INDEX_KEY.fullmatch, keys) if match)
        last = max(map(int, complete), default=0)
        self._check_run(self._noted(last).get(_RUN, self._run))
        return last

    def _check_run(self, run: str) -> None:
        if run != self._run:
            what = f"the versions there are those of the run {run!r}, not of {self._run!r}"
            raise OtherVersionsError.at(self._bucket.at(_FOLDER), what, run=self._run, other=run)

    def _noted(self, version: int) -> dict[str, str]:
        """What the index of a version says of it; nothing if there is none, or a damaged one."""
        with suppress(ValueError, KeyError, TypeError):
            found = self._bucket.get(_index_key(version), _INDEX_BYTES)
            return {} if found is None else dict(json.loads(found[0])["metadata"])
        return {}

    def close(self) -> None:
        """Close the step of the last version."""
        if self._before is not None:
            self._before.close()
        self._before = None

    def resume(self, name: str) -> None:
        """Compare the next version with the step `name`, if the last version was made of it."""
        with suppress(StoreError):
            made_of = self._noted(self.version).get(_STEP)
            step = self._store.checkpoint(name)
            if made_of == step.manifest:
                self._before = step
            else:
                step.close()

    def write(self, name: str) -> int:
        """Write the step `name` as the next version, and return its number.

        If another trainer has written versions meanwhile, or has begun to, a whole version follows.

        Raises:
            OtherVersionsError: The versions there are those of another run.
            StoreBusyError: Another trainer has written to the folder of this version.
            StoreError: The store or the place of the versions failed.
        """
        if self._bucket.head(_index_key(self.version + 1)) is not None:
            self.close()
            self.version = self._last_version()
        number = self._begin()
        if number > self.version + 1:
            self.close()
        step = self._store.checkpoint(name)
        try:
            if self._before is None or not _fit(self._before, step):
                self._write_whole(number, name, step)
            else:
                self._write_changes(number, self._before, step)
        except BaseException:
            step.close()
            raise
        self.close()
        self._before = step
        self.version = number
        return number

    def _begin(self) -> int:
        """Return the number of the next version, whose folder nobody else writes to."""
        number, mark = self.version + 1, secrets.token_hex(16)
        text = json.dumps({"run": self._run, "attempt": mark}).encode()
        while not self._bucket.put_if(_writer_key(number), text, None):
            found = self._bucket.get(_writer_key(number), _WRITER_BYTES)
            if found is not None and found[0] == text:  # the answer was lost
                break
            if found is not None:
                self._check_run(_run_in(found[0]) or self._run)
            number += 1
        return number

    def _write_whole(self, number: int, name: str, step: StoredCheckpoint) -> None:
        with tempfile.TemporaryDirectory(dir=self._store.path / "tmp") as folder:
            target = Path(folder, "export")
            self._store.export(name, target)
            files = [path for path in target.rglob("*") if path.is_file()]
            for path in files:
                key = f"{_of_version(number)}{path.relative_to(target)}"
                self._bucket.put(key, _chunks(path))
        tensors = [each.name for each in _tensors(step)]
        self._put_index(number, {"format": "pt"}, step.manifest, tensors, "model.safetensors")

    def _write_changes(self, number: int, before: StoredCheckpoint, step: StoredCheckpoint) -> None:
        blobs: dict[str, bytes] = {}
        checks: dict[str, str] = {}
        for tensor in _tensors(step):
            if before[tensor.name].digest != tensor.digest:
                blobs[tensor.name], checks[tensor.name] = _changes(before, step, tensor)
        if blobs:
            self._bucket.put(f"{_of_version(number)}{_FILE}", [*_safetensors(blobs, checks)])
        metadata = {
            "version": f"{number:06d}",
            "base_version": f"{number - 1:06d}",
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        }
        self._put_index(number, metadata, step.manifest, list(blobs), _FILE)

    def _put_index(
        self, number: int, metadata: dict[str, str], manifest: str, names: list[str], file: str
    ) -> None:
        noted = {**metadata, _STEP: manifest, _RUN: self._run}
        text = json.dumps({"metadata": noted, "weight_map": dict.fromkeys(names, file)}).encode()
        key = _index_key(number)
        if self._bucket.put_if(key, text, None):
            return
        found = self._bucket.get(key, _INDEX_BYTES)  # it may be ours, and the answer was lost
        if found is None or found[0] != text:
            what = "another trainer has written to the folder of this version"
            raise StoreBusyError.at(self._bucket.at(key), what, run=self._run)


def _of_version(version: int) -> str:
    return f"{_FOLDER}weight_v{version:06d}/"


def _index_key(version: int) -> str:
    return f"{_of_version(version)}{_INDEX}"


def _writer_key(version: int) -> str:
    return f"{_FOLDER}writers/{version:06d}"


def _run_in(text: bytes) -> str | None:
    """The run of a trainer that has begun a version; None if it is damaged."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["run"])
    return None


def _tensors(step: StoredCheckpoint) -> list[StoredTensor]:
    return [each for each in step if not each.name.startswith(STATE_MARK)]


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
