"""The lock under which weights are loaded."""

import threading

from processes import process_state
from tensor_dedup.loader.load_lock import LOAD_LOCK


def take() -> bool:
    taken = threading.Event()

    def hold() -> None:
        with LOAD_LOCK:
            taken.set()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    return taken.wait(0.5)


def test_one_thread_has_it_and_may_take_it_again() -> None:
    with LOAD_LOCK, LOAD_LOCK:
        assert not take()
    assert take()


def test_a_forked_child_does_not_wait_for_a_thread_it_does_not_have() -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with LOAD_LOCK:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert process_state.forked(take)
    assert not take()
    done.set()
    thread.join()


def test_a_child_that_was_forked_within_a_load_leaves_it_and_loads_itself() -> None:
    def leave() -> bool:
        LOAD_LOCK.__exit__()
        with LOAD_LOCK:
            pass
        return take()

    with LOAD_LOCK:
        assert process_state.forked(leave)
    assert take()
