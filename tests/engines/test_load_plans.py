"""The plan of a load is followed by an equal load, and by no other."""

import copy
import gc
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.model_loader import weight_utils
from vllm.model_executor.models import utils as model_utils
from vllm.model_executor.models.llama import LlamaForCausalLM

import tensor_dedup
from models import tiny_checkpoints as checkpoints
from tensor_dedup.config import FrozenBase, TensorDedupConfig
from tensor_dedup.errors import ChangedFileError
from tensor_dedup.formats.safetensors import read_header
from tensor_dedup.loader.checkpoint_io.hints import ENVIRONMENT
from tensor_dedup.loader.deferred.load_plan import PLANS
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.patches.vllm.planned import LoadInputs
from vllm_runs import engines, loads, planned

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[checkpoints.Pair]:
    """A tiny llama with tied embeddings and its fine-tune, with hints of their own."""
    folder = tmp_path_factory.mktemp("plans")
    made = checkpoints.make("llama_tied", folder)
    engines.warm_up(made.base)
    engines.leave_alone(*folder.rglob(checkpoints.WEIGHTS))
    with (
        mock.patch.dict(os.environ, {ENVIRONMENT: str(folder / "hints.sqlite")}),
        loads.prepared(made.base),
    ):
        yield made


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    gc.collect()
    assert not len(PLANS)
    assert not registry.residents()
    yield
    gc.collect()
    assert not len(PLANS)
    assert not registry.residents()
    assert not registry.records()


def load(path: Path, **config: Any) -> tuple[loads.Model, bool]:
    """A model, and whether its load followed a plan."""
    with planned.counted() as followed:
        model = loads.load(path, tensor_dedup=config)
    return model, bool(followed)


def same(one: loads.Model, other: loads.Model) -> bool:
    return one.parameters() == other.parameters() and one.functions() == other.functions()


def test_the_second_load_follows_the_plan_of_the_first(pair: checkpoints.Pair) -> None:
    plain = loads.load(pair.base)
    first, _ = load(pair.base)
    before = tensor_dedup.report().models[-1]
    second, followed = load(pair.base)
    report = tensor_dedup.report().models[-1]

    assert followed
    assert same(first, plain)
    assert same(second, plain)
    assert planned.differing(second.module, first.module) == []
    assert all(engines.forms(second.module, first.module).values())
    assert report.known
    assert report.bytes_read == report.private_bytes == 0
    assert report.shared_bytes == report.total_bytes == before.total_bytes
    assert report.source_bytes_shared == checkpoints.nbytes(pair.base)
    assert report.source_tensors_shared == report.source_tensors_total
    assert len(PLANS) == 1


def test_a_plan_outlives_the_model_that_made_it_with_one_that_follows_it(
    pair: checkpoints.Pair,
) -> None:
    first, _ = load(pair.base)
    second, followed = load(pair.base)
    assert followed
    del first
    gc.collect()
    third, followed = load(pair.base)
    assert followed
    assert same(third, second)
    del second, third
    gc.collect()
    assert not len(PLANS)
    assert not load(pair.base)[1]


def in_environment() -> AbstractContextManager[Any]:
    return mock.patch.dict(os.environ, {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"})


def with_another_attribute() -> AbstractContextManager[Any]:
    build = RMSNorm.__init__

    def init(self: RMSNorm, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        setattr(self, "made_for_a_test", 1)  # noqa: B010 - modules take any

    return mock.patch.object(RMSNorm, "__init__", init)


def with_other_loading_code() -> AbstractContextManager[Any]:
    load_weights = LlamaForCausalLM.load_weights

    def other(self: Any, weights: Any) -> Any:
        return load_weights(self, weights)

    return mock.patch.object(LlamaForCausalLM, "load_weights", other)


def with_another_default_loader() -> AbstractContextManager[Any]:
    load = weight_utils.default_weight_loader

    def other(parameter: torch.Tensor, weight: torch.Tensor) -> None:
        load(parameter, weight)

    return mock.patch.object(model_utils, "default_weight_loader", other)


def with_another_class_attribute() -> AbstractContextManager[Any]:
    return mock.patch.object(LlamaForCausalLM, "embedding_modules", {"embed_tokens": "input"})


def as_second_rank() -> AbstractContextManager[Any]:
    return loads.as_rank("dp", 1, 2)


def with_other_threads() -> AbstractContextManager[Any]:
    return engines.threads(torch.get_num_threads() + 1)


@pytest.mark.parametrize(
    ("config", "around"),
    [
        pytest.param({"min_tensor_bytes": 1}, nullcontext, id="configuration of this package"),
        pytest.param({"audit": 1.0}, nullcontext, id="audit"),
        pytest.param({"verify_bytes": True}, nullcontext, id="verify_bytes"),
        pytest.param({"verify": "always"}, nullcontext, id="digests that are not trusted"),
        pytest.param({"cpu_weights": "plain"}, nullcontext, id="weights that are not packed"),
        pytest.param({}, in_environment, id="environment"),
        pytest.param({}, with_another_attribute, id="attribute of a module"),
        pytest.param({}, with_other_loading_code, id="loading code"),
        pytest.param({}, with_another_default_loader, id="loader of most parameters"),
        pytest.param({}, with_another_class_attribute, id="attribute of a class"),
        pytest.param({}, as_second_rank, id="rank"),
        pytest.param({}, with_other_threads, id="threads"),
    ],
)
def test_a_plan_is_not_followed_where_anything_differs(
    config: dict[str, Any],
    around: Callable[[], AbstractContextManager[Any]],
    pair: checkpoints.Pair,
) -> None:
    first, _ = load(pair.base)
    second, followed = load(pair.base)
    assert followed
    with around():
        third, followed = load(pair.base, **config)
    assert not followed
    assert third.parameters().items() >= first.parameters().items()
    del second


def epsilon(config: Any) -> None:
    config.model_config.hf_config.rms_norm_eps = 1e-3


def nested(config: Any) -> None:
    config.cache_config.block_size += 16


def unknown_object(config: Any) -> None:
    config.additional_config = {"object": object()}


@pytest.mark.parametrize("change", [epsilon, nested, unknown_object])
def test_a_plan_is_not_followed_where_the_engines_configuration_differs(
    change: Callable[[Any], None], pair: checkpoints.Pair
) -> None:
    first, _ = load(pair.base)
    config = copy.deepcopy(first.config)
    config.compilation_config.static_forward_context = {}
    with planned.counted() as followed:
        again = loads.by_config(copy.deepcopy(config))
    assert followed
    change(config)
    with planned.counted() as followed:
        other = loads.by_config(config)
    assert not followed
    assert same(other, again)


def test_models_of_equal_headers_at_one_path_have_plans_of_their_own(
    pair: checkpoints.Pair, tmp_path: Path
) -> None:
    """Base, fine-tune, and the base with one bit flipped in one tensor, known and all alive."""
    path = tmp_path / "model"
    shutil.copytree(pair.base, path)
    weights = path / checkpoints.WEIGHTS
    flipped, tune = tmp_path / "flipped", tmp_path / "tune"
    shutil.copy(weights, flipped)
    shutil.copy(pair.fine_tune / checkpoints.WEIGHTS, tune)
    spec = next(s for s in read_header(weights).tensors if "layers.1.mlp.down" in s.name)
    with flipped.open("r+b") as file:
        file.seek(spec.start)
        byte = file.read(1)[0]
        file.seek(spec.start)
        file.write(bytes([byte ^ 1]))
    original = tmp_path / "original"
    shutil.copy(weights, original)
    plain, kept = {}, []
    for name in (original, flipped, tune):
        shutil.copy(name, weights)
        plain[name] = loads.load(path)
        engines.leave_alone(weights)
        for known in (False, True):
            model, followed = load(path)
            assert followed == known, name
            assert same(model, plain[name])
            kept.append(model)
    assert len(PLANS) == 3
    fingerprints = [(m.parameters(), m.functions()) for m in plain.values()]
    assert fingerprints[0] != fingerprints[1] != fingerprints[2] != fingerprints[0]


def test_loading_code_that_does_more_than_fill_parameters_makes_no_plan(
    pair: checkpoints.Pair,
) -> None:
    load_weights = LlamaForCausalLM.load_weights

    def sets(self: Any, weights: Any) -> Any:
        self.number_of_loads = 1
        return load_weights(self, weights)

    def writes(self: Any, weights: Any) -> Any:
        self.model.layers[0].self_attn.rotary_emb.cos_sin_cache.data.add_(0)
        return load_weights(self, weights)

    def reads(self: Any, weights: Any) -> Any:
        found = list(weights)
        assert float(found[0][1].float().abs().sum()) >= 0
        return load_weights(self, iter(found))

    for other in (sets, writes, reads):
        with mock.patch.object(LlamaForCausalLM, "load_weights", other):
            first, _ = load(pair.base)
            second, followed = load(pair.base)
        assert not followed
        assert same(first, second)
        assert not len(PLANS)
        del first, second
        gc.collect()


def test_a_plan_is_not_followed_when_a_resident_of_it_is_gone(pair: checkpoints.Pair) -> None:
    first, _ = load(pair.base)
    tensor_dedup.unshare(first.module)
    gc.collect()
    second, followed = load(pair.base)
    assert not followed
    assert same(second, first)
    assert len(PLANS) == 1  # of the second, in place of the first's
    assert load(pair.base)[1]


def test_what_a_plan_leads_to_stays_while_a_load_follows_it(pair: checkpoints.Pair) -> None:
    plain = loads.load(pair.base)
    kept = [load(pair.base)[0]]
    with planned.once_found(kept.clear):
        second, followed = load(pair.base)
    assert followed
    assert not kept
    assert same(second, plain)


def test_a_file_that_changes_while_a_plan_is_followed_ends_the_load(
    pair: checkpoints.Pair, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(pair.base, path)
    weights = path / checkpoints.WEIGHTS
    engines.leave_alone(weights)
    first, _ = load(path)
    assert load(path)[1]

    def overwrite() -> None:
        weights.write_bytes((pair.fine_tune / checkpoints.WEIGHTS).read_bytes())

    with planned.once_found(overwrite), pytest.raises(ChangedFileError):
        load(path)
    again, followed = load(path)
    assert not followed
    assert same(again, loads.load(pair.fine_tune))
    assert not same(again, first)


REFUSED: dict[str, Callable[[VllmConfig], None]] = {
    "quantisation": lambda c: setattr(c.model_config, "quantization", "fp8"),
    "quantisation of the engine": lambda c: setattr(c, "quant_config", object()),
    "LoRA": lambda c: setattr(c, "lora_config", object()),
    "a draft": lambda c: setattr(c, "speculative_config", object()),
    "weights that are written later": lambda c: setattr(c, "weight_transfer_config", object()),
    "experts by rank": lambda c: setattr(c.parallel_config, "enable_expert_parallel", True),
    "experts in balance": lambda c: setattr(c.parallel_config, "enable_eplb", True),
    "a head that may be tied": lambda c: setattr(
        c.model_config, "word_embeddings_untied_by_checkpoint", True
    ),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_a_load_that_is_not_ordinary_has_no_plan(
    change: Callable[[VllmConfig], None], pair: checkpoints.Pair
) -> None:
    model = loads.load(pair.base)
    config = copy.copy(model.config)
    config.model_config = copy.copy(config.model_config)
    config.parallel_config = copy.copy(config.parallel_config)
    inputs = LoadInputs(TensorDedupConfig(), config, config.model_config)
    assert inputs.plannable(model.module)
    change(config)
    assert not inputs.plannable(model.module)


@pytest.mark.parametrize(
    "config",
    [
        TensorDedupConfig(memory_manager="unix:///nowhere"),
        TensorDedupConfig(frozen_base=FrozenBase(base="base", layers="0")),
        TensorDedupConfig(verify_bytes=True),
        TensorDedupConfig(audit=0.5),
    ],
    ids=["manager", "frozen base", "verify_bytes", "audit"],
)
def test_a_load_that_compares_or_asks_others_has_no_plan(
    config: TensorDedupConfig, pair: checkpoints.Pair
) -> None:
    model = loads.load(pair.base)
    whole = model.config
    assert LoadInputs(TensorDedupConfig(), whole, whole.model_config).plannable(model.module)
    assert not LoadInputs(config, whole, whole.model_config).plannable(model.module)


def test_a_model_that_is_a_part_of_another_has_no_plan(pair: checkpoints.Pair) -> None:
    whole = loads.load(pair.base).config
    model = torch.nn.Linear(1, 1)
    assert LoadInputs(TensorDedupConfig(), whole, whole.model_config).plannable(model)
    part = copy.copy(whole.model_config)
    assert not LoadInputs(TensorDedupConfig(), whole, part).plannable(model)
