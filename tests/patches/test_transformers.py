"""Models of Transformers: shared after casts and merges, tied as they tie themselves."""

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from models import tiny_checkpoints as checkpoints
from models.tiny_pipelines import equal, nbytes, parameters, shared
from tensor_dedup import enable, report, seams, shares_memory, sweep, verify
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.patches.huggingface import diffusers as diffusers_seams
from tensor_dedup.patches.huggingface import transformers as transformers_seams
from tensor_dedup.seams import Replacements, Seam, resolve, usable

SEAMS = (
    transformers_seams.SET_PARAMETER,
    transformers_seams.WARM_UP,
    diffusers_seams.SET_TENSOR,
    *diffusers_seams.WARM_UPS,
)
_SLACK = 256 << 10


pytestmark = pytest.mark.usefixtures("others")


def load(path: Path, **options: Any) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(path, **options)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.arange(8)[None]).logits
    return result


# Merged experts, tied embeddings, transposed weights.
@pytest.mark.parametrize("arch", ["mixtral", "llama_tied", "gpt2"])
def test_a_fine_tune_costs_what_differs(arch: str, tmp_path: Path, others: int) -> None:
    pair = checkpoints.make(arch, tmp_path)
    expected = [logits(load(path)) for path in (pair.base, pair.fine_tune)]
    with enable():
        base, tuned = load(pair.base), load(pair.fine_tune)
    same = equal(base, tuned)
    assert shared(base, tuned) == same
    assert 0 < len(same) < len(parameters(base))
    private = sum(p.nbytes for name, p in parameters(tuned).items() if name not in same)
    assert registry.resident_bytes() - others <= nbytes(base) + private + _SLACK
    last = report().models[-1]
    assert (last.total_bytes, last.private_bytes) == (nbytes(tuned), private)
    assert (last.name, last.components) == (str(pair.fine_tune), [])
    assert torch.equal(logits(base), expected[0])
    assert torch.equal(logits(tuned), expected[1])
    head = base.get_output_embeddings().weight
    assert (head is base.get_input_embeddings().weight) == (arch != "mixtral")


def test_a_model_that_is_cast_meets_one_that_was_saved_so(tmp_path: Path) -> None:
    pair = checkpoints.make("llama", tmp_path)
    wide = checkpoints.as_fp32(pair.base, tmp_path / "wide")
    with enable():
        narrow = load(pair.base)
        cast = load(wide, dtype=torch.bfloat16)
        kept = load(wide, dtype=torch.float32)
    assert shared(narrow, cast) == parameters(narrow).keys()
    assert not shared(cast, kept)


def test_with_loading_info_the_model_is_found(tmp_path: Path) -> None:
    pair = checkpoints.make("gpt2", tmp_path)
    with enable():
        first = load(pair.base)
        second, info = load(pair.base, output_loading_info=True)
    assert not info["missing_keys"]
    assert shared(first, second) == parameters(first).keys()


@pytest.mark.parametrize("algorithm", ["blake2b", "xxh3_128"])
def test_other_algorithms_share_and_compare(tmp_path: Path, algorithm: str) -> None:
    pair = checkpoints.make("llama", tmp_path)
    with enable({"hash_algorithm": algorithm, "audit": 1.0}):
        first, second = load(pair.base), load(pair.base)
    assert shared(first, second) == parameters(first).keys()
    assert report().models[-1].collisions == 0


class Twins(nn.Module):
    """Two equal matrices, and their names in either order."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.full((64, 64), 3.0)))


def test_twins_stay_apart_and_meet_by_name() -> None:
    first, second, third = Twins("a", "b", "c"), Twins("c", "a", "b"), Twins("c", "d")
    before = len(registry.residents())
    for model in (first, second, third):
        sweep(model)
    every = {"a", "b", "c"}
    assert shared(first, second) == every
    assert shared(first, third) == {"c"}
    for model in (first, second, third):
        mine = list(model.parameters())
        assert not any(shares_memory(x, y) for x in mine for y in mine if x is not y)
    assert len(registry.residents()) == before + 3


def test_a_sweep_shares_what_is_in_memory_already() -> None:
    models: list[Any] = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    objects = [list(model.parameters()) for model in models]
    before = len(report().models)
    first, second = sweep(models[0]), sweep(models[1])
    assert shared(*models) == parameters(models[0]).keys()
    assert first.private_bytes == second.shared_bytes == nbytes(models[0])
    assert [list(model.parameters()) for model in models] == objects
    assert not shares_memory(models[0][1].running_mean, models[1][1].running_mean)
    assert len(report().models) == before + 2
    again = sweep(models[1])
    assert again.shared_bytes == again.total_bytes
    assert again.bytes_hashed == 0
    assert len(report().models) == before + 2
    with torch.no_grad():
        models[1][0].weight.zero_()
    assert sweep(models[1]).private_bytes == models[1][0].weight.nbytes
    assert not torch.equal(models[0][0].weight, models[1][0].weight)
    assert verify().ok


def test_what_cannot_be_shared_is_left_alone_and_named() -> None:
    class Odd(nn.Parameter):
        """As quantisers make them: not only its bytes."""

    model = nn.Module()
    storage = torch.arange(64.0)
    common: Any = torch.ones(8)
    kept: dict[str, Any] = {
        "odd": Odd(torch.ones(8)),
        "meta": nn.Parameter(torch.ones(8, device="meta")),
        "gaps": nn.Parameter(torch.ones(8, 8)[:, ::2]),
        "left": nn.Parameter(storage[:40]),
        "right": nn.Parameter(storage[20:]),
        "other_process": nn.Parameter(common.share_memory_()),
        "small": nn.Parameter(torch.ones(1)),
        "plain": nn.Parameter(torch.ones(32)),
    }
    for name, parameter in kept.items():
        model.register_parameter(name, parameter)
    before = len(registry.residents())
    places = {name: each.data_ptr() for name, each in kept.items() if name != "plain"}
    skipped = dict(sweep(model, {"min_tensor_bytes": 8}).skipped)
    assert skipped.keys() == places.keys()
    assert "class Odd" in skipped["odd"]
    assert "other processes" in skipped["other_process"]
    assert {name: each.data_ptr() for name, each in kept.items() if name != "plain"} == places
    assert len(registry.residents()) == before + 1


def test_a_sweep_takes_pipelines_and_modules_only() -> None:
    with pytest.raises(UnsupportedError, match="not dict"):
        sweep({})


def found() -> dict[str, Any]:
    return {seam.target: resolve(seam.target) for seam in SEAMS}


def test_every_seam_is_what_was_recorded() -> None:
    importlib.import_module("diffusers.loaders.single_file_model")
    assert [seam.target for seam in SEAMS if not usable(seam)] == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_load_puts_everything_back(tmp_path: Path, fails: bool) -> None:
    pair = checkpoints.make("llama", tmp_path)
    before = found()
    if fails:
        (pair.base / "model.safetensors").write_bytes(b"no such thing")
    with enable():
        if fails:
            with pytest.raises(Exception, match=r"[Hh]eader"):
                load(pair.base)
        else:
            load(pair.base)
    assert found() == before


def test_without_its_seams_a_load_shares_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = checkpoints.make("llama", tmp_path)
    monkeypatch.setattr(seams, "usable", lambda _seam: False)
    with enable():
        first, second = load(pair.base), load(pair.base)
    assert shared(first, second) == parameters(first).keys()


def test_a_function_that_changed_is_not_replaced(caplog: pytest.LogCaptureFixture) -> None:
    seam = Seam("json:dumps", "it stays", "a test", "(obj)", versions=("json 0",))
    gone = Seam("json:no_such_function", "it stays", "a test", "(obj)", versions=("json 0",))
    before = resolve(seam.target)
    wrap: Callable[..., Any] = transformers_seams.idle
    with caplog.at_level(logging.WARNING), Replacements([(seam, wrap), (gone, wrap)]):
        assert resolve(seam.target) is before
    assert len(caplog.records) == 2
    assert "skipkeys" in caplog.text
    assert "missing" in caplog.text


def test_quantised_blocks_of_gguf_are_shared_and_stay_what_they_are() -> None:
    gguf: Any = pytest.importorskip("gguf")
    utils: Any = importlib.import_module("diffusers.quantizers.gguf.utils")
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = torch.arange(34 * 64, dtype=torch.int64).to(torch.uint8).view(64, 34)
    blocks[:, :2] = torch.tensor([0x00, 0x3C])  # each block's scale: 1.0
    models = [nn.Module(), nn.Module()]
    for model in models:
        parameter = utils.GGUFParameter(blocks.clone(), quant_type=kind)
        model.register_parameter("weight", parameter)
        assert sweep(model).skipped == []
    assert shared(*models) == {"weight"}
    weight: Any = models[1].weight
    assert (type(weight), weight.quant_type) == (utils.GGUFParameter, kind)
    assert torch.equal(weight.as_tensor(), blocks)
    expected = utils.dequantize_gguf_tensor(utils.GGUFParameter(blocks, quant_type=kind))
    assert torch.equal(utils.dequantize_gguf_tensor(weight), expected)


def test_an_encoder_that_keeps_some_weights_wide_is_shared_as_it_is(tmp_path: Path) -> None:
    kind: Any = hf.T5EncoderModel
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
    }
    kind(hf.T5Config(num_heads=4, feed_forward_proj="gated-gelu", **sizes)).save_pretrained(
        tmp_path
    )
    with enable():
        first, second = (kind.from_pretrained(tmp_path, dtype=torch.float16) for _ in range(2))
    every = parameters(first)
    assert shared(first, second) == every.keys()
    assert {p.dtype for name, p in every.items() if ".wo." in name} == {torch.float32}
    assert every["shared.weight"].dtype == torch.float16
    assert first.shared.weight is first.encoder.embed_tokens.weight
