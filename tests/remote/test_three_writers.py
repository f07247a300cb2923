"""Three writers do what comes on a server that keeps versions, and die of kill -9 meanwhile.

No name ever stands for an earlier content of its own, nor for what nobody wrote; whoever is told
something is told what is so; nothing is lost. `remote_runs.writers` says what that means, and does
the same for as long as it is told to.
"""

import os
import re
import subprocess
import sys

import pytest

from remote_runs import real_servers
from remote_runs.histories import Operation, deleted, misfits
from remote_runs.remotes import MemoryBucket
from tensor_dedup.remote import Remote
from tensor_dedup.remote.errors import NotARemoteError


@pytest.mark.parametrize(
    ("server", "seconds", "lease_s"),
    [
        pytest.param("memory", 6, 3, id="memory"),
        pytest.param("moto", 6, 4, id="moto"),
        pytest.param("memory", 200, 3, marks=pytest.mark.long, id="memory-long"),
        pytest.param("moto", 200, 4, marks=pytest.mark.long, id="moto-long"),
        pytest.param("weed", 200, 10, marks=pytest.mark.long, id="weed-long"),
    ],
)
def test_three_writers_that_are_killed_lose_nothing(
    server: str, seconds: int, lease_s: int
) -> None:
    if server == "weed":
        real_servers.needs("weed")
    words = [f"--server={server}", f"--minutes={seconds / 60}", f"--lease={lease_s}"]
    # Writers are forked from what has imported what they need; in this process that is others'.
    done = subprocess.run(
        [sys.executable, "-m", "remote_runs", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "push: done" in done.stdout
    assert "killed" in done.stdout


def test_a_deletion_where_no_remote_is_takes_no_marker_of_a_first_push_away() -> None:
    """Between any two of its requests another writer may make the remote."""

    class Made(MemoryBucket):
        def delete(self, key: str) -> None:
            assert key != "FORMAT"
            super().delete(key)

    bucket = Made()
    with pytest.raises(NotARemoteError):
        Remote(bucket).delete("n")
    assert bucket.objects == {}


def push(
    state: str, began: float, ended: float, outcome: str = "done", *, may_replace: bool = True
) -> Operation:
    return Operation(0, "push", "n", began, state, None, may_replace, ended, outcome)


def other(verb: str, state: str | None, began: float, ended: float, outcome: str) -> Operation:
    return Operation(1, verb, "n", began, state, ended=ended, outcome=outcome)


GONE = deleted("n")
A, B = push("a", 0, 1), push("b", 2, 3)


@pytest.mark.parametrize(
    ("states", "done"),
    [
        (["a", "b"], [A, B]),
        (["b", "a"], [push("a", 0, 5), B]),
        (["a"], [A, push("b", 2, 3, "killed")]),
        (["a", "b", "a"], [A, B, push("a", 4, 5)]),
        (["a", GONE], [A, other("delete", GONE, 2, 3, "done")]),
        ([GONE, "a"], [push("a", 4, 5, may_replace=False), other("delete", None, 2, 3, "killed")]),
        (["a", "b"], [A, B, other("pull", "a", 1, 2.5, "done")]),
        (["a"], [A, other("pull", None, 0.5, 3, "UnknownRemoteNameError")]),
        ([], [other("pull", None, 0, 1, "NotARemoteError")]),
    ],
)
def test_what_fits_into_one_order_is_no_fault(states: list[str], done: list[Operation]) -> None:
    assert [*misfits("n", states, done)] == []


@pytest.mark.parametrize(
    ("states", "done", "what"),
    [
        (["a", "b", "a"], [A, B], "its state was 2 times a"),
        (["a", "c"], [A], "its state was 1 times c, which was written by nobody"),
        (["b", "a"], [A, B], "what was written later was there before"),
        (["b"], [A, B], "this was not so while it was told: .* push n: done"),
        (["a", "b"], [A, B, other("pull", "a", 4, 5, "done")], "not so .* pull n: done"),
        (["a"], [A, other("pull", None, 2, 3, "UnknownRemoteNameError")], "not so .* pull n"),
        (["a"], [A, other("delete", GONE, 2, 3, "done")], "not so .* delete n: done"),
        (["a", "b"], [A, push("b", 2, 3, may_replace=False)], "b replaced a, which it may not"),
    ],
)
def test_what_does_not_fit_is_said(states: list[str], done: list[Operation], what: str) -> None:
    found = [*misfits("n", states, done)]
    assert any(re.search(what, each) for each in found), found
