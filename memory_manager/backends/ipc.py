"""A backend for the memory of one GPU that uses CUDA's legacy IPC handles.

It is used only on request, where the `vmm` backend does not work. The IPC calls need a CUDA
context, which the manager does not have, so a helper process has the context. The helper allocates
the memory, returns the handles, and frees the memory. It ends when the manager closes its socket.

The protocol sends descriptors, but memory with IPC handles has no descriptor. A slab's descriptor
therefore refers to a ticket: a small sealed file that holds the IPC handle and the size.

The backend has three disadvantages:

* Readers can write to the memory.
* A client cannot choose the address of a mapping.
* All memory is lost when the helper ends, and so when the manager ends.
"""

import errno
import fcntl
import importlib
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import Final, TypeAlias

import msgspec

from tensor_dedup.memory_manager.backends.base import Capabilities, Memory, Spans
from tensor_dedup.memory_manager.backends.vmm import ALIGNMENT
from tensor_dedup.memory_manager.cuda.driver import (
    IPC_HANDLE_BYTES,
    Driver,
    Undo,
    current,
    find_device,
)
from tensor_dedup.memory_manager.errors import (
    BackendError,
    DeviceError,
    NoMemoryError,
    NotSealedError,
)
from tensor_dedup.memory_manager.protocol.layout import SlabLayout

_UNIT: Final = 2 << 20  # cudaMalloc's own; smaller slabs would cost as much
_MAGIC: Final = b"TDIPC\0\0\1"
_TICKET: Final = struct.Struct(f"<8sQ{IPC_HANDLE_BYTES}s")
_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_MODULE: Final = "tensor_dedup.memory_manager.backends.ipc"
_NVIDIA: Final = "tensor_dedup.memory_manager.cuda.nvidia:NvidiaDriver"
_MAX_MESSAGE: Final = 64 << 10
_PATIENCE_S: Final = 60.0


class IpcSlab:
    """A slab of GPU memory, which the helper process has allocated.

    The memory is freed when this object is garbage-collected.
    """

    def __init__(self, helper: "Helper", number: int, fd: int, nbytes: int) -> None:
        self.nbytes: Final = nbytes
        self.fileno: Final = fd
        weakref.finalize(self, _free, helper, number, fd).atexit = False


def _free(helper: "Helper", number: int, fd: int) -> None:
    os.close(fd)
    helper.free(number)


class IpcBackend:
    """The `ipc` backend for one GPU, which lends memory by CUDA IPC handles.

    The descriptor of a slab refers to a ticket: a small sealed file with the IPC handle and the
    size of the memory.
    """

    def __init__(self, helper: "Helper") -> None:
        self._helper = helper
        self.capabilities: Final = Capabilities(
            "ipc",
            hardware_readonly=False,
            hashes_itself=False,
            zeroed=False,
            outlives=False,
            device=helper.device,
            device_bytes=helper.total,
            layout=SlabLayout(_UNIT, ALIGNMENT),
        )

    def reserve(self, nbytes: int) -> IpcSlab:
        """Return a new slab of GPU memory, which the helper process allocates.

        Raises:
            NoMemoryError: The GPU has no memory left, or this process no descriptor.
            DeviceError: The driver failed, or the helper does not answer.
        """
        number, handle = self._helper.allocate(nbytes)
        try:
            return IpcSlab(self._helper, number, write_ticket(handle, nbytes), nbytes)
        except OSError as error:
            self._helper.free(number)
            raise NoMemoryError(f"no descriptor for a ticket: {error.strerror}") from error

    def commit(self, memory: Memory, offset: int, nbytes: int) -> None:
        """Do nothing, because `reserve` has allocated the memory already."""

    def seal(self, memory: Memory) -> None:
        """Do nothing, because this memory cannot be sealed.

        The writer is trusted to have unmapped it.
        """

    def leaves(self, memory: Memory, spans: Spans) -> list[list[bytes]]:
        """Raise BackendError, because the manager cannot read this memory."""
        raise BackendError("the manager does not hash the memory of a GPU")

    def reclaim(self, fd: int, nbytes: int) -> IpcSlab:
        """Raise NotSealedError, because the memory was freed when the earlier manager ended."""
        raise NotSealedError("memory of the backend `ipc` does not outlive its manager; load again")


# Tickets.


def write_ticket(handle: bytes, nbytes: int) -> int:
    """Write the IPC handle and the size in bytes of some memory to a new ticket file.

    Return the descriptor of the file, which is a sealed memory file. The caller owns the
    descriptor.

    Raises:
        OSError: No descriptor is left.
    """
    fd = os.memfd_create("tensor-dedup-ticket", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.pwrite(fd, _TICKET.pack(_MAGIC, nbytes, handle), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_ticket(fd: int) -> tuple[bytes, int]:
    """Return the IPC handle in the ticket file `fd`, and the size of its memory in bytes.

    `fd` stays open.

    Raises:
        NotSealedError: `fd` does not refer to a ticket.
    """
    try:
        data = os.pread(fd, _TICKET.size, 0)
    except OSError as error:
        raise NotSealedError(f"the descriptor cannot be read: {error.strerror}") from error
    if len(data) != _TICKET.size or not data.startswith(_MAGIC):
        raise NotSealedError("the descriptor leads to no ticket for memory of a GPU")
    _, nbytes, handle = _TICKET.unpack(data)
    return handle, nbytes


# The helper, as the manager sees it, and the messages between the two.


class HelperAllocate(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """A request to the helper process to allocate `nbytes` bytes of GPU memory."""

    nbytes: int


class HelperFree(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """A request to the helper process to free the allocation `number`. There is no answer."""

    number: int


class Ready(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """The first message of the helper process: its GPU's UUID and memory size in bytes."""

    device: str
    total: int


class HelperAllocated(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """The answer to HelperAllocate: the number of the allocation, and its CUDA IPC handle."""

    number: int
    handle: bytes


class Failed(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """The answer to a request that failed. `full` is True if there was no memory left."""

    text: str
    full: bool


_Order: TypeAlias = HelperAllocate | HelperFree
_Answer: TypeAlias = Ready | HelperAllocated | Failed
_orders: msgspec.msgpack.Decoder[_Order] = msgspec.msgpack.Decoder(_Order)
_answers: msgspec.msgpack.Decoder[_Answer] = msgspec.msgpack.Decoder(_Answer)


class Helper:
    """A running helper process, which has a CUDA context for the manager. Safe from any thread."""

    def __init__(self, device: str, driver: str = "") -> None:
        """Start the helper process, and wait until it reports its GPU.

        `device` is the UUID or the ordinal of the GPU. `driver` is the `Driver` class that the
        helper uses, as `module:class`, or "" for NVIDIA's driver.

        Raises:
            DeviceError: There is no such GPU, it has no room for a context, or the helper does not
                answer.
        """
        self._lock = threading.Lock()
        self._unsent: deque[int] = deque()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, device, driver or _NVIDIA],
                stdin=theirs.fileno(),
                start_new_session=True,  # a Ctrl-C is the manager's, which then ends it
            )
        weakref.finalize(self, _end, self._socket, self._process).atexit = True
        # Not a timeout: with one, a send waits for room even where it is told not to.
        self._socket.setblocking(False)
        first = self._hear()
        if not isinstance(first, Ready):
            raise _gone("it did not say which GPU it has")
        self.device: Final = first.device
        self.total: Final = first.total

    @property
    def pid(self) -> int:
        """The process id of the helper."""
        return self._process.pid

    def allocate(self, nbytes: int) -> tuple[int, bytes]:
        """Allocate GPU memory; return the allocation's number, for `free`, and its CUDA IPC handle.

        Raises:
            NoMemoryError: The GPU has no memory left.
            DeviceError: The driver failed, or the helper does not answer.
        """
        with self._lock:
            try:
                while not self._send_what_waits():  # first: the memory may be needed
                    self._wait(select.POLLOUT)
                self._send(HelperAllocate(nbytes))
            except OSError as error:
                raise _gone(str(error.strerror)) from error
            answer = self._hear()
        if not isinstance(answer, HelperAllocated) or len(answer.handle) != IPC_HANDLE_BYTES:
            raise _gone("its answer is none")
        return answer.number, answer.handle

    def _hear(self) -> _Answer:
        try:
            self._wait(select.POLLIN)
            data = self._socket.recv(_MAX_MESSAGE)
            answer = _answers.decode(data)
        except (OSError, msgspec.MsgspecError) as error:
            raise _gone(str(error)) from error
        if isinstance(answer, Failed):
            raise (NoMemoryError if answer.full else DeviceError)(answer.text)
        return answer

    def _wait(self, event: int) -> None:
        poller = select.poll()
        poller.register(self._socket, event)
        if not poller.poll(_PATIENCE_S * 1000):
            raise TimeoutError(errno.ETIMEDOUT, f"it is silent for {_PATIENCE_S:.0f} s")

    def _send(self, order: HelperAllocate) -> None:
        while True:
            try:
                self._socket.send(msgspec.msgpack.encode(order))
            except BlockingIOError:  # frees of other threads have taken the room
                self._wait(select.POLLOUT)
            else:
                return

    def free(self, number: int) -> None:
        """Free the allocation `number`. Never blocks and never fails, so finalizers can call it.

        If the helper's socket is full, the request is sent later, before the next one.
        """
        self._unsent.append(number)
        with suppress(OSError):
            self._send_what_waits()

    def _send_what_waits(self) -> bool:
        """Send the frees for which there is room; return whether those were all.

        OSError is raised when the helper is gone; no free is lost by it.
        """
        while self._unsent:
            try:
                number = self._unsent.popleft()
            except IndexError:  # another thread has just taken it
                return True
            try:
                self._socket.send(msgspec.msgpack.encode(HelperFree(number)))
            except BaseException as error:
                self._unsent.appendleft(number)
                if isinstance(error, BlockingIOError):
                    return False
                raise
        return True


def _gone(why: str) -> DeviceError:
    return DeviceError(f"the helper that has the CUDA context is of no more use ({why}); restart")


def _end(ours: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    ours.close()
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# The helper's process.


def serve(manager: socket.socket, driver: Driver, device: str) -> None:
    """Run the helper process: serve requests until the manager hangs up, then free all memory.

    `manager` is the socket to the manager. `device` is the UUID or the ordinal of the GPU.
    """
    driver.init()
    found = find_device(driver, device)
    with current(driver, found.ordinal), Undo() as always:
        held: dict[int, int] = {}
        always.add(lambda: _free_all(driver, held))
        manager.send(msgspec.msgpack.encode(Ready(found.uuid, found.nbytes)))
        number = 0
        while data := manager.recv(_MAX_MESSAGE):
            order = _orders.decode(data)
            if isinstance(order, HelperFree):
                driver.deallocate(held.pop(order.number))
                continue
            number += 1
            manager.send(msgspec.msgpack.encode(_allocated(driver, held, number, order.nbytes)))


def _free_all(driver: Driver, held: dict[int, int]) -> None:
    while held:
        driver.deallocate(held.popitem()[1])


def _allocated(
    driver: Driver, held: dict[int, int], number: int, nbytes: int
) -> HelperAllocated | Failed:
    try:
        with Undo() as undo:
            address = driver.allocate(nbytes)
            undo.add(lambda: driver.deallocate(address))
            handle = driver.ipc_handle(address)
            undo.keep()
    except BackendError as error:
        return Failed(error.message, isinstance(error, NoMemoryError))
    held[number] = address
    return HelperAllocated(number, handle)


def main(device: str, driver: str) -> None:
    """Run the helper process on the socket that is its standard input.

    `device` is the UUID or the ordinal of the GPU, `driver` the `Driver` class as `module:class`.
    """
    module, _, name = driver.partition(":")
    with socket.socket(fileno=os.dup(0)) as manager:
        try:
            serve(manager, getattr(importlib.import_module(module), name)(), device)
        except BackendError as error:
            manager.send(msgspec.msgpack.encode(Failed(error.message, False)))


if __name__ == "__main__":
    main(*sys.argv[1:3])
