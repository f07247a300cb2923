"""Starting a manager in the background when none answers. Many processes may try at once."""

import subprocess
import sys
from pathlib import Path
from typing import Final

from tensor_dedup.memory_manager.errors import ManagerGoneError
from tensor_dedup.memory_manager.protocol import paths

# By name and not by import: a client never loads the server.
_MODULE: Final = "tensor_dedup.memory_manager.server"
_RUNNING: Final = 3
_START_TIMEOUT_S: Final = 60.0
IDLE_EXIT_S: Final = 600.0


def start_manager(path: Path, device: str = "") -> None:
    """Start a manager at this socket, or find that somebody else just has.

    `device`: the UUID of the GPU whose memory it is to lend, at a socket beside this one.

    Returns when it can be connected to. It is nobody's child, and ends after ten idle minutes.
    ManagerGoneError; UnsafeSocketError when the folder is not this user's own.
    """
    command = [
        sys.executable, "-m", _MODULE, "--detach",
        "--socket", str(path), "--idle-exit", str(IDLE_EXIT_S), "--device", device,
    ]  # fmt: skip
    try:
        paths.make_folder(path.parent)
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_START_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ManagerGoneError(f"no memory manager could be started: {error}") from error
    if done.returncode not in (0, _RUNNING):
        raise ManagerGoneError(
            f"no memory manager could be started at {path}: "
            f"{done.stderr.strip() or 'exit status ' + str(done.returncode)}",
            status=done.returncode,
        )
