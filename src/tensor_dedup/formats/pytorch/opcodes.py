"""The instructions of a pickle that torch.save writes, in sequence. Nothing is evaluated.

Only the instructions that pickle protocols 2 to 5 use for plain values, tensors and dicts are
accepted. The text instructions of protocol 0, PERSID, INST, OBJ, extensions and out-of-band buffers
are refused. Every length is compared with the pickle's size before it is used.
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NoReturn

from tensor_dedup.formats.errors import PytorchError, PytorchFault, shorten

# Numbers of random generators have some hundred bits.
MAX_NUMBER_BYTES = 256
# As long as a module and a name in it ever are.
_MAX_LINE = 500

Instruction = tuple[str, object, int]
_Reader = Callable[[bytes, int, str], object]


def instructions(blob: bytes, path: str) -> Iterator[Instruction]:
    """Yield the name, argument and offset of each instruction, up to and including STOP.

    The argument depends on the instruction:

    * text: a str;
    * bytes and Python 2 strings: bytes;
    * a global: a tuple (module, name);
    * a number, a length or an index: an int or float;
    * an instruction without an argument: None.

    `path` is used in error messages only.

    Raises:
        PytorchError: The pickle is malformed, or has instructions that torch.save does not write.
    """
    at = 0
    while at < len(blob):
        known = _CODES.get(blob[at])
        if known is None:
            raise PytorchError.at(
                PytorchFault.PICKLE_OPCODE,
                path,
                f"the instruction {blob[at : at + 1]!r} at {at} of its pickle is not known",
                offset=at,
            )
        name, number, read = known
        if number is not None:
            argument, end = _argument(blob, at, number, read, path)
        elif read is not None:
            argument, end = _lines(blob, at, path)
        else:
            argument, end = None, at + 1
        yield name, argument, at
        at = end
        if name == "STOP":
            if at != len(blob):
                raise PytorchError.at(
                    PytorchFault.PICKLE_TRAILING,
                    path,
                    f"its pickle ends at {at} of {len(blob)}",
                    ends=at,
                    nbytes=len(blob),
                )
            return
    _truncated(at, at, len(blob), path)


def _argument(
    blob: bytes, at: int, number: struct.Struct, read: _Reader | None, path: str
) -> tuple[object, int]:
    end = at + 1 + number.size
    if end > len(blob):
        _truncated(at, end, len(blob), path)
    value = number.unpack_from(blob, at + 1)[0]
    if read is None:
        return value, end
    start, end = end, end + value
    if value < 0 or end > len(blob):
        _truncated(at, end, len(blob), path)
    return read(blob[start:end], at, path), end


def _truncated(at: int, end: int, nbytes: int, path: str) -> NoReturn:
    raise PytorchError.at(
        PytorchFault.PICKLE_TRUNCATED,
        path,
        f"the instruction at {at} of its pickle goes on to {end}, the pickle ends at {nbytes}",
        offset=at,
        ends=end,
        nbytes=nbytes,
    )


def _lines(blob: bytes, at: int, path: str) -> tuple[tuple[str, str], int]:
    middle = blob.find(b"\n", at + 1, at + 1 + _MAX_LINE)
    end = blob.find(b"\n", middle + 1, middle + 1 + _MAX_LINE) if middle >= 0 else -1
    if end < 0:
        _truncated(at, len(blob), len(blob), path)
    module = _text(blob[at + 1 : middle], at, path)
    return (module, _text(blob[middle + 1 : end], at, path)), end + 1


def _text(raw: bytes, at: int, path: str) -> str:
    try:
        # Python's pickle writes halves of surrogate pairs, which are no text to anybody else.
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        shown = shorten(repr(raw[:80]))
        raise PytorchError.at(
            PytorchFault.PICKLE_TEXT,
            path,
            f"the text {shown} at {at} of its pickle is not UTF-8",
            offset=at,
        ) from error


def _long(raw: bytes, at: int, path: str) -> int:
    if len(raw) > MAX_NUMBER_BYTES:
        raise PytorchError.at(
            PytorchFault.PICKLE_NUMBER,
            path,
            f"a number of {len(raw)} bytes at {at} of its pickle",
            offset=at,
            nbytes=len(raw),
        )
    return int.from_bytes(raw, "little", signed=True)


def _bytes(raw: bytes, _at: int, _path: str) -> bytes:
    return raw


_READERS: Mapping[str, _Reader] = MappingProxyType({"text": _text, "long": _long, "bytes": _bytes})


def _known(name: str, argument: str) -> tuple[str, struct.Struct | None, _Reader | None]:
    """Return an instruction's name, its number, and what reads as many bytes behind that."""
    if argument in ("", "lines"):
        return name, None, _text if argument else None
    kind, space, code = argument.rpartition(" ")
    number = struct.Struct(code if code.startswith(">") else f"<{code}")
    return name, number, _READERS[kind] if space else None


# Instruction -> its name and how its argument is written. A mapping proxy takes twice the time.
_CODES = {
    code[0]: _known(name, argument)
    for name, code, argument in (
        ("PROTO", b"\x80", "B"),
        ("FRAME", b"\x95", "Q"),
        ("STOP", b".", ""),
        ("MARK", b"(", ""),
        ("POP", b"0", ""),
        ("POP_MARK", b"1", ""),
        ("DUP", b"2", ""),
        ("NONE", b"N", ""),
        ("NEWTRUE", b"\x88", ""),
        ("NEWFALSE", b"\x89", ""),
        ("BININT", b"J", "i"),
        ("BININT1", b"K", "B"),
        ("BININT2", b"M", "H"),
        ("LONG1", b"\x8a", "long B"),
        ("LONG4", b"\x8b", "long i"),
        ("BINFLOAT", b"G", ">d"),
        ("SHORT_BINSTRING", b"U", "bytes B"),
        ("BINSTRING", b"T", "bytes i"),
        ("SHORT_BINUNICODE", b"\x8c", "text B"),
        ("BINUNICODE", b"X", "text I"),
        ("BINUNICODE8", b"\x8d", "text Q"),
        ("SHORT_BINBYTES", b"C", "bytes B"),
        ("BINBYTES", b"B", "bytes I"),
        ("BINBYTES8", b"\x8e", "bytes Q"),
        ("BYTEARRAY8", b"\x96", "bytes Q"),
        ("EMPTY_LIST", b"]", ""),
        ("APPEND", b"a", ""),
        ("APPENDS", b"e", ""),
        ("LIST", b"l", ""),
        ("EMPTY_TUPLE", b")", ""),
        ("TUPLE", b"t", ""),
        ("TUPLE1", b"\x85", ""),
        ("TUPLE2", b"\x86", ""),
        ("TUPLE3", b"\x87", ""),
        ("EMPTY_DICT", b"}", ""),
        ("DICT", b"d", ""),
        ("SETITEM", b"s", ""),
        ("SETITEMS", b"u", ""),
        ("EMPTY_SET", b"\x8f", ""),
        ("ADDITEMS", b"\x90", ""),
        ("FROZENSET", b"\x91", ""),
        ("GLOBAL", b"c", "lines"),
        ("STACK_GLOBAL", b"\x93", ""),
        ("REDUCE", b"R", ""),
        ("NEWOBJ", b"\x81", ""),
        ("BUILD", b"b", ""),
        ("BINPERSID", b"Q", ""),
        ("BINPUT", b"q", "B"),
        ("LONG_BINPUT", b"r", "I"),
        ("MEMOIZE", b"\x94", ""),
        ("BINGET", b"h", "B"),
        ("LONG_BINGET", b"j", "I"),
    )
}
