"""What is shared of a model, parameter by parameter, and what stays as the loader made it."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models.dedup_models import COUNT, LARGE, as_file, dedup_of, mapped, model_of, shared
from models.leaf_tunes import near_the_limit_of_mappings
from processes import process_state
from tensor_dedup import TensorDedupConfig, shares_memory, unshare, verify
from tensor_dedup.errors import ChangedFileError
from tensor_dedup.loader.not_shared import NotShared
from tensor_dedup.loader.post_load.batch import DedupContext
from tensor_dedup.loader.post_load.dedup import ModuleDedup
from tensor_dedup.loader.post_load.mapped_files import MappedFiles
from tensor_dedup.loader.residents.manager import ResidentRequest
from tensor_dedup.loader.residents.process_mappings import ProcessMappings
from tensor_dedup.loader.residents.provider import HostProvider
from tensor_dedup.loader.residents.resident import Resident
from tensor_dedup.loader.residents.slab import SlabWriter
from vllm_runs.lent_tensors import changed, rows

pytestmark = pytest.mark.usefixtures("nothing_stays")


@pytest.mark.parametrize("offset", [0, 1000])
def test_names_that_a_file_ties_stay_tied_though_one_was_shared_before(offset: int) -> None:
    storage = torch.arange(LARGE + 2000, dtype=torch.float32)
    model = model_of(first=storage[:LARGE])
    where = model.first.data_ptr()
    found = dedup_of(model)
    found.note("first")
    assert model.first.data_ptr() != where
    model.register_parameter("second", nn.Parameter(storage[offset : offset + LARGE]))
    found.note("second")
    found.settle()
    assert model.first.data_ptr() == where
    assert model.second.data_ptr() == where + 4 * offset
    assert found.ledger.skipped == {
        "first": NotShared.SHARED_STORAGE,
        "second": NotShared.SHARED_STORAGE,
    }
    with torch.no_grad():
        model.second[-1 - offset] = -1.0
    assert model.first[-1] == -1.0


def test_neighbours_in_one_storage_are_not_taken_for_ties() -> None:
    storage = torch.arange(2 * LARGE, dtype=torch.float32)
    model = model_of(first=storage[:LARGE])
    found = dedup_of(model)
    found.note("first")
    model.register_parameter("second", nn.Parameter(storage[LARGE:]))
    found.note("second")
    found.settle()
    assert found.ledger.skipped == {}
    twin = model_of(first=storage[:LARGE].clone(), second=storage[LARGE:].clone())
    shared(twin)
    assert shares_memory(twin.first, model.first)
    assert shares_memory(twin.second, model.second)


def test_a_buffer_that_is_a_view_of_a_parameter_stays_one() -> None:
    model = model_of(weight=torch.ones(64, 64))
    model.register_buffer("view", model.weight.data[:8])
    assert shared(model).ledger.skipped == {"weight": NotShared.SHARED_STORAGE}
    with torch.no_grad():
        model.weight[0] = 7.0
    assert (model.view[0] == 7.0).all()


def test_a_buffer_that_is_a_view_of_what_was_shared_before_becomes_one_again() -> None:
    storage = torch.arange(LARGE, dtype=torch.float32)
    model = model_of(weight=storage)
    found = dedup_of(model)
    found.note("weight")
    model.register_buffer("view", storage[:8])
    found.note("view")
    found.settle()
    assert found.ledger.skipped == {"weight": NotShared.SHARED_STORAGE}
    with torch.no_grad():
        model.weight[0] = 7.0
    assert model.view[0] == 7.0


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("loading", [False, True])
def test_names_that_are_tied_after_one_was_shared_stay_tied(loading: bool, written: bool) -> None:
    model = model_of(first=torch.zeros(LARGE), second=torch.ones(64))
    found = dedup_of(model)
    found.note("first")
    if not loading:
        found.settle()
        found = dedup_of(model)
    model.second = nn.Parameter(model.first.detach())
    if written:
        with torch.no_grad():
            model.first[1] = 5.0
    found.note("second")
    found.settle()
    assert found.ledger.skipped == dict.fromkeys(("first", "second"), NotShared.SHARED_STORAGE)
    with torch.no_grad():
        model.first[0] = 7.0
    assert model.second[0] == 7.0
    other = model_of(first=torch.zeros(LARGE))
    shared(other)
    assert (other.first == 0).all()


def test_names_and_views_in_one_memory_are_in_one_after_they_are_unshared() -> None:
    model = model_of(first=torch.arange(4096.0).view(64, 64))
    other = model_of(first=torch.arange(4096.0).view(64, 64))
    shared(model)
    shared(other)
    model.second = nn.Parameter(model.first.detach())
    model.register_buffer("view", model.first.detach()[:, ::2])
    objects = [id(each) for each in (model.first, model.second, model.view)]
    assert unshare(model) == model.first.nbytes
    assert [id(each) for each in (model.first, model.second, model.view)] == objects
    assert torch.equal(model.view, other.first[:, ::2])
    with torch.no_grad():
        model.first[0, 0] = 7.0
    assert model.second[0, 0] == model.view[0, 0] == 7.0
    assert other.first[0, 0] == 0.0


def test_names_of_one_forgeable_digest_keep_their_bytes_in_whatever_order_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def submit(_: object, algorithm: str) -> "Future[str]":
        found: Future[str] = Future()
        found.set_result(f"{algorithm}:" + "0" * 16)
        return found

    monkeypatch.setattr("tensor_dedup.loader.post_load.batch.submit", submit)
    context = DedupContext(
        TensorDedupConfig(hash_algorithm="xxhash64"), HostProvider(keep_alignment=True)
    )
    one = model_of(p=torch.full((LARGE,), 1.0), q=torch.full((LARGE,), 2.0))
    ModuleDedup(one, context).settle()
    two = model_of(x=torch.full((LARGE,), 2.0), y=torch.full((LARGE,), 1.0))
    found = ModuleDedup(two, context)
    found.note("y")
    found.note("x")
    found.settle()
    assert shares_memory(two.y, one.p)
    assert (two.x == 2).all()
    assert (two.y == 1).all()


def test_a_parameter_that_a_loader_sets_twice_is_what_it_was_set_to_last() -> None:
    model = model_of(weight=torch.zeros(LARGE))
    found = dedup_of(model)
    found.note("weight")
    model.weight.data = torch.ones(LARGE)
    found.settle()
    other = model_of(weight=torch.ones(LARGE))
    shared(other)
    assert shares_memory(model.weight, other.weight)
    assert (model.weight == 1).all()


def test_a_part_takes_nothing_that_another_part_of_its_model_has() -> None:
    model: Any = nn.Sequential(model_of(a=torch.ones(64, 64)), model_of(a=torch.ones(64, 64)))
    shared(model)
    model[0].a.data = torch.ones(64, 64)
    shared(model[0])
    assert not shares_memory(model[0].a, model[1].a)
    other: Any = nn.Sequential(model_of(a=torch.ones(64, 64)), model_of(a=torch.ones(64, 64)))
    shared(other)
    assert {shares_memory(model[i].a, other[i].a) for i in (0, 1)} == {True}


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:, ::2],
        lambda data: data[:8],
        lambda data: data.t(),
        lambda data: data.view(torch.int32).view(torch.float32)[1:],
    ],
    ids=["gaps", "part", "transposed", "not from its beginning"],
)
def test_a_mapping_that_is_seen_otherwise_is_another_tensor(change: object) -> None:
    first, second = (model_of(weight=torch.arange(4096.0).view(64, 64)) for _ in range(2))
    shared(first)
    shared(second)
    assert shares_memory(first.weight, second.weight)
    assert callable(change)
    expected = change(second.weight.data).clone()
    second.weight.data = change(second.weight.data)
    shared(second)
    assert torch.equal(second.weight, expected)
    assert torch.equal(first.weight, torch.arange(4096.0).view(64, 64))


@dataclass(slots=True)
class Meddling(HostProvider):
    """Somebody writes to a file after it was hashed and before it is copied."""

    path: Path = Path()

    def get_or_build(
        self, wanted: Sequence[ResidentRequest], check: Any = None
    ) -> list[tuple[Resident, bool]]:
        with self.path.open("r+b") as file:
            file.write(as_file(2.0))
        return HostProvider.get_or_build(self, wanted, check)


@pytest.mark.parametrize(
    ("quiet", "hints", "twins"),
    [(False, True, False), (True, True, True), (False, False, True), (True, False, False)],
)
def test_a_file_that_changes_while_it_is_copied_becomes_nobodys_weights(
    tmp_path: Path, quiet: bool, hints: bool, twins: bool
) -> None:
    """Whether its times tell or not, and whether its path leads to it or not."""
    alike = model_of(weight=torch.zeros(COUNT))  # or it would be copied at once
    shared(alike)
    path = tmp_path / "weights"
    path.write_bytes(as_file(1.0))
    if quiet:
        time.sleep(2.1)
    model = mapped(path)
    if twins:
        model.register_parameter("twin", mapped(path).weight)
    files = MappedFiles("blake3", trust=True)
    provider = Meddling(keep_alignment=True, path=path)
    context = DedupContext(TensorDedupConfig(), provider, files if hints else None)
    with pytest.raises(ChangedFileError, match="changed while it was being loaded"):
        ModuleDedup(model, context).settle()
    files.close()
    assert not any(str(path) in each for each in process_state.descriptors())
    other = model_of(weight=torch.ones(COUNT))
    shared(other)
    assert (other.weight == 1).all()
    assert verify().ok


@pytest.mark.parametrize("count", [COUNT, 5 * COUNT], ids=["small", "large"])
@pytest.mark.parametrize("read", [True, False], ids=["read", "looked at"])
def test_what_is_hashed_is_what_was_copied(
    read: bool, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody writes to the file in between: nobody gets other bytes than were hashed."""
    path = tmp_path / "weights"
    path.write_bytes(as_file(1.0, count))
    step = "get" if count > COUNT and not read else "put"
    work = getattr(SlabWriter, step)

    def meddle(self: SlabWriter, piece: memoryview, offset: int) -> None:
        with path.open("r+b") as file:
            file.write(as_file(2.0, count))
        work(self, piece, offset)

    monkeypatch.setattr(SlabWriter, step, meddle)
    model, other = mapped(path, count), model_of(weight=torch.ones(count))
    files = MappedFiles("blake3", trust=True) if read else None
    ModuleDedup(
        model, DedupContext(TensorDedupConfig(), HostProvider(keep_alignment=True), files)
    ).settle()
    assert mapped(path, count).weight[0] == 2
    if files is not None:
        files.close()
    monkeypatch.undo()
    shared(other)
    assert shares_memory(model.weight, other.weight)
    assert (model.weight == 1).all()
    assert verify().ok


def test_a_range_that_was_written_in_memory_is_not_the_files(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(as_file(1.0))
    files = MappedFiles("blake3", trust=True)
    model = mapped(path)
    place = files.range_of(model.weight, ProcessMappings())
    assert place is not None
    assert (place.start, place.nbytes) == (0, 4 * COUNT)
    with torch.no_grad():
        model.weight[5] = 3.0
    assert files.range_of(model.weight, ProcessMappings()) is None
    files.close()


@pytest.mark.parametrize("name", ["weights", "weights (deleted)"])
def test_a_path_that_leads_to_another_file_by_now_says_nothing(tmp_path: Path, name: str) -> None:
    path = tmp_path / "weights"
    path.write_bytes(as_file(1.0))
    model = mapped(path)
    path.unlink()
    (tmp_path / name).write_bytes(as_file(2.0))
    files = MappedFiles("blake3", trust=True)
    memory = ProcessMappings()
    assert memory.file(model.weight) is not None
    assert files.range_of(model.weight, memory) is None
    files.close()


def test_near_the_limit_of_mappings_equal_tensors_keep_what_they_have() -> None:
    base, tune = rows(8, 1), changed(rows(8, 1), 3)
    first, second = (model_of(a=each.clone(), b=each.clone()) for each in (base, tune))
    assert not shared(first).ledger.skipped
    assert shared(second).ledger.leaf_shared_bytes  # it lies in parts, which are mappings
    third = model_of(x=tune.clone(), y=tune.clone())
    found = dedup_of(third)
    for name in "yx":  # settling would put them into the order of their names
        found.note(name)
    found._complete()
    assert all(any(shares_memory(n, o) for o in second.parameters()) for n in third.parameters())
    with near_the_limit_of_mappings():
        found.settle()
    assert all(any(shares_memory(n, o) for o in second.parameters()) for n in third.parameters())
    assert all(torch.equal(each, tune) for each in third.parameters())
