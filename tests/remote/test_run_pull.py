"""Of a run all whole steps come, whatever others have lost, and little travels for those."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from remote_runs.remotes import MemoryBucket
from remote_runs.s3_faults import FaultyProxy, MemoryS3, client
from store_runs.stores import (
    KIB,
    content,
    noise,
    open_store,
    safetensors,
    stored,
    tuned,
    u8,
    weights,
    write,
)
from tensor_dedup import Store
from tensor_dedup.remote import Remote, layout
from tensor_dedup.remote.catalog import read_table
from tensor_dedup.remote.errors import (
    CorruptRemoteTensorError,
    DamagedRemoteError,
    LostRemotelyError,
)
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.format import manifests
from tensor_dedup.training import CheckpointStore

STEPS = 8
SHARED, OWN = 1500 * KIB, 200 * KIB
# References, manifests, the catalog and tables of all steps.
BOOKS = 250 * KIB
Model = Mapping[str, Any]


def words(data: bytes) -> Any:
    return np.frombuffer(data, "<u2")


def model(step: int) -> Model:
    """Much that all steps share and that comes last, and something of the step's own."""
    return {"own": words(noise(100 + step, OWN)), "same": words(noise(1, SHARED))}


def pushed(
    tmp_path: Path, of: Callable[[int], Model] = model, *, compress: Any = None
) -> MemoryBucket:
    """A remote with a run, whose steps were pushed one by one."""
    bucket, here = MemoryBucket(), open_store(tmp_path / "here")
    with CheckpointStore(here, "run", compress=compress) as run:
        for step in range(STEPS):
            run.save(of(step), step=step)
            here.push(Remote(bucket), f"run@{step}")
    return bucket


def piece(bucket: MemoryBucket, step: int, name: str) -> bytes:
    """The digest of a tensor."""
    pieces = Remote(bucket).read(f"run@{step}").pieces
    return next(each.digest for each in pieces if each.name == name)


def containers(bucket: MemoryBucket) -> Iterator[ContainerId]:
    for key in sorted(bucket.objects):
        if (found := layout.container_of(key)) is not None:
            yield found


def holder(bucket: MemoryBucket, digest: bytes) -> ContainerId:
    """The one container that holds a piece."""
    (found,) = (
        each
        for each in containers(bucket)
        if digest in {record.digest for record in read_table(bucket, each.name).records}
    )
    return found


def spoil(bucket: MemoryBucket, digest: bytes) -> None:
    """Flip the last byte of a piece in its container."""
    container = holder(bucket, digest)
    key, records = layout.container_key(container), read_table(bucket, container.name).records
    (record,) = (each for each in records if each.digest == digest)
    blob, tag, when = bucket.objects[key]
    at = record.offset + record.stored - 1
    bucket.objects[key] = (blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :], tag, when)


def lose(bucket: MemoryBucket, digest: bytes, *, table: bool = False) -> None:
    """Lose the container of a piece and, with `table`, its table."""
    container = holder(bucket, digest)
    del bucket.objects[layout.container_key(container)]
    if table:
        del bucket.objects[layout.table_key(container.name)]


@contextmanager
def served(bucket: MemoryBucket) -> Iterator[tuple[Remote, FaultyProxy]]:
    """A remote whose bytes the proxy counts."""
    proxy = FaultyProxy(MemoryS3(bucket))
    yield Remote(client(proxy.port)), proxy
    proxy.close()


def steps(*numbers: int) -> list[str]:
    return [f"run@{number}" for number in numbers]


def assert_whole(store: Store, of: Callable[[int], Model], *numbers: int) -> None:
    assert store.names() == steps(*numbers)
    assert store.verify(full=True).fine
    with CheckpointStore(store, "run") as run:
        for number in numbers:
            for name, data in of(number).items():
                assert np.array_equal(run.load(number)[name], data)


def test_a_step_that_has_lost_a_tensor_of_its_own_keeps_no_other_from_coming(
    tmp_path: Path,
) -> None:
    bucket, there = pushed(tmp_path), open_store(tmp_path / "there")
    spoil(bucket, piece(bucket, 0, "own"))
    lose(bucket, piece(bucket, 2, "own"))
    what = rf"not pulled: run@0, run@2; steps pulled: {STEPS - 2}; run `"
    for _ in range(2):
        with (
            served(bucket) as (remote, proxy),
            pytest.raises(CorruptRemoteTensorError, match=what) as caught,
        ):
            there.pull(remote, "run")
        assert caught.value.facts["not_pulled"] == ("run@0", "run@2")
        assert_whole(there, model, 1, *range(3, STEPS))
    # What is here by now did not travel again.
    assert proxy.answered < 3 * OWN + BOOKS


@pytest.mark.parametrize("harm", [spoil, lose])
def test_what_all_steps_have_lost_is_looked_for_once(
    tmp_path: Path, harm: Callable[[MemoryBucket, bytes], None]
) -> None:
    """Each step would fetch what is its own first, and perhaps all of what they share."""
    bucket, there = pushed(tmp_path), open_store(tmp_path / "there")
    own = {holder(bucket, piece(bucket, n, "own")) for n in range(1, STEPS)}
    harm(bucket, piece(bucket, 5, "same"))
    with served(bucket) as (remote, proxy), pytest.raises(LostRemotelyError) as caught:
        there.pull(remote, "run")
    assert caught.value.facts["not_pulled"] == (*steps(*range(STEPS)),)
    got = {request.removeprefix("GET ") for request in proxy.requests}
    assert not got & {*map(layout.container_key, own)}
    # The tensor twice, for it may be hit on its way.
    assert proxy.answered < 2 * SHARED + 2 * OWN + BOOKS
    assert there.names() == []


def near(step: int) -> Model:
    """A tensor that each step stores as a difference from the first's."""
    first = weights(7, SHARED)
    return {"near": words(tuned(first, step) if step else first)}


@pytest.mark.parametrize(
    "harm",
    [spoil, lose, partial(lose, table=True)],
    ids=["spoilt", "gone", "gone with its table"],
)
def test_where_what_all_differ_from_is_lost_tables_are_read_and_no_more(
    tmp_path: Path, harm: Callable[[MemoryBucket, bytes], None]
) -> None:
    """No manifest names it: a step finds out by its tables. All of the remote's are read once."""
    bucket, there = pushed(tmp_path, near, compress="always"), open_store(tmp_path / "there")
    base, ours = piece(bucket, 0, "near"), {*containers(bucket)}
    deltas = [holder(bucket, piece(bucket, step, "near")) for step in range(1, STEPS)]
    for container in deltas:
        assert {r.base for r in read_table(bucket, container.name).records} == {base}
    aside = open_store(tmp_path / "aside")
    for number in range(3):
        data = safetensors(u8(w=noise(200 + number, 999)))
        aside.import_(write(tmp_path / f"aside-{number}", {"m.safetensors": data}), f"{number}")
        aside.push(Remote(bucket), f"{number}")
    others = {*containers(bucket)} - ours
    assert len(others) == 3
    harm(bucket, base)
    with served(bucket) as (remote, proxy), pytest.raises(LostRemotelyError) as caught:
        there.pull(remote, "run")
    assert caught.value.facts["not_pulled"] == (*steps(*range(STEPS)),)
    assert not {f"GET {layout.container_key(each)}" for each in deltas} & {*proxy.requests}
    assert proxy.answered < 2 * SHARED + BOOKS
    tables = Counter(r for r in proxy.requests if r.startswith("GET tables/"))
    assert {tables[f"GET {layout.table_key(each.name)}"] for each in others} <= {0, 1}


def test_no_byte_of_a_delta_that_is_wrong_comes_through(tmp_path: Path) -> None:
    """Also where it can be decoded, to something else."""
    bucket, there = pushed(tmp_path, near, compress="always"), open_store(tmp_path / "there")
    there.pull(Remote(bucket), "run@0")
    container = holder(bucket, piece(bucket, 1, "near"))
    key, whole = layout.container_key(container), dict(bucket.objects)
    [record] = [r for r in read_table(bucket, container.name).records if r.base is not None]
    blob, tag, when = whole[key]
    for at in range(record.offset, record.offset + record.stored, record.stored // 60):
        bucket.objects[key] = (blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :], tag, when)
        with pytest.raises(CorruptRemoteTensorError):
            there.pull(Remote(bucket), "run@1")
    assert there.names() == ["run@0"]
    assert there.verify(full=True).fine


def many(step: int) -> Model:
    return {f"w{n:02}": words(noise(1000 * step + n, 70 * KIB)) for n in range(24)}


def test_what_is_under_way_is_kept_where_something_is_lost_and_no_more_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensor_dedup.remote.pieces._RANGE_BYTES", 64 << 10)
    bucket, there = pushed(tmp_path, many), open_store(tmp_path / "there")
    digests = [piece(bucket, 0, name) for name in many(0)]
    offsets = {
        r.digest: r.offset for r in read_table(bucket, holder(bucket, digests[0]).name).records
    }
    spoil(bucket, min(digests, key=offsets.__getitem__))
    with served(bucket) as (remote, proxy), pytest.raises(CorruptRemoteTensorError):
        there.pull(remote, "run@0")
    # Four ranges are under way at once.
    assert 4 * 70 * KIB < proxy.answered < 9 * 70 * KIB


def test_what_is_under_way_is_not_asked_for_again_where_it_is_wrong_too(tmp_path: Path) -> None:
    bucket, there = pushed(tmp_path, many), open_store(tmp_path / "there")
    for name in many(0):
        spoil(bucket, piece(bucket, 0, name))
    with served(bucket) as (remote, proxy), pytest.raises(CorruptRemoteTensorError):
        there.pull(remote, "run@0")
    assert proxy.answered < (2 * 24 + 4) * 70 * KIB


def test_what_came_of_steps_that_did_not_is_kept_for_others(tmp_path: Path) -> None:
    """Each has lost something else: nothing but that travels twice."""
    bucket, there = pushed(tmp_path), open_store(tmp_path / "there")
    for step in range(STEPS):
        spoil(bucket, piece(bucket, step, "own"))
    with served(bucket) as (remote, proxy), pytest.raises(CorruptRemoteTensorError):
        there.pull(remote, "run")
    assert proxy.answered < SHARED + 4 * STEPS * OWN + BOOKS
    assert there.names() == []
    assert there.verify(full=True).fine
    there.gc()
    assert there.verify(full=True).fine


def test_what_comes_before_a_large_tensor_that_is_lost_is_kept_whole(tmp_path: Path) -> None:
    """That tensor was written in part, where the next one of its container goes."""
    bucket, large = MemoryBucket(), 9 << 20
    tensors = {"a": noise(1, 100 * KIB), "b": noise(2, large), "c": noise(3, 100 * KIB)}
    full, there = open_store(tmp_path / "full"), open_store(tmp_path / "there")
    full.import_(write(tmp_path / "w", {"m.safetensors": safetensors(u8(**tensors))}), "w")
    full.push(Remote(bucket), "w")
    pieces = {each.name: each.digest for each in Remote(bucket).read("w").pieces}
    spoil(bucket, pieces["b"])
    with pytest.raises(CorruptRemoteTensorError):
        there.pull(Remote(bucket), "w")
    assert there.verify(full=True).fine
    (kept,) = there.path.rglob("*.slab")
    assert 100 * KIB < kept.stat().st_size < large
    bucket.objects = {}
    full.push(Remote(bucket), "w")
    assert there.pull(Remote(bucket), "w").moved_bytes < large + 110 * KIB
    assert stored(there, "w") == content(tmp_path / "w")


def test_what_came_of_a_checkpoint_is_kept_for_the_next_attempt(tmp_path: Path) -> None:
    bucket, there = pushed(tmp_path), open_store(tmp_path / "there")
    whole = dict(bucket.objects)
    spoil(bucket, piece(bucket, 0, "own"))
    with served(bucket) as (remote, _), pytest.raises(CorruptRemoteTensorError):
        there.pull(remote, "run@0")
    bucket.objects = whole
    with served(bucket) as (remote, proxy):
        there.pull(remote, "run@0")
    assert OWN < proxy.answered < OWN + BOOKS
    assert_whole(there, model, 0)


def test_the_steps_that_lie_before_the_end_of_a_cut_container_come(tmp_path: Path) -> None:
    """All steps were pushed together, so their tensors lie side by side."""
    bucket, here = MemoryBucket(), open_store(tmp_path / "here")

    def alone(step: int) -> Model:
        return {"own": words(noise(100 + step, OWN))}

    with CheckpointStore(here, "run", compress=None) as run:
        for step in range(STEPS):
            run.save(alone(step), step=step)
    here.push(Remote(bucket), "run")
    container = holder(bucket, piece(bucket, 5, "own"))
    table = read_table(bucket, container.name)
    ends = {r.digest: r.offset + r.stored for r in table.records}
    cut = sorted(ends[piece(bucket, n, "own")] for n in range(STEPS))[4]
    whole = [n for n in range(STEPS) if ends[piece(bucket, n, "own")] <= cut]
    assert 0 < len(whole) < STEPS
    key = layout.container_key(container)
    blob, tag, when = bucket.objects[key]
    bucket.objects[key] = (blob[:cut], tag, when)
    there = open_store(tmp_path / "there")
    with served(bucket) as (remote, proxy), pytest.raises(DamagedRemoteError):
        there.pull(remote, "run")
    assert_whole(there, alone, *whole)
    assert proxy.answered < (len(whole) + 4) * OWN + BOOKS


def lie_about(bucket: MemoryBucket, step: int, name: str) -> None:
    """Have the manifest of a step say of a tensor that it has two bytes more."""
    found = Remote(bucket).read(f"run@{step}")
    pieces = [
        replace(p, nbytes=p.nbytes + 2, shape=(p.nbytes // 2 + 1,)) if p.name == name else p
        for p in found.pieces
    ]
    page, blob = manifests.encode_page(pieces)
    bucket.put(layout.manifest_key(page), [memoryview(blob)])
    pages, nbytes = [bytes.fromhex(page)], found.content.nbytes + 2
    manifest, blob = manifests.encode_manifest(replace(found.content, pages=pages, nbytes=nbytes))
    bucket.put(layout.manifest_key(manifest), [memoryview(blob)])
    bucket.put(layout.ref_key(found.name), [memoryview(layout.reference(found.name, manifest))])


@pytest.mark.parametrize("first", [0, 3])
def test_a_step_whose_manifest_has_a_wrong_size_keeps_no_other_from_coming(
    tmp_path: Path, first: int
) -> None:
    """Also where it comes first, and nothing here says how large that tensor is."""
    bucket, there = pushed(tmp_path), open_store(tmp_path / "there")
    there_first = range(first)
    for step in there_first:
        there.pull(Remote(bucket), f"run@{step}")
    lie_about(bucket, first, "same")
    with (
        served(bucket) as (remote, _),
        pytest.raises(DamagedRemoteError, match="expected") as caught,
    ):
        there.pull(remote, "run")
    assert caught.value.facts["not_pulled"] == (f"run@{first}",)
    assert_whole(there, model, *there_first, *range(first + 1, STEPS))
