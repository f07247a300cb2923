"""What is published for slime is read by a decoder that was written after its documentation."""

import json
import shutil
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import xxhash
import zstandard
from safetensors import safe_open
from safetensors.torch import load_file

from remote_runs.remotes import Faulty, Killed, MemoryBucket
from tensor_dedup import Publisher, Remote, Store
from tensor_dedup.publishing.errors import OtherVersionsError
from tensor_dedup.publishing.slime import SlimeFolder
from tensor_dedup.remote.buckets import ObjectStatus
from tensor_dedup.store.errors import StoreBusyError
from tensor_dedup.store.steps.errors import BadOption, BadOptionError
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.errors import RunTakenError
from training_runs.published import model_at

CONFIG = {"config.json": "{}"}


class Host:
    """A host that pulls versions in order, as SGLang's endpoint does."""

    def __init__(self, source: Path) -> None:
        self.source, self.applied = source, 0
        self.weights: dict[str, torch.Tensor] = {}

    def pull(self, version: int) -> None:
        """Begin with the newest whole version, and apply what changed since then, in order."""
        start = version
        while start > self.applied and self._metadata(start).get("delta_encoding"):
            start -= 1
        if start > self.applied:
            self._reset(start)
        for number in range(self.applied + 1, version + 1):
            self._apply(number)

    def _folder(self, version: int) -> Path:
        return self.source / f"weight_v{version:06d}"

    def _metadata(self, version: int) -> dict[str, str]:
        text = (self._folder(version) / "model.safetensors.index.json").read_text()
        metadata: dict[str, str] = json.loads(text)["metadata"]
        return metadata

    def _reset(self, version: int) -> None:
        folder = self._folder(version)
        assert (folder / "config.json").read_text() == "{}"
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        self.weights = load_file(folder / "model.safetensors")
        assert index["weight_map"].keys() == self.weights.keys()
        self.applied = version

    def _apply(self, version: int) -> None:
        metadata = self._metadata(version)
        assert int(metadata["version"]) == version
        assert int(metadata["base_version"]) == self.applied
        assert metadata["delta_encoding"] == "xor"
        assert metadata["compression_format"] == "zstd"
        assert metadata["checksum_format"] == "xxh3-128"
        index = json.loads((self._folder(version) / "model.safetensors.index.json").read_text())
        for file in sorted(self._folder(version).glob("*.safetensors")):
            with safe_open(file, "np") as held:
                checks = held.metadata()
                for name in held.keys():  # noqa: SIM118 (it is no mapping)
                    assert index["weight_map"][name] == file.name
                    blob = zstandard.ZstdDecompressor().decompress(held.get_tensor(name).tobytes())
                    bits = self.weights[name].view(torch.uint8).reshape(-1)
                    bits ^= torch.frombuffer(bytearray(blob), dtype=torch.uint8)
                    assert xxhash.xxh3_128(bits.numpy().tobytes()).hexdigest() == checks[name]
        self.applied = version


def assert_at(host: Host, step: int) -> None:
    expected = model_at(step)
    assert host.weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(host.weights[name], tensor)


def test_each_step_is_a_version(tmp_path: Path) -> None:
    where = tmp_path / "policy"
    host, late = Host(where / "slime"), Host(where / "slime")
    with Publisher(where, also="slime", config=CONFIG) as policy:
        for step in (10, 20, 30):
            version = policy.publish(model_at(step // 10), step).version
            assert version == step // 10
            host.pull(version)
            assert_at(host, version)
    late.pull(3)
    assert_at(late, 3)
    whole, changed = (
        sum(path.stat().st_size for path in (where / "slime" / f"weight_v{n:06d}").iterdir())
        for n in (1, 2)
    )
    assert changed < 0.05 * whole
    store = Store.open(where)
    assert store.verify(full=True).faults == []
    store.gc(0)
    late.pull(3)


def test_a_step_without_changes_is_a_version(tmp_path: Path) -> None:
    where = tmp_path / "policy"
    with Publisher(where, also="slime", config=CONFIG) as policy:
        for step in range(3):
            policy.publish_async(model_at(1), step)
    host = Host(where / "slime")
    host.pull(3)
    assert_at(host, 1)


def test_versions_go_on_after_a_restart(tmp_path: Path) -> None:
    bucket = MemoryBucket()
    for step in range(4):
        work = tmp_path / f"work-{step // 2}"  # another host from the third step on
        remote = Remote(bucket)
        with Publisher(remote, run="policy", also="slime", work=work, config=CONFIG) as policy:
            assert policy.publish(model_at(step), step).version == step + 1
    source = tmp_path / "mounted"
    for key, (blob, *_) in bucket.objects.items():
        if key.startswith("slime/"):
            path = source / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(blob)
    host = Host(source / "slime")
    host.pull(4)
    assert_at(host, 3)
    assert host._metadata(4).get("delta_encoding") == "xor"


def test_another_step_than_the_last_version_s_begins_with_a_whole_version(tmp_path: Path) -> None:
    where = tmp_path / "policy"
    with Publisher(where, also="slime", config=CONFIG) as policy:
        policy.publish(model_at(0), 0)
    with Publisher(where, config=CONFIG) as policy:
        policy.publish(model_at(1), 1)
    with Publisher(where, also="slime", config=CONFIG) as policy:
        assert policy.publish(model_at(2), 2).version == 2
    host = Host(where / "slime")
    shutil.rmtree(where / "slime" / "weight_v000001")
    host.pull(2)
    assert_at(host, 2)


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOptionError) as caught:
        Publisher(tmp_path / "policy", also="verl")  # type: ignore[arg-type]
    assert caught.value.kind is BadOption.ALSO


def _versions(bucket: MemoryBucket) -> dict[str, bytes]:
    return {key: blob for key, (blob, *_) in bucket.objects.items() if key.startswith("slime/")}


def test_a_trainer_that_was_replaced_writes_no_version(tmp_path: Path) -> None:
    bucket = MemoryBucket()

    def opened(work: str) -> Publisher:
        place = tmp_path / work
        return Publisher(Remote(bucket), run="p", also="slime", work=place, config=CONFIG)

    one = opened("one")
    one.publish(model_at(0), 0)
    two = opened("two")
    assert two.publish(model_at(1), 1).version == 2
    before = _versions(bucket)
    with pytest.raises(RunTakenError):
        one.publish(model_at(3), 1)
    assert _versions(bucket) == before
    two.close()


def test_the_version_of_another_object_is_followed_by_a_whole_one(tmp_path: Path) -> None:
    where = tmp_path / "policy"
    one, two = (Publisher(where, also="slime", config=CONFIG) for _ in range(2))
    assert one.publish(model_at(0), 0).version == 1
    assert one.publish(model_at(1), 1).version == 2
    assert two.publish(model_at(2), 2).version == 3
    one.close()
    two.close()
    host = Host(where / "slime")
    host.pull(3)
    assert_at(host, 2)
    shutil.rmtree(where / "slime" / "weight_v000002")
    late = Host(where / "slime")
    late.pull(3)
    assert_at(late, 2)


def steps_of(tmp_path: Path, count: int) -> Store:
    """A store with the steps of a run, and no versions."""
    store = Store.open(tmp_path / "store")
    with Publisher(store, run="policy", config=CONFIG) as policy:
        for step in range(count):
            policy.publish(model_at(step), step)
    return store


def mounted(bucket: MemoryBucket, folder: Path) -> Path:
    """The versions of a bucket as the folder that hosts see."""
    for key, blob in _versions(bucket).items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(blob)
    return folder / "slime"


class Late(MemoryBucket):
    """A server on which another trainer's version is not seen before it is written."""

    def head(self, key: str) -> ObjectStatus | None:
        return None if key.startswith("slime/") else super().head(key)


def test_a_version_is_never_written_to_by_another(tmp_path: Path) -> None:
    store, bucket = steps_of(tmp_path, 2), Late()
    one, two = (SlimeFolder(bucket, store, "policy") for _ in range(2))
    assert one.write("policy@0") == 1
    before = _versions(bucket)
    assert two.write("policy@1") == 2
    assert _versions(bucket).items() > before.items()
    host = Host(mounted(bucket, tmp_path / "mounted"))
    host.pull(2)
    assert_at(host, 1)
    one.close()
    two.close()


def _write_last(folder: SlimeFolder, versions: dict[int, int]) -> None:
    versions[folder.write("policy@4")] = 4


@pytest.mark.parametrize("first", [1, 2], ids=["whole", "changes"])
def test_no_version_is_a_mix_wherever_another_trainer_comes_between(
    tmp_path: Path, first: int
) -> None:
    """The other one writes a version in front of each request of the first in turn."""
    store, at, struck = steps_of(tmp_path, 5), 0, True
    while struck:
        bucket, versions = MemoryBucket(), dict[int, int]()
        other = SlimeFolder(bucket, store, "policy")
        between = Faulty(bucket, meanwhile=partial(_write_last, other, versions))
        one = SlimeFolder(between, store, "policy")
        for step in range(first - 1):
            versions[one.write(f"policy@{step}")] = step
        between._at = len(between.calls) + at
        versions[one.write(f"policy@{first - 1}")] = first - 1
        versions[one.write(f"policy@{first}")] = first
        one.close()
        other.close()
        struck, at = between.struck and at < 40, at + 1
        folder = tmp_path / f"mounted-{at}"
        assert len(versions) == first + 1 + between.struck
        for version, step in versions.items():
            host = Host(mounted(bucket, folder))
            host.pull(version)
            assert_at(host, step)
        shutil.rmtree(folder)
    assert at > 8


def test_a_version_that_was_not_finished_is_left_out(tmp_path: Path) -> None:
    store, bucket = steps_of(tmp_path, 4), MemoryBucket()
    one = SlimeFolder(bucket, store, "policy")
    assert one.write("policy@0") == 1
    cut = Faulty(bucket, 5, "killed before")
    again = SlimeFolder(cut, store, "policy")
    again.resume("policy@0")
    with pytest.raises(Killed):
        again.write("policy@1")
    assert cut.calls[-1].startswith("put slime/weight_v000002/")
    restarted = SlimeFolder(bucket, store, "policy")
    restarted.resume("policy@0")
    assert restarted.write("policy@1") == 3
    assert restarted.write("policy@2") == 4
    for version, step in ((1, 0), (3, 1), (4, 2)):
        host = Host(mounted(bucket, tmp_path / f"mounted-{version}"))
        host.pull(version)
        assert_at(host, step)
    assert host._metadata(4).get("delta_encoding") == "xor"
    for each in (one, again, restarted):
        each.close()


def test_what_somebody_wrote_without_a_mark_is_not_replaced(tmp_path: Path) -> None:
    store, bucket = steps_of(tmp_path, 1), Late()
    index = "slime/weight_v000001/model.safetensors.index.json"
    one = SlimeFolder(bucket, store, "policy")
    bucket.put(index, [memoryview(b"{}")])
    with pytest.raises(StoreBusyError, match="has written to the folder"):
        one.write("policy@0")
    assert _versions(bucket)[index] == b"{}"
    assert one.version == 0


def test_two_runs_that_begin_at_once_are_told_apart(tmp_path: Path) -> None:
    store, bucket = steps_of(tmp_path, 1), Late()
    bucket.put("slime/writers/000001", [memoryview(b'{"run": "other", "attempt": "1"}')])
    with pytest.raises(OtherVersionsError, match="of the run 'other'"):
        SlimeFolder(bucket, store, "policy").write("policy@0")
    assert [*_versions(bucket)] == ["slime/writers/000001"]


def test_another_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = (tmp_path / "remote").as_uri()

    def opened(run: str) -> Publisher:
        return Publisher(where, run=run, also="slime", work=tmp_path / run, config=CONFIG)

    early = opened("b")
    with opened("a") as one:
        assert one.publish(model_at(0), 0).version == 1
    closed, close = list[str](), CheckpointStore.close

    def noted(run: CheckpointStore) -> None:
        closed.append(run.run_id)
        close(run)

    monkeypatch.setattr(CheckpointStore, "close", noted)
    with pytest.raises(OtherVersionsError, match="to another place"):
        opened("b")
    assert closed == ["b"]
    with pytest.raises(OtherVersionsError):
        early.publish(model_at(1), 0)
    early.close()
    with opened("a") as one:
        assert one.publish(model_at(1), 1).version == 2


def test_what_is_no_version_is_skipped(tmp_path: Path) -> None:
    where = tmp_path / "policy"
    Store.open(where)
    for name in ("weight_vlast", "old_000007", "weight_v"):
        (where / "slime" / name).mkdir(parents=True, exist_ok=True)
        (where / "slime" / name / "model.safetensors.index.json").write_text("{}")
    with Publisher(where, also="slime", config=CONFIG) as policy:
        assert policy.publish(model_at(0), 0).version == 1


def test_a_publish_waits_for_the_version_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, gate = SlimeFolder.write, threading.Event()

    def slow(folder: SlimeFolder, name: str) -> int:
        if name.endswith("@1"):
            gate.wait(0.5)
        return write(folder, name)

    monkeypatch.setattr(SlimeFolder, "write", slow)
    where = (tmp_path / "remote").as_uri()
    work = tmp_path / "work"
    with Publisher(where, also="slime", work=work, config=CONFIG, keep_last=1) as policy:
        policy.publish(model_at(0), 0)
        pending = policy.publish_async(model_at(1), 1)
        assert not pending.done()
        assert policy.publish(model_at(2), 2).version == 3
        assert pending.wait().version == 2
