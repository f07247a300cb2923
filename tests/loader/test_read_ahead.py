"""Reading the next final tensor while one is processed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tensor_dedup.digest import digest
from tensor_dedup.loader.deferred.evaluate import Prefetcher, Scratch
from tensor_dedup.loader.deferred.storage import as_view
from vllm_runs.deferring import Deferred, deferred, module, raw, save

A, B, C = (torch.randn(64, 1024, generator=torch.Generator().manual_seed(n)) for n in range(3))


def copy_all(model: Any, weights: Any) -> None:
    model.first.data.copy_(weights["a"])
    model.second.data.copy_(weights["b"])
    model.cast.data.copy_(weights["c"])


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Deferred]:
    path = save(tmp_path / "a.safetensors", {"a": A, "b": B, "c": C})
    empty = torch.zeros(64, 1024)
    model = module(first=empty.clone(), second=empty.clone(), cast=empty.bfloat16())
    with deferred(model, path, copy_all) as run:
        yield run


def ahead_of(run: Deferred, *names: str) -> Prefetcher:
    made = Prefetcher(run.reader, Scratch(), run.evaluator)
    made.plan([run.parameters[name] for name in names])
    return made


def test_what_was_begun_is_there_when_it_is_taken(run: Deferred) -> None:
    ahead = ahead_of(run, "first", "second")
    ahead.begin(lambda each: each.name == "second")
    block = ahead.take(run.parameters["second"])
    assert block is not None
    assert raw(as_view(block, run.view("second"))) == raw(B)
    assert run.file.tensors["b"].digest == digest(raw(B))
    assert run.file.reads == {"b": 1}


def test_another_tensor_gets_nothing_of_it(run: Deferred) -> None:
    ahead = ahead_of(run, "second")
    ahead.begin(lambda each: True)
    assert ahead.take(run.parameters["first"]) is None
    assert ahead.take(run.parameters["second"]) is not None
    assert ahead.take(run.parameters["second"]) is None


def test_only_one_is_under_way(run: Deferred) -> None:
    ahead = ahead_of(run, "first", "second")
    ahead.begin(lambda each: True)
    ahead.begin(lambda each: True)
    assert run.reader.begun == 1


def test_a_recipe_that_computes_is_not_begun(run: Deferred) -> None:
    ahead = ahead_of(run, "cast")
    ahead.begin(lambda each: True)
    assert ahead.take(run.parameters["cast"]) is None
    assert run.file.reads == {}


def test_waiting_for_one_does_not_wait_for_what_was_begun_later(run: Deferred) -> None:
    blocks = [torch.empty(64 * 1024 * 4, dtype=torch.uint8) for _ in range(2)]
    assert run.evaluator.begin(run.view("first"), blocks[0])
    mark = run.reader.begun
    assert run.evaluator.begin(run.view("second"), blocks[1])
    run.reader.settle(mark)
    assert run.file.tensors["a"].digest == digest(raw(A))
    assert run.file.tensors["b"].digest is None
    run.reader.settle()
    assert run.file.tensors["b"].digest == digest(raw(B))
