"""Tensors that differ from a resident in some leaves have the others in common with it."""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from processes.process_state import forked, slab_memory, slabs
from tensor_dedup import libc, shared_bytes, unshare, verify
from tensor_dedup.digest import LEAF_BYTES, digest, leaf_places
from tensor_dedup.errors import AuditError, ChangedFileError
from tensor_dedup.loader.checkpoint_io.sources import StaleHintError
from tensor_dedup.loader.residents import mappings
from tensor_dedup.loader.residents.leaves import note_contents, relink
from tensor_dedup.loader.residents.manager import ResidentRequest
from tensor_dedup.loader.residents.partial import Content
from tensor_dedup.loader.residents.provider import HostProvider
from tensor_dedup.loader.residents.registry import LEAF_SHARED_FROM, registry
from tensor_dedup.loader.residents.resident import (
    Resident,
    Write,
    digest_of,
    pack,
    resident_key,
    shares_memory,
    tensor_bytes,
)
from tensor_dedup.loader.residents.slab import MappingLimitError, SlabExtent, make_private
from tensor_dedup.loader.unsharing.lookup import is_mapping_of, residents_of
from tensor_dedup.loader.unsharing.unshare import let_go_of_written
from tensor_dedup.memory_manager.protocol.layout import PAGE
from vllm_runs import deferring
from vllm_runs.lent_tensors import (
    ROW,
    ROWS_OF_A_LEAF,
    changed,
    known_tensor,
    load_file_of_qkv,
    rows,
)


def build(*tensors: torch.Tensor, keep_alignment: bool = False) -> list[Resident]:
    """Residents as a load of its own makes them."""
    requests = [ResidentRequest(f"test:{id(t)}", t, digest_of(t)) for t in tensors]
    made = HostProvider(keep_alignment=keep_alignment).get_or_build(requests)
    assert all(new for _, new in made)
    return [resident for resident, _ in made]


def offset_by(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """A copy whose first byte is so far from a multiple of 64 bytes."""
    room = torch.empty(tensor.nbytes + 128, dtype=torch.uint8)
    start = -room.data_ptr() % 64 + nbytes
    copy = room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    assert copy.data_ptr() % 64 == nbytes
    return copy


@pytest.fixture
def base() -> Iterator[torch.Tensor]:
    """A matrix of ten leaves that is resident."""
    tensor = rows(10, 1)
    (held,) = build(tensor)
    yield tensor
    del held
    gc.collect()


def test_what_differs_is_copied_and_the_rest_is_the_same_memory(base: torch.Tensor) -> None:
    tune = changed(base, 2, 3, 7)
    (resident,) = build(tune)
    assert len(resident.extents) == 5  # neighbours are one mapping
    assert resident.leaf_shared_bytes == 7 * LEAF_BYTES
    one, two = resident.map(), residents_like(base)[0].map()
    assert torch.equal(one, tune)
    assert torch.equal(two, base)
    assert shared_bytes(one, two) == 7 * LEAF_BYTES == shared_bytes(two, one)
    assert not shares_memory(one, two)
    assert shares_memory(one[:ROWS_OF_A_LEAF], two[:ROWS_OF_A_LEAF])
    assert not shares_memory(one[-3 * ROWS_OF_A_LEAF :], two[-3 * ROWS_OF_A_LEAF :])


def residents_like(tensor: torch.Tensor) -> list[Resident]:
    name = digest_of(tensor)
    return [each for each in registry.residents() if each.key.digest == name]


def test_memory_is_what_differs(base: torch.Tensor) -> None:
    (held,) = residents_like(base)
    there = held.map()
    there.sum()
    before = slab_memory()["Pss"]
    (resident,) = build(changed(base, 5))
    mapped = resident.map()
    assert mapped.sum() != there.sum()  # every page is read
    more = slab_memory()["Pss"] - before
    assert LEAF_BYTES <= more <= 1.05 * LEAF_BYTES


@pytest.mark.parametrize("leaves", [10.5, 9.5, 9, 12])
def test_more_and_fewer_rows(base: torch.Tensor, leaves: float) -> None:
    tune = torch.cat([base, rows(3, 2)])[: int(leaves * ROWS_OF_A_LEAF)]
    (resident,) = build(tune)
    common = min(tune.nbytes, base.nbytes)
    assert resident.leaf_shared_bytes == common
    assert torch.equal(resident.map(), tune)


def test_a_last_leaf_that_grew_is_copied() -> None:
    base = rows(9.5, 3)
    held = build(base)
    tune = torch.cat([base, rows(0.25, 4)])
    (resident,) = build(tune)
    assert resident.leaf_shared_bytes == 9 * LEAF_BYTES
    assert torch.equal(resident.map(), tune)
    assert held


def test_leaves_of_two_residents_and_of_a_fine_tune(base: torch.Tensor) -> None:
    (first,) = build(changed(base, 1, 2))
    tune = changed(first.map(), 8)
    (second,) = build(tune)
    assert {e.slab for e in first.extents} < {e.slab for e in second.extents}
    assert second.leaf_shared_bytes == 9 * LEAF_BYTES
    assert shared_bytes(second.map(), first.map()) == 9 * LEAF_BYTES
    assert torch.equal(second.map(), tune)


def test_a_fine_tune_outlives_its_base_which_is_charged() -> None:
    gc.collect()
    held = slabs()
    base = rows(10, 5)
    (first,) = build(base)
    tune = changed(base, 4)
    (second,) = build(tune)
    with_both = registry.resident_bytes()
    mapped = second.map()
    del first
    gc.collect()
    assert registry.resident_bytes() == with_both  # the slab of the base is still there, and told
    assert torch.equal(mapped, tune)
    del second, mapped
    gc.collect()
    assert slabs() == held


def test_a_slab_is_not_kept_for_a_small_part_of_it(base: torch.Tensor) -> None:
    tune = changed(base, *range(1, 10))
    (resident,) = build(tune)
    assert resident.leaf_shared_bytes == 0
    assert len(resident.extents) == 1


def test_small_tensors_are_whole() -> None:
    small = rows(3.5, 6)
    assert small.nbytes < LEAF_SHARED_FROM
    held = build(small)
    (resident,) = build(changed(small, 0))
    assert len(resident.extents) == 1
    assert held


def test_names_of_one_model_have_no_leaves_in_common() -> None:
    """Their memory stays apart, as that of equal tensors of one model does."""
    base, provider = rows(10, 7), HostProvider()
    made = []
    for tensor in (base, changed(base, 3)):  # as they are loaded, one after the other
        request = ResidentRequest(f"test:{id(tensor)}", tensor, digest_of(tensor))
        [(resident, new)] = provider.get_or_build([request])
        assert new
        made.append(resident)
    assert shared_bytes(made[0].map(), made[1].map()) == 0
    [other] = build(changed(base, 4))
    assert shared_bytes(made[0].map(), other.map()) > 0  # or nothing is tested here


def test_equal_samples_are_no_equal_leaves() -> None:
    """Which leaves are likely is told by their first bytes; which are equal, by all."""
    base = torch.zeros(10 * ROWS_OF_A_LEAF, ROW)
    held = build(base)
    tune = base.clone()
    for leaf in range(9):
        tune[(leaf + 1) * ROWS_OF_A_LEAF - 1, ROW - 1] = 1  # the last number of each but one
    (resident,) = build(tune)
    assert resident.leaf_shared_bytes in (0, LEAF_BYTES)
    assert torch.equal(resident.map(), tune)
    assert held


@pytest.mark.parametrize("before", ["samples", "leaves"])
def test_a_file_that_is_cut_before_its_leaves_are_compared_is_an_error(
    before: str, tmp_path: Path
) -> None:
    """Memory that is mapped from it is not looked at any more: that would end the process."""
    base = rows(10, 7)
    tune, [held] = changed(base, 3), build(base)
    path = tmp_path / "weights"
    path.write_bytes(tensor_bytes(tune))
    whole = digest_of(tune)
    storage: Any = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=tune.nbytes)
    mapped = torch.empty(0).set_(storage, 0, tune.shape, tune.stride())

    def build_it(*, cut: bool) -> int:
        def read(into: memoryview, offset: int) -> None:
            if cut and (len(into) == 1) == (before == "leaves"):
                os.truncate(path, 100)
            if path.stat().st_size == 100:
                raise ChangedFileError("it became shorter", path=str(path))
            into[:] = tensor_bytes(tune)[offset : offset + len(into)]

        request = ResidentRequest("test:mapped", mapped, whole, read)
        try:
            [(resident, _)] = HostProvider().get_or_build([request])
        except ChangedFileError:
            return -1
        return resident.leaf_shared_bytes

    assert forked(lambda: build_it(cut=False)) == held.nbytes - LEAF_BYTES
    assert forked(lambda: build_it(cut=True)) == -1


@pytest.mark.parametrize(("of_base", "of_tune"), [(8, 8), (8, 24), (0, 16), (24, 0)])
def test_tensors_that_begin_within_a_page(of_base: int, of_tune: int) -> None:
    """A page on which a leaf of one and a leaf of another meet is the tensor's own."""
    whole = rows(10, 100 + of_base + of_tune)
    held = build(offset_by(whole, of_base), keep_alignment=True)
    for tune in (changed(whole, 0), changed(whole, 5), changed(whole, 9), whole[:-100]):
        (resident,) = build(offset_by(tune, of_tune), keep_alignment=True)
        assert resident.leaf_shared_bytes > tune.nbytes - LEAF_BYTES - 3 * PAGE
        assert resident.offset % 64 == of_base
        mapped = resident.map()
        assert mapped.data_ptr() % PAGE == resident.offset % PAGE
        assert torch.equal(mapped, tune)
    assert held


def test_leaves_of_others_that_lie_otherwise_in_a_page_are_not_taken() -> None:
    """Who has most decides how the tensor lies; what does not lie so would need pages between."""
    tune = rows(12, 300)
    # Which leaves each has, and how far from a multiple of 64 bytes it begins.
    bases = []
    for number, (first, last, offset) in enumerate([(6, 12, 8), (4, 6, 24), (0, 4, 8)]):
        base = rows(last, 301 + number)
        common = slice(first * ROWS_OF_A_LEAF, last * ROWS_OF_A_LEAF)
        base[common] = tune[common]
        bases.append((base, offset))
    held = [build(offset_by(base, n), keep_alignment=True)[0] for base, n in bases]
    assert len({resident.offset % PAGE for resident in held}) == 2
    for resident, (base, _) in zip(held, bases, strict=True):
        note_contents(resident, contents_of([base]))
    for is_known in (True, False):
        if is_known:
            made, read = build_known([tune])
            assert read == 2 * LEAF_BYTES
        else:
            (made,) = build(offset_by(tune, 16), keep_alignment=True)
        assert made is not None
        assert torch.equal(made.map(), tune)
        assert shared_bytes(made.map(), held[1].map()) == 0
        for donor in (held[0], held[2]):
            assert shared_bytes(made.map(), donor.map()) > 3 * LEAF_BYTES
        del made
        gc.collect()


def test_a_last_leaf_that_is_shorter_than_a_page() -> None:
    whole = rows(10, 8).flatten()
    held = build(offset_by(whole, 8), keep_alignment=True)
    for shorter in range(1, 3 * PAGE // 4, 700):
        tune = torch.cat([whole[: 9 * LEAF_BYTES // 4], torch.ones(shorter)])
        for changed_last in (tune, tune[:-1], whole[: len(tune)]):
            (resident,) = build(offset_by(changed_last, 8), keep_alignment=True)
            assert resident.leaf_shared_bytes
            assert torch.equal(resident.map(), changed_last)
    assert held


def test_a_writer_gets_pages_of_its_own(base: torch.Tensor) -> None:
    tune = changed(base, 4)
    (resident,) = build(tune)
    writer, reader, other = resident.map(), resident.map(), residents_like(base)[0].map()
    assert shared_bytes(writer, other) == 9 * LEAF_BYTES
    writer[0, 0] = writer[-1, -1] = 5
    assert torch.equal(reader, tune)
    assert torch.equal(other, base)
    assert shared_bytes(writer, other) == 9 * LEAF_BYTES - 2 * PAGE
    assert shared_bytes(writer, reader) == tune.nbytes - 2 * PAGE
    assert forked(lambda: bool(torch.equal(reader, tune)))


def test_private_in_place(base: torch.Tensor) -> None:
    tune = changed(base, 4)
    (resident,) = build(tune)
    mapped = resident.map()
    address = mapped.data_ptr()
    assert make_private(address, mapped.nbytes) == tune.nbytes
    assert mapped.data_ptr() == address
    assert torch.equal(mapped, tune)
    assert shared_bytes(mapped, residents_like(base)[0].map()) == 0
    mapped.zero_()
    assert torch.equal(resident.map(), tune)


def test_a_module_finds_its_residents_and_lets_go_of_what_it_wrote(base: torch.Tensor) -> None:
    (resident,) = build(changed(base, 4))
    module = torch.nn.Linear(1, 1)
    module.weight = torch.nn.Parameter(resident.map())
    [(known, found)] = residents_of(module.parameters()).values()
    assert found is resident
    assert known.key == resident.key
    assert is_mapping_of(module.weight, resident)
    assert let_go_of_written(module) == 0
    with torch.no_grad():
        module.weight[0, 0] += 1
    assert let_go_of_written(module) == resident.nbytes
    module.weight = torch.nn.Parameter(resident.map())
    assert unshare(module) == resident.nbytes


def test_verify_hashes_every_leaf(base: torch.Tensor) -> None:
    tune = changed(base, 4)
    (resident,) = build(tune)
    checked = verify()
    assert checked.ok
    assert checked.nbytes >= base.nbytes + resident.nbytes
    # One of its leaves is another's.
    wrong = Resident(resident_key(tune, "0" * 64), [*resident.extents[:1], *of_other_leaves(base)])
    assert len(wrong.extents) > 1
    registry.register(wrong)
    assert verify().mismatches == ("0" * 64,)


def of_other_leaves(base: torch.Tensor) -> Sequence[SlabExtent]:
    """What the base has from its fifth leaf on, and no mapping of it goes on from the fourth."""
    (held,) = residents_like(base)
    slab, offset, _ = held.extents[0]
    rest = base.nbytes - 4 * LEAF_BYTES
    return [
        SlabExtent(slab, offset, LEAF_BYTES),
        SlabExtent(slab, offset + 5 * LEAF_BYTES, rest - LEAF_BYTES),
    ]


def test_what_was_read_into_a_slab_is_relinked(base: torch.Tensor) -> None:
    tune = changed(base, 4)
    (streamed,) = pack([(tune, digest_of(tune))])
    linked = relink(streamed)
    assert linked.leaf_shared_bytes == 9 * LEAF_BYTES
    assert linked.key == streamed.key
    assert torch.equal(linked.map(), tune)
    assert streamed.slab not in {extent.slab for extent in linked.extents}


def test_near_the_limit_of_mappings_a_tensor_is_copied_whole(
    base: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    (resident,) = build(changed(base, 4))
    assert resident.map().nbytes
    here = slabs()
    monkeypatch.setattr(libc, "max_mappings", libc.count_mappings)
    monkeypatch.setattr(mappings.BUDGET, "_until", 0.0)
    with pytest.raises(MappingLimitError, match="max_map_count"):
        resident.map()
    assert residents_like(base)[0].map().nbytes  # one mapping, as ever
    gc.collect()
    assert slabs() == here
    provider = HostProvider()
    said = provider.not_by_leaf
    assert said is None
    for number, enter in enumerate((provider.get_or_build, enter_streamed(provider))):
        tune = changed(base, number)
        ((whole, made),) = enter([ResidentRequest("test:limit", tune, digest_of(tune))])
        assert made
        assert len(whole.extents) == 1
        assert torch.equal(whole.map(), tune)
        assert "max_map_count" in (provider.not_by_leaf or "")


def test_near_the_limit_of_mappings_everything_is_still_checked(
    base: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What consists of parts cannot be mapped any more, and is read to be compared and hashed."""
    qkv = {name: rows(4, 310 + number) for number, name in enumerate("qkv")}
    tune = {**qkv, "q": changed(qkv["q"], 1)}
    paths = [
        deferring.save(tmp_path / f"{n}.safetensors", each) for n, each in enumerate((qkv, tune))
    ]
    held = [load_file_of_qkv(None, path, known=False) for path in paths]
    assert held[1][1].ledger.leaf_shared_bytes  # or nothing is tested here
    (resident,) = build(changed(base, 4))
    monkeypatch.setattr(libc, "max_mappings", libc.count_mappings)
    monkeypatch.setattr(mappings.BUDGET, "_until", 0.0)
    assert torch.equal(resident.copied(), changed(base, 4))
    for known in (False, True):
        for config in ({}, {"audit": 1.0}, {"verify_bytes": True}):
            again, session, _ = load_file_of_qkv(None, paths[1], known=known, **config)
            assert torch.equal(again, torch.cat([*tune.values()]))
            assert not session.ledger.collisions
            [reason] = session.ledger.skipped.values()
            assert "max_map_count" in reason
    assert verify().ok
    wrong = registry.register(Resident(resident_key(base, "1" * 64), resident.extents))
    assert verify().mismatches == (wrong.key.digest,)


def enter_streamed(
    provider: HostProvider,
) -> Callable[[Sequence[ResidentRequest]], list[tuple[Resident, bool]]]:
    """What a tensor that is read straight into a slab goes through."""

    def enter(requests: Sequence[ResidentRequest]) -> list[tuple[Resident, bool]]:
        return [provider.enter_read(pack([(each.tensor, each.digest)])[0]) for each in requests]

    return enter


def test_memory_of_a_manager_is_no_donor() -> None:
    """A part of a slab has no lease: it would stay when the manager had given it to another."""

    class Lent(Resident):
        __slots__ = ()

        @property
        def lent(self) -> bool:
            return True

    tensor = rows(10, 10)
    (own,) = pack([(tensor, digest_of(tensor))])
    held = registry.register(Lent(own.key, own.extents))
    assert registry.alike(held.key) == []
    (resident,) = build(changed(tensor, 1))
    assert len(resident.extents) == 1


def test_what_stays_is_never_more_than_the_tensor_and_one_slab() -> None:
    """The slabs of dropped bases stay whole, so a tensor takes leaves from few of them."""
    gc.collect()
    before = registry.resident_bytes()
    bases = [rows(10, 20 + seed) for seed in range(3)]
    held = [build(each) for each in bases]
    tune = rows(10, 23)
    for base, (first, last) in zip(bases, ((0, 4), (4, 7), (7, 10)), strict=True):
        tune[first * ROWS_OF_A_LEAF : last * ROWS_OF_A_LEAF] = base[
            first * ROWS_OF_A_LEAF : last * ROWS_OF_A_LEAF
        ]
    (resident,) = build(tune)
    assert resident.leaf_shared_bytes >= 4 * LEAF_BYTES
    held.clear()
    gc.collect()
    assert registry.resident_bytes() - before <= tune.nbytes + bases[0].nbytes
    assert torch.equal(resident.map(), tune)


def test_the_leaves_of_one_slab_are_one_mapping_whoever_has_them(base: torch.Tensor) -> None:
    (first,) = build(changed(base, 0))
    (second,) = build(changed(base, 9))
    tune = changed(base, 0, 9)
    (third,) = build(tune)
    assert third.leaf_shared_bytes == 10 * LEAF_BYTES
    slabs_of = [e.slab for e in third.extents]
    assert len(slabs_of) == len(set(slabs_of)) == 3
    assert torch.equal(third.map(), tune)
    assert first.nbytes == second.nbytes


def test_dropped_donors_are_no_candidates() -> None:
    base = rows(10, 9)
    held = build(base)
    key = held[0].key
    assert registry.alike(key) == held
    held.clear()
    gc.collect()
    assert registry.alike(key) == []
    (resident,) = build(changed(base, 1))
    assert len(resident.extents) == 1


Parts = Sequence[torch.Tensor]


def contents_of(parts: Parts, *, with_leaves: bool = True) -> list[Content]:
    """What a tensor of these parts, one beside the other, consists of."""
    found, at = [], 0
    for part in parts:
        data = tensor_bytes(part)
        places = leaf_places(0, part.nbytes) if with_leaves else ()
        leaves = tuple(digest(data[start : start + size]) for start, size in places)
        found.append(Content(at, at + part.nbytes, digest(data), leaves))
        at += part.nbytes
    return found


def known(parts: Parts, *, with_leaves: bool = True) -> Resident:
    """A resident of a tensor of these parts, as a load of its own makes it."""
    (resident,) = build(torch.cat([*parts]))
    note_contents(resident, contents_of(parts, with_leaves=with_leaves))
    return resident


def build_known(parts: Parts, *, with_leaves: bool = True) -> tuple[Resident | None, int]:
    """What a load of its own makes of a known tensor of these parts; how many bytes it reads."""
    whole, read = torch.cat([*parts]), list[int]()
    contents = contents_of(parts, with_leaves=with_leaves)
    tensor = known_tensor(parts, read, contents=contents)
    found = HostProvider().share_known(tensor, lambda _: True)
    if found is None:
        return None, sum(read)
    assert torch.equal(found[0].map(), whole)
    assert found[0].key == resident_key(whole, digest_of(whole))
    return found[0], sum(read)


# Parts that meet where pages do, and some that do not.
@pytest.mark.parametrize("sizes", [(2, 2, 2), (2.003, 1.4001, 2.0), (4.50001, 0.01, 0.01)])
@pytest.mark.parametrize("other", range(3))
def test_of_known_parts_only_the_one_that_changed_is_read(
    sizes: Sequence[float], other: int
) -> None:
    parts = [
        rows(2 * size + 1, seed).flatten()[: int(size * LEAF_BYTES / 2)]
        for seed, size in enumerate(sizes, 30)
    ]
    assert (parts[0].nbytes % PAGE == 0) == (sizes[0] == 2)
    held = known(parts, with_leaves=False)
    tune = [*parts]
    tune[other] = tune[other] + 1
    made, read = build_known(tune, with_leaves=False)
    if made is None:  # what is equal is too small a part of the slab
        assert sum(part.nbytes for part in parts) - parts[other].nbytes < held.nbytes / 8
        return
    assert read == parts[other].nbytes
    assert held.nbytes - read - 4 * PAGE <= made.leaf_shared_bytes <= held.nbytes - read
    assert shared_bytes(made.map(), held.map()) >= made.leaf_shared_bytes


@pytest.mark.parametrize("more", [0, 256, -256])
def test_of_a_known_tensor_only_the_leaves_that_changed_are_read(more: int) -> None:
    base = rows(10.1, 40)
    held = known([base])
    tune = changed(base, 3, 4)
    tune = torch.cat([tune, rows(1, 41)[:more]]) if more >= 0 else tune[:more]
    made, read = build_known([tune])
    assert made is not None
    assert read == 2 * LEAF_BYTES + (tune.nbytes % LEAF_BYTES if more else 0)
    assert made.leaf_shared_bytes == tune.nbytes - read
    assert held.nbytes == base.nbytes


def test_nothing_is_read_of_a_known_tensor_of_which_nobody_has_a_part() -> None:
    held = known([rows(5, 50), rows(5, 51)])
    assert build_known([rows(5, 52), rows(5, 53)]) == (None, 0)
    assert build_known([rows(5, 51), rows(5, 50)]) == (None, 0)  # elsewhere in it
    assert held.nbytes


def test_a_known_tensor_of_others_leaves_is_not_read() -> None:
    """What is not mapped, because too much would stay with it, is copied from where it is."""
    parts = [[rows(4, 60 + base + part) for part in (0, 10, 20)] for base in range(3)]
    held = [known(each) for each in parts]
    made, read = build_known([each[number] for number, each in enumerate(parts)])
    assert made is not None
    assert read == 0
    assert made.leaf_shared_bytes == 4 * LEAF_BYTES
    assert len(held) == 3


@pytest.mark.parametrize("one_in", [2, pytest.param(1, marks=pytest.mark.long)])
def test_checks_of_a_known_tensor_reach_every_leaf(tmp_path: Path, one_in: int) -> None:
    """As if two digests collided: a leaf is said to be the base's, and is read by nobody."""
    parts = {name: rows(4, 80 + number) for number, name in enumerate("qkv")}
    made, _, _ = load_file_of_qkv(
        None, deferring.save(tmp_path / "base.safetensors", parts), known=False
    )
    [held] = residents_like(made)
    truth = contents_of([*parts.values()])
    for number, name in enumerate("qkv"):
        other = "qkv"[(number + 1) % 3]
        for leaf in range(number % one_in, 4, one_in):  # each, of one tensor or another
            # One leaf has really changed, so that what is made is nobody's, and goes with its user.
            base = {**parts, other: changed(parts[other], 2)}
            tune = {**base, name: changed(parts[name], leaf)}
            path = deferring.save(tmp_path / f"{name}{leaf}.safetensors", tune)
            lie = contents_of([*tune.values()])[number]
            note_contents(held, [*truth[:number], lie, *truth[number + 1 :]])
            wrong, session, read = load_file_of_qkv(None, path, known=True)
            assert read == LEAF_BYTES  # or nothing is tested here
            assert torch.equal(wrong, torch.cat([*base.values()]))
            del wrong, session
            gc.collect()
            with pytest.raises(AuditError):
                load_file_of_qkv(None, path, known=True, audit=1.0)
            gc.collect()
            right, session, _ = load_file_of_qkv(None, path, known=True, verify_bytes=True)
            assert session.ledger.collisions == 1
            assert torch.equal(right, torch.cat([*tune.values()]))
            path.unlink()


@pytest.mark.parametrize("leaf", range(4))
def test_a_wrong_digest_of_one_leaf_beside_others_is_noticed(tmp_path: Path, leaf: int) -> None:
    """A leaf that changed is said to be the base's, while all else that is remembered is true."""
    base = {name: rows(4, 80 + number) for number, name in enumerate("qkv")}
    tune = {**base, "q": changed(base["q"], leaf, (leaf + 1) % 4)}
    paths = [
        deferring.save(tmp_path / f"{n}.safetensors", each) for n, each in enumerate((base, tune))
    ]
    tensor, _, _ = load_file_of_qkv(None, paths[0], known=False)
    right, _, read = load_file_of_qkv(None, paths[1], known=True)
    assert read == 2 * LEAF_BYTES
    assert torch.equal(right, torch.cat([*tune.values()]))
    del right
    gc.collect()
    [true] = contents_of([base["q"]])
    with pytest.raises(StaleHintError):
        load_file_of_qkv(None, paths[1], known=True, leaves={("q", leaf): true.leaves[leaf]})
    assert torch.equal(tensor, torch.cat([*base.values()]))


def test_errors_of_reading_are_passed_on_and_nothing_stays() -> None:
    held = known([rows(5, 70), rows(5, 71)])
    gc.collect()
    before = slabs()
    tune = [rows(5, 70), rows(5, 72)]

    def fetch(number: int, leaves: Sequence[int] | None, write: Write) -> None:
        write(tensor_bytes(tune[1])[:LEAF_BYTES], 0)
        raise StaleHintError("as it was remembered it is not")

    failing = replace(known_tensor(tune, []), read=fetch)
    with pytest.raises(StaleHintError):
        HostProvider().share_known(failing, lambda _: True)
    gc.collect()
    assert slabs() == before
    assert held.nbytes


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_known_tensors_are_what_they_would_be_if_read(data: st.DataObject) -> None:
    known_as_read(data)


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_more_known_tensors_are_what_they_would_be_if_read(data: st.DataObject) -> None:
    known_as_read(data)


def known_as_read(data: st.DataObject) -> None:
    """Any parts, changed anywhere, with and without the digests of their leaves."""
    sizes = data.draw(st.lists(st.integers(1, 3_000_000), min_size=1, max_size=4))
    sizes[0] += 2 * LEAF_BYTES  # numbers of four bytes: more than the least that is shared
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 5)))
    parts = [torch.rand(size, generator=generator) for size in sizes]
    held = [known(parts, with_leaves=data.draw(st.booleans()))]
    expected = 0
    for _ in range(2):
        tune = [each.clone() for each in parts]
        for _ in range(data.draw(st.integers(0, 3))):
            part = data.draw(st.integers(0, len(tune) - 1))
            tune[part][data.draw(st.integers(0, len(tune[part]) - 1))] += 1
        made, read = build_known(tune, with_leaves=data.draw(st.booleans()))
        if made is not None:
            assert made.leaf_shared_bytes + read <= torch.cat(tune).nbytes
            held.append(made)
        expected += made is not None
    event(f"{expected} of 2 have parts of others")


class Families(RuleBasedStateMachine):
    """Bases, fine-tunes, grown and shrunk ones, written and dropped, against private copies."""

    def __init__(self) -> None:
        super().__init__()
        self.models: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # mapped, and what it is
        self.written: set[int] = set()
        self.number = 0

    def add(self, content: torch.Tensor, offset: int = 0) -> tuple[Resident, bool]:
        source = offset_by(content, offset)
        request = ResidentRequest(f"family:{self.number}", source, digest_of(source))
        ((resident, made),) = HostProvider(keep_alignment=True).get_or_build([request])
        self.number += 1
        self.models[self.number] = resident.map(), content.clone()
        return resident, made

    def choose(self, number: int) -> int:
        return sorted(self.models)[number % len(self.models)]

    @rule(seed=st.integers(0, 2), offset=st.sampled_from([0, 8]))
    def base(self, seed: int, offset: int) -> None:
        self.add(rows(5, 1000 + seed), offset)

    @precondition(lambda self: self.models)
    @rule(
        number=st.integers(0, 9),
        leaves=st.lists(st.integers(0, 3), max_size=3),
        more=st.sampled_from([0, 0, 1, -1, 40, -40, ROWS_OF_A_LEAF]),
        offset=st.sampled_from([0, 8]),
    )
    def fine_tune(self, number: int, leaves: Sequence[int], more: int, offset: int) -> None:
        origin = self.choose(number)
        content = changed(self.models[origin][1], *leaves)
        content = content[:more] if more < 0 else torch.cat([content, content[:more]])
        if LEAF_SHARED_FROM <= content.nbytes <= 8 * LEAF_BYTES:
            resident, made = self.add(content, offset)
            if made and len(leaves) <= 1 and origin not in self.written:
                assert resident.leaf_shared_bytes >= LEAF_BYTES  # or nothing is tested here

    @precondition(lambda self: self.models)
    @rule(number=st.integers(0, 9), row=st.integers(0, 2000))
    def write(self, number: int, row: int) -> None:
        self.written.add(self.choose(number))
        mapped, content = self.models[self.choose(number)]
        for each in (mapped, content):
            each[row % len(each)] = row

    @precondition(lambda self: self.models)
    @rule(number=st.integers(0, 9))
    def own(self, number: int) -> None:
        self.written.add(self.choose(number))
        mapped, _ = self.models[self.choose(number)]
        make_private(mapped.data_ptr(), mapped.nbytes)

    @precondition(lambda self: self.models)
    @rule(number=st.integers(0, 9))
    def drop(self, number: int) -> None:
        del self.models[self.choose(number)]

    @invariant()
    def every_model_is_what_a_private_copy_is(self) -> None:
        for mapped, content in self.models.values():
            assert torch.equal(mapped, content)

    def teardown(self) -> None:
        assert verify().ok
        self.models.clear()


TestFamilies = Families.TestCase
TestFamilies.settings = settings(max_examples=4, stateful_step_count=15, deadline=None)

TestLongFamilies: Any = pytest.mark.long(type("TestLongFamilies", (Families.TestCase,), {}))
TestLongFamilies.settings = settings(max_examples=8, stateful_step_count=15, deadline=None)
