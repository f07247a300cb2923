"""What stands in place of weights: a pointer of Git LFS or Git Xet, an error page, text. No I/O.

A clone without Git LFS leaves pointers, and a download that failed may leave what the server said.
"""

import codecs
import re
from typing import Final

from tensor_dedup.formats.errors import CheckpointFault, CheckpointFilesError, shorten

HEAD_BYTES: Final = 1024
_LFS = re.compile(rb"version https?://(?:git-lfs|hawser)\.github\.com/spec/[^\n]*\n")
_LFS_SIZE = re.compile(rb"^size (\d{1,18})$", re.MULTILINE)
_XET = re.compile(rb"# xet version [^\n]*\n")
_XET_SIZE = re.compile(rb"^filesize = (\d{1,18})$", re.MULTILINE)
_KINDS = (
    (re.compile(r"<!doctype html|<html", re.IGNORECASE), "an HTML page"),
    (re.compile(r"<\?xml|<Error>"), "an XML document"),
    (re.compile(r"[{\[]"), "a JSON document"),
)
_SHOWN: Final = 60
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def placeholder(head: bytes, path: str) -> CheckpointFilesError | None:
    """Return the error about a file that is no weights but stands in their place, or None.

    `head` is the beginning of the file, at most HEAD_BYTES. `path` is used in the message only.
    """
    for kind, begins, size, command in (
        ("a Git LFS pointer", _LFS, _LFS_SIZE, "git lfs pull"),
        ("a Git Xet pointer", _XET, _XET_SIZE, "git xet checkout"),
    ):
        if begins.match(head):
            found = size.search(head)
            nbytes = int(found[1]) if found is not None else None
            missing = "the weights" if nbytes is None else _size(nbytes)
            what = f"{kind} ({missing} are not here): {command}"
            return CheckpointFilesError.at(CheckpointFault.POINTER, path, what, nbytes=nbytes)
    text = _text(head)
    if text is None:
        return None
    named = next((name for begins, name in _KINDS if begins.match(text)), "text")
    shown = shorten(" ".join(text.split()))[:_SHOWN]
    return CheckpointFilesError.at(
        CheckpointFault.TEXT, path, f"{named} in place of weights: {shown!r}"
    )


def _size(nbytes: int) -> str:
    for unit, name in _UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} bytes"


def _text(head: bytes) -> str | None:
    # Of a longer file, `head` may end within a character.
    whole = len(head) < HEAD_BYTES
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head, final=whole).strip()
    except UnicodeDecodeError:
        return None
    return text if text and all(c.isprintable() or c in "\t\r\n\f" for c in text) else None
