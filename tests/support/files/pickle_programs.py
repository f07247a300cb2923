"""Pickles of tensors put together at random, of what torch.save writes and of what it never would.

`program` makes one instruction by instruction, so that nearly all of them can be evaluated: tensors
with attributes, flags, hooks and states, containers filled late, things made by a call or without
one. `disturbed` exchanges, doubles and drops instructions of a pickle.
"""

import pickletools
import random
import struct

from files.pytorch_files import (
    HOOKS,
    ROOT,
    Item,
    call,
    integer,
    named,
    numbers,
    text,
    zip_of,
)

STORAGES = {
    "0": struct.pack("<8f", *(1.5 * number - 3 for number in range(8))),
    "1": struct.pack("<8f", *(number**2 for number in range(8))),
    "2": bytes(range(7, 23)),
}
_KINDS = {
    "0": "torch.FloatStorage",
    "1": "torch.ComplexFloatStorage",
    "2": "torch.UntypedStorage",
}
_BYTES = {
    "torch.FloatStorage": 4,
    "torch.IntStorage": 4,
    "torch.LongStorage": 8,
    "torch.ComplexFloatStorage": 8,
    "torch.ByteStorage": 1,
    "torch.UntypedStorage": 1,
}
_DTYPES = (
    *("torch.float32", "torch.int16", "torch.uint16", "torch.complex64", "torch.float8_e5m2"),
    *("torch.bool", "torch.complex32", "torch.uint8", "torch.float4_e2m1fn_x2"),
)
_WIDTHS = {
    "torch.float32": 4,
    "torch.int16": 2,
    "torch.uint16": 2,
    "torch.complex64": 8,
    "torch.float8_e5m2": 1,
    "torch.bool": 1,
    "torch.complex32": 4,
    "torch.uint8": 1,
    "torch.float4_e2m1fn_x2": 1,
}
_USUAL_ATTRIBUTES = ("note", "_metadata", "tensor_model_parallel", "é", "partition_dim")
_ATTRIBUTES = (
    *("note", "data", "grad", "requires_grad", "_backward_hooks", "names", "real", "imag", "T"),
    *("shape", "is_leaf", "__class__", "__dict__", "_metadata", "items", "keys", "copy", "_base"),
    *("retains_grad", "__len__", "output_nr", "_grad", "volatile", "tensor_model_parallel"),
)


def program(rng: random.Random) -> bytes:
    """Return a pickle of a few tensors, some of them made in ways of which torch.save has none."""
    return b"\x80\x02" + _dict(rng, 0) + b"."


def file_with(pickle: bytes) -> bytes:
    """Return the pickle in an archive with `STORAGES`."""
    return zip_of(
        Item(f"{ROOT}/data.pkl", pickle),
        *(Item(f"{ROOT}/data/{key}", data) for key, data in STORAGES.items()),
        Item(f"{ROOT}/version", b"3\n"),
        Item(f"{ROOT}/byteorder", b"little"),
    )


def disturbed(rng: random.Random, pickle: bytes) -> bytes:
    """Return the pickle with one to three of its instructions changed."""
    try:
        starts = [at for _, _, at in pickletools.genops(pickle)]
    except (ValueError, IndexError, UnicodeDecodeError, KeyError):
        return pickle
    parts = [pickle[a:b] for a, b in zip(starts, [*starts[1:], len(pickle)], strict=True)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(1, max(2, len(parts) - 1))
        kind = rng.randrange(7)
        if kind == 0:
            parts[at : at + 1] = []
        elif kind == 1:
            parts.insert(at, parts[rng.randrange(1, len(parts))])
        elif kind == 2:
            other = rng.randrange(1, len(parts))
            parts[at], parts[other] = parts[other], parts[at]
        elif kind == 3:
            parts.insert(at, _state(rng, 2) + b"b")
        elif kind == 4:
            calls = [number for number, part in enumerate(parts) if part == b"R"]
            if calls:
                parts[rng.choice(calls)] = b"\x81"
        elif kind == 5:
            parts.insert(at, _value(rng, 2) + rng.choice((b"s", b"a", b"b", b"R", b"\x86", b"")))
        else:
            parts[at] = rng.choice((b"N", b"\x88", b"\x89", b"]", b"}", b")", b"K\x02", b"q\x07"))
    return b"".join(parts)


def _choose(rng: random.Random, usual: bytes, *others: bytes, share: float = 0.02) -> bytes:
    """The usual thing, or now and then one of the others."""
    return rng.choice(others) if rng.random() < share else usual


def _dict(rng: random.Random, depth: int) -> bytes:
    keys = rng.sample(("w", "b", "n", "a.b", "t", "é"), rng.randrange(1, 4))
    items = b"".join(_key(rng, key) + _value(rng, depth + 1) for key in keys)
    made = rng.choice((b"}", HOOKS, b"}", b"}"))
    made = _choose(
        rng,
        made,
        named("collections.OrderedDict") + b")\x81",
        call("collections.OrderedDict", b"](]" + text("o") + _tensor(rng) + b"ee"),
        named("collections.OrderedDict") + b"](]" + text("o") + _tensor(rng) + b"ee\x85\x81",
        named("collections.Counter") + b")R",
    )
    filled = made + b"(" + items + b"u"
    if rng.random() < 0.15:
        filled += _state(rng, depth) + b"b"
    if rng.random() < 0.1:
        filled += text("late") + _tensor(rng) + b"s"
    return filled


def _key(rng: random.Random, key: str) -> bytes:
    number = rng.choice((b"K\x03", b"\x88", b"N", b"G\x40\x08\0\0\0\0\0\0", b"U\x01w", b")"))
    return _choose(rng, text(key), number)


def _value(rng: random.Random, depth: int) -> bytes:
    kind = rng.randrange(20)
    if kind < 11 or depth > 3:
        return _tensor(rng, depth)
    if kind < 13:
        return _dict(rng, depth)
    if kind == 13:
        return b"](" + _value(rng, depth + 1) + _value(rng, depth + 1) + b"e"
    if kind == 14:
        return _value(rng, depth + 1) + _value(rng, depth + 1) + b"\x86"
    if kind == 15:
        return call("collections.Counter", b"}" + text("c") + _choose(rng, b"K\x02", b"N") + b"s")
    if kind == 16 and rng.random() < 0.3:
        return call("collections.Counter", b"}" + text("c") + _tensor(rng, depth) + b"s")
    if kind == 17:
        return _sparse(rng)
    if kind == 18:
        return call("builtins.set", b"](K\x01K\x02e")
    return rng.choice((b"K\x05", b"N", text("x"), call("torch.Size", numbers((2, 3))), b")"))


def _sparse(rng: random.Random) -> bytes:
    layout = call("torch.serialization._get_layout", text("torch.sparse_coo"))
    indices = b"(" + text("storage") + named("torch.LongStorage") + text("2") + text("cpu")
    indices += integer(2) + b"tQ"
    parts = call(
        "torch._utils._rebuild_tensor_v2",
        *(indices, integer(0), numbers((1, 2)), numbers((2, 1)), b"\x89", HOOKS),
    )
    size = call("torch.Size", numbers((1 << 62,)))
    values = _tensor_v2(rng)
    inner = b"(" + parts + values + size + _choose(rng, b"\x89", b"N") + b"t"
    return call("torch._utils._rebuild_sparse_tensor", layout, inner)


def _tensor(rng: random.Random, depth: int = 3) -> bytes:
    kind = rng.randrange(16)
    if kind < 7:
        made = _tensor_v2(rng)
    elif kind == 7:
        made = call("torch._utils._rebuild_tensor", *_geometry(rng)[0])
    elif kind < 10:
        made = _tensor_v3(rng)
    elif kind == 10:
        made = _parameter(rng, _tensor_v2(rng))
    elif kind < 13:
        state = _state(rng, depth)
        made = _parameter(rng, _tensor_v2(rng), "torch._utils._rebuild_parameter_with_state", state)
    elif kind < 15:
        made = _with_type(rng, depth)
    elif rng.random() < 0.2:
        made = named("torch.nn.parameter.Parameter") + _tensor_v2(rng) + b"\x85\x81"
    else:
        made = _plain_tensor(rng)
    if rng.random() < 0.02:
        made += rng.choice((_state(rng, depth), _other_storage(rng))) + b"b"
    return made


def _other_storage(rng: random.Random) -> bytes:
    return b"(" + b"".join(_geometry(rng)[0]) + b"t"


def _parameter(
    rng: random.Random,
    held: bytes,
    name: str = "torch._utils._rebuild_parameter",
    more: bytes = b"",
) -> bytes:
    return call(name, held, _flag(rng), _hooks(rng), more)


def _with_type(rng: random.Random, depth: int) -> bytes:
    geometry, held = _geometry(rng)
    function = _choose(
        rng, named("torch._utils._rebuild_tensor_v2"), named("torch._utils._rebuild_parameter")
    )
    kind = _choose(rng, named("torch.Tensor"), named("torch.nn.parameter.Parameter"))
    inner = b"(" + b"".join((*geometry, _flag(rng), _hooks(rng), _metadata(rng, held))) + b"t"
    return call("torch._tensor._rebuild_from_type_v2", function, kind, inner, _state(rng, depth))


def _tensor_v2(rng: random.Random) -> bytes:
    geometry, kind = _geometry(rng)
    parts = (*geometry, _flag(rng), _hooks(rng), _metadata(rng, kind))
    return call("torch._utils._rebuild_tensor_v2", *parts)


def _tensor_v3(rng: random.Random) -> bytes:
    dtype = rng.choice(_DTYPES)
    geometry, _ = _geometry(rng, _WIDTHS[dtype])
    parts = (*geometry, b"\x89", _hooks(rng), named(dtype), _metadata(rng, dtype))
    return call("torch._utils._rebuild_tensor_v3", *parts)


def _flag(rng: random.Random) -> bytes:
    return _choose(rng, b"\x89", b"\x88", b"N", b"K\x01", share=0.03)


def _hooks(rng: random.Random) -> bytes:
    held = HOOKS + text("h") + _plain_tensor(rng) + b"s"
    return _choose(rng, HOOKS, b"N", b"}", held, share=0.02)


def _plain_tensor(rng: random.Random) -> bytes:
    return call("torch._utils._rebuild_tensor_v2", *_geometry(rng)[0], b"\x89", HOOKS)


def _metadata(rng: random.Random, kind: str) -> bytes:
    signed = any(name in kind for name in ("Float", "float", "omplex")) and "8" not in kind
    if rng.random() < (0.6 if signed and "4_" not in kind else 0.98):
        return b""
    flags = ("conj", "neg") if "omplex" in kind else ("neg", "neg", "neg", "conj")
    flag, value = rng.choice(flags), _choose(rng, b"\x88", b"\x89", b"N", b"K\x01")
    one = b"}" + text(flag) + value + b"s"
    both = b"}(" + text("conj") + b"\x88" + text("neg") + _choose(rng, b"\x88", b"\x89") + b"u"
    odd = HOOKS + text(flag) + value + b"s"
    other = b"}" + text(rng.choice(("zero", "Conj", ""))) + b"\x88s"
    return _choose(rng, one, both, b"}", b"N", odd, other, both, share=0.2)


def _state(rng: random.Random, depth: int) -> bytes:
    if rng.random() < 0.4:
        return rng.choice((b"N", b"}" + text("note") + b"K\x01s", b"}"))
    items = []
    names = _ATTRIBUTES if rng.random() < 0.2 else _USUAL_ATTRIBUTES
    for name in rng.sample(names, rng.randrange(1, 3)):
        held = rng.choice((b"N", b"\x88", b"K\x01", named("collections.Counter"), b"}", b"T"))
        if held == b"T":
            held = _plain_tensor(rng)
        items.append(text(name) + held)
    plain = b"}(" + b"".join(items) + b"u"
    return _choose(rng, plain, HOOKS + plain[1:], b"N" + plain + b"\x86", plain + b"N\x86")


def _geometry(rng: random.Random, width: int = 0) -> tuple[list[bytes], str]:
    """A storage, an offset, a size and a stride that fit it as a rule; and the storage's kind."""
    key = rng.choice(tuple(STORAGES))
    kind = _KINDS[key] if rng.random() < 0.98 else rng.choice(tuple(_BYTES))
    if not width and kind == "torch.UntypedStorage":
        key, kind = "0", _KINDS["0"]
    nbytes = len(STORAGES[key])
    count = nbytes // _BYTES[kind]
    total = nbytes // (width or _BYTES[kind])
    held = b"(" + text("storage") + named(kind) + text(key)
    place = _choose(rng, text("cpu"), text("meta"), share=0.02)
    held += place + integer(count + rng.choice((0,) * 60 + (1, -1))) + b"tQ"
    offset = rng.choice((0, 0, 1, total // 2))
    left = max(1, total - offset)
    rows = rng.choice([n for n in (1, 2, 3, 4) if n <= left])
    columns = rng.randrange(0, left // rows + 1)
    size, stride = rng.choice(
        (
            ((left,), (1,)),
            ((rows, columns), (columns, 1)),
            ((columns, rows), (1, columns)),
            ((), ()),
            ((rows, 3), (1, 0)),
            (((left + 1) // 2,), (2,)),
            ((1, rows), (77, 1)),
            ((0, 2), (2, 1)),
        )
    )
    listed = b"](" + numbers(size)[1:-1] + b"e"
    sizes = _choose(rng, numbers(size), listed, call("torch.Size", numbers(size)), share=0.03)
    return [held, integer(offset), sizes, numbers(stride)], kind
