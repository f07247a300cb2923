"""What a load must not find of those before it: hints of the user's, hints, resident models."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.process_memory import settle
from bench.stats import ENVIRONMENT
from tensor_dedup import UnsupportedError
from tensor_dedup.loader.checkpoint_io.hints import ENVIRONMENT as HINTS
from tensor_dedup.loader.residents.registry import registry


@contextmanager
def own_hints(work: Path) -> Iterator[Path]:
    """A folder for an index of hints that is empty. Import vllm and Diffusers inside, not before.

    It sets the environment that they read when they are imported.
    """
    with tempfile.TemporaryDirectory(dir=work, prefix=".hints-") as folder:
        os.environ.update(ENVIRONMENT)
        os.environ[HINTS] = str(Path(folder) / "hints.sqlite")
        yield Path(folder)


def forget_hints() -> None:
    """Make every checkpoint unknown."""
    index = Path(os.environ[HINTS])
    for path in index.parent.glob(f"{index.name}*"):
        path.unlink()


def require_nothing_resident() -> None:
    """UnsupportedError when a model that was dropped is still there: what follows would share."""
    settle()
    if registry.residents() or registry.records():
        raise UnsupportedError("models of an earlier measurement are still resident")
