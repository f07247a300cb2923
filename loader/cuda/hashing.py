"""The digest of a tensor, computed where the tensor lies: on a GPU, if its kernel can be trusted.

A kernel is built by a thread, while the host hashes as if there were none, and asked for answers
that the host knows before its first use on a device. Where one is wrong, or Triton is missing or
cannot build there, tensors are fetched and hashed on the host for the rest of this process, and
`report()` says why. It never ran on a GPU yet.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from tensor_dedup import digest as host
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.errors import IntegrityError, UnsupportedError
from tensor_dedup.loader import report
from tensor_dedup.loader.cuda.device_openers import DeviceOpeners
from tensor_dedup.loader.residents.param_data import param_data
from tensor_dedup.loader.residents.resident import sharable_anywhere, tensor_bytes

_log = logging.getLogger(__name__)
_KERNEL: Final = "tensor_dedup.loader.cuda.blake3_kernel"
# What an import of a Triton raises that is not there, not whole, or not for this machine.
_NO_KERNEL: Final = (ImportError, AttributeError, OSError, RuntimeError, TypeError, ValueError)
# Blocks, chunks, pairs without a neighbour, leaves and pieces, each whole and not.
_ASKED: Final = (
    *(1, 64, 65, 1023, 1024, 1025, 3 * 1024, 127 << 10, (129 << 10) + 1),
    *(LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1, 3 * LEAF_BYTES + 77_777),
)


class DeviceHash(NamedTuple):
    """Who hashes on a device: the leaf digests of a flat tensor of bytes there.

    Smaller tensors than `least` bytes are fetched; `asked`: of how many bytes it must know the
    digests first. `build` takes seconds before the first use, uses nothing of the device, and is
    called in a thread. UnsupportedError: not any more; torch.OutOfMemoryError: not now.
    """

    leaf_digests: Callable[[torch.Tensor], list[bytes]]
    least: int
    asked: tuple[int, ...] = _ASKED
    build: Callable[[], None] | None = None


Open = Callable[[torch.device], DeviceHash]


def _open_cuda(device: torch.device) -> DeviceHash:
    """Triton's. UnsupportedError where there is none."""
    if torch.version.hip is not None:
        raise UnsupportedError("this torch is built for ROCm")
    try:
        kernel: Any = importlib.import_module(_KERNEL)
    except _NO_KERNEL as error:
        raise UnsupportedError(f"Triton cannot be imported: {error}") from error
    # Below, some twelve launches take longer than a copy. A guess: `scripts/bench/cuda.py` tells.
    return DeviceHash(kernel.leaf_digests, 1 << 20, build=partial(kernel.build, device))


def _begun(build: Callable[[], None] | None) -> Future[None]:
    """Done when that is built, or failed."""
    built: Future[None] = Future()

    def run() -> None:
        try:
            if build is not None:
                build()
            built.set_result(None)
        except UnsupportedError as error:
            built.set_exception(error)
        finally:
            if not built.done():  # what it was goes on
                built.set_exception(UnsupportedError("building it ended with another error"))

    if build is None:
        run()
    else:
        # No daemon: an interpreter that ends while Triton compiles is aborted by its C++.
        threading.Thread(target=run, name="tensor-dedup-build", daemon=False).start()
    return built


class DeviceHashing(DeviceOpeners[Open]):
    """Which devices hash by themselves. Safe from any thread, one at a time."""

    def __init__(self) -> None:
        super().__init__("cuda", _open_cuda)

    def reset(self) -> None:
        """Forget what was opened, and what cannot be used."""
        self._found: dict[torch.device, DeviceHash | None] = {}
        self._building: dict[torch.device, tuple[DeviceHash, Future[None]]] = {}
        self._lock = threading.Lock()
        self.nbytes = 0

    def digest(self, tensor: torch.Tensor) -> str | None:
        """The BLAKE3 digest of a gap-free tensor's bytes, if its device has computed it.

        After what is in torch's current stream there, and waited for. None: the host must, if only
        until the kernel is built.
        """
        opener = self._openers.get(tensor.device.type)
        if opener is None or not sharable_anywhere(tensor) or _captures(tensor.device):
            return None
        with self._lock:
            hasher = self._opened(tensor.device, opener)
            if hasher is None or tensor.nbytes < hasher.least:
                return None
            leaves = self._leaves(tensor, hasher)
            if leaves is None:
                return None
            self.nbytes += tensor.nbytes
            return host.combine(tensor.nbytes, leaves)

    def _leaves(self, tensor: torch.Tensor, hasher: DeviceHash) -> list[bytes] | None:
        try:
            return hasher.leaf_digests(_flat(tensor))
        except torch.OutOfMemoryError as error:
            _log.debug("hashed on the host: %s", str(error))
        except UnsupportedError as error:
            self._give_up(tensor.device, error)
        return None

    def settle(self) -> None:
        """Wait for what is being built."""
        for _, built in list(self._building.values()):
            built.exception()

    def _opened(self, device: torch.device, opener: Open) -> DeviceHash | None:
        if device not in self._found:
            try:
                found = self._built(device, opener)
                if found is None:
                    return None
                _require_known_answers(found, device)
                self._found[device] = found
            except torch.OutOfMemoryError as error:  # it is asked again
                _log.debug("nothing is hashed on %s now: %s", device, str(error))
                return None
            except (UnsupportedError, IntegrityError) as error:
                self._give_up(device, error)
        return self._found[device]

    def _built(self, device: torch.device, opener: Open) -> DeviceHash | None:
        """None until it is. UnsupportedError."""
        if device not in self._building:
            opened = opener(device)
            self._building[device] = opened, _begun(opened.build)
        found, built = self._building[device]
        if not built.done():
            return None
        built.result()
        return found

    def _give_up(self, device: torch.device, error: UnsupportedError | IntegrityError) -> None:
        self._found[device] = None
        report.note(f"hashing on {device}", f"on the host in its place: {error.message}")


def _captures(device: torch.device) -> bool:
    """Is a graph captured, which what waits for the device would ruin?"""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a gap-free tensor in the order of memory, without a copy."""
    data = param_data(tensor)
    empty = torch.empty(0, dtype=torch.uint8, device=data.device)
    start = data.storage_offset() * data.itemsize
    return empty.set_(data.untyped_storage(), start, (data.nbytes,), (1,))


def _require_known_answers(hasher: DeviceHash, device: torch.device) -> None:
    """Raise IntegrityError where the device does not compute what the host does."""
    known = torch.Generator().manual_seed(20)
    size = max(hasher.asked) + 1
    bytes_ = torch.randint(256, (size,), dtype=torch.uint8, generator=known, device="cpu")
    there = bytes_.to(device)
    for nbytes, start in (
        (n, n % 2) for n in hasher.asked
    ):  # from addresses of words, and from others
        right = host.leaf_digests(bytes_[start : start + nbytes].numpy().data)
        if hasher.leaf_digests(there[start : start + nbytes]) != right:
            raise IntegrityError(
                f"{nbytes} bytes hash to something else there", nbytes=nbytes, device=str(device)
            )


HASHING: Final = DeviceHashing()


def digest_of(tensor: torch.Tensor, algorithm: str = "blake3") -> str:
    """The digest of a gap-free tensor's `tensor_bytes`, wherever it is: there, or fetched for it.

    Safe from any thread. ConfigError: no such algorithm. UnsupportedError for a tensor with gaps.
    """
    found = HASHING.digest(tensor) if algorithm == "blake3" else None
    return found or host.digest(tensor_bytes(tensor.cpu()), algorithm)
