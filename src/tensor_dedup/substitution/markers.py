"""Markers: a file of weights says which of its tensors come from which base.

In the metadata of a safetensors file, under the key `shared_from`: JSON with `version` 1, `base`
(what the base is called, and `digest`, which identifies its tensors whatever it is called) and
`tensors`, from the names in this file to those in the base where they are called otherwise, else to
null. docs/reference/markers.md is the convention. A marker is a hint: nobody takes its word for
what bytes are.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tensor_dedup.analyze.tensors import AnalyzedTensor
from tensor_dedup.digest import digest

KEY: Final = "shared_from"
VERSION: Final = 1


def base_digest(tensors: Iterable[AnalyzedTensor]) -> str:
    """Return what identifies a checkpoint's content: the digest of its tensors' digests.

    It is the digest, made as a tensor's, of a text with a line "DIGEST NAME" for each tensor, in
    the order of their names.
    """
    lines = sorted((tensor.name, tensor.fingerprint.digest) for tensor in tensors)
    return digest("".join(f"{found} {name}\n" for name, found in lines).encode())


def marker(base: str, content: str, tensors: Mapping[str, str]) -> str:
    """Return the metadata's text; `tensors` are names in the file, with those in the base."""
    names = {name: old if old != name else None for name, old in sorted(tensors.items())}
    document: dict[str, Any] = {
        "version": VERSION,
        "base": {"name": base, "digest": content},
        "tensors": names,
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))
