"""Quantised checkpoints: a base and a fine-tune of each format, in real engines.

Sharing is asserted first and exactly: what plain vLLM ends with alike for both is one memory. Tier
1 is what a layer key leads to, of which a known checkpoint reads nothing; tier 2 is processed in
each load and then shared by content.
"""

import gc
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from models import quantised
from models import tiny_checkpoints as checkpoints
from tensor_dedup.errors import AuditError
from tensor_dedup.loader.checkpoint_io.hints import ENVIRONMENT
from tensor_dedup.loader.deferred.layer_records import LayerRecord
from tensor_dedup.loader.report import ModelReport
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.residents.resident import tensor_bytes
from vllm_runs import engines, plain

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.vllm

TIER = {
    "fp8": 1,
    "fp8 static": 1,
    "fp8 block": 2,
    "fp8 rows": 2,
    "AWQ": 2,
    "GPTQ": 2,
    "w4a16": 2,
    "w8a8": 1,
    "w8a8 static": 1,
    "w8a8 offset": 1,
    "NVFP4": 2,
    "MXFP4": 2,
}
# Given as a pointer to oneDNN, which keeps it.
_PACKED = [kind for kind in TIER if kind.startswith("w8a8")]
# Much like others of their kind.
_LONG = ("fp8 rows", "w8a8 static")


@dataclass
class Alone:
    """A plain load: what it answers, what each parameter is before and after processing."""

    answers: tuple[plain.Answer, ...]
    assembled: dict[str, str]
    final: dict[str, str]
    packed: list[str]


@dataclass
class Together:
    """A load that shares: `shared` by form with the base, None for the base itself."""

    answers: tuple[plain.Answer, ...]
    final: dict[str, str]
    packed: list[str]
    shared: dict[str, bool] | None
    report: ModelReport


@dataclass
class Result:
    base: Alone
    tuned: Alone
    loads: list[Together] = field(default_factory=list)
    left_alive: int = 0


class World:
    """Every format's two checkpoints, old enough for hints; loads of each are run once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pair = checkpoints.make("llama", root / "plain")
        self.paths = {
            kind: (self._made(kind, self.pair.base), self._made(kind, self.pair.fine_tune))
            for kind in TIER
        }
        engines.leave_alone(*root.rglob(checkpoints.WEIGHTS))
        self.result = cache(self._run)

    def _made(self, kind: str, source: Path) -> Path:
        return quantised.make(kind, source, self.root / kind.replace(" ", "-") / source.name)

    def _run(self, kind: str) -> Result:
        base, tuned = self.paths[kind]
        before = residents()
        result = Result(alone(base), alone(tuned))
        first, load = together(base, None)
        result.loads.append(load)
        second, load = together(tuned, first)
        result.loads.append(load)
        third, load = together(base, first)
        result.loads.append(load)
        engines.drop(first, second, third)
        del first, second, third
        gc.collect()
        result.left_alive = residents() - before
        return result


def residents() -> int:
    """How many there are. vLLM keeps some modules of models that it quantised while loading."""
    gc.collect()
    return len(registry.residents()) + len(registry.records())


@contextmanager
def packing() -> Iterator[list[str]]:
    """What is packed for int8 products in the block: weights and scales, just before."""
    from vllm import _custom_ops

    seen: list[str] = []
    original = _custom_ops.create_onednn_scaled_mm

    @wraps(original)
    def create(weight: torch.Tensor, scales: torch.Tensor, *rest: Any) -> Any:
        content = hashlib.sha256(tensor_bytes(weight))
        content.update(tensor_bytes(scales))
        seen.append(content.hexdigest())
        return original(weight, scales, *rest)

    with mock.patch.object(_custom_ops, "create_onednn_scaled_mm", create):
        yield seen


def alone(path: Path, **options: Any) -> Alone:
    with engines.assembled() as assembled, packing() as packed:
        llm = plain.engine(path, **options)
    found = Alone(plain.outputs(llm), dict(assembled), finals(llm), packed)
    engines.drop(llm)
    del llm
    gc.collect()
    return found


def together(path: Path, before: "LLM | None", **config: Any) -> "tuple[LLM, Together]":
    with packing() as packed:
        llm = engines.sharing(path, **config)
    litter()
    shared = None if before is None else engines.forms(plain.model(llm), plain.model(before))
    report = engines.last_report()
    return llm, Together(plain.outputs(llm), finals(llm), packed, shared, report)


def litter() -> None:
    """Use all memory of the sizes of scales that was given back, and leave nonsense there."""
    held = [torch.full((64 << n,), float("nan")) for n in range(6) for _ in range(300)]
    del held


def finals(llm: "LLM") -> dict[str, str]:
    """Every parameter by every name; one without bytes is packed elsewhere and not checked."""
    model = plain.model(llm)
    return {
        name: engines.fingerprint(parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.numel()
    }


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    from vllm_runs import reference_kernels  # which imports vllm

    made = World(tmp_path_factory.mktemp("quantised"))
    hints = made.root / "hints.sqlite"
    with (
        mock.patch.dict(os.environ, {ENVIRONMENT: str(hints)}),
        reference_kernels.installed(),
    ):
        engines.warm_up(made.pair.base)
        yield made


@pytest.fixture(autouse=True)
def alone_in_memory() -> Iterator[None]:
    """Each test begins when the engines of the one before are gone."""
    gc.collect()
    yield
    gc.collect()


@pytest.fixture(
    params=[pytest.param(k, marks=[pytest.mark.long] if k in _LONG else []) for k in TIER]
)
def kind(request: pytest.FixtureRequest) -> str:
    if not plain.multiplies(request.param):
        pytest.skip("vLLM cannot multiply four bits on this CPU")
    return str(request.param)


@pytest.fixture
def result(world: World, kind: str) -> Result:
    """The loads of one format, of which it is known that they share what can be shared."""
    found = world.result(kind)
    unchanged = engines.equal(found.base.final, found.tuned.final)
    packed = engines.equal(found.base.assembled, found.tuned.assembled)
    assert 0 < len(unchanged) < len(found.base.final) or kind in _PACKED
    assert 0 < len(packed) < len(found.base.assembled)
    first, tuned, again = found.loads
    assert first.shared is None
    assert tuned.shared is not None
    for form, shared in tuned.shared.items():
        is_packed = form.endswith(engines.PACKED)
        same = packed if is_packed else unchanged
        assert shared == (form.removesuffix(engines.PACKED) in same), form
    assert again.shared is not None
    assert all(again.shared.values())
    return found


def test_each_parameter_is_what_plain_vllm_makes_of_it(result: Result, kind: str) -> None:
    for load, expected in zip(result.loads, (result.base, result.tuned, result.base), strict=True):
        assert load.final == expected.final
    first, tuned, again = (load.packed for load in result.loads)
    assert bool(first) == (kind in _PACKED)
    assert first == result.base.packed
    # Of the fine-tune only what differs is packed again, and from what plain vLLM packs.
    assert tuned == [a for a, b in zip(result.tuned.packed, first, strict=True) if a != b]
    assert again == []


def test_answers_are_those_of_plain_vllm(result: Result) -> None:
    assert result.base.answers != result.tuned.answers
    first, tuned, again = (load.answers for load in result.loads)
    assert (first, tuned) == (result.base.answers, result.tuned.answers)
    assert again == first


def test_a_known_checkpoint_reads_what_its_tier_says(
    result: Result, world: World, kind: str
) -> None:
    known = result.loads[-1].report
    assert known.known
    if TIER[kind] == 1:
        assert known.bytes_read == 0
        return
    held = checkpoints.tensors(world.paths[kind][0])
    layers = sum(tensor.nbytes for name, tensor in held.items() if "_proj." in name)
    assert 0 < known.bytes_read <= layers


def test_the_report_tells_it(result: Result) -> None:
    first, tuned, again = (load.report for load in result.loads)
    assert first.skipped == tuned.skipped == again.skipped == []
    assert first.shared_bytes == 0
    assert 0 < tuned.shared_bytes < tuned.total_bytes
    assert first.total_bytes == tuned.total_bytes == again.total_bytes
    assert again.private_bytes == 0


def test_nothing_is_left_of_models_that_are_gone(result: Result) -> None:
    assert result.left_alive == 0


# --- what is alike and must not be taken for the other


@pytest.mark.parametrize(("one", "other"), [("fp8", "fp8 static"), ("w8a8 static", "w8a8 offset")])
def test_equal_weights_that_are_used_in_another_way(world: World, one: str, other: str) -> None:
    """Their weights have equal bytes; what is packed or set beside them differs."""
    expected = [alone(world.paths[kind][0]) for kind in (one, other)]
    assert expected[0].answers != expected[1].answers
    first, _ = together(world.paths[one][0], None)
    second, load = together(world.paths[other][0], first)
    assert load.shared is not None
    weights = [form for form in load.shared if "_proj.weight" in form and "scale" not in form]
    # Equal bytes are one memory; what was packed with another way of scaling in mind is not.
    assert weights
    assert all(load.shared[form] == (one == "fp8") for form in weights)
    assert load.final == expected[1].final
    assert load.answers == expected[1].answers
    assert plain.outputs(first) == expected[0].answers
    engines.drop(first, second)


# --- handlers outlive the layers they were made for


@pytest.mark.parametrize("kind", ["w8a8", "w8a8 offset"])
def test_a_handler_outlives_the_model_that_packed_it(world: World, kind: str) -> None:
    base, tuned = world.paths[kind]
    expected = world.result(kind).tuned
    first = engines.sharing(base)
    second, load = together(tuned, first)
    assert load.shared is not None
    assert sum(load.shared.values()) > len(load.shared) // 2
    engines.drop(first)
    del first
    gc.collect()
    litter()
    assert plain.outputs(second) == expected.answers
    assert finals(second) == expected.final
    engines.drop(second)


# --- quantised by vLLM while it loads, and what becomes no parameter


def test_weights_that_vllm_quantises_are_shared_afterwards(world: World) -> None:
    base, tuned = world.pair.base, world.pair.fine_tune
    online: dict[str, Any] = {"quantization": "fp8_per_channel"}
    expected = [alone(path, **online) for path in (base, tuned)]
    same = engines.equal(expected[0].final, expected[1].final)
    assert 0 < len(same) < len(expected[0].final)
    loaded = [plain.engine(path, tensor_dedup=True, **online) for path in (base, tuned)]
    report = engines.last_report()
    litter()
    forms = engines.forms(plain.model(loaded[1]), plain.model(loaded[0]))
    plainly = {form: on for form, on in forms.items() if not form.endswith(engines.PACKED)}
    assert plainly == {name: name in same for name in plainly}
    assert [finals(llm) for llm in loaded] == [each.final for each in expected]
    assert [plain.outputs(llm) for llm in loaded] == [each.answers for each in expected]
    assert 0 < report.shared_bytes < report.total_bytes
    assert "quantised while they are loaded" in dict(report.skipped)["<model>"]
    engines.drop(*loaded)


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM has fp8 caches from AVX-512 on"
)
def test_scales_of_keys_and_values_are_each_engine_s_own(world: World) -> None:
    path = quantised.with_kv_scales(world.paths["fp8 static"][0], world.root / "kv")
    options: dict[str, Any] = {"kv_cache_dtype": "fp8"}
    expected = alone(path, **options)
    first = plain.engine(path, tensor_dedup=True, **options)
    second = plain.engine(path, tensor_dedup=True, **options)
    assert all(engines.forms(plain.model(second), plain.model(first)).values())
    assert plain.outputs(first) == plain.outputs(second) == expected.answers
    assert finals(second) == expected.final
    scales = [dict(plain.model(llm).named_buffers()) for llm in (first, second)]
    keys = [name for name in scales[0] if name.endswith("_k_scale")]
    assert len(keys) == 3
    for number, name in enumerate(sorted(keys)):
        assert scales[0][name].item() == pytest.approx(0.02 + number / 100, rel=0.01)
        assert torch.equal(scales[0][name], scales[1][name])
        assert scales[0][name].data_ptr() != scales[1][name].data_ptr()
    engines.drop(first, second)


# --- audits


@pytest.mark.parametrize("kind", ["fp8", "w8a8"])
def test_an_audit_rebuilds_what_a_layer_key_leads_to(world: World, kind: str) -> None:
    base = world.paths[kind][0]
    first = engines.sharing(base)
    second, load = together(base, first, audit=1.0)
    assert load.shared is not None
    assert all(load.shared.values())
    assert load.report.known
    assert load.report.bytes_read >= load.report.source_bytes_shared > 0
    assert load.answers == world.result(kind).base.answers
    record = next(filter(None, map(_quantised, registry.records().values())))
    if record.plain_name is None:
        record.residents["weight"] = record.residents["weight_scale"]
    else:
        record.plain_name = "0" * 64
    with pytest.raises(AuditError, match="was not loaded"):
        engines.sharing(base, audit=1.0)
    engines.drop(first, second)


def _quantised(record: object) -> LayerRecord | None:
    if isinstance(record, LayerRecord) and "weight_scale" in record.residents:
        return record
    return None
