"""Checkpoints that are files of torch.save, in vLLM: deferred sources and sharing as ever."""

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from models import quantised
from models import tiny_checkpoints as checkpoints
from tensor_dedup.loader.checkpoint_io.hints import ENVIRONMENT
from vllm_runs import engines, plain

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.vllm

Tensors = dict[str, torch.Tensor]
BIN = "pytorch_model.bin"


@dataclass
class World:
    """A pair as safetensors, and what plain vLLM answers and assembles of each folder."""

    root: Path
    base: Path
    tuned: Path
    tied: Path
    known: dict[Path, tuple[tuple[plain.Answer, ...], dict[str, str]]] = field(default_factory=dict)

    def expected(self, path: Path) -> tuple[plain.Answer, ...]:
        """Plain vLLM's answers."""
        return self._plain(path)[0]

    def assembled(self, path: Path) -> dict[str, str]:
        """What plain vLLM puts together of it, before anything is packed."""
        return self._plain(path)[1]

    def _plain(self, path: Path) -> tuple[tuple[plain.Answer, ...], dict[str, str]]:
        if path not in self.known:
            with engines.assembled() as assembled:
                llm = plain.engine(path)
            self.known[path] = plain.outputs(llm), dict(assembled)
            engines.drop(llm)
            del llm
            gc.collect()
        return self.known[path]

    def saved(
        self, source: Path, name: str, save: Callable[[Path, Tensors], object] | None = None
    ) -> Path:
        """The tensors of `source` in a folder of its own, written by `save`."""
        target = self.root / name
        if not target.exists():
            target.mkdir()
            for file in source.iterdir():
                if file.name != checkpoints.WEIGHTS:
                    (target / file.name).write_bytes(file.read_bytes())
            (save or _whole)(target, checkpoints.tensors(source))
        return target


def _whole(folder: Path, held: Tensors) -> None:
    torch.save(held, folder / BIN)


def _as_pt(folder: Path, held: Tensors) -> None:
    torch.save(held, folder / "model.pt")


def _two_files(folder: Path, held: Tensors) -> None:
    names = sorted(held, reverse=True)
    for number in (1, 2):
        part = {name: held[name] for name in names[number - 1 :: 2]}
        torch.save(part, folder / f"pytorch_model-0000{number}-of-00002.bin")


def _in_one_storage(folder: Path, held: Tensors) -> None:
    """All tensors are views of one long one, as flattened trainings leave them."""
    flat = torch.cat([tensor.flatten() for tensor in held.values()])
    parts = torch.split(flat, [tensor.numel() for tensor in held.values()])
    views = {name: part.view(held[name].shape) for name, part in zip(held, parts, strict=True)}
    torch.save(views, folder / BIN)


def _transposed(folder: Path, held: Tensors) -> None:
    """Matrices lie column by column; and one is a part of a storage that has more."""
    turned = {
        name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor
        for name, tensor in held.items()
    }
    name = next(name for name in held if name.endswith("gate_proj.weight"))
    turned[name] = torch.cat([torch.zeros_like(held[name]), held[name]])[held[name].shape[0] :]
    torch.save(turned, folder / BIN)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("bin")
    pair = checkpoints.make("llama", root / "llama")
    tied = checkpoints.make("llama_tied", root / "tied").base
    made = World(root, pair.base, pair.fine_tune, tied)
    made.saved(made.base, "base-bin")
    made.saved(made.tuned, "tuned-bin")
    engines.leave_alone(*root.rglob("*.bin"), *root.rglob(checkpoints.WEIGHTS))
    with mock.patch.dict(os.environ, {ENVIRONMENT: str(root / "hints.sqlite")}):
        engines.warm_up(pair.base)
        yield made
    gc.collect()


def assert_shared(one: "LLM", other: "LLM", same: set[str] | None = None) -> None:
    """They share exactly what plain vLLM assembles alike; everything without `same`."""
    forms = engines.forms(plain.model(one), plain.model(other))
    assert any(forms.values())
    for form, shared in forms.items():
        assert shared == (same is None or form.removesuffix(engines.PACKED) in same), form


def test_base_and_fine_tune_share_what_is_equal(world: World) -> None:
    base, tuned = world.saved(world.base, "base-bin"), world.saved(world.tuned, "tuned-bin")
    same = engines.equal(world.assembled(base), world.assembled(tuned))
    assert 0 < len(same) < len(world.assembled(base))
    first = engines.sharing(base)
    unknown = engines.last_report()
    second = engines.sharing(tuned)
    assert_shared(second, first, same)
    again = engines.sharing(base)
    assert_shared(again, first)
    known = engines.last_report()
    assert plain.outputs(first) == plain.outputs(again) == world.expected(base)
    assert plain.outputs(second) == world.expected(tuned)
    assert world.expected(base) != world.expected(tuned)
    assert (unknown.known, known.known) == (False, True)
    assert unknown.bytes_read == unknown.checkpoint_bytes == checkpoints.nbytes(world.base)
    assert known.bytes_read == 0
    assert known.private_bytes == 0
    assert unknown.skipped == known.skipped == []
    assert known.source_tensors_shared == known.source_tensors_total
    engines.drop(first, second, again)


WAYS = {
    "whole": _whole,
    ".pt": _as_pt,
    "two files": _two_files,
    "one storage": _in_one_storage,
    "transposed": _transposed,
}


@pytest.mark.parametrize("way", WAYS)
def test_it_shares_with_the_same_model_in_safetensors(world: World, way: str) -> None:
    path = world.saved(world.base, f"way {way}", WAYS[way])
    first = engines.sharing(world.base)
    second = engines.sharing(path)
    assert_shared(second, first)
    assert engines.last_report().private_bytes == 0
    assert engines.last_report().skipped == []
    assert world.assembled(path) == world.assembled(world.base)
    assert plain.outputs(second) == world.expected(path) == world.expected(world.base)
    engines.drop(first, second)


def test_files_that_are_read_by_several_threads(world: World) -> None:
    path = world.saved(world.base, "threads", _two_files)
    first = engines.sharing(world.base)
    second = plain.engine(
        path, tensor_dedup=True, model_loader_extra_config={"enable_multithread_load": True}
    )
    assert_shared(second, first)
    assert plain.outputs(second) == world.expected(world.base)
    engines.drop(first, second)


def test_tied_names_are_read_once(world: World) -> None:
    def tied(folder: Path, held: Tensors) -> None:
        embedding = next(value for name, value in held.items() if "embed" in name)
        torch.save({**held, "lm_head.weight": embedding}, folder / BIN)

    path = world.saved(world.tied, "tied-bin", tied)
    first = engines.sharing(world.tied)
    second = engines.sharing(path)
    assert_shared(second, first)
    report = engines.last_report()
    assert report.bytes_read == report.checkpoint_bytes == checkpoints.nbytes(world.tied)
    assert plain.outputs(second) == world.expected(path)
    engines.drop(first, second)


# --- files that are not read here: loaded as vLLM does, or refused in its words


def test_a_file_of_an_old_pytorch_is_loaded_without_sharing(world: World) -> None:
    def old(folder: Path, held: Tensors) -> None:
        torch.save(held, folder / BIN, _use_new_zipfile_serialization=False)

    path = world.saved(world.base, "old", old)
    first = engines.sharing(world.base)
    second = engines.sharing(path)
    [(place, reason)] = engines.last_report().skipped
    assert place == "<model>"
    assert "PyTorch before 1.6" in reason
    assert not any(engines.forms(plain.model(second), plain.model(first)).values())
    assert plain.outputs(second) == world.expected(world.base)
    engines.drop(first, second)


def test_a_number_among_the_tensors_is_met_as_plain_vllm_meets_it(world: World) -> None:
    def numbered(folder: Path, held: Tensors) -> None:
        torch.save({**held, "epoch": 3}, folder / BIN)

    path = world.saved(world.base, "numbered", numbered)
    assert _failure(path) == _failure(path, tensor_dedup=True)


def test_a_pickle_that_names_other_things_is_refused_as_plain_vllm_does(world: World) -> None:
    def named(folder: Path, held: Tensors) -> None:
        torch.save({**held, "where": Path("x")}, folder / BIN)

    path = world.saved(world.base, "named", named)
    assert _failure(path) == _failure(path, tensor_dedup=True)


def _failure(path: Path, **options: Any) -> tuple[type, str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever plain vLLM raises
        plain.engine(path, **options)
    return caught.type, str(caught.value)


# --- loaders of vLLM's plug-ins: what they make is shared afterwards


@pytest.mark.skipif(find_spec("vllm_gguf_plugin") is not None, reason="the plug-in is installed")
def test_a_format_whose_plug_in_is_missing_is_refused_in_vllms_words(world: World) -> None:
    failures = [
        _failure(world.base, load_format="gguf", **more) for more in ({}, {"tensor_dedup": True})
    ]
    assert failures[0] == failures[1]
    assert "gguf" in failures[0][1]


@pytest.mark.parametrize("named", [{}, {"load_format": "gguf"}], ids=["auto", "named"])
def test_gguf_is_shared_after_its_plug_in_has_loaded_it(
    world: World, named: dict[str, Any]
) -> None:
    pytest.importorskip("vllm_gguf_plugin")
    from vllm_runs import reference_kernels

    names = {world.base: "base.gguf", world.tuned: "tuned.gguf"}
    files = [quantised.gguf_file(path, world.root / name, "Q8_0") for path, name in names.items()]
    options = {"tokenizer": str(world.base), "hf_config_path": str(world.base), **named}
    with reference_kernels.for_gguf():
        assert_shared_afterwards(files, options)


def test_bitsandbytes_is_shared_after_its_plug_in_has_loaded_it(world: World) -> None:
    pytest.importorskip("vllm_bnb_plugin")
    options = {"quantization": "bitsandbytes"}
    assert_shared_afterwards([world.base, world.tuned], options)


def assert_shared_afterwards(paths: list[Path], options: dict[str, Any]) -> None:
    expected, held = [], []
    for path in paths:
        llm = plain.engine(path, **options)
        held.append(contents(llm))
        expected.append(plain.outputs(llm))
        engines.drop(llm)
        del llm
        gc.collect()
    first, second = (plain.engine(path, tensor_dedup=True, **options) for path in paths)
    report = engines.last_report()
    same = engines.equal(*held)
    assert 0 < len(same) < len(held[0])
    forms = engines.forms(plain.model(second), plain.model(first))
    assert {name: forms[name] for name in held[0]} == {name: name in same for name in held[0]}
    assert [contents(first), contents(second)] == held
    assert 0 < report.shared_bytes < report.total_bytes
    assert "loader of its own" in dict(report.skipped)["<model>"]
    assert [plain.outputs(first), plain.outputs(second)] == expected
    assert expected[0] != expected[1]
    engines.drop(first, second)


def contents(llm: "LLM") -> dict[str, str]:
    """Every parameter with bytes but GGUF's types, whose bytes the plug-in leaves as they were."""
    held = plain.model(llm).named_parameters()
    chosen = {name: p for name, p in held if p.numel() and not name.endswith("qweight_type")}
    return {name: engines.fingerprint(parameter) for name, parameter in chosen.items()}
