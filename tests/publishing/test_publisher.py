"""What a publish leaves at a folder and at a remote, and what it costs."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from processes import fresh
from remote_runs.remotes import MemoryBucket, s3
from tensor_dedup import Publisher, Store
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.publishing.publisher import Published
from tensor_dedup.remote import Remote
from tensor_dedup.store.errors import BadNameError
from tensor_dedup.store.steps.errors import BadOption, BadOptionError
from tensor_dedup.training.errors import DrainError, RunTakenError
from training_runs.published import SIZE, assert_published, model_at, weights_of

CONFIG = {"config.json": "{}"}


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def bucket() -> Iterator[str]:
    with s3():
        yield "s3://bucket/policy"


def test_a_folder_has_each_step_as_a_small_difference(tmp_path: Path) -> None:
    with Publisher(tmp_path / "policy", config=CONFIG) as policy:
        costs = [policy.publish(model_at(step), step, {"reward": step}) for step in range(3)]
    store = Store.open(tmp_path / "policy")
    for step in range(3):
        assert_published(store, step)
    first, *others = costs
    assert first.name == "policy@0"
    assert first.new_tensors > 2
    assert first.new_bytes == first.nbytes
    for each in others:
        assert each.new_bytes > 2 * SIZE  # all of it was new, and little was stored
        assert 0 < each.stored_bytes < 0.05 * each.nbytes
        assert each.sent_bytes == each.requests == 0
    assert {step.step: step.metrics["reward"] for step in store.steps("policy")} == {
        0: 0,
        1: 1,
        2: 2,
    }


def test_an_unchanged_model_costs_nothing_but_its_name(tmp_path: Path) -> None:
    with Publisher(tmp_path / "policy") as policy:
        assert policy.publish(model_at(1), 1).stored_bytes > SIZE
        again = policy.publish(model_at(1), 2)
    assert again.new_tensors == 0
    assert again.stored_bytes < 4096


def test_a_remote_gets_the_difference_alone(bucket: str, tmp_path: Path) -> None:
    with Publisher(bucket, work=tmp_path / "work", config=CONFIG) as policy:
        costs = [policy.publish(model_at(step), step) for step in range(3)]
        other = Store.open(tmp_path / "other")
        other.pull(bucket, "policy@2")
    assert_published(other, 2)
    assert costs[0].sent_bytes > SIZE
    assert all(0 < each.sent_bytes < 0.05 * each.nbytes and each.requests for each in costs[1:])


def test_training_goes_on_while_a_step_is_published(bucket: str, tmp_path: Path) -> None:
    weights = model_at(0)
    with Publisher(bucket, work=tmp_path / "work") as policy:
        policy.publish(weights, 0)
        pending = []
        for step in (1, 2):
            for name, tensor in model_at(step).items():
                weights[name].copy_(tensor)
            pending.append(policy.publish_async(weights, step))
        weights["large"].zero_()
        assert [each.wait().step for each in pending] == [1, 2]
        assert isinstance(pending[0].wait(), Published)
    other = Store.open(tmp_path / "other")
    for step in (1, 2):
        other.pull(bucket, f"policy@{step}")
        assert_published(other, step)


def test_few_steps_stay(tmp_path: Path) -> None:
    with Publisher(tmp_path / "policy", keep_last=2, keep_every=3) as policy:
        for step in range(6):
            policy.publish(model_at(step), step)
        assert policy.run.steps() == [0, 3, 4, 5]
        policy.run.gc(grace_hours=0)
    assert_published(Store.open(tmp_path / "policy"), 5)


def test_names_come_from_the_place(tmp_path: Path) -> None:
    assert Publisher(tmp_path / "a").run.run_id == "a"
    assert Publisher(tmp_path / "b", run="other").run.run_id == "other"
    url = (tmp_path / "remote" / "policy").as_uri()
    assert Publisher(url, work=tmp_path / "work").run.run_id == "policy"
    with pytest.raises(BadNameError):
        Publisher(tmp_path / "c", run="")


def test_each_url_has_a_working_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(tmp_path / "cache"))
    urls = [(tmp_path / each / "policy").as_uri() for each in "ab"]
    stores = [Publisher(url).run.store.path for url in urls]
    assert stores[0] != stores[1]
    assert all(path.is_relative_to(tmp_path / "cache") for path in stores)
    with pytest.raises(BadOptionError) as caught:
        Publisher(tmp_path / "folder", work=tmp_path / "work")
    assert caught.value.kind is BadOption.WORK


def test_tied_weights_are_published_once(tmp_path: Path) -> None:
    model = Tied()
    assert len(model.state_dict()) == 2
    with Publisher(tmp_path / "policy") as policy:
        policy.publish(nn.DataParallel(model), 0)
    found = weights_of(Store.open(tmp_path / "policy"), "policy@0")
    assert found.keys() == {"embed.weight"}
    assert torch.equal(found["embed.weight"], model.embed.weight)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    adapted = nn.Linear(2, 2)
    adapted.merge_and_unload = None  # type: ignore[assignment]
    with Publisher(tmp_path / "policy") as policy:
        for wrong in (adapted, {"a": 1.0}, "model"):
            with pytest.raises(UnsupportedError):
                policy.publish(wrong, 0)  # type: ignore[arg-type]
        assert policy.run.steps() == []


def test_a_second_trainer_takes_the_run_over_and_sends_differences(
    bucket: str, tmp_path: Path
) -> None:
    one = Publisher(bucket, work=tmp_path / "one")
    for step in range(2):
        one.publish(model_at(step), step)
    two = Publisher(bucket, work=tmp_path / "two")
    cost = two.publish(model_at(2), 2)
    assert cost.sent_bytes < 0.05 * cost.nbytes
    with pytest.raises(RunTakenError):
        one.publish(model_at(3), 3)
    two.publish(model_at(3), 3)
    two.close()
    other = Store.open(tmp_path / "other")
    for step in range(4):
        other.pull(bucket, f"policy@{step}")
        assert_published(other, step)


def test_trainers_that_replace_each_other_send_differences(tmp_path: Path) -> None:
    """Also where the one that comes back has the step before the last."""
    server = MemoryBucket()
    for step in range(6):
        work = tmp_path / f"work-{step % 2}"
        with Publisher(Remote(server), run="policy", work=work) as policy:
            cost = policy.publish(model_at(step), step)
        assert step == 0 or cost.sent_bytes < 0.08 * cost.nbytes
    other = Store.open(tmp_path / "other")
    other.pull(Remote(server), "policy")
    for step in range(6):
        assert_published(other, step)


def test_a_working_folder_that_was_lost_is_restored(bucket: str, tmp_path: Path) -> None:
    with Publisher(bucket, work=tmp_path / "work") as policy:
        policy.publish(model_at(0), 0)
    with Publisher(bucket, work=tmp_path / "new") as policy:
        cost = policy.publish(model_at(1), 1)
    assert cost.sent_bytes < 0.05 * cost.nbytes


def test_a_base_is_what_the_first_step_differs_from(bucket: str, tmp_path: Path) -> None:
    source = Store.open(tmp_path / "source")
    with Publisher(source, run="base") as base:
        base.publish(model_at(0), 0)
    source.push(bucket, "base@0")
    with Publisher(bucket, work=tmp_path / "work", base="base@0") as policy:
        cost = policy.publish(model_at(1), 1)
    assert cost.sent_bytes < 0.05 * cost.nbytes


class Refusing(MemoryBucket):
    """A server that takes nothing while `full` is set."""

    full = False

    def put(self, key: str, chunks: Any) -> None:
        if self.full:
            from tensor_dedup.remote.errors import RemoteUnreachableError

            raise RemoteUnreachableError.at(self.url, "the test says so")
        super().put(key, chunks)


def test_what_the_remote_did_not_take_is_sent_by_the_next_publish(tmp_path: Path) -> None:
    server = Refusing()
    policy = Publisher(Remote(server), run="policy", work=tmp_path / "work")
    policy.publish(model_at(0), 0)
    server.full = True
    with pytest.raises(DrainError):
        policy.publish(model_at(1), 1)
    server.full = False
    policy.publish(model_at(2), 2)
    policy.close()
    assert Remote(server).steps("policy") == ["policy@0", "policy@1", "policy@2"]


def _killed(folder: str, url: str) -> None:
    """Publish until the kill, which comes in the middle of the third step."""
    policy = Publisher(url, work=f"{folder}/work")
    for step in range(2):
        policy.publish(model_at(step), step)
    policy.publish_async(model_at(2), 2)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_trainer_that_was_killed_goes_on(tmp_path: Path) -> None:
    url = (tmp_path / "policy").as_uri()
    with pytest.raises(AssertionError, match="ended with -9"):
        fresh.call(_killed, str(tmp_path), url)
    with Publisher(url, work=tmp_path / "work") as policy:
        assert policy.run.latest() in (1, 2)
        for step in (2, 3):
            cost = policy.publish(model_at(step), step)
            assert cost.sent_bytes < 0.05 * cost.nbytes
    other = Store.open(tmp_path / "other")
    other.pull(url, "policy")
    for step in range(4):
        assert_published(other, step)
