"""What becomes of work that a pool was given and has not begun."""

import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from tensor_dedup.digest import hand


def test_who_waits_for_what_a_pool_never_began_is_told() -> None:
    busy, go = threading.Event(), threading.Event()

    def wait() -> str:
        busy.set()
        assert go.wait(30)
        return "first"

    pool = ThreadPoolExecutor(1)
    first = hand(pool, wait)
    assert busy.wait(30)
    second = hand(pool, lambda: "second")
    pool.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(CancelledError):
        second.result(30)
    go.set()
    assert first.result(30) == "first"
    assert hand(pool, lambda: "here").result(30) == "here"  # the pool takes nothing more
