"""Load checkpoints into the manager before an engine needs them, one checkpoint after the other."""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tensor_dedup.errors import NotInstalledError
from tensor_dedup.memory_manager.errors import NoMemoryError
from tensor_dedup.memory_manager.protocol.state_dict_names import state_dict_key
from tensor_dedup.memory_manager.server.worker_threads import start_threads
from tensor_dedup.suggestions import install_hint

_log = logging.getLogger(__name__)
# By name: the manager never loads torch or vLLM.
_MODULE: Final = "tensor_dedup.patches.vllm.preload"
_NAMED: Final = "tensor_dedup.loader.checkpoint_io.preload"
_PATIENCE_S: Final = 5.0


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.killpg(group, number)


def _name(checkpoint: str) -> str:
    """Return NAME of NAME=PATH, and nothing of a path."""
    name, named, _ = checkpoint.partition("=")
    return name if named and not Path(checkpoint).exists() else ""


class Preload:
    """A thread that loads checkpoints into the manager, each in a process of its own.

    A checkpoint is given as PATH or NAME=PATH. With a name, its tensors are published as a state
    dict under that name. Without a name, they are built as vLLM's engines need them.
    """

    def __init__(self, socket: Path, checkpoints: Sequence[str], engine_args: str) -> None:
        """Check that the packages for loading are installed; `start` begins to load.

        Raises:
            ConfigError: NAME of NAME=PATH cannot be the name of a state dict.
            NotInstalledError: vLLM is not installed or, for NAME=PATH, torch is not.
        """
        for checkpoint in checkpoints:
            if name := _name(checkpoint):
                state_dict_key(name)
            package = "torch" if name else "vllm"
            if find_spec(package) is None:
                what = f"preloading {checkpoint} needs {package}, which is not installed"
                raise NotInstalledError(f"{what}; {install_hint(package)}", module=package)
        self._socket = str(socket)
        self._engine_args = engine_args
        self._checkpoints = tuple(checkpoints)
        self._lock = threading.Lock()
        self._running: subprocess.Popen[str] | None = None
        self._closed = False

    def start(self) -> None:
        """Start the thread, if there are checkpoints to load.

        If the system cannot start the thread, a warning is logged.
        """
        if not self._checkpoints:
            return
        try:
            start_threads("tensor-dedup-preload", 1, self._run)
        except NoMemoryError as error:  # the manager is of use without it
            _log.warning("preload failed: %s", str(error))

    def close(self) -> None:
        """End the process that loads a checkpoint, and start no further one."""
        with self._lock:
            self._closed = True
            running = self._running
        if running is None:
            return
        # With vLLM's own processes below it, which would stay.
        _signal(running.pid, signal.SIGTERM)
        try:
            running.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            _log.debug("the helper does not end by itself")
        _signal(running.pid, signal.SIGKILL)

    def _command(self, checkpoint: str) -> list[str]:
        if name := _name(checkpoint):
            helper, path = [_NAMED, "--name", name], checkpoint.removeprefix(f"{name}=")
        else:
            helper, path = [_MODULE, "--engine-args", self._engine_args], checkpoint
        return [sys.executable, "-m", *helper, "--socket", self._socket, "--", path]

    def _run(self) -> None:
        for checkpoint in self._checkpoints:
            with self._lock:
                if self._closed:
                    return
                _log.info("preloading checkpoint=%s", checkpoint)
                try:
                    self._running = subprocess.Popen(
                        self._command(checkpoint),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.PIPE,
                        text=True,
                        start_new_session=True,
                    )
                except OSError as error:
                    _log.warning("preload failed: no process for it: %s", str(error))
                    continue
            _, said = self._running.communicate()
            last = said.strip().rpartition("\n")[2]
            if self._running.returncode == 0:
                _log.info("preloaded %s", last)
            elif not self._closed:
                _log.warning("preload failed status=%d %s", self._running.returncode, last)
