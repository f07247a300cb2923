"""Files of torch.save, made by hand so that each byte can be a lie, and what torch makes of them.

Archives and pickles are built piece by piece. `LIARS` are files that lie, each with the error that
it must raise; `HONEST` are honest oddities. The last functions put what torch reads and what this
package says of a file into one form, to be compared.
"""

import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch

from tensor_dedup.formats.errors import PytorchFault as Fault
from tensor_dedup.formats.pytorch.archive import MAX_ENTRIES
from tensor_dedup.formats.pytorch.machine import DTYPES
from tensor_dedup.formats.pytorch.reader import PytorchHeader, read_header

FLOATS = struct.pack("<2f", 1.0, -2.0)
ROOT = "archive"


@dataclass(frozen=True)
class Item:
    """An entry. `local` and `central` are fields that its two headers say instead of the truth."""

    name: str | bytes
    data: bytes = b""
    flags: int = 0
    method: int = 0
    local: Mapping[str, Any] = field(default_factory=dict)
    central: Mapping[str, Any] = field(default_factory=dict)
    before: bytes = b""
    footer: bytes = b""

    @property
    def raw_name(self) -> bytes:
        return self.name if isinstance(self.name, bytes) else self.name.encode()


@dataclass(frozen=True)
class End:
    """What the end of an archive says instead of the truth; `large` adds the larger end."""

    says: Mapping[str, int] = field(default_factory=dict)
    large: Mapping[str, int] | None = None
    mark: bytes = b"PK\x05\x06"
    comment: bytes = b""


def local_header(item: Item) -> bytes:
    size = len(item.data)
    truth: dict[str, Any] = {
        "mark": b"PK\x03\x04",
        "flags": item.flags,
        "method": item.method,
        "crc": zlib.crc32(item.data),
    }
    truth |= {"packed": size, "size": size, "name": item.raw_name, "extra": b""}
    f = truth | dict(item.local)
    lengths = (len(f["name"]), f.get("extra_bytes", len(f["extra"])))
    numbers = (f["crc"], f["packed"], f["size"], *lengths)
    head = struct.pack("<4s5H3L2H", f["mark"], 20, f["flags"], f["method"], 0, 0, *numbers)
    return b"".join([head, f["name"], f["extra"]])


def central_header(item: Item, offset: int) -> bytes:
    size = len(item.data)
    truth: dict[str, Any] = {
        "mark": b"PK\x01\x02",
        "flags": item.flags,
        "method": item.method,
        "crc": zlib.crc32(item.data),
    }
    truth |= {"packed": size, "size": size, "name": item.raw_name, "extra": b"", "comment": b""}
    f = truth | {"disk": 0, "offset": offset} | dict(item.central)
    lengths = (len(f["name"]), len(f["extra"]), f.get("comment_bytes", len(f["comment"])))
    places = (f.get("attributes", 0), f["offset"])
    numbers = (f["crc"], f["packed"], f["size"], *lengths, f["disk"], 0, *places)
    head = struct.pack("<4s6H3L5H2L", f["mark"], 20, 20, f["flags"], f["method"], 0, 0, *numbers)
    return b"".join([head, f["name"], f["extra"], f["comment"]])


def zip_of(*items: Item, end: End | None = None, gap: bytes = b"", after: bytes = b"") -> bytes:
    """An archive of these entries; `gap` before its directory, `after` behind its end."""
    end = end or End()
    blob, directory = bytearray(), bytearray()
    for item in items:
        blob += item.before
        directory += central_header(item, len(blob))
        blob += local_header(item) + item.data + item.footer
    blob += gap
    truth = {"disk": 0, "start_disk": 0, "here": len(items), "count": len(items)}
    truth |= {"bytes": len(directory), "start": len(blob)}
    f = truth | dict(end.says)
    tail = b"" if end.large is None else large_end(truth | dict(end.large), len(blob + directory))
    numbers = (f["disk"], f["start_disk"], f["here"], f["count"], f["bytes"], f["start"])
    tail += struct.pack("<4s4H2LH", end.mark, *numbers, len(end.comment)) + end.comment
    return bytes(blob + directory + tail + after)


def large_end(f: Mapping[str, int], at: int) -> bytes:
    numbers = (f["disk"], f["start_disk"], f["here"], f["count"], f["bytes"], f["start"])
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", f.get("size", 44), 45, 45, *numbers)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, f.get("at", at), f.get("disks", 1))
    return record + locator


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def integer(value: int) -> bytes:
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def numbers(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(integer, values)) + b"t"


def named(name: str) -> bytes:
    module, _, last = name.rpartition(".")
    return f"c{module}\n{last}\n".encode()


def call(name: str, *arguments: bytes) -> bytes:
    return named(name) + b"(" + b"".join(arguments) + b"tR"


def storage(key: str = "0", kind: str = "torch.FloatStorage", count: int = 2) -> bytes:
    return b"(" + text("storage") + named(kind) + text(key) + text("cpu") + integer(count) + b"tQ"


HOOKS = call("collections.OrderedDict")


def tensor(
    held: bytes | None = None,
    offset: bytes | None = None,
    size: Sequence[int] = (2,),
    stride: Sequence[int] = (1,),
    more: bytes = b"",
) -> bytes:
    """A tensor of two F32 in the storage "0", or as said."""
    parts = (held or storage(), offset or integer(0), numbers(size), numbers(stride), b"\x89")
    return call("torch._utils._rebuild_tensor_v2", *parts, HOOKS, more)


def state(**tensors: bytes) -> bytes:
    items = b"".join(text(name) + value for name, value in tensors.items())
    return b"\x80\x02}(" + items + b"u."


def file_of(
    pickle: bytes | None = None,
    storages: Mapping[str, bytes] | None = None,
    extra: Sequence[Item] = (),
    **how: Any,
) -> bytes:
    """A file of torch.save: a state dict of one tensor `w`, or this pickle and these storages."""
    held = {"0": FLOATS} if storages is None else storages
    return zip_of(
        Item(f"{ROOT}/data.pkl", state(w=tensor()) if pickle is None else pickle),
        *(Item(f"{ROOT}/data/{key}", data) for key, data in held.items()),
        Item(f"{ROOT}/version", b"3\n"),
        *extra,
        **how,
    )


def parse(file: bytes) -> PytorchHeader:
    """Read a file from memory."""
    fd = os.memfd_create("tensor-dedup-test")
    try:
        os.write(fd, file)
        return read_header("liar.pt", fd=fd)
    finally:
        os.close(fd)


PICKLE = Item(f"{ROOT}/data.pkl", state(w=tensor()))
DATA = Item(f"{ROOT}/data/0", FLOATS)
WITH_FOOTER = 8


def zipped(*items: Item, **how: Any) -> bytes:
    return zip_of(PICKLE, DATA, *items, **how)


def data(**fields: Any) -> bytes:
    """The storage's entry as said."""
    return zip_of(PICKLE, Item(**{"name": f"{ROOT}/data/0", "data": FLOATS, **fields}))


def pickled(body: bytes, protocol: int = 2) -> bytes:
    return file_of(b"\x80" + bytes([protocol]) + body)


def footer(
    blob: bytes = FLOATS, mark: bytes = b"PK\x07\x08", code: str = "<LLL", off: int = 0
) -> bytes:
    return mark + struct.pack(code, zlib.crc32(blob) + off, len(blob), len(blob))


def footed(found: bytes, **local: int) -> bytes:
    said = {"crc": 0, "packed": 0, "size": 0, **local}
    crc = {"crc": zlib.crc32(FLOATS)}
    return data(flags=WITH_FOOTER, footer=found, local=said, central=crc)


def large_sizes(*sizes: int) -> bytes:
    return struct.pack(f"<HH{len(sizes)}Q", 1, 8 * len(sizes), *sizes)


SENTINEL = {"packed": 0xFFFFFFFF, "size": 0xFFFFFFFF}
# More containers in containers than any checkpoint has; and a list that holds itself.
DEEP = b"]" * 100 + tensor() + b"a" * 100 + b"."
CIRCLE = b"]q\x00h\x00a."
STATE = b"}" + text("data") + tensor(storage("1")) + b"s"
TENSOR_OF_2 = (storage(), integer(0), numbers((2,)), numbers((1,)), b"\x89", HOOKS)


def beside(pickle: bytes) -> bytes:
    """A file whose `w` is made as said, with another storage to be had."""
    return file_of(state(w=pickle), {"0": FLOATS, "1": FLOATS[::-1]})


# (what is done, the file): torch.load(weights_only=True) takes it, and sees something else in it
# than the two numbers `w` that it names, or sees what its names and numbers do not say.
AMBIGUOUS: list[tuple[str, bytes]] = [
    ("a tensor moved to another storage", beside(
        tensor() + b"(" + storage("1") + integer(0) + numbers((2,)) + numbers((1,)) + b"tb")),
    ("a parameter whose state is its data",
     beside(call("torch._utils._rebuild_parameter_with_state", tensor(), b"\x89", HOOKS, STATE))),
    ("a tensor whose attribute is its data",
     beside(call("torch._tensor._rebuild_from_type_v2", named("torch._utils._rebuild_tensor_v2"),
                 named("torch.Tensor"), b"(" + b"".join(TENSOR_OF_2) + b"t", STATE))),
    ("a flag that is off", file_of(state(w=tensor(more=b"}" + text("neg") + b"\x89s")))),
    ("a flag that is nothing", file_of(state(w=tensor(more=b"}" + text("neg") + b"Ns")))),
    ("a complex flag that is off", file_of(state(w=tensor(
        storage(kind="torch.ComplexFloatStorage", count=1), size=(1,),
        more=b"}" + text("conj") + b"\x89s")))),
    ("a dict made without a call", pickled(named("collections.OrderedDict") + b"](](" + text("w")
     + tensor() + b"ee\x85\x81.")),
    ("a storage that was another kind before", pickled(
        b"}(" + text("n") + call("torch.Size", b")") + text("s") + call("builtins.set",
        b"](" + tensor(storage(kind="torch.IntStorage")) + b"e") + text("w") + tensor() + b"u.")),
    ("a storage without bytes", file_of(state(w=tensor(
        storage().replace(text("cpu"), text("meta")))))),
    ("a dict whose items are others", pickled(HOOKS + text("w") + tensor() + b"s}" + text("items")
     + named("collections.Counter") + b"sb.")),
]  # fmt: skip


# Thirty levels of ten times the same list: 10^30 values.
BOMB = b"]" + tensor() + b"a" + (b"q\x000](" + b"h\x00" * 10 + b"e") * 30 + b"."

# (what the liar does, its file, the error)
LIARS: list[tuple[str, bytes, Fault]] = [
    ("no bytes", b"", Fault.NOT_PYTORCH),
    ("a text", b"hello, world", Fault.NOT_PYTORCH),
    ("a safetensors file", struct.pack("<Q", 2) + b"{}", Fault.NOT_PYTORCH),
    ("the stream of PyTorch before 1.6", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
     Fault.LEGACY_PYTORCH),
    ("a bare pickle", b"\x80\x04N.", Fault.LEGACY_PYTORCH),
    ("a tar archive", b"a".ljust(257, b"\0") + b"ustar\0" + bytes(300), Fault.LEGACY_PYTORCH),
    ("a local header alone", b"PK\x03\x04" + bytes(40), Fault.ARCHIVE_END),
    ("four bytes", b"PK\x03\x04", Fault.ARCHIVE_END),
    ("cut off", file_of()[:-1], Fault.ARCHIVE_END),
    ("cut in half", file_of()[: len(file_of()) // 2], Fault.ARCHIVE_END),
    ("something behind it", file_of(after=b"\0"), Fault.ARCHIVE_END),
    ("a second archive behind it", file_of() + file_of(), Fault.ARCHIVE_DIRECTORY),
    ("a comment", file_of(end=End(comment=b"PK")), Fault.ARCHIVE_END),
    ("a comment that is an end", file_of(end=End(comment=zip_of())), Fault.ARCHIVE_DIRECTORY),
    ("parts on another disk", file_of(end=End({"disk": 1})), Fault.ARCHIVE_END),
    ("entries on another disk", file_of(end=End({"here": 1})), Fault.ARCHIVE_END),
    ("something before it", b"PK\x03\x04" + file_of(), Fault.ARCHIVE_DIRECTORY),
    ("a directory beyond the file", file_of(end=End({"start": 1 << 31})),
     Fault.ARCHIVE_DIRECTORY),
    ("a directory of 4 GB", file_of(end=End({"bytes": 0xFFFFFFFE})), Fault.ARCHIVE_DIRECTORY),
    ("a directory in the data", file_of(end=End({"start": 40})), Fault.ARCHIVE_DIRECTORY),
    ("fewer entries than there are", file_of(end=End({"count": 2, "here": 2})),
     Fault.ARCHIVE_DIRECTORY),
    ("more entries than there are", file_of(end=End({"count": 4, "here": 4})),
     Fault.ARCHIVE_DIRECTORY),
    ("65,534 entries", file_of(end=End({"count": 65534, "here": 65534})),
     Fault.ARCHIVE_DIRECTORY),
    ("2^63 entries", file_of(end=End({"count": 0xFFFF, "here": 0xFFFF},
     {"count": 1 << 63, "here": 1 << 63})), Fault.TOO_MANY_ENTRIES),
    ("an entry more than the limit", file_of(end=End({"count": 0xFFFF, "here": 0xFFFF},
     {"count": MAX_ENTRIES + 1, "here": MAX_ENTRIES + 1})), Fault.TOO_MANY_ENTRIES),
    ("two ends that differ", file_of(end=End(large={"start": 60})), Fault.ARCHIVE_END),
    ("a larger end elsewhere", file_of(end=End(large={"at": 0})), Fault.ARCHIVE_END),
    ("a larger end at 2^64 - 1", file_of(end=End(large={"at": (1 << 64) - 1})),
     Fault.ARCHIVE_END),
    ("a larger end of 2^64 - 1 bytes", file_of(end=End(large={"size": (1 << 64) - 1})),
     Fault.ARCHIVE_END),
    ("a larger end on several disks", file_of(end=End(large={"disks": 2})), Fault.ARCHIVE_END),
    ("no mark of an entry", zipped(Item(f"{ROOT}/x", central={"mark": b"PK\x01\x03"})),
     Fault.ARCHIVE_DIRECTORY),
    ("a name that goes on behind the directory",
     zipped(Item(f"{ROOT}/x", central={"comment_bytes": 999})), Fault.ARCHIVE_DIRECTORY),
    ("an entry on another disk", data(central={"disk": 3}), Fault.ARCHIVE_DIRECTORY),
    ("a name that is not UTF-8", zipped(Item(b"archive/\xff")), Fault.ENTRY_NAME),
    ("an absolute name", zipped(Item("/etc/passwd")), Fault.ENTRY_NAME),
    ("a name that leads out", zipped(Item(f"{ROOT}/../../x")), Fault.ENTRY_NAME),
    ("a backslash in a name", zipped(Item(f"{ROOT}\\x")), Fault.ENTRY_NAME),
    ("a zero byte in a name", zipped(Item(f"{ROOT}/data.pkl\0x")), Fault.ENTRY_NAME),
    ("no name", zipped(Item("")), Fault.ENTRY_NAME),
    ("a name of a page", zipped(Item(f"{ROOT}/" + "x" * 2000)), Fault.ENTRY_NAME),
    ("an entry twice", zipped(DATA), Fault.DUPLICATE_ENTRY),
    ("the pickle twice", zipped(PICKLE), Fault.DUPLICATE_ENTRY),
    ("the pickle twice, once in capitals", zipped(Item(f"{ROOT}/DATA.PKL", b"")),
     Fault.DUPLICATE_ENTRY),
    ("encrypted", data(flags=1), Fault.ENCRYPTED_ENTRY),
    ("a patch", data(flags=1 << 5), Fault.ENCRYPTED_ENTRY),
    ("hidden headers", data(flags=1 << 13), Fault.ENCRYPTED_ENTRY),
    ("compressed", zip_of(PICKLE, Item(f"{ROOT}/data/0", zlib.compress(FLOATS), method=8)),
     Fault.COMPRESSED_ENTRY),
    ("a compressed pickle", zip_of(Item(f"{ROOT}/data.pkl", PICKLE.data, method=8), DATA),
     Fault.COMPRESSED_ENTRY),
    ("two sizes", data(central={"packed": 4}), Fault.ENTRY_SIZE),
    ("a size that is nowhere", data(central=SENTINEL), Fault.ENTRY_SIZE),
    ("half a size", data(central={**SENTINEL, "extra": large_sizes(8)}), Fault.ENTRY_SIZE),
    ("a size of 2^63", data(central={**SENTINEL, "extra": large_sizes(1 << 63, 1 << 63)}),
     Fault.ENTRY_BEYOND),
    ("an entry a byte into the directory", data(central={"size": 9, "packed": 9}),
     Fault.ENTRY_BEYOND),
    ("an entry of 4 GB", data(central={"size": 1 << 31, "packed": 1 << 31}),
     Fault.ENTRY_BEYOND),
    ("data beyond the directory", data(local={"extra_bytes": 60_000}), Fault.ENTRY_BEYOND),
    ("a name beyond the directory", zip_of(PICKLE, Item(f"{ROOT}/data/0", local={"name": b""})),
     Fault.ENTRY_BEYOND),
    ("another name", data(local={"name": b"archive/data/1"}), Fault.LOCAL_HEADER),
    ("a shorter name", data(local={"name": b"archive/data/"}), Fault.LOCAL_HEADER),
    ("another method", data(local={"method": 8}), Fault.LOCAL_HEADER),
    ("other flags", data(local={"flags": 8}), Fault.LOCAL_HEADER),
    ("another size", data(local={"size": 4}), Fault.LOCAL_HEADER),
    ("no size", data(local={"size": 0, "packed": 0}), Fault.LOCAL_HEADER),
    ("another checksum", data(local={"crc": 7}), Fault.LOCAL_HEADER),
    ("no mark of a local header", data(local={"mark": b"PK\x03\x05"}), Fault.LOCAL_HEADER),
    ("no footer where one is announced", footed(b""), Fault.LOCAL_HEADER),
    ("a footer with another checksum", footed(footer(off=1)), Fault.LOCAL_HEADER),
    ("a footer with another size", footed(footer(FLOATS[:4])), Fault.LOCAL_HEADER),
    ("an entry in another", data(central={"offset": 30}), Fault.ENTRY_OVERLAP),
    ("two entries of the same bytes",
     zipped(Item(f"{ROOT}/x", central={"offset": 0})), Fault.ENTRY_OVERLAP),
    ("bytes before the first", zip_of(Item(PICKLE.name, PICKLE.data, before=b"PK\x03\x04"), DATA),
     Fault.ENTRY_HOLE),
    ("bytes between two", zipped(Item(f"{ROOT}/x", before=b"hidden")), Fault.ENTRY_HOLE),
    ("bytes before the directory", file_of(gap=b"hidden"), Fault.ENTRY_HOLE),
    ("an entry outside the folder", zipped(Item("other/data/0")), Fault.STRAY_ENTRY),
    ("an entry at the top", zipped(Item("version", b"3")), Fault.STRAY_ENTRY),
    ("data said to be a folder", data(central={"attributes": 0x10}), Fault.FOLDER_ENTRY),
    ("data called as a folder", zipped(Item(f"{ROOT}/data/", b"x")), Fault.FOLDER_ENTRY),
    ("no pickle", zip_of(DATA), Fault.MISSING_ENTRY),
    ("no entries", zip_of(Item(f"{ROOT}/x")), Fault.MISSING_ENTRY),
    ("a pickle at the top", zip_of(Item("data.pkl", PICKLE.data)), Fault.MISSING_ENTRY),
    ("a pickle two folders deep", zip_of(Item("a/b/data.pkl", PICKLE.data)),
     Fault.MISSING_ENTRY),
    ("two pickles", zipped(Item("other/data.pkl")), Fault.MISSING_ENTRY),
    ("a program", zipped(Item(f"{ROOT}/code/__torch__.py", b"def f(): pass")),
     Fault.TORCH_SCRIPT),
    ("constants of a program", zipped(Item(f"{ROOT}/constants.pkl", b"\x80\x02).")),
     Fault.TORCH_SCRIPT),
    ("big-endian", zipped(Item(f"{ROOT}/byteorder", b"big")), Fault.BYTE_ORDER),
    ("an order nobody knows", zipped(Item(f"{ROOT}/byteorder", b"middle")), Fault.BYTE_ORDER),
    ("an order in capitals", zipped(Item(f"{ROOT}/byteorder", b"LITTLE" * 99)),
     Fault.BYTE_ORDER),
    # The pickle.
    ("an empty pickle", file_of(b""), Fault.PICKLE_TRUNCATED),
    ("no end", pickled(b"}"), Fault.PICKLE_TRUNCATED),
    ("cut in a number", pickled(b"J\0\0"), Fault.PICKLE_TRUNCATED),
    ("cut in a text", pickled(b"X\x09\0\0\0abc"), Fault.PICKLE_TRUNCATED),
    ("a text of 4 GB", pickled(b"X\xff\xff\xff\xffabc."), Fault.PICKLE_TRUNCATED),
    ("a text of 2^63 bytes", pickled(b"\x8d" + struct.pack("<Q", 1 << 63) + b"."),
     Fault.PICKLE_TRUNCATED),
    ("bytes of 2^64 - 1 bytes", pickled(b"\x8e" + b"\xff" * 8 + b"."), Fault.PICKLE_TRUNCATED),
    ("a bytearray of 2^62 bytes", pickled(b"\x96" + struct.pack("<Q", 1 << 62) + b"."),
     Fault.PICKLE_TRUNCATED),
    ("a text of less than nothing", pickled(b"T\xff\xff\xff\xffabc."), Fault.PICKLE_TRUNCATED),
    ("a number of less than nothing", pickled(b"\x8b\xff\xff\xff\xff."),
     Fault.PICKLE_TRUNCATED),
    ("a global of one line", pickled(b"cos\nsystem"), Fault.PICKLE_TRUNCATED),
    ("a global without end", pickled(b"c" + b"o" * 5000 + b"\nx\n."), Fault.PICKLE_TRUNCATED),
    ("a number of 5,000 bits", pickled(b"\x8b\x71\x02\0\0" + b"\x7f" * 625 + b"."),
     Fault.PICKLE_NUMBER),
    ("a text that is not UTF-8", pickled(b"X\x01\0\0\0\xff."), Fault.PICKLE_TEXT),
    ("half a surrogate pair", pickled(b"X\x03\0\0\0\xed\xa0\x80."), Fault.PICKLE_TEXT),
    ("a global that is not UTF-8", pickled(b"c\xff\nx\n."), Fault.PICKLE_TEXT),
    ("something behind the pickle", pickled(b"N.N"), Fault.PICKLE_TRAILING),
    ("a second pickle", file_of(state(w=tensor()) * 2),
     Fault.PICKLE_TRAILING),
    ("an unknown instruction", pickled(b"\xff."), Fault.PICKLE_OPCODE),
    ("a text number", pickled(b"I12\n."), Fault.PICKLE_OPCODE),
    ("a text persistent id", pickled(b"P0\n."), Fault.PICKLE_OPCODE),
    ("an instance", pickled(b"(ios\nsystem\n."), Fault.PICKLE_OPCODE),
    ("an object", pickled(b"(cos\nsystem\no."), Fault.FORBIDDEN_GLOBAL),
    ("an object of an allowed class", pickled(b"(ccollections\nOrderedDict\no."),
     Fault.PICKLE_OPCODE),
    ("an extension", pickled(b"\x82\x01."), Fault.PICKLE_OPCODE),
    ("a buffer outside", pickled(b"\x97.", 5), Fault.PICKLE_OPCODE),
    ("a class with keywords", pickled(named("collections.OrderedDict") + b")}\x92."),
     Fault.PICKLE_OPCODE),
    ("protocol 0", pickled(b"N.", 0), Fault.PICKLE_OPCODE),
    ("protocol 6", pickled(b"N.", 6), Fault.PICKLE_OPCODE),
    ("nothing left", pickled(b"."), Fault.PICKLE_STACK),
    ("two values left", pickled(b"NN."), Fault.PICKLE_STACK),
    ("a mark left", pickled(b"(N."), Fault.PICKLE_STACK),
    ("no mark", pickled(b"t."), Fault.PICKLE_STACK),
    ("a tuple of too few", pickled(b"N\x86."), Fault.PICKLE_STACK),
    ("an item for a number", pickled(b"K\1Na."), Fault.PICKLE_STACK),
    ("an item for a tuple", pickled(b")(Ne."), Fault.PICKLE_STACK),
    ("a key for a list", pickled(b"]NNs."), Fault.PICKLE_STACK),
    ("a key without a value", pickled(b"}(NNNu."), Fault.PICKLE_STACK),
    ("a dict of three", pickled(b"(NNNd."), Fault.PICKLE_STACK),
    ("an element for a dict", pickled(b"}(N\x90."), Fault.PICKLE_STACK),
    ("a global of a number", pickled(b"K\1K\2\x93.", 4), Fault.PICKLE_STACK),
    ("duplicating nothing", pickled(b"2."), Fault.PICKLE_STACK),
    ("remembering nothing", pickled(b"q\0."), Fault.PICKLE_STACK),
    ("recalling nothing", pickled(b"h\0."), Fault.PICKLE_MEMO),
    ("recalling number 2^32 - 1", pickled(b"Nq\0j\xff\xff\xff\xff."), Fault.PICKLE_MEMO),
    # Globals and calls.
    ("os.system", pickled(call("os.system", text("true")) + b"."), Fault.FORBIDDEN_GLOBAL),
    ("a name through a module", pickled(b"X\x05\0\0\0torchX\x0d\0\0\0_utils._exec\x00\x93.", 4),
     Fault.FORBIDDEN_GLOBAL),
    ("quantised", pickled(named("torch._utils._rebuild_qtensor") + b"."),
     Fault.FORBIDDEN_GLOBAL),
    ("a class of the user", pickled(named("mine.Model") + b")\x81."), Fault.FORBIDDEN_GLOBAL),
    ("calling a text", pickled(text("f") + b")R."), Fault.FORBIDDEN_CALL),
    ("calling a dtype", pickled(named("torch.float32") + b")R."), Fault.FORBIDDEN_CALL),
    ("calling a class that is only named", pickled(named("torch.Tensor") + b")R."),
     Fault.FORBIDDEN_CALL),
    ("calling with a list", pickled(named("collections.OrderedDict") + b"]R."),
     Fault.FORBIDDEN_CALL),
    ("a dict of numbers", pickled(call("collections.OrderedDict", b"](K\1K\2e") + b"."),
     Fault.FORBIDDEN_CALL),
    ("attributes for a number", pickled(b"K\1}b."), Fault.FORBIDDEN_CALL),
    ("attributes for a plain dict", pickled(b"}}b."), Fault.FORBIDDEN_CALL),
    ("a tensor without a storage", file_of(state(w=tensor(b"N"))), Fault.FORBIDDEN_CALL),
    ("a tensor of too few arguments",
     pickled(call("torch._utils._rebuild_tensor_v2", storage()) + b"."), Fault.FORBIDDEN_CALL),
    ("a size of -1", file_of(state(w=tensor(size=(-1,)))), Fault.FORBIDDEN_CALL),
    ("a stride of -1", file_of(state(w=tensor(stride=(-1,)))), Fault.FORBIDDEN_CALL),
    ("a size of 2^63", file_of(state(w=tensor(size=(1 << 63,)))), Fault.FORBIDDEN_CALL),
    ("an offset of -1", file_of(state(w=tensor(offset=integer(-1)))), Fault.FORBIDDEN_CALL),
    ("an offset of 1.0", file_of(state(w=tensor(offset=b"G?\xf0\0\0\0\0\0\0"))),
     Fault.FORBIDDEN_CALL),
    ("an offset of True", file_of(state(w=tensor(offset=b"\x88"))), Fault.FORBIDDEN_CALL),
    ("a stride too few", file_of(state(w=tensor(size=(1, 2)))), Fault.FORBIDDEN_CALL),
    ("70 dimensions", file_of(state(w=tensor(size=(1,) * 70, stride=(1,) * 70))),
     Fault.FORBIDDEN_CALL),
    ("a parameter of a text", pickled(call("torch._utils._rebuild_parameter", text("w"), b"\x88",
     HOOKS) + b"."), Fault.FORBIDDEN_CALL),
    ("tensors that are counts", pickled(call("collections.Counter", b"}" + text("w") + tensor()
     + b"s") + b"."), Fault.FORBIDDEN_CALL),
    ("a parameter made without a call",
     file_of(state(w=named("torch.nn.parameter.Parameter") + tensor() + b"\x85\x81")),
     Fault.FORBIDDEN_CALL),
    ("a dict of pairs", pickled(call("collections.OrderedDict", b"](](" + text("w") + tensor()
     + b"ee") + b"."), Fault.FORBIDDEN_CALL),
    ("sizes in a list", file_of(state(w=tensor()).replace(numbers((2,)), b"](\x8a\1\2e")),
     Fault.FORBIDDEN_CALL),
    ("hooks", file_of(state(w=tensor()).replace(HOOKS, b"N")), Fault.FORBIDDEN_CALL),
    ("attributes around another call", pickled(call("torch._tensor._rebuild_from_type_v2",
     named("collections.OrderedDict"), named("torch.Tensor"), b")", b"}") + b"."),
     Fault.FORBIDDEN_CALL),
    # What it holds.
    ("lists 100 deep", pickled(DEEP), Fault.DEEP_NESTING),
    ("a list that holds itself", pickled(CIRCLE), Fault.DEEP_NESTING),
    ("10^30 values", pickled(BOMB), Fault.PICKLE_BOMB),
    ("a name of 2,000 letters", file_of(state(**{"n" * 2000: tensor()})), Fault.TENSOR_NAME),
    ("a list as a key", pickled(b"}(]" + tensor() + b"u."), Fault.UNUSABLE_KEY),
    ("a key of 2,000 bits", pickled(b"}(\x8a\xfa" + b"\x7f" * 250 + tensor() + b"u."),
     Fault.UNUSABLE_KEY),
    ("a key twice", pickled(b"}(" + (text("w") + tensor()) * 2 + b"u."), Fault.REPEATED_KEY),
    ("1 and True", pickled(b"}(K\1" + tensor() + b"\x88" + tensor() + b"u."),
     Fault.REPEATED_KEY),
    ("two ways to one name", pickled(b"}(" + text("a.b") + tensor() + text("a") + b"}" + text("b")
     + tensor() + b"su."), Fault.REPEATED_NAME),
    # Tensors.
    ("a storage of another kind", pickled(b"(" + text("module") + b"NNNNtQ."),
     Fault.STORAGE_ID),
    ("a storage of four words", pickled(b"(" + text("storage") * 4 + b"tQ."), Fault.STORAGE_ID),
    ("a storage of -1 elements", file_of(state(w=tensor(storage(count=-1)))),
     Fault.STORAGE_ID),
    ("a storage that is a text", pickled(text("storage") + b"Q."), Fault.STORAGE_ID),
    ("no such storage", file_of(state(w=tensor(storage("1")))), Fault.STORAGE_MISSING),
    ("a storage that leads out", file_of(state(w=tensor(storage("../version")))),
     Fault.STORAGE_MISSING),
    ("a storage larger than its entry", file_of(state(w=tensor(storage(count=3)))),
     Fault.STORAGE_SIZE),
    ("a storage smaller than its entry", file_of(state(w=tensor(storage(count=1)))),
     Fault.STORAGE_SIZE),
    ("a storage of 2^60 elements", file_of(state(w=tensor(storage(count=1 << 60)))),
     Fault.STORAGE_SIZE),
    ("a storage of two types", file_of(state(a=tensor(), b=tensor(
     storage(kind="torch.IntStorage")))), Fault.STORAGE_TYPE),
    ("2^64 elements", file_of(state(w=tensor(size=(1 << 32, 1 << 32), stride=(0, 0)))),
     Fault.GEOMETRY),
    ("an empty tensor of 2^64", file_of(state(w=tensor(size=(0, 1 << 32, 1 << 32),
     stride=(1, 1, 1)))), Fault.GEOMETRY),
    ("an element too many", file_of(state(w=tensor(size=(3,)))), Fault.BEYOND_STORAGE),
    ("an offset too far", file_of(state(w=tensor(offset=integer(1)))), Fault.BEYOND_STORAGE),
    ("an offset of 2^62", file_of(state(w=tensor(offset=integer(1 << 62)))),
     Fault.BEYOND_STORAGE),
    ("a stride too long", file_of(state(w=tensor(stride=(2,)))), Fault.BEYOND_STORAGE),
    ("a stride of 2^62", file_of(state(w=tensor(stride=(1 << 62,)))), Fault.BEYOND_STORAGE),
    ("elements of an empty storage", file_of(state(w=tensor(storage(count=0))), {"0": b""}),
     Fault.BEYOND_STORAGE),
]  # fmt: skip

# (what is odd, the file, the names and shapes of its tensors)
HONEST: list[tuple[str, bytes, dict[str, tuple[int, ...]]]] = [
    ("plain", file_of(), {"w": (2,)}),
    ("nothing in it", pickled(b"}."), {}),
    ("no tensors", pickled(b"}" + text("lr") + b"G?\xf0\0\0\0\0\0\0s."), {}),
    ("a tensor alone", pickled(tensor() + b"."), {"tensor": (2,)}),
    ("a list of one", pickled(b"]" + tensor() + b"a."), {"0": (2,)}),
    ("nested", pickled(b"}" + text("model") + b"}" + integer(0) + tensor() + b"ss."),
     {"model.0": (2,)}),
    ("a larger end", file_of(end=End(large={})), {"w": (2,)}),
    ("a larger end that is needed", file_of(end=End({"count": 0xFFFF, "here": 0xFFFF,
     "start": 0xFFFFFFFF, "bytes": 0xFFFFFFFF}, {})), {"w": (2,)}),
    ("a footer", footed(footer()), {"w": (2,)}),
    ("a footer without a mark", footed(footer(mark=b"")), {"w": (2,)}),
    ("a footer of 64 bits", footed(footer(code="<LQQ")), {"w": (2,)}),
    ("sizes of 64 bits", data(central={**SENTINEL, "extra": large_sizes(8, 8)},
     local={**SENTINEL, "extra": b"FB\0\0" + large_sizes(8, 8)}), {"w": (2,)}),
    ("a folder's own entry", zipped(Item(f"{ROOT}/data/")), {"w": (2,)}),
    ("a comment on an entry", zipped(Item(f"{ROOT}/x", central={"comment": b"why"})), {"w": (2,)}),
    ("a storage nobody uses", file_of(storages={"0": FLOATS, "1": b"unused"}), {"w": (2,)}),
    ("little-endian", zipped(Item(f"{ROOT}/byteorder", b"little")), {"w": (2,)}),
    ("an empty tensor", file_of(state(w=tensor(size=(0, 5), stride=(5, 1)))), {"w": (0, 5)}),
    ("a single number", file_of(state(w=tensor(size=(), stride=()))), {"w": ()}),
    ("a number a thousand times", file_of(state(w=tensor(size=(1000,), stride=(0,)))), {"w": (2,)}),
    ("a value thrown away", pickled(b"N0(1" + tensor() + b"."), {"tensor": (2,)}),
    ("a tuple as a size", file_of(state(w=call("torch._utils._rebuild_tensor", storage(),
     integer(0), call("torch.Size", numbers((2,))), numbers((1,))))), {"w": (2,)}),
]  # fmt: skip


TORCH: dict[str, torch.dtype] = {dtype.name: getattr(torch, name) for name, dtype in DTYPES.items()}


def flat(value: object) -> dict[str, torch.Tensor]:
    """Every tensor of a loaded value by its keys, joined by dots."""
    return {name or "tensor": tensor for name, tensor in _walk("", value)}


def _walk(prefix: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, dict):
        for key, held in value.items():
            yield from _walk(_joined(prefix, key), held)
    elif isinstance(value, list | tuple):
        for number, held in enumerate(cast("Sequence[object]", value)):
            yield from _walk(_joined(prefix, number), held)


def _joined(prefix: str, key: object) -> str:
    whole = isinstance(key, bool) or (isinstance(key, float) and key.is_integer())
    part = str(int(cast("float", key))) if whole else str(key)
    return f"{prefix}.{part}" if prefix else part


def seen_by_us(path: Path, header: PytorchHeader) -> dict[str, torch.Tensor]:
    """All tensors as the header describes them, over the bytes of the file."""
    file = path.read_bytes()
    specs = {spec.name: spec for spec in header.tensors}
    found = {}
    for member in header.members:
        spec, dtype = specs[member.held_by], TORCH[member.dtype]
        assert spec.start <= member.start <= spec.start + spec.nbytes
        raw = bytearray(file[spec.start : spec.start + spec.nbytes])
        held = (
            torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        )
        size = torch.empty(0, dtype=dtype).element_size()
        offset = member.start - spec.start if member.nbytes else 0
        whole = held[offset : offset + (len(raw) - offset) // size * size].clone().view(dtype)
        seen = whole.as_strided(member.torch_shape, member.stride)
        seen = seen.conj() if member.conjugated else seen
        found[member.name] = torch._neg_view(seen) if member.negated else seen
    return found


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements in order."""
    whole = tensor.detach()
    if whole.dtype == torch.complex32:  # torch cannot resolve what it shows; as it is stored, then
        whole = whole.conj() if whole.is_conj() else whole
        whole = torch._neg_view(whole) if whole.is_neg() else whole
    whole = whole.resolve_conj().resolve_neg().contiguous()
    # One element may have any stride.
    whole = whole.as_strided((whole.numel(),), (1,), whole.storage_offset())
    return bytes(whole.view(torch.uint8).tolist()) if whole.numel() else b""


def shares_a_range(ends: Sequence[tuple[int, int]]) -> bool:
    """Whether two of these ranges, which are in order, have a byte in common."""
    return any(a[1] > b[0] for a, b in pairwise(ends))
