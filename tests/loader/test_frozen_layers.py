"""Layers that a load takes from a base, without an engine."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tensor_dedup import Store, TensorDedupConfig
from tensor_dedup.errors import FormatError
from tensor_dedup.formats.checkpoint import open_checkpoint
from tensor_dedup.loader.checkpoint_io.from_store import FromDisk
from tensor_dedup.loader.checkpoint_io.frozen_layers import FrozenLayers, taken_plainly
from tensor_dedup.loader.checkpoint_io.hints import HintIndex
from tensor_dedup.loader.checkpoint_io.sources import SourceFile

NAME = "model.layers.0.mlp.weight"
INDEX = "model.safetensors.index.json"


def open_files() -> set[str]:
    folder = Path("/proc/self/fd")
    return {str(each.readlink()) for each in folder.iterdir() if each.is_symlink()}


def opening(tmp_path: Path) -> FromDisk:
    return FromDisk(HintIndex(tmp_path / "hints.sqlite"), "blake3", trust=False)


def frozen(base: str | Path, store: Path) -> FrozenLayers:
    wanted = {"base": str(base), "layers": "0"}
    return FrozenLayers(TensorDedupConfig(frozen_base=wanted, store=store), trust=False)


def test_files_are_closed_when_a_later_one_cannot_be_opened(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    save_file({NAME: torch.ones(2)}, good)
    bad.write_bytes(b"damaged")
    seen: list[set[str]] = []

    class Watching(FromDisk):
        def open(self, path: Path) -> SourceFile:
            seen.append(open_files())
            return super().open(path)

    disk = Watching(HintIndex(tmp_path / "hints.sqlite"), "blake3", trust=False)
    plan = taken_plainly(frozen(tmp_path, tmp_path / "store"), [good, bad], disk)
    with pytest.raises(FormatError, match=r"bad\.safetensors"), plan:
        pass
    assert str(good) in seen[1]
    assert str(good) not in open_files()


@pytest.mark.parametrize("named", [0, 1])
@pytest.mark.parametrize("stored", [False, True], ids=["folder", "store"])
def test_a_base_has_the_tensor_that_its_index_names(
    tmp_path: Path, stored: bool, named: int
) -> None:
    def shards(folder: Path, named: int, *values: float) -> Sequence[Path]:
        folder.mkdir()
        paths = [folder / f"{letter}.safetensors" for letter, _ in zip("ab", values, strict=False)]
        for path, value in zip(paths, values, strict=True):
            save_file({NAME: torch.full((4,), value), path.stem: torch.ones(1)}, path)
        where = {path.stem: path.name for path in paths} | {NAME: paths[named].name}
        (folder / INDEX).write_text(json.dumps({"weight_map": where}))
        (folder / "config.json").write_text("{}")
        return paths

    shards(tmp_path / "base", named, 1.0, 2.0)
    tune = shards(tmp_path / "tune", 0, 3.0)
    base: str | Path = tmp_path / "base"
    assert len(list(open_checkpoint(base).not_indexed())) == 1
    if stored:
        Store.open(tmp_path / "store").import_(base, "base")
        base = "store://base"
    layers = frozen(base, tmp_path / "store")
    with taken_plainly(layers, tune, opening(tmp_path)) as instead:
        source = instead(NAME)
        assert source is not None
        data = source.file.read_range(source.spec.start, source.spec.nbytes)
        assert data == torch.full((4,), 1.0 + named).numpy().tobytes()
