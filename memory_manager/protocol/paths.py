"""The path of the manager's socket, and the check that it can be trusted.

A socket serves one user. Its folder must belong to that user and be closed to all others.
"""

import os
import stat
from pathlib import Path
from typing import Final

from tensor_dedup.memory_manager.errors import UnsafeSocketError
from tensor_dedup.settings import configured_path

ENVIRONMENT: Final = "TENSOR_DEDUP_SOCKET"
MAX_PATH: Final = 107  # bytes that fit a socket's address
_FOLDER: Final = "tensor-dedup"
_SOCKET: Final = "manager.sock"
_SHOWN: Final = len("GPU-01234567")
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def default_socket() -> Path:
    """Return the default path of the socket, which `tensor-dedup serve` and "auto" use."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # It is often named where it does not exist (containers, su), or is another user's.
    if runtime.startswith("/") and _is_own_folder(Path(runtime)):
        return Path(runtime, _FOLDER, _SOCKET)
    # Not tempfile's folder: TMPDIR differs from process to process, and they would never meet.
    return Path("/", "tmp", f"{_FOLDER}-{os.geteuid()}", _SOCKET)


def _is_own_folder(folder: Path) -> bool:
    try:
        found = folder.stat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def socket_path(given: str | os.PathLike[str] | None = None) -> Path:
    """Return the absolute path of the socket.

    The first of these that is set is used:

    1. `given`
    2. the environment variable TENSOR_DEDUP_SOCKET
    3. the socket in a configuration file
    4. the default path

    Raises:
        UnsafeSocketError: The path is longer than a socket's can be.
    """
    named = given or os.environ.get(ENVIRONMENT)
    path = Path(named or configured_path("socket") or default_socket()).absolute()
    if len(os.fsencode(path)) > MAX_PATH:
        raise UnsafeSocketError(
            f"{path}: a socket's path has at most {MAX_PATH} bytes; choose a shorter one",
            path=str(path),
        )
    return path


def device_socket(path: Path, device: str) -> Path:
    """Return the path of the socket for the manager of a GPU.

    `path` is the socket of the manager of host memory, and `device` the UUID of the GPU. The result
    lies in the same folder, and its name has the beginning of the UUID. If `device` is "", the
    result is `path`.

    Raises:
        UnsafeSocketError: The path is longer than a socket's can be.
    """
    return (
        socket_path(path.with_name(f"{path.stem}-{device[:_SHOWN]}{path.suffix}"))
        if device
        else path
    )


def make_folder(folder: Path) -> None:
    """Create the socket's folder, or check an existing one.

    Raises:
        UnsafeSocketError: The existing folder does not belong to this user alone, or is not a
            folder.
        OSError: The folder cannot be created or inspected.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    check_folder(folder)


def check_folder(folder: Path) -> None:
    """Check that a folder belongs to this user and is closed to all others.

    Raises:
        UnsafeSocketError: The folder belongs to another user or is open to others, or the path is a
            link or another kind of file.
        OSError: The folder cannot be inspected.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise _unsafe(folder, "is not a folder")
    if found.st_uid != os.geteuid():
        raise _unsafe(folder, f"belongs to user {found.st_uid}")
    if found.st_mode & _OTHERS:
        raise _unsafe(folder, f"is open to others (mode {found.st_mode & 0o777:o})")


def _unsafe(folder: Path, what: str) -> UnsafeSocketError:
    return UnsafeSocketError(
        f"{folder} {what}; the memory manager's socket needs a folder of your own with mode 0700",
        path=str(folder),
    )
