"""What memory managers call an engine of a server: the name of its model, and the server's port.

Only the process that answers requests is told the port. The engine runs in a process that it
starts, which finds the port in the environment.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import argparse

    from vllm.config import VllmConfig

PORT_VARIABLE: Final = "TENSOR_DEDUP_SERVER_PORT"


def remember_port(arguments: argparse.Namespace) -> None:
    """Leave the port on a server's command line to the processes that this one starts."""
    port = getattr(arguments, "port", None)
    # Port 0 is one that the system chooses later; a socket of a path, or no server, has none.
    elsewhere = getattr(arguments, "uds", None) or getattr(arguments, "headless", False)
    if isinstance(port, int) and port and not elsewhere:
        os.environ[PORT_VARIABLE] = str(port)
    else:
        os.environ.pop(PORT_VARIABLE, None)


def server_name(vllm_config: VllmConfig) -> str | None:
    """Return the name of this process's engine: `MODEL (port 8000, rank 1)`.

    `MODEL` is the name by which requests ask for the model. The port is left out if it is not
    known, and the rank if the engine has one process only. With data parallelism, engines after the
    first one are called `replica 1` and so on. The result is None in a process that was not started
    for one engine: several models may be loaded there.
    """
    if multiprocessing.parent_process() is None:
        return None
    port, parallel = os.environ.get(PORT_VARIABLE), vllm_config.parallel_config
    more = [f"port {port}"] if port else []
    if replica := getattr(parallel, "data_parallel_index", 0):
        more.append(f"replica {replica}")
    if parallel.world_size > 1:
        more.append(f"rank {parallel.rank}")
    config = vllm_config.model_config
    model = getattr(config, "served_model_name", None) or config.model
    return f"{model} ({', '.join(more)})" if more else model
