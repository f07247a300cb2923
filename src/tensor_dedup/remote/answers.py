"""Interpret what a server says of an object, and the texts of obstore's errors. No I/O."""

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Final

from tensor_dedup.remote.environment import scrubbed, told
from tensor_dedup.remote.errors import DamagedRemoteError, RemoteUnreachableError

_MD5: Final = re.compile("[0-9a-f]{32}")
# What obstore says of keys that it cannot use, before it asks anybody.
_KEYS: Final = re.compile(r"[Cc]redential|service account|Access ?Key|pem file|SAS query")


@dataclass(frozen=True, slots=True)
class ObjectStatus:
    """The metadata of an object: its key, size in bytes, tag and modification time.

    The tag (ETag) changes with the content. `modified` is in seconds of the server's clock.
    """

    key: str
    size: int
    tag: str
    modified: float

    def surely_is(self, data: bytes) -> bool:
        """Return whether size and tag prove that the object is `data`.

        Only a tag that is the MD5 of the content does, as on S3.
        """
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return self.size == len(data) and self.tag.strip('"') == md5

    def may_be(self, data: bytes) -> bool:
        """Return False if size or tag show that the object is not `data`.

        A tag that is not an MD5 shows nothing.
        """
        is_sum = _MD5.fullmatch(self.tag.strip('"')) is not None
        return self.size == len(data) and (not is_sum or self.surely_is(data))


def too_large(where: str, size: int, limit: int) -> DamagedRemoteError:
    """Return the error for an object of `size` bytes, more than the `limit` for its kind."""
    return DamagedRemoteError.at(where, f"{size} bytes, the limit is {limit}", size=size)


def status_of(meta: Any) -> ObjectStatus:
    """Convert the metadata that obstore returns for an object."""
    # Azure's has quotes in an answer to HEAD, and none in a list.
    tag = (meta["e_tag"] or "").removeprefix("W/").strip('"')
    return ObjectStatus(meta["path"], meta["size"], tag, meta["last_modified"].timestamp())


def version_of(meta: Any) -> str:
    """Return what a conditional write compares, as JSON: an ETag or, for Google, a version."""
    both = {"e_tag": meta["e_tag"], "version": meta["version"]}
    return json.dumps({key: value for key, value in both.items() if value is not None})


def is_about_credentials(text: str) -> bool:
    """Return whether the text of an obstore error is about credentials."""
    text = told(text)
    # S3 answers 400 where a token has expired, and to HEAD it cannot say so.
    if text.startswith("HEAD ") and "status code: 400 " in text:
        return True
    # S3 answers 400 to these, too.
    tokens = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")
    signs = ("401 ", "403 ", "credential", "Credential", "code: AccessDenied", *tokens)
    return any(sign in text for sign in signs)


def is_about_ranges(text: str) -> bool:
    """Return whether an obstore error is about a range answered with the whole object."""
    signs = ("non-partial response", "Range request not supported")
    return any(sign in text for sign in signs)


def is_about_keys(text: str) -> bool:
    """Return whether an obstore error is about credentials it could not even parse."""
    return _KEYS.search(text) is not None


def raise_panic(where: str, error: BaseException) -> None:
    """Raise RemoteUnreachableError if `error` is a panic of obstore; else return.

    The class of such panics cannot be imported, so they are recognised by its name.
    """
    if type(error).__name__ == "PanicException":
        what = f"obstore cannot go on, as with a wrong setting ({scrubbed(str(error))})"
        raise RemoteUnreachableError.at(where, what) from None
