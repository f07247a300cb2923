"""Load formats that are named: what `auto` would share is shared, and the rest loads plainly.

A folder has the same model as safetensors, in a `.pt` and in a `.bin`, each with other weights: the
format says which of them is read.
"""

import gc
import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from vllm.engine import arg_utils
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.runai_streamer_loader import RunaiModelStreamerLoader

from models import kinds
from models import tiny_checkpoints as checkpoints
from tensor_dedup import Store, report
from tensor_dedup.loader.checkpoint_io import stub_folder
from tensor_dedup.patches.vllm import plain_loads
from tensor_dedup.patches.vllm.load_formats import KEY, LOAD_FORMAT
from vllm_runs import engines, loads

if TYPE_CHECKING:
    from vllm.config import LoadConfig

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("nothing_stays")]

EngineArgs: Any = arg_utils.EngineArgs  # which takes an argument of ours, too
CONSOLIDATED = "consolidated.safetensors"
# Which file of `folder` each format reads, and a format by which plain vLLM reads that file alone.
# Plain vLLM has no fastsafetensors and instanttensor without a GPU, and no bf16 in its `npcache`.
READS = {
    "hf": (checkpoints.WEIGHTS, "hf"),
    "safetensors": (checkpoints.WEIGHTS, "safetensors"),
    "fastsafetensors": (checkpoints.WEIGHTS, "safetensors"),
    "instanttensor": (checkpoints.WEIGHTS, "safetensors"),
    "pt": ("model.pt", "pt"),
    "npcache": ("pytorch_model.bin", "hf"),
}


@dataclass(frozen=True)
class World:
    """A folder with four copies that differ, and each file of it in a folder of its own."""

    folder: Path
    alone: dict[str, Path]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("formats")
    pair = checkpoints.make("llama", root)
    folder = checkpoints.same(pair.base, root / "folder")
    tuned = checkpoints.tensors(pair.fine_tune)
    for number, name in enumerate(("model.pt", "pytorch_model.bin")):
        torch.save({key: value + number * 0.5 for key, value in tuned.items()}, folder / name)
    alone = {}
    for name in (checkpoints.WEIGHTS, "model.pt", "pytorch_model.bin"):
        alone[name] = root / f"only {name}"
        shutil.copytree(folder, alone[name], ignore=_all_but(name))
    alone[CONSOLIDATED] = shutil.copytree(alone[checkpoints.WEIGHTS], root / "mistral")
    (alone[CONSOLIDATED] / checkpoints.WEIGHTS).rename(alone[CONSOLIDATED] / CONSOLIDATED)
    engines.leave_alone(*root.rglob("*.pt"), *root.rglob("*.bin"), *root.rglob("*.safetensors"))
    engines.warm_up(pair.base)
    hints = {"TENSOR_DEDUP_HINTS": str(root / "hints.sqlite")}
    with mock.patch.dict(os.environ, hints), loads.prepared(pair.base):
        yield World(folder, alone)
    gc.collect()


def _all_but(kept: str) -> Any:
    def ignored(_folder: str, names: list[str]) -> list[str]:
        weights = (".pt", ".bin", ".safetensors")
        return [name for name in names if name.endswith(weights) and name != kept]

    return ignored


def assert_same(mine: loads.Model, plain: loads.Model) -> None:
    assert mine.parameters() == plain.parameters()
    assert mine.functions() == plain.functions()


@pytest.mark.parametrize("load_format", READS)
def test_the_named_format_decides_which_files_count_and_what_is_shared(
    load_format: str, world: World
) -> None:
    read, by = READS[load_format]
    expected = loads.load(world.alone[read], load_format=by)
    others = [
        loads.load(world.alone[name]) for name in world.alone if name not in (read, CONSOLIDATED)
    ]
    assert all(each.functions() != expected.functions() for each in others), "the copies are equal"

    first = loads.load(world.folder, {}, load_format=load_format)
    second = loads.load(world.folder, {}, load_format=load_format)

    for mine in (first, second):
        assert_same(mine, expected)
    made, shared = report().models[-2:]
    assert made.skipped == shared.skipped == []
    assert shared.shared_bytes == shared.total_bytes > 0
    size = sum(each.nbytes for each in checkpoints.tensors(world.folder).values())
    assert shared.checkpoint_bytes == size
    assert (shared.known, shared.bytes_read) == (True, 0)


def test_vllms_numpy_copies_are_neither_made_nor_read(world: World) -> None:
    loads.load(world.folder, {}, load_format="npcache")
    assert not (world.folder / "np").exists()


@pytest.mark.parametrize("load_format", ["auto", "mistral", "safetensors"])
def test_consolidated_files_are_shared_by_each_name_that_reads_them(
    load_format: str, world: World
) -> None:
    path = world.alone[CONSOLIDATED]
    expected = loads.load(path, load_format=load_format)

    first = loads.load(world.alone[checkpoints.WEIGHTS], {})
    second = loads.load(path, {}, load_format=load_format)

    assert_same(second, expected)
    assert all(engines.forms(second.module, first.module).values())
    assert report().models[-1].shared_bytes == report().models[-1].total_bytes > 0


def test_a_stored_checkpoint_is_read_by_the_named_format_too(world: World, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    store.import_(world.alone[CONSOLIDATED], "mistral")
    checkout = stub_folder.resolve("store://mistral", str(store.path))
    config = {"store": str(store.path), "stored": checkout.to_dict()}
    folder = Path(checkout.folder)
    expected = loads.load(world.alone[CONSOLIDATED], load_format="mistral")

    assert_same(loads.load(folder, config, load_format="mistral"), expected)
    assert report().models[-1].bytes_from_store > 0
    with pytest.raises(RuntimeError, match="Cannot find any model weights"):
        loads.load(folder, config, load_format="pt")


def test_another_copy_than_the_loaded_one_is_not_written_to_the_store(
    world: World, tmp_path: Path
) -> None:
    config = {"store": str(tmp_path / "store"), "store_writes": True}
    loads.load(world.folder, config, load_format="pt")
    [(what, why)] = report().models[-1].skipped
    assert what == "<store>"
    assert "takes model.safetensors, and model.pt was loaded" in why

    loads.load(world.alone["model.pt"], config, load_format="pt")
    assert report().models[-1].skipped == []
    assert report().models[-1].stored_as is not None


def test_a_streamer_that_is_told_which_weights_are_unused_shares_as_before(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM 0.33 calls its own method, which 0.32 calls with one argument less."""

    def get_all_weights(self: Any, model_config: Any, model: Any) -> Iterator[Any]:
        yield from self._get_weights_iterator(model_config.model, None, lambda _name: False)

    def files(self: Any, path: str, _revision: object) -> list[str]:  # else by the library
        return [str(Path(path, checkpoints.WEIGHTS))]

    path = world.alone[checkpoints.WEIGHTS]
    monkeypatch.setattr(RunaiModelStreamerLoader, "get_all_weights", get_all_weights)
    monkeypatch.setattr(RunaiModelStreamerLoader, "_prepare_weights", files)
    first = loads.load(path, {})
    second = loads.load(path, {}, load_format="runai_streamer")

    assert report().models[-1].skipped == []
    assert all(engines.forms(second.module, first.module).values())
    assert_same(second, loads.load(path))


# --- an overlay: two files hold one name, and the index says which counts

OVERLAID = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("counts", [0, 1], ids=["first", "last"])
def test_of_an_overlay_vllm_takes_the_last_file_and_so_do_we(
    counts: int, world: World, tmp_path: Path
) -> None:
    """Wherever the tensors lie, and whichever file the index names: vLLM asks it for files only."""
    names = ("model-00001-of-00002.safetensors", "model-overlay-00001.safetensors")
    whole = checkpoints.tensors(world.alone[checkpoints.WEIGHTS])
    path = checkpoints.same(world.alone[checkpoints.WEIGHTS], tmp_path / "overlay")
    (path / checkpoints.WEIGHTS).unlink()
    only = "model.norm.weight"
    kinds.save(path / names[0], {name: whole[name] for name in whole.keys() - {only}})
    kinds.save(path / names[1], {OVERLAID: whole[OVERLAID] + 1, only: whole[only]})
    index = dict.fromkeys(whole, names[0]) | {only: names[1], OVERLAID: names[counts]}
    (path / checkpoints.INDEX).write_text(json.dumps({"weight_map": index}))
    expected = loads.load(path)
    assert expected.functions() != loads.load(world.alone[checkpoints.WEIGHTS]).functions()

    store = Store.open(tmp_path / "store")
    store.import_(path, "overlay")
    checkout = stub_folder.resolve("store://overlay", str(store.path))
    stored = {"store": str(store.path), "stored": checkout.to_dict()}
    first, second = loads.load(path, {}), loads.load(path, {})
    third = loads.load(Path(checkout.folder), stored)

    for mine in (first, second, third):
        assert_same(mine, expected)
    for each in report().models[-2:]:
        assert each.skipped == []
        assert each.shared_bytes == each.total_bytes > 0


# --- formats and places that vLLM reads by itself


def test_what_vllm_imported_before_us_asks_us_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker import gpu_worker

    original: Any = model_loader.get_model_loader
    original = original.__wrapped__
    for module in (gpu_worker, model_loader):
        monkeypatch.setattr(module, "get_model_loader", original)
    plain_loads.install.__wrapped__()

    asked: Any = model_loader.get_model_loader
    assert asked.__wrapped__ is original
    assert vars(gpu_worker)["get_model_loader"] is asked


class _ByItself(DefaultModelLoader):
    """A loader of somebody's own, which refuses settings that it does not know."""

    def __init__(self, load_config: "LoadConfig") -> None:
        assert load_config.load_format == "by_itself"
        assert load_config.model_loader_extra_config == {}
        super().__init__(load_config)
        self.load_config.load_format = "auto"


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("tensor_dedup")]


def test_a_format_that_was_not_tried_loads_plainly_with_one_warning(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = world.alone[checkpoints.WEIGHTS]
    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "by_itself", _ByItself)
    expected = loads.load(path)
    shared = loads.load(path, {})

    with caplog.at_level(logging.WARNING):
        mine = loads.load(path, {}, load_format="by_itself")

    assert_same(mine, expected)
    assert not any(engines.forms(mine.module, shared.module).values())
    told, last = report().models[-2:]
    assert last.skipped == [("<model>", "load_format='by_itself' was not tried")]
    assert (last.name, last.shared_bytes) == (str(path), 0)
    assert last.private_bytes == last.total_bytes == told.total_bytes > 0
    assert said(caplog) == [
        f"{path}: loading without sharing: load_format='by_itself' was not tried"
    ]


def test_weights_that_are_made_up_load_plainly(world: World) -> None:
    loads.load(world.alone[checkpoints.WEIGHTS], {}, load_format="dummy")
    assert report().models[-1].skipped == [("<model>", "load_format='dummy' makes weights up")]


def test_a_format_that_vllm_does_not_know_is_refused_in_its_words(world: World) -> None:
    failures = []
    configs: tuple[dict[str, Any] | None, ...] = (None, {})
    for config in configs:
        with pytest.raises(ValueError, match="not supported") as raised:
            loads.load(world.folder, config, load_format="no_such_format")
        failures.append(str(raised.value))
    assert failures[0] == failures[1]


def test_a_remote_url_is_loaded_by_vllm_itself_and_reported(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Object storage is a folder here; of vLLM's own, only what reads it is replaced."""
    path, url = world.alone[checkpoints.WEIGHTS], "s3://bucket/model"

    class Pulled:
        def __init__(self, url: str) -> None:
            self.dir = str(path)

        def pull_files(self, url: str, **_patterns: Any) -> None: ...

    def streamed(self: object, model: str, *_more: object) -> Iterator[tuple[str, torch.Tensor]]:
        assert model == url
        yield from load_file(path / checkpoints.WEIGHTS).items()

    monkeypatch.setattr("vllm.config.model.ObjectStorageModel", Pulled)
    monkeypatch.setattr(RunaiModelStreamerLoader, "_get_weights_iterator", streamed)
    expected = loads.load(path)

    given = {"enforce_eager": True, "max_model_len": 256, "skip_tokenizer_init": True}
    config = EngineArgs(model=url, tensor_dedup=True, **given).create_engine_config()
    assert config.load_config.load_format == "runai_streamer" != LOAD_FORMAT
    assert KEY in config.load_config.model_loader_extra_config
    with caplog.at_level(logging.WARNING):
        mine = loads.by_config(config)

    assert_same(mine, expected)
    why = "its weights are streamed from object storage"
    assert report().models[-1].skipped == [("<model>", why)]
    assert report().models[-1].name == url
    assert said(caplog) == [f"{url}: loading without sharing: {why}"]
