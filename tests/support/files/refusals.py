"""Files that are refused: the error and its kind, and files that chance has damaged.

`refused` expects one error and one kind of it. `count_accepted` reads many files with a few bytes
changed, and `peak_of` says what that takes of memory.
"""

import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from tensor_dedup.formats.errors import (
    CheckpointFault,
    CheckpointFilesError,
    FormatFault,
    GgufError,
    GgufFault,
    JsonFault,
    JsonTextError,
    LocatedError,
    PytorchError,
    PytorchFault,
    SafetensorsError,
    SafetensorsFault,
    TensorIndexError,
    TensorIndexFault,
)

ERRORS: Mapping[type[FormatFault], type[LocatedError[Any]]] = {
    CheckpointFault: CheckpointFilesError,
    GgufFault: GgufError,
    JsonFault: JsonTextError,
    PytorchFault: PytorchError,
    SafetensorsFault: SafetensorsError,
    TensorIndexFault: TensorIndexError,
}


@contextmanager
def refused(
    kind: FormatFault, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[LocatedError[Any]]]:
    """Expect the error of this very class and kind."""
    with pytest.raises(LocatedError, match=match) as caught:
        yield caught
    assert (caught.type, caught.value.kind) == (ERRORS[type(kind)], kind)


NUMBERS = (0, 1, 2, 3, 7, 8, 31, 32, 255, 256, 1 << 16, 1 << 31, 1 << 32, 1 << 62, 1 << 63)


def mutated(rng: random.Random, file: bytes) -> bytes:
    """The file with one to three changes: a bit, a number, bytes in, out, doubled or cut off."""
    changed = bytearray(file)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _change(rng, changed)
    return bytes(changed)


def _change(rng: random.Random, file: bytearray) -> None:
    at = rng.randrange(len(file) + 1)
    kind = rng.randrange(10)
    if kind <= 3 and at < len(file):
        file[at] ^= 1 << rng.randrange(8)
    elif kind <= 5:
        number = rng.choice(NUMBERS) - rng.randrange(2)
        code = rng.choice(["<B", "<H", "<I", "<Q", ">I"])
        raw = struct.pack(code, number % (1 << 8 * struct.calcsize(code)))
        file[at : at + len(raw)] = raw
    elif kind == 6:
        file[at:at] = rng.randbytes(rng.randrange(1, 9))
    elif kind == 7:
        del file[at : at + rng.randrange(1, 40)]
    elif kind == 8:
        file[at:at] = file[at : at + rng.randrange(1, 80)]
    else:
        del file[at:]


def peak_of(work: Callable[[], object]) -> int:
    """The most bytes that were held at once while this ran."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def count_accepted(
    cases: int,
    seed: int,
    make: Callable[[random.Random, int], bytes],
    judge: Callable[[bytes], bool],
) -> int:
    """How many of `cases` files `judge` accepted; whatever it raises says which file it was."""
    rng = random.Random(seed)
    accepted = 0
    for case in range(cases):
        file = make(rng, case)
        try:
            accepted += judge(file)
        except BaseException as error:
            error.add_note(f"case {case} of seed {seed}: {file!r}")
            raise
    return accepted
