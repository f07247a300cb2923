"""What changed since the step before, beside the steps on a remote: who follows pulls only that."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from remote_runs.remotes import MemoryBucket
from tensor_dedup import Publisher, Remote, Store
from tensor_dedup.remote import layout, step_deltas
from tensor_dedup.remote.results import TransferResult
from training_runs.published import SIZE, assert_published, model_at

STEPS = 6


def step_objects(bucket: MemoryBucket) -> list[str]:
    return [key for key in bucket.objects if key.startswith(layout.STEPS)]


def published(bucket: MemoryBucket, work: Path, steps: int = STEPS) -> None:
    with Publisher(Remote(bucket), run="policy", work=work) as policy:
        for step in range(steps):
            policy.publish(model_at(step), step)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> MemoryBucket:
    """A remote with all steps."""
    bucket = MemoryBucket()
    published(bucket, tmp_path_factory.mktemp("published"))
    return bucket


@pytest.fixture
def bucket(whole: MemoryBucket) -> MemoryBucket:
    return whole.copied()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A host's store, which must be whole in the end."""
    made = Store.open(tmp_path / "host")
    yield made
    assert made.verify(full=True).faults == []


def pulled(store: Store, bucket: MemoryBucket, step: int) -> TransferResult:
    result = store.pull(Remote(bucket), f"policy@{step}")
    assert_published(store, step)
    return result


def test_who_follows_pulls_what_changed(bucket: MemoryBucket, store: Store) -> None:
    late = Store.open(store.path.parent / "late")
    costs = [pulled(store, bucket, step) for step in range(STEPS)]
    alone = pulled(late, bucket, STEPS - 1)
    last = costs[-1]
    # One anchor and one set of differences, of which those from the anchor are larger.
    assert alone.anchor_pieces == 1
    star = alone.wire_bytes - costs[0].wire_bytes
    assert star > 2.5 * last.wire_bytes
    for each in costs[2:]:
        assert each.moved_pieces > 0
        assert each.wire_bytes < 1.2 * last.wire_bytes < 0.02 * 2 * SIZE
        assert each.requests < 10


def test_who_follows_never_pulls_a_new_anchor(tmp_path: Path) -> None:
    """Of two tensors, one gets a new anchor at the step 12; a store has it as differences."""
    bucket, store = MemoryBucket(), Store.open(tmp_path / "host")
    draw = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(200_000, generator=draw).to(torch.bfloat16) for name in ("slow", "fast")
    }
    sent, came = [], []
    with Publisher(Remote(bucket), run="policy", work=tmp_path / "work") as policy:
        for step in range(14):
            sent.append(policy.publish(weights, step).sent_bytes)
            if step >= 2:
                came.append(store.pull(Remote(bucket), f"policy@{step}").wire_bytes)
            for each, share in zip(weights.values(), (4, 8), strict=True):
                few = torch.randint(each.numel(), (each.numel() * share // 100,), generator=draw)
                each.view(torch.int16)[few] += 1
    assert sent[12] > 2 * sent[11]
    assert sent[12] > 2 * sent[13]
    assert max(came[1:]) < 1.1 * min(came[1:])
    assert store.verify(full=True).faults == []


def test_who_missed_a_step_pulls_the_differences_from_the_anchor(
    bucket: MemoryBucket, store: Store
) -> None:
    following = [pulled(store, bucket, step).wire_bytes for step in range(4)]
    assert pulled(store, bucket, 5).wire_bytes > 1.5 * following[-1]


def test_what_a_store_holds_is_against_what_it_holds_alone(
    bucket: MemoryBucket, store: Store
) -> None:
    for step in range(STEPS):
        pulled(store, bucket, step)
    store.run_growth("policy")  # reads the tables
    for step in range(STEPS - 1):
        store.delete(f"policy@{step}")
    store.gc(0)
    assert_published(store, STEPS - 1)


@pytest.mark.parametrize("what", ["table", "data", "both gone", "data gone"])
def test_damaged_differences_are_not_used(
    what: str, bucket: MemoryBucket, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(4):
        pulled(store, bucket, step)
    keys = step_objects(bucket)
    assert any(key.endswith(".mixed") for key in keys)
    for key in keys:
        is_data = key.endswith(".mixed")
        if what == "both gone" or (what == "data gone" and is_data):
            bucket.delete(key)
        elif is_data == (what == "data"):
            blob = bytearray(bucket.objects[key][0])
            blob[len(blob) // 2] ^= 1
            bucket.put(key, [memoryview(blob)])
    with caplog.at_level(logging.WARNING):
        pulled(store, bucket, 4)
    assert ("is not used" in caplog.text) == (what != "both gone")


def test_the_differences_of_another_step_are_not_used(bucket: MemoryBucket, store: Store) -> None:
    """Whoever can write to the remote cannot make a store take wrong bytes."""
    for step in range(4):
        pulled(store, bucket, step)
    manifests = {step: Remote(bucket).read(f"policy@{step}").manifest for step in (4, 5)}
    for key_of in (layout.step_key, layout.step_data_key):
        one, other = key_of(manifests[4]), key_of(manifests[5])
        bucket.objects[one], bucket.objects[other] = bucket.objects[other], bucket.objects[one]
    pulled(store, bucket, 4)
    pulled(store, bucket, 5)


def test_differences_go_with_their_step(tmp_path: Path) -> None:
    bucket = MemoryBucket()
    with Publisher(Remote(bucket), run="policy", work=tmp_path / "work", keep_last=2) as policy:
        for step in range(STEPS):
            policy.publish(model_at(step), step)
    kept = [Remote(bucket).read(f"policy@{step}").manifest for step in policy.run.steps()]
    assert len(kept) == 2
    assert sorted(step_objects(bucket)) == sorted(
        key_of(each) for each in kept for key_of in (layout.step_key, layout.step_data_key)
    )


def test_a_gc_deletes_old_differences(bucket: MemoryBucket) -> None:
    keys = step_objects(bucket)
    assert keys
    Remote(bucket).gc()
    assert step_objects(bucket) == keys
    for _ in range(2):  # they are condemned, and deleted a lease later
        bucket.clock += 8 * 24 * 3600
        Remote(bucket).gc()
    assert step_objects(bucket) == []
    assert Remote(bucket).verify(full=True).fine


def test_a_step_whose_differences_are_not_taken_is_published(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(MemoryBucket):
        def put(self, key: str, chunks: object) -> None:
            if key.startswith(layout.STEPS):
                from tensor_dedup.remote.errors import RemoteAccessError

                raise RemoteAccessError.at(self.at(key), "the test says so")
            super().put(key, chunks)  # type: ignore[arg-type]

    bucket = Refusing()
    published(bucket, tmp_path / "work", 3)
    assert "is not sent" in caplog.text
    assert not step_objects(bucket)
    store = Store.open(tmp_path / "host")
    for step in range(3):
        pulled(store, bucket, step)


def test_a_step_is_published_after_one_that_was_lost(tmp_path: Path) -> None:
    bucket = MemoryBucket()
    with Publisher(Remote(bucket), run="policy", work=tmp_path / "work") as policy:
        for step in range(3):
            policy.publish(model_at(step), step)
        deltas = (tmp_path / "work").glob("containers/*/*.delta")
        max(deltas, key=lambda path: path.stat().st_mtime_ns).unlink()
        for step in (3, 4):
            policy.publish(model_at(step), step)
    store = Store.open(tmp_path / "host")
    for step in range(5):
        pulled(store, bucket, step)


def test_no_fault_of_a_difference_keeps_a_step_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr(step_deltas, "step_delta", failing)
    bucket = MemoryBucket()
    published(bucket, tmp_path / "work", 2)
    assert "is not sent" in caplog.text
    assert Remote(bucket).steps("policy") == ["policy@0", "policy@1"]


def test_a_run_without_followers_sends_none(tmp_path: Path) -> None:
    from tensor_dedup import CheckpointStore

    bucket = MemoryBucket()
    with CheckpointStore(tmp_path / "work", "policy", drain=Remote(bucket)) as run:
        for step in range(3):
            run.save(model_at(step), step)
    assert not step_objects(bucket)
