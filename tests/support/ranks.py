"""One process that loads what each rank of several would.

with ranks.standing("tp", 1, 2):
    module = loads.load(path, parallel={"tensor_parallel_size": 2, "rank": 1}).module

Nothing can be computed there, for the other ranks do not exist; but a model is built and loaded as
that rank's, by vLLM's own code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal
from unittest import mock

from vllm.distributed import parallel_state

Kind = Literal["tp", "pp", "dp", "ep"]


@contextmanager
def standing(kind: Kind, rank: int, size: int) -> Iterator[None]:
    """While active, this process is that rank of so many in its group of this kind."""
    group: Any = getattr(parallel_state, f"_{kind.upper()}")
    # The first and the last of a pipeline are found by global ranks.
    place: dict[str, Any] = {
        "rank_in_group": rank,
        "world_size": size,
        "rank": rank,
        "ranks": list(range(size)),
    }
    with mock.patch.multiple(group, **place):
        yield
