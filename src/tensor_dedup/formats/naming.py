"""Which of a folder's safetensors files are its weights, decided by their names alone. No I/O.

A folder often holds the same weights several times. One copy is chosen, the one that the libraries
load when they are not asked for another:

- an index (`model.safetensors.index.json`) before everything else: its shards are the weights, and
  no other file of the folder is;
- without an index, `model.safetensors` before `model-00001-of-00002.safetensors` and so on;
- the plain file before its variants (`model.fp16.safetensors`), a variant only where there is no
  plain file, and then the first by alphabet;
- `consolidated*` (a publisher's own layout of the same weights) only where there is nothing else.

Files whose names have nothing to do with each other all belong to the checkpoint.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_VARIANT = r"\.[A-Za-z]\w*"
_FILE = re.compile(
    rf"(?P<stem>.+?)(?P<before>{_VARIANT})?"
    rf"(-(?P<shard>\d+)-of-(?P<count>\d+)(?P<after>{_VARIANT})?)?\.safetensors"
)
_INDEX = re.compile(
    rf"(?P<stem>.+?)(?P<before>{_VARIANT})?\.safetensors\.index(?P<after>{_VARIANT})?\.json"
)
_SECOND_LAYOUT = "consolidated"


@dataclass(frozen=True, slots=True)
class Choice:
    """The names to read: shards that `indexes` list, or else `files`.

    `missing` names the first shard that is not there, of a set that has no index.
    """

    indexes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    missing: str | None = None


@dataclass(slots=True)
class _Copy:
    """One copy of a folder's weights: an index, a single file or sets of shards.

    `shards` has the numbers seen, by what is before them, how many there should be, and the rest.
    """

    index: str | None = None
    single: str | None = None
    shards: dict[tuple[str, str, str], set[int]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


def is_index(name: str) -> bool:
    """Whether a file of this name is an index of safetensors shards."""
    return _INDEX.fullmatch(name) is not None


def choose(names: Iterable[str]) -> Choice:
    """One copy of the weights among the files of one folder; other names are ignored."""
    stems: dict[str, dict[str, _Copy]] = {}
    for name in sorted(names):
        _sort_in(name, stems)
    if len(stems) > 1:
        stems = {stem: copies for stem, copies in stems.items() if not _is_second(stem)} or stems
    copies = [variants[min(variants)] for _, variants in sorted(stems.items())]
    indexes = tuple(copy.index for copy in copies if copy.index is not None)
    if indexes:
        return Choice(indexes=indexes)
    chosen = [_files(copy) for copy in copies]
    files = tuple(name for names, _ in chosen for name in names)
    return Choice(files=files, missing=next((gap for _, gap in chosen if gap), None))


def _is_second(stem: str) -> bool:
    return stem.split(".")[0] == _SECOND_LAYOUT


def _sort_in(name: str, stems: dict[str, dict[str, _Copy]]) -> None:
    match = _INDEX.fullmatch(name) or _FILE.fullmatch(name)
    if match is None:
        return
    # "" is the plain copy and sorts before every variant.
    variant = match["before"] or match["after"] or ""
    copy = stems.setdefault(match["stem"], {}).setdefault(variant, _Copy())
    if name.endswith(".json"):
        copy.index = name
    elif match["shard"] is None:
        copy.single = name
    else:
        copy.names.append(name)
        head, tail = name[: match.start("shard")], name[match.end("count") :]
        copy.shards.setdefault((head, match["count"], tail), set()).add(int(match["shard"]))


def _files(copy: _Copy) -> tuple[list[str], str | None]:
    if copy.single is not None:
        return [copy.single], None
    for (head, count, tail), shards in copy.shards.items():
        # Some number their shards from 0: only how many there are is certain.
        if len(shards) < int(count):
            first = next(number for number in range(1, int(count) + 1) if number not in shards)
            return copy.names, f"{head}{str(first).zfill(len(count))}-of-{count}{tail}"
    return copy.names, None
