"""Remotes in memory that lose, repeat, delay and spoil what is asked of them, and a real server.

`MemoryBucket` is a server without a network: objects in a dict, conditions under a lock, a clock
that the test sets. `Faulty` stands before any bucket and does one thing wrong at one call. `Proxy`
counts what goes over a socket. `s3` is a server that speaks S3's protocol, on the loopback address.
"""

import atexit
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tensor_dedup.remote.buckets import Bucket, ObjectStatus, too_large
from tensor_dedup.remote.errors import RemoteUnreachableError

Chunks = Sequence[memoryview] | Iterator[memoryview]


class MemoryBucket(Bucket):
    """Objects in memory. Without `conditions` it writes whatever it is told, as some gateways do.

    `clock` is the server's, in seconds.
    """

    def __init__(self, *, conditions: bool = True) -> None:
        super().__init__("memory://test")
        self.objects: dict[str, tuple[bytes, str, float]] = {}
        self.clock = 1_000_000.0
        self._conditions = conditions
        self._count = 0
        self._guard = threading.RLock()

    def copied(self) -> "MemoryBucket":
        """Another one with the same objects, which gives tags that this one has not given."""
        found = MemoryBucket()
        found.objects, found.clock = dict(self.objects), self.clock
        found._count = self._count + 10_000
        return found

    def get(self, key: str, limit: int) -> tuple[bytes, str] | None:
        with self._guard:
            found = self.objects.get(key)
        self.traffic.add(received=len(found[0]) if found else 0)
        if found is None:
            return None
        if len(found[0]) > limit:
            raise too_large(self.at(key), len(found[0]), limit)
        return found[0], found[1]

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        with self._guard:
            found = self.objects.get(key)
        if found is None:
            raise FileNotFoundError(key)
        self.traffic.add(received=stop - start)
        return memoryview(found[0][start:stop])

    def head(self, key: str) -> ObjectStatus | None:
        self.traffic.add()
        with self._guard:
            found = self.objects.get(key)
        return None if found is None else ObjectStatus(key, len(found[0]), found[1], found[2])

    def put(self, key: str, chunks: Chunks) -> None:
        blob = b"".join(chunks)
        self.traffic.add(sent=len(blob))
        with self._guard:
            self._count += 1
            self.objects[key] = (blob, f"tag {self._count}", self.clock)

    def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
        with self._guard:
            held = self.objects.get(key)
            if self._conditions and (held[1] if held else None) != tag:
                self.traffic.add()
                return False
            self.put(key, [memoryview(data)])
            return True

    def list(self, prefix: str) -> Iterator[ObjectStatus]:
        self.traffic.add()
        with self._guard:
            keys = sorted(key for key in self.objects if key.startswith(prefix))
            found = [self.objects[key] for key in keys]
        for key, (blob, tag, modified) in zip(keys, found, strict=True):
            yield ObjectStatus(key, len(blob), tag, modified)

    def delete(self, key: str) -> None:
        self.traffic.add()
        with self._guard:
            self.objects.pop(key, None)

    def now(self) -> float:
        return self.clock

    def each(self, call: Callable[[Any], Any], items: Any) -> Iterator[Any]:
        # In one thread: requests come in one order.
        yield from map(call, [*items])


class Killed(BaseException):
    """The process is gone: nothing of it runs any more."""


READS = frozenset({"get", "get_range", "head", "list"})
FAULTS = ("lost before", "lost after", "twice", "killed before", "killed after")
READ_FAULTS = ("truncated", "wrong", "stale")


class Faulty(Bucket):
    """Another bucket; at its call number `at` it does `fault`, or calls `meanwhile` before it."""

    def __init__(
        self,
        inner: Bucket,
        at: int = -1,
        fault: str = "",
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(inner.url)
        self.inner, self._at, self._fault, self._meanwhile = inner, at, fault, meanwhile
        self.calls: list[str] = []
        self.struck = False
        self._before: dict[str, tuple[bytes, str]] = {}
        self._guard = threading.RLock()

    def _do(self, verb: str, key: str, call: Callable[[], Any]) -> Any:
        with self._guard:
            number = len(self.calls)
            self.calls.append(f"{verb} {key}")
        if number != self._at:
            return call()
        self.struck = True
        if self._meanwhile is not None:
            self._meanwhile()
            return call()
        if self._fault == "lost before":
            raise RemoteUnreachableError.at(self.at(key), "the request was lost")
        if self._fault == "killed before":
            raise Killed
        found = call()
        if self._fault == "lost after":
            raise RemoteUnreachableError.at(self.at(key), "the answer was lost")
        if self._fault == "killed after":
            raise Killed
        if self._fault == "twice":
            again = call()
            return again if verb in READS or verb == "put_if" else found
        return self._spoilt(verb, key, found)

    def _spoilt(self, verb: str, key: str, found: Any) -> Any:
        if verb == "get" and found is not None:
            blob, tag = found
            if self._fault == "truncated":
                return blob[: len(blob) // 2], tag
            if self._fault == "wrong":
                return bytes([blob[0] ^ 1]) + blob[1:], tag
            return self._before.get(key)
        if verb == "get_range":
            data = bytearray(found)
            if self._fault == "truncated":
                return memoryview(data)[: len(data) // 2]
            if self._fault == "wrong" and data:
                data[len(data) // 2] ^= 1
            return memoryview(data)
        if verb == "head" and self._fault == "stale":
            return None
        if verb == "list" and self._fault in ("stale", "truncated"):
            return found[: len(found) // 2]
        return found

    def get(self, key: str, limit: int) -> tuple[bytes, str] | None:
        found: Any = self._do("get", key, lambda: self.inner.get(key, limit))
        return None if found is None else (found[0], found[1])

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        found: Any = self._do("get_range", key, lambda: self.inner.get_range(key, start, stop))
        return memoryview(found)

    def head(self, key: str) -> ObjectStatus | None:
        found: ObjectStatus | None = self._do("head", key, lambda: self.inner.head(key))
        return found

    def put(self, key: str, chunks: Chunks) -> None:
        blob = b"".join(chunks)
        self._remember(key)
        self._do("put", key, lambda: self.inner.put(key, [memoryview(blob)]))

    def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
        self._remember(key)
        return bool(self._do("put_if", key, lambda: self.inner.put_if(key, data, tag)))

    def _remember(self, key: str) -> None:
        found = self.inner.get(key, 1 << 40)
        if found is not None:
            self._before[key] = found

    def list(self, prefix: str) -> Iterator[ObjectStatus]:
        yield from self._do("list", prefix, lambda: [*self.inner.list(prefix)])

    def delete(self, key: str) -> None:
        self._do("delete", key, lambda: self.inner.delete(key))

    def now(self) -> float:
        return self.inner.now()

    def each(self, call: Callable[[Any], Any], items: Any) -> Iterator[Any]:
        yield from map(call, [*items])


class Listener:
    """A port. A thread serves each connection, and `close` ends all of them."""

    def __init__(self, serve: Callable[[socket.socket], None], port: int = 0) -> None:
        self._serve = serve
        self._server = socket.create_server(("127.0.0.1", port))
        self.port: int = self._server.getsockname()[1]
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._server.accept()
            except OSError:
                return
            self.end_with_it(link)
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def end_with_it(self, link: socket.socket) -> None:
        """Have `close` end `link`, too; at once, if the port is closed already."""
        with self._lock:
            if self._closed:
                hang_up(link)
                return
            self._open = [each for each in self._open if each.fileno() >= 0]
            self._open.append(link)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            hang_up(self._server, *self._open)


class Proxy:
    """Forwards connections to a port of this machine, and counts bytes and requests.

    While it is `blind`, servers do not see that a range is asked for.
    """

    _REQUEST = re.compile(rb"^(GET|PUT|HEAD|POST|DELETE) \S+ HTTP/1\.1\r\n")

    def __init__(self, port: int, at: int = 0) -> None:
        """Forward to `port`. It listens at the port `at`, or at any."""
        self._target = port
        self.sent = self.received = self.requests = 0
        self.blind = False
        self._lock = threading.Lock()
        self._listener = Listener(self._forward, at)
        self.port = self._listener.port

    def reset(self) -> None:
        with self._lock:
            self.sent = self.received = self.requests = 0

    @property
    def nbytes(self) -> int:
        return self.sent + self.received

    def _forward(self, here: socket.socket) -> None:
        """Pass on what either side sends, until one of them is closed."""
        with (
            here,
            suppress(OSError),
            socket.create_connection(("127.0.0.1", self._target)) as there,
        ):
            self._listener.end_with_it(there)
            back = threading.Thread(target=self._pump, args=(there, here, False), daemon=True)
            back.start()
            try:
                self._pump(here, there, True)
            finally:
                back.join()

    def _pump(self, source: socket.socket, target: socket.socket, out: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                with self._lock:
                    if out:
                        self.sent += len(data)
                        self.requests += self._REQUEST.match(data) is not None
                    else:
                        self.received += len(data)
                if out and self.blind:
                    data = re.sub(rb"(?i)\r\nrange: ", b"\r\nX-Not: ", data)
                target.sendall(data)
        except OSError:
            pass
        finally:
            for each in (source, target):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


def hang_up(*sockets: socket.socket) -> None:
    """Close sockets, and wake the threads that wait for them, which closing alone does not."""
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


_VARIABLES = {
    "AWS_ACCESS_KEY_ID": "testing-key-id",
    "AWS_SECRET_ACCESS_KEY": "testing-secret-key",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
}


_S3_SERVER = """
import logging, sys, threading
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer
# It looks at what is there, and then writes: of two conditional writes at once both would succeed.
put, one_at_a_time = S3Response.put_object, threading.Lock()
def put_object(self):
    with one_at_a_time:
        return put(self)
S3Response.put_object = put_object
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


class _S3Server:
    """The process of such a server. It ends with this one, whose tests use it in turn."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _S3_SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        atexit.register(self._end)

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()


_idle_servers: list[_S3Server] = []


@contextmanager
def s3() -> Iterator[Proxy]:
    """A server that speaks S3's protocol with a bucket called `bucket`, behind a counting proxy.

    It is a process of its own: vLLM looks at everything that is imported in its process, and what
    Flask leaves in its modules raises when it is looked at.
    """
    server = _idle_servers.pop() if _idle_servers else _S3Server()
    proxy = Proxy(server.port)
    wanted = {**_VARIABLES, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        import http.client

        for verb, path in (("POST", "/moto-api/reset"), ("PUT", "/bucket")):
            link = http.client.HTTPConnection("127.0.0.1", proxy.port)
            link.request(verb, path)
            assert link.getresponse().status == 200
            link.close()
        proxy.reset()
        yield proxy
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        proxy.close()
        _idle_servers.append(server)


@contextmanager
def web(folder: Path, *, ranges: bool = True) -> Iterator[str]:
    """The URL of a plain web server of a folder's files, which knows ranges at most."""

    class Files(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = folder / unquote(self.path).lstrip("/")
            if not path.is_file():
                self._answer(404, b"", {})
                return
            data, more = path.read_bytes(), {"ETag": f'"{path.stat().st_mtime_ns}"'}
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if wanted is None or not ranges:
                self._answer(200, data, more)
                return
            start, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
            more["Content-Range"] = f"bytes {start}-{last}/{len(data)}"
            self._answer(206, data[start : last + 1], more)

        do_HEAD = do_GET

        def _answer(self, status: int, body: bytes, more: dict[str, str]) -> None:
            self.send_response(status)
            now = "Mon, 23 Nov 2026 00:00:00 GMT"
            for name, value in {
                "Content-Length": str(len(body)),
                "Last-Modified": now,
                **more,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *_: object) -> None:
            """Say nothing."""

    with answered(Files) as host:
        yield f"http://{host}"


@contextmanager
def answered(handler: type[BaseHTTPRequestHandler], address: str = "127.0.0.1") -> Iterator[str]:
    """A server in a thread of this process, whose requests `handler` answers: its host and port."""
    server = ThreadingHTTPServer((address, 0), handler)
    # What ends it is looked for so often.
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"{address}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
