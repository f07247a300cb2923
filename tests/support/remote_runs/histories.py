"""Whether what writers were told of a name can be, given all the states that a server kept of it.

A reference is a register: its states, oldest first, are those of pushes and deletions, each within
the time of its operation, and whoever was told of a state was told while it was there.
"""

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from tensor_dedup.remote import layout

# So long a server may be at work on the last request of a process that was killed.
GRACE_S: Final = 2.5
# What says that there was no such name, and that there was no remote.
_ABSENT: Final = {"UnknownRemoteNameError", "NotARemoteError"}


@dataclass
class Operation:
    """What a writer began, and what it was told, in seconds of the machine's clock.

    `state` is that which the operation gives to a reference or found there, `number` that of the
    content; `may_replace` says whether the state may take the place of another content's. What
    nobody was told of ended when the writer was killed, or has not.
    """

    writer: int
    verb: str
    name: str
    began: float
    state: str | None = None
    number: int | None = None
    may_replace: bool = True
    ended: float = math.inf
    outcome: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        content = "" if self.number is None else f" content {self.number}"
        what = f"{self.verb} {self.name}{content}: {self.outcome or 'under way'}"
        return f"[{self.began:.3f} to {self.ended:.3f}] writer {self.writer}, {what}"


def journal(root: Path, writer: int) -> Path:
    """Where a writer notes what it does."""
    return root / f"journal-{writer}"


def operations(root: Path, writer: int) -> list[Operation]:
    """All that a writer has noted."""
    found: list[Operation] = []
    for line in journal(root, writer).read_text().splitlines():
        entry = json.loads(line)
        if "verb" in entry:
            began = entry["verb"], entry["name"], entry["at"], entry.get("state")
            found.append(Operation(writer, *began, entry.get("number"), entry.get("replace", True)))
        elif found and not found[-1].outcome:  # else it was killed between two operations
            last = found[-1]
            last.outcome, last.ended, last.facts = entry["outcome"], entry["at"], entry
            last.state = entry.get("state", last.state)
            last.number = entry.get("number", last.number)
            if last.outcome == "killed":
                last.ended += GRACE_S
    return found


def deleted(name: str) -> str:
    """The state of a reference whose name was deleted."""
    return hashlib.md5(layout.reference(name, None)).hexdigest()


def misfits(name: str, states: Sequence[str], done: Sequence[Operation]) -> Iterator[str]:
    """Say what of the operations on a name does not fit to the states of its reference."""
    sources: dict[str, list[Operation]] = defaultdict(list)
    mine = [each for each in done if each.name == name]
    for each in mine:
        if each.verb in ("push", "delete"):
            sources[each.state or deleted(name)].append(each)
    held = [state for n, state in enumerate(states) if n == 0 or state != states[n - 1]]
    for state, count in Counter(held).items():
        if count > len(sources[state]):
            by = "; ".join(map(str, sources[state])) or "nobody"
            yield f"{name}: its state was {count} times {state}, which was written by {by}"
    for before, state in pairwise(held):
        wanted = sources[state]
        if before != deleted(name) and wanted and not any(each.may_replace for each in wanted):
            by = "; ".join(map(str, wanted))
            yield f"{name}: the state {state} replaced {before}, which it may not: {by}"
    if all(sources[state] for state in held):
        yield from _disorder(name, held, sources, mine)


def _disorder(
    name: str,
    held: Sequence[str],
    sources: Mapping[str, Sequence[Operation]],
    done: Sequence[Operation],
) -> Iterator[str]:
    # When each state was written, at the earliest and at the latest. Before the first is none.
    earliest, latest = [-math.inf], [math.inf]
    for state in held:
        earliest.append(max(earliest[-1], min(each.began for each in sources[state])))
    for state in reversed(held):
        latest.insert(0, min(latest[0], max(each.ended for each in sources[state])))
    latest.insert(0, -math.inf)
    times = [*zip([None, *held], earliest, latest[1:], strict=True)]
    for number, state in enumerate(held, 1):
        if earliest[number] > latest[number]:
            by = "; ".join(map(str, sources[state]))
            yield f"{name}: what was written later was there before the state {state} of {by}"
    for each in done:
        told: set[str | None] = set()
        if each.outcome == "done" and each.verb in ("push", "pull", "delete"):
            told = {each.state}
        elif each.outcome in _ABSENT:
            told = {None, deleted(name)}
        if told and not any(
            state in told and first <= each.ended and over >= each.began
            for state, first, over in times
        ):
            yield f"{name}: this was not so while it was told: {each}"
