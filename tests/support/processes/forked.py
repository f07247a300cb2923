"""Processes in which vLLM and Diffusers are imported already.

They are forked from a server that imports both once and does nothing else. Importing them takes
longer than most of what is tested in such a process. `fresh.call` starts a process that has
imported nothing.
"""

import atexit
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from processes import process_state

_IMPORTED = [
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    # What vLLM imports for its first engine.
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.models.llama",
    "vllm.utils.cpu_triton_utils",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "diffusers.pipelines.stable_diffusion",
    "transformers.models.llama",
]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(_IMPORTED)
_servers_environment: dict[str, str] = {}


def start(
    function: Callable[..., None], *arguments: Any, environ: Mapping[str, str], log: Path
) -> BaseProcess:
    """Call the function in a process with that environment, the leader of its own session.

    Its output goes to `log`. Libraries that read the environment when they are imported have read
    that of this process at the first call.
    """
    if not _servers_environment:
        _servers_environment.update(os.environ)
    ready, its = multiprocessing.Pipe(duplex=False)
    begin = (its, _servers_environment, dict(environ), str(log), function, arguments)
    process = _CONTEXT.Process(target=_begin, args=begin, daemon=False)
    process.start()
    its.close()
    ready.recv()  # from then on a signal to its group reaches it
    ready.close()
    return process


def _begin(
    ready: Any,
    before: dict[str, str],
    environ: dict[str, str],
    log: str,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    os.setsid()
    with Path(log).open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    # What vLLM has set when it was imported stays.
    set_by_imports = {name: each for name, each in os.environ.items() if name not in before}
    os.environ.clear()
    os.environ.update({**set_by_imports, **environ})
    ready.send(None)
    ready.close()
    # The server says nothing of a module that it could not import.
    missing = [name for name in _IMPORTED if name not in sys.modules]
    assert not missing, missing
    process_state.set_aside()  # what is imported stays anyhow
    try:
        function(*arguments)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing skips
