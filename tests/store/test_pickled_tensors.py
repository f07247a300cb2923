"""Tensors of stored files of torch.save: what torch.load makes of the file, or an error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from files.pytorch_files import AMBIGUOUS, bytes_of, file_of, flat
from files.refusals import refused
from store_runs.stores import safetensors
from tensor_dedup import Store
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.formats import weights
from tensor_dedup.formats.errors import CheckpointFault, PytorchFault
from tensor_dedup.store.errors import UnknownTensorError
from tensor_dedup.store.reading.tensors import iter_tensors, load_tensors

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
    pytest.mark.filterwarnings("ignore:Sparse"),
]
Loads = Callable[[Store], dict[str, torch.Tensor]]


def noise(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    raw = torch.randn(*shape, dtype=torch.float64).abs() * 100
    if dtype.is_complex:
        return torch.complex(raw, raw.flip(0)).to(dtype)
    return raw.to(dtype)


def tensors() -> dict[str, Any]:
    """Every way in which a tensor lies in a storage."""
    wide = noise(torch.float32, 12, 10)
    pair = noise(torch.complex64, 6, 4)
    fused = noise(torch.bfloat16, 6, 4)
    q, k, v = fused.chunk(3)
    return {
        "plain": noise(torch.float32, 3, 5),
        "transposed": noise(torch.float16, 4, 6).t(),
        "steps": noise(torch.int32, 9)[::2],
        "columns": wide[:, 2:5],
        "across": wide[3:9],
        "one": wide[5:6, 3],
        "expanded": noise(torch.float32, 1)[0].expand(3, 4),
        "conjugated": noise(torch.complex128, 3, 2).conj(),
        "conjugated and transposed": pair.mH,
        "imaginary": noise(torch.complex64, 3).conj().imag,
        "negated": torch._neg_view(noise(torch.float64, 5)),
        "both": torch._neg_view(noise(torch.complex64, 2).conj()),
        "c128": noise(torch.complex128, 3),
        "c32": noise(torch.complex32, 2, 3),
        "scalar": torch.tensor(2.5),
        "scalar of many": noise(torch.float32, 7)[3],
        "empty": torch.empty(0, 3, dtype=torch.int16),
        "empty conjugated": torch.empty(0, 3, dtype=torch.complex64).conj(),
        "pairs": torch.arange(12, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(3, 4),
        "f8": noise(torch.float8_e5m2, 3),
        "u16": noise(torch.int16, 5).view(torch.uint16),
        "parameter": torch.nn.Parameter(noise(torch.float32, 2, 2)),
        "channels last": noise(torch.float32, 1, 2, 3, 4).to(memory_format=torch.channels_last),
        "q": q,
        "k": k,
        "v": v,
        "k again": k,
        "bits": noise(torch.float32, 2).view(torch.int32),
        "nested": {"w": noise(torch.float32, 3), "l": [noise(torch.float32, 2), None]},
        "equal": torch.ones(700),
        "equal too": torch.ones(700),
    }


def assert_same(found: dict[str, torch.Tensor], path: Path, prefix: str = "") -> None:
    theirs = flat(torch.load(path, weights_only=True))
    assert found.keys() == {prefix + name for name in theirs}
    for name, tensor in theirs.items():
        ours = found[prefix + name]
        assert (ours.dtype, ours.shape, ours.stride()) == (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        ), name
        assert (ours.is_conj(), ours.is_neg()) == (tensor.is_conj(), tensor.is_neg()), name
        assert bytes_of(ours) == bytes_of(tensor), name


def loaded(**how: Any) -> Loads:
    def load(store: Store) -> dict[str, torch.Tensor]:
        with store.checkpoint("m") as checkpoint:
            return load_tensors(checkpoint, **how)

    return load


def iterated(store: Store) -> dict[str, torch.Tensor]:
    with store.checkpoint("m") as checkpoint:
        return dict(iter_tensors(checkpoint, buffer_bytes=4096))


WAYS: dict[str, Loads] = {
    "plainly": loaded(),
    "mapped": loaded(mapped=True, verify=False),
    "one by one": iterated,
    "by the store": lambda store: store.load("m"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("external", [False, True])
def test_every_tensor_is_what_torch_loads(tmp_path: Path, way: str, external: bool) -> None:
    path = tmp_path / "m.pt"
    torch.save(tensors(), path)
    store = Store.open(tmp_path / "store")
    store.import_(path, external=external)
    assert_same(WAYS[way](store), path)


def test_it_is_also_where_the_file_lies_in_a_folder_beside_others(tmp_path: Path) -> None:
    (tmp_path / "m/part").mkdir(parents=True)
    (tmp_path / "m/model.safetensors").write_bytes(
        safetensors({"w": ("F32", (2,), bytes(range(8)))})
    )
    torch.save(tensors(), tmp_path / "m/part/pytorch_model.bin")
    store = Store.open(tmp_path / "store")
    store.import_(tmp_path / "m")
    found = store.load("m")
    assert bytes_of(found.pop("w")) == bytes(range(8))
    assert_same(found, tmp_path / "m/part/pytorch_model.bin", "part/")


def test_names_choose_views_too(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "m.pt")
    store = Store.open(tmp_path / "store")
    store.import_(tmp_path / "m.pt")
    wanted = ["one", "columns", "conjugated", "k again", "nested.l.0"]
    found = store.load("m", wanted)
    assert list(found) == wanted
    theirs = flat(torch.load(tmp_path / "m.pt", weights_only=True))
    for name in wanted:
        assert bytes_of(found[name]) == bytes_of(theirs[name])
    with pytest.raises(UnknownTensorError):
        store.load("m", ["nothing"])


def test_views_of_common_bytes_are_views_of_one_memory(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "m.pt")
    store = Store.open(tmp_path / "store")
    store.import_(tmp_path / "m.pt")
    for found in (torch.load(tmp_path / "m.pt", weights_only=True), store.load("m")):
        found["across"][2, 3] = 77
        assert found["one"].item() == 77
        found["k"].zero_()
        assert not found["k again"].any()
        assert found["v"].any()
        # Their bytes are one piece of the store, and two tensors.
        found["equal"].zero_()
        assert found["equal too"].all()


def test_a_sparse_tensor_is_refused_by_name_and_the_others_are_loaded(tmp_path: Path) -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (3,))
    torch.save({"w": torch.ones(3), "s": sparse}, tmp_path / "m.pt")
    store = Store.open(tmp_path / "store")
    store.import_(tmp_path / "m.pt")
    for names in (None, ["s.0"], ["w", "s.1"]):
        with pytest.raises(UnsupportedError, match="'s' is sparse"):
            store.load("m", names)
    assert bytes_of(store.load("m", ["w"])["w"]) == bytes_of(torch.ones(3))
    store.export("m", tmp_path / "again")
    assert torch.equal(
        torch.load(tmp_path / "again/m.pt", weights_only=True)["s"].to_dense(), sparse.to_dense()
    )


def test_two_files_may_not_hold_a_name_of_which_one_is_a_view(tmp_path: Path) -> None:
    w = torch.ones(4, 4)
    (tmp_path / "m").mkdir()
    torch.save({"a": w, "b": w[:2].t()}, tmp_path / "m/pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.zeros(2)}, tmp_path / "m/pytorch_model-00002-of-00002.bin")
    store = Store.open(tmp_path / "store")
    store.import_(tmp_path / "m")
    with refused(CheckpointFault.REPEATED_TENSOR):
        store.load("m")


def test_a_file_stored_before_it_was_refused_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another program stored is exported as it is, and no tensors are made of it."""
    (tmp_path / "m.pt").write_bytes(file_of())
    store = Store.open(tmp_path / "store")
    honest = weights.read_header(tmp_path / "m.pt")
    other = dict(AMBIGUOUS)["a flag that is off"]
    with monkeypatch.context() as patch:
        patch.setattr("tensor_dedup.formats.pytorch.machine._flags", lambda _: frozenset())
        (tmp_path / "m.pt").write_bytes(other)
        assert len(weights.read_header(tmp_path / "m.pt").tensors) == len(honest.tensors)
        store.import_(tmp_path / "m.pt")
    with refused(PytorchFault.FORBIDDEN_CALL):
        store.load("m")
    store.export("m", tmp_path / "again")
    assert (tmp_path / "again/m.pt").read_bytes() == other
