"""The lock of a run that is published: one process at a time publishes a run from one store.

    publishers/RUN    in the store: locked by that process; the text says which one it is

It is a lock on a file, so it is free as soon as the process has ended, however that ended.
"""

import os
import socket
import threading
import weakref
from contextlib import suppress
from pathlib import PurePath
from typing import ClassVar, Final

from tensor_dedup.publishing.errors import RunInUseError
from tensor_dedup.store.errors import DamagedFileError
from tensor_dedup.store.files import Files, FileStatus, Handle
from tensor_dedup.store.format import frames
from tensor_dedup.store.format.names import file_of
from tensor_dedup.store.store import LocalStore

_FILE_BYTES: Final = 1 << 12
# The lock is asked for in this time: another thread of this process may be about to give it back.
_WITHIN_S: Final = 1.0
_TITLE: Final = "tensor-dedup publisher"


class PublishingLock:
    """The lock of this process on one run. It is held until nothing refers to the object any more.

    All publishers of a process share it. A forked child does not have its parent's.
    """

    _guard: ClassVar = threading.RLock()
    _all: ClassVar["weakref.WeakValueDictionary[tuple[int, int, int], PublishingLock]"] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, files: Files, handle: Handle) -> None:
        self._pid = os.getpid()
        # Not at exit, when something may still publish: it ends with the process.
        weakref.finalize(self, files.close, handle).atexit = False

    @property
    def is_held(self) -> bool:
        """Whether this process has the lock: not in a child that was forked since."""
        return self._pid == os.getpid()

    @classmethod
    def of(cls, store: LocalStore, run: str) -> "PublishingLock":
        """Return the lock on `run` in `store`, which this process then has.

        Raises:
            RunInUseError: Another process has it.
            StoreIOError, StoreAccessError: The file cannot be made or locked, for example because
                the file system has no locks.
        """
        folder = store.handle.objects
        files, path = folder.files, folder.layout.publishers / file_of(run)
        with store.handle.translated(), cls._guard:
            if (held := cls._all.get(_key(files.status(path)))) is not None:
                return held
            files.mkdir(path.parent)
            handle = files.open(path, "lock")
            try:
                if not files.flock(handle, exclusive=True, wait_s=_WITHIN_S):
                    raise _in_use(store, run, folder.read(path, _FILE_BYTES))
                _note(files, handle)
                lock = cls._all[_key(files.status_of(handle))] = cls(files, handle)
            except BaseException:
                files.close(handle)
                raise
            return lock


def _new_guard() -> None:
    PublishingLock._guard = threading.RLock()


os.register_at_fork(after_in_child=_new_guard)


def _key(status: FileStatus | None) -> tuple[int, int, int]:
    """By what a process knows a lock that it has: a forked child has another one."""
    return (0, 0, 0) if status is None else (os.getpid(), status.device, status.inode)


def _note(files: Files, handle: Handle) -> None:
    """Write which process has the lock. It is for people, and may fail."""
    lines = [_TITLE, f"pid {os.getpid()}", f"host {socket.gethostname()}"]
    with suppress(OSError, UnicodeEncodeError):
        files.truncate(handle, 0)
        files.pwrite(handle, frames.encode_text(lines), 0)


def _in_use(store: LocalStore, run: str, note: bytes) -> RunInUseError:
    facts: dict[str, object] = {"run": run, "pid": None, "host": None}
    who = "another process"
    with suppress(DamagedFileError, ValueError):  # it may be writing it just now
        title, pid, host = frames.decode_text(note, PurePath())
        if title == _TITLE:
            facts |= {"pid": int(pid.removeprefix("pid ")), "host": host.removeprefix("host ")}
            who = f"the process {facts['pid']} on {facts['host']}"
    return RunInUseError.at(store.path, f"{who} publishes the run {run!r} from here", **facts)
