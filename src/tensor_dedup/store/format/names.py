"""Names of checkpoints and of their files, checked so that none leads elsewhere. No I/O."""

import re
from pathlib import Path, PurePath, PurePosixPath

from tensor_dedup.formats.naming import is_generic
from tensor_dedup.formats.weights import SUFFIXES
from tensor_dedup.store.errors import BadNameError, EscapingPathError

MAX_NAME = 200
# What file systems take as the name of a file, in bytes.
_MAX_FILE = 255
_SLASH = "%2F"
_PART = r"[A-Za-z0-9_][A-Za-z0-9._@+=-]*"
_NAME = re.compile(rf"{_PART}(/{_PART})*")
_UNFIT = re.compile(r"[^A-Za-z0-9._@+=-]+")
_HUB = re.compile(r"models--(?P<name>.+)")


def check_name(name: str) -> str:
    """Return `name` if it is valid for a checkpoint, and its reference for a file.

    Raises:
        BadNameError: the name is invalid.
    """
    if not _fits(check_form(name)):
        what = (
            f"its file would have a name of {len(_file(name))} bytes, {_MAX_FILE} at most; each / "
            "takes three"
        )
        raise BadNameError.at(repr(name), what, name=name)
    return name


def check_form(name: str) -> str:
    """Return `name` if it has the form of a checkpoint's; its file may have too long a name.

    Raises:
        BadNameError: the name has another form.
    """
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise BadNameError.at(
            repr(name[:MAX_NAME]), "this cannot be the name of a checkpoint", name=name
        )
    return name


def name_of(path: Path) -> str:
    """Return the default name of a checkpoint: that of its folder or file.

    A snapshot in a Hugging Face cache is named after its repository, and a file whose name is the
    same in every folder (`model.safetensors`, an index) after its folder.
    """
    for part in reversed(path.parts):
        if match := _HUB.fullmatch(part):
            return _fit("/".join(match["name"].split("--")))
    if path.parent.name and path.suffix and is_generic(path.name):
        return _fit(path.parent.name)
    return _fit(path.stem if path.suffix in SUFFIXES else path.name)


def _fit(text: str) -> str:
    parts = [_UNFIT.sub("-", part).lstrip(".@+=-") for part in text.split("/")]
    return check_name(shortened("/".join(part for part in parts if part)))


def shortened(name: str, ending: str = "") -> str:
    """Return `name`, cut where it is too long, and then `ending`."""
    name = name[: max(0, MAX_NAME - len(ending))]
    while name and not _fits(name + ending):
        name = name[:-1]
    return name.rstrip("/") + ending


def file_of(name: str) -> str:
    """Return the file name of a reference. Names contain no %, so no two share a file name."""
    return _file(check_name(name))


def _file(name: str) -> str:
    return name.replace("/", _SLASH)


def _fits(name: str) -> bool:
    return len(_file(name)) <= _MAX_FILE


def name_in(file: str) -> str | None:
    """Return the name that a reference's file name stands for, or None if it stands for none."""
    name = file.replace(_SLASH, "/")
    return name if len(name) <= MAX_NAME and _NAME.fullmatch(name) else None


def check_path(text: str, manifest: PurePath) -> PurePosixPath:
    """Return the path of a file in an export, if it stays inside.

    Raises:
        EscapingPathError: it could lead outside.
    """
    path = PurePosixPath(text)
    unsafe = not path.parts or path.is_absolute() or ".." in path.parts or "\0" in text
    if unsafe or str(path) != text:
        raise EscapingPathError.at(manifest, f"it names the file {text[:MAX_NAME]!r}", file=text)
    return path
