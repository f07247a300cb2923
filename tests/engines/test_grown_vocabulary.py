"""A fine-tune with more rows of vocabulary adds little to a process that has its base."""

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from processes import fresh
from project import package_source
from tensor_dedup import UnsupportedError, report

sys.path.append(str(package_source.ROOT / "scripts"))  # which a fresh process has not
from bench.stats import ENVIRONMENT
from demonstration import models

MIB = 1 << 20


def added_bytes(work: str) -> tuple[int, int]:
    """What the demonstration's grown vocabulary adds to a process with its base.

    PSS with every page of the weights read, less the KV cache, and with plain weights: when its
    digests are not known, and when they are.
    """
    os.environ.update(ENVIRONMENT)
    from bench.loading import engine, let_go, prepare_process
    from bench.process_memory import pss, settle
    from demonstration.engine import facts

    base, grown = Path(work, models.BASE), Path(work, "grown-vocabulary")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for path in (base, grown):
            pool.submit(models.make, path.name, Path(work)).result()
    prepare_process(base)

    def added(path: Path, *, known: bool) -> int:
        settle()
        before = pss()
        one = engine(path, dedup={"cpu_weights": "plain"})
        cache = facts(one)["kv_cache"]
        settle()
        found = pss() - before - int(cache)
        last = report().models[-1]
        let_go(one)
        del one
        settle()
        if not last.leaf_shared_bytes or last.known != known:
            raise UnsupportedError(f"nothing to measure: {last}")
        return found

    first = engine(base, dedup={"cpu_weights": "plain"})
    facts(first)
    found = added(grown, known=False), added(grown, known=True)
    let_go(first)
    return found


@pytest.mark.vllm
@pytest.mark.long
def test_the_demonstrations_grown_vocabulary_adds_at_most_16_mib(tmp_path: Path) -> None:
    rows = models.CONFIG["vocab_size"] + models.NEW_ROWS
    # All of its embedding, where only whole tensors are shared.
    assert rows * models.CONFIG["hidden_size"] * 2 > 256 * MIB
    unknown, known = fresh.call(added_bytes, str(tmp_path))
    assert unknown <= 16 * MIB
    assert known <= 16 * MIB
