"""Coverage of a storage by strided writes, against a bitmap."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.deferred import coverage
from tensor_dedup.loader.deferred.coverage import Coverage

Write = tuple[int, tuple[int, ...], tuple[int, ...], int]
ROWS, COLUMNS, ITEM = 150_000, 896, 2
PITCH = COLUMNS * ITEM


def bitmap(nbytes: int, writes: Sequence[Write]) -> bytearray:
    """One byte a byte: 1 where some element of some write lies."""
    covered = bytearray(nbytes)
    for offset, shape, strides, itemsize in writes:
        for index in itertools.product(*(range(n) for n in shape)):
            at = offset + sum(i * s for i, s in zip(index, strides, strict=True))
            covered[at : at + itemsize] = b"\1" * itemsize
    return covered


def covering(nbytes: int, writes: Sequence[Write]) -> Coverage:
    cover = Coverage(nbytes)
    for write in writes:
        cover.add(*write)
    return cover


@st.composite
def storages(draw: st.DrawFn) -> tuple[int, list[Write]]:
    nbytes = draw(st.integers(0, 200))
    stride = st.one_of(st.integers(0, 40), st.sampled_from([4, 8, 16, 24, 48]))
    writes: list[Write] = []
    for _ in range(draw(st.integers(0, 7))):
        itemsize = draw(st.sampled_from([1, 2, 4]))
        dims = draw(st.lists(st.tuples(st.integers(0, 9), stride), max_size=4))
        shape, strides = tuple(n for n, _ in dims), tuple(s for _, s in dims)
        span = itemsize + sum(max(n - 1, 0) * s for n, s in dims)
        if span <= nbytes:
            writes.append((draw(st.integers(0, nbytes - span)), shape, strides, itemsize))
    return nbytes, writes


@settings(max_examples=1500, deadline=None)
@given(storages())
def test_any_writes_give_exactly_the_gaps_of_a_bitmap(storage: tuple[int, list[Write]]) -> None:
    nbytes, writes = storage
    covered = bitmap(nbytes, writes)
    cover = covering(nbytes, writes)
    gaps = cover.missing()
    seen = bytearray(b"\1" * nbytes)
    for start, end in gaps:
        assert start < end
        seen[start:end] = bytes(end - start)
    assert seen == covered
    assert gaps == sorted(gaps)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(gaps))
    assert cover.complete() == all(covered)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[int, list[Write]]:
    """A matrix cut into blocks, each perhaps cut again: covered but for what is left out."""
    rows, columns, itemsize = draw(st.tuples(*[st.integers(1, 12)] * 2, st.sampled_from([1, 2])))
    pitch = columns * itemsize
    row_cuts = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=3))})
    column_cuts = sorted({0, columns, *draw(st.lists(st.integers(0, columns), max_size=3))})
    writes: list[Write] = []
    for (r0, r1), (c0, c1) in itertools.product(
        itertools.pairwise(row_cuts), itertools.pairwise(column_cuts)
    ):
        step = draw(st.integers(1, 3))
        for phase in range(min(step, c1 - c0)):
            shape = (r1 - r0, len(range(c0 + phase, c1, step)))
            offset = r0 * pitch + (c0 + phase) * itemsize
            writes.append((offset, shape, (pitch, step * itemsize), itemsize))
    left_out = draw(st.lists(st.sampled_from(writes), max_size=1))
    return rows * pitch, [write for write in writes if write not in left_out]


@settings(max_examples=500, deadline=None)
@given(tilings())
def test_a_tiling_is_complete_unless_a_tile_is_left_out(storage: tuple[int, list[Write]]) -> None:
    nbytes, writes = storage
    assert covering(nbytes, writes).complete() == all(bitmap(nbytes, writes))


def test_nothing_to_cover_is_complete() -> None:
    assert Coverage(0).complete()
    assert not Coverage(1).complete()


def test_a_write_of_no_elements_covers_nothing() -> None:
    assert covering(4, [(0, (0, 4), (4, 1), 1)]).missing() == [(0, 4)]


def test_overlaps_count_once() -> None:
    assert covering(8, [(0, (5,), (1,), 1), (1, (3,), (1,), 1)]).missing() == [(5, 8)]


def test_a_broadcast_write_covers_its_elements_once() -> None:
    assert covering(8, [(0, (1000, 2), (0, 4), 4)]).complete()


def test_a_transposed_write_of_everything_is_complete() -> None:
    assert covering(ROWS * PITCH, [(0, (COLUMNS, ROWS), (ITEM, PITCH), ITEM)]).complete()


def column_slice(first: int, last: int) -> Write:
    return first * ITEM, (ROWS, last - first), (PITCH, ITEM), ITEM


def pieces_of(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(coverage, "MAX_PIECES", limit)


def test_column_slices_of_many_rows_take_a_handful_of_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces_of(monkeypatch, 16)
    halves = [column_slice(0, 300), column_slice(300, COLUMNS)]
    assert covering(ROWS * PITCH, halves).complete()
    with_hole = [column_slice(0, 300), column_slice(301, COLUMNS)]
    assert not covering(ROWS * PITCH, with_hole).complete()


def test_row_blocks_and_column_slices_complete_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces_of(monkeypatch, 32)
    upper = (0, (1000, COLUMNS), (PITCH, ITEM), ITEM)
    lower = [
        (1000 * PITCH + ITEM * first, (ROWS - 1000, last - first), (PITCH, ITEM), ITEM)
        for first, last in ((0, 1), (1, COLUMNS))
    ]
    assert covering(ROWS * PITCH, [upper, *lower]).complete()
    # One range instead of 149,000 gaps, but for the last row, which is by itself.
    end = (ROWS - 1) * PITCH + ITEM
    assert covering(ROWS * PITCH, [upper, lower[1]]).missing() == [(1000 * PITCH, end)]


def test_every_other_element_and_the_others_are_all(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces_of(monkeypatch, 16)
    count = 100_000_000
    even, odd = ((phase * ITEM, (count // 2,), (2 * ITEM,), ITEM) for phase in (0, 1))
    assert covering(count * ITEM, [even, odd]).complete()
    assert not covering(count * ITEM, [even]).complete()


def test_interleaved_heads_of_a_fused_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces_of(monkeypatch, 64)
    heads, width, hidden = 32, 128, 4096
    head = 3 * width * hidden * ITEM
    writes = [
        (part * width * hidden * ITEM, (heads, width, hidden), (head, hidden * ITEM, ITEM), ITEM)
        for part in range(3)
    ]
    assert covering(heads * head, writes).complete()
    assert not covering(heads * head, writes[:2]).complete()


def test_slices_of_stacked_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces_of(monkeypatch, 5000)
    experts, rows, columns = 256, 2048, 512
    writes: list[Write] = []
    for expert in range(experts):
        base = expert * rows * columns
        writes += [(base, (rows, 500), (columns, 1), 1), (base + 500, (rows, 12), (columns, 1), 1)]
    assert covering(experts * rows * columns, writes).complete()
    assert not covering(experts * rows * columns, writes[:-1]).complete()


def test_past_the_bound_only_plain_runs_count() -> None:
    # Strides without a common measure: a piece a row, more of them than the bound.
    count = coverage.MAX_PIECES
    writes = [
        (0, (10,), (1,), 1),
        (20, (count, 2), (7, 1), 1),
        (20, (count, 2), (11, 1), 1),
        (20, (count, 3), (13, 1), 1),
    ]
    cover = covering(20 + count * 13, writes)
    assert cover.missing() == [(10, 20 + count * 13)]
    assert not cover.complete()


def test_too_many_gaps_are_reported_as_the_range_they_lie_in() -> None:
    cover = covering(ROWS * PITCH, [column_slice(0, 1), column_slice(2, COLUMNS)])
    last = (ROWS - 1) * PITCH + ITEM
    # The last row is by itself (it may be shorter), and so exact.
    assert cover.missing() == [(0, (ROWS - 1) * PITCH), (last, last + ITEM)]


@pytest.mark.parametrize(
    "write",
    [(-1, (2,), (1,), 1), (7, (2,), (1,), 1), (0, (3, 2), (4, 1), 1), (4, (2,), (-1,), 1)],
)
def test_a_write_outside_the_storage_is_refused(write: Write) -> None:
    cover = Coverage(8)
    with pytest.raises(UnsupportedError, match="keep this tensor private"):
        cover.add(*write)
    assert cover.missing() == [(0, 8)]
