"""Find values in the UBJSON that XGBoost writes, without decoding them to Python objects.

A value is a marker of one byte, followed by the content:

* A number has a marker for its type, and a fixed size.
* A text is `S`, its length and its bytes.
* An object is `{`, keys and values in turn, and `}`. A key is a length and the bytes of a text.
* An array is `[`, then optionally `$` with a type, then optionally `#` with a count, and then the
  items. An array without a count ends with `]`.

Lengths and counts are numbers with their marker. All numbers are big-endian. The positions in this
module are byte offsets.
"""

import struct
from collections.abc import Generator
from typing import Final

from tensor_dedup.training.errors import UnsupportedValueError

_SIZES: Final = {"i": 1, "U": 1, "I": 2, "l": 4, "L": 8, "d": 4, "D": 8, "C": 1}
_EMPTY: Final = "ZTFN"
_INTEGERS: Final = {"i": ">b", "U": ">B", "I": ">h", "l": ">i", "L": ">q"}
# By marker: the bytes of a number with its marker, 0 for what is no number.
_STEPS: Final = [0] * 256
for _marker, _size in _SIZES.items():
    _STEPS[ord(_marker)] = 1 + _size
for _marker in _EMPTY:
    _STEPS[ord(_marker)] = 1
_MAX_DEPTH: Final = 64
_MANY: Final = 16
# A search for objects may go on to the end of the data. It pays where that is not much farther than
# the objects are long; in data of a thousand arrays, a thousand searches would.
_SEARCHED: Final = 4096
# Numbers that are looked at together: few enough where hardly two are written alike.
_AHEAD: Final = 512

Buffer = bytes | bytearray


def skip(data: Buffer, at: int, depth: int = 0) -> int:
    """Return the offset of the end of the value that begins at the offset `at`.

    `depth` is the number of objects and arrays around the value.

    Raises:
        UnsupportedValueError: There is no valid value at this offset.
    """
    try:
        return _skip(data, at, depth)
    except (IndexError, struct.error) as error:
        raise _unknown(at) from error


def members(data: Buffer, at: int) -> Generator[tuple[str, int], int | None, None]:
    """Yield the key and the offset of each value in the object at the offset `at`.

    To find the next key, the generator scans the value. A caller that knows where the value ends
    may pass that offset to `send` instead.

    Raises:
        UnsupportedValueError: There is no object at this offset, or the object is not valid.
    """
    if data[at : at + 1] != b"{":
        raise _unknown(at)
    at += 1
    while data[at : at + 1] != b"}":
        length, at = _integer(data, at)
        key, at = bytes(data[at : at + length]).decode("utf-8", "replace"), at + length
        end = yield key, at
        at = skip(data, at) if end is None else end


def find(data: Buffer, at: int, *path: str) -> int | None:
    """Return the offset of the value under `path`, a sequence of keys, in the object at `at`.

    Returns None if the object does not have the value.
    """
    for key in path:
        if data[at : at + 1] != b"{":
            return None
        found = next((start for name, start in members(data, at) if name == key), None)
        if found is None:
            return None
        at = found
    return at


def array(data: Buffer, at: int) -> tuple[int, int] | None:
    """Return the offset of the first item, and the number of items, of the array at `at`.

    Returns None if this is not an array, if the array has no count, or if one marker gives the type
    of all items.
    """
    if data[at : at + 2] != b"[#":
        return None
    count, at = _integer(data, at + 2)
    return at, count


def integers(data: bytes, at: int) -> list[bytes] | None:
    """Return the items of the array at `at`, still encoded, if all of them are integers.

    Returns None if this is not an array of integers, if the array has no count, or if one marker
    gives the type of all items.
    """
    place = array(data, at)
    if place is None:
        return None
    found, start = [], place[0]
    for _ in range(place[1]):
        end = start + _STEPS[data[start]]
        found.append(data[start:end])
        start = end
    return found if all(chr(item[0]) in _INTEGERS for item in found if item) else None


def number(item: bytes) -> int:
    """Return the value of `item`, an encoded integer that `integers` has returned."""
    return int(struct.unpack(_INTEGERS[chr(item[0])], item[1:])[0])


def objects(data: Buffer, at: int, count: int) -> list[int]:
    """Return the offsets at which `count` consecutive objects begin, and the end of the last one.

    The first object begins at `at`. The search is fast if all objects have the same fields.
    """
    if not count:
        return [at]
    if (end := data.find(b"#", at)) < 0:
        raise _unknown(at)
    mark = bytes(data[at:end])
    for leap in (True, False):
        starts = _marked(data, at, mark, leap, count)
        if len(starts) == count:
            return [*starts, skip(data, starts[-1])]
    starts = [at]
    for _ in range(count):
        starts.append(skip(data, starts[-1]))
    return starts


def _marked(data: Buffer, at: int, mark: bytes, leap: bool, count: int) -> list[int]:
    """Return where the mark occurs, up to once more than `count` times.

    With `leap`, first try the size of the last object.
    """
    starts, last, place = [at], at, data.find(mark, at + 1)
    while place >= 0 and len(starts) <= count:
        starts.append(place)
        last, guess = place, 2 * place - last
        found = leap and data.startswith(mark, guess)
        place = guess if found else data.find(mark, place + len(mark))
    return starts


def _skip(data: Buffer, at: int, depth: int) -> int:
    if step := _STEPS[data[at]]:
        return at + step
    marker = chr(data[at])
    if marker == "S":
        length, at = _integer(data, at + 1)
        return at + length
    if depth > _MAX_DEPTH:
        raise _unknown(at)
    if marker == "[":
        return _skip_array(data, at + 1, depth + 1)
    if marker == "{":
        at += 1
        while data[at] != ord("}"):
            length, at = _integer(data, at)
            at = _skip(data, at + length, depth + 1)
        return at + 1
    raise _unknown(at)


def _skip_array(data: Buffer, at: int, depth: int) -> int:
    kind = None
    if data[at] == ord("$"):
        kind, at = chr(data[at + 1]), at + 2
    if data[at] != ord("#"):
        while data[at] != ord("]"):
            at = _skip(data, at, depth)
        return at + 1
    count, at = _integer(data, at + 1)
    if kind is not None:
        return at + count * _SIZES[kind] if kind in _SIZES else _refuse(at)
    while count and (step := _STEPS[data[at]]):  # numbers, one after the other: the most
        alike = _alike(data, at, step, min(count, _AHEAD))
        at += alike * step
        count -= alike
    if count > _MANY and data[at] == ord("{") and len(data) - at < count * _SEARCHED:
        return objects(data, at, count)[-1]
    for _ in range(count):
        at = _skip(data, at, depth)
    return at


def _alike(data: Buffer, at: int, step: int, count: int) -> int:
    """Return how many of the next `count` numbers are written as the first is."""
    markers = data[at : at + count * step : step]
    return len(markers) - len(markers.lstrip(markers[:1]))


def _integer(data: Buffer, at: int) -> tuple[int, int]:
    """Return the number at `at`, which is not negative, and its end."""
    form = _INTEGERS.get(chr(data[at]))
    if form is None:
        raise _unknown(at)
    (number,) = struct.unpack_from(form, data, at + 1)
    if not 0 <= number <= len(data):
        raise _unknown(at)
    return number, at + 1 + struct.calcsize(form)


def _refuse(at: int) -> int:
    raise _unknown(at)


def _unknown(at: int) -> UnsupportedValueError:
    return UnsupportedValueError.at("", f"no UBJSON as XGBoost writes it at byte {at}", at=at)
