"""Final tensors that somebody else computed: which of them share a slab."""

import gc
import weakref

import torch

from tensor_dedup.config import TensorDedupConfig
from tensor_dedup.loader.checkpoint_io.sources import SourceReader
from tensor_dedup.loader.deferred.computed_tensors import Found, share_by_content, slabs
from tensor_dedup.loader.deferred.evaluate import Evaluator, Scratch
from tensor_dedup.loader.deferred.session import LoadSession
from tensor_dedup.loader.residents.resident import Resident

SHAPE = torch.tensor([4096, 4096])  # as a quantised layer has it beside its weight


def session() -> LoadSession:
    reader, scratch = SourceReader("blake3"), Scratch()
    return LoadSession(TensorDedupConfig(), reader, scratch, Evaluator(reader, scratch))


def layer(*tensors: torch.Tensor) -> dict[int, Found]:
    """What becomes of a layer with these tensors, by number."""
    found: dict[int, Found] = {}
    for group in slabs([tensor.nbytes for tensor in tensors]):
        named = [(f"layer.{number}", tensors[number]) for number in group]
        found.update(zip(group, share_by_content(session(), named), strict=True))
    return found


def test_every_tensor_is_in_one_slab_and_large_ones_are_alone() -> None:
    sizes = [8, 32 << 20, 1 << 20, 16 << 20, (16 << 20) - 1, 64 << 10, (64 << 10) - 1]
    assert slabs(sizes) == [[1], [3], [2, 4, 5], [0, 6]]
    assert slabs([]) == []


def test_a_small_tensor_of_two_models_keeps_no_more_of_the_first_than_itself() -> None:
    first = layer(torch.full((1 << 20,), 1, dtype=torch.uint8), SHAPE)
    second = layer(torch.full((1 << 20,), 2, dtype=torch.uint8), SHAPE)
    assert second[1] == (first[1][0], False)
    weight = first[0][0]
    assert isinstance(weight, Resident)
    slab = weakref.ref(weight.slab)
    first.clear()
    del weight
    gc.collect()
    assert slab() is None
    resident, _ = second[1]
    assert isinstance(resident, Resident)
    assert torch.equal(resident.map(), SHAPE)
