"""`frozen_base`: layers that a model of vLLM takes from its base, without a second checkpoint."""

import asyncio
import gc
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch

from files import reads
from models import tiny_checkpoints as checkpoints
from processes import fresh
from tensor_dedup import ConfigError, Store, UnsupportedError, enable, report
from tensor_dedup.errors import CheckpointError, FormatError
from tensor_dedup.formats.markers import KEY, Marker, in_files
from tensor_dedup.loader.deferred.trace import UntraceableError
from tensor_dedup.loader.report import ModelReport
from tensor_dedup.patches.vllm.run import LoadRun
from tensor_dedup.planning.substitution import substitute
from vllm_runs import engines, loads, plain

pytestmark = pytest.mark.vllm
LAYERS = "0-1"


@dataclass(frozen=True)
class Family:
    """A base, a fine-tune all of whose weights have moved, and what `substitute` makes of them."""

    base: Path
    tune: Path
    substituted: Path

    def frozen(self, layers: str = LAYERS, **config: Any) -> dict[str, Any]:
        return {"frozen_base": {"base": str(self.base), "layers": layers}, **config}


def moved(base: Path, tune: Path) -> None:
    shutil.copytree(base, tune)
    for file in tune.glob("*.safetensors"):
        draw = torch.Generator().manual_seed(7)
        held = safetensors.torch.load_file(file)
        for name, tensor in held.items():
            noise = torch.randn(tensor.shape, generator=draw) * 0.05
            held[name] = (tensor.float() + noise).to(tensor.dtype)
        safetensors.torch.save_file(held, file, {"format": "pt"})


def family(arch: str, root: Path) -> Family:
    base, tune, out = checkpoints.make(arch, root).base, root / "tune", root / "substituted"
    moved(base, tune)
    substitute(base, tune, out, layers=LAYERS)
    return Family(base, tune, out)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Family:
    made = family("llama", tmp_path_factory.mktemp("frozen"))
    engines.leave_alone(made.base / checkpoints.WEIGHTS, made.tune / checkpoints.WEIGHTS)
    engines.warm_up(made.base)
    return made


@pytest.fixture(scope="module")
def expected(llama: Family) -> dict[Path, tuple[plain.Answer, ...]]:
    """What plain vLLM answers."""
    found = {}
    for path in (llama.base, llama.tune, llama.substituted):
        llm = plain.engine(path)
        found[path] = plain.outputs(llm)
        engines.drop(llm)
    assert len(set(found.values())) == 3
    return found


def loaded(path: Path | str, **config: Any) -> tuple[tuple[plain.Answer, ...], ModelReport]:
    llm = engines.sharing(path, **config)
    found = plain.outputs(llm), engines.last_report()
    engines.drop(llm)
    del llm
    gc.collect()
    return found


def test_it_answers_as_the_substituted_checkpoint_and_shares_the_bases_layers(
    llama: Family, expected: dict[Path, tuple[plain.Answer, ...]]
) -> None:
    base = engines.sharing(llama.base)
    with reads.counted(llama.tune) as counted:
        tune = engines.sharing(llama.tune, **llama.frozen())
    found = engines.last_report()
    assert plain.outputs(tune) == expected[llama.substituted]
    assert plain.outputs(base) == expected[llama.base]

    forms = engines.forms(plain.model(tune), plain.model(base))
    frozen = {name for name in forms if ".layers.0." in name or ".layers.1." in name}
    assert len(frozen) > 10
    assert {name for name, shared in forms.items() if shared} == frozen
    taken = [n for n in checkpoints.tensors(llama.base) if ".layers.0." in n or ".layers.1." in n]
    size = sum(checkpoints.tensors(llama.base)[name].nbytes for name in taken)
    told = {"base": str(llama.base), "layers": LAYERS, "tensors": len(taken), "bytes": size}
    assert found.frozen_base == told
    assert found.shared_bytes >= size
    # The fine-tune's own bytes of those layers are not even read.
    assert counted.data_bytes() == checkpoints.nbytes(llama.tune) - size
    assert f"substituted: {llama.tune} has layers 0-1 of {llama.base}" in str(report())
    engines.drop(base, tune)


def test_a_known_fine_tune_with_and_without_it_are_two(
    llama: Family, expected: dict[Path, tuple[plain.Answer, ...]]
) -> None:
    for _ in range(2):  # the first time hashes what is not known yet
        answers, first = loaded(llama.tune)
        assert answers == expected[llama.tune]
        assert first.frozen_base is None
        answers, second = loaded(llama.tune, **llama.frozen())
        assert answers == expected[llama.substituted]
    assert first.known
    assert second.known

    both = engines.sharing(llama.tune), engines.sharing(llama.tune, **llama.frozen())
    assert plain.outputs(both[0]) == expected[llama.tune]
    assert plain.outputs(both[1]) == expected[llama.substituted]
    shared = engines.forms(plain.model(both[1]), plain.model(both[0]))
    assert any(shared.values())
    assert not any(same for name, same in shared.items() if ".layers.0." in name)
    engines.drop(*both)


def parameters(arch: str, root: str) -> None:
    made = family(arch, Path(root))
    with loads.prepared(made.base):
        plainly = {"cpu_weights": "plain"}
        wanted = loads.load(made.substituted, plainly).parameters()
        own = loads.load(made.tune, plainly).parameters()
        found = loads.load(made.tune, made.frozen(**plainly)).parameters()
    assert wanted != own
    assert found == wanted


@pytest.mark.parametrize("arch", ["llama_tied", "gpt2", "gemma3"])
def test_every_parameter_is_that_of_the_substituted_checkpoint(arch: str, tmp_path: Path) -> None:
    parameters(arch, str(tmp_path))


def test_fused_experts_are_those_of_the_substituted_checkpoint(tmp_path: Path) -> None:
    fresh.call_forked(parameters, "qwen3_moe", str(tmp_path))


def test_base_and_fine_tune_may_come_from_a_store(
    llama: Family,
    expected: dict[Path, tuple[plain.Answer, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(tmp_path / "cache"))
    store = Store.open(tmp_path / "store")
    store.import_(llama.base, "base")
    store.import_(llama.tune, "tune")
    frozen = {"base": "store://base", "layers": LAYERS}
    for path in ("store://tune", llama.tune):
        answers, found = loaded(path, frozen_base=frozen, store=str(tmp_path / "store"))
        assert answers == expected[llama.substituted], path
        assert found.bytes_from_store > 0
        assert found.frozen_base is not None
        assert found.frozen_base["base"] == "store://base"


def test_what_cannot_be_deferred_takes_the_layers_all_the_same(
    llama: Family, expected: dict[Path, tuple[plain.Answer, ...]]
) -> None:
    error = UntraceableError("its loading code cannot be deferred")
    with mock.patch.object(LoadRun, "trace", side_effect=error):
        answers, found = loaded(llama.tune, **llama.frozen())
    assert found.skipped == [("<model>", str(error))]
    assert answers == expected[llama.substituted]
    assert found.frozen_base is not None
    assert found.frozen_base["tensors"] > 10


def test_a_reload_takes_them_again(llama: Family) -> None:
    with loads.prepared(llama.base):
        config = {"cpu_weights": "plain"}
        wanted = loads.load(llama.substituted, config).parameters()
        model = loads.load(llama.tune, llama.frozen(**config))
        with torch.no_grad():
            for parameter in model.module.parameters():
                parameter.zero_()
        assert model.parameters() != wanted
        model.reload(llama.tune)
        assert model.parameters() == wanted


@pytest.mark.parametrize("lies", [False, True])
def test_a_marker_is_counted_and_never_believed(lies: bool, llama: Family, tmp_path: Path) -> None:
    (true,) = in_files([llama.substituted / checkpoints.WEIGHTS])
    assert len(true.tensors) > 10
    every = dict.fromkeys(checkpoints.tensors(llama.base))
    marker = Marker("base", true.digest, {n: n for n in every} if lies else true.tensors)
    tune = tmp_path / "tune"
    shutil.copytree(llama.substituted, tune)
    held = checkpoints.tensors(tune)
    for name in held.keys() - true.tensors.keys():  # what no model of another test has
        held[name] = held[name] * (1.5 if lies else 1.25)
    metadata = {"format": "pt", KEY: marker.text()}
    safetensors.torch.save_file(held, tune / checkpoints.WEIGHTS, metadata)
    alone = plain.engine(tune)
    wanted = plain.outputs(alone)
    engines.drop(alone)
    base = engines.sharing(llama.base)
    answers, found = loaded(tune)
    assert answers == wanted
    (told,) = found.marked
    assert (told["base"], told["digest"]) == ("base", true.digest)
    assert told["tensors"] == len(marker.tensors)
    assert told["shared"] == len(true.tensors)
    engines.drop(base)


def without(tune: Path, target: Path, change: dict[str, torch.Tensor | None]) -> Path:
    shutil.copytree(tune, target)
    held: dict[str, torch.Tensor] = checkpoints.tensors(tune)
    for name, tensor in change.items():
        del held[name]
        if tensor is not None:
            held[name] = tensor
    safetensors.torch.save_file(held, target / checkpoints.WEIGHTS, {"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (None, "layer model.layers.1 cannot be taken from the base: the base has no"),
        (torch.zeros(2, 2), "is F32 [2, 2] in the base and BF16 [128] in the fine-tune"),
    ],
)
def test_a_layer_that_the_base_does_not_have_is_an_error(
    change: torch.Tensor | None, said: str, llama: Family, tmp_path: Path
) -> None:
    name = "model.layers.1.input_layernorm.weight"
    base = without(llama.base, tmp_path / "other", {name: change})
    before = len(report().models)
    with pytest.raises(ConfigError, match="frozen_base") as caught:
        engines.sharing(llama.tune, frozen_base={"base": str(base), "layers": "0-1"})
    assert said in str(caught.value)
    assert caught.value.facts["field"] == "frozen_base"
    assert caught.value.facts["layer"] == "model.layers.1"
    assert len(report().models) == before
    # What is not asked for may differ.
    assert loaded(llama.tune, frozen_base={"base": str(base), "layers": "0"})[1].frozen_base


def test_wrong_settings_are_errors_that_name_what_is_right(llama: Family, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there are 0-2 in .*: write '0-2'"):
        engines.sharing(llama.tune, **llama.frozen("0-7"))
    with pytest.raises(CheckpointError, match="nowhere"):
        engines.sharing(llama.tune, frozen_base={"base": "nowhere/at/all", "layers": "0"})
    with pytest.raises(ConfigError, match="did you mean 'layers'"):
        engines.sharing(llama.tune, frozen_base={"base": str(llama.base), "layer": "0"})
    with pytest.raises(ConfigError, match="runai_streamer"):
        plain.engine(llama.tune, load_format="runai_streamer", tensor_dedup=llama.frozen())
    with pytest.raises(UnsupportedError, match="substitute"):
        enable(llama.frozen())
    broken = shutil.copytree(llama.base, tmp_path / "broken")
    weights = broken / checkpoints.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(FormatError, match=checkpoints.WEIGHTS.replace(".", "[.]")):
        engines.sharing(llama.tune, frozen_base={"base": str(broken), "layers": "0"})


def test_the_server_lists_what_a_model_takes(llama: Family) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    def listed(**arguments: Any) -> dict[str, Any]:
        make: Any = EngineArgs
        config = make(
            model=str(llama.tune), skip_tokenizer_init=True, **arguments
        ).create_engine_config()
        client: Any = SimpleNamespace(
            vllm_config=config,
            model_config=config.model_config,
            renderer=None,
            input_processor=None,
        )
        served = OpenAIServingModels(client, [BaseModelPath("tiny", str(llama.tune))])
        models = asyncio.run(served.show_available_models())
        (card,) = json.loads(models.model_dump_json())["data"]
        assert card["id"] == "tiny"
        found: dict[str, Any] = card
        return found

    told = {"frozen_base": {"base": str(llama.base), "layers": LAYERS}}
    assert listed(tensor_dedup=llama.frozen())["tensor_dedup"] == told
    assert "tensor_dedup" not in listed(tensor_dedup=True)
    assert "tensor_dedup" not in listed()
