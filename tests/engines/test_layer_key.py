"""A layer key tells apart whatever processing may tell apart, and nothing that it cannot."""

import functools
import gc
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import vllm
from torch import nn
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Int8,
)

from models import tiny_checkpoints as checkpoints
from processes import fresh
from tensor_dedup.config import TensorDedupConfig
from tensor_dedup.loader.checkpoint_io.sources import SourceReader
from tensor_dedup.loader.deferred.evaluate import Evaluator, Scratch
from tensor_dedup.loader.deferred.layer_key import EXEMPT, PREFIXES, environment
from tensor_dedup.loader.deferred.layer_records import RECORD, LayerRecord
from tensor_dedup.loader.deferred.parameters import DeferredParameter
from tensor_dedup.loader.deferred.session import LoadSession
from tensor_dedup.loader.deferred.storage import ExpressionKind, View, VirtualStorage
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.patches.vllm.processed import LayerContext
from vllm_runs import engines, plain, shared

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.vllm

# Where vLLM's processing and its kernels are.
CODE = (
    "model_executor/layers",
    "model_executor/kernels",
    "model_executor/utils.py",
    "model_executor/parameter.py",
    "model_executor/model_loader/utils.py",
    "_custom_ops.py",
)


def switches() -> set[str]:
    """Every VLLM_ variable that is read in the code above, as this vLLM has it."""
    root = Path(vllm.__file__).parent
    files = [f for part in CODE for f in ((root / part).rglob("*.py") if "." not in part else [])]
    files += [root / part for part in CODE if "." in part]
    found = set()
    for file in files:
        # As an attribute or a whole string, not in a sentence that mentions it.
        found |= set(re.findall(r"""(?:envs\.|["'])(VLLM_[A-Z0-9_]+)\b""", file.read_text()))
    return found & set(vllm.envs.environment_variables)


def test_every_switch_that_layers_and_kernels_read_is_in_the_key() -> None:
    read = switches()

    assert len(read) > 30
    assert {"VLLM_DISABLED_KERNELS", "VLLM_ZENTORCH_WEIGHT_PREPACK"} <= read
    assert not read & EXEMPT
    variables = dict.fromkeys(read, "1")
    assert environment(variables) == variables


def test_every_exemption_is_of_a_variable_that_would_be_taken_in() -> None:
    assert not [name for name in EXEMPT if not name.startswith(PREFIXES)]
    assert environment(dict.fromkeys(EXEMPT, "1")) == {}


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_API_KEY",
        "VLLM_S3_SECRET_ACCESS_KEY",
        "VLLM_S3_ACCESS_KEY_ID",
        "VLLM_NEW_SERVICE_TOKEN",
        "VLLM_NEW_SERVICE_API_KEYS",
        "VLLM_PROXY_PASSWORD",
        "VLLM_CLIENT_SECRET",
        "TORCH_HUB_AUTH",
        "NCCL_PRIVATE_KEY_FILE",
        "CUDA_CREDENTIALS",
    ],
)
def test_a_secret_is_left_out_whether_it_is_known_or_not(name: str) -> None:
    assert environment({name: "hunter2", "VLLM_X": "1"}) == {"VLLM_X": "1"}


@pytest.mark.parametrize(
    "name", ["VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD", "VLLM_KEYED_LAYOUT", "TORCH_TOKENIZE"]
)
def test_what_only_sounds_like_a_secret_stays_in(name: str) -> None:
    assert environment({name: "1"}) == {name: "1"}


class Method:
    """Stands for a quantisation method."""

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)


class OtherMethod(Method):
    pass


class Layer(nn.Module):
    """Stands for a layer: what it is configured with are its attributes."""

    def __init__(self, method: Method, **attributes: object) -> None:
        super().__init__()
        self.quant_method = method
        for name, value in attributes.items():
            setattr(self, name, value)


class OtherLayer(Layer):
    pass


def scheme(*, symmetric: bool = True, kernel_symmetric: bool = True) -> Any:
    """A scheme of vLLM's with its kernel, which packs a weight as it is set to."""
    made: Any = CompressedTensorsW8A8Int8("channel", False, symmetric)
    made.kernel = init_int8_linear_kernel(True, False, kernel_symmetric, "a test")
    return made


class OtherParameter(nn.Parameter):
    pass


@dataclass
class Inputs:
    """Everything one layer's key is made from; every test changes one of them."""

    layer: type[Layer] = Layer
    attributes: dict[str, Any] = field(default_factory=lambda: {"has_bias": False, "size": 4})
    scheme: Any = field(default_factory=scheme)
    method: type[Method] = Method
    method_attributes: dict[str, Any] = field(default_factory=lambda: {"bits": 8})
    name: str = "weight"
    parameter: type[nn.Parameter] = nn.Parameter
    dtype: torch.dtype = torch.bfloat16
    shape: tuple[int, ...] = (4, 8)
    stride: tuple[int, ...] = (8, 1)
    content: int = 0
    model_dtype: torch.dtype = torch.bfloat16
    algorithm: str = "blake3"

    def key(self) -> tuple[str, str]:
        """Digest and preimage."""
        reader, scratch = SourceReader(self.algorithm), Scratch()
        config = TensorDedupConfig.from_any({"hash_algorithm": self.algorithm})
        session = LoadSession(config, reader, scratch, Evaluator(reader, scratch))
        parameter = self.parameter(torch.empty(self.shape, dtype=self.dtype), requires_grad=False)
        each = DeferredParameter(self.name, parameter, self._view())
        layer = self.layer(
            self.method(**self.method_attributes), **self.attributes, scheme=self.scheme
        )
        context = LayerContext(session, {}, packed=True, model_dtype=self.model_dtype)
        key = context.key(layer, {self.name: each})
        return key.digest, key.preimage

    def _view(self) -> View:
        size = 64
        initial = torch.full((size,), self.content, dtype=torch.uint8)
        storage = VirtualStorage(
            ExpressionKind.PARAMETER,
            size,
            torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage(),
            initial=initial,
        )
        return View(storage, 0, self.dtype, self.shape, self.stride, 0)


CHANGES: dict[str, dict[str, Any]] = {
    "the layer's class": {"layer": OtherLayer},
    "bias": {"attributes": {"has_bias": True, "size": 4}},
    "a number of the layer": {"attributes": {"has_bias": False, "size": 5}},
    "one more attribute": {"attributes": {"has_bias": False, "size": 4, "interleaved": None}},
    "a nested setting": {"attributes": {"has_bias": False, "size": 4, "quant": {"group": [64]}}},
    "the method": {"method": OtherMethod},
    "a setting of the method": {"method_attributes": {"bits": 4}},
    "a class the method uses": {"method_attributes": {"bits": 8, "kernel": OtherLayer}},
    "a setting of the scheme": {"scheme": scheme(symmetric=False)},
    "a setting of its kernel": {"scheme": scheme(kernel_symmetric=False)},
    "the parameter's name": {"name": "qweight"},
    "the parameter's class": {"parameter": OtherParameter},
    "the parameter's dtype": {"dtype": torch.float16},
    "its shape": {"shape": (2, 16), "stride": (16, 1)},
    "its layout": {"stride": (1, 4)},
    "its content": {"content": 1},
    "the model's dtype": {"model_dtype": torch.float32},
    "the hash": {"algorithm": "blake2b"},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_a_layer_is_made_from_changes_its_key(change: dict[str, Any]) -> None:
    assert Inputs().key() == Inputs().key()
    assert Inputs(**change).key()[0] != Inputs().key()[0]


@pytest.mark.parametrize("name", ["prefix", "layer_name", "tp_rank", "ep_rank", "dp_rank"])
def test_where_a_layer_stands_does_not(name: str) -> None:
    """Equal slices of two ranks meet; different slices have different content."""
    # Deeper down only ranks are places: a "name" in a configuration says what it is.
    depth = [0, 1] if name.endswith("_rank") else [0, 0]
    one = {"has_bias": False, "size": 4, name: 0, "nested": {name: depth[0]}}
    two = {"has_bias": False, "size": 4, name: 1, "nested": {name: depth[1]}}
    assert Inputs(attributes=one).key() == Inputs(attributes=two).key()


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def without_mkldnn() -> Iterator[None]:
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


@contextmanager
def low_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def variable(name: str, value: str = "1") -> AbstractContextManager[Any]:
    return mock.patch.dict(os.environ, {name: value})


def _toggles(*names: str) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    # vLLM and other tests have set some of them already.
    other = {name: f"other than {os.environ.get(name)}" for name in names}
    return {name: functools.partial(variable, name, value) for name, value in other.items()}


PROCESS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "threads": lambda: engines.threads(torch.get_num_threads() + 1),
    "mkldnn": without_mkldnn,
    "float32 precision": low_precision,
    "deterministic algorithms": deterministic,
    "onednn": lambda: mock.patch("vllm._custom_ops._supports_onednn", new=False),
    "zen": lambda: mock.patch.object(type(vllm.platforms.current_platform), "is_zen_cpu", _true),
    "cpu capabilities": lambda: mock.patch("torch.cpu.get_capabilities", return_value={}),
    **_toggles(*sorted(switches())),
    **_toggles("OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_CBWR"),
}
NEVER_MIND = {
    "VLLM_API_KEY": "s3cr3t-value",
    "VLLM_NEW_TOKEN": "s3cr3t-value",
    "VLLM_HOST_IP": "10.1.2.3",
    "VLLM_PORT": "12345",
    "VLLM_CACHE_ROOT": "/some/where",
    "VLLM_LOGGING_LEVEL": "DEBUG",
    "VLLM_CPU_KVCACHE_SPACE": "7654321",
    "HF_TOKEN": "s3cr3t-value",
    "AWS_SECRET_ACCESS_KEY": "s3cr3t-value",
}


def _true(*_args: object) -> bool:
    return True


@pytest.mark.parametrize("toggled", PROCESS.values(), ids=PROCESS.keys())
def test_settings_of_the_process_change_the_key(
    toggled: Callable[[], AbstractContextManager[Any]],
) -> None:
    before = Inputs().key()[0]
    with toggled():
        assert Inputs().key()[0] != before
    assert Inputs().key()[0] == before


@pytest.mark.parametrize("name", NEVER_MIND)
def test_ports_paths_and_secrets_do_not_change_the_key_nor_stand_in_it(name: str) -> None:
    before = Inputs().key()
    with variable(name, NEVER_MIND[name]):
        assert Inputs().key() == before
        assert NEVER_MIND[name] not in Inputs().key()[1]


@pytest.mark.parametrize("arch", ["qwen2", "mixtral"])
def test_what_makes_processing_end_otherwise_changes_the_key(arch: str, tmp_path: Path) -> None:
    """Really loaded, with each switch in turn: the oracle is the state processing left behind."""
    found = fresh.call_forked(load_with_each_switch, arch, tmp_path)
    plainly = found.pop("nothing changed")

    assert found.pop("nothing changed, again") == plainly, "two equal loads would never share"
    keys = {name: key for name, (key, _) in plainly.items() if key is not None}
    assert len(keys) > len(plainly) / 3
    for switch, layers in found.items():
        different = {name for name in keys if layers[name][1] != plainly[name][1]}
        shows = switch == "float32" or (
            plain.packs() and switch in ("cpu_weights", "without oneDNN")
        )
        if shows:
            assert different, f"{switch} shows nothing, so this test proves nothing of it"
        assert not [n for n in different if layers[n][0] == keys[n]], "other state, same key"
        if switch != "cpu_weights":  # of that, experts and norms need to know nothing
            # Whether a switch shows on this CPU or not: on the next one it may.
            assert not [name for name in keys if layers[name][0] == keys[name]], switch


Layers = dict[str, tuple[str | None, Any]]  # by name: the key of the layer's record, its state


def load_with_each_switch(arch: str, root: Path) -> dict[str, Layers]:
    """By switch; each model is dropped before the next, so that none shares."""
    base = checkpoints.make(arch, root).base
    loads: dict[str, tuple[AbstractContextManager[Any], dict[str, Any], dict[str, Any]]] = {
        "nothing changed": (nullcontext(), {}, {}),
        "nothing changed, again": (nullcontext(), {}, {}),
        "float32": (nullcontext(), {}, {"dtype": "float32"}),
        "float16": (nullcontext(), {}, {"dtype": "float16"}),
        "cpu_weights": (nullcontext(), {"cpu_weights": "plain"}, {}),
        "without oneDNN": (PROCESS["onednn"](), {}, {}),
        "VLLM_ZENTORCH_WEIGHT_PREPACK": (variable("VLLM_ZENTORCH_WEIGHT_PREPACK", "0"), {}, {}),
        "VLLM_DISABLED_KERNELS": (variable("VLLM_DISABLED_KERNELS", "X"), {}, {}),
        "threads": (engines.threads(3), {}, {}),
        "mkldnn": (without_mkldnn(), {}, {}),
    }
    found = {}
    engines.warm_up(base)
    for name, (toggled, config, options) in loads.items():
        with toggled:
            llm = plain.engine(base, tensor_dedup=config, **options)
            found[name] = {n: (_key(m), _state(m)) for n, m in _layers(llm)}
            _check_preimages(root)
            plain.let_go(llm)
            del llm
        gc.collect()
        assert not registry.records(), f"{name}: the next load would share"
    return found


def _layers(llm: "LLM") -> list[tuple[str, nn.Module]]:
    return [(n, m) for n, m in plain.model(llm).named_modules() if hasattr(m, "quant_method")]


def _check_preimages(root: Path) -> None:
    for record in registry.records().values():
        if isinstance(record, LayerRecord):
            assert json.loads(record.preimage)["layer"]
            assert str(root) not in record.preimage


def _key(layer: nn.Module) -> str | None:
    holder = getattr(layer, "cpu_linear", None)
    record = getattr(layer, RECORD, None) or getattr(holder, RECORD, None)
    return None if record is None else record.key


def _state(layer: Any) -> Any:
    """Parameters as bytes, the packed function by its code and what it holds, kernel settings."""
    weights = {n: (str(p.dtype), shared.raw(p)) for n, p in layer.named_parameters(recurse=False)}
    linear = getattr(layer, "cpu_linear", None)
    code = getattr(linear, "__code__", linear)
    held = [str(type(cell.cell_contents)) for cell in getattr(linear, "__closure__", None) or ()]
    kernel = getattr(layer.quant_method, "moe_kernel", None)
    settings = {} if kernel is None else vars(kernel.fused_experts)
    simple = {k: v for k, v in settings.items() if isinstance(v, (bool, int, float, str))}
    return weights, str(getattr(code, "co_firstlineno", code)), held, simple
