"""Interpret a server's metadata for objects, and the messages of obstore's errors. No I/O."""

import json
import re
from typing import Any, Final

from tensor_dedup.remote.buckets import ObjectStatus
from tensor_dedup.remote.environment import scrubbed, told
from tensor_dedup.remote.errors import RemoteUnreachableError

# What obstore says of keys that it cannot use, before it asks anybody.
_KEYS: Final = re.compile(r"[Cc]redential|service account|Access ?Key|pem file|SAS query")


def status_of(meta: Any) -> ObjectStatus:
    """Convert `meta`, which obstore returns for an object, to an ObjectStatus."""
    # Azure's has quotes in an answer to HEAD, and none in a list.
    tag = (meta["e_tag"] or "").removeprefix("W/").strip('"')
    return ObjectStatus(meta["path"], meta["size"], tag, meta["last_modified"].timestamp())


def version_of(meta: Any) -> str:
    """Return, as JSON text, the version of an object that conditional writes compare.

    `meta` is what obstore returns for the object. It contains an ETag, a version number or both.
    """
    both = {"e_tag": meta["e_tag"], "version": meta["version"]}
    return json.dumps({key: value for key, value in both.items() if value is not None})


def is_about_credentials(text: str) -> bool:
    """Return whether an obstore error means that the server refused the credentials."""
    text = told(text)
    # S3 answers 400 where a token has expired, and to HEAD it cannot say so.
    if text.startswith("HEAD ") and "status code: 400 " in text:
        return True
    # S3 answers 400 to these, too.
    tokens = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")
    signs = ("401 ", "403 ", "credential", "Credential", "code: AccessDenied", *tokens)
    return any(sign in text for sign in signs)


def is_about_conditions(text: str) -> bool:
    """Return whether an error about a conditional write means that the server implements none."""
    return "status code: 501 " in text


def is_about_ranges(text: str) -> bool:
    """Return whether an obstore error means that a server sent a whole object, not a range."""
    signs = ("non-partial response", "Range request not supported")
    return any(sign in text for sign in signs)


def is_about_keys(text: str) -> bool:
    """Return whether an error that obstore raised before any request is about the credentials."""
    return _KEYS.search(text) is not None


def raise_panic(where: str, error: BaseException) -> None:
    """Raise RemoteUnreachableError for the URL `where` if `error` is a panic of obstore.

    Any other error is ignored.
    """
    if type(error).__name__ == "PanicException":
        what = f"obstore cannot go on, as with a wrong setting ({scrubbed(str(error))})"
        raise RemoteUnreachableError.at(where, what) from None
