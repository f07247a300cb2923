"""The marker of a remote is written again where all else says what it is, and only there."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from remote_runs.remotes import Chunks, MemoryBucket
from store_runs.stores import content, open_store, stored, three
from tensor_dedup import Store
from tensor_dedup.remote import Remote, layout
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    NotARemoteError,
    RemoteAccessError,
)
from tensor_dedup.store.errors import NewerFormatError
from tensor_dedup.store.format import frames
from tensor_dedup.training import CheckpointStore

MARKER = frames.encode_text(layout.MARKER_LINES)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = open_store(tmp_path / "store")
    for name, path in three(tmp_path).items():
        found.import_(path, name)
    return found


@pytest.fixture(params=["memory", "folder"])
def remote(request: pytest.FixtureRequest, tmp_path: Path, store: Store) -> Remote:
    """A remote with two checkpoints and one that was deleted."""
    folder = Remote.open(tmp_path / "remote")
    found = Remote(MemoryBucket()) if request.param == "memory" else folder
    for name in ("base", "tune", "tiny"):
        store.push(found, name)
    found.delete("base")
    return found


def lose(bucket: Bucket, key: str = layout.MARKER) -> None:
    assert bucket.head(key) is not None
    bucket.delete(key)


def spoil(bucket: Bucket, key: str = layout.MARKER) -> None:
    found = bucket.get(key, layout.HEAD_BYTES)
    assert found is not None
    blob = found[0]
    bucket.put(key, [memoryview(blob[:-9] + bytes([blob[-9] ^ 1]) + blob[-8:])])


def overwrite(bucket: Bucket) -> None:
    """As with the page that a proxy shows in place of it, which is longer than any marker."""
    bucket.put(layout.MARKER, [memoryview(b"<html>" + bytes(layout.TEXT_BYTES))])


def marker(bucket: Bucket) -> bytes | None:
    found = bucket.get(layout.MARKER, layout.HEAD_BYTES)
    return None if found is None else found[0]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("harm", [lose, spoil, overwrite])
def test_verify_writes_a_lost_marker_again(
    tmp_path: Path, remote: Remote, store: Store, harm: Callable[[Bucket], None], full: bool
) -> None:
    harm(remote.bucket)
    other = open_store(tmp_path / "other")
    other.pull(remote, "tune")  # which does not look at it
    # Whoever is told so is told to do it.
    verbs: list[Callable[[], object]] = [remote.names, remote.usage, lambda: remote.gc(0)]
    if harm is lose:
        verbs.append(lambda: store.push(remote, "base"))
    for verb in verbs:
        with pytest.raises((NotARemoteError, DamagedRemoteError), match="dedup remote verify URL"):
            verb()
    before = marker(remote.bucket)
    assert before != MARKER
    (fault,) = remote.verify(full=full).faults
    assert fault.url == remote.bucket.at(layout.MARKER)
    assert fault.what.endswith("and all else says that this is a remote")
    assert marker(remote.bucket) == MARKER
    assert remote.verify(full=full).fine
    assert store.push(remote, "base").pieces
    assert remote.gc(0).done
    assert remote.verify(full=True).fine
    for name in ("base", "tiny"):
        other.pull(remote, name)
        assert stored(other, name) == content(tmp_path / name)


def test_whoever_may_only_read_is_told_so_and_more(store: Store) -> None:
    class ReadOnly(MemoryBucket):
        def put(self, key: str, chunks: Chunks) -> None:
            raise RemoteAccessError.at(self.at(key), "403 Forbidden")

        def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
            raise RemoteAccessError.at(self.at(key), "403 Forbidden")

    bucket, theirs = MemoryBucket(), ReadOnly()
    for name in ("tune", "tiny"):
        store.push(Remote(bucket), name)
    theirs.objects = dict(bucket.objects)
    lose(theirs)
    spoil_ref = layout.ref_key("tiny")
    blob, tag, when = theirs.objects[spoil_ref]
    theirs.objects[spoil_ref] = (blob[:9], tag, when)
    urls = {fault.url for fault in Remote(theirs).verify().faults}
    assert urls == {theirs.at(layout.MARKER), theirs.at(spoil_ref)}
    assert marker(theirs) is None


@pytest.mark.parametrize("harm", [lose, spoil])
@pytest.mark.parametrize("also", [lose, spoil])
def test_nothing_is_written_where_the_catalog_does_not_say_what_it_is(
    remote: Remote, harm: Callable[[Bucket], None], also: Callable[[Bucket, str], None]
) -> None:
    harm(remote.bucket)
    also(remote.bucket, layout.HEAD)
    before = marker(remote.bucket)
    both = harm is lose and also is lose
    what = "there is no remote" if both else r"nobody can tell.*; run `tensor-dedup push NAME` with"
    with pytest.raises(NotARemoteError, match=what):
        remote.verify()
    assert marker(remote.bucket) == before


def test_nobody_who_pushes_is_sent_to_a_verify_that_refuses(remote: Remote, store: Store) -> None:
    lose(remote.bucket)
    lose(remote.bucket, layout.HEAD)
    with pytest.raises(NotARemoteError, match=r"refs/\w+, and neither FORMAT nor .*; push to an"):
        store.push(remote, "base")
    with pytest.raises(NotARemoteError, match="there is no remote"):
        remote.verify()
    assert marker(remote.bucket) is None


def test_nothing_is_written_where_no_reference_can_be_read(remote: Remote) -> None:
    lose(remote.bucket)
    for name in ("base", "tune", "tiny"):
        spoil(remote.bucket, layout.ref_key(name))
    with pytest.raises(NotARemoteError, match="nor any other reference: nobody can tell"):
        remote.verify()
    assert marker(remote.bucket) is None


def test_nothing_is_written_where_all_references_are_gone_too(remote: Remote) -> None:
    """A gc would take everything for garbage, and none is ever deleted."""
    lose(remote.bucket)
    for name in ("base", "tune", "tiny"):
        lose(remote.bucket, layout.ref_key(name))
    with pytest.raises(NotARemoteError, match="there is no reference to what the catalog names"):
        remote.verify()
    assert marker(remote.bucket) is None


def test_nothing_is_written_into_the_folder_of_a_store(tmp_path: Path, store: Store) -> None:
    """Which has references, manifests and containers of the same names."""
    (store.path / layout.MARKER).unlink()
    assert (store.path / layout.ref_key("base")).exists()
    before = set(store.path.rglob("*"))
    with pytest.raises(NotARemoteError, match="there is no remote"):
        Remote.open(f"file://{store.path}").verify()
    assert set(store.path.rglob("*")) == before


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["tensor-dedup remote", "version 2"], NewerFormatError),
        (["tensor-dedup store", "version 1"], NotARemoteError),
        (["something else"], NotARemoteError),
    ],
)
def test_another_marker_is_no_damage(
    remote: Remote, lines: list[str], error: type[Exception]
) -> None:
    text = frames.encode_text(lines)
    remote.bucket.put(layout.MARKER, [memoryview(text)])
    with pytest.raises(error):
        remote.verify()
    assert marker(remote.bucket) == text


def test_a_marker_that_somebody_writes_meanwhile_stays(store: Store) -> None:
    class Meanwhile(MemoryBucket):
        def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
            if key == layout.MARKER and tag is not None:
                self.put(
                    key, [memoryview(frames.encode_text(["tensor-dedup remote", "version 2"]))]
                )
            return super().put_if(key, data, tag)

    bucket = Meanwhile()
    store.push(Remote(bucket), "tiny")
    spoil(bucket)
    with pytest.raises(NewerFormatError):
        Remote(bucket).verify()


def test_a_run_whose_second_tier_has_lost_its_marker_is_told_what_to_do(tmp_path: Path) -> None:
    remote = Remote(MemoryBucket())
    with CheckpointStore(tmp_path / "fast", "run", drain=remote) as run:
        run.save({"w": np.arange(99)}, step=0)
    lose(remote.bucket)
    with pytest.raises(NotARemoteError, match=r"no FORMAT; .*dedup remote verify URL"):
        CheckpointStore(tmp_path / "fast", "run", drain=remote)
    assert len(remote.verify().faults) == 1
    with CheckpointStore(tmp_path / "fast", "run", drain=remote) as run:
        run.save({"w": np.arange(98)}, step=1)
    assert remote.names() == ["run@0", "run@1"]
