"""Names of checkpoints and of their files, and checks that no name escapes its folder. No I/O.

A training step that is kept has a second reference beside its own, its *mark*, called
RUN@STEP@keep. A mark is the name of no checkpoint: it only protects the step.
"""

import re
import unicodedata
from pathlib import Path, PurePath, PurePosixPath
from posixpath import normpath

from tensor_dedup.digest import digest
from tensor_dedup.formats.weight_choice import is_generic, shards_of
from tensor_dedup.formats.weights import GGUF_SUFFIX, SUFFIXES
from tensor_dedup.store.errors import BadNameError, EscapingPathError

MAX_NAME = 200
# What file systems take as the name of a file, in bytes.
_MAX_FILE = 255
_SLASH = "%2F"
_PART = r"[A-Za-z0-9_][A-Za-z0-9._@+=-]*"
_NAME = re.compile(rf"{_PART}(/{_PART})*")
_UNFIT = re.compile(r"[^A-Za-z0-9._@+=-]+")
# Eighteen digits fit everywhere; nobody counts further.
STEP_FORM = re.compile(r"(?P<run>.+)@(?P<step>0|[1-9][0-9]{0,17})(?P<mark>@keep)?", re.DOTALL)
MARK = "@keep"
# Behind the name of a run: the step that was saved last.
LATEST = "@latest"
_GGUF_PART = re.compile(r"-\d{5}-of-\d{5}$")
_HUB = re.compile(r"models--(?P<name>.+)")
_MARKED = 8  # digits of a digest in a name


def check_name(name: str) -> str:
    """Return `name` if it is a valid checkpoint name.

    The name must have the syntax of a checkpoint name (see `check_form`). The file name that is
    made from it (see `file_of`) must not be too long.

    Raises:
        BadNameError: The name is invalid or too long.
    """
    if not _fits(check_form(name)):
        what = (
            f"its file would have a name of {len(_file(name))} bytes, {_MAX_FILE} at most; each / "
            "takes three"
        )
        raise BadNameError.at(repr(name), what, name=name)
    return name


def check_form(name: str) -> str:
    """Return `name` if it has the syntax of a checkpoint name.

    A checkpoint name has at most 200 characters: ASCII letters, digits, `._@+=-`, and slashes
    between its parts. Each part begins with a letter, a digit or an underscore.

    Raises:
        BadNameError: The name does not have that syntax or is too long.
    """
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise BadNameError.at(
            repr(name[:MAX_NAME]), "this cannot be the name of a checkpoint", name=name
        )
    return name


def marked_by(name: str) -> str | None:
    """Return the name of the step that the mark `name` keeps, or None if `name` is no mark."""
    found = STEP_FORM.fullmatch(name)
    return name.removesuffix(MARK) if found is not None and found["mark"] else None


def run_of_latest(name: str) -> str | None:
    """Return RUN if `name` is RUN@latest, the step of RUN that was saved last, else None."""
    return name.removesuffix(LATEST) or None if name.endswith(LATEST) else None


def name_of(path: Path) -> str:
    """Return the default checkpoint name for the folder or file at `path`.

    The first of these rules that applies decides:

    1. One of several numbered files is named by its file name without the suffix.
    2. A folder or file in a Hugging Face cache is named after its repository.
    3. A file with a generic name (`model.safetensors`, an index) is named after its folder.
    4. A split GGUF model (`m-00001-of-00003.gguf`) is named without the number of the part.
    5. Any other file is named by its file name without the suffix, and a folder by its folder name.

    Where a checkpoint's name cannot have a character, its ASCII form stands for it (`e` for `é`),
    or else a hyphen. If a character that is not ASCII has no such form, or nothing is left, eight
    digits of the text's digest end the name, so that two folders in another script differ.

    Raises:
        BadNameError: The path has no name, as `/` has none.
    """
    text = own_name(path)
    if not text:
        raise BadNameError(f"{path}: no name follows from it; give one: `import --name N`")
    return fit(text)


def own_name(path: Path) -> str:
    """Return the text from which `name_of` makes the default name for `path`."""
    path = Path(normpath(path))
    if shards_of(path.name):
        return stem_of(path)
    for part in reversed(path.parts):
        if match := _HUB.fullmatch(part):
            return "/".join(match["name"].split("--"))
    if path.parent.name and path.suffix and is_generic(path.name):
        return path.parent.name
    return stem_of(path)


def stem_of(path: PurePath) -> str:
    """Return the name of a file of weights without its suffix and the number of a GGUF part.

    For another file or a folder, that is its whole name.
    """
    if path.suffix == GGUF_SUFFIX:
        return _GGUF_PART.sub("", path.stem)
    return path.stem if path.suffix in SUFFIXES else path.name


def fit(text: str, *, marked: bool = False) -> str:
    """Return `text` as a checkpoint name, with the replacements that `name_of` describes.

    The end of a long text is cut. With `marked`, the digits of the digest end the name in any case.
    """
    apart = unicodedata.normalize("NFKD", text)
    letters = "".join(each for each in apart if not unicodedata.combining(each))
    parts = [_UNFIT.sub("-", part).lstrip(".@+=-") for part in letters.split("/")]
    name = "/".join(part for part in parts if part)
    if marked or not (name and letters.isascii()):
        # Of one form, since file systems differ in which they keep.
        same = unicodedata.normalize("NFC", text).encode("utf-8", "surrogatepass")
        name = shortened(name.rstrip("-") or "checkpoint", f"-{digest(same)[:_MARKED]}")
    return check_name(shortened(name))


def shortened(name: str, ending: str = "") -> str:
    """Return `name` followed by `ending`; `name` is cut if the result would be too long."""
    name = name[: max(0, MAX_NAME - len(ending))]
    while name and not _fits(name + ending):
        name = name[:-1]
    return name.rstrip("/") + ending


def file_of(name: str) -> str:
    """Return the name of the file that stores the reference of the checkpoint `name`.

    Different checkpoint names give different file names.

    Raises:
        BadNameError: The name is invalid.
    """
    return _file(check_name(name))


def _file(name: str) -> str:
    return name.replace("/", _SLASH)


def _fits(name: str) -> bool:
    return len(_file(name)) <= _MAX_FILE


def name_in(file: str) -> str | None:
    """Return the checkpoint name that `file`, the file name of a reference, stands for.

    Return None if `file` is not the file name of a reference.
    """
    name = file.replace(_SLASH, "/")
    return name if len(name) <= MAX_NAME and _NAME.fullmatch(name) else None


def check_path(text: str, manifest: PurePath) -> PurePosixPath:
    """Check that the file path `text` stays inside the folder of an export; return it as a path.

    Errors name `manifest`, the path of the manifest that contains `text`.

    Raises:
        EscapingPathError: The path is absolute, contains `..` or NUL, or is not in normal form.
    """
    path = PurePosixPath(text)
    unsafe = not path.parts or path.is_absolute() or ".." in path.parts or "\0" in text
    if unsafe or str(path) != text:
        raise EscapingPathError.at(manifest, f"it names the file {text[:MAX_NAME]!r}", file=text)
    return path
