"""What operators ask by HTTP, and the log as JSON."""

import contextlib
import json
import logging
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from manager_runs import managers
from tensor_dedup.memory_manager.backends.memfd import MemfdBackend
from tensor_dedup.memory_manager.client import connect
from tensor_dedup.memory_manager.core import Settings
from tensor_dedup.memory_manager.protocol.codec import VERSION
from tensor_dedup.memory_manager.protocol.tables import ClientRow, saved_bytes
from tensor_dedup.memory_manager.server import metrics
from tensor_dedup.memory_manager.server.acceptor import SocketFile
from tensor_dedup.memory_manager.server.main import JsonFormatter
from tensor_dedup.memory_manager.server.metrics import Metrics
from tensor_dedup.memory_manager.server.server import Server

SIZE = 1 << 20


def address(where: str) -> str:
    found = re.search(r"metrics=(http://\S+)/metrics", where)
    assert found, where
    return found[1]


def base_of(manager: managers.Manager) -> str:
    """Where it serves: it says so a moment after its socket is there."""
    managers.until(lambda: "metrics=" in manager.log.read_text())
    return address(manager.log.read_text())


def asked(url: str) -> tuple[int, str]:
    """Status and text of an answer."""
    try:
        with urllib.request.urlopen(url, timeout=managers.PATIENCE_S) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def values(base: str) -> dict[str, tuple[dict[str, str], float]]:
    """Labels and value of each sample."""
    families = text_string_to_metric_families(asked(f"{base}/metrics")[1])
    return {s.name: (s.labels, s.value) for family in families for s in family.samples}


def uses_base(state: dict[str, object]) -> int:
    """In another process: lease what the checkpoint has."""
    path = state["path"]
    assert isinstance(path, Path)
    state["client"] = client = connect(path, name="another", keep_connected=False)
    state["found"] = found = client.get(["layer"], "tuned")
    return len(found)


def test_saved_bytes_are_those_beyond_the_first_copy(folder: Path) -> None:
    with managers.running(folder, "--metrics", "0") as manager:
        base = base_of(manager)
        actor = managers.Actor(manager.socket, uses_base)
        with manager.client("an engine") as client:
            kept = managers.build(client, "layer", managers.pattern(1, SIZE))
            kept += managers.build(client, "own", managers.pattern(2, SIZE))
            managers.until(lambda: values(base)["tensor_dedup_leased_bytes"][1] == 2 * SIZE)
            assert values(base)["tensor_dedup_saved_bytes"] == ({"device": "host"}, 0)
            assert actor.step() == 1
            managers.until(lambda: values(base)["tensor_dedup_clients"][1] == 2)
            managers.until(lambda: values(base)["tensor_dedup_saved_bytes"][1] == SIZE)
            overview = manager.overview()
            assert overview.saved_bytes == SIZE
            assert overview.totals.leased_bytes == 2 * SIZE
            actor.kill()
            managers.until(lambda: values(base)["tensor_dedup_saved_bytes"][1] == 0)
            del kept


@pytest.mark.parametrize("options", [[], ["--dashboard"]])
def test_checkpoints_are_named_with_the_dashboard_only(folder: Path, options: list[str]) -> None:
    name = 'a "b" \\ é'
    with managers.running(folder, "--metrics", "0", *options) as manager:
        base = base_of(manager)
        with manager.client("an engine") as client:
            kept = managers.build(client, "a", managers.pattern(1, SIZE), checkpoint=name)
            kept += managers.build(client, "own", managers.pattern(2, 2 * SIZE))
            managers.until(lambda: values(base)["tensor_dedup_leased_bytes"][1] == 3 * SIZE)
            text = asked(f"{base}/metrics")[1]
            del kept
    found = {
        (sample.name, sample.labels["checkpoint"], sample.labels["device"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "checkpoint" in sample.labels
    }
    expected = {
        (f"tensor_dedup_checkpoint_{what}_bytes", each, "host"): nbytes
        for what in ("resident", "leased")
        for each, nbytes in {name: SIZE, "base": 2 * SIZE}.items()
    }
    assert found == (expected if options else {})


def test_a_process_saves_nothing_by_itself() -> None:
    rows = [ClientRow(7, "serve.py", 1, each, 0, 1.0) for each in (SIZE, 3 * SIZE)]
    assert saved_bytes(rows, 3 * SIZE) == 0
    assert saved_bytes([*rows, ClientRow(8, "serve.py", 1, SIZE, 0, 1.0)], 3 * SIZE) == SIZE


def test_look_ups_are_timed(folder: Path) -> None:
    with managers.running(folder, "--metrics", "0") as manager:
        base = base_of(manager)
        actor = managers.Actor(manager.socket, uses_base)
        with manager.client("an engine") as client:
            kept = managers.build(client, "layer", managers.pattern(1, SIZE))
            before = values(base)["tensor_dedup_attach_seconds_count"][1]
            assert actor.step() == 1
            after = values(base)
            labels, count = after["tensor_dedup_attach_seconds_count"]
            assert labels == {"device": "host"}
            assert count == before + 1
            assert 0 < after["tensor_dedup_attach_seconds_sum"][1] < 60
            actor.kill()
            del kept


def test_what_runs_is_in_build_info(folder: Path) -> None:
    with managers.running(folder, "--metrics", "0") as manager:
        labels, value = values(base_of(manager))["tensor_dedup_build_info"]
    assert value == 1
    assert labels["protocol"] == str(VERSION)
    assert labels["device"] == "host"
    assert re.match(r"\d+\.\d+", labels["version"])


@pytest.fixture
def server(folder: Path) -> Server:
    """A server in this process that does not run yet."""
    return Server(SocketFile(folder / "m.sock"), MemfdBackend(), Settings(64 * SIZE))


@contextlib.contextmanager
def running(server: Server) -> Iterator[None]:
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield
    finally:
        server.stop()
        thread.join()


def test_it_is_healthy_and_ready_while_it_serves(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Metrics(server, 0) as http:
        base = address(http.where)
        assert asked(f"{base}/healthz") == (200, "ok")
        assert asked(f"{base}/readyz")[0] == 503
        with running(server):
            managers.until(lambda: asked(f"{base}/readyz") == (200, "ok"))
            assert asked(f"{base}/healthz?verbose") == (200, "ok")
            with monkeypatch.context() as patch:
                patch.setattr(metrics, "_STALLED_S", -1.0)  # whatever went round did too long ago
                for path in ("healthz", "readyz"):
                    status, text = asked(f"{base}/{path}")
                    assert (status, "event loop" in text) == (503, True)
            assert asked(f"{base}/nothing")[0] == 404
        assert asked(f"{base}/readyz")[0] == 503


def test_it_listens_where_it_is_told(folder: Path, server: Server) -> None:
    options = ("--metrics", "0", "--metrics-address", "0.0.0.0")
    with managers.running(_private(folder), *options) as manager:
        base = base_of(manager)
        assert base.startswith("http://0.0.0.0:")
        [port] = re.findall(r":(\d+)$", base)
        assert asked(f"http://127.0.0.2:{port}/healthz") == (200, "ok")
    with running(server), Metrics(server, 0) as http:
        assert address(http.where).startswith("http://127.0.0.1:")
        [port] = re.findall(r":(\d+)$", address(http.where))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", int(port)), managers.PATIENCE_S)


@pytest.mark.parametrize(
    ("listens", "host", "status"),
    [
        ("127.0.0.1", "localhost:9464", 200),
        ("127.0.0.1", "127.0.0.1", 200),
        ("127.0.0.1", "LOCALHOST", 200),
        ("127.0.0.1", "evil.example:9464", 403),
        ("127.0.0.1", "localhost.evil.example", 403),
        ("127.0.0.1", "127.0.0.1.evil.example", 403),
        ("127.0.0.1", "192.0.2.1", 403),
        ("127.0.0.1", "evil.example\r\nHost: localhost", 403),
        ("127.0.0.1", "", 403),
        ("0.0.0.0", "gpu-host-3:9464", 200),  # as a Prometheus elsewhere names it
        ("0.0.0.0", "10.1.2.3:9464", 200),
    ],
)
def test_on_the_loopback_address_only_this_host_s_names_are_answered(
    server: Server, listens: str, host: str, status: int
) -> None:
    with running(server), Metrics(server, 0, listens) as http:
        [port] = re.findall(r":(\d+)/metrics", http.where)
        for path, wanted in (("metrics", status), ("healthz", 200)):
            with socket.create_connection(("127.0.0.1", int(port)), managers.PATIENCE_S) as client:
                client.sendall(f"GET /{path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
                answer = client.makefile("rb").read()
            assert answer.startswith(b"HTTP/1.1 %d " % wanted)
            assert (b"tensor_dedup_" in answer) == (path == "metrics" and status == 200)


def _private(folder: Path) -> Path:
    other = folder / "other"
    other.mkdir(mode=0o700)
    return other


def test_the_log_is_a_json_object_a_line(folder: Path) -> None:
    code = "from tensor_dedup.cli import main; main()"
    options = ["--budget", "64MiB", "--log-format", "json", "--json"]
    command = [sys.executable, "-c", code, "serve", *options, "--socket", str(folder / "m.sock")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as manager:
        assert manager.stdout is not None
        pid = json.loads(manager.stdout.readline())["pid"]
        with connect(folder / "m.sock", name='an "engine"', keep_connected=False):
            pass
        manager.terminate()
        _, log = manager.communicate(timeout=managers.PATIENCE_S)
    lines = [json.loads(line) for line in log.splitlines()]
    assert {tuple(line) for line in lines} == {("time", "level", "event", "message", "facts")}
    [connected] = [line for line in lines if line["event"] == "connected"]
    assert connected["facts"]["name"] == repr('an "engine"')
    assert isinstance(connected["facts"]["pid"], int)
    assert lines[0]["message"].startswith(f"serving socket={folder}/m.sock pid={pid} ")
    assert lines[-1]["message"] == "ended"
    assert all(line["time"].endswith("+00:00") for line in lines)


def test_an_exception_stays_on_its_line() -> None:
    record = logging.LogRecord("a", logging.ERROR, __file__, 1, "two\nlines", (), None)
    try:
        raise OSError("broken")
    except OSError:
        record.exc_info = sys.exc_info()
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert "OSError: broken" in json.loads(line)["exception"]
