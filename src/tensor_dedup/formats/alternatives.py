"""Tells the files of one checkpoint from several models that lie in one folder.

GGUF files that have a tensor's name in common are models of their own: quantisations of one model
(`m.Q4_K_M.gguf`, `m.Q8_0.gguf`), or different models, in one folder or in folders beside each
other. A file that has no name in common with them, such as a projector (`mmproj-F16.gguf`), is a
choice beside them. In other formats, single files of one folder that have a name in common are.
The parts of a split file (`m-00001-of-00003.gguf`) are one model, which its first part stands for.
No I/O.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tensor_dedup.formats.gguf import GgufHeader
from tensor_dedup.formats.weights import Header

_PROJECTOR = "mmproj"  # in names that llama.cpp reads, and the type in its files
_PART = re.compile(r"(?P<head>.+)-(?P<part>\d+)-of-(?P<count>\d+)(?P<tail>\.\w+)")


def several_models(files: Iterable[tuple[Path, str, Header]]) -> list[Path]:
    """Return the paths of the models among the files of a folder; empty if they are one.

    Each file is its path, the prefix of its tensors' names, and its header. The path of a model is
    that of its file or, if it is split, of the first part that is there.
    """
    sets: dict[tuple[Path, str], list[Path]] = {}
    held: dict[tuple[Path, str], set[str]] = {}
    for path, prefix, header in files:
        is_gguf = isinstance(header, GgufHeader)
        key = (path.parent, _whole(path.name) if is_gguf else path.name)
        sets.setdefault(key, []).append(path)
        # A prefix does not make another model of a quantisation that has a folder to itself.
        names = {("" if is_gguf else prefix) + spec.name for spec in header.tensors}
        held.setdefault(key, set()).update(names)
    if len(sets) < 2 or not _overlap(list(held.values())):
        return []
    if any(_is_part(paths[0]) and len(paths) == 1 for paths in sets.values()):
        return []  # parts that are not GGUF cannot be named by one of them
    return [min(paths) for paths in sets.values()]


def is_projector(path: Path, header: Header) -> bool:
    """Return whether a file is a projector: of a model that sees or hears, what is beside it."""
    if not isinstance(header, GgufHeader):
        return False
    kinds = (header.metadata.get("general.architecture"), header.metadata.get("general.type"))
    return _PROJECTOR in path.name.lower() or "clip" in kinds or _PROJECTOR in kinds


def _whole(name: str) -> str:
    """What the parts of a split file have in common; the name of any other file."""
    found = _PART.fullmatch(name)
    return name if found is None else f"{found['head']}/{found['count']}{found['tail']}"


def _is_part(path: Path) -> bool:
    found = _PART.fullmatch(path.name)
    return found is not None and int(found["count"]) > 1


def _overlap(names: Sequence[set[str]]) -> bool:
    seen: set[str] = set()
    for each in names:
        if seen & each:
            return True
        seen |= each
    return False
