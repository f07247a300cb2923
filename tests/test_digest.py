"""Digests: golden vectors, an independent implementation, any split, threads, forks."""

import array
import ctypes
import functools
import hashlib
import itertools
import math
import mmap
import os
import struct
import threading
import time
import warnings
from concurrent.futures import wait
from pathlib import Path

import pytest
import xxhash
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from tensor_dedup import digest as digests
from tensor_dedup.digest import (
    ALGORITHMS,
    LEAF_BYTES,
    StreamDigest,
    combine,
    digest,
    leaf_digests,
    stream,
    submit,
)
from tensor_dedup.errors import ConfigError, IntegrityError

MIB = 1 << 20
# The golden pattern: byte i is (i * i + i // 251) % 256, so that leaves and pages all differ.
GOLDEN = {
    0: "cce7b67f49b1286b8868831ca800003480d64087298a5e4cd7be083b6b78f160",
    2 * MIB - 1: "86ad531995a158edf730382e8f6212f3a43d8827bd89e6dc54b6da8170813464",
    2 * MIB: "a0a51fd8177f91207be3df1b4ca8dbf31ee08f32703a637e54b87a3b78edd989",
    2 * MIB + 1: "97e1a647c61de68c16bce4e911181aafe3b7b144122a869f26b3870d4e3601ed",
    5 * MIB: "51ab79ae22770f84c2d23029763a5917b4f92a60874501dd363cbed72d1ec2e3",
}
OTHERS = {
    "blake2b": "blake2b:e060e1dda567fa3fade9ad6526c7bd1e9a871ef08dd94b3b99c52402a1d92709",
    "xxh3_128": "xxh3_128:ac0e278fa206a20a54b60bafc97d6868",
    "xxhash64": "xxhash64:719330ae5a124528",
}


@functools.cache
def pattern(nbytes: int) -> bytes:
    period = bytes((i * i + i // 251) % 256 for i in range(251 * 256))
    return (period * (nbytes // len(period) + 1))[:nbytes]


def reference(data: bytes) -> str:
    """The definition, written again from its words."""
    tree = blake3(derive_key_context="tensor-dedup digest v1")
    tree.update(struct.pack("<Q", len(data)))
    for start in range(0, len(data), 2 * 1024 * 1024):
        tree.update(blake3(data[start : start + 2 * 1024 * 1024]).digest())
    return tree.hexdigest()


@pytest.mark.parametrize("nbytes", GOLDEN)
def test_golden_vectors(nbytes: int) -> None:
    data = pattern(nbytes)
    assert digest(data) == GOLDEN[nbytes] == reference(data)
    assert submit(data).result() == GOLDEN[nbytes]
    assert combine(nbytes, leaf_digests(data)) == GOLDEN[nbytes]


@pytest.mark.parametrize("algorithm", OTHERS)
def test_golden_vectors_of_the_other_algorithms(algorithm: str) -> None:
    data = pattern(5 * MIB)
    assert digest(data, algorithm) == OTHERS[algorithm] == submit(data, algorithm).result()


def test_other_algorithms_hash_size_then_bytes() -> None:
    data = pattern(1000)
    message = struct.pack("<Q", 1000) + data
    assert (
        digest(data, "blake2b") == "blake2b:" + hashlib.blake2b(message, digest_size=32).hexdigest()
    )
    assert digest(data, "xxh3_128") == "xxh3_128:" + xxhash.xxh3_128(message).hexdigest()
    assert digest(data, "xxhash64") == "xxhash64:" + xxhash.xxh64(message).hexdigest()


@settings(max_examples=60, deadline=None)
@given(
    nbytes=st.one_of(
        st.integers(0, 3000),
        st.integers(-2, 2).map(lambda d: LEAF_BYTES + d),
        st.integers(-2, 2).map(lambda d: 2 * LEAF_BYTES + d),
    ),
    cuts=st.lists(st.floats(0, 1), max_size=6),
    algorithm=st.sampled_from(ALGORITHMS),
)
def test_any_split_gives_the_same_digest(nbytes: int, cuts: list[float], algorithm: str) -> None:
    data = pattern(nbytes)
    edges = [0, *sorted(int(cut * nbytes) for cut in cuts), nbytes]
    parts = StreamDigest(algorithm, nbytes)
    for start, stop in itertools.pairwise(edges):
        parts.update(data[start:stop])
    assert parts.hexdigest() == digest(data, algorithm)


def test_a_stream_can_be_read_before_it_ends() -> None:
    data = pattern(3 * MIB)
    parts = StreamDigest()
    for start in range(0, len(data), MIB):
        parts.update(data[start : start + MIB])
        assert parts.hexdigest() == reference(data[: start + MIB])


def test_a_stream_of_another_length_than_announced_is_refused() -> None:
    parts = StreamDigest("blake3", 5)
    parts.update(b"1234")
    with pytest.raises(IntegrityError, match="5 bytes were announced, 4 came"):
        parts.hexdigest()


@pytest.mark.parametrize("algorithm", OTHERS)
def test_a_stream_of_other_algorithms_needs_the_size(algorithm: str) -> None:
    with pytest.raises(ConfigError, match="nbytes"):
        StreamDigest(algorithm)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200))
def test_a_leaf_is_never_a_digest(data: bytes) -> None:
    leaf = blake3(data).hexdigest()
    assert digest(data) != leaf
    # Nor is the digest a plain hash of what it is made from.
    message = struct.pack("<Q", len(data)) + b"".join(leaf_digests(data))
    assert digest(data) != blake3(message).hexdigest()
    assert digest(message) != digest(data)


def test_leaves_lie_at_multiples_of_two_mib() -> None:
    data = pattern(5 * MIB)
    pieces = [data[: 2 * MIB], data[2 * MIB : 4 * MIB], data[4 * MIB :]]
    assert leaf_digests(data) == [blake3(piece).digest() for piece in pieces]
    assert leaf_digests(b"") == []


def test_equal_leaves_of_another_size_are_another_tensor() -> None:
    leaf = blake3(b"abc").digest()
    assert combine(3, [leaf]) != combine(4, [leaf])


@pytest.mark.parametrize(
    ("nbytes", "leaves"),
    [(1, []), (0, [b"x" * 32]), (LEAF_BYTES + 1, [b"x" * 32]), (-1, []), (5, [b"short"])],
)
def test_leaves_that_cannot_be_are_refused(nbytes: int, leaves: list[bytes]) -> None:
    with pytest.raises(IntegrityError):
        combine(nbytes, leaves)


def test_text_form() -> None:
    seen = {algorithm: digest(b"abc", algorithm) for algorithm in ALGORITHMS}
    assert len(seen["blake3"]) == 64
    assert set(seen["blake3"]) <= set("0123456789abcdef")
    for algorithm in OTHERS:
        assert seen[algorithm].startswith(f"{algorithm}:")


@pytest.mark.parametrize("call", [digest, submit])
def test_unknown_algorithm_names_the_known_ones(call: type) -> None:
    with pytest.raises(ConfigError, match="xxh3_128"):
        call(b"", "md5")


def test_any_contiguous_buffer_is_its_bytes() -> None:
    floats = array.array("f", [1.5, -2.0, 3.25, 0.0])
    expected = digest(floats.tobytes())
    assert digest(floats) == expected
    assert digest(memoryview(floats).cast("B").cast("f", (2, 2))) == expected
    assert digest((ctypes.c_ubyte * 16).from_buffer(floats)) == expected
    assert digest((ctypes.c_float * 0 * 3)()) == digest(b"")


def test_a_buffer_with_gaps_is_refused() -> None:
    with pytest.raises(TypeError, match="contiguous"):
        digest(memoryview(bytes(10))[::2])


def test_every_bit_of_a_nan_counts() -> None:
    quiet, payload = (struct.pack("<I", bits) for bits in (0x7FC00000, 0x7FC00001))
    assert all(math.isnan(struct.unpack("<f", nan)[0]) for nan in (quiet, payload))
    assert digest(quiet) != digest(payload)


def test_many_threads_at_once() -> None:
    sizes = [0, 1, 3 * MIB, 5 * MIB, 17 * MIB]
    data = {n: pattern(n) for n in sizes}
    expected = {n: reference(data[n]) for n in sizes}
    wrong: list[int] = []

    def work() -> None:
        futures = [(n, submit(data[n])) for n in sizes * 2]
        wrong.extend(n for n, future in futures if future.result() != expected[n])
        wrong.extend(n for n in sizes if digest(data[n]) != expected[n])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_waiting_inside_the_pool_does_not_deadlock() -> None:
    data = pattern(5 * MIB)
    inner: list[str] = []
    ready = threading.Event()

    def nested(_: object) -> None:
        inner.append(submit(data).result(timeout=30))
        inner.append(digest(data))
        if len(inner) == 2 * len(outer):
            ready.set()

    # Callbacks run in the pool: all its threads wait for nested work at once.
    outer = [submit(pattern(MIB)) for _ in range(len(os.sched_getaffinity(0)) * 3)]
    for future in outer:
        future.add_done_callback(nested)
    assert ready.wait(60)
    assert set(inner) == {GOLDEN[5 * MIB]}


def test_the_buffer_is_free_once_the_result_is_there(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(pattern(5 * MIB))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    assert submit(mapped).result() == GOLDEN[5 * MIB]
    assert digest(mapped) == GOLDEN[5 * MIB]
    mapped.close()  # BufferError if a view were still alive


def test_a_future_cannot_be_cancelled() -> None:
    future = submit(pattern(5 * MIB))
    assert not future.cancel()
    assert future.result() == GOLDEN[5 * MIB]


def test_a_forked_child_hashes_too() -> None:
    data = pattern(5 * MIB)
    wait([submit(data)])  # the parent's pool is running
    reader, writer = os.pipe()
    # Only the child of a process with threads can show this; it leaves by os._exit.
    child = fork_quietly()
    if child == 0:
        os.write(writer, f"{submit(data).result(timeout=30)}{digest(data)}".encode())
        os._exit(0)
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(reader, 200).decode() == GOLDEN[5 * MIB] * 2
    os.close(reader)
    assert digest(data) == GOLDEN[5 * MIB]  # the parent's pool still works


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_thread_count", lambda: threads)
    monkeypatch.setattr(digests, "_POOL", digests._Pool())
    for nbytes in (5 * MIB, 33 * MIB + 7):
        data = pattern(nbytes)
        assert digest(data) == reference(data) == submit(data).result()


def fork_quietly() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of forks with threads, which is what is tested here.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


@pytest.mark.parametrize("algorithm", ["blake3", "xxh3_128"])
@pytest.mark.parametrize("nbytes", [0, 1, 100_000, 5 * MIB + 3])
def test_bytes_can_be_fetched_as_they_are_hashed(nbytes: int, algorithm: str) -> None:
    data, memory = pattern(nbytes), bytearray(nbytes)
    fetched = []

    def fill(piece: memoryview, offset: int) -> None:
        fetched.append((offset, piece.nbytes))
        piece[:] = data[offset : offset + piece.nbytes]

    assert submit(memory, algorithm, fill).result() == digest(data, algorithm)
    assert memory == data
    ends = [offset + size for offset, size in sorted(fetched)]
    assert [offset for offset, _ in sorted(fetched)] == [0, *ends[:-1]][: len(fetched)]


def test_what_fetching_raises_the_future_raises() -> None:
    def fill(piece: memoryview, offset: int) -> None:
        if offset:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        submit(bytearray(5 * MIB), "blake3", fill).result()


def test_a_leaf_that_was_compared_already_is_not_hashed_again() -> None:
    data = bytes(range(256)) * (3 * LEAF_BYTES // 256) + b"tail"
    leaves = leaf_digests(data)
    buffer = bytearray(len(data))

    def fill(piece: memoryview, offset: int) -> bytes | None:
        piece[:] = data[offset : offset + len(piece)]
        number = offset // LEAF_BYTES
        return leaves[number] if number % 2 else None

    assert submit(buffer, fill=fill).result() == digest(data)
    assert buffer == data
    # It is believed, so what it says must be what was compared.
    assert submit(buffer, fill=lambda _piece, _offset: leaves[0]).result() != digest(data)
    with pytest.raises(IntegrityError):
        submit(buffer, fill=lambda _piece, _offset: b"short").result()


@pytest.mark.parametrize("nbytes", [1, 100_000, 2 * MIB, 21 * MIB + 3])
def test_bytes_that_only_pass_through_have_the_same_digest(nbytes: int) -> None:
    data, target = pattern(nbytes), bytearray(nbytes)
    passed = []

    def fill(piece: memoryview, offset: int) -> None:
        passed.append(offset)
        piece[:] = data[offset : offset + piece.nbytes]
        target[offset : offset + piece.nbytes] = piece

    assert stream(nbytes, fill).result() == digest(data)
    assert target == data
    assert sorted(passed) == list(range(0, nbytes, LEAF_BYTES))


def test_what_passing_on_raises_the_future_raises_when_nothing_runs_any_more() -> None:
    running = []

    def fill(_: memoryview, offset: int) -> None:
        running.append(offset)
        try:
            if not offset:
                raise OSError("no room there")
            time.sleep(0.01)
        finally:
            running.remove(offset)

    future = stream(40 * MIB, fill)
    with pytest.raises(OSError, match="no room there"):
        future.result()
    assert running == []


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("nbytes", [5, 2 * MIB, 2 * MIB + 1, 5 * MIB, 40 * MIB])
def test_the_leaves_can_be_had_with_the_digest(
    threads: int, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_thread_count", lambda: threads)
    monkeypatch.setattr(digests, "_POOL", digests._Pool())
    data = pattern(nbytes)
    expected = leaf_digests(data) if nbytes > LEAF_BYTES else []

    def fill(piece: memoryview, offset: int) -> None:
        piece[:] = data[offset : offset + piece.nbytes]

    for passing in (False, True):
        leaves: list[bytes] = []
        future = stream(nbytes, fill, leaves) if passing else submit(data, leaves=leaves)
        assert future.result() == reference(data)
        assert leaves == expected


# --- roots

TENSORS: list[list[object]] = [
    ["b", "BF16", [2, 3], "11" * 32],
    ["a", "F32", [], "22" * 32],
    ["\u00e9", "F32", [1], "33" * 32],
]


def test_a_root_is_what_its_description_says() -> None:
    text = (
        '[["a","F32",[],"' + "22" * 32 + '"],["b","BF16",[2,3],"' + "11" * 32 + '"],'
        '["\\u00e9","F32",[1],"' + "33" * 32 + '"]]'
    )
    for root, context in (
        (digests.checkpoint_root, "tensor-dedup checkpoint digest v1"),
        (digests.weights_root, "tensor-dedup weights digest v1"),
    ):
        wanted = blake3(text.encode(), derive_key_context=context).hexdigest()
        assert root(TENSORS) == root(TENSORS[::-1]) == wanted


def test_tensors_of_one_name_have_an_order_too() -> None:
    twice: list[list[object]] = [["a", "F32", [], digest_] for digest_ in ("22", "11")]
    assert digests.checkpoint_root(twice) == digests.checkpoint_root(twice[::-1])
    assert digests.checkpoint_root(twice) != digests.checkpoint_root(twice[:1])


@pytest.mark.parametrize("place", range(4))
def test_a_root_covers_everything_that_it_is_given(place: int) -> None:
    other = [list(each) for each in TENSORS]
    other[0][place] = ["c", "F16", [3, 2], "44" * 32][place]
    assert digests.checkpoint_root(other) != digests.checkpoint_root(TENSORS)
