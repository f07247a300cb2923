"""Which mappings of shared memory were written to, asked of many at once."""

from unittest import mock

import pytest
import torch

from tensor_dedup.loader.residents import mappings
from tensor_dedup.loader.residents.mappings import are_as_mapped, is_as_mapped
from tensor_dedup.loader.residents.resident import pack
from tensor_dedup.memory_manager.protocol.layout import PAGE


@pytest.fixture(params=["the kernel looks", "page by page"], autouse=True)
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "page by page":
        monkeypatch.setattr(mappings._PageScan, "open", mock.Mock(return_value=None))
    elif (scan := mappings._PageScan.open()) is None:
        pytest.skip("this kernel has no search for pages")
    else:
        scan.__exit__()


def ranges(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    return [(each.data_ptr(), each.nbytes) for each in tensors]


def test_a_write_shows_in_the_tensor_that_was_written() -> None:
    residents = pack([(torch.arange(PAGE), f"digest {number}") for number in range(5)])
    tensors = [resident.map() for resident in residents]
    assert are_as_mapped(ranges(tensors)) == [True] * 5
    assert sum(int(each.sum()) for each in tensors) > 0  # every page is read
    assert are_as_mapped(ranges(tensors)) == [True] * 5
    for number in (3, 1):
        tensors[number][-1] = 7
        found = are_as_mapped(ranges(tensors))
        assert found == [is_as_mapped(*each) for each in ranges(tensors)]
        assert not found[number]
    assert found == [True, False, True, False, True]


def test_small_tensors_of_one_page_are_written_together() -> None:
    residents = pack([(torch.arange(8), f"digest {number}") for number in range(4)])
    tensors = [resident.map() for resident in residents]
    tensors[0][0] = 7
    found = are_as_mapped(ranges(tensors))
    assert found == [is_as_mapped(*each) for each in ranges(tensors)]
    assert not found[0]


def test_ordinary_memory_is_not_as_mapped() -> None:
    resident = pack([(torch.arange(PAGE), "digest")])[0].map()
    private = torch.arange(PAGE)
    assert are_as_mapped(ranges([private, resident, private])) == [False, True, False]
    assert are_as_mapped([]) == []
