"""Parameters that are read while their loader goes on: what it does meanwhile is not lost."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models.dedup_models import COUNT, LARGE, as_file, dedup_of, mapped, model_of, shared
from processes import process_state
from tensor_dedup import TensorDedupConfig, shares_memory, verify
from tensor_dedup.errors import ChangedFileError
from tensor_dedup.loader.not_shared import NotShared
from tensor_dedup.loader.post_load.batch import DedupContext
from tensor_dedup.loader.post_load.dedup import ModuleDedup
from tensor_dedup.loader.post_load.mapped_files import FileRange, MappedFiles
from tensor_dedup.loader.residents.leaves import may_have_parts
from tensor_dedup.loader.residents.provider import HostProvider
from tensor_dedup.loader.residents.slab import OutOfMemoryError, SlabWriter

pytestmark = pytest.mark.usefixtures("nothing_stays")


def being_read(path: Path, count: int = LARGE) -> tuple[Any, ModuleDedup, MappedFiles]:
    """A model whose one parameter, of a file, is being read."""
    path.write_bytes(as_file(1.0, count))
    model, files = mapped(path, count), MappedFiles("blake3", trust=True)
    where = model.weight.data_ptr()
    found = dedup_of(model, files)
    found.note("weight")
    assert model.weight.data_ptr() == where, "the loader waited"
    return model, found, files


def is_shared_in_the_end(model: Any, found: ModuleDedup, files: MappedFiles) -> None:
    found.settle()
    files.close()
    assert found.ledger.skipped == {}
    other = model_of(weight=torch.ones(LARGE))
    shared(other)
    assert shares_memory(model.weight, other.weight)


def test_what_is_read_while_the_loader_goes_on_is_shared_in_the_end(tmp_path: Path) -> None:
    model, found, files = being_read(tmp_path / "weights")
    found.note("weight")
    is_shared_in_the_end(model, found, files)


@pytest.mark.parametrize("also", [False, True], ids=["alone", "before one in memory"])
def test_a_write_while_it_is_read_is_not_lost(also: bool, tmp_path: Path) -> None:
    model, found, files = being_read(tmp_path / "weights")
    with torch.no_grad():
        model.weight[5] = 3.0
    if also:
        model.register_parameter("other", nn.Parameter(torch.zeros(LARGE)))
        found.note("other")
    found.settle()
    files.close()
    expected = torch.ones(LARGE)
    assert not torch.equal(model.weight, expected)
    expected[5] = 3.0
    assert torch.equal(model.weight, expected)
    other = model_of(weight=expected.clone())
    shared(other)
    assert shares_memory(model.weight, other.weight)
    assert verify().ok


def test_a_parameter_that_is_set_again_while_it_is_read_is_what_it_was_set_to(
    tmp_path: Path,
) -> None:
    model, found, files = being_read(tmp_path / "weights")
    model.weight.data = torch.full((LARGE,), 2.0)
    found.settle()
    files.close()
    assert (model.weight == 2).all()
    other = model_of(weight=torch.full((LARGE,), 2.0))
    shared(other)
    assert shares_memory(model.weight, other.weight)


def test_names_that_are_tied_while_one_is_read_stay_tied(tmp_path: Path) -> None:
    model, found, files = being_read(tmp_path / "weights")
    model.register_parameter("twin", nn.Parameter(model.weight.detach()))
    model.register_buffer("view", model.weight.detach()[:8])
    found.note("twin")
    found.settle()
    files.close()
    assert found.ledger.skipped == dict.fromkeys(("weight", "twin"), NotShared.SHARED_STORAGE)
    with torch.no_grad():
        model.twin[3] = 4.0
    assert model.weight[3] == model.view[3] == 4.0


def test_files_are_closed_when_nobody_reads_them_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()
    read = FileRange.read

    def slowly(self: FileRange, into: memoryview, offset: int) -> None:
        reading.set()
        assert go_on.wait(60)
        read(self, into, offset)

    monkeypatch.setattr(FileRange, "read", slowly)
    model, found, files = being_read(tmp_path / "weights")
    assert reading.wait(60)
    ended = threading.Thread(target=found.abandon)
    ended.start()
    ended.join(0.2)
    assert ended.is_alive(), "somebody still reads"
    go_on.set()
    ended.join(60)
    assert not ended.is_alive()
    files.close()
    assert (model.weight == 1).all()
    assert not any(str(tmp_path) in each for each in process_state.descriptors())


def test_a_file_that_is_cut_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights"
    read = FileRange.read

    def cut(self: FileRange, into: memoryview, offset: int) -> None:
        os.truncate(path, 100)
        read(self, into, offset)

    monkeypatch.setattr(FileRange, "read", cut)
    _, found, files = being_read(path)
    with pytest.raises(ChangedFileError, match="became shorter while it was being loaded"):
        found.settle()
    found.abandon()
    files.close()


def test_a_file_that_is_cut_before_its_leaves_are_looked_at_is_an_error(tmp_path: Path) -> None:
    """The memory in which it is mapped would end the process."""
    path, count = tmp_path / "weights", LARGE + COUNT
    path.write_bytes(as_file(1.0, count))
    held = model_of(weight=torch.ones(LARGE))
    shared(held)

    def load() -> bool:
        model, files = mapped(path, count), MappedFiles("blake3", trust=True)
        found = dedup_of(model, files)
        looked_at = may_have_parts(model.weight)
        os.truncate(path, 100)
        with pytest.raises(ChangedFileError, match="became shorter while it was being loaded"):
            found.note("weight")
        found.abandon()
        files.close()
        return looked_at

    assert process_state.forked(load)


def test_memory_of_what_was_copied_for_nothing_is_given_back(tmp_path: Path) -> None:
    """Two files of one load with the same bytes: the second was copied before that was known."""
    count = 1 << 20
    path = tmp_path / "weights"
    path.write_bytes(as_file(1.0, count))
    first, second = mapped(path, count), mapped(path, count)
    second.register_parameter("more", nn.Parameter(torch.full((count,), 3.0)))
    files = MappedFiles("blake3", trust=True)
    context = DedupContext(TensorDedupConfig(), HostProvider(keep_alignment=True), files)
    for model in (first, second):
        ModuleDedup(model, context).settle()
    files.close()
    assert shares_memory(first.weight, second.weight)
    slabs = {id(each.slab): each.slab for each in context.built}
    assert len(slabs) == 2
    held = sum(os.fstat(slab.fileno).st_blocks * 512 for slab in slabs.values())
    assert held <= 2 * 4 * count + (64 << 10)


def test_a_write_through_a_view_of_what_was_read_is_not_lost(tmp_path: Path) -> None:
    model, found, files = being_read(tmp_path / "weights")
    view = model.weight.data[:4]
    for name in ("second", "third"):
        path = tmp_path / name
        path.write_bytes(as_file(2.0, LARGE))
        model.register_parameter(name, nn.Parameter(mapped(path, LARGE).weight.data))
        found.note(name)
    assert model.weight.data_ptr() != view.data_ptr(), "the first is shared by now"
    view.mul_(3)
    found.settle()
    files.close()
    assert model.weight[:5].tolist() == [3, 3, 3, 3, 1]
    assert (model.second == 2).all()
    assert verify().ok


@pytest.mark.parametrize(
    ("algorithm", "short"),
    [
        ("blake3", False),
        ("blake2b", True),
        pytest.param("blake3", True, marks=pytest.mark.long),
        pytest.param("blake2b", False, marks=pytest.mark.long),
    ],
    ids=["blake3-memory", "blake2b-no memory", "blake3-no memory", "blake2b-memory"],
)
def test_what_was_written_while_it_was_read_is_not_remembered_as_the_files(
    algorithm: Any, short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights"
    numbers = torch.arange(LARGE + COUNT, dtype=torch.float32)
    path.write_bytes(numbers.numpy().tobytes())
    time.sleep(2.1)  # or nothing would be remembered of it
    put = SlabWriter.put

    def refused(self: SlabWriter, data: memoryview, offset: int) -> None:
        if len(data) > 1 << 20:
            raise OutOfMemoryError("no memory")
        put(self, data, offset)

    def load(*, write: bool) -> tuple[Any, MappedFiles]:
        storage: Any = torch.UntypedStorage.from_file(
            str(path), shared=False, nbytes=numbers.nbytes
        )
        whole = torch.empty(0).set_(storage)
        model = model_of(small=whole[:COUNT], large=whole[COUNT:])
        config = TensorDedupConfig(hash_algorithm=algorithm)
        files = MappedFiles(algorithm, trust=True)
        found = ModuleDedup(model, DedupContext(config, HostProvider(keep_alignment=True), files))
        with monkeypatch.context() as patched:
            if short and write:
                patched.setattr(SlabWriter, "put", refused)
            found._begin([("small", model.small), ("large", model.large)])
            if write:
                model.small.data[3] = -1.0
            found.settle()
        files.finish()
        remembered = {p for f in files._files.values() if f for p in (*f.known, *f.learned)}
        files.close()
        assert ((0, 4 * COUNT) in remembered) == (not write)
        return model, files

    first, _ = load(write=True)
    assert first.small[3] == -1
    second, _ = load(write=False)
    assert torch.equal(second.small, numbers[:COUNT])
    assert torch.equal(second.large, numbers[COUNT:])
    assert verify().ok


def test_a_parameter_that_is_wrapped_anew_while_it_is_read_is_shared(tmp_path: Path) -> None:
    model, found, files = being_read(tmp_path / "weights")
    model.weight = nn.Parameter(model.weight.data)
    is_shared_in_the_end(model, found, files)


def test_a_child_that_is_forked_while_it_is_read_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    read = FileRange.read

    def slowly(self: FileRange, into: memoryview, offset: int) -> None:
        assert go_on.wait(60)
        read(self, into, offset)

    monkeypatch.setattr(FileRange, "read", slowly)
    model, found, files = being_read(tmp_path / "weights")

    def child() -> bool:
        found.abandon()
        return float(model.weight.detach()[5]) == 1.0

    assert process_state.forked(child)
    go_on.set()
    found.settle()
    files.close()
    assert found.ledger.skipped == {}
