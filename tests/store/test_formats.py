"""GGUF and files of torch.save in the store: tensor by tensor, and byte for byte."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from safetensors.torch import save_file

from store_runs import stores
from tensor_dedup import Store, shares_memory
from tensor_dedup.analyze import analyze
from tensor_dedup.errors import FormatError
from tensor_dedup.store.reading.tensors import load_tensors

KIB = 1024


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def weights(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    """Some 1.5 MB, large tensors and small ones."""
    dice = torch.Generator().manual_seed(0)
    large = {f"layers.{i}.w": torch.randn(256, 256, generator=dice) for i in range(5)}
    small = {f"layers.{i}.norm": torch.randn(64, generator=dice).bfloat16() for i in range(5)}
    return {**large, **small, "mask": torch.ones(3, dtype=torch.bool), **changed}


def digests(store: Store, name: str) -> dict[str, str]:
    with store.checkpoint(name) as checkpoint:
        return {tensor.name: tensor.digest for tensor in checkpoint}


def check_round_trip(store: Store, source: Path, target: Path, name: str) -> None:
    store.export(name, target)
    wanted = stores.content(source) if source.is_dir() else {source.name: source.read_bytes()}
    assert stores.content(target) == wanted
    assert store.verify(full=True).faults == []


def write_gguf(
    path: Path, arrays: dict[str, numpy.ndarray], packed: dict[str, Any] | None = None
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(500)])
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    for name, (blocks, kind) in (packed or {}).items():
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "last.ckpt", "w.pth"])
def test_a_file_of_torch_save(store: Store, tmp_path: Path, name: str) -> None:
    torch.save(weights(), tmp_path / name)
    result = store.import_(tmp_path / name, "model")
    assert (result.files, result.tensors, result.new_tensors) == (1, 11, 11)
    check_round_trip(store, tmp_path / name, tmp_path / "out", "model")
    with store.checkpoint("model") as checkpoint:
        for key, tensor in weights().items():
            held = checkpoint[key]
            assert held.shape == tuple(tensor.shape)
            assert checkpoint.read(key) == bytes(tensor.flatten().view(torch.uint8).numpy())


@pytest.mark.parametrize("first", ["old", "new"])
def test_the_same_tensors_in_two_formats_are_stored_once(
    store: Store, tmp_path: Path, first: str
) -> None:
    folders = {name: tmp_path / name for name in ("old", "new")}
    for folder in folders.values():
        folder.mkdir()
    torch.save(weights(), folders["old"] / "pytorch_model.bin")
    save_file(weights(), folders["new"] / "model.safetensors", {"format": "pt"})
    second = "new" if first == "old" else "old"
    store.import_(folders[first])
    result = store.import_(folders[second])
    assert result.new_tensors == 0
    assert result.new_bytes < 16 * KIB  # headers
    assert digests(store, "old") == digests(store, "new")
    large = sum(tensor.nbytes for tensor in weights().values())
    assert store.stats().unique_bytes < large + 32 * KIB
    for name, folder in folders.items():
        check_round_trip(store, folder, tmp_path / f"{name} again", name)


def test_a_fine_tune_in_the_other_format_costs_what_differs(store: Store, tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "base.safetensors")
    store.import_(tmp_path / "base.safetensors")
    torch.save({"model": weights(**{"layers.3.w": torch.zeros(256, 256)})}, tmp_path / "tune.pt")
    result = store.import_(tmp_path / "tune.pt")
    assert result.new_tensors == 1
    assert result.new_bytes < 256 * KIB + 16 * KIB
    assert digests(store, "tune")["model.layers.0.w"] == digests(store, "base")["layers.0.w"]
    check_round_trip(store, tmp_path / "tune.pt", tmp_path / "out", "tune")


def test_shards_and_their_index(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    held = list(weights().items())
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    for name, part in zip(names, (held[:6], held[6:]), strict=True):
        torch.save(dict(part), folder / name)
    weight_map = {key: names[number >= 6] for number, (key, _) in enumerate(held)}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    torch.save({"state": 1}, folder / "optimizer.pt")
    result = store.import_(folder)
    assert (result.files, result.tensors, result.skipped) == (4, 11, ("optimizer.pt",))
    store.export("model", tmp_path / "out")
    (folder / "optimizer.pt").unlink()
    assert stores.content(tmp_path / "out") == stores.content(folder)
    alone = store.import_(folder / "pytorch_model.bin.index.json", "alone")
    assert (alone.tensors, alone.new_bytes, alone.files) == (11, 0, 3)


def test_parts_of_one_storage_and_tied_tensors(store: Store, tmp_path: Path) -> None:
    fused = torch.randn(384, 128)
    query, key, value = fused.chunk(3)
    embed = torch.randn(100, 64)
    path = tmp_path / "views.pt"
    torch.save(
        {"q": query, "k": key, "v": value, "t": embed.t(), "tied": embed, "again": key}, path
    )
    store.import_(path)
    save_file({"k": key.contiguous(), "embed": embed.flatten()}, tmp_path / "k.safetensors")
    assert store.import_(tmp_path / "k.safetensors").new_tensors == 0
    check_round_trip(store, path, tmp_path / "out", "views")
    with store.checkpoint("views") as checkpoint:
        # A view of another shape is no second name of its storage.
        assert [tensor.name for tensor in checkpoint] == ["q", "k", "v", "t", "again"]
        again = checkpoint["again"]
        assert (again.alias_of, again.digest) == ("k", checkpoint["k"].digest)
        assert checkpoint.read("again") == checkpoint.read("k")
        loaded = load_tensors(checkpoint)
    assert torch.equal(loaded["again"], key)
    assert shares_memory(loaded["again"], loaded["k"])  # as torch.load has it


def test_tied_weights_come_back_by_both_names(store: Store, tmp_path: Path) -> None:
    tied = weights()
    tied["head"] = tied["layers.0.w"]
    path = tmp_path / "model" / "part" / "pytorch_model.bin"
    path.parent.mkdir(parents=True)
    torch.save(tied, path)
    result = store.import_(tmp_path / "model", "tied")
    assert result.tensors == len(tied) - 1
    assert result.manifest == store.expected_manifest(tmp_path / "model", lambda path, fd: {})
    with store.checkpoint("tied") as checkpoint:
        assert checkpoint["part/head"].alias_of == "part/layers.0.w"
        loaded = load_tensors(checkpoint)
    assert loaded.keys() == {f"part/{name}" for name in tied}
    assert all(torch.equal(loaded[f"part/{name}"], tensor) for name, tensor in tied.items())
    found = analyze([path.parent, "store://tied"], store=store.path)
    assert [len(measured.tensors) for measured in found.checkpoints] == [11, 11]
    assert found.pairs[0].shared_tensors == 11


def test_a_lost_manifest_with_second_names_is_made_again(store: Store, tmp_path: Path) -> None:
    tied = weights()
    tied["head"] = tied["layers.0.w"]
    torch.save(tied, tmp_path / "tied.pt")
    manifest = store.import_(tmp_path / "tied.pt").manifest
    (lost,) = (store.path / "manifests").glob(f"*/{manifest}")
    lost.unlink()
    assert store.repair([tmp_path / "tied.pt"]).manifests == 1
    with store.checkpoint("tied") as checkpoint:
        assert checkpoint["head"].alias_of == "layers.0.w"


def test_a_gguf_file(store: Store, tmp_path: Path) -> None:
    dice = numpy.random.default_rng(0)
    arrays = {f"blk.{i}.w": dice.random((300, 256), dtype=numpy.float32) for i in range(3)}
    path = write_gguf(tmp_path / "model.gguf", {**arrays, "norm": numpy.ones(7, numpy.float16)})
    result = store.import_(path, "model")
    assert (result.tensors, result.new_tensors) == (4, 4)
    check_round_trip(store, path, tmp_path / "out", "model")
    tune = {**arrays, "blk.1.w": dice.random((300, 256), dtype=numpy.float32)}
    other = write_gguf(tmp_path / "tune.gguf", {**tune, "norm": numpy.ones(7, numpy.float16)})
    assert store.import_(other).new_tensors == 1
    check_round_trip(store, other, tmp_path / "out2", "tune")
    with store.checkpoint("tune") as checkpoint:
        assert checkpoint.read("blk.0.w") == arrays["blk.0.w"].tobytes()
        assert (checkpoint["blk.0.w"].dtype, checkpoint["blk.0.w"].shape) == ("F32", (300, 256))


def test_a_split_gguf_model_by_its_first_part(store: Store, tmp_path: Path) -> None:
    dice = numpy.random.default_rng(0)
    model = tmp_path / "model"
    model.mkdir()
    for number, name in enumerate(("a", "b")):
        path = model / f"m-0000{number + 1}-of-00002.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", 2)
        writer.add_tensor(name, dice.random((64, 64), dtype=numpy.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    (model / "README.md").write_text("not a part")
    result = store.import_(model / "m-00001-of-00002.gguf", "m")
    assert (result.tensors, result.files) == (2, 2)
    store.export("m", tmp_path / "out")
    (model / "README.md").unlink()
    assert stores.content(tmp_path / "out") == stores.content(model)
    found = analyze([model / "m-00001-of-00002.gguf", "store://m"], store=store.path)
    assert found.pairs[0].shared_tensors == 2


def test_quantised_tensors_keep_their_type(store: Store, tmp_path: Path) -> None:
    weight = numpy.random.default_rng(0).random((64, 256), dtype=numpy.float32)
    packed = gguf.quantize(weight, gguf.GGMLQuantizationType.Q4_0)
    write_gguf(tmp_path / "q.gguf", {}, {"w": (packed, gguf.GGMLQuantizationType.Q4_0)})
    store.import_(tmp_path / "q.gguf")
    with store.checkpoint("q") as checkpoint:
        assert (checkpoint["w"].dtype, checkpoint["w"].shape) == ("gguf:Q4_0", (64, 256))
        assert checkpoint.read("w") == packed.tobytes()


def test_a_number_is_the_same_in_gguf_and_safetensors(store: Store, tmp_path: Path) -> None:
    weight = numpy.random.default_rng(0).random((64, 256), dtype=numpy.float32)
    write_gguf(tmp_path / "a.gguf", {"blk.0.w": weight})
    save_file({"layers.0.w": torch.from_numpy(weight)}, tmp_path / "b.safetensors")
    store.import_(tmp_path / "a.gguf")
    assert store.import_(tmp_path / "b.safetensors").new_tensors == 0


def test_a_file_that_would_run_something_is_not_taken(store: Store, tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(FormatError, match=r"torch\.nn\.modules\.linear\.Linear"):
        store.import_(tmp_path / "module.pt")
    assert store.list() == []


def test_repair_takes_tensors_from_a_file_of_the_other_format(store: Store, tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "base.safetensors")
    torch.save(weights(), tmp_path / "same.pt")
    store.import_(tmp_path / "base.safetensors")
    (container,) = (store.path / "containers").glob("*/*.raw")
    with container.open("r+b") as file:
        file.seek(container.stat().st_size // 2)
        file.write(b"damaged!")
    assert store.verify(full=True).faults != []
    store.repair([tmp_path / "same.pt"])
    check_round_trip(store, tmp_path / "base.safetensors", tmp_path / "out", "base")


@pytest.mark.parametrize("name", ["model.pt", "model.gguf"])
@pytest.mark.parametrize("how", [{"external": True}, {"compress": "auto"}])
def test_other_ways_to_import(store: Store, tmp_path: Path, name: str, how: dict[str, Any]) -> None:
    path = tmp_path / name
    if name == "model.pt":
        odd = {"z": torch.zeros(70_000, dtype=torch.complex128), "t": torch.ones(300, 400).t()}
        torch.save({**weights(), **odd}, path)
    else:
        arrays = {f"w{i}": numpy.full((300, 256), i, dtype=numpy.float32) for i in range(3)}
        packed = numpy.zeros((64, 8 * 144), dtype=numpy.uint8)
        write_gguf(path, arrays, {"q": (packed, gguf.GGMLQuantizationType.Q4_K)})
    store.import_(path, "model", **how)
    check_round_trip(store, path, tmp_path / "out", "model")
