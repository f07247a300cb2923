"""Compute exactly which bytes of a storage a set of strided writes covers. No torch, no I/O.

A write is kept as a *box*, a run of bytes that repeats along strided dimensions. So a column slice
of a matrix with 150,000 rows is one box, not 150,000 intervals. Overlapping writes count once.

If the writes are too complicated (see MAX_PIECES), only runs that do not repeat are counted. The
answer may then be "not covered" although every byte was written. This prevents sharing but never
gives wrong weights.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from tensor_dedup.errors import UnsupportedError

MAX_PIECES: Final = 1 << 14
MAX_GAPS: Final = 1 << 12

Interval = tuple[int, int]


class _Box(NamedTuple):
    """A run of bytes at `start`, repeated over `dims`: (count > 1, stride in bytes), by stride."""

    start: int
    run: int
    dims: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        return self.start + self.run + sum((count - 1) * stride for count, stride in self.dims)

    def inner(self, offset: int) -> "_Box":
        """Return one of the copies along the last dimension, moved to `offset`."""
        return _Box(offset, self.run, self.dims[:-1])


class _Piece(NamedTuple):
    """The same sub-box in each of the rows `first` to `last` (exclusive)."""

    first: int
    last: int
    box: _Box


class _TooManyPieces(Exception):
    """The boxes do not fit together; never leaves this module."""


class Coverage:
    """The ranges that writes have covered in a storage of `nbytes` bytes. For one thread."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes: Final = nbytes
        self._intervals: list[Interval] = []
        self._boxes: list[_Box] = []
        self._complete = nbytes == 0

    def add(self, offset: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> None:
        """Add a write of a strided array of `shape`; offset, strides and itemsize are in bytes.

        Stride 0 (broadcast) and overlapping elements are allowed. An empty array changes nothing.

        Raises:
            UnsupportedError: The write exceeds the storage, or a stride is negative.
        """
        if 0 in shape:
            return
        dims = _dims(shape, strides)
        box = _box(offset, itemsize, dims)
        if offset < 0 or box.end > self._nbytes or (dims and dims[0][1] < 0):
            raise UnsupportedError(
                f"a write of {tuple(shape)} x {itemsize} bytes at {offset} with strides "
                f"{tuple(strides)} is not inside {self._nbytes} bytes; keep this tensor private",
                offset=offset,
                shape=tuple(shape),
                strides=tuple(strides),
                nbytes=self._nbytes,
            )
        if box.dims:
            self._boxes.append(box)
        else:
            self._intervals.append((box.start, box.end))
            self._complete = self._complete or box.run == self._nbytes

    def complete(self) -> bool:
        """Return whether every byte was written.

        True is always right. If the writes are too complicated, the result may be False although
        every byte was written.
        """
        if not self._complete:
            self._complete = not self.missing()
        return self._complete

    def missing(self) -> list[Interval]:
        """Return the ranges [start, end) that were not written, ascending and disjoint.

        If the writes are too complicated, the ranges may include bytes that were written.
        """
        if self._complete:
            return []
        self._intervals = _union(self._intervals)
        self._boxes = list(dict.fromkeys(self._boxes))
        gaps = _gaps(self._intervals, self._nbytes)
        if not gaps or not self._boxes:
            return gaps
        runs = [_Box(start, end - start, ()) for start, end in self._intervals]
        try:
            return _Solver().missing([*runs, *self._boxes], self._nbytes)
        except _TooManyPieces:
            return gaps


def _dims(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Return (count, stride) of the dimensions that move, by ascending stride."""
    dims = [(n, s) for n, s in zip(shape, strides, strict=True) if n > 1 and s != 0]
    return sorted(dims, key=lambda dim: dim[1])


def _box(start: int, run: int, dims: Sequence[tuple[int, int]]) -> _Box:
    """Return a box in its simplest form: dimensions that continue the previous one are merged."""
    merged: list[tuple[int, int]] = []
    for count, stride in dims:
        if not merged and stride <= run:
            run += (count - 1) * stride
        elif merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * count, merged[-1][1])
        else:
            merged.append((count, stride))
    return _Box(start, run, tuple(merged))


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _gaps(joined: Sequence[Interval], nbytes: int) -> list[Interval]:
    """Return what lies between disjoint ascending intervals of [0, nbytes)."""
    ends = [0, *(end for _, end in joined)]
    starts = [*(start for start, _ in joined), nbytes]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


class _Solver:
    """One solution: counts its work and remembers the rows it has solved."""

    def __init__(self) -> None:
        self._pieces = 0
        self._solved: dict[tuple[int, tuple[_Box, ...]], list[Interval]] = {}

    def _count(self, pieces: int) -> None:
        self._pieces += pieces
        if self._pieces > MAX_PIECES:
            raise _TooManyPieces

    def missing(self, boxes: Sequence[_Box], nbytes: int) -> list[Interval]:
        """Return the ranges of [0, nbytes) that no box covers."""
        pitch = max((box.dims[-1][1] for box in boxes if box.dims), default=0)
        if not pitch:
            return _gaps(_union([(box.start, box.end) for box in boxes]), nbytes)
        pieces: list[_Piece] = []
        for box in boxes:
            for piece in _pieces(box, pitch):
                self._count(1)
                pieces.append(piece)
        found: list[Interval] = []
        for first, last, active in self._bands(pieces, pitch, nbytes):
            size = min(pitch, nbytes - first * pitch)
            gaps = self._row(active, size)
            found += _repeat(gaps, first, last, pitch, nbytes)
        return _union(found)

    def _row(self, active: tuple[_Box, ...], size: int) -> list[Interval]:
        key = (size, active)
        if key not in self._solved:
            self._solved[key] = self.missing(active, size)
        return self._solved[key]

    def _bands(
        self, pieces: Sequence[_Piece], pitch: int, nbytes: int
    ) -> Iterator[tuple[int, int, tuple[_Box, ...]]]:
        """Yield (first row, last row, sub-boxes in each row) for bands of rows that are alike."""
        rows = -(-nbytes // pitch)
        opening: dict[int, list[_Box]] = {}
        closing: dict[int, list[_Box]] = {}
        for piece in pieces:
            opening.setdefault(piece.first, []).append(piece.box)
            closing.setdefault(piece.last, []).append(piece.box)
        # The last row may be shorter than the others: a band of its own.
        edges = sorted({0, rows - 1, rows, *opening, *closing})
        active: dict[_Box, int] = {}
        for first, last in pairwise(edges):
            for box in opening.get(first, ()):
                active[box] = active.get(box, 0) + 1
            for box in closing.get(first, ()):
                active[box] -= 1
                if not active[box]:
                    del active[box]
            self._count(len(active))
            yield first, last, tuple(sorted(active))


def _repeat(
    gaps: Sequence[Interval], first: int, last: int, pitch: int, nbytes: int
) -> list[Interval]:
    """Return the gaps of one row repeated in each row, or as one gap if they would be too many."""
    if not gaps:
        return []
    if len(gaps) * (last - first) > MAX_GAPS or gaps[0] == (0, pitch):
        return [(first * pitch, min(last * pitch, nbytes))]
    return [(row * pitch + a, row * pitch + b) for row in range(first, last) for a, b in gaps]


def _pieces(box: _Box, pitch: int) -> Iterator[_Piece]:
    """Yield the box cut at multiples of `pitch`, which is at least its largest stride."""
    if box.dims and box.dims[-1][1] == pitch:
        count = box.dims[-1][0]
        for piece in _pieces(box.inner(box.start), pitch):
            yield piece._replace(last=piece.last + count - 1)
    elif box.start // pitch == (box.end - 1) // pitch:
        row = box.start // pitch
        yield _Piece(row, row + 1, box._replace(start=box.start - row * pitch))
    elif not box.dims:
        yield from _run_pieces(box, pitch)
    else:
        yield from _dim_pieces(box, pitch)


def _run_pieces(box: _Box, pitch: int) -> Iterator[_Piece]:
    """Yield a run over several rows in pieces: rest of the first, whole rows, start of the last."""
    first, last = -(-box.start // pitch), box.end // pitch
    if box.start < first * pitch:
        start = box.start % pitch
        yield _Piece(first - 1, first, _Box(start, pitch - start, ()))
    if first < last:
        yield _Piece(first, last, _Box(0, pitch, ()))
    if box.end > last * pitch:
        yield _Piece(last, last + 1, _Box(0, box.end % pitch, ()))


def _dim_pieces(box: _Box, pitch: int) -> Iterator[_Piece]:
    """Yield the pieces of a strided box over several rows; what lies in one row stays together."""
    count, stride = box.dims[-1]
    per_row = pitch // stride
    index = 0
    while index < count:
        copy = box.inner(box.start + index * stride)
        row_end = (copy.start // pitch + 1) * pitch
        inside = min(max((row_end - copy.end) // stride + 1, 0), count - index)
        whole = (count - index) // per_row if pitch % stride == 0 else 0
        if copy.start % pitch < stride and whole > 1 and per_row > 1:
            # The same copies in each of many rows: turned into a dimension of stride `pitch`.
            dims = (*copy.dims, (per_row, stride), (whole, pitch))
            yield from _pieces(copy._replace(dims=dims), pitch)
            index += whole * per_row
        elif inside:
            dims = (*copy.dims, (inside, stride)) if inside > 1 else copy.dims
            yield from _pieces(copy._replace(dims=dims), pitch)
            index += inside
        else:
            yield from _pieces(copy, pitch)
            index += 1
