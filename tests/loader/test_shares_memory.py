"""shares_memory: the same physical memory, whatever the addresses, until one side writes."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from processes.process_state import descriptor_limit, forked
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.residents import mappings
from tensor_dedup.loader.residents.mappings import MAPPINGS, SlabRange
from tensor_dedup.loader.residents.resident import (
    Resident,
    pack,
    shared_bytes,
    shares_memory,
)
from tensor_dedup.memory_manager.protocol.layout import PAGE

COLUMNS = PAGE // 4  # a row of float32 is a page


def matrix() -> torch.Tensor:
    return torch.arange(8.0 * COLUMNS).view(8, COLUMNS)


@pytest.fixture
def resident() -> Resident:
    (found,) = pack([(matrix(), "digest")])
    return found


def test_two_mappings_share_and_a_copy_does_not(resident: Resident) -> None:
    one, two = resident.map(), resident.map()
    assert one.data_ptr() != two.data_ptr()
    assert shares_memory(one, two)
    assert shares_memory(one, one)
    assert not shares_memory(one, one.clone())
    assert not shares_memory(one, matrix())


def test_reading_all_of_it_changes_nothing(resident: Resident) -> None:
    one, two = resident.map(), resident.map(writable=False)
    assert torch.equal(one, two)
    assert shares_memory(one, two)


@pytest.mark.parametrize("writer", [0, 1])
def test_a_write_by_either_side_ends_it_for_that_side_only(resident: Resident, writer: int) -> None:
    sides = [resident.map(), resident.map()]
    third = resident.map()
    assert shares_memory(*sides)
    sides[writer][7, 3] = -1
    assert not shares_memory(*sides)
    assert not shares_memory(sides[1], sides[0])
    assert not shares_memory(sides[writer], third)
    assert shares_memory(sides[1 - writer], third)


def test_writing_the_same_value_back_is_a_write_too(resident: Resident) -> None:
    one, two = resident.map(), resident.map()
    one[0, 0] = one[0, 0].item()
    assert torch.equal(one, two)
    assert not shares_memory(one, two)


def test_views_share_where_the_tensors_do(resident: Resident) -> None:
    one, two = resident.map(), resident.map()
    assert shares_memory(one[2:4], two[2:4])
    assert shares_memory(one[:, 5:9], two[:, 5:9])
    assert shares_memory(one.t(), two)
    assert shares_memory(one.view(torch.int32), two)
    assert shares_memory(one[3, 7], two[3, 7])
    assert not shares_memory(one[2:4], two[3:5])
    assert not shares_memory(one[2:4], two[2:5])
    assert not shares_memory(one[:, 5:9], two[:, 6:10])
    assert not shares_memory(one[:, ::2], two.flatten()[: 4 * COLUMNS])
    one[6, 0] = -1
    assert shares_memory(one[2:4], two[2:4])
    assert not shares_memory(one[5:7], two[5:7])


def test_a_small_tensor_inside_a_page_is_found() -> None:
    residents = pack([(torch.arange(10.0), "a"), (torch.arange(20.0), "b")])
    one, two, other = residents[1].map(), residents[1].map(), residents[0].map()
    assert shares_memory(one, two)
    other.zero_()  # the same page of the slab, another mapping
    assert shares_memory(one, two)
    one.zero_()
    assert not shares_memory(one, two)


def test_equal_bytes_of_two_residents_are_not_one_memory() -> None:
    together = pack([(matrix(), "a"), (matrix(), "b")])
    (apart,) = pack([(matrix(), "a")])
    assert not shares_memory(together[0].map(), together[1].map())
    assert not shares_memory(together[0].map(), apart.map())


def test_memory_that_was_mapped_here_before_does_not_count(resident: Resident) -> None:
    one = resident.map()
    address, count = one.data_ptr(), len(MAPPINGS)
    inside = SlabRange(resident.slab.serial, resident.offset + 8, 8)
    assert MAPPINGS.ranges(address + 8, 8) == [inside]
    assert MAPPINGS.ranges(address + 8, one.nbytes) == []
    del one
    # Anything may lie there from now on.
    assert MAPPINGS.ranges(address + 8, 8) == []
    assert len(MAPPINGS) == count - 1


def test_private_tensors_share_only_the_same_range_of_one_storage() -> None:
    tensor = matrix()
    assert shares_memory(tensor, tensor.detach())
    assert shares_memory(tensor[1:3], tensor[1:3])
    assert shares_memory(tensor, torch.from_numpy(tensor.numpy()))
    assert not shares_memory(tensor[1:3], tensor[2:4])
    assert not shares_memory(tensor, tensor[1:])


def test_other_devices_and_layouts() -> None:
    meta = torch.empty(4, device="meta")
    assert shares_memory(meta, meta.view(2, 2))
    assert not shares_memory(meta, torch.empty(4, device="meta"))
    assert not shares_memory(meta, torch.empty(4))
    sparse = torch.eye(2).to_sparse()
    assert not shares_memory(sparse, sparse)


def test_without_bytes_nothing_is_shared_but_ones_own_storage() -> None:
    (resident,) = pack([(torch.empty(0, 3), "digest")])
    one = resident.map()
    assert shares_memory(one, one)
    assert not shares_memory(one, resident.map())


def test_a_forked_child_shares_until_it_writes_and_the_parent_goes_on(resident: Resident) -> None:
    one, two = resident.map(), resident.map()
    assert torch.equal(one, two)  # pages present before the fork

    def child() -> list[bool]:
        seen = [shares_memory(one, two), shares_memory(one, resident.map())]
        one[0, 0] = -1
        return [*seen, shares_memory(one, two), shares_memory(two, resident.map())]

    parent = os.getpid()
    assert forked(child) == [True, True, False, True]
    assert os.getpid() == parent
    assert shares_memory(one, two)


def test_what_the_parent_wrote_is_not_shared_in_the_child(resident: Resident) -> None:
    one, two = resident.map(), resident.map()
    one[0, 0] = -1
    assert forked(lambda: shares_memory(one, two)) is False


def test_without_proc_the_answer_is_an_error_and_no_guess(
    resident: Resident, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, two = resident.map(), resident.map()
    monkeypatch.setattr(mappings, "_PAGEMAP", tmp_path / "pagemap")
    with pytest.raises(UnsupportedError, match="cannot be told"):
        shares_memory(one, two)
    assert not shares_memory(one, one.clone())


def test_without_a_descriptor_the_advice_is_to_allow_more(resident: Resident) -> None:
    one, two = resident.map(), resident.map()
    assert shared_bytes(one, two) == one.nbytes
    with descriptor_limit(0), pytest.raises(UnsupportedError, match="raise ulimit -n to ask"):
        shared_bytes(one, two)
    assert shared_bytes(one, two) == one.nbytes


def test_classes_whose_values_are_elsewhere_share_nothing() -> None:
    """As those of quantisers: an address of none is the same for all of them."""
    make: Any = TwoTensor
    one, two = (make(matrix(), matrix()) for _ in range(2))
    assert one.data_ptr() == two.data_ptr() == 0
    assert not shares_memory(one, two)
