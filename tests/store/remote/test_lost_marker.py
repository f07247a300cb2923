"""`FORMAT` of a remote is gone or damaged: `verify` writes it anew where there is a catalog."""

from collections.abc import Callable
from pathlib import Path

import pytest

import remotes
from remotes import Faulty, MemoryBucket
from s3_faults import FaultyProxy, MemoryS3, Request, Response, client
from stores import content, open_store, stored
from tensor_dedup.store import Store
from tensor_dedup.store.errors import NewerFormatError
from tensor_dedup.store.format import frames
from tensor_dedup.store.remote import Remote, layout
from tensor_dedup.store.remote.errors import DamagedRemoteError, NotARemoteError

RIGHT = frames.encode_text(layout.MARKER_LINES)
LOST = {
    "gone": None,
    "empty": b"",
    "cut": RIGHT[:30],
    "flipped": RIGHT.replace(b"version 1", b"version 3"),
    "no text": bytes(range(128, 200)),
    "another program's": b"hello\n",
}


@pytest.fixture
def bucket(full: Store) -> MemoryBucket:
    """A remote with two checkpoints."""
    found = MemoryBucket()
    for name in ("base", "tune"):
        full.push(Remote(found), name)
    assert found.objects["FORMAT"][0] == RIGHT
    return found


def spoil(bucket: MemoryBucket, text: bytes | None) -> None:
    if text is None:
        del bucket.objects["FORMAT"]
    else:
        bucket.put("FORMAT", [memoryview(text)])


@pytest.mark.parametrize("how", LOST)
def test_it_is_written_anew_and_said(
    tmp_path: Path, full: Store, bucket: MemoryBucket, how: str
) -> None:
    spoil(bucket, LOST[how])
    remote = Remote(bucket)
    for work in (remote.names, remote.gc, remote.usage):
        with pytest.raises((NotARemoteError, DamagedRemoteError)):
            work()
    if how == "gone":
        with pytest.raises(NotARemoteError, match="remote verify URL"):
            full.push(remote, "tiny")
    found = remote.verify()
    assert [fault.url for fault in found.faults] == [bucket.at("FORMAT")]
    assert "it was" in found.faults[0].what
    assert bucket.objects["FORMAT"][0] == RIGHT
    assert remote.verify(full=True).fine
    full.push(remote, "tiny")
    assert remote.names() == ["base", "tiny", "tune"]
    here = open_store(tmp_path / "here")
    here.pull(remote, "tiny")
    assert stored(here, "tiny") == content(tmp_path / "tiny")


@pytest.mark.parametrize("how", LOST)
def test_without_a_catalog_nobody_knows_what_it_was(bucket: MemoryBucket, how: str) -> None:
    for key in [key for key in bucket.objects if key.startswith("catalog/")]:
        del bucket.objects[key]
    spoil(bucket, LOST[how])
    before = dict(bucket.objects)
    with pytest.raises((NotARemoteError, DamagedRemoteError)):
        Remote(bucket).verify()
    assert bucket.objects == before


@pytest.mark.parametrize("how", ["gone", "flipped"])
def test_a_catalog_of_a_later_version_says_that_the_marker_was_one(
    bucket: MemoryBucket, how: str
) -> None:
    spoil(bucket, LOST[how])
    bucket.put(layout.HEAD, [memoryview(frames.encode(b"rhed", [[], None, 7], 2))])
    before = dict(bucket.objects)
    with pytest.raises(NewerFormatError):
        Remote(bucket).verify()
    assert bucket.objects == before


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["tensor-dedup remote", "version 2"], NewerFormatError),
        (["something else"], NotARemoteError),
    ],
)
def test_a_whole_one_of_something_else_stays(
    bucket: MemoryBucket, lines: list[str], error: type[Exception]
) -> None:
    spoil(bucket, frames.encode_text(lines))
    before = dict(bucket.objects)
    with pytest.raises(error):
        Remote(bucket).verify()
    assert bucket.objects == before


def test_who_may_only_read_is_told_what_is_wrong(bucket: MemoryBucket) -> None:
    class Reading(MemoryS3):
        def answer(self, request: Request) -> Response:
            return Response(403) if request.verb == "PUT" else super().answer(request)

    spoil(bucket, b"")
    proxy = FaultyProxy(Reading(bucket))
    with pytest.raises(DamagedRemoteError, match="FORMAT: its checksum is wrong"):
        Remote(client(proxy.port)).verify()
    proxy.close()


@pytest.mark.parametrize("text", [RIGHT, frames.encode_text(["tensor-dedup remote", "version 2"])])
def test_one_that_somebody_else_writes_meanwhile_stays(bucket: MemoryBucket, text: bytes) -> None:
    spoil(bucket, None)
    calls = Faulty(bucket.copied())
    Remote(calls).verify()
    write: Callable[[], object] = lambda: spoil(bucket, text)  # noqa: E731
    gate = Faulty(bucket, calls.calls.index("put_if FORMAT"), meanwhile=write)
    if text == RIGHT:
        assert not Remote(gate).verify().fine
    else:
        with pytest.raises(NewerFormatError):
            Remote(gate).verify()
    assert gate.struck
    assert bucket.objects["FORMAT"][0] == text


def test_nobody_is_told_to_push_to_a_web_server(tmp_path: Path, full: Store) -> None:
    (tmp_path / "served").mkdir()
    with (
        remotes.web(tmp_path / "served") as url,
        pytest.raises(NotARemoteError, match=r"check the URL.*FORMAT and refs") as caught,
    ):
        full.pull(url, "base")
    assert "push" not in str(caught.value)
