"""Run a function of a test module in a new interpreter.

    def scenario(root: str) -> list[int]: ...
    assert fresh.call(scenario, str(tmp_path)) == [1, 2]

For what a process can do only once or only first: plain vLLM makes the groups of a MoE model only
when its first engine is one, and memory is compared between processes that did nothing else.
"""

import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import process_state

P = ParamSpec("P")
T = TypeVar("T")


def call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args, **kwargs)` in a child; its result is pickled, its failure fails the caller.

    The function must stand at the top of its module, and what goes in and out must be of classes
    that are importable here and there: built-in ones, not those of the test module. The child
    inherits the environment as it is now, but no hints: what the parent loaded is unknown there.
    """
    with tempfile.TemporaryDirectory(prefix="tensor-dedup-fresh-") as folder:
        order, answer = Path(folder, "order"), Path(folder, "answer")
        where = (function.__code__.co_filename, function.__name__)
        order.write_bytes(pickle.dumps((where, args, kwargs)))
        done = subprocess.run(
            [sys.executable, __file__, str(order), str(answer)],
            env={**os.environ, "TENSOR_DEDUP_HINTS": str(Path(folder, "hints.sqlite"))},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, (
            f"{where[1]} ended with {done.returncode}:\n{done.stderr[-6000:]}"
        )
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


if __name__ == "__main__":
    _obey(Path(sys.argv[1]), Path(sys.argv[2]))
