"""Any range of the bytes that an array would have in C order, however it lies."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.store.files import RealFiles
from tensor_dedup.store.gathered import (
    Gathered,
    GatheredArray,
    copy_flat,
    flat_bytes,
    place_of,
)
from tensor_dedup.store.hashing import Hasher, change_hash, change_hashes
from tensor_dedup.training.state import GatheredTensor

BASE = np.arange(7 * 3 * 5 * 4, dtype=np.float32).reshape(7, 3, 5, 4)
WAYS: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "transposed": lambda: BASE.T,
    "wide": lambda: np.arange(40 * 50, dtype=np.int16).reshape(40, 50).T,
    "channels last": lambda: BASE.transpose(0, 3, 1, 2),
    "every other": lambda: BASE[:, ::2, :, ::3],
    "backwards": lambda: BASE[::-1, :, ::-1],
    "expanded": lambda: np.broadcast_to(BASE[0, 0, 0], (9, 4)),
    "a column": lambda: BASE.reshape(-1, 4)[:, 1],
    "big-endian": lambda: BASE.astype(">f4"),
    "big-endian, transposed": lambda: BASE.astype(">f4").T,
    "of no dimension": lambda: np.array(3, ">u2"),
    "of two bytes": lambda: BASE.astype("<f2").T,
    "of sixteen bytes": lambda: BASE.astype(complex).T,
    "empty": lambda: BASE[:, :0].T,
}


@pytest.mark.parametrize("way", WAYS)
def test_slices_are_those_of_the_bytes_in_order(way: str) -> None:
    array, dice = WAYS[way](), random.Random(way)
    expected = array.astype(array.dtype.newbyteorder("<")).tobytes("C")
    gathered = GatheredArray(array)
    assert_gathers(gathered, expected, dice)


def assert_gathers(gathered: Gathered, expected: bytes, dice: random.Random) -> None:
    """These are its bytes, as a whole and in slices."""
    assert gathered.nbytes == len(expected)
    assert bytes(gathered) == gathered[:] == expected
    for _ in range(200):
        start, stop = sorted(dice.randrange(len(expected) + 2) for _ in range(2))
        assert gathered[start:stop] == expected[start:stop]
    whole = memoryview(bytearray(len(expected)))
    if expected:
        copy_flat(gathered, whole)
    assert whole == expected


NUMBERS = torch.randn(7, 12, 5, dtype=torch.complex64)
TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "as it is": lambda: NUMBERS,
    "conjugate": NUMBERS.conj,
    "conjugate, transposed": lambda: NUMBERS.mH[:, ::2],
    "negative": lambda: NUMBERS.conj().imag,
    "negative, of two bytes": lambda: torch._neg_view(NUMBERS.real.bfloat16()),
    "expanded": lambda: NUMBERS[:1].conj().expand(4, 12, 5),
    "of no dimension": lambda: NUMBERS[0, 0, 0].conj(),
    "empty": lambda: NUMBERS[:, :0].conj(),
    "of numbers that are learnt": lambda: NUMBERS.real.clone().requires_grad_().T,
}


@pytest.mark.parametrize("way", TENSORS)
@pytest.mark.filterwarnings("ignore:The use of `x.T` on tensors")
def test_slices_of_a_tensor_are_those_of_its_bytes(way: str) -> None:
    tensor, dice = TENSORS[way](), random.Random(way)
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    expected = bytes(plain.flatten().view(torch.uint8).numpy())
    assert_gathers(GatheredTensor(tensor), expected, dice)


def test_slices_of_records_have_zeros_between_their_fields() -> None:
    kind = np.dtype([("a", "u1"), ("b", "<f8"), ("c", "<u2")], align=True)
    records, dice = np.frombuffer(random.Random(1).randbytes(24 * 35), kind), random.Random(2)
    for array in (records, records.reshape(5, 7).T[::-1]):
        rows = array[..., np.newaxis].view(np.uint8)
        expected = np.zeros(array.shape, kind)
        for name in "abc":
            expected[name] = array[name]
        gathered = GatheredArray(rows, [(1, 8), (18, 24)])
        assert_gathers(gathered, expected.tobytes(), dice)


def test_a_place_of_a_tensor_is_one_of_its_values() -> None:
    assert place_of(GatheredTensor(NUMBERS)) == place_of(GatheredTensor(NUMBERS[:]))
    others = [NUMBERS, NUMBERS.conj(), NUMBERS[:3], torch._neg_view(NUMBERS), NUMBERS.mT]
    assert len({place_of(GatheredTensor(each)) for each in others}) == len(others)


def test_a_place_is_one_of_an_array_and_how_it_lies() -> None:
    square = np.zeros((4, 4))
    same = [
        GatheredArray(square.T),
        GatheredArray(square.T),
        GatheredArray(square[::-1]),
        GatheredArray(square[:2].T),
    ]
    assert [place_of(each) == place_of(same[0]) for each in same] == [True, True, False, False]
    assert place_of(flat_bytes(square.data)) == place_of(flat_bytes(square.view(np.uint64).data))
    some, others = ([(0, 2)], [(2, 4)])
    gapped = [GatheredArray(square, gaps) for gaps in (some, list(some), others, ())]
    assert [place_of(each) == place_of(gapped[0]) for each in gapped] == [True, True, False, False]


@pytest.mark.parametrize("leaves", [0.5, 1, 2.5, 20])
def test_change_hashes_are_those_of_the_bytes(leaves: float) -> None:
    flat = np.random.default_rng(1).integers(0, 255, int(leaves * LEAF_BYTES), np.uint8)
    turned = flat.reshape(256, -1).T
    copied = np.ascontiguousarray(turned)
    hasher = Hasher(RealFiles(), 2)
    found = change_hashes(hasher, [GatheredArray(turned), copied.data, GatheredArray(turned)])
    hasher.close()
    assert found == [change_hash(copied.data)] * 3 == [change_hash(GatheredArray(turned))] * 3
