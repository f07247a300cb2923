"""Requests to a registry over HTTP: their repetition, their timeouts, and to whom credentials go.

A request is repeated where the registry is unreachable or overloaded. A registry that wants a token
gets one from the service that it names. Another host, which blobs and uploads may be on, is sent no
credentials. A registry on this machine (localhost) is reached by http, all others by https.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, Self
from urllib.parse import urlencode, urljoin, urlsplit

import msgspec

from tensor_dedup.errors import NotInstalledError
from tensor_dedup.remote.buckets import Traffic
from tensor_dedup.remote.environment import scrubbed
from tensor_dedup.remote.errors import RemoteAccessError, RemoteUnreachableError
from tensor_dedup.remote.oci.credentials import basic_credential
from tensor_dedup.store.files import RealFiles
from tensor_dedup.suggestions import install_hint

ATTEMPTS: Final = 5
_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 20.0
# To connect, and to read: so long a registry may be silent.
_TIMEOUT_S: Final = (10.0, 60.0)
# Of a request that writes. urllib3 sends under the first, so it is what one slice of a body may
# take. A registry may hash or copy all of a layer before it answers.
_SENDING_S: Final = (60.0, 600.0)
_SLICE_BYTES: Final = 64 << 10
# What is read of an error's body, and of what comes with an answer that has none.
_SAID_BYTES: Final = 1 << 16
# So much of an answer that breaks off may have to come again.
_CHUNK_BYTES: Final = 1 << 20
_AGAIN: Final = frozenset({429, 500, 502, 503, 504})
_REFUSED: Final = frozenset({401, 403})
_HERE: Final = re.compile(r"(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?")
_TOKEN: Final = re.compile("[!-~]+")
_FAILED: Final = re.compile(r"^(<[^>]*>|HTTPS?Connection(Pool)?\([^)]*\)): ")
# A scheme, or a parameter of the scheme before it with a value, quoted or not.
_CHALLENGE: Final = re.compile(
    r"""(?<![^,\s])([\w!#$%&'*+.^`|~-]+)(\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]*)))?"""
)


class BrokenOffError(RemoteUnreachableError):
    """An answer has begun and did not come to its end."""


def wait_after(
    attempt: int, error: RemoteUnreachableError, attempts: int = ATTEMPTS, least_s: float = 0.0
) -> None:
    """Wait before the next attempt, the longer the more there were; raise after the last one."""
    if attempt == attempts - 1:
        raise error
    time.sleep(min(max(_PAUSE_S * 2**attempt, least_s), _LONGEST_PAUSE_S))


class Body:
    """The `nbytes` bytes that a request sends. `chunks` may be called several times."""

    def __init__(self, nbytes: int, chunks: Callable[[], Iterable[bytes | memoryview]]) -> None:
        self._nbytes, self._chunks = nbytes, chunks

    @classmethod
    def of(cls, blob: bytes) -> Self:
        """Return a body that has the bytes of `blob`."""
        return cls(len(blob), lambda: [blob])

    def __len__(self) -> int:
        return self._nbytes

    def __iter__(self) -> Iterator[memoryview]:
        """Iterate over slices so small that a slow connection takes each within its time."""
        for chunk in self._chunks():
            view = memoryview(chunk)
            for start in range(0, len(view), _SLICE_BYTES):
                yield view[start : start + _SLICE_BYTES]

    def in_parts(self, size: int) -> Iterator[bytes]:
        """Iterate over the bytes in parts of `size` bytes, of which the last may be smaller."""
        held = bytearray()
        for chunk in self:
            held += chunk
            if len(held) >= size:
                yield bytes(held[:size])
                del held[:size]
        if held:
            yield bytes(held)


class Answer:
    """The answer to a request.

    `said` is the beginning of the body. With `stream`, the body of a success is still to be read:
    then use the answer as a context manager.
    """

    def __init__(self, found: Any, traffic: Traffic, stream: bool) -> None:
        self._found, self._traffic = found, traffic
        self.status: int = found.status_code
        self.headers: Mapping[str, str] = found.headers
        self.url: str = found.url
        self.said = b"" if stream and found.ok else self._beginning()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._found.close()

    def _beginning(self) -> bytes:
        """The beginning of a body, which may never end; no more of it is read."""
        held = bytearray()
        with self, suppress(BrokenOffError):
            for chunk in self.chunks("", _SAID_BYTES // 4):
                held += chunk
                if len(held) >= _SAID_BYTES:
                    break
        return bytes(held)

    def chunks(self, where: str, step: int | None = None) -> Iterator[bytes]:
        """Iterate over the body, which is that of the object at the URL `where`, in chunks.

        Raises:
            BrokenOffError: The body breaks off.
        """
        import requests

        try:
            for chunk in self._found.iter_content(step or _CHUNK_BYTES):
                self._traffic.add(received=len(chunk), calls=0)
                yield chunk
        except requests.RequestException as error:
            raise BrokenOffError.at(where, _reason(error)) from None

    def check(self, expected: int, where: str) -> None:
        """Check the status of an answer about the object at the URL `where`.

        Raises:
            RemoteAccessError: The registry refuses access.
            RemoteUnreachableError: The status is another one, and is not `expected`.
        """
        if self.status != expected:
            refused = self.status in _REFUSED
            raise (RemoteAccessError if refused else RemoteUnreachableError).at(where, self.words())

    def words(self) -> str:
        """Return the status, and what the registry says of an error, for messages."""
        what = f"it answers {self.status}"
        unfit = msgspec.DecodeError, AttributeError, KeyError, IndexError, TypeError, ValueError
        with suppress(*unfit, RecursionError):
            said = msgspec.json.decode(self.said)["errors"][0]
            what += f" ({said['code']}: {said.get('message', '')})"
        return scrubbed(what)


class RegistryConnection:
    """Connections to the registry `host`. Safe from any thread.

    `url` is that of an artifact there, for messages. `root` is the URL below which paths lie.
    """

    def __init__(self, url: str, host: str, path: str) -> None:
        """Look up the credentials; no request is sent yet.

        Raises:
            NotInstalledError: The package requests, of the extra `oci`, is not installed.
            RemoteAccessError: A file with credentials cannot be read.
        """
        try:
            import requests
        except ImportError as error:
            what = f"needs requests, which is not installed; {install_hint('oci')}"
            raise NotInstalledError(f"{url}: {what}", url=url) from error
        self._session: Any = requests.Session()
        # Or requests sends what ~/.netrc has, to any host, and in place of a token.
        self._session.trust_env = False
        bundles = (os.environ.get(f"{name}_CA_BUNDLE") for name in ("REQUESTS", "CURL"))
        self._session.verify = next(filter(None, bundles), True)
        self.root = f"{'http' if _HERE.fullmatch(host) else 'https'}://{host}{path}"
        self._url, self._origin = url, origin(self.root)
        self._basic = basic_credential(url, host, RealFiles())
        self._lock, self._header = threading.Lock(), dict[str, str]()
        self.traffic = Traffic()

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def request(
        self,
        verb: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
        *,
        stream: bool = False,
        attempts: int = ATTEMPTS,
    ) -> Answer:
        """Send a request to a path below `root`, or to a URL, and return the answer.

        With `stream`, its body is still to be read.

        Raises:
            RemoteUnreachableError: None of the attempts was answered.
            RemoteAccessError: The registry wants a token that it does not give.
        """
        url, sent = urljoin(self.root, path), headers or {}
        # An upload may have its place on another host, which must not see the credentials.
        is_own = origin(url) == self._origin

        def send() -> Answer:
            used = self._header
            answer = self._send(verb, url, {**sent, **(used if is_own else {})}, body, stream)
            # Nor may a host that a request was led on to say where they are to go.
            if answer.status not in _REFUSED or origin(answer.url) != self._origin:
                return answer
            if not self._authenticate(answer.headers.get("Www-Authenticate", ""), used):
                return answer
            new = self._header if is_own else {}
            return self._send(verb, url, {**sent, **new}, body, stream)

        return self._repeated(send, attempts)

    def _send(
        self,
        verb: str,
        url: str,
        headers: Mapping[str, str],
        body: Body | None = None,
        stream: bool = False,
    ) -> Answer:
        from requests.utils import get_environ_proxies

        self.traffic.add(sent=0 if body is None else len(body))
        found = self._session.request(
            verb,
            url,
            headers=headers,
            data=body,
            stream=True,
            timeout=_TIMEOUT_S if verb in ("GET", "HEAD") else _SENDING_S,
            proxies=get_environ_proxies(url),
        )
        return Answer(found, self.traffic, stream)

    def _repeated(
        self, send: Callable[[], Answer], attempts: int = ATTEMPTS, what: str = ""
    ) -> Answer:
        for attempt in range(attempts):
            least_s = 0.0
            try:
                answer = send()
                if answer.status not in _AGAIN:
                    return answer
                failure = answer.words()
                with suppress(ValueError):
                    least_s = float(answer.headers.get("Retry-After", ""))
            except OSError as error:  # as those of requests are, and others that it lets pass
                failure = _reason(error)
            error_ = RemoteUnreachableError.at(self._url, f"{what}{failure}")
            wait_after(attempt, error_, attempts, least_s)
        raise AssertionError

    def _authenticate(self, challenge: str, used: Mapping[str, str]) -> bool:
        """Get what the registry asks for, once for all threads; whether there is anything new."""
        asked = _challenges(challenge)
        with self._lock:
            if used is not self._header:
                return True  # another thread was first
            mine = {"Authorization": f"Basic {self._basic}"} if self._basic else {}
            new = mine if "basic" in asked else {}
            if "bearer" in asked:
                # Anew: a token that was good for reading is not one for writing.
                token = self._token(asked["bearer"], mine)
                new = {"Authorization": f"Bearer {token}"} if token else {}
            if not new or new == self._header:
                return False
            self._header = new
            return True

    def _token(self, wanted: Mapping[str, str], headers: Mapping[str, str]) -> str | None:
        """Ask where a challenge says for the token that it wants; None: it gives none."""
        realm = wanted.get("realm", "")
        scheme, host, _ = origin(realm) or (None, None, None)
        if scheme not in ("http", "https") or not host:
            what = f"it names no token service by a URL, but {scrubbed(realm)[:80]!r}"
            raise RemoteAccessError.at(self._url, what)
        if self.root.startswith("https:") and scheme != "https":
            what = f"its token service has no https: {host[:80]}"
            raise RemoteAccessError.at(self._url, what)
        query = [("service", wanted["service"])] if "service" in wanted else []
        query += [("scope", each) for each in wanted.get("scope", "").split()]
        url = f"{realm}{'&' if '?' in realm else '?'}{urlencode(query)}"
        try:
            what = f"it wants a token from {urlsplit(url).hostname}: "
            answer = self._repeated(partial(self._send, "GET", url, headers), what=what)
            said = msgspec.json.decode(answer.said, type=_Token)
        except (ValueError, RecursionError):  # no URL, or no such answer
            return None
        token = said.token or said.access_token or ""
        return token if answer.status == 200 and _TOKEN.fullmatch(token) else None


class _Token(msgspec.Struct):
    """What a token service answers: one of the two, or both, and then they are the same."""

    token: str | None = None
    access_token: str | None = None


def origin(url: str) -> tuple[str | None, str | None, int | None] | None:
    """Return the scheme, host and port of a URL as requests reads it, or None if it reads none."""
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


def _reason(error: Exception) -> str:
    """Why there was no answer, in the words of the cause.

    requests puts the pool, the path and the connection before them, and these are all that is left
    of a message that is shortened.
    """
    cause = getattr(error.args[0], "reason", None) if error.args else None
    return scrubbed(_FAILED.sub("", str(cause or error)))
