"""Checkpoints go to a remote and come back byte for byte, and only what is missing travels."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from remote_runs import remotes
from remote_runs.bounds import assert_priced, held_pieces
from remote_runs.remotes import Faulty, MemoryBucket, Proxy
from store_runs.stores import (
    KIB,
    MIB,
    content,
    layered,
    noise,
    open_store,
    safetensors,
    stored,
    tuned,
    u8,
    weights,
    with_lora,
    write,
)
from tensor_dedup import Store
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.remote import Remote
from tensor_dedup.remote.errors import RemoteNameTakenError
from tensor_dedup.store.codecs.interface import LEAVES
from tensor_dedup.store.format.tables import PLAIN, Record
from tensor_dedup.training import CheckpointStore

NAMES = ("base", "tune", "tiny")


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with remotes.s3() as found:
        yield found


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.long), "memory"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    if request.param == "memory":
        return Remote(MemoryBucket())
    if request.param == "folder":
        return Remote.open(f"file://{tmp_path}/remote")
    request.getfixturevalue("proxy")
    return Remote.open(f"s3://bucket/{tmp_path.name}")


def test_every_checkpoint_comes_back_byte_for_byte(
    tmp_path: Path, remote: Remote, full: Store
) -> None:
    for name in NAMES:
        full.push(remote, name)
    assert [each.name for each in remote.checkpoints()] == sorted(NAMES)
    other = open_store(tmp_path / "other")
    for name in NAMES:
        other.pull(remote, name)
        assert stored(other, name) == content(tmp_path / name)
        assert other.manifest(name) == full.manifest(name)
    assert other.verify(full=True).faults == []
    assert remote.verify(full=True).fine
    assert sorted(path.name for path in (other.path / "tmp").iterdir()) == []


def test_a_delta_stays_one_where_its_anchor_is_there(
    tmp_path: Path, remote: Remote, full: Store
) -> None:
    full.push(remote, "base")
    pushed = full.push(remote, "tune")
    other = open_store(tmp_path / "other")
    other.pull(remote, "base")
    pulled = other.pull(remote, "tune")
    with other.checkpoint("tune") as checkpoint:
        assert any(checkpoint.stored(tensor)[2] for tensor in checkpoint)
    changed = 400 * KIB + 70 * KIB  # the tensors that differ, as they are without encoding
    for result in (pushed, pulled):
        assert result.moved_bytes < 0.4 * changed
        assert result.saved_bytes >= 700 * KIB


def test_a_delta_whose_anchor_is_not_there_travels_as_it_decodes(
    tmp_path: Path, remote: Remote, full: Store
) -> None:
    full.push(remote, "tune")
    other = open_store(tmp_path / "other")
    other.pull(remote, "tune")
    assert stored(other, "tune") == content(tmp_path / "tune")
    with other.checkpoint("tune") as checkpoint:
        assert not any(checkpoint.stored(tensor)[2] for tensor in checkpoint)


def test_an_anchor_comes_along_where_the_remote_has_a_delta_only(
    tmp_path: Path, remote: Remote, full: Store
) -> None:
    full.push(remote, "base")
    full.push(remote, "tune")
    other = open_store(tmp_path / "other")
    result = other.pull(remote, "tune")
    assert result.moved_pieces == result.pieces
    assert result.anchor_pieces > 0
    assert other.names() == ["tune"]
    with other.checkpoint("tune") as checkpoint:
        assert any(checkpoint.stored(tensor)[2] for tensor in checkpoint)
    assert stored(other, "tune") == content(tmp_path / "tune")


@pytest.mark.parametrize("compress", [None, "auto"])
@pytest.mark.parametrize("with_base", [True, False])
def test_leaves_in_common_travel_once(
    tmp_path: Path, remote: Remote, compress: Literal["auto"] | None, with_base: bool
) -> None:
    base = noise(1, 3 * LEAF_BYTES + 5000)
    grown = base[:100] + b"a changed row" + base[113:] + noise(2, 70_000)
    full, other = open_store(tmp_path / "full"), open_store(tmp_path / "other")
    for name, data in (("base", base), ("grown", grown)):
        path = write(tmp_path / name, {"model.safetensors": safetensors(u8(embedding=data))})
        full.import_(path, name, compress=compress)
    with full.checkpoint("grown") as checkpoint:
        assert checkpoint.stored(checkpoint["embedding"])[0] == LEAVES
    full.push(remote, "base")
    changed = LEAF_BYTES + len(grown) - 3 * LEAF_BYTES  # the first leaf and the last
    assert full.push(remote, "grown").moved_bytes < changed + 64 * KIB
    if with_base:
        other.pull(remote, "base")
    pulled = other.pull(remote, "grown")
    assert pulled.moved_bytes < changed + 64 * KIB + (0 if with_base else len(base) + 64 * KIB)
    with other.checkpoint("grown") as checkpoint:
        assert checkpoint.stored(checkpoint["embedding"])[0] == LEAVES
    assert stored(other, "grown") == content(tmp_path / "grown")
    assert other.verify(full=True).faults == []
    assert remote.verify(full=True).fine


def test_plain_and_encoded_pieces_travel_in_one_container(tmp_path: Path, full: Store) -> None:
    bucket = MemoryBucket()
    for name in NAMES:
        full.push(Remote(bucket), name)
    kinds = [k.rpartition(".")[2] for k in bucket.objects if k.startswith("containers/")]
    assert kinds == ["mixed", "mixed", "pack"]
    other = open_store(tmp_path / "other")
    for name in NAMES:
        other.pull(Remote(bucket), name)
        assert stored(other, name) == content(tmp_path / name)
    assert {path.suffix for path in (other.path / "containers").rglob("*.*")} <= {
        *(".slab", ".pack", ".delta")
    }


def test_pushing_and_pulling_again_moves_nothing(
    tmp_path: Path, remote: Remote, full: Store
) -> None:
    other = open_store(tmp_path / "other")
    for _ in range(2):
        pushed = full.push(remote, "base")
        pulled = other.pull(remote, "base")
    for again, requests in ((pushed, 3), (pulled, 2)):
        assert again.unchanged
        assert again.moved_bytes == 0
        assert again.wire_bytes < 4 * KIB
        assert again.requests <= requests


def test_a_run_travels_with_its_steps_and_marks(tmp_path: Path, remote: Remote) -> None:
    store = open_store(tmp_path / "full")
    with CheckpointStore(store, "run-001") as run:
        for step in range(3):
            run.save({"frozen": np.arange(50_000), "w": np.full(9, step)}, step=step, metrics={})
        run.keep(1)
    pushed = store.push(remote, "run-001")
    steps = tuple(f"run-001@{step}" for step in range(3))
    assert pushed.names == steps
    found = remote.usage()
    assert [*steps] == [each.name for each in found.checkpoints] == remote.names()
    assert pushed.nbytes == sum(each.nbytes for each in found.checkpoints)
    assert all((each.unique_bytes or 0) > 0 for each in found.checkpoints)
    other = open_store(tmp_path / "other")
    other.pull(remote, "run-001@2")
    assert other.names() == ["run-001@2"]
    result = other.pull(remote, "run-001")
    assert other.names() == store.names()
    assert CheckpointStore(other, "run-001").kept() == {1}
    assert result.moved_bytes < 50_000  # the frozen part was there
    assert (result.names, result.pieces, result.nbytes) == (steps, pushed.pieces, pushed.nbytes)
    near = open_store(tmp_path / "near")
    copied = store.push(near.path, "run-001")
    assert (copied.names, copied.pieces, copied.nbytes) == (steps, pushed.pieces, pushed.nbytes)
    assert near.names() == store.names()
    with CheckpointStore(other, "run-001") as run:
        assert run.steps() == [0, 1, 2]
        assert run.kept() == {1}
        assert int(run.load(1)["w"][0]) == 1


def test_a_pull_of_a_run_brings_all_steps_that_are_there(tmp_path: Path, remote: Remote) -> None:
    """Those, too, that the retention rules have deleted here; with the next save they go again."""
    store = open_store(tmp_path / "store")
    with CheckpointStore(store, "run-001", keep_last=2) as run:
        for step in range(4):
            run.save({"w": np.full(9, step)}, step=step)
            store.push(remote, "run-001")
        assert run.steps() == [2, 3]
    assert store.pull(remote, "run-001@3").unchanged
    assert store.names() == ["run-001@2", "run-001@3"]
    store.pull(remote, "run-001")
    with CheckpointStore(store, "run-001", keep_last=2) as run:
        assert run.steps() == [0, 1, 2, 3]
        assert run.latest() == 3
        run.save({"w": np.full(9, 4)}, step=4)
        assert run.steps() == [3, 4]


def test_deleted_steps_cost_no_requests(tmp_path: Path, proxy: Proxy) -> None:
    """References are never removed; a list tells which of them say that their name was deleted."""
    remote, store = Remote.open("s3://bucket/pruned"), open_store(tmp_path / "store")
    with CheckpointStore(store, "run") as run:
        for step in range(40):
            run.save({"w": np.full(900, step)}, step=step)
    store.push(remote, "run")
    for step in range(37):
        remote.delete(f"run@{step}")
    assert sum(1 for _ in remote.bucket.list("refs/")) == 40
    other = open_store(tmp_path / "other")
    proxy.reset()
    pulled = other.pull(remote, "run")
    assert pulled.names == ("run@37", "run@38", "run@39")
    assert proxy.requests <= 2 + 3 * 6  # reference, manifest, page, table and data; the catalog
    proxy.reset()
    again = other.pull(remote, "run")
    assert again.unchanged
    assert again.names == pulled.names
    assert proxy.requests == again.requests == 2
    proxy.reset()
    assert remote.steps("run") == [*pulled.names]
    assert proxy.requests <= 4
    proxy.reset()
    assert remote.names() == [*pulled.names]
    assert proxy.requests <= 4 + 3 * 3


def test_a_step_that_was_replaced_there_is_not_taken_for_the_one_here(
    tmp_path: Path, proxy: Proxy
) -> None:
    remote, stores = Remote.open("s3://bucket/replaced"), []
    for number in range(2):
        store = open_store(tmp_path / f"store {number}")
        with CheckpointStore(store, "run") as run:
            for step in range(2):
                run.save({"w": np.full(900, step + number * step)}, step=step)
        stores.append(store)
    one, two = stores
    one.push(remote, "run")
    two.push(remote, "run", replace=True)
    sizes = {status.size for status in remote.bucket.list("refs/")}
    assert len(sizes) == 1
    with pytest.raises(RemoteNameTakenError):
        one.pull(remote, "run")
    one.pull(remote, "run", replace=True)
    assert one.manifest("run@1") == two.manifest("run@1")


@pytest.mark.parametrize("replace", [False, True])
def test_a_name_that_is_taken_while_pieces_travel_is_replaced_only_on_request(
    tmp_path: Path, full: Store, replace: bool
) -> None:
    bucket, other = MemoryBucket(), open_store(tmp_path / "other")
    full.push(Remote(bucket), "base")
    probe = Faulty(bucket)
    open_store(tmp_path / "probe").pull(Remote(probe), "base")
    at = next(n for n, call in enumerate(probe.calls) if call.startswith("get_range"))

    def meanwhile() -> None:
        open_store(other.path).import_(tmp_path / "tiny", "base")

    gate = Faulty(bucket, at, meanwhile=meanwhile)
    if replace:
        other.pull(Remote(gate), "base", replace=True)
    else:
        with pytest.raises(RemoteNameTakenError, match="another checkpoint here"):
            other.pull(Remote(gate), "base")
    assert gate.struck
    assert stored(other, "base") == content(tmp_path / ("base" if replace else "tiny"))


def test_nothing_travels_where_the_name_is_taken(tmp_path: Path, full: Store) -> None:
    gate, other = Faulty(MemoryBucket()), open_store(tmp_path / "other")
    full.push(Remote(gate.inner), "base")
    other.import_(tmp_path / "tiny", "base")
    with pytest.raises(RemoteNameTakenError):
        other.pull(Remote(gate), "base")
    assert {call.partition("/")[0] for call in gate.calls} == {"get refs"}


def test_another_store_is_a_remote_too(tmp_path: Path, full: Store) -> None:
    other = open_store(tmp_path / "other")
    other.import_(tmp_path / "base", "base")
    result = full.push(tmp_path / "other", "tune")
    assert result.moved_bytes < 500 * KIB
    assert stored(other, "tune") == content(tmp_path / "tune")
    third = open_store(tmp_path / "third")
    third.pull(f"file://{tmp_path}/other", "tune")
    assert stored(third, "tune") == content(tmp_path / "tune")


def test_what_was_lost_here_comes_back_by_a_pull(
    tmp_path: Path, remote: Remote, full: Store
) -> None:
    full.push(remote, "base")
    for path in (full.path / "containers").rglob("*.*"):
        path.unlink()
    assert full.verify().faults
    full.pull(remote, "base")
    assert stored(full, "base") == content(tmp_path / "base")


@pytest.mark.parametrize(
    "kind", ["one layer", pytest.param("merged LoRA", marks=pytest.mark.long), "all of it"]
)
def test_the_wire_carries_what_is_missing(tmp_path: Path, proxy: Proxy, kind: str) -> None:
    """Counted at the socket: payload, headers and the catalog of a remote with a past."""
    url = f"s3://bucket/{tmp_path.name}"
    base = [weights(n, 256 * KIB) for n in range(24)]
    tune = [base[0], *(tuned(d, n) for n, d in enumerate(base[1:]))]
    if kind == "one layer":
        tune = [noise(1, 256 * KIB), *base[1:]]
    if kind == "merged LoRA":
        tune = [with_lora(d, n) if n % 6 == 1 else d for n, d in enumerate(base)]
        assert sum(a != b for a, b in zip(tune, base, strict=True)) == 4
    store = open_store(tmp_path / "store")
    store.import_(layered(tmp_path, "base", base), "base")
    store.push(url, "base")
    for number in range(12):
        past = [noise(50 + number, 64 * KIB), *base[1:]]
        store.import_(layered(tmp_path, f"past-{number}", past), f"past-{number}")
        store.push(url, f"past-{number}")
    store.import_(layered(tmp_path, "tune", tune), "tune", compress="auto", base="base")
    encoded = any(record.codec != PLAIN for record in records(store, "tune"))
    assert encoded or kind != "all of it"
    assert not encoded or kind != "one layer"
    pieces = held_pieces(Remote.open(url).bucket)
    proxy.reset()
    pushed = store.push(url, "tune")
    assert_priced(proxy.nbytes, proxy.requests, pushed.moved_bytes, pieces)
    other = open_store(tmp_path / "other")
    other.pull(url, "base")
    proxy.reset()
    pulled = other.pull(url, "tune")
    assert_priced(proxy.nbytes, proxy.requests, pulled.moved_bytes, pieces)
    assert pulled.moved_bytes == pushed.moved_bytes
    assert stored(other, "tune") == content(tmp_path / "tune")
    size = sum(map(len, tune))
    most = {"one layer": 0.05, "merged LoRA": 0.18, "all of it": 0.6}
    assert pulled.moved_bytes < most[kind] * size
    proxy.reset()
    assert other.pull(url, "tune").unchanged
    assert proxy.requests <= 2
    assert proxy.nbytes < 8 * KIB


def records(store: Store, name: str) -> list[Record]:
    with store.checkpoint(name) as checkpoint:
        return [r for t in checkpoint for r in checkpoint.records(bytes.fromhex(t.digest))]


def test_many_pieces_need_few_requests(tmp_path: Path) -> None:
    bucket = MemoryBucket()
    store = open_store(tmp_path / "store")
    tensors = u8(**{f"t{n:04}": noise(n, 3000 + n) for n in range(700)})
    path = write(tmp_path / "many", {"model.safetensors": safetensors(tensors)})
    store.import_(path, "many")
    pushed = store.push(Remote(bucket), "many")
    assert pushed.pieces == 701
    other = open_store(tmp_path / "other")
    pulled = other.pull(Remote(bucket), "many")
    pieces = held_pieces(bucket)
    assert pieces == 701
    assert_priced(pulled.wire_bytes, pulled.requests, pulled.moved_bytes, pieces)
    assert stored(other, "many") == content(path)


def test_large_pieces_travel_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small limits: a piece longer than a container, and longer than a range."""
    from tensor_dedup.remote import layout, pieces

    monkeypatch.setattr(layout, "CONTAINER_BYTES", 1 * MIB)
    monkeypatch.setattr(pieces, "_RANGE_BYTES", 700_000)
    bucket = MemoryBucket()
    store = open_store(tmp_path / "store")
    tensors = u8(large=noise(1, 9 * MIB + 5), b=noise(2, 900 * KIB), c=noise(3, 900 * KIB))
    path = write(tmp_path / "m", {"model.safetensors": safetensors(tensors)})
    store.import_(path, "m")
    store.push(Remote(bucket), "m")
    sizes = [len(o[0]) for key, o in bucket.objects.items() if key.startswith("containers/")]
    assert max(sizes) > 9 * MIB
    assert len(sizes) == 2  # b alone does not fill one
    other = open_store(tmp_path / "other")
    other.pull(Remote(bucket), "m")
    assert stored(other, "m") == content(path)


def test_a_slow_pull_leaves_few_containers_that_are_complete_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, bucket = open_store(tmp_path / "full"), MemoryBucket()
    tensors = {f"t{n:02}": noise(n, 150 * KIB) for n in range(40)}
    full.import_(write(tmp_path / "model", {"m.safetensors": safetensors(u8(**tensors))}), "base")
    full.push(Remote(bucket), "base")
    monkeypatch.setattr("tensor_dedup.store.writing.transfer._FEWEST_BYTES", 400 * KIB)

    def sizes(name: str) -> list[int]:
        store = open_store(tmp_path / name)
        store.pull(Remote(bucket), "base")
        assert stored(store, "base") == content(tmp_path / "model")
        found = (store.path / "containers").rglob("*.*")
        return sorted(each for path in found if (each := path.stat().st_size) > 100 * KIB)

    assert len(sizes("fast")) == 1
    monkeypatch.setattr("tensor_dedup.remote.pull._CONTAINER_S", 0.0)
    slow = sizes("slow")
    assert 8 <= len(slow) <= 14
    assert all(size >= 400 * KIB for size in slow[1:])


def test_a_dry_push_and_a_dry_pull_send_no_request_that_writes(tmp_path: Path, full: Store) -> None:
    bucket = MemoryBucket()
    remote, other = Remote(bucket), open_store(tmp_path / "other")
    other.verify()  # makes the index
    for name in NAMES:
        before = dict(bucket.objects)
        assert not full.push(remote, name, dry_run=True).unchanged
        assert bucket.objects == before
        full.push(remote, name)
        there, here = dict(bucket.objects), content(other.path)
        planned = other.pull(remote, name, dry_run=True)
        assert (bucket.objects, content(other.path)) == (there, here)
        assert planned.moved_pieces == other.pull(remote, name).moved_pieces > 0
