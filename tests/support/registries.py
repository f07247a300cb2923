"""A real OCI registry on the loopback address, and a client that has never heard of us.

The registry is Debian's `docker-registry` (CNCF distribution), the client Debian's `skopeo`. Where
they are missing, tests skip and name the command that installs them.
"""

import http.client
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from real_servers import Server, free_ports, needs
from remotes import Proxy

_CONFIG = """
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: {root}/data}}
  delete: {{enabled: true}}
http: {{addr: "127.0.0.1:{port}"}}
{auth}
"""
_AUTH = "auth: {{htpasswd: {{realm: test, path: {root}/htpasswd}}}}"


@contextmanager
def program(root: Path, *, htpasswd: str | None = None) -> Iterator[Server]:
    """A registry's process; with `htpasswd`, lines of that file, it wants a user."""
    path, (port,) = needs("docker-registry"), free_ports(1)
    root.mkdir(parents=True, exist_ok=True)
    if htpasswd is not None:
        (root / "htpasswd").write_text(htpasswd)
    auth = _AUTH.format(root=root) if htpasswd is not None else ""
    (root / "config.yml").write_text(_CONFIG.format(root=root, port=port, auth=auth))
    unset = [name for name in os.environ if name.startswith("REGISTRY_")]
    command = ["env", *(f"--unset={name}" for name in unset), path, "serve"]
    server = Server([*command, str(root / "config.yml")], port, root / "log")
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def registry(root: Path, *, htpasswd: str | None = None) -> Iterator[Proxy]:
    """A registry behind a proxy that counts; its name is `127.0.0.1:PORT` with the proxy's port."""
    with program(root, htpasswd=htpasswd) as server:
        proxy = Proxy(server.port)
        try:
            yield proxy
        finally:
            proxy.close()


@contextmanager
def tokened(behind: Proxy, basic: str) -> Iterator[str]:
    """The name of the same registry behind a gate that wants tokens, as public ones do.

    A token for reading is good for no write. Tokens are for who has the word `basic`.
    """

    class Gate(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            size = int(self.headers.get("Content-Length", "0"))
            body, given = self.rfile.read(size), self.headers.get("Authorization")
            if self.path.startswith("/token"):
                scope = parse_qs(urlsplit(self.path).query)["scope"][0]
                known = given == f"Basic {basic}"
                self._answer(200 if known else 401, json.dumps({"token": scope}).encode(), {})
                return
            reads = self.command in ("GET", "HEAD")
            scope = "repository:any:pull" if reads else "repository:any:pull,push"
            if given not in (f"Bearer {scope}", "Bearer repository:any:pull,push"):
                realm = f"http://{self.headers['Host']}/token"
                asked = f'Bearer realm="{realm}",service="registry",scope="{scope}"'
                self._answer(401, b"{}", {"Www-Authenticate": asked})
                return
            kept = ("accept", "range", "content-type")
            link = http.client.HTTPConnection("127.0.0.1", behind.port, timeout=60)
            headers = {k: v for k, v in self.headers.items() if k.lower() in kept}
            link.request(self.command, self.path, body, headers | {"Host": self.headers["Host"]})
            found = link.getresponse()
            passed = ("location", "content-type", "content-range", "docker-content-digest")
            data = found.read()
            more = {k: v for k, v in found.getheaders() if k.lower() in passed}
            if self.command == "HEAD":
                more["Content-Length"] = found.getheader("Content-Length", "0")
            link.close()
            self._answer(found.status, data, more)

        do_HEAD = do_POST = do_PUT = do_PATCH = do_GET

        def _answer(self, status: int, body: bytes, more: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **more}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Gate)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def host(proxy: Proxy) -> str:
    """The registry's name in URLs."""
    return f"127.0.0.1:{proxy.port}"


def skopeo(*words: str | Path) -> str:
    """Run skopeo and return what it says."""
    command = [needs("skopeo"), "--insecure-policy", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def manifest(proxy: Proxy, repository: str, reference: str) -> dict[str, Any]:
    """A manifest, as the registry has it."""
    link = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30)
    accept = "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json"
    link.request("GET", f"/v2/{repository}/manifests/{reference}", headers={"Accept": accept})
    answer = link.getresponse()
    assert answer.status == 200, reference
    found: dict[str, Any] = json.loads(answer.read())
    link.close()
    return found
