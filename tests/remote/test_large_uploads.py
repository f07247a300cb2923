"""Large tensors: how many requests they cost, and uploads in parts that fail.

All limits are smaller by one factor, so that a "unit" is a container's 64 MiB.
"""

import http.client
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import pytest

from remote_runs import real_servers, remotes
from remote_runs.bounds import most_requests
from remote_runs.remotes import Faulty, Killed, MemoryBucket, Proxy
from remote_runs.s3_faults import FaultyProxy, RealS3, Request, Response, client
from store_runs.stores import KIB, MIB, content, noise, open_store, safetensors, stored, u8, write
from tensor_dedup.remote import Remote, layout, pieces, push, server_bucket
from tensor_dedup.remote.errors import RemoteUnreachableError

FACTOR = 8  # S3 takes no parts below 5 MiB
UNIT = 64 * MIB // FACTOR


@pytest.fixture(autouse=True)
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (layout, "CONTAINER_BYTES"),
        (server_bucket, "CONTAINER_BYTES"),
        (server_bucket, "_PART_BYTES"),
        (push, "_ASKED_BYTES"),
        (pieces, "_RANGE_BYTES"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name) // FACTOR)


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with remotes.s3() as found:
        yield found


def checkpoint(root: Path, name: str, sizes: list[float]) -> Path:
    """The folder of a checkpoint with tensors of so many MiB, before `FACTOR`, and a small one."""
    large = {f"layers.{n:02}": noise(n, int(size * MIB) // FACTOR) for n, size in enumerate(sizes)}
    tensors = u8(small=noise(99, 5 * KIB), **large)
    return write(root / name, {"model.safetensors": safetensors(tensors)})


@pytest.mark.parametrize(
    ("shared", "sizes"),
    [
        pytest.param([], [128], id="two units", marks=pytest.mark.long),
        pytest.param([], [129], id="three parts"),
        pytest.param([], [256], id="four units", marks=pytest.mark.long),
        pytest.param([], [112, 112, 112, 8, 32, 32, 8], id="a layer of Llama 8B"),
        pytest.param([], [33] * 10, id="over half a unit"),
        pytest.param([], [65] * 12, id="over a unit", marks=pytest.mark.long),
        pytest.param([], [48.5, 48.5, 30.9], id="three quarters"),
        pytest.param([], [1, 128] * 3, id="small ones between large ones"),
        pytest.param([64] * 6, [20], id="a base of many containers"),
    ],
)
def test_requests_grow_with_what_is_missing(
    tmp_path: Path, proxy: Proxy, shared: list[float], sizes: list[float]
) -> None:
    """Counted at the socket, where the base is there; and the result says the same."""
    remote = Remote(client(proxy.port, tmp_path.name))
    store, other = open_store(tmp_path / "store"), open_store(tmp_path / "other")
    store.import_(checkpoint(tmp_path, "base", shared), "base")
    store.push(remote, "base")
    other.pull(remote, "base")
    path = checkpoint(tmp_path, "tune", [*shared, *sizes])
    store.import_(path, "tune")
    for transfer in (store.push, other.pull):
        proxy.reset()
        moved = transfer(remote, "tune")
        assert moved.moved_bytes > sum(sizes) * MIB / FACTOR
        assert proxy.requests <= most_requests(moved.moved_bytes, UNIT)
        assert proxy.requests == moved.requests
    assert stored(other, "tune") == content(path)


@pytest.mark.parametrize("first", [True, False])
def test_a_push_asks_for_what_one_that_was_cut_short_can_have_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """A new one for what is sent at once; one that goes on for what is there, and one more."""
    store, start = open_store(tmp_path / "store"), MemoryBucket()
    store.import_(checkpoint(tmp_path, "tune", [40] * 12), "tune")
    if not first:
        path = write(tmp_path / "other", {"model.safetensors": safetensors(u8(x=noise(1, KIB)))})
        store.import_(path, "other")
        store.push(Remote(start), "other")

    def pushed(bucket: MemoryBucket, at: int = -1) -> Faulty:
        found = Faulty(bucket, at, "killed after")
        with suppress(Killed):
            store.push(Remote(found), "tune")
        return found

    def another() -> MemoryBucket:
        bucket = MemoryBucket()
        bucket.objects = dict(start.objects)
        return bucket

    fresh = pushed(another())
    assert len(containers(fresh, "put")) == 6
    assert len(containers(fresh, "head")) == push._AT_ONCE
    monkeypatch.setattr(push, "_AT_ONCE", 1)
    fresh = pushed(another())
    assert len(containers(fresh, "head")) == 1
    bucket = another()
    assert pushed(bucket, containers(fresh, "put")[3]).struck
    again = pushed(bucket)
    assert len(containers(again, "put")) == 2
    # For three before they are sent again or, where there is no catalog, so that their tables name
    # them, since the push relies on them; for the other two before they are sent.
    assert len(containers(again, "head")) == 5


def containers(bucket: Faulty, verb: str) -> list[int]:
    """The numbers of the calls about containers."""
    wanted = f"{verb} containers/"
    return [number for number, call in enumerate(bucket.calls) if call.startswith(wanted)]


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with real_servers.weed(tmp_path_factory.mktemp("weed") / "server") as server:
        yield server.port


class Failing(RealS3):
    """A server that, while `broken`, does one step of an upload in parts wrong each time."""

    STEPS: ClassVar = {"beginning": "uploads", "part": "partNumber=2", "completion": "uploadId="}

    def __init__(self, port: int, step: str, fault: str) -> None:
        super().__init__(port)
        self._step, self._fault, self.broken = self.STEPS[step], fault, True
        self._verb = "PUT" if step == "part" else "POST"

    def answer(self, request: Request) -> Response:
        if not self.broken or request.verb != self._verb or self._step not in request.target:
            return super().answer(request)
        if self._fault == "refused":
            return Response(500)
        if self._fault == "answer lost":
            super().answer(request)
        raise ConnectionResetError(request.name)


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        ("beginning", "answer lost"),
        ("part", "refused"),
        ("part", "lost"),
        ("completion", "lost"),
        ("completion", "answer lost"),
        *(
            pytest.param(step, fault, marks=pytest.mark.long)
            for step, fault in (
                ("beginning", "refused"),
                ("beginning", "lost"),
                ("part", "answer lost"),
                ("completion", "refused"),
            )
        ),
    ],
)
def test_an_upload_in_parts_that_fails(tmp_path: Path, seaweed: int, step: str, fault: str) -> None:
    """No name, no half of an object, and nothing that hangs; the same push again finishes."""
    store, prefix = open_store(tmp_path / "store"), tmp_path.name
    path = checkpoint(tmp_path, "tune", [150])
    store.import_(path, "tune")
    direct = Remote(client(seaweed, prefix))
    proxy = FaultyProxy(server := Failing(seaweed, step, fault))
    remote = Remote(client(proxy.port, prefix))
    with pytest.raises(RemoteUnreachableError):
        store.push(remote, "tune")
    assert direct.names() == []
    completed = (step, fault) == ("completion", "answer lost")
    sizes = [each.size for each in direct.bucket.list("containers/")]
    assert sum(size > 150 * MIB // FACTOR for size in sizes) == completed
    # Of a beginning whose answer was lost nobody knows the name, and only the server can end it.
    begun = {"answer lost": 3}.get(fault, 0) if step == "beginning" else 0
    assert hanging(seaweed, prefix) == begun
    server.broken = False
    proxy.arm()
    store.push(remote, "tune")
    begins = [name for name in proxy.requests if name.startswith("POST ")]
    assert len(begins) == (0 if completed else 2)
    other = open_store(tmp_path / "other")
    other.pull(direct, "tune")
    assert stored(other, "tune") == content(path)


def hanging(port: int, prefix: str) -> int:
    """How many uploads in parts were begun below a prefix, and neither completed nor aborted."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    link.request("GET", f"/bucket?uploads&prefix={prefix}/")
    found = link.getresponse().read().decode()
    link.close()
    assert "<ListMultipartUploadsResult" in found
    return found.count("<UploadId>")


@pytest.mark.parametrize("parts", [False, True])
def test_to_send_much_may_take_longer_than_a_server_may_be_silent(
    seaweed: int, monkeypatch: pytest.MonkeyPatch, parts: bool
) -> None:
    monkeypatch.setattr(server_bucket, "_SILENCE_S", 1)
    blob = memoryview(noise(1, 6 * MIB))

    def slow(request: Request, _: int) -> None:
        if len(request.body) > MIB:
            time.sleep(2)

    proxy = FaultyProxy(RealS3(seaweed))
    proxy.arm(before=slow)
    with real_servers.environment(real_servers.s3_environment(proxy.port)):
        bucket = Remote.open("s3://bucket/slow").bucket
        bucket.put("large", iter([blob]) if parts else [blob])
        assert len([name for name in proxy.requests if name.startswith("PUT")]) == 1
        assert bucket.get("large", blob.nbytes) is not None
