"""Open buckets by URL: folders, object storage and plain web servers. No I/O."""

import re
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from tensor_dedup.errors import NotInstalledError
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.errors import RemoteUrlError
from tensor_dedup.remote.folder_bucket import FolderBucket
from tensor_dedup.store.files import Files
from tensor_dedup.suggestions import install_hint
from tensor_dedup.types import mistyped_scheme

_SERVERS: Final = ("s3", "gs", "az")
_WEB: Final = ("http", "https")
_HOST: Final = re.compile(r"[A-Za-z0-9._-]+(:[0-9]+)?|\[[0-9A-Fa-f:]+\](:[0-9]+)?")
# Of what lacks its scheme, or has one that no remote has: a path of a folder begins otherwise.
_USER_IN_PATH: Final = re.compile(r"//.*@|[^./:][^/:]*:.*@", re.DOTALL)


def last_component(url: str) -> str:
    """Return the last component of the path of `url`, or of its host, or "" if there is none.

    A run that is published at a URL is called after it.
    """
    return url.rstrip("/").rpartition("/")[2]


def open_bucket(url: str, files: Files) -> Bucket:
    """Return the bucket that `url` names, without sending a request.

    A text without a scheme is the path of a folder, which is accessed through `files`.

    Raises:
        RemoteUrlError: The URL does not name a bucket, or contains a credential.
        NotInstalledError: The package obstore is not installed.
        RemoteUnreachableError, RemoteAccessError: An environment variable that obstore reads has
            an unusable value.
    """
    scheme, colon, _ = url.partition("://")
    if (mistyped := mistyped_scheme(url)) is not None:
        raise RemoteUrlError.at(f"{mistyped}...", "it is no URL, for two slashes are missing")
    if not colon:
        return _folder(url, files)
    try:
        parts = urlsplit(url)
        _ = parts.port  # which may be no number
    except ValueError:
        raise RemoteUrlError.at(f"{scheme}://...", "it is no URL") from None
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        host = parts.hostname or ""
        shown = f"{scheme}://{host}{parts.path}" if "\\" not in url else f"{scheme}://..."
        raise RemoteUrlError.at(shown, "a user, a password or a query in it may be a secret")
    # The beginning of a password may pass for a port: what is before an @ is shown nowhere.
    if parts.port is not None and (scheme in _SERVERS or "@" in parts.path):
        what = "what it has for a port may be of a secret; a bucket has none, and %40 is an @"
        raise RemoteUrlError.at(f"{scheme}://...", what)
    if scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path:
            what = "a folder's URL has three slashes: file:///folder"
            raise RemoteUrlError.at(f"{scheme}://...", what)
        return _folder(unquote(parts.path), files)
    # Of a URL of another form nobody knows where its secrets stand.
    if scheme not in (*_SERVERS, *_WEB):
        raise RemoteUrlError.at(f"{scheme}://...", f"no remote has the scheme {scheme!r}")
    if not parts.netloc:
        raise RemoteUrlError.at(f"{scheme}://...", "it names no host or bucket")
    _check_place(url, parts)
    return _server(scheme, url.rstrip("/"))


def _server(scheme: str, url: str) -> Bucket:
    try:
        from tensor_dedup.remote.server_bucket import ServerBucket, WebBucket
    except ImportError as error:
        what = f"needs obstore, which is not installed; {install_hint('remote')}"
        raise NotInstalledError(f"{url}: {what}", url=url) from error
    return WebBucket(url) if scheme in _WEB else ServerBucket(url)


def _check_place(url: str, parts: SplitResult) -> None:
    if not _HOST.fullmatch(parts.netloc):
        what = "its host or bucket cannot be the name of one"
        raise RemoteUrlError.at(f"{parts.scheme}://...", what)
    # What sends requests resolves these, or finds other keys than it was given when it lists.
    path = unquote(parts.path)
    if {*"?#;"} & {*path}:
        what = "what follows a ; or an encoded ? or # in it may be a secret"
        raise RemoteUrlError.at(f"{parts.scheme}://{parts.netloc}/...", what)
    if "\\" in path or {".", ".."} & {*path.split("/")}:
        raise RemoteUrlError.at(url, "no part of it may be . or .., nor have a backslash in it")


def _folder(path: str, files: Files) -> FolderBucket:
    if _USER_IN_PATH.match(path):
        what = "it is no URL, and a user or a password in it may be a secret; a path begins with ./"
        raise RemoteUrlError.at("...", what)
    if "\0" in path:
        raise RemoteUrlError.at(repr(path), "no path has a NUL in it")
    if not path.strip():
        # It would be the folder that the program happens to run in.
        raise RemoteUrlError.at("''", "it is empty, as a variable is that is not set")
    if path == "~" or path.startswith("~/"):
        # It would be a folder of this name.
        raise RemoteUrlError.at(path, "no shell has replaced the ~; write the path in full")
    try:
        return FolderBucket(Path(path).absolute(), files)
    except FileNotFoundError:
        what = "it is relative, and the working folder is gone"
        raise RemoteUrlError.at(path, what) from None
