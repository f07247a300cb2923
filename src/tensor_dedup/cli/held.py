"""What a memory manager has of a name: its verbs say so where it has nothing."""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import PurePath
from typing import Final

from tensor_dedup.cli.errors import WrongUse
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.client.names import checkpoint_name, printed

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class HeldName:
    """What a name means to a manager: is anything of it in memory, and is it pinned?"""

    here: bool
    pinned: bool


def name_of(admin: Admin, given: str) -> str:
    """What the manager calls it: this very name, or else that of the path it is from here."""
    name = printed(given)
    held = look_up(admin, name)
    return name if held.here or held.pinned else checkpoint_name(given)


def look_up(admin: Admin, name: str) -> HeldName:
    """What the manager has of a checkpoint's name or of a digest."""
    pinned = name in admin.totals().pins
    if _DIGEST.fullmatch(name):
        here = any(row.digest == name for row in admin.overview().residents)
    else:
        here = name in _names(admin)
    return HeldName(here, pinned)


def not_held_error(admin: Admin, name: str, advice: str = "") -> WrongUse:
    """Nothing of that name is here: what is, the nearest names first."""
    offer = _offer(admin, name)
    more = f"{' ' if offer.endswith('?') else '; '}{advice}" if advice else ""
    return WrongUse(f"nothing of {name!r} is in the memory manager; {offer}{more}")


def _offer(admin: Admin, name: str) -> str:
    names = _names(admin)
    if not names:
        return "it holds no checkpoint yet, as `tensor-dedup status` shows"
    close = _close(name, names)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    shown = ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
    return f"`tensor-dedup status` lists {shown}"


def _names(admin: Admin) -> list[str]:
    return [row.name for row in admin.overview(residents=False).checkpoints]


def _close(name: str, names: list[str]) -> list[str]:
    """Those that end like it, or look like it; most people write a path's last part."""
    last = PurePath(name).name
    same = [each for each in names if last and PurePath(each).name == last]
    ends = {PurePath(each).name: each for each in names}
    near = [ends[end] for end in get_close_matches(last, ends, _SHOWN)]
    return list(dict.fromkeys([*same, *near, *get_close_matches(name, names, _SHOWN)]))[:_SHOWN]
