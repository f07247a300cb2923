"""A real OCI registry on the loopback address, and a client that has never heard of us.

The registry is Debian's `docker-registry` (CNCF distribution), the client Debian's `skopeo`. Where
they are missing, tests skip and name the command that installs them.
"""

import http.client
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

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


def needs(program: str) -> str:
    """The program's path; skips the test where it is not installed."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"needs {program}: apt-get install {program}")
    return found


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextmanager
def registry(root: Path, *, htpasswd: str | None = None) -> Iterator[Proxy]:
    """A registry behind a proxy that counts; its name is `127.0.0.1:PORT` with the proxy's port.

    With `htpasswd`, lines of that file, it wants a user.
    """
    program, port = needs("docker-registry"), _free_port()
    root.mkdir(parents=True, exist_ok=True)
    if htpasswd is not None:
        (root / "htpasswd").write_text(htpasswd)
    auth = _AUTH.format(root=root) if htpasswd is not None else ""
    (root / "config.yml").write_text(_CONFIG.format(root=root, port=port, auth=auth))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("REGISTRY_")}
    with (root / "log").open("wb") as log:
        server = subprocess.Popen(
            [program, "serve", str(root / "config.yml")], stdout=log, stderr=log, env=environment
        )
    proxy = None
    try:
        for _ in range(600):
            with suppress(OSError):
                link = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                link.request("GET", "/v2/")
                status = link.getresponse().status
                link.close()
                if status in (200, 401):
                    break
            assert server.poll() is None, (root / "log").read_text()
            time.sleep(0.05)
        proxy = Proxy(port)
        yield proxy
    finally:
        if proxy is not None:
            proxy.close()
        server.terminate()
        server.wait(30)


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
