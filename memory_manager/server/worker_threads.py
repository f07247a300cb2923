"""Start the manager's threads, all of them before it serves clients.

A limit on processes (`ulimit -u`, or a container's limit) can keep a thread from starting. If a
thread failed to start later, the event loop or a request would fail, too.
"""

import logging
import threading
from collections.abc import Callable

from tensor_dedup.memory_manager.errors import NoMemoryError

_log = logging.getLogger(__name__)


def start_threads(name: str, count: int, body: Callable[[], None]) -> list[threading.Thread]:
    """Start up to `count` daemon threads that run `body`; return those that could be started.

    Raises:
        NoMemoryError: No thread could be started.
    """
    started: list[threading.Thread] = []
    try:
        for number in range(count):
            thread = threading.Thread(target=body, name=f"{name}-{number}", daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        if not started:
            raise NoMemoryError(
                f"the system starts no thread for {name} ({error}); raise ulimit -u, or the limit "
                "on processes (pids.max) of the manager's container",
                wanted=count,
            ) from error
        _log.warning("%s has %d threads instead of %d: %s", name, len(started), count, str(error))
    return started
