"""Memory that a push has sent and fills again, while a server still reads what it has refused."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from remote_runs.remotes import MemoryBucket, answered
from remote_runs.s3_faults import MemoryS3, Request, client
from store_runs.stores import noise, open_store, safetensors, stored, u8, write
from tensor_dedup.remote import Remote, layout, push

PIECE = 8 << 20  # more than sockets hold


def test_what_a_server_reads_on_after_it_has_refused_it_is_what_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that has given up on a request may carry it out later: under the same key."""
    monkeypatch.setattr(layout, "CONTAINER_BYTES", PIECE)
    monkeypatch.setattr(push, "_AT_ONCE", 1)
    bucket, over, read = MemoryBucket(), threading.Event(), threading.Event()
    refused: list[str] = []
    late: list[bytes] = []
    behind = MemoryS3(bucket)

    class Early(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            nbytes = int(self.headers.get("content-length", 0))
            if self.command == "PUT" and "/containers/" in self.path and not refused:
                refused.append(self.headers["x-amz-content-sha256"])
                self._answer(503, {}, b"")
                over.wait(60)
                late.append(self.rfile.read(nbytes))
                self.close_connection = True
                read.set()
                return
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(nbytes)
            found = behind.answer(Request(self.command, self.path, headers, body))
            self._answer(found.status, found.headers, found.body)

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

        def _answer(self, status: int, headers: object, body: bytes) -> None:
            self.send_response(status)
            told = {"Content-Length": str(len(body)), **dict(headers)}  # type: ignore[call-overload]
            for name, value in told.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *_: object) -> None:
            """Say nothing."""

    tensors = {f"t{n}": noise(n, PIECE) for n in range(3)}
    path = write(tmp_path / "model", {"model.safetensors": safetensors(u8(**tensors))})
    store = open_store(tmp_path / "store")
    store.import_(path, "model")
    with answered(Early) as host:
        store.push(Remote(client(int(host.rpartition(":")[2]))), "model")
        over.set()
        assert read.wait(60)
    assert len(late[0]) > PIECE
    assert hashlib.sha256(late[0]).hexdigest() == refused[0]
    other = open_store(tmp_path / "other")
    other.pull(Remote(bucket), "model")
    assert stored(other, "model") == stored(store, "model")
