"""Serve the tensors of a stored checkpoint to loaders that read weights files.

A loader that asks for a tensor gets a mapping of the *resident*, the shared tensor in memory, that
has its digest. If there is none, the tensor is read from the store, verified, and becomes a
resident. `ModuleDedup` then finds that the parameters are shared already.
"""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from tensor_dedup.digest import digest
from tensor_dedup.loader.checkpoint_io.checkpoint_contents import CheckpointContents
from tensor_dedup.loader.checkpoint_io.from_store import FromStore
from tensor_dedup.loader.cuda.new_slabs import BATCH_BYTES
from tensor_dedup.loader.post_load.batch import content_recipe
from tensor_dedup.loader.post_load.known_leaves import read_leaves
from tensor_dedup.loader.residents.compare import raise_audit, same_bytes
from tensor_dedup.loader.residents.manager import ResidentQuery, ResidentRequest
from tensor_dedup.loader.residents.partial import Content, KnownTensor
from tensor_dedup.loader.residents.provider import host_provider_for
from tensor_dedup.loader.residents.registry import LEAF_SHARED_FROM, registry
from tensor_dedup.loader.residents.slab import SharedMemoryError
from tensor_dedup.loader.torch_dtypes import torch_dtype
from tensor_dedup.loader.unsharing.private import map_shared
from tensor_dedup.memory_manager.protocol.layout import ALIGNMENT
from tensor_dedup.store.store import LocalStore
from tensor_dedup.types import ResidentKey

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from weakref import WeakSet

    from tensor_dedup.config import TensorDedupConfig
    from tensor_dedup.loader.checkpoint_io.sources import SourceFile, SourceTensor
    from tensor_dedup.loader.checkpoint_io.stub_folder import Checkout
    from tensor_dedup.loader.residents.resident import Resident, Write


class StoredWeights:
    """The weights of one stored checkpoint, open for one load until `close`. Safe from any thread.

    `error` is the first error that `tensor` raised, kept because loaders may wrap or ignore errors.
    """

    def __init__(self, config: TensorDedupConfig, checkout: Checkout, *, trust: bool) -> None:
        """Open the stored checkpoint that `checkout` describes.

        `checkout` is a stored checkpoint with the stub folder that the loader sees. Without
        `trust`, all tensors are read.

        Raises:
            StoreError: The checkpoint cannot be read.
            ChangedFileError: The checkpoint was replaced since `checkout` was created.
        """
        self.checkout: Final = checkout
        self.trusted: Final = trust
        self.error: Exception | None = None
        self._config = config
        # A provider of its own: the load uses another one, in another thread.
        self._provider = host_provider_for(config.memory_manager, checkout.url, keep_alignment=True)
        self._opening = FromStore(
            LocalStore.open(checkout.store, create=False), checkout, trust=trust
        )
        self._files: dict[str, SourceFile] = {}
        self._held: dict[ResidentKey, Resident] = {}
        self._lock = threading.Lock()
        self._rng = random.Random()

    @property
    def built(self) -> WeakSet[Resident]:
        """The residents that were built for this checkpoint."""
        return self._provider.built

    @property
    def bytes_read(self) -> int:
        """The number of bytes read from the store so far."""
        return self._opening.bytes_from_store

    def holds(self, path: str | os.PathLike[str]) -> bool:
        """Return whether `path` is a weights file in the checkpoint's stub folder."""
        given, folder = Path(path), Path(self.checkout.folder)
        return (
            given.is_relative_to(folder)
            and given.relative_to(folder).as_posix() in self.checkout.weights
        )

    def file(self, path: str | os.PathLike[str]) -> SourceFile:
        """Return the weights file at `path` in the stub folder; it stays open until `close`.

        Raises:
            StoreError, FormatError: The file cannot be read.
        """
        with self._lock:
            return self._file(str(path))

    def _file(self, path: str) -> SourceFile:
        if path not in self._files:
            file = self._files[path] = self._opening.open(Path(path))
            self._find([each for each in file.tensors.values() if self._is_shared(each)])
        return self._files[path]

    def contents(self) -> CheckpointContents:
        """Return all tensors of the checkpoint, for its digest.

        Raises:
            StoreError, FormatError: A file cannot be read.
        """
        opened = [
            self._opening.open(Path(self.checkout.folder, name)) for name in self.checkout.weights
        ]
        named = chain.from_iterable(file.named() for file in opened)
        return CheckpointContents(named, self._config.hash_algorithm, trust=self.trusted)

    def tensor(self, path: str | os.PathLike[str], name: str) -> torch.Tensor:
        """Return the tensor `name` from the weights file at `path`, in host memory.

        If the tensor can be shared, the result is a copy-on-write mapping of a resident (shared
        tensor), or a read-only one under `TENSOR_DEDUP_READ_ONLY=1`. Otherwise it is a private
        tensor.

        Raises:
            StoreError: The store cannot read the bytes, or they are damaged.
            FormatError: The checkpoint has no file at `path`.
            AuditError: An audit found that the resident's bytes differ from the stored ones.
            UnsupportedError: torch lacks the tensor's dtype.
        """
        try:
            with self._lock:
                return self._tensor(self._file(str(path)), name)
        except Exception as error:
            if self.error is None:
                self.error = error
            raise

    def close(self) -> None:
        """Close the checkpoint. Tensors that were returned stay valid."""
        self._held.clear()
        self._opening.close()

    def _tensor(self, file: SourceFile, name: str) -> torch.Tensor:
        source = file.tensors[name]
        if not self._is_shared(source):
            return _read(source)
        key = _key(source)
        # Not held any longer than its mapping: what is cast or merged is gone when that is done.
        resident = self._held.pop(key, None) or registry.lookup(key)
        resident = resident or self._build_known(source)
        if resident is None:
            return self._build(file, source)
        try:
            mapped = map_shared(resident)
        except SharedMemoryError:  # it stays private, as below
            return _read(source)
        if self._is_compared() and not same_bytes(read := _read(source), mapped):
            if not self._config.verifies_bytes:
                raise_audit(source.place, "the resident", "the stored tensor")
            return read
        return mapped

    def _is_shared(self, source: SourceTensor) -> bool:
        """Return whether this tensor may be a resident: it is known, and large enough."""
        nbytes = source.spec.nbytes
        least = max(1, self._config.min_tensor_bytes)
        return source.digest is not None and nbytes >= least

    def _is_compared(self) -> bool:
        config = self._config
        return config.verifies_bytes or (config.audit > 0 and self._rng.random() < config.audit)

    def _find(self, sources: Sequence[SourceTensor]) -> None:
        """Look up, in one batch, which tensors are resident, here or in the manager."""
        keys = list(dict.fromkeys(map(_key, sources)))
        found = self._provider.find([ResidentQuery(content_recipe(key), key) for key in keys])
        for key, resident in zip(keys, found, strict=True):
            if resident is not None:
                self._held[key] = resident

    def _build(self, file: SourceFile, source: SourceTensor) -> torch.Tensor:
        """Read a tensor, with small ones that follow it in the file: they share a slab."""
        batch, size = {_key(source): source}, source.spec.nbytes
        after = (
            each
            for each in sorted(file.tensors.values(), key=lambda each: each.spec.start)
            if each.spec.start > source.spec.start and self._is_shared(each)
        )
        for each in after if size < LEAF_SHARED_FROM else ():
            key = _key(each)
            if each.spec.nbytes >= LEAF_SHARED_FROM or size + each.spec.nbytes > BATCH_BYTES:
                break
            if key not in self._held and key not in batch and registry.lookup(key) is None:
                batch[key] = each
                size += each.spec.nbytes
        read = {key: _read(each) for key, each in batch.items()}
        requests = [
            ResidentRequest(content_recipe(key), tensor, key.digest) for key, tensor in read.items()
        ]
        try:
            residents = self._provider.get_or_build(requests)
        except SharedMemoryError:  # it stays private; the load says so if it meets it, too
            return read[_key(source)]
        for (key, each), (resident, new) in zip(batch.items(), residents, strict=True):
            self._held[key] = resident
            if new and each.leaves:
                self._provider.note_contents(resident, [_content(each)])
        try:
            return map_shared(self._held.pop(_key(source)))
        except SharedMemoryError:
            return read[_key(source)]

    def _build_known(self, source: SourceTensor) -> Resident | None:
        """Build a tensor of which others have leaves, and read only the rest; None if none has."""
        if not source.leaves:
            return None
        key = _key(source)
        known = KnownTensor(
            content_recipe(key),
            replace(key, digest=""),
            [_content(source)],
            partial(_read_leaves, source),
            digest,
            lambda *_: None,  # those that have such leaves have other bytes: it is read whole
        )
        found = self._provider.share_known(known, lambda _: True)
        return None if found is None else found[0]


def _key(source: SourceTensor) -> ResidentKey:
    assert source.digest is not None
    shape, stride, step = source.spec.shape, [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return ResidentKey(source.spec.dtype, shape, tuple(reversed(stride)), source.digest)


def _content(source: SourceTensor) -> Content:
    assert source.digest is not None
    return Content(0, source.spec.nbytes, source.digest, source.leaves)


def _read_leaves(
    source: SourceTensor, _number: int, numbers: Sequence[int] | None, write: Write
) -> None:
    """Read those leaves of a tensor, or all; the store compares each with its digest."""
    spec = source.spec
    read_leaves(spec.nbytes, numbers, partial(source.file.read_into, spec), write)


def _read(source: SourceTensor) -> torch.Tensor:
    """Read a tensor to memory that is aligned as in the mapped file.

    Products on a CPU are rounded by where their factors lie.
    """
    spec, dtype = source.spec, torch_dtype(source.spec.dtype)
    beyond = spec.start % ALIGNMENT if spec.start % dtype.itemsize == 0 else 0
    memory = torch.empty(spec.nbytes + 2 * ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % ALIGNMENT + beyond
    flat = memory[start : start + spec.nbytes]
    if spec.nbytes:
        source.file.read_into(spec, flat.numpy().data)
    return flat.view(dtype).reshape(spec.shape)
