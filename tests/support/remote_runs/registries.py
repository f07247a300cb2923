"""A real OCI registry on the loopback address, and a client that has never heard of us.

The registry is Debian's `docker-registry` (CNCF distribution), the client Debian's `skopeo`. Where
they are missing, tests skip and name the command that installs them.
"""

import hashlib
import http.client
import itertools
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from remote_runs.real_servers import Server, free_ports, needs
from remote_runs.remotes import Proxy, answered

MODEL = "application/vnd.cncf.model"
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


class _Gate(BaseHTTPRequestHandler):
    """What stands before a registry: `check` answers a request, or lets it through."""

    protocol_version = "HTTP/1.1"
    behind: Proxy
    body = b""

    def check(self, given: str | None) -> bool:
        """Whether a request may pass that comes with these credentials; else it is answered."""
        raise NotImplementedError

    def do_GET(self) -> None:
        self.body = body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if not self.check(self.headers.get("Authorization")):
            return
        kept = ("accept", "range", "content-type", "content-range")
        link = http.client.HTTPConnection("127.0.0.1", self.behind.port, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() in kept}
        link.request(self.command, self.path, body, headers | {"Host": self.headers["Host"]})
        found = link.getresponse()
        passed = ("location", "content-type", "content-range", "docker-content-digest")
        data = found.read()
        more = {k: v for k, v in found.getheaders() if k.lower() in passed}
        if self.command == "HEAD":
            more["Content-Length"] = found.getheader("Content-Length", "0")
        link.close()
        self.answer(found.status, data, more)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_GET

    def answer(self, status: int, body: bytes, more: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **more}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *_: object) -> None:
        """Say nothing."""


@contextmanager
def tokened(
    behind: Proxy, basic: str, issued: list[str] | None = None, lasts: int = 10**9
) -> Iterator[str]:
    """The name of the same registry behind a gate that wants tokens, as public ones do.

    A token for reading is good for no write. Tokens are for who has the word `basic`; those that
    are given out are noted in `issued`. When so many requests have passed as `lasts` says, the
    tokens until then expire, once.
    """
    guard, passed = threading.Lock(), itertools.count()

    class Gate(_Gate):
        good = "first"

        def check(self, given: str | None) -> bool:
            if self.path.startswith("/token"):
                scope = parse_qs(urlsplit(self.path).query)["scope"][0]
                known = given == f"Basic {basic}"
                token = f"{Gate.good}:{scope}"
                if issued is not None and known:
                    issued.append(token)
                self.answer(200 if known else 401, json.dumps({"token": token}).encode(), {})
                return False
            reads = self.command in ("GET", "HEAD")
            scope = "repository:any:pull" if reads else "repository:any:pull,push"
            with guard:
                scopes = scope, "repository:any:pull,push"
                if given in [f"Bearer {Gate.good}:{each}" for each in scopes]:
                    if next(passed) == lasts - 1:
                        Gate.good = "second"
                    return True
            realm = f"http://{self.headers['Host']}/token"
            asked = f'Bearer realm="{realm}",service="registry",scope="{scope}"'
            self.answer(401, b"{}", {"Www-Authenticate": asked})
            return False

    Gate.behind = behind
    with answered(Gate) as name:
        yield name


@contextmanager
def hosted(
    behind: Proxy, *, says: int | None = None, least: int = 0
) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
    """The name of the same registry with the limits of hosted ones.

    A manifest has 500 layers at most. An upload's request has 4 MiB at most: a larger one is
    answered with the status `says`, or else the gate hangs up before it has read it. With `least`,
    the gate says that a chunk has so many bytes at least, and takes no larger one. Gives also the
    verbs, sizes and statuses (0: hung up) of requests that write.
    """
    seen, most = list[tuple[str, int, int]](), max(4 << 20, least)

    class Gate(_Gate):
        def do_PUT(self) -> None:
            size = int(self.headers.get("Content-Length", "0"))
            if size > most and "/blobs/uploads/" in self.path and says is None:
                seen.append((self.command, size, 0))
                self.close_connection = True
            else:
                self.do_GET()

        do_PATCH = do_PUT

        def check(self, given: str | None) -> bool:
            status, size = 0, len(self.body)
            if "/blobs/uploads/" in self.path and size > most:
                status = says or 0
            elif self.command == "PUT" and "/manifests/" in self.path:
                status = 400 if len(json.loads(self.body).get("layers", [])) > 500 else 0
            if status:
                seen.append((self.command, size, status))
                said = {"errors": [{"code": "LIMIT", "message": "too much at once"}]}
                self.answer(status, json.dumps(said).encode(), {})
            return not status

        def answer(self, status: int, body: bytes, more: dict[str, str]) -> None:
            if self.command == "POST" and least:
                more = {**more, "OCI-Chunk-Min-Length": str(least)}
            if self.command in ("PUT", "PATCH") and status < 300:
                seen.append((self.command, len(self.body), status))
            super().answer(status, body, more)

    Gate.behind = behind
    with answered(Gate) as name:
        yield name, seen


@contextmanager
def spread(
    behind: Proxy, basic: str, *, asks: str | None = None
) -> Iterator[tuple[str, list[str]]]:
    """The name of the same registry where bytes come from another host and go to one.

    It wants the word `basic`, and leads from blobs and uploads to the other host, which wants
    nothing or, with `asks`, a user by this scheme. Gives also the credentials that host was sent.
    """
    seen = list[str]()

    class Other(_Gate):
        def check(self, given: str | None) -> bool:
            seen.extend([given] if given else [])
            if asks is not None:
                where = f"http://{self.headers['Host']}/token"
                self.answer(401, b"{}", {"Www-Authenticate": f'{asks} realm="{where}"'})
            return asks is None

    Other.behind = behind
    with answered(Other, "127.0.0.2") as other:

        class Gate(_Gate):
            def check(self, given: str | None) -> bool:
                if given != f"Basic {basic}":
                    self.answer(401, b"{}", {"Www-Authenticate": 'Basic realm="here"'})
                elif self.command == "GET" and "/blobs/" in self.path:
                    self.answer(307, b"", {"Location": f"http://{other}{self.path}"})
                else:
                    return True
                return False

            def answer(self, status: int, body: bytes, more: dict[str, str]) -> None:
                if status == 202:
                    place = urlsplit(more["Location"])
                    more["Location"] = place._replace(netloc=other).geturl()
                super().answer(status, body, more)

        Gate.behind = behind
        with answered(Gate) as name:
            yield name, seen


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


def put_manifest(proxy: Proxy, repository: str, reference: str, document: dict[str, Any]) -> None:
    """Write a manifest, of whose blobs all are there."""
    link = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30)
    body, media = json.dumps(document).encode(), document["mediaType"]
    link.request("PUT", f"/v2/{repository}/manifests/{reference}", body, {"Content-Type": media})
    answer = link.getresponse()
    assert answer.status == 201, answer.read()
    link.close()


def bring(folder: Path, url: str, layers: list[tuple[str, bytes, str | None]]) -> None:
    """Bring an artifact of others to a registry: layers of a type, with a path or none."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes, media: str, **more: Any) -> dict[str, Any]:
        name = hashlib.sha256(data).hexdigest()
        (blobs / name).write_bytes(data)
        return {"mediaType": media, "digest": f"sha256:{name}", "size": len(data), **more}

    described = [
        put(data, media, **({"annotations": {"org.cncf.model.filepath": path}} if path else {}))
        for media, data, path in layers
    ]
    digests = [each["digest"] for each in described]
    config = {
        "descriptor": {},
        "config": {},
        "modelfs": {"type": "layers", "diffIds": digests},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "artifactType": f"{MODEL}.manifest.v1+json",
        "config": put(json.dumps(config).encode(), f"{MODEL}.config.v1+json"),
        "layers": described,
    }
    held = put(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
    held["annotations"] = {"org.opencontainers.image.ref.name": "v1"}
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [held]}))
    place = url.removeprefix("oci://")
    skopeo("copy", "--dest-tls-verify=false", f"oci:{folder}:v1", f"docker://{place}")
