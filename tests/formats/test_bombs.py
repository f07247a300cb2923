"""Small files that ask for much: what reading them takes is bounded by their size.

At most 64 bytes of memory for each byte of the file, and 64 MiB; and a number of steps, calls of
Python functions and of C's, in proportion. A bomb need not be refused, and none need be taken.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from files.pytorch_files import (
    BOMB,
    HOOKS,
    Item,
    call,
    file_of,
    integer,
    named,
    numbers,
    parse,
    pickled,
    state,
    storage,
    tensor,
    text,
)
from tensor_dedup.errors import TensorDedupError
from tensor_dedup.formats import gguf, safetensors
from tensor_dedup.formats.json import decode_object
from tensor_dedup.formats.serverless.artifact import parse_descriptor
from tensor_dedup.formats.serverless.tensor_index import parse_index, parse_index_cbor

MIB = 1 << 20
Make = Callable[[int], bytes]

ORDERED = named("collections.OrderedDict")
# The function is 0 in the memo, its arguments are 1.
AGAIN = b"h\x00h\x01R"
PERSISTENT = b"(" + text("storage") + named("torch.FloatStorage") + text("0") + text("cpu")
ONES = numbers((1,) * 64)


def times(what: bytes, nbytes: int) -> bytes:
    return what * (nbytes // len(what))


def listed(what: bytes, nbytes: int) -> bytes:
    return b"](" + times(what, nbytes) + b"e."


def rows(row: Callable[[int], bytes], nbytes: int) -> bytes:
    """As many rows as fit, no two alike."""
    return b"".join(row(number) for number in range(nbytes // len(row(99_999))))


def names_of_names(nbytes: int) -> bytes:
    """A dict in many others with long names: each tensor has one of every two."""
    inner = b"".join(text(str(n) * 3) + tensor() for n in range(nbytes // 400))
    outer = b"".join(text("n" * 900 + str(n)) + b"h\x00" for n in range(nbytes // 2000))
    return b"}(" + inner + b"uq\x000}(" + outer + b"u."


PICKLES: dict[str, Make] = {
    "lists": lambda n: times(b"]", n) + b".",
    "lists in a list": lambda n: listed(b"]", n),
    "dicts": lambda n: times(b"}", n) + b".",
    "dicts in a list": lambda n: listed(b"}", n),
    "sets": lambda n: listed(b"\x8f", n),
    "marks": lambda n: times(b"(", n) + b".",
    "tuples of tuples": lambda n: b"N" + times(b"\x85", n) + b".",
    "tuples in a list": lambda n: listed(b")\x85", n),
    "remembering": lambda n: b"N" + times(b"\x94", n) + b".",
    "remembering far apart": lambda n: (
        b"N" + rows(lambda i: b"r" + struct.pack("<I", i * 99), n) + b"."
    ),
    "nothings": lambda n: listed(b"N", n),
    "ordered dicts": lambda n: ORDERED + b"q\x000" + times(b"h\x00)R", n) + b".",
    "copies of a list": lambda n: (
        ORDERED
        + (b"q\x000](" + times(b"]NaNa", n // 2) + b"e\x85q\x010")
        + (times(AGAIN, n // 2) + b".")
    ),
    "copies of counts": lambda n: (
        named("collections.Counter")
        + (
            b"q\x000}("
            + rows(lambda i: b"J" + struct.pack("<i", i) + b"K\1", n // 2)
            + b"u\x85q\x010"
        )
        + (times(AGAIN, n // 2) + b".")
    ),
    "attributes looked at again": lambda n: (
        b"}("
        + rows(lambda i: text(f"{i:05}") + b"N", n // 2)
        + (b"uq\x010" + HOOKS + times(b"h\x01b", n // 2) + b".")
    ),
    "sizes looked at again": lambda n: (
        named("torch.Size") + (b"q\x000" + ONES + b"\x85q\x010" + times(AGAIN, n) + b".")
    ),
    "views looked at again": lambda n: (
        named("torch._utils._rebuild_tensor")
        + (b"q\x000(" + storage() + integer(0) + ONES + ONES + b"tq\x010" + listed(AGAIN, n))
    ),
    "storages": lambda n: PERSISTENT + b"K\x02tq\x010" + listed(b"h\x01Q", n),
    "names of names": names_of_names,
    "names ten fold": lambda n: (
        b"}("
        + (text("w") + tensor() + b"uq\x000")
        + b"".join(
            b"}(" + b"".join(text(f"{i}" * 100) + b"h\x00" for i in range(10)) + b"uq\x000"
            for _ in range(8)
        )
        + b"h\x00."
    ),
    "long keys": lambda n: b"}(" + rows(lambda i: text(f"{i:05}" * 800) + tensor(), n) + b"u.",
    "keys": lambda n: b"}(" + rows(lambda i: b"J" + struct.pack("<i", i) + b"N", n) + b"u.",
    "a tensor again and again": lambda n: tensor() + b"q\x000" + listed(b"h\x00", n),
    "a tree of a list": lambda n: BOMB,
    "a list of a list": lambda n: (
        b"](" + (times(b"N", n // 2) + b"eq\x000" + listed(b"h\x00", n // 2))
    ),
    "letters of four bytes": lambda n: (
        b"]"
        + (text("a" * (n // 2) + "\U0001f600") + b"a" + text("b" * (n // 2) + "\U0001f600") + b"a.")
    ),
    "short texts": lambda n: listed(b"\x8c\x03" + "ࠀ".encode(), n),
    "short bytes": lambda n: listed(b"C\x02ab", n),
    "long numbers": lambda n: listed(b"\x8b\x02\0\0\0ab", n),
    "numbers": lambda n: listed(b"G12345678", n),
    "one by one": lambda n: b"]" + times(b"Na", n) + b".",
    "sparse tensors": lambda n: (
        tensor()
        + (b"q\x020" + call("torch.serialization._get_layout", text("x")) + b"q\x030")
        + (named("torch._utils._rebuild_sparse_tensor") + b"q\x000")
        + (b"(h\x03h\x02h\x02)tq\x010(h\x03(h\x02h\x02)ttq\x010" + listed(AGAIN, n))
    ),
}


# Without the larger end an archive has no more; the larger end changes nothing in what they take.
MOST_ENTRIES = 65_000


def entries(nbytes: int) -> bytes:
    extra = [Item(f"archive/{number:x}") for number in range(min(nbytes // 110, MOST_ENTRIES))]
    return file_of(state(w=tensor()), extra=extra)


def array(count: int) -> bytes:
    return b"\xa1\x61a\x9a" + struct.pack(">I", count)


def cbor_list(what: bytes, nbytes: int) -> bytes:
    return array(nbytes // len(what)) + times(what, nbytes)


CBOR: dict[str, Make] = {
    "lists": lambda n: cbor_list(b"\x80", n),
    "lists of lists": lambda n: cbor_list(b"\x81\x80", n),
    "lists of one": lambda n: cbor_list(b"\x81\x00", n),
    "maps": lambda n: cbor_list(b"\xa0", n),
    "maps of one": lambda n: cbor_list(b"\xa1\x60\x00", n),
    "simple values": lambda n: cbor_list(b"\xe0", n),
    "lists of simple values": lambda n: cbor_list(b"\x83\xe0\xe1\xe2", n),
    "dates": lambda n: cbor_list(b"\xc1\x00", n),
    "texts": lambda n: cbor_list(b"\x62xy", n),
    "numbers": lambda n: cbor_list(b"\xf9\x30\x01", n),
    "tensors": lambda n: b"\xba" + struct.pack(">I", len(cbor_rows(n)) // 25) + cbor_rows(n),
}


def cbor_rows(nbytes: int) -> bytes:
    return rows(lambda i: b"\x65%05x\x86\0\0\x80\x80\x6atorch.bool\0" % i, nbytes)


JSON: dict[str, Make] = {
    "lists": lambda n: b'{"a":[' + times(b"[],", n) + b"0]}",
    "lists of one": lambda n: b'{"a":[' + times(b"[0],", n) + b"0]}",
    "objects": lambda n: b'{"a":[' + times(b"{},", n) + b"0]}",
    "objects of one": lambda n: b'{"a":[' + times(b'{"":0},', n) + b"0]}",
    "numbers": lambda n: b'{"a":[' + times(b"1e3,", n) + b"0]}",
    "texts": lambda n: b'{"a":["' + "\U0001f600".encode() + b'"' + times(b',"ab"', n) + b"]}",
    "keys": lambda n: b"{" + rows(lambda i: b'"%05x":0,' % i, n) + b'"":0}',
    "a key": lambda n: b"{" + times(b'"a":0,', n) + b'"":0}',
    "depth": lambda n: b'{"a":' + times(b"[", n // 2) + times(b"]", n // 2) + b"}",
    "depths": lambda n: b'{"a":[' + times(b"[" * 90 + b"]" * 90 + b",", n) + b"0]}",
    "a number": lambda n: b'{"a":' + times(b"9", n) + b"}",
}


def counted(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


SAFETENSORS: dict[str, Make] = {
    "tensors": lambda n: (
        b"{"
        + rows(lambda i: b'"%05x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},' % i, n)
        + b'"__metadata__":{}}'
    ),
    "a shape": lambda n: (
        b'{"a":{"dtype":"U8","data_offsets":[0,0],"shape":[' + times(b"1,", n) + b"0]}}"
    ),
    "metadata": lambda n: b'{"__metadata__":{' + rows(lambda i: b'"%05x":"",' % i, n) + b'"":""}}',
    "more": lambda n: (
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":['
        + times(b"[" * 90 + b"]" * 90 + b",", n)
        + b"0]}}"
    ),
}


def gguf_of(entries: list[bytes], tensors: list[bytes] | None = None) -> bytes:
    held = tensors or []
    head = b"GGUF" + struct.pack("<IQQ", 3, len(held), len(entries))
    return head + b"".join(entries) + b"".join(held)


def gguf_list(kind: int, item: bytes, nbytes: int) -> bytes:
    head = counted(b"a") + struct.pack("<IIQ", 9, kind, nbytes // len(item))
    return gguf_of([head + times(item, nbytes)])


GGUF: dict[str, Make] = {
    "keys": lambda n: gguf_of(
        [counted(b"%05x" % i) + struct.pack("<IQ", 10, 1 << 60) for i in range(n // 25)]
    ),
    "texts": lambda n: gguf_list(8, bytes(8), n),
    "lists": lambda n: gguf_list(9, struct.pack("<IQ", 0, 0), n),
    "lists of lists": lambda n: gguf_list(9, struct.pack("<IQIQ", 9, 1, 0, 0), n),
    "truth values": lambda n: gguf_list(7, b"\1", n),
    "a long text": lambda n: gguf_of(
        [counted(b"a") + struct.pack("<I", 8) + counted(b"a" * n + "\U0001f600".encode())]
    ),
    "tensors": lambda n: gguf_of(
        [], [counted(b"%05x" % i) + struct.pack("<IQIQ", 1, 0, 0, 0) for i in range(n // 37)]
    ),
}


def bombs() -> Iterator[tuple[str, Make, Callable[[bytes], object]]]:
    for what, make in PICKLES.items():
        yield f"pickle: {what}", lambda n, make=make: pickled(make(n), 4), parse  # type: ignore[misc]
    yield "archive: entries", entries, parse
    for what, make in CBOR.items():
        yield f"CBOR: {what}", make, lambda blob: parse_index_cbor(blob, "x.cbor")
    for what, make in JSON.items():
        yield f"JSON: {what}", make, lambda blob: decode_object(blob, "x.json")
        yield f"index: {what}", make, lambda blob: parse_index(blob, "x.json")
        yield f"descriptor: {what}", make, lambda blob: parse_descriptor(blob, "x.json")
    for what, make in SAFETENSORS.items():
        yield (
            f"safetensors: {what}",
            lambda n, make=make: counted(make(n)),  # type: ignore[misc]
            lambda blob: safetensors.parse_header(blob, len(blob), "x.safetensors"),
        )
    for what, make in GGUF.items():
        yield f"GGUF: {what}", make, lambda blob: gguf.parse_header(blob, len(blob), "x.gguf")


BOMBS = list(bombs())
IDS = [what for what, _, _ in BOMBS]


def peak_bytes(work: Callable[[], object]) -> int:
    """How much the resident memory of a forked process rose while it did this."""
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            # What earlier tests have freed would be taken again without a rise.
            ctypes.CDLL(None).malloc_trim(0)
            with open("/proc/self/clear_refs", "w") as reset:  # noqa: PTH123
                reset.write("5")
            before = _most_resident()
            with suppress(TensorDedupError):
                work()
            os.write(writes, struct.pack("<Q", _most_resident() - before))
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return int(struct.unpack("<Q", said)[0])


def _most_resident() -> int:
    with open("/proc/self/status") as status:  # noqa: PTH123
        line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def steps_of(work: Callable[[], object]) -> int:
    """How many functions were called meanwhile."""
    found = 0

    def count(*_: object) -> None:
        nonlocal found
        found += 1

    sys.setprofile(count)
    try:
        with suppress(TensorDedupError):
            work()
    finally:
        sys.setprofile(None)
    return found


def check_memory(make: Make, read: Callable[[bytes], object], nbytes: int) -> None:
    file = make(nbytes)
    assert peak_bytes(lambda: read(file)) <= 64 * len(file) + 64 * MIB


def test_the_measure_measures() -> None:
    assert 39 * MIB <= peak_bytes(lambda: len(b"x" * (40 * MIB))) < 48 * MIB
    assert 1_000 <= steps_of(lambda: [len("") for _ in range(500)]) < 1_100


@pytest.mark.parametrize(
    ("what", "make", "read"),
    [
        # As an index and as a descriptor the same texts are read in the same way.
        pytest.param(*bomb, id=bomb[0], marks=[pytest.mark.long] * bomb[0].startswith("JSON: "))
        for bomb in BOMBS
    ],
)
def test_a_bomb_takes_no_more_memory_than_its_size_allows(
    what: str, make: Make, read: Callable[[bytes], object]
) -> None:
    check_memory(make, read, 200_000)


@pytest.mark.long
@pytest.mark.parametrize(("what", "make", "read"), BOMBS, ids=IDS)
def test_nor_does_a_large_one(what: str, make: Make, read: Callable[[bytes], object]) -> None:
    check_memory(make, read, 9_500_000)


def check_steps(make: Make, read: Callable[[bytes], object]) -> None:
    few, many = make(20_000), make(80_000)
    base, more = (steps_of(lambda file=file: read(file)) for file in (few, many))  # type: ignore[misc]
    # A few bytes may ask for 32 MiB of memory, or as many steps; from there on it is linear.
    assert base < 6_000_000
    assert more - base <= 60 * (len(many) - len(few)) + 10_000


@pytest.mark.parametrize("what", ["copies of a list", "a tree of a list", "names ten fold"])
def test_a_bomb_takes_no_more_steps_than_its_size_allows(what: str) -> None:
    check_steps(lambda nbytes: pickled(PICKLES[what](nbytes), 4), parse)


@pytest.mark.long
@pytest.mark.parametrize(("what", "make", "read"), BOMBS, ids=IDS)
def test_nor_does_any_other(what: str, make: Make, read: Callable[[bytes], object]) -> None:
    check_steps(make, read)
