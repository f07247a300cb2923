"""A repository in an OCI registry: its manifests, blobs and referrers.

Credentials are looked up like those of oras: in Docker's configuration file and in credential
helpers, where `docker login` and `oras login` store them. DOCKER_CONFIG and REGISTRY_AUTH_FILE may
name further files. A registry on this machine (localhost) is reached by http, all others by https.
"""

import errno
import hashlib
import logging
import os
import re
import subprocess
import threading
import time
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, Self
from urllib.parse import quote, urlencode, urljoin, urlsplit

import msgspec

from tensor_dedup.errors import NotInstalledError, StoreError
from tensor_dedup.remote.buckets import scrubbed, too_large
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    NoRangesError,
    RemoteAccessError,
    RemoteUnreachableError,
    RemoteUrlError,
)
from tensor_dedup.remote.traffic import Traffic
from tensor_dedup.suggestions import install_hint

_log = logging.getLogger(__name__)

SCHEME: Final = "oci://"
MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
INDEX: Final = "application/vnd.oci.image.index.v1+json"
# What `docker push` makes; who does not accept it is answered with a form without media types.
_DOCKER: Final = "application/vnd.docker.distribution.manifest"
_ACCEPTED: Final = f"{MANIFEST}, {INDEX}, {_DOCKER}.v2+json, {_DOCKER}.list.v2+json"
# What every registry takes at least.
MANIFEST_BYTES: Final = 4 << 20
_HOST: Final = re.compile(r"[A-Za-z0-9.-]+(:[0-9]+)?|\[[0-9A-Fa-f:]+\](:[0-9]+)?")
_PART: Final = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY: Final = re.compile(f"{_PART}(/{_PART})*")
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_PLAIN: Final = re.compile(r"[A-Za-z0-9._/:-]*")
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_HERE: Final = re.compile(r"(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?")
_CONNECTION: Final = re.compile(r"^(<[^>]*>|HTTPS?Connection(Pool)?\([^)]*\)): ")
# A scheme, or a parameter of the scheme before it with a value, quoted or not.
_CHALLENGE: Final = re.compile(
    r"""(?<![^,\s])([\w!#$%&'*+.^`|~-]+)(\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]*)))?"""
)
_TOKEN: Final = re.compile("[!-~]+")
# To connect, and to read: so long a registry may be silent.
_TIMEOUT_S: Final = (10.0, 60.0)
# urllib3 sends under the first of them, so it is what one slice of a body may take. A registry that
# has got all of a layer hashes it, and may copy it, before it answers.
_SENDING_S: Final = (60.0, 600.0)
_SLICE_BYTES: Final = 64 << 10
# A helper may ask its user to unlock something.
_HELPER_S: Final = 120.0
_ATTEMPTS: Final = 5
_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 20.0
# What is read of an error's body, and of what comes with an answer that has none.
_SAID_BYTES: Final = 1 << 16
# So much of an answer that breaks off may have to come again.
_CHUNK_BYTES: Final = 1 << 20
_AGAIN: Final = frozenset({429, 500, 502, 503, 504})
_REFUSED: Final = frozenset({401, 403})


class _BrokenOffError(RemoteUnreachableError):
    """An answer has begun and did not come to its end."""


class BlobContent(Protocol):
    """The bytes of a blob, in chunks.

    The object can be iterated several times, because a failed request is repeated.
    """

    def __len__(self) -> int:
        """Return the number of bytes."""

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the bytes, in chunks."""


class _Slices:
    """A body in slices so small that a slow connection takes each within the time it has."""

    def __init__(self, body: "bytes | BlobContent") -> None:
        self._body = body

    def __len__(self) -> int:
        return len(self._body)

    def __iter__(self) -> Iterator[memoryview]:
        for part in [self._body] if isinstance(self._body, bytes) else self._body:
            view = memoryview(part)
            for start in range(0, len(view), _SLICE_BYTES):
                yield view[start : start + _SLICE_BYTES]


@dataclass(frozen=True, slots=True)
class ArtifactName:
    """The parts of the URL of an artifact.

    The URL is `oci://HOST/REPOSITORY:TAG` or `oci://HOST/REPOSITORY@sha256:...`; `reference` is the
    tag or the digest.
    """

    host: str
    repository: str
    reference: str

    @classmethod
    def parse(cls, url: str) -> "ArtifactName":
        """Parse the URL of an artifact. Without a tag or a digest, the tag is `latest`.

        Raises:
            RemoteUrlError: The text is not the URL of an artifact, or contains a credential.
        """
        host, _, path = url.removeprefix(SCHEME).partition("/")
        if "@" in host:
            what = "a user or a password in it may be a secret"
            raise RemoteUrlError.at(f"{SCHEME}{host.rpartition('@')[2]}/{path}", what)
        named, _, digest = path.partition("@")
        repository, _, tag = named.partition(":")
        reference = digest or tag or "latest"
        form = _DIGEST if digest else _TAG
        fits = _HOST.fullmatch(host) and _REPOSITORY.fullmatch(repository)
        if not fits or not form.fullmatch(reference):
            what = "it is no artifact; write oci://REGISTRY/REPOSITORY:TAG, in lower case"
            # What is wrong in it may be a secret that stands in a wrong place.
            plain = _PLAIN.fullmatch(path) is not None
            shown = f"{host if _HOST.fullmatch(host) else '...'}/{path if plain else '...'}"
            raise RemoteUrlError.at(f"{SCHEME}{shown}", what)
        return cls(host, repository, reference)

    @property
    def is_pinned(self) -> bool:
        """Whether `reference` is a digest. A tag, in contrast, may change."""
        return ":" in self.reference

    @property
    def url(self) -> str:
        """The full URL, with the tag or the digest."""
        mark = "@" if self.is_pinned else ":"
        return f"{SCHEME}{self.host}/{self.repository}{mark}{self.reference}"


@dataclass(frozen=True, slots=True)
class RegistryManifest:
    """The bytes of a manifest or an index in a registry, and their digest (`sha256:...`)."""

    blob: bytes
    digest: str


class _Token(msgspec.Struct):
    """What a token service answers: one of the two, or both, and then they are the same."""

    token: str | None = None
    access_token: str | None = None


class _Credential(msgspec.Struct):
    """What a credential helper says, in its own words."""

    Username: str
    Secret: str


def _credential_files() -> list[str]:
    docker, other = os.environ.get("DOCKER_CONFIG"), os.environ.get("REGISTRY_AUTH_FILE")
    return [*([f"{docker}/config.json"] if docker else []), *([other] if other else [])]


def _ask_helper(artifact: ArtifactName, suffix: str, host: str) -> str | None:
    """Ask one of Docker's credential helpers for a user and a password; None if it has none.

    oras does so, too, but shows what the helper says, which may be a secret, and believes it.
    """
    command = f"docker-credential-{suffix}"
    try:
        found = subprocess.run(
            [command, "get"], input=host.encode(), capture_output=True, timeout=_HELPER_S
        )
    except subprocess.TimeoutExpired:
        what = f"the credential helper {command} does not answer"
        raise RemoteAccessError.at(artifact.url, what) from None
    except OSError as error:
        _log.warning("the credential helper %s cannot be run: %s", command, error.strerror)
        return None
    if found.returncode:
        _log.info("the credential helper %s has nothing for %s", command, host)
        return None
    try:
        said = msgspec.json.decode(found.stdout, type=_Credential)
    except (msgspec.DecodeError, ValueError, RecursionError):
        what = f"the credential helper {command} gave no user and password"
        raise RemoteAccessError.at(artifact.url, what) from None
    return b64encode(f"{said.Username}:{said.Secret}".encode()).decode()


def is_digest(text: str) -> bool:
    """Return whether `text` is a SHA-256 digest in the form `sha256:...`."""
    return _DIGEST.fullmatch(text) is not None


def _origin(url: str) -> tuple[str | None, str | None, int | None] | None:
    """The scheme, host and port of a URL as requests reads it; None: it reads none."""
    from urllib3.util import parse_url

    try:
        parts = parse_url(url)
    except ValueError:
        return None
    port = {"http": 80, "https": 443}.get(parts.scheme or "")
    return parts.scheme, parts.host, parts.port or port


def _challenges(asked: str) -> dict[str, dict[str, str]]:
    """What each scheme in a header `Www-Authenticate` asks for; of equal ones the first counts."""
    found: dict[str, dict[str, str]] = {}
    wanted: dict[str, str] = {}
    for name, has_value, quoted, plain in _CHALLENGE.findall(asked):
        if has_value:
            wanted[name.lower()] = quoted or plain
        else:
            wanted = {}
            found.setdefault(name.lower(), wanted)
    return found


def _strip_credentials(session: Any, following: Any, led_here: Any) -> None:
    """Take the credentials from a request that is led on to another host.

    So does requests, but then adds those that ~/.netrc has for that host, or for any.
    """
    if session.should_strip_auth(led_here.request.url, following.url):
        following.headers.pop("Authorization", None)


def _said(found: Any) -> bytes:
    """The beginning of a body, which may never end; no more of it is read."""
    import requests

    held = bytearray()
    with found, suppress(requests.RequestException):
        for chunk in found.iter_content(_SAID_BYTES // 4):
            held += chunk
            if len(held) >= _SAID_BYTES:
                break
    return bytes(held)


def _answer(found: Any) -> str:
    """What an answer says that is not the one expected: its status, and the registry's words."""
    what = f"it answers {found.status_code}"
    unfit = msgspec.DecodeError, AttributeError, KeyError, IndexError, TypeError, ValueError
    with suppress(*unfit, RecursionError):
        text = found.said if hasattr(found, "said") else _said(found)
        said = msgspec.json.decode(text)["errors"][0]
        what += f" ({said['code']}: {said.get('message', '')})"
    return scrubbed(what)


def _reason(error: Exception) -> str:
    """Why there was no answer, in the words of the cause.

    requests puts the pool, the path and the connection before them, and these are all that is left
    of a message that is shortened.
    """
    cause = getattr(error.args[0], "reason", None) if error.args else None
    return scrubbed(_CONNECTION.sub("", str(cause or error)))


class RegistryRepository:
    """A repository in an OCI registry, with connections to the registry. Safe from any thread.

    Use the object as a context manager, which closes the connections at the end.

    Raises:
        RemoteUnreachableError: From any method, if the registry does not answer or its answer
            cannot be used.
        RemoteAccessError: From any method, if the credentials are missing or refused.
    """

    def __init__(self, name: ArtifactName) -> None:
        """Open the repository of the artifact `name`; no request is sent yet.

        Raises:
            NotInstalledError: The package oras, of the extra `oci`, is not installed.
            RemoteAccessError: A file with credentials cannot be read.
        """
        try:
            from oras.container import Container
            from oras.provider import Registry as Client
        except ImportError as error:
            what = f"needs oras, which is not installed; {install_hint('oci')}"
            raise NotInstalledError(f"{name.url}: {what}", url=name.url) from error
        plain = _HERE.fullmatch(name.host) is not None
        # Of oras we use what it knows of files of credentials. Its requests wait for seconds before
        # they try again, know no ranges and no mounts, and send a token that lacks a scope for
        # ever; those for a token have no timeout, and read an answer to whatever end it has.
        self._client: Any = Client(hostname=name.host, insecure=plain)
        session = self._client.session
        session.rebuild_auth = partial(_strip_credentials, session)
        # Or requests replaces a token by what ~/.netrc has. A session that does not trust the
        # environment does not do so, but knows no proxy either.
        session.auth = lambda request: request
        container = Container(f"{name.host}/{name.repository}")
        self._client.auth._get_auth_from_creds_store = partial(_ask_helper, name)
        try:
            self._client.auth.load_configs(container, _credential_files())
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            # oras takes the files for what they should be. Their text may be a secret.
            where = ", ".join(_credential_files()) or "~/.docker/config.json"
            what = f"{where} cannot be read as a file of credentials ({type(error).__name__})"
            raise RemoteAccessError.at(name.url, what) from None
        self._root = f"{'http' if plain else 'https'}://{name.host}/v2/{name.repository}/"
        self._origin = _origin(self._root)
        self._header: dict[str, str] = {}
        self._lock = threading.Lock()
        # How often credentials were asked for in vain; what asked for them last, and the error.
        self._vain = 0
        self._failed: tuple[str, StoreError | None] = ("", None)
        self.name = name
        self.traffic = Traffic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections to the registry."""
        self._client.session.close()

    def at(self, reference: str) -> str:
        """Return the URL of a manifest or a blob in this repository, for messages.

        `reference` is a tag or a digest.
        """
        mark = "@" if ":" in reference else ":"
        return f"{SCHEME}{self.name.host}/{self.name.repository}{mark}{reference}"

    # --- manifests

    def manifest(self, reference: str) -> RegistryManifest | None:
        """Return the manifest or index with a tag or a digest, or None if there is none.

        Raises:
            DamagedRemoteError: The bytes do not match the requested digest, or are too many.
        """
        accept = {"Accept": _ACCEPTED}
        blob = self._small(f"manifests/{reference}", accept, reference, 4 * MANIFEST_BYTES)
        if blob is None:
            return None
        digest = f"sha256:{hashlib.sha256(blob).hexdigest()}"
        if ":" in reference and digest != reference:
            raise DamagedRemoteError.at(self.at(reference), f"its bytes have the digest {digest}")
        return RegistryManifest(blob, digest)

    def put_manifest(self, reference: str, media_type: str, blob: bytes) -> bool:
        """Write a manifest under a tag or a digest.

        A manifest may have a `subject`, which is another manifest. Returns whether the registry now
        lists this manifest among those that refer to its subject.
        """
        self.traffic.add(sent=len(blob))
        found = self._request("PUT", f"manifests/{reference}", {"Content-Type": media_type}, blob)
        self._check(found, reference, 201)
        return "OCI-Subject" in found.headers

    # --- blobs

    def _blob_path(self, digest: str) -> str:
        """The path of a blob. A manifest names it, and must not lead to another path of the host.

        Raises:
            DamagedRemoteError: The text is not a digest.
        """
        if not is_digest(digest):
            raise DamagedRemoteError.at(self.name.url, f"{digest[:80]!r} is no digest of SHA-256")
        return f"blobs/{digest}"

    def has_blob(self, digest: str) -> bool:
        """Return whether the repository has the blob with this digest."""
        self.traffic.add()
        found = self._request("HEAD", self._blob_path(digest))
        if found.status_code == 404:
            return False
        self._check(found, digest, 200)
        return True

    def blob(self, digest: str, limit: int) -> bytes | None:
        """Return the content of a small blob, or None if the repository does not have the blob.

        Raises:
            DamagedRemoteError: The blob does not match its digest, or has more than `limit` bytes.
        """
        blob = self._small(self._blob_path(digest), {}, digest, limit)
        if blob is None:
            return None
        if digest != f"sha256:{hashlib.sha256(blob).hexdigest()}":
            raise DamagedRemoteError.at(self.at(digest), "its bytes do not have this digest")
        return blob

    def _small(
        self, path: str, headers: Mapping[str, str], reference: str, limit: int
    ) -> bytes | None:
        """What is at a path, which is read no further than to its limit; None: nothing."""
        blob = bytearray()
        for attempt in range(_ATTEMPTS):
            blob.clear()
            with self._request("GET", path, headers, stream=True) as found:
                if found.status_code == 404:
                    return None
                self._check(found, reference, 200)
                with self._once_more(attempt):
                    for chunk in self._streamed(found, reference):
                        blob += chunk
                        if len(blob) > limit:
                            raise too_large(self.at(reference), len(blob), limit)
                    break
        self.traffic.add(received=len(blob))
        return bytes(blob)

    def blob_range(self, digest: str, start: int, stop: int) -> memoryview:
        """Return the bytes of a blob from `start` to `stop`, unverified.

        The result is shorter if the blob ends earlier.

        Raises:
            FileNotFoundError: There is no such blob.
            NoRangesError: The registry sends whole blobs only.
            RemoteUnreachableError: The registry does not answer, or sends more than the range.
        """
        data, path = bytearray(), self._blob_path(digest)
        for attempt in range(_ATTEMPTS):
            if len(data) == stop - start:
                break  # it broke off after the last byte; an empty range is no valid one
            wanted = {"Range": f"bytes={start + len(data)}-{stop - 1}"}
            with self._request("GET", path, wanted, stream=True) as found:
                if found.status_code == 404:
                    raise FileNotFoundError(errno.ENOENT, "no such blob", self.at(digest))
                if found.status_code == 200:
                    raise NoRangesError.at(self.at(digest), "a range was answered with all of it")
                if found.status_code == 416:
                    break
                self._check(found, digest, 206)
                with self._once_more(attempt):
                    for chunk in self._streamed(found, digest):
                        data += chunk
                        if len(data) > stop - start:
                            what = f"a range of {stop - start} bytes was answered with more"
                            raise RemoteUnreachableError.at(self.at(digest), what)
                    break
        self.traffic.add(received=len(data))
        return memoryview(data)

    def chunks(
        self, digest: str, nbytes: int, held: Iterable[bytes | memoryview] = ()
    ) -> Iterator[bytes]:
        """Iterate over a blob of `nbytes` bytes in chunks, and compare the digest at the end.

        `held` has the first bytes of the blob, from an earlier attempt. They count in the digest,
        but are neither requested nor returned. If a response breaks off, the missing bytes are
        requested.

        Raises:
            DamagedRemoteError: The bytes do not match the digest or are too many, or there is no
                blob with this digest.
        """
        hasher, size, path = hashlib.sha256(), 0, self._blob_path(digest)
        for part in held:
            hasher.update(part)
            size += len(part)
        before = size
        for attempt in range(_ATTEMPTS if size < nbytes or not nbytes else 0):
            wanted = {"Range": f"bytes={size}-"} if size else {}
            with self._request("GET", path, wanted, stream=True) as found:
                if found.status_code == 404:
                    raise DamagedRemoteError.at(self.at(digest), "this layer is gone")
                if size and found.status_code == 416:
                    break  # it was cut short behind its last byte
                self._check(found, digest, 206 if size and found.status_code == 206 else 200)
                known = size if found.status_code == 200 else 0
                with self._once_more(attempt):
                    for chunk in self._streamed(found, digest):
                        new = chunk[known:]
                        known -= len(chunk) - len(new)
                        hasher.update(new)
                        size += len(new)
                        if size > nbytes:
                            raise too_large(self.at(digest), size, nbytes)
                        if new:
                            yield new
                    break
        self.traffic.add(received=size - before)
        if digest != f"sha256:{hasher.hexdigest()}":
            raise DamagedRemoteError.at(self.at(digest), "its bytes do not have this digest")

    @contextmanager
    def _once_more(self, attempt: int) -> Iterator[None]:
        """Pass over an answer that broke off, after a pause, but for the last attempt's."""
        try:
            yield
        except _BrokenOffError:
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(_PAUSE_S * 2**attempt)

    def upload(self, digest: str, content: BlobContent, mount_from: str | None = None) -> bool:
        """Upload a blob that the repository lacks; return whether its bytes were sent.

        `content` has the bytes. They are not sent if the registry can take the blob from its own
        copy in the repository `mount_from`.
        """
        wanted = {"mount": digest} | ({"from": mount_from} if mount_from else {})
        for attempt in range(_ATTEMPTS):
            self.traffic.add()
            begun = self._request("POST", f"blobs/uploads/?{urlencode(wanted)}")
            if begun.status_code == 201:
                return False
            self._check(begun, digest, 202)
            try:
                place = urljoin(self._root, begun.headers.get("Location", ""))
            except ValueError:
                what = "it names no place for an upload that is a URL"
                raise RemoteUnreachableError.at(self.at(digest), what) from None
            mark = "&" if urlsplit(place).query else "?"
            try:
                done = self._request(
                    "PUT",
                    f"{place}{mark}digest={quote(digest)}",
                    {"Content-Type": "application/octet-stream"},
                    content,
                    attempts=1,
                )
            except RemoteUnreachableError:
                if attempt == _ATTEMPTS - 1:
                    raise
                if self.has_blob(digest):  # and the answer was lost
                    return True
                continue
            self.traffic.add(sent=len(content))
            self._check(done, digest, 201)
            return True
        raise AssertionError

    # --- requests

    def _request(
        self,
        verb: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: "bytes | BlobContent | None" = None,
        *,
        stream: bool = False,
        attempts: int = _ATTEMPTS,
        is_for_token: bool = False,
    ) -> Any:
        import requests

        url, asked, pause = urljoin(self._root, path), is_for_token, _PAUSE_S
        failure = ""
        while attempts:
            # A registry that is asked to mount a layer may copy it before it answers.
            reads = (_TIMEOUT_S[0], _SENDING_S[1]) if verb == "POST" else _TIMEOUT_S
            # An upload may have its place on another host, which must not see the credentials.
            is_mine = _origin(url) == self._origin and not is_for_token
            vain = self._vain
            sent = {**(headers or {}), **(self._header if is_mine else {})}
            try:
                found: Any = self._client.session.request(
                    verb,
                    url,
                    headers=sent,
                    data=None if body is None else _Slices(body),
                    stream=True,
                    timeout=reads if body is None else _SENDING_S,
                )
            except requests.RequestException as error:
                failure = _reason(error)
            else:
                # Nor may a host that a request was led on to say where they are to go.
                own = _origin(found.url) == self._origin
                if found.status_code in _REFUSED and own and not asked:
                    asked, found.said = True, _said(found)
                    if self._authenticate(found, sent, vain):
                        continue
                if found.status_code not in _AGAIN:
                    if not stream and not hasattr(found, "said"):
                        found.said = _said(found)
                    return found
                failure = _answer(found) if attempts == 1 else ""
                found.close()
                with suppress(ValueError):
                    pause = max(pause, float(found.headers.get("Retry-After", "")))
            attempts -= 1
            if attempts:
                time.sleep(min(pause, _LONGEST_PAUSE_S))
                pause *= 2
        if is_for_token:
            failure = f"it wants a token from {urlsplit(url).hostname}: {failure}"
        raise RemoteUnreachableError.at(self.name.url, failure)

    def _authenticate(self, refused: Any, sent: Mapping[str, str], vain: int) -> bool:
        """Get what the registry asks for, once for all threads; whether there is anything new.

        `vain` is how often that had been in vain when the request was sent. If it was since, that
        is the answer to this one too: each thread would wait for a service that is silent.
        """
        challenge = refused.headers.get("Www-Authenticate", "")
        with self._lock:
            if sent.get("Authorization") != self._header.get("Authorization"):
                return True  # another thread was first
            if self._vain == vain or self._failed[0] != challenge:
                failure: StoreError | None = None
                try:
                    if self._renew(_challenges(challenge)):
                        return True
                except StoreError as error:
                    failure = error
                self._vain, self._failed = self._vain + 1, (challenge, failure)
            if (failure := self._failed[1]) is not None:
                raise copy(failure)  # each thread adds its own traceback
            return False

    def _renew(self, asked: Mapping[str, Mapping[str, str]]) -> bool:
        basic = getattr(self._client.auth, "_basic_auth", None)
        mine = {"Authorization": f"Basic {basic}"} if basic else {}
        new = mine if "basic" in asked else {}
        if "bearer" in asked:
            # Anew: a token that was good for reading is not one for writing.
            token = self._token(asked["bearer"], mine)
            new = {"Authorization": f"Bearer {token}"} if token else {}
        fresh = bool(new) and new != self._header
        self._header = new or self._header
        return fresh

    def _token(self, wanted: Mapping[str, str], headers: Mapping[str, str]) -> str | None:
        """Ask where a challenge says for the token that it wants; None: it gives none."""
        realm = wanted.get("realm", "")
        scheme, host, _ = _origin(realm) or (None, None, None)
        if scheme not in ("http", "https") or not host:
            what = f"it names no token service by a URL, but {scrubbed(realm)[:80]!r}"
            raise RemoteAccessError.at(self.name.url, what)
        if self._root.startswith("https:") and scheme != "https":
            what = f"its token service has no https: {host[:80]}"
            raise RemoteAccessError.at(self.name.url, what)
        query = [("service", wanted["service"])] if "service" in wanted else []
        query += [("scope", each) for each in wanted.get("scope", "").split()]
        mark = "&" if "?" in realm else "?"
        try:
            found = self._request(
                "GET", f"{realm}{mark}{urlencode(query)}", headers, is_for_token=True
            )
            said = msgspec.json.decode(found.said, type=_Token)
        except (ValueError, RecursionError):  # no URL, or no such answer
            return None
        token = said.token or said.access_token or ""
        return token if found.status_code == 200 and _TOKEN.fullmatch(token) else None

    def _check(self, found: Any, reference: str, expected: int) -> None:
        status = found.status_code
        if status == expected:
            return
        kind = RemoteAccessError if status in _REFUSED else RemoteUnreachableError
        raise kind.at(self.at(reference), _answer(found))

    def _streamed(self, found: Any, reference: str) -> Iterator[bytes]:
        import requests

        try:
            yield from found.iter_content(_CHUNK_BYTES)
        except requests.RequestException as error:
            raise _BrokenOffError.at(self.at(reference), _reason(error)) from None
