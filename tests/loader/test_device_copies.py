"""Tensors on other devices, by what they follow from. The device is `meta`, which has no values."""

import gc

import pytest
import torch

from tensor_dedup.loader.residents.resident import ReplicaKey, cast_key, is_of_bytes, resident_key
from tensor_dedup.loader.unsharing.device_copies import COPIES
from tensor_dedup.types import ResidentKey

META = torch.device("meta")


def key(dtype: str = "F32", digest: str = "d") -> ResidentKey:
    return ResidentKey(dtype, (4, 8), (8, 1), digest)


def on_meta(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(4, 8, dtype=dtype, device="meta")


def test_it_is_found_while_somebody_holds_it() -> None:
    tensor = on_meta()
    known = ReplicaKey(key(), 3)
    assert COPIES.publish(known, tensor)
    found = COPIES.lookup(known, META)
    assert found is not None
    assert found.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    assert (found.shape, found.stride(), found.dtype) == (tensor.shape, (8, 1), torch.float32)
    entry = COPIES.known(tensor)
    assert entry is not None
    assert entry.known == known
    assert COPIES.lookup(ReplicaKey(key(), 0), META) is None
    assert COPIES.lookup(ReplicaKey(key(digest="other"), 3), META) is None
    del tensor, found
    gc.collect()
    assert COPIES.lookup(known, META) is None


def test_what_is_not_all_of_its_memory_is_not_entered() -> None:
    whole = torch.empty(8, 8, device="meta")
    known = ReplicaKey(key(), 0)
    assert not COPIES.publish(known, whole[:4])
    assert not COPIES.publish(known, on_meta().t())
    assert not COPIES.publish(known, on_meta(torch.float16))
    assert COPIES.lookup(known, META) is None


def test_a_view_of_it_is_held_and_not_known() -> None:
    tensor = on_meta()
    assert COPIES.publish(ReplicaKey(key(digest="view"), 0), tensor)
    for view in (tensor[1:], tensor.t(), tensor.view(torch.int32)):
        assert COPIES.known(view) is None
        assert COPIES.holds(view)
    assert not COPIES.holds(torch.ones(4, 8))


@pytest.mark.parametrize(
    ("narrow", "wide", "lossless"),
    [
        (torch.float16, torch.float32, True),
        (torch.bfloat16, torch.float64, True),
        (torch.bfloat16, torch.float16, False),
        (torch.float32, torch.float16, False),
    ],
)
def test_only_a_cast_that_loses_nothing_leads_back(
    narrow: torch.dtype, wide: torch.dtype, lossless: bool
) -> None:
    first = resident_key(torch.ones(4, 8, dtype=narrow), "d")
    cast = cast_key(first, wide)
    assert cast is not None
    assert not is_of_bytes(cast)
    back = cast_key(cast, narrow)
    assert (back == first) == lossless
    assert cast_key(first, narrow) is first


def test_casts_of_casts_are_followed_so_far_and_no_further() -> None:
    found: ResidentKey | None = key()
    names = set()
    for dtype in (torch.float16, torch.bfloat16, torch.float16):
        assert found is not None
        found = cast_key(found, dtype)
        assert found is not None
        names.add(found.digest)
    assert len(names) == 3
    assert found is not None
    assert cast_key(found, torch.bfloat16) is None
