"""One layer after vLLM has processed it, without an engine around it."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Int8,
)

from tensor_dedup.config import TensorDedupConfig
from tensor_dedup.loader.checkpoint_io.sources import SourceReader
from tensor_dedup.loader.deferred import session
from tensor_dedup.loader.deferred.evaluate import Evaluator, Scratch
from tensor_dedup.loader.deferred.layer_records import LayerRecord
from tensor_dedup.loader.deferred.parameters import DeferredParameter
from tensor_dedup.loader.deferred.session import LoadSession, ScratchTensor
from tensor_dedup.loader.deferred.storage import ExpressionKind, View, VirtualStorage
from tensor_dedup.loader.residents.provider import HostProvider
from tensor_dedup.loader.residents.resident import pack
from tensor_dedup.loader.unsharing.lookup import is_mapped
from tensor_dedup.patches.vllm.kernels import packs_int8
from tensor_dedup.patches.vllm.processed import LayerContext, ProcessedLayer

pytestmark = pytest.mark.vllm
SIZE = 1 << 20


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> LayerContext:
    """A load in which everything may be shared."""
    monkeypatch.setattr(LoadSession, "reason", lambda *_: None)
    reader, scratch = SourceReader("blake3"), Scratch()
    session = LoadSession(TensorDedupConfig(), reader, scratch, Evaluator(reader, scratch))
    return LayerContext(session, {}, packed=True, model_dtype=torch.bfloat16)


def deferred(parameter: nn.Parameter, name: str) -> DeferredParameter:
    meta = torch.empty(SIZE, dtype=torch.uint8, device="meta").untyped_storage()
    view = View(
        VirtualStorage(ExpressionKind.PARAMETER, SIZE, meta), 0, parameter.dtype, (SIZE,), (1,), 0
    )
    return DeferredParameter(f"layer.{name}", parameter, view)


def test_a_large_layer_is_never_there_twice(
    context: LayerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_OWN_SLAB_BYTES", SIZE)
    layer, scratch = nn.Module(), context.session.scratch
    made = {}
    for number, name in enumerate(("w13", "w2")):
        meta = torch.empty(SIZE, dtype=torch.uint8, device="meta")
        layer.register_parameter(name, nn.Parameter(meta, False))
        block = scratch.take(SIZE).fill_(number)
        made[name] = ScratchTensor(block, block)
    each = {name: deferred(parameter, name) for name, parameter in layer.named_parameters()}
    processed = ProcessedLayer(context, layer, each)
    processed.materialise(made)
    assert made == {}
    assert scratch._lent == 0
    waiting: list[int] = []
    make = HostProvider.get_or_build

    def making(self: HostProvider, *args: Any) -> Any:
        waiting.append(sum(not is_mapped(parameter) for parameter in layer.parameters()))
        return make(self, *args)

    with mock.patch.object(HostProvider, "get_or_build", making):
        processed.share()
    assert waiting == [2, 1]
    assert [int(p[0]) for p in layer.parameters() if is_mapped(p)] == [0, 1]


def test_a_parameter_that_is_replaced_keeps_its_loader(context: LayerContext) -> None:
    """As it does where vLLM replaces it, so that a later load finds it."""

    class Before(nn.Parameter):
        pass

    layer = nn.Module()
    parameter: Any = Before(torch.empty(SIZE, dtype=torch.uint8, device="meta"), False)
    parameter.weight_loader = print
    layer.register_parameter("weight", parameter)
    tensor = torch.ones(SIZE, dtype=torch.uint8)
    [resident] = pack([(tensor, "digest")])
    record = LayerRecord("key", "{}")
    record.residents["weight"] = (resident, nn.Parameter)
    ProcessedLayer(context, layer, {"weight": deferred(parameter, "weight")}).map(record)
    weight: Any = layer.weight
    assert type(weight) is nn.Parameter
    assert vars(weight)["weight_loader"] is print
    assert torch.equal(weight, tensor)


def test_a_method_of_another_class_is_not_packed_by_key() -> None:
    class Rotating(CompressedTensorsLinearMethod):
        pass

    scheme = CompressedTensorsW8A8Int8("channel", False, True)
    scheme.kernel = init_int8_linear_kernel(True, False, True, "test")
    answers = []
    for method in (CompressedTensorsLinearMethod, Rotating):
        layer: Any = nn.Module()
        layer.quant_method, layer.scheme = method(mock.Mock()), scheme
        answers.append(packs_int8(layer))
    assert answers == [True, False]
