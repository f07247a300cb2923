"""Requests to a registry: to whom credentials go, and what is taken of answers."""

import hashlib
import io
import json
import logging
import os
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from remote_runs import registries
from remote_runs.remotes import Listener, Proxy, answered
from store_runs.stores import KIB, content, noise, open_store, safetensors, stored, u8, write
from tensor_dedup import Store
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    RemoteAccessError,
    RemoteError,
    RemoteUnreachableError,
)
from tensor_dedup.remote.oci.connection import Body, origin
from tensor_dedup.remote.oci.registry import ArtifactName, RegistryRepository

pytest.importorskip("requests")


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    with registries.registry(tmp_path / "registry") as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_of_the_user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))


# The password is U*U: a published vector of bcrypt.
HTPASSWD = "somebody:$2a$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW\n"


def test_credentials_are_those_of_docker_login(
    tmp_path: Path, full: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with registries.registry(tmp_path / "registry", htpasswd=HTPASSWD) as proxy:
        url = f"oci://{registries.host(proxy)}/team/base:v1"
        with pytest.raises(RemoteAccessError, match="docker login"):
            full.push(url, "base")
        for password in ("wrong-password", "U*U"):
            word = b64encode(f"somebody:{password}".encode()).decode()
            auths = {"auths": {registries.host(proxy): {"auth": word}}}
            write(tmp_path / "docker", {"config.json": json.dumps(auths).encode()})
            monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
            if password != "U*U":
                with pytest.raises(RemoteAccessError) as caught:
                    full.push(url, "base")
                assert word not in str(caught.value)
        full.push(url, "base")
        other = open_store(tmp_path / "other")
        other.pull(url, "base")
        assert stored(other, "base") == content(tmp_path / "base")


def docker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, helper: str | None = None
) -> None:
    """A configuration of Docker's, and `docker-credential-test`, which runs a line of a shell."""
    folder = write(tmp_path / "docker", {"config.json": config.encode()})
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    if helper is not None:
        script = folder / "docker-credential-test"
        script.write_text(f"#!/bin/sh\n{helper}\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


NAME = ArtifactName("registry.example", "team/base", "v1")


@pytest.mark.parametrize(
    "config",
    [
        '{"auths":',
        "\ufeff{}",
        "[]",
        '{"auths": null}',
        '{"auths": {"registry.example": "hidden-word"}}',
        '{"auths": {"registry.example": {"auth": "hidden-word\\n"}}}',
    ],
)
def test_a_broken_configuration_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    docker(tmp_path, monkeypatch, config)
    with pytest.raises(RemoteAccessError, match=r"docker/config\.json cannot be read") as caught:
        RegistryRepository(NAME)
    assert "hidden-word" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


STORE = '{"credsStore": "test"}'


@pytest.mark.parametrize("helper", ["echo hidden-word", "echo '{}'", """echo '{"Username": 3}'"""])
def test_a_helper_that_gives_no_password_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helper: str
) -> None:
    docker(tmp_path, monkeypatch, STORE, helper)
    with pytest.raises(RemoteAccessError, match="docker-credential-test gave no") as caught:
        RegistryRepository(NAME)
    assert "hidden-word" not in str(caught.value)


def test_what_a_helper_says_of_an_error_is_shown_nowhere(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    docker(tmp_path, monkeypatch, STORE, "echo hidden-word >&2; exit 1")
    with RegistryRepository(NAME) as registry:
        assert registry.name == NAME
    assert "docker-credential-test has nothing for registry.example" in caplog.text
    said = capfd.readouterr()
    assert "hidden-word" not in caplog.text + said.out + said.err
    docker(tmp_path, monkeypatch, '{"credsStore": "none-such"}')
    with RegistryRepository(NAME):
        assert "docker-credential-none-such cannot be run" in caplog.text


def test_a_helper_s_password_is_used(
    tmp_path: Path, full: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with registries.registry(tmp_path / "registry", htpasswd=HTPASSWD) as proxy:
        said = json.dumps({"ServerURL": "x", "Username": "somebody", "Secret": "U*U"})
        docker(tmp_path, monkeypatch, STORE, f"read host; test -n $host; echo '{said}'")
        full.push(f"oci://{registries.host(proxy)}/team/base:v1", "base")


def test_tokens_are_asked_for_with_what_each_request_needs(
    tmp_path: Path, proxy: Proxy, full: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = b64encode(b"somebody:secret-word").decode()
    with registries.tokened(proxy, word) as host:
        url = f"oci://{host}/team/base:v1"
        with pytest.raises(RemoteAccessError, match="docker login"):
            full.push(url, "base")
        auths = {"auths": {host: {"auth": word}}}
        write(tmp_path / "docker", {"config.json": json.dumps(auths).encode()})
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
        full.push(url, "base")
        other = open_store(tmp_path / "other")
        other.pull(url, "base")
    assert stored(other, "base") == content(tmp_path / "base")


def test_a_parallel_pull_whose_token_expires_asks_for_one_more(
    tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several layers are asked for at once, and all of these requests are refused."""
    shards = {
        f"{n}.safetensors": safetensors(u8(**{f"w{n}": noise(n, 64 * KIB)})) for n in range(8)
    }
    path, store = write(tmp_path / "many", shards), open_store(tmp_path / "store")
    store.import_(path, "many")
    store.push(f"oci://{registries.host(proxy)}/team/many:v1", "many")
    word, issued = b64encode(b"somebody:secret-word").decode(), list[str]()
    # The manifest and the tables are read before any layer.
    with registries.tokened(proxy, word, issued, lasts=2) as host:
        auths = {"auths": {host: {"auth": word}}}
        write(tmp_path / "docker", {"config.json": json.dumps(auths).encode()})
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
        other = open_store(tmp_path / "other")
        other.pull(f"oci://{host}/team/many:v1", "many")
    assert issued == [f"{token}:repository:any:pull" for token in ("first", "second")]
    assert stored(other, "many") == content(path)


def test_of_many_threads_that_are_refused_one_asks_for_a_token() -> None:
    count, all_refused = 6, threading.Semaphore(0)
    seen = list[str]()

    class Registry(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, said = self.path.partition("?")[0], b"{}"
            if path == "/token":
                if path not in seen:
                    for _ in range(count):
                        assert all_refused.acquire(timeout=60)
                seen.append(path)
                said = b'{"token": "good"}'
                self.send_response(200)
            elif self.headers["Authorization"] == "Bearer good":
                self.send_response(200)
            else:
                self.send_response(401)
                self.send_header("Www-Authenticate", _BEARER.replace("HERE", self.headers["Host"]))
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)
            if path != "/token":
                all_refused.release()

        def log_message(self, format: str, *_: object) -> None:
            """Say nothing."""

    with (
        answered(Registry) as host,
        RegistryRepository(ArtifactName(host, "a", "b")) as registry,
        ThreadPoolExecutor(count) as pool,
    ):
        futures = [pool.submit(registry.manifest, "b") for _ in range(count)]
        assert all(future.result(60) for future in futures)
    assert seen == ["/token"]


@pytest.mark.parametrize("asks", [None, "Basic", "Bearer"])
def test_another_host_that_a_registry_leads_to_is_sent_no_credentials(
    tmp_path: Path,
    proxy: Proxy,
    full: Store,
    monkeypatch: pytest.MonkeyPatch,
    asks: str | None,
) -> None:
    word, here = b64encode(b"somebody:secret-word").decode(), open_store(tmp_path / "here")
    with registries.spread(proxy, word, asks=asks) as (host, seen):
        auths = {"auths": {host: {"auth": word}}}
        write(tmp_path / "docker", {"config.json": json.dumps(auths).encode()})
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
        url = f"oci://{host}/team/base:v1"
        if asks is None:
            full.push(url, "base")
            here.pull(url, "base")
            assert stored(here, "base") == content(tmp_path / "base")
        else:
            with pytest.raises(RemoteAccessError):
                full.push(url, "base")
            full.push(f"oci://{registries.host(proxy)}/team/base:v1", "base")
            with pytest.raises(RemoteAccessError):
                here.pull(url, "base")
        assert seen == []


@pytest.mark.parametrize(
    ("url", "is_own"),
    [
        ("https://registry.example/v2/up?x=1", True),
        ("HTTPS://Registry.example:443/v2/up", True),
        ("http://registry.example/v2/up", False),
        ("https://registry.example:444/v2/up", False),
        ("https://registry.example.org/v2/up", False),
        # What one reader takes for the host is a path to another, the one that sends.
        ("https://other.example\\@registry.example/v2/up", False),
        ("https://[registry.example/v2/up", False),
    ],
)
def test_which_places_are_a_registry_s_own(url: str, is_own: bool) -> None:
    assert (origin(url) == origin("https://registry.example/v2/")) == is_own


def test_a_range_that_is_more_than_was_asked_for_is_not_read_to_its_end() -> None:
    sent, most = list[int](), 64

    class Endless(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(206)
            self.end_headers()
            with suppress(OSError):
                for _ in range(most):
                    self.wfile.write(bytes(1 << 20))
                    sent.append(1)

        def log_message(self, format: str, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    name = ArtifactName.parse(f"oci://127.0.0.1:{server.server_port}/a/b:c")
    with RegistryRepository(name) as registry:
        whole = registry.blob_range(f"sha256:{0:064}", 0, most << 20)
        assert sum(map(len, whole)) == most << 20
        sent.clear()
        with pytest.raises(RemoteUnreachableError, match="a range of 10 bytes was answered"):
            list(registry.blob_range(f"sha256:{0:064}", 5, 15))
    server.shutdown()
    server.server_close()
    assert len(sent) < most


class _Endless(BaseHTTPRequestHandler):
    """What a registry answers that says too much: `answers` has statuses, and sizes or texts."""

    protocol_version = "HTTP/1.1"
    answers: ClassVar[dict[str, tuple[int, int | bytes]]]
    sent: ClassVar[int] = 0

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/v2/team/base/")
        status, body = self.answers.get(path, (404, b"{}"))
        if self.command == "POST":
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
        size = body if isinstance(body, int) else len(body)
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if self.command == "HEAD":
            return
        with suppress(OSError):
            if isinstance(body, bytes):
                self.wfile.write(body)
                return
            for _ in range(0, size, 1 << 16):
                self.wfile.write(bytes(1 << 16))
                type(self).sent += 1 << 16
        self.close_connection = True

    do_HEAD = do_POST = do_GET

    def log_message(self, format: str, *_: object) -> None:
        """Say nothing."""


_LARGE = 256 << 20


def _document(layer: dict[str, object]) -> bytes:
    media = "application/vnd.oci.image.manifest.v1+json"
    wanted = {"mediaType": "application/octet-stream", "digest": f"sha256:{'0' * 64}"}
    return json.dumps({"mediaType": media, "layers": [wanted | layer]}).encode()


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"manifests/v1": (418, _LARGE)}, "it answers 418"),
        ({"manifests/v1": (200, _LARGE)}, "the limit is"),
        (
            {
                "manifests/v1": (
                    200,
                    _document({"size": 100, "annotations": {"org.cncf.model.filepath": "x"}}),
                ),
                f"blobs/sha256:{'0' * 64}": (200, _LARGE),
            },
            "the limit is 100",
        ),
        ({"manifests/v1": (200, _document({"size": -1}))}, "no layer has -1 bytes"),
        ({"manifests/v1": (200, _document({"size": 10**30}))}, "no layer has 1000"),
        ({"manifests/v1": (200, b'{"x":' + b"[" * 200_000)}, "no manifest"),
        ({"manifests/v1": (418, b'{"x":' + b"[" * 20_000)}, "it answers 418"),
    ],
)
def test_no_answer_is_read_further_than_it_may_be_long(
    tmp_path: Path, answers: dict[str, tuple[int, int | bytes]], says: str
) -> None:
    class Handler(_Endless):
        sent = 0

    Handler.answers = answers
    with answered(Handler) as host:
        store = open_store(tmp_path / "store")
        with pytest.raises((RemoteError, DamagedRemoteError), match=says):
            store.pull(f"oci://{host}/team/base:v1", "base")
        assert Handler.sent < _LARGE / 4
    assert store.names() == []


@pytest.mark.parametrize("status", [201, 202, 418])
def test_what_a_registry_says_of_an_upload_is_not_read_to_its_end(
    tmp_path: Path, full: Store, status: int
) -> None:
    class Handler(_Endless):
        sent = 0

    Handler.answers = {"blobs/uploads/": (status, _LARGE)}
    with answered(Handler) as host:
        with pytest.raises(RemoteError):
            full.push(f"oci://{host}/team/base:v1", "base")
        assert 0 < Handler.sent < _LARGE / 4


@pytest.mark.parametrize("status", [400, 403, 429, 503])
def test_what_a_registry_says_of_an_error_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Also where it was asked again and again."""
    monkeypatch.setattr("tensor_dedup.remote.oci.connection._PAUSE_S", 0.0)

    class Handler(_Endless):
        answers: ClassVar = {}

    said = {"errors": [{"code": "WHY", "message": "because of this"}]}
    Handler.answers = {"manifests/v1": (status, json.dumps(said).encode())}
    with answered(Handler) as host:
        words = rf"it answers {status} \(WHY: because of this\)"
        with pytest.raises(RemoteError, match=words):
            open_store(tmp_path / "store").pull(f"oci://{host}/team/base:v1", "base")


def asking(realm: str) -> type[BaseHTTPRequestHandler]:
    """A registry that wants a token, which is given out at `realm`; below "/token", `_Endless`."""

    class Asking(_Endless):
        sent: ClassVar[int] = 0
        answers: ClassVar = {"/token": (200, _LARGE)}

        def do_GET(self) -> None:
            if self.path.startswith("/token"):
                super().do_GET()
                return
            where = realm or f"http://{self.headers['Host']}/token"
            self.send_response(401)
            self.send_header("Content-Length", "2")
            self.send_header("Www-Authenticate", f'Bearer realm="{where}",service="r",scope="s"')
            self.end_headers()
            self.wfile.write(b"{}")

    return Asking


class _Choosy(BaseHTTPRequestHandler):
    """A registry that wants the token `good`, leads blobs to `other`, and notes what it is sent."""

    challenges: ClassVar[list[str]]
    other: ClassVar[str] = ""
    seen: ClassVar[list[tuple[str, str | None]]]

    def do_GET(self) -> None:
        path, given, here = self.path.partition("?")[0], self.headers["Authorization"], ""
        self.seen.append((path, given))
        status, body = (200, b'{"token": "good"}') if path == "/token" else (200, b"{}")
        if path.startswith("/v2/") and given != "Bearer good":
            status, here = 401, self.headers["Host"]
        elif "/blobs/" in path and self.other:
            status = 307
        self.send_response(status)
        for each in self.challenges if here else []:
            self.send_header("Www-Authenticate", each.replace("HERE", here))
        if status == 307:
            self.send_header("Location", f"http://{self.other}/elsewhere")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *_: object) -> None:
        """Say nothing."""


_BEARER = 'Bearer realm="http://HERE/token", service="Basic, of all", scope="s"'
_BASIC = 'Basic realm="registry.example"'


def choosy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> type[_Choosy]:
    """A class of its own, and a word that Docker has for every port of this machine."""

    class Handler(_Choosy):
        challenges: ClassVar = asked
        seen: ClassVar = []

    said = json.dumps({"ServerURL": "x", "Username": "u", "Secret": "p"})
    docker(tmp_path, monkeypatch, STORE, f"echo '{said}'")
    return Handler


_WORD = f"Basic {b64encode(b'u:p').decode()}"


@pytest.mark.parametrize(
    "asked",
    [
        [_BEARER, _BASIC],
        [_BASIC, _BEARER],
        [f"{_BEARER}, {_BASIC}"],
        [f"{_BASIC}, {_BEARER}"],
        [_BEARER.replace('"http://HERE/token"', "http://HERE/token")],
    ],
)
def test_of_several_schemes_a_token_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    handler = choosy(tmp_path, monkeypatch, asked)
    with answered(handler) as host, RegistryRepository(ArtifactName(host, "a", "b")) as registry:
        assert registry.manifest("b") is not None
    path = "/v2/a/manifests/b"
    assert handler.seen == [(path, None), ("/token", _WORD), (path, "Bearer good")]


def test_a_realm_that_is_no_url_is_sent_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = choosy(tmp_path, monkeypatch, [_BEARER.replace("http://HERE/token", "localhost")])
    says = "it names no token service by a URL, but 'localhost'"
    with (
        answered(handler) as host,
        RegistryRepository(ArtifactName(host, "a", "b")) as registry,
        pytest.raises(RemoteAccessError, match=says),
    ):
        registry.manifest("b")
    assert len(handler.seen) == 1


def test_a_password_goes_from_https_to_no_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import requests

    handler = choosy(tmp_path, monkeypatch, [])
    with answered(handler) as host, RegistryRepository(NAME) as registry:
        send = registry._connection._session.request

        def refuse(verb: str, url: str, **more: object) -> requests.Response:
            if url.startswith("http:"):
                return send(verb, url, **more)  # type: ignore[no-any-return]
            found = requests.Response()
            found.status_code, found.url, found.raw = 401, url, io.BytesIO()
            found.headers["Www-Authenticate"] = _BEARER.replace("HERE", host)
            return found

        monkeypatch.setattr(registry._connection._session, "request", refuse)
        with pytest.raises(RemoteAccessError, match=r"its token service has no https: 127\.0"):
            registry.manifest("v1")
    assert handler.seen == []


def test_a_netrc_file_is_for_no_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = choosy(tmp_path, monkeypatch, [_BEARER])
    (tmp_path / "netrc").write_text("default login other password word\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with answered(handler, "127.0.0.2") as other, answered(handler) as host:
        handler.other = other
        digest = f"sha256:{hashlib.sha256(b'{}').hexdigest()}"
        with RegistryRepository(ArtifactName(host, "a", "b")) as registry:
            assert registry.blob(digest, 2) == b"{}"
    path = f"/v2/a/blobs/{digest}"
    tokens = [(path, None), ("/token", _WORD), (path, "Bearer good")]
    assert handler.seen == [*tokens, ("/elsewhere", None)]


def test_proxies_and_certificates_are_those_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensor_dedup.remote.oci.connection._PAUSE_S", 0.0)
    seen = list[bytes]()

    def refuse(link: socket.socket) -> None:
        with link:
            seen.append(link.recv(1 << 10))

    proxy = Listener(refuse)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
    with RegistryRepository(NAME) as registry, pytest.raises(RemoteUnreachableError):
        registry.manifest("v1")
    proxy.close()
    assert {each.partition(b" HTTP/")[0] for each in seen} == {b"CONNECT registry.example:443"}
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "none.pem"))
    with (
        RegistryRepository(NAME) as registry,
        pytest.raises(RemoteUnreachableError, match=r"none\.pem"),
    ):
        registry.manifest("v1")


def test_a_mount_may_take_as_long_as_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensor_dedup.remote.oci.connection._PAUSE_S", 0.0)
    monkeypatch.setattr("tensor_dedup.remote.oci.connection._TIMEOUT_S", (5.0, 0.2))
    asked = list[str]()

    class Copying(_Endless):
        answers: ClassVar = {"blobs/uploads/": (201, b"")}

        def do_POST(self) -> None:
            asked.append(self.path)
            time.sleep(0.6)
            super().do_GET()

    name = "team/base"
    with answered(Copying) as host, RegistryRepository(ArtifactName(host, name, "b")) as registry:
        assert not registry.upload(f"sha256:{0:064}", Body.of(b""), "team/other")
    assert len(asked) == 1


def test_a_token_service_that_is_silent_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensor_dedup.remote.oci.connection._PAUSE_S", 0.0)
    monkeypatch.setattr("tensor_dedup.remote.oci.connection._TIMEOUT_S", (0.2, 0.2))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        realm = f"http://127.0.0.1:{silent.getsockname()[1]}/token"
        with (
            answered(asking(realm)) as host,
            RegistryRepository(ArtifactName(host, "a", "b")) as registry,
            pytest.raises(RemoteUnreachableError, match=r"a token from 127\.0\.0\.1: .*timed"),
        ):
            registry.manifest("b")


def test_a_token_service_that_says_too_much_is_not_read_to_its_end() -> None:
    handler = asking("")
    with (
        answered(handler) as host,
        RegistryRepository(ArtifactName(host, "a", "b")) as registry,
        pytest.raises(RemoteAccessError, match="it answers 401"),
    ):
        registry.manifest("b")
    assert 0 < handler.sent < _LARGE / 4  # type: ignore[attr-defined]


def test_a_helper_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensor_dedup.remote.oci.credentials._HELPER_S", 0.2)
    docker(tmp_path, monkeypatch, STORE, "exec sleep 20")
    with pytest.raises(RemoteAccessError, match="docker-credential-test does not answer"):
        RegistryRepository(NAME)


def test_a_slow_connection_is_not_a_silent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a chunk takes longer than may pass without a byte."""
    for name in ("_TIMEOUT_S", "_SENDING_S"):
        monkeypatch.setattr(f"tensor_dedup.remote.oci.connection.{name}", (0.5, 5.0), raising=False)
    monkeypatch.setattr("tensor_dedup.remote.oci.connection._PAUSE_S", 0.0)
    nbytes = 16 << 20

    class Slow(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.send_response(202)
            self.send_header("Location", "/up")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_PUT(self) -> None:
            left = nbytes
            while left:
                left -= len(self.rfile.read(min(left, 256 << 10)))
                time.sleep(0.03)
            self.send_response(201)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *_: object) -> None:
            """Say nothing."""

    with answered(Slow) as host, RegistryRepository(ArtifactName(host, "a", "b")) as registry:
        assert registry.upload(f"sha256:{0:064}", Body.of(bytes(nbytes)))


@pytest.mark.parametrize("place", ["tables", "layer"])
def test_what_a_manifest_says_leads_to_no_other_path(tmp_path: Path, place: str) -> None:
    bad, asked = "../../../../api/users/current?x=1", list[str]()
    document = json.loads(_document({"size": 9, "annotations": {"org.cncf.model.filepath": "x"}}))
    document["annotations"] = {"dev.tensor-dedup.manifest": "0" * 64}
    if place == "tables":
        document["annotations"]["dev.tensor-dedup.tables"] = bad
    else:
        document["layers"][0]["digest"] = bad

    class Handler(_Endless):
        answers: ClassVar = {"manifests/v1": (200, json.dumps(document).encode())}

        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

    says = r"this layer is gone|is no digest of SHA-256"
    with answered(Handler) as host, pytest.raises(DamagedRemoteError, match=says):
        open_store(tmp_path / "store").pull(f"oci://{host}/team/base:v1", "base")
    assert [path for path in asked if "current" in path] == []
