"""Archives and pickles as torch.save writes them, made by hand, so that each byte can be a lie."""

import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    blob = b""
    directory = b""
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
    return blob + directory + tail + after


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
