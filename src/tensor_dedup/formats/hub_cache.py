"""The local Hugging Face cache: where it is, and which snapshot of a repository a name means."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tensor_dedup.errors import NoSuchPathError

MODELS: Final = "models--"
SNAPSHOTS: Final = "snapshots"
HIDDEN: Final = "."
_REFS = "refs"
_MAIN = "main"
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_REPOSITORY = re.compile(rf"(?P<name>{_PART}(?:/{_PART})?)(?:@(?P<revision>[^\0]+))?")
_SHOWN_REVISION = 12


def cache_path() -> Path:
    """Return the folder of the Hugging Face cache, which need not exist.

    The first of these that is set counts:

    1. the environment variable HF_HUB_CACHE;
    2. `hub` in the folder that the environment variable HF_HOME names;
    3. `huggingface/hub` in the user's cache folder.
    """
    if named := os.environ.get("HF_HUB_CACHE"):
        return Path(named)
    if home := os.environ.get("HF_HOME"):
        return Path(home) / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or f"{os.environ.get('HOME', '/')}/.cache"
    return Path(cache) / "huggingface" / "hub"


def locate(path: str | os.PathLike[str]) -> Path:
    """Return the path of the checkpoint that `path` means, which may be in the Hugging Face cache.

    - A `path` that exists is returned unchanged.
    - `ORG/NAME` means the cached snapshot of the branch "main" or, if that is not cached, the only
      snapshot in the cache.
    - `ORG/NAME@REVISION` means the cached snapshot of a branch, a tag or a commit. The commit hash
      may be shortened.
    - A name that is not in the cache is returned unchanged.

    Raises:
        NoSuchPathError: The repository is cached, but no snapshot matches the name, or several do.
    """
    named = _REPOSITORY.fullmatch(os.fspath(path))
    if named is None or os.path.lexists(path):
        return Path(path)
    repository = cache_path() / (MODELS + named["name"].replace("/", "--"))
    try:
        held = sorted(
            entry.name
            for entry in (repository / SNAPSHOTS).iterdir()
            if entry.is_dir() and not entry.name.startswith(HIDDEN)
        )
    except OSError:
        return Path(path)
    revision = named["revision"]
    found = _revisions(repository, revision, held)
    if len(found) == 1:
        return repository / SNAPSHOTS / found[0]
    shown = ", ".join(f"{named['name']}@{each[:_SHOWN_REVISION]}" for each in found or held)
    what = f"no revision {revision!r}" if not found else "several revisions"
    raise NoSuchPathError(
        f"{os.fspath(path)}: {what} in {cache_path()}; name one of {shown or 'those you download'}",
        path=os.fspath(path),
        revisions=held,
    )


def may_name(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` looks like a Hugging Face name, `ORG/NAME` or `ORG/NAME@REVISION`."""
    named = _REPOSITORY.fullmatch(os.fspath(path))
    return named is not None and "/" in named["name"]


def name_parts(path: str) -> tuple[str, ...]:
    """Return the parts of a checkpoint's path or name; the last one is its shortest name.

    - A URL such as `store://NAME` is one part, and so is ORG/NAME@REVISION if the revision has
      slashes, as in `org/name@refs/pr/1`: the end of it says nothing about the repository.
    - The path of a snapshot in a Hugging Face cache ends in the parts of ORG/NAME@COMMIT, with the
      first twelve digits of the commit.
    - Any other path or name is split at its slashes.
    """
    whole, split = (path,), Path(path)
    if "://" in path:
        return whole
    named = _REPOSITORY.fullmatch(path)
    if named is not None and "/" in (named["revision"] or "") and not os.path.lexists(path):
        return whole
    if split.parent.name == SNAPSHOTS and (folder := split.parent.parent).name.startswith(MODELS):
        *organisation, name = folder.name.removeprefix(MODELS).split("--")
        return (*folder.parent.parts, *organisation, f"{name}@{split.name[:_SHOWN_REVISION]}")
    return split.parts or whole


def _revisions(repository: Path, revision: str | None, held: Sequence[str]) -> Sequence[str]:
    """The snapshots that a revision may mean: one if it is the name of one or of a branch."""
    if revision is not None and revision in held:
        return [revision]
    branch = _branch(repository, revision or _MAIN)
    if branch in held:
        return [branch]
    return held if revision is None else [each for each in held if each.startswith(revision)]


def _branch(repository: Path, name: str) -> str:
    """The commit that a branch or tag is at; "" where there is none."""
    if ".." in Path(name).parts or Path(name).is_absolute():
        return ""
    try:
        return (repository / _REFS / name).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
