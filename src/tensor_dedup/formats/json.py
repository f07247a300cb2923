"""Strict JSON decoding of untrusted files, in bounded memory."""

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

from tensor_dedup.formats.errors import JsonFault, JsonTextError, shorten

# As deep as the safetensors library's reader follows.
MAX_DEPTH = 127
# The largest checkpoints known have some 100,000 tensors, over many files. A tensor's entry has one
# brace, two brackets and about eight commas.
MAX_TENSORS = 1_000_000
_LIMITS = (("{", MAX_TENSORS + 2), ("[", 2 * MAX_TENSORS), (",", 8 * MAX_TENSORS))
# One escape; group 1 only when it is half a surrogate pair.
_ESCAPE = re.compile(
    r"\\(?:[^u]|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F])|u)"
)


def decode_object(blob: bytes, path: str) -> dict[str, Any]:
    """Return the JSON object in `blob`; `path` is used in error messages only.

    The decoder is stricter than Python's: it refuses NaN, encodings other than UTF-8, lone
    surrogates, numbers out of range and duplicate keys in an object. Integers that do not fit into
    64 bits are returned as floats.

    Raises:
        JsonTextError: The bytes are not a valid JSON object.
    """
    try:
        text = blob.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonTextError.at(
            JsonFault.ENCODING,
            path,
            f"the text is not UTF-8 at byte {error.start}",
            offset=error.start,
        ) from error
    _check_structure(text, path)
    value = _load(text, path)
    if not isinstance(value, dict):
        raise JsonTextError.at(
            JsonFault.NOT_AN_OBJECT,
            path,
            f"the text is a JSON {type(value).__name__}, not an object",
        )
    _check_surrogates(text, path)
    return value


def _check_structure(text: str, path: str) -> None:
    # Counted before decoding: "[[],[],..." takes 30 times its size as Python objects.
    for mark, limit in _LIMITS:
        if (found := text.count(mark)) > limit:
            raise JsonTextError.at(
                JsonFault.BOMB,
                path,
                f"the text has {found} {mark!r}, the limit is {limit}",
                found=found,
            )


def _check_surrogates(text: str, path: str) -> None:
    # Python decodes half a surrogate pair to a string that is not Unicode; no other reader does.
    if r"\u" in text and any(match[1] for match in _ESCAPE.finditer(text)):
        raise JsonTextError.at(JsonFault.ENCODING, path, "the text escapes half a surrogate pair")


def _load(text: str, path: str) -> object:
    decoder = json.JSONDecoder(
        object_pairs_hook=partial(_object, path),
        parse_int=partial(_integer, path),
        parse_float=partial(_float, path),
        parse_constant=partial(_constant, path),
    )
    try:
        return decoder.decode(text)
    except json.JSONDecodeError as error:
        raise JsonTextError.at(
            JsonFault.SYNTAX,
            path,
            f"the text is not JSON: {error.msg} at {error.pos}",
            offset=error.pos,
        ) from error
    except RecursionError as error:
        raise JsonTextError.at(
            JsonFault.NESTING, path, f"the text nests deeper than {MAX_DEPTH} levels"
        ) from error


def _object(path: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        count = Counter(key for key, _ in pairs)
        key = shorten(next(key for key in count if count[key] > 1))
        raise JsonTextError.at(
            JsonFault.DUPLICATE_KEY, path, f"the key {key!r} appears twice", key=key
        )
    return found


def _integer(path: str, text: str) -> int | float:
    # What does not fit 64 bits is a float to other readers, and so is "-0".
    if len(text) <= 20 and text != "-0":
        value = int(text)
        if -(1 << 63) <= value < 1 << 64:
            return value
    return _float(path, text)


def _float(path: str, text: str) -> float:
    value = float(text)
    if math.isinf(value) or abs(value) == sys.float_info.max:
        raise JsonTextError.at(
            JsonFault.NUMBER, path, f"the number {shorten(text)} is out of range"
        )
    return value


def _constant(path: str, text: str) -> float:
    raise JsonTextError.at(JsonFault.CONSTANT, path, f"{text} is not JSON", constant=text)


def depth_of(values: Iterable[object]) -> int:
    """Return how deeply objects and lists are nested in decoded JSON values."""
    depth, level = 0, list(values)
    while level := [value for value in level if isinstance(value, dict | list)]:
        depth += 1
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    return depth
