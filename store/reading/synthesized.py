"""The files that an export makes of tensors that came in no file: those of a training step. No I/O.

A header holds an offset for every tensor before it, so a header kept for every step would cost what
all tensors' names cost, each time one is added. It follows from the names, types and shapes, which
the manifest has: it is made when it is asked for, always the same.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec import structs

from tensor_dedup.digest import digest
from tensor_dedup.formats.safetensors import DTYPE_BITS
from tensor_dedup.store.format.manifests import Piece

WEIGHTS = "model.safetensors"
# In a folder of its own, where no engine looks for weights.
STATE = "training/state.safetensors"
STATE_MARK = "#"
# The note of a manifest that says which part of the tensors an engine loads.
PART = "weights"
RESERVED = frozenset({WEIGHTS, STATE})
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class SynthesizedFile:
    """A file: its path, its header, and the tensors behind that."""

    path: str
    header: bytes
    pieces: tuple[Piece, ...]

    @property
    def head(self) -> Piece:
        """The header as a piece."""
        return Piece(bytes.fromhex(digest(self.header)), len(self.header))

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return len(self.header) + sum(piece.nbytes for piece in self.pieces)


def made_of(loose: Sequence[Piece], part: str) -> Iterator[SynthesizedFile]:
    """The files of tensors that belong to none: weights, and what is state of the training.

    With a `part`, weights are those whose names begin with it and a dot, without these. What
    safetensors has no type for is there as bytes.
    """
    start = f"{part}." if part else ""
    weights = [
        structs.replace(piece, name=piece.name.removeprefix(start))
        for piece in loose
        if piece.name is not None and _is_weight(piece.name, piece.dtype, start)
    ]
    state = [
        piece
        for piece in loose
        if piece.name is not None and not _is_weight(piece.name, piece.dtype, start)
    ]
    for path, pieces in ((WEIGHTS, weights), (STATE, state)):
        if pieces:
            # Wide elements first: each then lies at a multiple of its size.
            ordered = sorted(pieces, key=lambda piece: -_bits(piece))
            yield SynthesizedFile(path, _header(ordered), tuple(ordered))


def _is_weight(name: str, dtype: str | None, start: str) -> bool:
    fit = name.startswith(start) and not name.startswith(STATE_MARK) and name != start
    return fit and dtype in DTYPE_BITS


def _bits(piece: Piece) -> int:
    return DTYPE_BITS.get(piece.dtype or "", 8)


def _header(pieces: Sequence[Piece]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for piece in pieces:
        known = piece.dtype in DTYPE_BITS
        entries[piece.name or ""] = {
            "dtype": piece.dtype if known else "U8",
            "shape": list(piece.shape or ()) if known else [piece.nbytes],
            "data_offsets": [at, at + piece.nbytes],
        }
        at += piece.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
