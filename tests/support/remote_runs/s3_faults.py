"""S3's protocol over real sockets, with everything that goes wrong between a client and a server.

`MemoryS3` answers requests from the objects of a `MemoryBucket`, whose clock the test sets;
`RealS3` passes them on to a server that runs. A `FaultyProxy` stands before either and strikes one
request. `Turns` lets several clients' requests through one by one, in an order that a seed names.
"""

import hashlib
import http.client
import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from email.utils import formatdate
from typing import Any, Final, Protocol
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

from remote_runs.remotes import Listener, MemoryBucket, Proxy
from tensor_dedup.remote import Remote
from tensor_dedup.remote.server_bucket import ServerBucket

_XML: Final = '<?xml version="1.0" encoding="UTF-8"?>'
_DATED: Final = {"Last-Modified": formatdate(0, usegmt=True)}
_LISTED_AT_ONCE: Final = 1000
# What one request can suffer. A fault "for good" strikes every repetition of the request, too.
ONCE: Final = ("lost before", "lost after", "500", "503", "truncated", "delayed")
FAULTS: Final = (
    *(f"{fault}, {often}" for fault in ONCE for often in ("once", "for good")),
    "duplicated, first answer",
    "duplicated, second answer",
    "stale",
    "wrong, once",
    "wrong, for good",
)


def possible(request: str, fault: str) -> bool:
    """Whether a request of this name can suffer a fault."""
    if fault == "stale":
        return request.startswith(("GET", "HEAD", "LIST"))
    return not (fault.startswith("wrong") and request.startswith(("HEAD", "DELETE")))


@dataclass(frozen=True)
class Request:
    """A request, and what tells it from others: not when it was sent, and not how it is signed."""

    verb: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def reads(self) -> bool:
        return self.verb in ("GET", "HEAD")

    @property
    def deletes(self) -> bool:
        return self.verb == "DELETE" or "?delete" in self.target

    @property
    def key(self) -> str:
        return unquote(self.target.partition("?")[0]).removeprefix("/bucket").lstrip("/")

    @property
    def name(self) -> str:
        """What it is called in a list of cases."""
        if self.deletes:
            return f"DELETE {' '.join(_keys(self.body)) or self.key}"
        if "list-type" in self.target:
            return f"LIST {parse_qs(self.target.partition('?')[2]).get('prefix', [''])[0]}"
        conditions = "".join(f" {n}" for n in ("if-match", "if-none-match") if n in self.headers)
        return f"{self.verb} {self.key}{conditions}"

    @property
    def signature(self) -> tuple[str, ...]:
        picked = (self.headers.get(n, "") for n in ("range", "if-match", "if-none-match"))
        return (self.verb, self.target, *picked, hashlib.md5(self.body).hexdigest())


@dataclass(frozen=True)
class Response:
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


class Upstream(Protocol):
    """Whatever answers requests."""

    def answer(self, request: Request) -> Response: ...


def _keys(body: bytes) -> list[str]:
    return [unquote(key) for key in re.findall(r"<Key>([^<]*)</Key>", body.decode())]


class MemoryS3:
    """The objects of a bucket in memory, by S3's protocol. Each request is one step."""

    def __init__(self, bucket: MemoryBucket) -> None:
        self.bucket = bucket
        self._guard = threading.Lock()

    def answer(self, request: Request) -> Response:
        with self._guard:
            if "?delete" in request.target:
                for key in _keys(request.body):
                    self.bucket.delete(key)
                gone = "".join(
                    f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in _keys(request.body)
                )
                return _xml(f"<DeleteResult>{gone}</DeleteResult>")
            if "list-type" in request.target:
                return self._listed(request)
            if request.verb == "PUT":
                return self._put(request)
            if request.verb == "DELETE":
                self.bucket.delete(request.key)
                return Response(204)
            return self._got(request)

    def _listed(self, request: Request) -> Response:
        asked = parse_qs(request.target.partition("?")[2])
        prefix, after = (asked.get(n, [""])[0] for n in ("prefix", "continuation-token"))
        keys = sorted(k for k in self.bucket.objects if k.startswith(prefix) and k > after)
        page, more = keys[:_LISTED_AT_ONCE], len(keys) > _LISTED_AT_ONCE
        objects = ((key, *self.bucket.objects[key]) for key in page)
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(blob)}</Size><ETag>{_etag(blob)}</ETag>"
            f"<LastModified>{_iso(when)}</LastModified></Contents>"
            for key, blob, _, when in objects
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        truncated = f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        return _xml(f"<ListBucketResult>{truncated}{token}{found}</ListBucketResult>")

    def _put(self, request: Request) -> Response:
        told = request.headers.get("x-amz-content-sha256", "")
        if len(told) == 64 and told != hashlib.sha256(request.body).hexdigest():
            return _xml("<Error><Code>XAmzContentSHA256Mismatch</Code></Error>", 400)
        held = self.bucket.objects.get(request.key)
        wanted = request.headers.get("if-match")
        if wanted is not None and (held is None or _etag(held[0]) != wanted):
            return _xml("<Error><Code>PreconditionFailed</Code></Error>", 412 if held else 404)
        if "if-none-match" in request.headers and held is not None:
            return _xml("<Error><Code>PreconditionFailed</Code></Error>", 412)
        self.bucket.put(request.key, [memoryview(request.body)])
        return Response(200, {"ETag": _etag(request.body)})

    def _got(self, request: Request) -> Response:
        held = self.bucket.objects.get(request.key)
        if held is None:
            return _xml("<Error><Code>NoSuchKey</Code></Error>", 404)
        blob, _, when = held
        headers = {"ETag": _etag(blob), "Last-Modified": formatdate(when, usegmt=True)}
        if request.headers.get("if-match", _etag(blob)) != _etag(blob):
            return _xml("<Error><Code>PreconditionFailed</Code></Error>", 412)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        if wanted is None:
            return Response(200, headers, blob)
        start, last = int(wanted[1]), min(int(wanted[2]), len(blob) - 1)
        if start > last:
            return Response(416, headers)
        headers["Content-Range"] = f"bytes {start}-{last}/{len(blob)}"
        return Response(206, headers, blob[start : last + 1])


class MemoryGoogle(MemoryS3):
    """The same by the XML interface of Google's storage, whose conditions are about generations.

    A stand-in of ours: the emulators that are packaged do not have that interface.
    """

    @staticmethod
    def environment(port: int) -> dict[str, str]:
        """What obstore needs to know of it."""
        account = {
            "gcs_base_url": f"http://127.0.0.1:{port}",
            "disable_oauth": True,
            **dict.fromkeys(("client_email", "private_key", "private_key_id"), ""),
        }
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account)}

    def _put(self, request: Request) -> Response:
        held = self.bucket.objects.get(request.key)
        wanted = request.headers.get("x-goog-if-generation-match")
        if wanted is not None and wanted != _generation(held):
            return _xml("<Error><Code>PreconditionFailed</Code></Error>", 412)
        self.bucket.put(request.key, [memoryview(request.body)])
        more = {"x-goog-generation": _generation(self.bucket.objects[request.key])}
        return Response(200, {"ETag": _etag(request.body), **more})

    def _got(self, request: Request) -> Response:
        found = super()._got(request)
        more = {"x-goog-generation": _generation(self.bucket.objects.get(request.key))}
        return Response(found.status, {**found.headers, **more}, found.body)


class Gateway(MemoryS3):
    """One before such a server, which spoils what pushes rely on.

    It ignores some headers, does not know another (501), and answers a missing key with success and
    the body `missing`.
    """

    def __init__(
        self,
        bucket: MemoryBucket,
        *,
        ignores: Collection[str] = (),
        unknown: str = "",
        missing: bytes | None = None,
    ) -> None:
        super().__init__(bucket)
        self._ignores, self._unknown, self._missing = ignores, unknown, missing

    def answer(self, request: Request) -> Response:
        if self._unknown in request.headers:
            return _xml("<Error><Code>NotImplemented</Code></Error>", 501)
        headers = {n: value for n, value in request.headers.items() if n not in self._ignores}
        found = super().answer(Request(request.verb, request.target, headers, request.body))
        if self._missing is not None and request.reads and found.status == 404:
            return Response(200, {"ETag": _etag(self._missing), **_DATED}, self._missing)
        return found


def _generation(held: tuple[bytes, str, float] | None) -> str:
    return "0" if held is None else held[1].removeprefix("tag ")


def _xml(text: str, status: int = 200) -> Response:
    return Response(status, {"Content-Type": "application/xml"}, f"{_XML}{text}".encode())


def _etag(blob: bytes) -> str:
    return f'"{hashlib.md5(blob).hexdigest()}"'


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


class RealS3:
    """A server at a port of this machine, which keeps its own time."""

    def __init__(self, port: int) -> None:
        self._port = port

    def answer(self, request: Request) -> Response:
        link = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            link.putrequest(request.verb, request.target, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                link.putheader(name, value)
            link.endheaders(request.body)
            found = link.getresponse()
            body = found.read()
        except http.client.HTTPException as error:
            raise ConnectionResetError(request.name) from error
        finally:
            link.close()
        headers = {
            name: value
            for name, value in found.getheaders()
            if name.lower() not in ("content-length", "connection", "transfer-encoding")
        }
        if request.verb == "HEAD":
            headers["Content-Length"] = found.getheader("Content-Length", "0")
        return Response(found.status, headers, body)


class Turns:
    """Lets the requests of several clients through one at a time, in an order that a seed names.

    A client's turn is chosen when all that are still at work have asked for something, so the order
    depends on the seed alone, as long as each client asks for one thing at a time.
    """

    def __init__(self, clients: Iterable[str], seed: int) -> None:
        self._dice = random.Random(seed)
        self._working = {*clients}
        self._asking: dict[str, int] = {}
        self._turn: str | None = None
        self._changed = threading.Condition()
        self.order = ""

    @contextmanager
    def turn(self, client: str) -> Iterator[None]:
        """Wait for the client's turn, which ends with the block."""
        with self._changed:
            self._asking[client] = self._asking.get(client, 0) + 1
            self._choose()
            # A client that does something else for long (a lock, a pause) must not stop the others.
            if not self._changed.wait_for(lambda: self._turn == client, 5):
                self._turn = client
            self._asking[client] -= 1
            self.order += client
        try:
            yield
        finally:
            with self._changed:
                self._turn = None
                self._choose()

    def done(self, client: str) -> None:
        """Say that a client asks for nothing more."""
        with self._changed:
            self._working.discard(client)
            self._choose()

    def _choose(self) -> None:
        asking = sorted(client for client, count in self._asking.items() if count)
        if self._turn is None and asking and self._working <= {*asking}:
            self._turn = self._dice.choice(asking)
            self._changed.notify_all()


class FaultyProxy:
    """A port at which `upstream` answers, but for one request, which suffers a fault.

    `stale` answers what is said to be answered by what was there before.
    """

    def __init__(self, upstream: Upstream, client: str = "a") -> None:
        self.upstream, self._client = upstream, client
        self._guard = threading.Lock()
        self.arm()
        self._listener = Listener(self._serve)
        self.port = self._listener.port

    def arm(
        self,
        at: int = -1,
        fault: str = "",
        *,
        turns: Turns | None = None,
        stale: Upstream | None = None,
        before: Callable[[Request, int], None] | None = None,
        after: Callable[[Request, int], None] | None = None,
    ) -> None:
        """Begin anew: request number `at` from here on will suffer `fault`."""
        with self._guard:
            self._at, self._fault, self._turns, self._stale = at, fault, turns, stale
            self._before, self._after = before, after
            self._struck: tuple[str, ...] | None = None
            self.requests: list[str] = []
            self.bodies: list[int] = []
            self.answered = 0
            self.late: list[Request] = []
            self.struck = False

    def deliver(self) -> None:
        """Carry out what was delayed."""
        for request in self.late:
            self.upstream.answer(request)
        self.late.clear()

    def close(self) -> None:
        self._listener.close()

    def _serve(self, link: socket.socket) -> None:
        with link, link.makefile("rb") as reader, suppress(OSError):
            while (request := _read(reader)) is not None:
                turns = self._turns
                if turns is None:
                    blob = self._handled(request)
                else:
                    with turns.turn(self._client):
                        blob = self._handled(request)
                with self._guard:
                    self.answered += len(blob[0])
                link.sendall(blob[0])
                if blob[1]:
                    link.shutdown(socket.SHUT_RDWR)
                    return

    def _handled(self, request: Request) -> tuple[bytes, bool]:
        """What is sent, and whether the connection ends with it."""
        with self._guard:
            number, fault = len(self.requests), ""
            self.requests.append(request.name)
            self.bodies.append(len(request.body))
            if number == self._at:
                self._struck, self.struck, fault = request.signature, True, self._fault
            elif request.signature == self._struck and self._fault.endswith("for good"):
                fault = self._fault
        if self._before is not None:
            self._before(request, number)
        found = self._struck_by(fault, request)
        if self._after is not None:
            self._after(request, number)
        return found

    def _struck_by(self, fault: str, request: Request) -> tuple[bytes, bool]:
        kind = fault.partition(",")[0]
        if kind in ("lost before", "delayed"):
            if kind == "delayed":
                self.late.append(request)
            return b"", True
        if kind in ("500", "503"):
            more = {"Retry-After": "0"} if kind == "503" else {}
            return _written(request, Response(int(kind), more)), False
        if kind == "stale":
            assert self._stale is not None
            return _written(request, self._stale.answer(request)), False
        if kind == "wrong" and not request.reads:
            spoilt = Request(request.verb, request.target, request.headers, _flipped(request.body))
            return _written(request, self.upstream.answer(spoilt)), False
        found = self.upstream.answer(request)
        if kind == "lost after":
            return b"", True
        if kind == "duplicated":
            again = self.upstream.answer(request)
            return _written(request, again if "second" in fault else found), False
        if kind == "wrong":
            found = Response(found.status, found.headers, _flipped(found.body))
        blob = _written(request, found)
        if kind == "truncated":
            return blob[: len(blob) - len(found.body) // 2 if found.body else len(blob) // 2], True
        return blob, False


def _flipped(body: bytes) -> bytes:
    middle = len(body) // 2
    return (
        body[:middle] + bytes(each ^ 1 for each in body[middle : middle + 1]) + body[middle + 1 :]
    )


def _read(reader: Any) -> Request | None:
    line = reader.readline().decode("latin-1").split(" ")
    if len(line) != 3:
        return None
    headers: dict[str, str] = {}
    while text := reader.readline().decode("latin-1").strip():
        name, _, value = text.partition(":")
        headers[name.lower()] = value.strip()
    return Request(line[0], line[1], headers, reader.read(int(headers.get("content-length", 0))))


def _written(request: Request, response: Response) -> bytes:
    headers = {"Content-Length": str(len(response.body)), **response.headers}
    head = f"HTTP/1.1 {response.status} x\r\n" + "".join(
        f"{k}: {v}\r\n" for k, v in headers.items()
    )
    return f"{head}\r\n".encode() + (b"" if request.verb == "HEAD" else response.body)


def client(port: int, prefix: str | None = None, *, retries: int = 2) -> ServerBucket:
    """A bucket of the server at a port, by obstore, which tries again without a pause."""
    from obstore.store import S3Store

    def opened(url: str, *, sending: bool, once: bool) -> S3Store:
        return S3Store(
            "bucket",
            prefix=prefix,
            endpoint=f"http://127.0.0.1:{port}",
            region="us-east-1",
            access_key_id="testing-key-id",
            secret_access_key="testing-secret-key",
            client_options={"allow_http": True, "timeout": "30s"},
            retry_config={
                "max_retries": 0 if once else retries,
                "retry_timeout": timedelta(seconds=20),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=1),
                    "max_backoff": timedelta(milliseconds=2),
                    "base": 2,
                },
            },
        )

    return ServerBucket(f"s3://bucket/{prefix or ''}", opened)


class Wire:
    """Objects in memory behind a proxy that counts, by S3's protocol, and a remote there."""

    def __init__(self, bucket: MemoryBucket | None = None) -> None:
        self.bucket = bucket or MemoryBucket()
        self.server = FaultyProxy(MemoryS3(self.bucket))
        self.proxy = Proxy(self.server.port)
        self.remote = Remote(client(self.proxy.port))

    def reset(self) -> None:
        """Count from here on."""
        self.proxy.reset()
        self.server.arm()

    def close(self) -> None:
        self.proxy.close()
        self.server.close()
