"""Taking turns: both sides measured alternately, and what is said meanwhile."""

import sys
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_pairs(count: int, what: str, plain: Callable[[], T], ours: Callable[[], T]) -> list[list[T]]:
    """`count` results of both, taken alternately, the order swapped every other pair."""
    found: list[list[T]] = [[], []]
    for number in range(count):
        order = [(0, plain), (1, ours)]
        for side, run in order[:: -1 if number % 2 else 1]:
            found[side].append(run())
        say(f"{what}: {number + 1} of {count}")
    return found


def timed(work: Callable[[], object]) -> float:
    """The seconds that something takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def say(text: str) -> None:
    """Progress, beside the result on stdout."""
    sys.stderr.write(f"{text}\n")
