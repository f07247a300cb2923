"""Run a function of a test module in a new process.

    def scenario(root: str) -> list[int]: ...
    assert fresh.call(scenario, str(tmp_path)) == [1, 2]

For what a process can do only once or only first: plain vLLM makes the groups of a MoE model only
when its first engine is one, and memory is compared between processes that did nothing else.
`call` starts a new interpreter; in a process of `call_forked`, vLLM and Diffusers are imported.
"""

import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from processes import forked, interpreters, process_state

P = ParamSpec("P")
T = TypeVar("T")

_PATIENCE_S = 600.0


def call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args, **kwargs)` in a child; its result is pickled, its failure fails the caller.

    The function must stand at the top of its module, and what goes in and out must be of classes
    that are importable here and there: built-in ones, not those of the test module. The child
    inherits the environment as it is now, but no hints: what the parent loaded is unknown there.
    """

    def run(order: Path, answer: Path, log: Path, environ: dict[str, str]) -> int:
        with log.open("wb") as out:
            command = interpreters.command(__name__, main.__name__, str(order), str(answer))
            done = subprocess.run(
                command, env=environ, stdout=out, stderr=out, timeout=_PATIENCE_S, check=False
            )
        return done.returncode

    return _answer(run, function, args, kwargs)


def call_forked(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `call`, in a child that finds vLLM and Diffusers imported."""

    return _in_fork(_PATIENCE_S, function, args, kwargs)


def call_patiently(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `call_forked`, for what takes up to half an hour."""
    return _in_fork(3 * _PATIENCE_S, function, args, kwargs)


def _in_fork(patience_s: float, function: Callable[..., T], args: Any, kwargs: Any) -> T:
    def run(order: Path, answer: Path, log: Path, environ: dict[str, str]) -> int | None:
        process = forked.start(_obey, order, answer, environ=environ, log=log)
        try:
            process.join(patience_s)
            return process.exitcode  # None: it has not ended in time
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()

    return _answer(run, function, args, kwargs)


def _answer(
    run: Callable[[Path, Path, Path, dict[str, str]], int | None],
    function: Callable[..., T],
    args: Any,
    kwargs: Any,
) -> T:
    with tempfile.TemporaryDirectory(prefix="tensor-dedup-fresh-") as folder:
        order, answer, log = (Path(folder, name) for name in ("order", "answer", "log"))
        where = (function.__code__.co_filename, function.__name__)
        order.write_bytes(pickle.dumps((where, args, kwargs)))
        log.touch()
        hints = str(Path(folder, "hints.sqlite"))
        ended = run(order, answer, log, {**os.environ, "TENSOR_DEDUP_HINTS": hints})
        written = log.read_text(errors="replace")[-6000:]
        assert ended == 0, f"{function.__name__} ended with {ended}:\n{written}"
        result: T = pickle.loads(answer.read_bytes())
        return result


def _obey(order: Path, answer: Path) -> None:
    (file, name), args, kwargs = pickle.loads(order.read_bytes())
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    # Under its name: multiprocessing, dataclasses and pickle look it up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    process_state.collect_surely()
    answer.write_bytes(pickle.dumps(getattr(module, name)(*args, **kwargs)))


def main() -> None:
    """Be the new process: its arguments are the paths of what to do and of the answer."""
    _obey(Path(sys.argv[1]), Path(sys.argv[2]))
