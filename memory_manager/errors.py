"""The errors of the memory manager, its clients and its backends.

MemoryManagerError
  - ManagerGoneError      no manager answers, or the connection broke: load privately, connect again
  - UnsafeSocketError     the socket, its folder or the process behind it is not this user's own
  - ManagerRunningError   another manager owns this socket
  - ProtocolError         a message does not follow this version of the protocol
  - RefusedError          the manager understood the request and refused it; `code` says why
  - LeaseClosedError      a lease, a put or a slab was used after it was closed
  - BackendError          memory could not be allocated, sealed or reclaimed
      - NoMemoryError       the system refused memory or a descriptor
      - StillWritableError  a process still has the slab mapped writable
      - NotSealedError      an offered descriptor is not sealed memory of that size
      - DeviceError         a call of the CUDA driver failed, or there is no driver or no such GPU
"""

from tensor_dedup.errors import NOBODY_THERE, WRONG_USE, TensorDedupError


class MemoryManagerError(TensorDedupError):
    """Base of all errors of the memory manager, its client and its backends."""


class ManagerGoneError(MemoryManagerError):
    """No manager answers, or the connection broke. Load into private memory, or connect again."""

    exit_status = NOBODY_THERE


class UnsafeSocketError(MemoryManagerError):
    """The socket, its folder or the process behind it does not belong to this user alone."""

    exit_status = WRONG_USE


class ManagerRunningError(MemoryManagerError):
    """Another memory manager owns this socket."""

    exit_status = WRONG_USE


class ProtocolError(MemoryManagerError):
    """A message does not follow this version of the manager's protocol.

    If the message was received, do not use the connection any more.
    """


class RefusedError(MemoryManagerError):
    """The manager understood the request and refused it. `code` is one of `limits.Code`."""

    @property
    def code(self) -> str:
        """The reason, as one of the words in `limits.Code`."""
        return str(self.facts.get("code", ""))


class LeaseClosedError(MemoryManagerError):
    """A lease, a put, a slab or a client was used after it was closed: a bug in the caller."""


class BackendError(MemoryManagerError):
    """Memory could not be allocated, written, sealed or reclaimed."""


class NoMemoryError(BackendError):
    """The system refused memory, a mapping or a descriptor."""


class StillWritableError(BackendError):
    """A process still has the slab mapped writable. Unmap it everywhere, then seal again."""


class NotSealedError(BackendError):
    """An offered descriptor is not sealed memory of the stated size."""


class DeviceError(BackendError):
    """The CUDA driver failed, or a GPU cannot be used.

    If a call of the driver failed, the facts `call` and `code` are its name and its CUresult. If
    there is no driver, or the package cuda-bindings is missing, the fact `kind` is "no_driver".
    """


class NoBindingsError(DeviceError):
    """The package cuda-bindings (of the extra `cuda`) cannot be imported."""

    exit_status = WRONG_USE
