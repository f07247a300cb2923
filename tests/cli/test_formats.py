"""GGUF and torch.save on the command line: analyzed, imported, listed, shown, exported."""

from pathlib import Path

import gguf
import numpy
import pytest
import torch
from safetensors.torch import save_file

from processes.commands import document, run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One model in three formats; the GGUF has a quantised tensor too."""
    weight = numpy.random.default_rng(0).random((64, 256), dtype=numpy.float32)
    norm = numpy.ones(256, dtype=numpy.float32)
    writer = gguf.GGUFWriter(tmp_path / "model.Q4_0.gguf", "llama")
    writer.add_tensor("blk.0.w", weight)
    writer.add_tensor("blk.0.norm", norm)
    packed = gguf.quantize(weight, gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("blk.1.w", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = {"layers.0.w": torch.from_numpy(weight), "layers.0.norm": torch.from_numpy(norm)}
    torch.save({"model": tensors, "step": 3}, tmp_path / "model.pt")
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_formats_are_counted_alike_and_stored_once(folder: Path) -> None:
    names = ("model.Q4_0.gguf", "model.pt", "model.safetensors")
    paths = [folder / name for name in names]
    found = document("analyze", *paths, "--no-hints")
    assert [pair["shared_tensors"] for pair in found["pairs"]] == [2, 2, 2]
    where = ("--store", folder / "store")
    new = []
    for number, path in enumerate(paths):
        result = document("import", path, "--name", f"m{number}", *where)
        new.append(result["new_tensors"])
    assert new == [3, 0, 0]
    assert [each["name"] for each in document("list", *where)["checkpoints"]] == ["m0", "m1", "m2"]
    shown = {tensor["name"]: tensor for tensor in document("show", "m0", *where)["tensors"]}
    assert (shown["blk.1.w"]["dtype"], shown["blk.1.w"]["shape"]) == ("gguf:Q4_0", [64, 256])
    stored = document("analyze", "store://m0", "store://m1", "store://m2", *where)
    assert stored["pairs"] == [
        {**pair, "a": f"store://m{a}", "b": f"store://m{b}"}
        for pair, (a, b) in zip(found["pairs"], ((0, 1), (0, 2), (1, 2)), strict=True)
    ]
    assert stored["bytes_hashed"] == 0
    (largest, *_) = stored["largest_shared"]
    assert largest["digest"] == shown["blk.0.w"]["digest"]
    for number, path in enumerate(paths):
        document("export", f"m{number}", folder / f"out{number}", *where)
        assert (folder / f"out{number}" / path.name).read_bytes() == path.read_bytes()


def test_what_would_run_is_named_on_one_line(folder: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), folder / "module.pt")
    for verb in ("analyze", "import"):
        result = run(verb, folder / "module.pt", "--store", folder / "store")
        assert (result.returncode, result.stdout) == (1, "")
        assert "torch.nn.modules.linear.Linear" in result.stderr
        assert "nothing was run" in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_names_from_files_are_shown_as_they_are(tmp_path: Path) -> None:
    names = ["[/x]", "[red]h.0.w", "\x1b]0;title\x07", "a\u202eb", "重み"]
    tensors = {name: torch.full((4,), number) for number, name in enumerate(names)}
    save_file(tensors, tmp_path / "m.safetensors")
    where = ("--store", tmp_path / "store")
    run("import", tmp_path / "m.safetensors", *where)
    for result in (
        run("analyze", "--details", tmp_path / "m.safetensors", tmp_path / "m.safetensors"),
        run("show", "m", *where),
    ):
        assert (result.returncode, result.stderr) == (0, "")
        for name in ("[/x]", "[red]h.0.w", "\\x1b]0;title\\x07", "a\\u202eb", "重み"):
            assert name in result.stdout
        assert not set("\x1b\x07\u202e") & set(result.stdout)
    (tmp_path / "\x1b[31m.safetensors").write_bytes(b"")
    refused = run("analyze", tmp_path / "\x1b[31m.safetensors")
    assert "\\x1b[31m.safetensors: the file is empty" in refused.stderr
    assert "\x1b" not in refused.stderr
