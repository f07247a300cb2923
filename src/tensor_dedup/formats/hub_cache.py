"""The local Hugging Face cache: where it is, and which snapshot of a repository a name means."""

import os
import re
import shlex
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

    - A `path` that exists is returned unchanged, but for the folder of a repository in a cache: it
      means what ORG/NAME means in that cache (see `snapshot_in`).
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
        return snapshot_in(Path(path))
    repository = cache_path() / (MODELS + named["name"].replace("/", "--"))
    try:
        held = _held(repository)
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


def is_repository(path: Path) -> bool:
    """Return whether `path` is the folder of a model's repository in a Hugging Face cache.

    Such a folder is called `models--ORG--NAME` and has a sub-folder `snapshots` that is no link.
    """
    snapshots = path / SNAPSHOTS
    if not snapshots.is_dir() or snapshots.is_symlink():
        return False
    return Path(os.path.realpath(path)).name.startswith(MODELS)


def snapshot_in(path: Path) -> Path:
    """Return the snapshot that the folder of a repository stands for: that of "main", or the only.

    So does its sub-folder `snapshots`. Any other path is returned unchanged. A snapshot that is a
    link is passed over: it may lead anywhere, and the folder may come from somewhere else.

    Raises:
        NoSuchPathError: The repository has no snapshot, or several and none is that of "main".
    """
    if path.name == SNAPSHOTS and is_repository(path.parent):
        path = path.parent
    if not is_repository(path):
        return path
    held = [each for each in _held(path) if not (path / SNAPSHOTS / each).is_symlink()]
    found = _revisions(path, None, held)
    if len(found) == 1:
        return path / SNAPSHOTS / found[0]
    listed = ", ".join(shlex.quote(str(path / SNAPSHOTS / each)) for each in held)
    what = f"several revisions; name one of {listed}" if held else "no snapshot; download the model"
    raise NoSuchPathError(f"{path}: {what}", path=str(path), revisions=held)


def name_in_store(given: str, found: Path) -> str | None:
    """Return the name that ORG/NAME@REVISION gets in a store, where `locate(given)` is `found`.

    That is `given`, or ORG/NAME@COMMIT with the whole commit if the revision is the beginning of
    it. The result is None if `given` names no revision, or is a path.
    """
    named = _REPOSITORY.fullmatch(given)
    if named is None or not named["revision"] or os.path.lexists(given) or not found.exists():
        return None
    by_commit = found.name.startswith(named["revision"])
    return f"{named['name']}@{found.name}" if by_commit else given


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
    - The path of a repository's folder there ends in the parts of ORG/NAME.
    - Any other path or name is split at its slashes.
    """
    whole, split = (path,), Path(path)
    if "://" in path:
        return whole
    named = _REPOSITORY.fullmatch(path)
    if named is not None and "/" in (named["revision"] or "") and not os.path.lexists(path):
        return whole
    if split.name.startswith(MODELS) and is_repository(split):
        return (*split.parent.parts, *split.name.removeprefix(MODELS).split("--"))
    if split.parent.name == SNAPSHOTS and (folder := split.parent.parent).name.startswith(MODELS):
        *organisation, name = folder.name.removeprefix(MODELS).split("--")
        return (*folder.parent.parts, *organisation, f"{name}@{split.name[:_SHOWN_REVISION]}")
    return split.parts or whole


def _held(repository: Path) -> list[str]:
    return sorted(
        entry.name
        for entry in (repository / SNAPSHOTS).iterdir()
        if entry.is_dir() and not entry.name.startswith(HIDDEN)
    )


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
        path = repository / _REFS / name
        return path.read_text(encoding="ascii").strip() if path.is_file() else ""
    except (OSError, UnicodeDecodeError):
        return ""
