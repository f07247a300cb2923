"""What a pull from a registry costs when connections break off, and when nothing is new."""

import hashlib
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import pytest

from remote_runs import registries
from remote_runs.remotes import Proxy, answered
from store_runs.stores import KIB, content, noise, open_store, safetensors, stored, u8, write
from tensor_dedup import Store
from tensor_dedup.remote import layout
from tensor_dedup.remote.errors import (
    RemoteAccessError,
    RemoteNameTakenError,
    RemoteUnreachableError,
)
from tensor_dedup.remote.oci import modelpack as artifacts
from tensor_dedup.remote.oci.artifact import Artifact, layers_folder
from tensor_dedup.remote.oci.modelpack import TITLE
from tensor_dedup.remote.oci.registry import ArtifactName, RegistryRepository
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.files import RealFiles

pytest.importorskip("requests")

CHUNK = 8 * KIB
RAW_LAYER = "application/vnd.cncf.model.weight.v1.raw"
BLOB = noise(1, 400 * KIB)
DIGEST = f"sha256:{hashlib.sha256(BLOB).hexdigest()}"


class Breaking(BaseHTTPRequestHandler):
    """A registry with one blob that breaks off `breaks` answers after half of what is asked for."""

    protocol_version = "HTTP/1.1"
    ranges: ClassVar[bool] = True
    breaks: ClassVar[int] = 0
    sent: ClassVar[int] = 0

    def do_GET(self) -> None:
        kind, body, status = type(self), BLOB, 200
        wanted = self.headers.get("Range")
        if wanted is not None and self.ranges:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            body, status = BLOB[int(first) : int(last) + 1 if last else None], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if kind.breaks:
            kind.breaks -= 1
            body = body[: len(body) // 2]
            self.close_connection = True
        kind.sent += len(body)
        self.wfile.write(body)

    def log_message(self, format: str, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RegistryRepository]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tensor_dedup.remote.oci.connection._PAUSE_S", 0.0)
    monkeypatch.setattr("tensor_dedup.remote.oci.connection._CHUNK_BYTES", CHUNK)
    Breaking.ranges, Breaking.breaks, Breaking.sent = True, 0, 0
    with answered(Breaking) as host, RegistryRepository(ArtifactName(host, "a/b", "c")) as found:
        yield found


def test_an_answer_that_breaks_off_after_its_last_byte_is_whole(
    registry: RegistryRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To ask for the rest would be an empty range, which a server may answer with all of it."""
    asked = list[str | None]()

    def answer(self: Breaking) -> None:
        asked.append(self.headers.get("Range"))
        first, _, last = (asked[-1] or "").removeprefix("bytes=").partition("-")
        valid = int(first) <= int(last)
        body = BLOB[int(first) : int(last) + 1] if valid else BLOB
        self.send_response(206 if valid else 200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(body), body))  # and no last chunk
        self.close_connection = True

    monkeypatch.setattr(Breaking, "do_GET", answer)
    assert b"".join(registry.blob_range(DIGEST, 100, 2100)) == BLOB[100:2100]
    assert asked == ["bytes=100-2099"]


def test_the_rest_of_a_range_is_asked_for_again(registry: RegistryRepository) -> None:
    Breaking.breaks = 3
    assert b"".join(registry.blob_range(DIGEST, 1000, 301_000)) == BLOB[1000:301_000]
    assert Breaking.breaks == 0
    assert 300_000 <= Breaking.sent < 300_000 + 3 * CHUNK


@pytest.mark.parametrize("ranges", [True, False])
def test_the_rest_of_a_layer_is_asked_for_again(registry: RegistryRepository, ranges: bool) -> None:
    Breaking.breaks, Breaking.ranges = 2, ranges
    assert b"".join(registry.chunks(DIGEST, len(BLOB))) == BLOB
    assert Breaking.breaks == 0
    least = len(BLOB) if ranges else 2 * len(BLOB)
    assert least <= Breaking.sent < least + 2 * CHUNK


def test_a_small_blob_is_asked_for_again(registry: RegistryRepository) -> None:
    Breaking.breaks = 1
    assert registry.blob(DIGEST, len(BLOB)) == BLOB
    assert Breaking.breaks == 0


def test_what_always_breaks_off_is_an_error(registry: RegistryRepository) -> None:
    for read in (
        lambda: [*registry.blob_range(DIGEST, 0, len(BLOB))],
        lambda: [*registry.chunks(DIGEST, len(BLOB))],
        lambda: registry.blob(DIGEST, len(BLOB)),
    ):
        Breaking.breaks = 1000
        with pytest.raises(RemoteUnreachableError, match=DIGEST):
            read()
        assert 990 < Breaking.breaks < 1000


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    with registries.registry(tmp_path / "registry") as found:
        yield found


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with a checkpoint of so many tensors that its tables are no small object."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(tmp_path / "cache"))
    found = open_store(tmp_path / "many-store")
    tensors = {f"layers.{n}.weight": noise(n, 400) for n in range(500)}
    path = write(tmp_path / "many", {"model.safetensors": safetensors(u8(**tensors))})
    found.import_(path, "many")
    return found


def test_who_reads_a_range_of_a_layer_may_end_it(
    proxy: Proxy, many: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an interrupted pull does, which else waits for all the ranges that it has asked for."""
    monkeypatch.setattr("tensor_dedup.remote.oci.connection._CHUNK_BYTES", CHUNK)
    url, came = f"oci://{registries.host(proxy)}/a/range:v1", list[int]()
    many.push(url, "many")

    def arrived(chunk: memoryview) -> None:
        came.append(chunk.nbytes)
        raise CancelledError

    with RegistryRepository(ArtifactName.parse(url)) as registry:
        bucket = Artifact(registry).as_bucket("many")
        assert bucket is not None
        [table] = [status.key for status in bucket.list(layout.TABLES)]
        container = ContainerId(table.rpartition("/")[2], artifacts.RAW)
        with pytest.raises(CancelledError):
            bucket.stream_range(layout.container_key(container), 0, 20 * CHUNK, arrived)
    assert came == [CHUNK]


class Choosing(BaseHTTPRequestHandler):
    """A registry that has nothing, refuses small blobs, and is slow to take large ones."""

    protocol_version = "HTTP/1.1"
    taken: ClassVar[int] = 0

    def do_GET(self) -> None:
        self.answer(404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.answer(202)

    def do_PUT(self) -> None:
        left = int(self.headers["Content-Length"])
        if left < 1 << 20:
            self.rfile.read(left)
            self.answer(403)
            return
        while left and (data := self.rfile.read(min(left, 1 << 16))):
            left -= len(data)
            type(self).taken += len(data)
            time.sleep(0.002)
        self.answer(201)

    def answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.send_header("Location", f"http://{self.headers['Host']}/v2/a/b/blobs/uploads/1")
        self.end_headers()

    def log_message(self, format: str, *_: object) -> None:
        """Say nothing."""


def test_a_push_that_fails_does_not_first_send_the_other_layers(
    tmp_path: Path, many: Store
) -> None:
    """Nor does one that is interrupted: a layer may take an hour."""
    size, small = 48 << 20, {"config.json": b"{}"}
    large = safetensors({"w": ("U8", (size,), noise(1, size))})
    many.import_(write(tmp_path / "both", {"model.safetensors": large, **small}), "both")
    Choosing.taken = 0
    with answered(Choosing) as host, pytest.raises(RemoteAccessError):
        many.push(f"oci://{host}/a/b:c", "both")
    assert Choosing.taken < size // 2


def test_an_artifact_of_which_all_is_here_is_one_small_request(
    tmp_path: Path, proxy: Proxy, many: Store
) -> None:
    url = f"oci://{registries.host(proxy)}/team/many:v1"
    many.push(url, "many")
    other = open_store(tmp_path / "other")
    proxy.reset()
    assert not other.pull(url, "many").unchanged
    assert proxy.nbytes > 64 * KIB
    proxy.reset()
    again = other.pull(url, "many")
    assert again.unchanged
    assert proxy.requests <= 2
    assert proxy.nbytes < 8 * KIB
    # A piece that is lost here comes back, though the name stands for the same.
    for path in (other.path / "containers").rglob("*.*"):
        path.unlink()
    assert other.pull(url, "many").moved_pieces > 400
    assert stored(other, "many") == content(tmp_path / "many")


def test_a_manifest_that_an_artifact_only_says_it_has_is_not_believed(
    tmp_path: Path, proxy: Proxy, many: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tables are those of another: then whole layers say what it holds."""
    url = f"oci://{registries.host(proxy)}/team/many:v1"
    decode = artifacts.decode_tables

    def another(blob: bytes, where: str) -> artifacts.ArtifactTables:
        found = decode(blob, where)
        return artifacts.ArtifactTables(bytes(32), found.objects, found.layers)

    many.push(url, "many")
    monkeypatch.setattr(artifacts, "decode_tables", another)
    other = open_store(tmp_path / "other")
    other.pull(url, "many")
    assert stored(other, "many") == content(tmp_path / "many")


class Layers(BaseHTTPRequestHandler):
    """A registry with an artifact of others: `blobs` are its layers, whose answers may break off.

    `room` counts the bytes that are answered before all breaks off for good; None: all are.
    """

    protocol_version = "HTTP/1.1"
    blobs: ClassVar[dict[str, bytes]] = {}
    document: ClassVar[bytes] = b""
    room: ClassVar[int | None] = None
    sent: ClassVar[int] = 0

    def do_GET(self) -> None:
        kind, body, status = type(self), self.document, 200
        if "/blobs/" in self.path:
            body = self.blobs[self.path.rpartition("/")[2]]
            wanted = self.headers.get("Range")
            if wanted is not None:
                body, status = body[int(wanted.removeprefix("bytes=").rstrip("-")) :], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if "/blobs/" in self.path:
            if kind.room is not None and len(body) > kind.room:
                body, self.close_connection = body[: kind.room], True
            kind.room = None if kind.room is None else kind.room - len(body)
            kind.sent += len(body)
        self.wfile.write(body)

    def log_message(self, format: str, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, dict[str, bytes]]]:
    """The URL of an artifact of others of three layers, a file each, and its files."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tensor_dedup.remote.oci.connection._PAUSE_S", 0.0)
    monkeypatch.setattr("tensor_dedup.remote.oci.connection._CHUNK_BYTES", CHUNK)
    files = {
        f"part/{n}.safetensors": safetensors(u8(**{f"w{n}": noise(n, 3072 * KIB)}))
        for n in range(3)
    }
    layers = []
    for name, data in files.items():
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        Layers.blobs[digest] = data
        layers.append(artifacts.Descriptor(RAW_LAYER, digest, len(data), {TITLE: name}))
    config = artifacts.Descriptor("application/json", DIGEST, len(BLOB), {})
    Layers.document = artifacts.manifest_blob(artifacts.MODEL, config, layers)
    Layers.room, Layers.sent = None, 0
    with answered(Layers) as host:
        yield f"oci://{host}/their/model:v1", files


def test_whole_layers_go_on_where_the_last_pull_ended(
    tmp_path: Path, theirs: tuple[str, dict[str, bytes]]
) -> None:
    url, files = theirs
    total = sum(map(len, files.values()))
    store = open_store(tmp_path / "store")
    Layers.room = total - 300 * KIB
    with pytest.raises(RemoteUnreachableError):
        store.pull(url, "theirs")
    assert Layers.sent == total - 300 * KIB
    assert store.names() == []
    Layers.room = None
    result = store.pull(url, "theirs")
    assert total <= Layers.sent < total + 1100 * KIB  # what is not written yet comes again
    assert result.wire_bytes < 1400 * KIB
    assert stored(store, "theirs") == files
    assert [*(store.path / "tmp").iterdir()] == []
    assert store.verify(full=True).fine


def test_what_a_crash_left_of_a_layer_is_not_believed(
    tmp_path: Path, theirs: tuple[str, dict[str, bytes]]
) -> None:
    """Its size is there, its bytes are not; and a file that no layer is."""
    url, files = theirs
    store = open_store(tmp_path / "store")
    Layers.room = 7000 * KIB
    with pytest.raises(RemoteUnreachableError):
        store.pull(url, "theirs")
    Layers.room = None
    left = [*(store.path / "tmp").rglob("*.safetensors")]
    assert len(left) == 3
    for path in left:
        path.write_bytes(bytes(path.stat().st_size))
    (left[0].parent / "more.bin").write_bytes(b"more")
    store.pull(url, "theirs")
    assert stored(store, "theirs") == files


def test_a_gc_takes_what_was_left_of_layers(
    tmp_path: Path, theirs: tuple[str, dict[str, bytes]]
) -> None:
    url, _ = theirs
    store = open_store(tmp_path / "store")
    Layers.room = 7000 * KIB
    with pytest.raises(RemoteUnreachableError):
        store.pull(url, "theirs")
    assert [*(store.path / "tmp").iterdir()]
    store.gc()
    assert [*(store.path / "tmp").iterdir()] == []


def test_two_pulls_of_layers_at_once_take_nothing_from_each_other(
    tmp_path: Path, theirs: tuple[str, dict[str, bytes]]
) -> None:
    url, files = theirs
    store = open_store(tmp_path / "store")
    with RegistryRepository(ArtifactName.parse(url)) as registry:
        artifact, tmp = Artifact(registry), store.path / "tmp"
        with layers_folder(tmp, artifact, RealFiles()) as first:
            (first / "part").mkdir()
            (first / "part" / "0.safetensors").write_bytes(b"half")
            store.pull(url, "theirs")
            assert stored(store, "theirs") == files
            assert (first / "part" / "0.safetensors").read_bytes() == b"half"
        assert [*tmp.iterdir()] == []


def test_a_name_that_is_taken_is_known_before_a_layer_comes(
    tmp_path: Path, theirs: tuple[str, dict[str, bytes]]
) -> None:
    """By sizes, and by digests where these are the same; and so is what is here already."""
    url, files = theirs
    store = open_store(tmp_path / "store")
    other = files | {"part/2.safetensors": safetensors(u8(w2=noise(9, 3072 * KIB)))}
    for name, held in {"other": other, "less": {**files, "config.json": b"{}"}}.items():
        store.import_(write(tmp_path / name, held), name)
        with pytest.raises(RemoteNameTakenError, match=f"'{name}' stands for .* --replace"):
            store.pull(url, name)
    assert Layers.sent == 0
    store.import_(write(tmp_path / "same", files), "same")
    again = store.pull(url, "same")
    assert (again.unchanged, again.pieces, again.nbytes) == (True, 3, sum(map(len, files.values())))
    assert Layers.sent == 0
    for path in (store.path / "containers").rglob("*.*"):
        path.unlink()
    assert store.pull(url, "same").moved_pieces == 3
    assert stored(store, "same") == files
