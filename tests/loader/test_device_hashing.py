"""Hashing where a tensor lies, and what becomes of it where that cannot be trusted.

The host stands in for the device here; `test_blake3_kernel.py` is about the kernel.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import fresh
from stand_in import hasher
from stand_in import leaves as right
from tensor_dedup.digest import LEAF_BYTES, digest
from tensor_dedup.errors import ConfigError, UnsupportedError
from tensor_dedup.loader import report
from tensor_dedup.loader.cuda.hashing import (
    _ASKED,
    _KERNEL,
    HASHING,
    DeviceHash,
    _open_cuda,
    digest_of,
)
from tensor_dedup.loader.residents.resident import tensor_bytes

Leaves = Callable[[torch.Tensor], list[bytes]]


@pytest.fixture(autouse=True)
def reasons(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    own: dict[str, str] = {}
    monkeypatch.setattr(report._collection, "devices", own)
    yield own
    HASHING.reset()


def weights(nbytes: int = LEAF_BYTES + 2) -> torch.Tensor:
    made = torch.Generator().manual_seed(nbytes)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=made)


def expected(tensor: torch.Tensor) -> str:
    return digest(tensor_bytes(tensor))


@pytest.mark.parametrize(
    "tensor",
    [
        weights(0),
        weights(1),
        weights(),
        weights()[3:],
        weights().view(torch.bfloat16)[5:],
        weights(4096).view(torch.float32).view(32, 32).T,
        weights(4096).view(torch.int64).view(4, 8, 16).permute(2, 0, 1),
        weights(4096).view(torch.float8_e4m3fn).view(64, 64).T,
        torch.nn.Parameter(weights(64).view(torch.complex64), requires_grad=True),
        torch.tensor([True, False]),
    ],
)
def test_the_digest_is_the_one_of_the_bytes_in_the_order_of_memory(tensor: torch.Tensor) -> None:
    with HASHING.replaced("cpu", hasher):
        assert digest_of(tensor) == expected(tensor)
        assert HASHING.nbytes == tensor.nbytes
    assert digest_of(tensor) == expected(tensor)


def test_it_must_know_the_answers_first_at_lengths_of_every_kind(reasons: dict[str, str]) -> None:
    assert {n % 64 for n in _ASKED} >= {0, 1, 63}
    assert {n // LEAF_BYTES for n in _ASKED} >= {0, 1, 3}
    assert {n % 2 for n in _ASKED if n > LEAF_BYTES} == {1}, "those begin at no word"
    heard: list[int] = []

    def leaves(data: torch.Tensor) -> list[bytes]:
        heard.append(data.numel())
        return right(data)

    with HASHING.replaced("cpu", lambda _: DeviceHash(leaves, 0)):
        for _ in range(2):
            assert digest_of(weights(5)) == expected(weights(5))
    assert heard == [*_ASKED, 5, 5]
    assert not reasons


@pytest.mark.parametrize("wrong", _ASKED)
def test_one_that_is_wrong_at_one_length_is_never_used(wrong: int, reasons: dict[str, str]) -> None:
    heard: list[int] = []

    def leaves(data: torch.Tensor) -> list[bytes]:
        heard.append(data.numel())
        found = right(data)
        return found if data.numel() != wrong else [*found[:-1], bytes(32)]

    opened: list[torch.device] = []

    def opener(device: torch.device) -> DeviceHash:
        opened.append(device)
        return DeviceHash(leaves, 0)

    with HASHING.replaced("cpu", opener):
        for _ in range(2):
            assert digest_of(weights()) == expected(weights())
        assert HASHING.nbytes == 0
    assert heard == list(_ASKED[: _ASKED.index(wrong) + 1])
    assert len(opened) == 1
    [reason] = reasons.values()
    assert f"{wrong} bytes hash to something else" in reason
    assert reason in str(report.report())


def test_one_that_fails_later_is_left_for_good_and_one_without_memory_is_asked_again(
    reasons: dict[str, str],
) -> None:
    raised: list[Exception] = [torch.OutOfMemoryError("full"), UnsupportedError("it has gone")]
    heard = 0

    def leaves(data: torch.Tensor) -> list[bytes]:
        nonlocal heard
        heard += 1
        if data.numel() == 9 and raised:
            raise raised.pop(0)
        return right(data)

    with HASHING.replaced("cpu", lambda _: DeviceHash(leaves, 0, asked=(1,))):
        assert digest_of(weights(8)) == expected(weights(8))
        for number in (3, 4, 4):
            assert digest_of(weights(9)) == expected(weights(9))
            assert heard == number
            assert bool(reasons) == (number == 4)
    assert "it has gone" in str(reasons)


def test_a_device_without_memory_at_first_is_asked_again(reasons: dict[str, str]) -> None:
    full = [True]

    def leaves(data: torch.Tensor) -> list[bytes]:
        if full:
            raise torch.OutOfMemoryError("full")
        return right(data)

    with HASHING.replaced("cpu", lambda _: DeviceHash(leaves, 0, asked=(1,))):
        assert digest_of(weights(9)) == expected(weights(9))
        assert HASHING.nbytes == 0
        full.clear()
        assert digest_of(weights(9)) == expected(weights(9))
        assert HASHING.nbytes == 9
    assert not reasons


@pytest.mark.parametrize("fails", [False, True])
def test_while_it_is_built_the_host_hashes(fails: bool, reasons: dict[str, str]) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def build() -> None:
        asked.set()
        go_on.wait()
        if fails:
            raise UnsupportedError("no compiler")

    opened: list[torch.device] = []

    def opener(device: torch.device) -> DeviceHash:
        opened.append(device)
        return DeviceHash(right, 0, asked=(1,), build=build)

    with HASHING.replaced("cpu", opener):
        for _ in range(2):
            assert digest_of(weights(9)) == expected(weights(9))
            assert asked.wait(60)
        assert HASHING.nbytes == 0
        assert not reasons
        go_on.set()
        HASHING.settle()
        assert digest_of(weights(9)) == expected(weights(9))
        assert HASHING.nbytes == (0 if fails else 9)
        assert ("no compiler" in str(reasons)) == fails
    assert len(opened) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_build_that_ends_with_an_error_nobody_expects_is_over(reasons: dict[str, str]) -> None:
    def build() -> None:
        raise ZeroDivisionError

    with HASHING.replaced("cpu", lambda _: DeviceHash(right, 0, asked=(1,), build=build)):
        digest_of(weights(9))
        HASHING.settle()
        for thread in threading.enumerate():
            if thread.name == "tensor-dedup-build":
                thread.join()  # it tells of the error
        assert digest_of(weights(9)) == expected(weights(9))
        assert HASHING.nbytes == 0
    assert "another error" in str(reasons)


def end_while_it_is_built(mark: str) -> None:
    def build() -> None:
        threading.main_thread().join()
        threading.Event().wait(0.5)  # a daemon is gone by then
        Path(mark).touch()

    with HASHING.replaced("cpu", lambda _: DeviceHash(right, 0, asked=(1,), build=build)):
        digest_of(weights(9))


def test_a_program_ends_when_it_is_built(tmp_path: Path) -> None:
    """Ended in the middle, Triton's compiler aborts it."""
    fresh.call(end_while_it_is_built, str(tmp_path / "built"))
    assert (tmp_path / "built").exists()


def test_what_the_host_hashes(reasons: dict[str, str]) -> None:
    with HASHING.replaced("cpu", lambda _: DeviceHash(right, 100)):
        assert digest_of(weights(99)) == expected(weights(99))
        for algorithm in ("blake2b", "xxh3_128", "xxhash64"):
            assert digest_of(weights(), algorithm) == digest(tensor_bytes(weights()), algorithm)
        assert HASHING.nbytes == 0
        with pytest.raises(ConfigError):
            digest_of(weights(), "md5")
        with pytest.raises(UnsupportedError):
            digest_of(weights()[::2])
        digest_of(weights(100))
        assert HASHING.nbytes == 100
    assert not reasons


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, _KERNEL, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UnsupportedError, match="Triton cannot be imported"):
        _open_cuda(torch.device("cuda", 0))


def test_a_forked_child_asks_anew() -> None:
    """What its parent opened does not work there, and a lock may be held by nobody."""
    with HASHING.replaced("cpu", lambda _: DeviceHash(right, 0, asked=(1,))):
        digest_of(weights(9))
        assert HASHING.nbytes == 9
        with HASHING._lock:
            child = os.fork()
            if not child:
                fine = HASHING.nbytes == 0 and digest_of(weights(9)) == expected(weights(9))
                os._exit(0 if fine and HASHING.nbytes == 9 else 1)
        assert os.waitpid(child, 0)[1] == 0
