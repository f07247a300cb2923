"""Sharing in part is one algorithm for every kind of memory: its steps, and what stays of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from tensor_dedup.digest import LEAF_BYTES, digest
from tensor_dedup.errors import AuditError
from tensor_dedup.loader.residents.partial import (
    Content,
    KnownTensor,
    Unit,
    share_in_part,
    units_in_common,
    units_of,
)
from tensor_dedup.loader.residents.provider import HostProvider
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.residents.resident import Resident
from tensor_dedup.loader.residents.slab import OutOfMemoryError
from vllm_runs.lent_tensors import changed, contents_of, known_tensor, request_for, rows

STEPS = ["donors", "pieces", "admit", "build", "accept", "publish"]


class Steps:
    """A memory that notes what it is asked for, and gives up, or fails, at one step."""

    def __init__(self, stops_at: str = "", error: Exception | None = None) -> None:
        self.asked: list[str] = []
        self.noted: list[tuple[str, Sequence[Content]]] = []
        self._stops_at, self._error = stops_at, error

    def step(self, name: str) -> bool:
        self.asked.append(name)
        if name == self._stops_at and self._error is not None:
            raise self._error
        return name != self._stops_at

    def donors(self, tensor: KnownTensor) -> list[str]:
        return ["a donor"] if self.step("donors") else []

    def pieces(self, tensor: KnownTensor, donors: Sequence[str]) -> str | None:
        return "a plan" if self.step("pieces") else None

    def admit(self, tensor: KnownTensor, plan: str) -> Callable[[], None] | None:
        return (lambda: None) if self.step("admit") else None

    def build(self, tensor: KnownTensor, plan: str, progress: Callable[[], None]) -> str | None:
        return "built" if self.step("build") else None

    def accept(self, built: str) -> bool:
        return self.step("accept")

    def publish(self, tensor: KnownTensor, built: str) -> tuple[str, bool] | None:
        return (built, True) if self.step("publish") else None

    def note_contents(self, resident: str, contents: Sequence[Content]) -> None:
        self.noted.append((resident, contents))

    def release(self) -> None:
        self.asked.append("release")


@pytest.fixture(scope="module")
def tensor() -> KnownTensor:
    return known_tensor([rows(4, 1), rows(4, 2)], [])


def test_the_steps_in_order(tensor: KnownTensor) -> None:
    memory = Steps()
    assert share_in_part(tensor, memory, memory.accept) == ("built", True)
    assert memory.asked == [*STEPS, "release"]
    assert memory.noted == [("built", tensor.contents)]


@pytest.mark.parametrize("error", [None, OutOfMemoryError("no room")], ids=["None", "error"])
@pytest.mark.parametrize("step", STEPS)
def test_whatever_step_gives_up_or_fails_what_was_reserved_is_given_back(
    step: str, error: Exception | None, tensor: KnownTensor
) -> None:
    memory = Steps(step, error)
    if error is None:
        assert share_in_part(tensor, memory, memory.accept) is None
    else:
        with pytest.raises(OutOfMemoryError):
            share_in_part(tensor, memory, memory.accept)
    assert memory.asked == [*STEPS[: STEPS.index(step) + 1], "release"]
    assert not memory.noted


def test_small_tensors_are_nobodys_parts() -> None:
    memory = Steps()
    assert share_in_part(known_tensor([rows(3, 1)], []), memory, memory.accept) is None
    assert memory.asked == []


@pytest.mark.parametrize("refuses", [False, True], ids=["error", "refused"])
def test_what_is_not_accepted_is_found_by_nobody(refuses: bool) -> None:
    base = rows(6, 3)
    [(held, _)] = HostProvider().get_or_build([request_for(base)])
    HostProvider().note_contents(held, contents_of([base]))
    read: list[int] = []
    known = known_tensor([changed(base, 1)], read)
    built: list[Resident] = []

    def accept(resident: Resident) -> bool:
        built.append(resident)
        if not refuses:
            raise AuditError("other bytes")
        return False

    if refuses:
        assert HostProvider().share_known(known, accept) is None
    else:
        with pytest.raises(AuditError):
            HostProvider().share_known(known, accept)
    [made] = built
    assert made.leaf_shared_bytes == 5 * LEAF_BYTES  # or nothing is tested here
    assert sum(read) == LEAF_BYTES
    assert registry.lookup(made.key) is None
    assert held.nbytes


def test_what_is_read_of_units_is_leaves_or_whole_contents() -> None:
    parts = [rows(4, 4), rows(1, 5), rows(5, 6)]
    asked: list[tuple[int, Sequence[int] | None]] = []
    got: dict[int, bytes] = {}
    tensor = known_tensor(parts, [])
    read = tensor.read

    def noting(number: int, leaves: Sequence[int] | None, write: Callable[..., None]) -> None:
        asked.append((number, leaves))
        read(number, leaves, write)

    units = [*units_of(tensor.contents)]
    wanted = [*units[1:3], *units[4:]]
    replace(tensor, read=noting).read_units(
        wanted[::-1], lambda piece, at: got.update({at: bytes(piece)})
    )
    assert [(number, leaves and sorted(leaves)) for number, leaves in asked] == [
        (0, [1, 2]),
        (1, None),
        (2, None),
    ]
    whole = torch.cat(parts).view(torch.uint8).flatten().numpy().tobytes()
    assert sum(map(len, got.values())) == sum(unit.end - unit.start for unit in wanted)
    assert all(whole[at : at + len(piece)] == piece for at, piece in got.items())


def test_units_in_common_are_at_the_same_place() -> None:
    base, other = rows(4, 7), rows(4, 8)
    mine = contents_of([base, other])
    units = [*units_of(mine)]
    [leafless, *_] = mine

    def common(theirs: Sequence[Content]) -> list[Unit]:
        return units_in_common(mine, units, theirs)

    assert common(mine) == units
    assert common(contents_of([other, base])) == []
    assert common(contents_of([changed(base, 2), other])) == [*units[:2], *units[3:]]
    assert common([leafless._replace(leaves=())]) == units[:4]  # equal as a whole
    assert common([leafless._replace(digest=digest(b"another"))]) == units[:4]  # by its leaves
