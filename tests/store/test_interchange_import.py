"""A folder of data files goes into the store tensor by tensor, and comes out as it was."""

from pathlib import Path

import pytest
import torch

from files.refusals import refused
from store_runs.stores import content
from tensor_dedup import Store
from tensor_dedup.digest import digest
from tensor_dedup.errors import CheckpointNotFoundError, FormatError
from tensor_dedup.formats.checkpoint import open_checkpoint
from tensor_dedup.formats.errors import (
    CheckpointFault,
    TensorIndexFault,
)
from tensor_dedup.formats.weights import read_header
from tensor_dedup.store.errors import CorruptTensorError
from tensor_dedup.store.interchange import load_dict, save_dict


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    fused = torch.randn(96, 64, generator=generator)
    return {
        "embed": torch.randn(300, 1024, generator=generator).bfloat16(),
        "q": fused[:32],
        "k": fused[32:64],
        "v": fused[64:],
        "tied": torch.ones(9),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "wide": torch.ones(4, dtype=torch.complex128),
        "z_empty": torch.empty(0),
    }


def test_each_tensor_is_a_piece(store: Store, tmp_path: Path) -> None:
    state_dict = tensors()
    state_dict["tied.again"] = state_dict["tied"]
    state_dict["q.T"] = state_dict["q"].T
    save_dict(state_dict, tmp_path / "saved")
    result = store.import_(tmp_path / "saved", "saved")
    assert result.skipped == ()
    with store.checkpoint("saved") as checkpoint:
        # What has no bytes of its own, or no name in safetensors, has no entry.
        assert {t.name for t in checkpoint} == set(tensors()) - {"wide"}
        for tensor in checkpoint:
            data = state_dict[tensor.name].contiguous().reshape(-1).view(torch.uint8)
            assert tensor.digest == digest(data.numpy().tobytes())
            assert checkpoint.read(tensor) == data.numpy().tobytes()
    store.export("saved", tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "saved")
    found = load_dict(tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in state_dict.items())
    assert store.import_(tmp_path / "out", "again").new_tensors == 0


@pytest.mark.parametrize("limit", [4096, 300_000, 10**10])
def test_views_come_back_from_the_store_too(store: Store, tmp_path: Path, limit: int) -> None:
    state_dict = tensors()
    state_dict |= {"tied.again": state_dict["tied"], "q.T": state_dict["q"].T}
    views = {"some": ["q.T", "tied"]}
    save_dict(state_dict, tmp_path / "saved", max_file_bytes=limit, views=views)
    store.import_(tmp_path / "saved")
    with store.checkpoint("saved") as checkpoint:
        found = load_dict(checkpoint)
        some = load_dict(checkpoint, names=views["some"], view="some")
    assert set(found) == set(state_dict)
    assert all(torch.equal(found[name], tensor) for name, tensor in state_dict.items())
    assert found["q"].untyped_storage().data_ptr() == found["v"].untyped_storage().data_ptr()
    assert torch.equal(some["q.T"], state_dict["q.T"])
    container = max((tmp_path / "store").rglob("*"), key=lambda path: path.stat().st_size)
    data = bytearray(container.read_bytes())
    data[len(data) // 3] ^= 1
    container.write_bytes(data)
    with store.checkpoint("saved") as checkpoint, pytest.raises(CorruptTensorError):
        load_dict(checkpoint, verify=False)


def test_other_checkpoints_have_no_index(store: Store, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    store.import_(tmp_path / "a.safetensors")
    with store.checkpoint("a") as checkpoint, pytest.raises(CheckpointNotFoundError):
        load_dict(checkpoint)


def test_what_safetensors_hold_already_is_stored_once(store: Store, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    wanted = ("embed", "tied", "scalar")
    state_dict = {name: tensors()[name] for name in wanted}
    save_file(state_dict, tmp_path / "a.safetensors")
    store.import_(tmp_path / "a.safetensors")
    save_dict(state_dict, tmp_path / "saved")
    result = store.import_(tmp_path / "saved")
    assert (result.tensors, result.new_tensors) == (3, 0)


@pytest.mark.parametrize("limit", [4096, 300_000, 614_400])
def test_several_data_files_are_one_checkpoint(store: Store, tmp_path: Path, limit: int) -> None:
    save_dict(tensors(), tmp_path / "saved", max_file_bytes=limit)
    checkpoint = open_checkpoint(tmp_path / "saved")
    names = [file.path.name for file in checkpoint.files]
    assert names == [f"tensor.data_{number}" for number in range(len(names))]
    store.import_(tmp_path / "saved")
    store.export("saved", tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "saved")
    # Those that lie in one file have a name; of others only the bytes are there.
    sizes = [limit // 4096 * 4096 * number for number in range(len(names))]
    with store.checkpoint("saved") as stored:
        assert {"scalar", "z_empty"} <= {tensor.name for tensor in stored}
        assert ("embed" in {tensor.name for tensor in stored}) == (limit >= 614_400)
    assert sum(file.header.file_size for file in checkpoint.files) > sizes[-1]


def test_liars_are_not_imported(store: Store, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    save_dict(tensors(), saved, max_file_bytes=300_000)
    (saved / "tensor.data_1").rename(tmp_path / "away")
    with refused(CheckpointFault.MISSING_SHARD, match=r"tensor\.data_1"):
        store.import_(saved)
    (tmp_path / "away").rename(saved / "tensor.data_1")
    (saved / "tensor.data_2").write_bytes(b"")
    with refused(TensorIndexFault.STORAGE_BEYOND_DATA):
        store.import_(saved)
    (saved / "tensor_index.json").write_text('{"a": [0]}')
    with pytest.raises(FormatError, match="a list of 1"):
        store.import_(saved)
    with pytest.raises(FormatError, match="a list of 1"):
        read_header(saved / "tensor.data_0")
    assert store.list() == []


def test_safetensors_beside_an_index_come_first(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_dict({"a": torch.ones(3)}, tmp_path / "both")
    save_file({"b": torch.ones(3)}, tmp_path / "both" / "model.safetensors")
    assert [name for name, _, _ in open_checkpoint(tmp_path / "both").tensors()] == ["b"]
