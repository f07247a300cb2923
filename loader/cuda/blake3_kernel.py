"""Leaf digests of bytes that lie on a GPU, computed there. Imported only where that is asked for.

BLAKE3 as its authors describe it (J. O'Connor, J.-P. Aumasson, S. Neves, Z. Wilcox-O'Hearn,
"BLAKE3: one function, fast everywhere", section 2 with its tables of constants), in the hash mode
without a key, of inputs of at most one leaf: a chunk is 1 KiB, a leaf 2048 of them. One lane hashes
a chunk, block after block; then one lane hashes a pair of values, and a value without a neighbour
goes up as it is, level by level, which makes the paper's tree: every left subtree is whole and as
large as it can be. A level is a launch, so the stream's order is all the order there must be.

Never run on a GPU yet: Triton's interpreter runs these functions in the tests, and its compiler
makes machine code of them for several GPUs. `tensor_dedup.loader.cuda.hashing` asks for known
answers first. Wherever an index could be too large the lane is masked: a kernel that reads past the
end would cost the process its GPU.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from subprocess import SubprocessError
from typing import Any, Final

import torch
import triton
import triton.language as tl

from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.errors import UnsupportedError

CHUNK_BYTES: Final = 1024
_BLOCK_BYTES: Final = 64
LANES: Final = 128  # of a program: one for each thread of four warps
# Leaves that are hashed at once, a piece: the chunks' values take a sixteenth of it, twice 32 bytes
# a KiB.
PIECE_LEAVES: Final = 64
_DIGEST_BYTES: Final = 32
# What Triton raises where it has no compiler, no driver or another version than we know. torch's
# OutOfMemoryError is a RuntimeError, and goes first.
_FAILURES: Final = (
    triton.TritonError,
    SubprocessError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


def leaf_digests(
    data: torch.Tensor,
    leaf_bytes: int = LEAF_BYTES,
    piece_leaves: int = PIECE_LEAVES,
    lanes: int = LANES,
) -> list[bytes]:
    """`tensor_dedup.digest.leaf_digests` of a flat tensor of bytes, on its device.

    After what is in its current stream, and waited for. `leaf_bytes`: a power of two, from a chunk
    on; `lanes`: of a program, a power of two. One thread at a time. UnsupportedError where Triton
    cannot; torch.OutOfMemoryError.
    """
    if not data.numel():
        return []
    try:
        with _on(data.device):
            return list(_digests(data, leaf_bytes, piece_leaves, lanes))
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as error:
        raise _refused(error) from error


def build(device: torch.device) -> None:
    """Compile what `leaf_digests` launches there, and launch nothing: seconds, without a cache.

    Any thread. UnsupportedError.
    """
    sizes = {"grid": (1,), "WIDTH": LEAF_BYTES // CHUNK_BYTES, "LANES": LANES}
    try:
        with _on(device):
            _chunks.warmup(torch.uint8, torch.int32, *[1] * 5, **sizes)
            _pairs.warmup(torch.int32, torch.int32, *[1] * 4, **sizes)
    except _FAILURES as error:
        raise _refused(error) from error


def _refused(error: BaseException) -> UnsupportedError:
    text = f"{type(error).__name__}: {str(error)[:300]}"
    return UnsupportedError(f"Triton cannot hash there: {text}")


def _on(device: torch.device) -> AbstractContextManager[object]:
    # Triton launches on the current device; what the interpreter runs is on the CPU.
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _digests(data: torch.Tensor, leaf: int, most: int, lanes: int) -> Iterator[bytes]:
    count, width = -(-data.numel() // leaf), leaf // CHUNK_BYTES
    room = min(count, most) * width
    values = torch.empty((2, 8, room), dtype=torch.int32, device=data.device)
    found = torch.empty((count, 8), dtype=torch.int32, device=data.device)
    for first in range(0, count, most):
        part = data[first * leaf : (first + most) * leaf]
        leaves = -(-part.numel() // leaf)
        _hash_chunks(part, values[0], width, lanes)
        found[first : first + leaves] = _hash_pairs(part.numel(), values, width, leaves, lanes).T
    text = found.cpu().numpy().astype("<i4").tobytes()
    for start in range(0, len(text), _DIGEST_BYTES):
        yield text[start : start + _DIGEST_BYTES]


def _hash_chunks(part: torch.Tensor, values: torch.Tensor, width: int, lanes: int) -> None:
    """The value of every chunk, in the first place: from its 16 blocks."""
    nbytes = part.numel()
    whole = nbytes // CHUNK_BYTES
    sources = []
    if whole:
        body = part[: whole * CHUNK_BYTES]
        # The kernel reads words of 4 bytes: a GPU can only where the address is a multiple.
        sources.append((body if body.data_ptr() % 4 == 0 else body.clone(), 0, whole, 16))
    if left := nbytes % CHUNK_BYTES:  # a block that is not whole is hashed with zeros after it
        rest = part.new_zeros(CHUNK_BYTES)
        rest[:left] = part[whole * CHUNK_BYTES :]
        sources.append((rest, whole, 1, -(-left // _BLOCK_BYTES)))
    for source, first, count, blocks in sources:
        _chunks[(-(-count // lanes),)](
            source, values, nbytes, first, count, blocks, values.shape[1], WIDTH=width, LANES=lanes
        )


def _hash_pairs(
    nbytes: int, values: torch.Tensor, width: int, leaves: int, lanes: int
) -> torch.Tensor:
    """From the values of chunks up to one for each leaf: words by leaves."""
    chunks = -(-nbytes // CHUNK_BYTES)
    levels = (min(chunks, width) - 1).bit_length()
    room = values.shape[2]
    for level in range(levels):
        source, target = values[level % 2], values[1 - level % 2]
        half = width >> (level + 1)
        _pairs[(-(-leaves * half // lanes),)](
            source, target, chunks, level, leaves * half, room, WIDTH=width, LANES=lanes
        )
    return values[levels % 2][:, : leaves * (width >> levels) : width >> levels]


def _kernel(function: Any) -> Any:
    """Compiled once, whatever the numbers and addresses are."""
    numbers = ["nbytes", "first", "count", "blocks", "room", "chunks", "level", "nodes"]
    return triton.jit(
        function,
        do_not_specialize=numbers,
        do_not_specialize_on_alignment=["data", "source", "target"],
    )


def _part(function: Any) -> Any:
    """Of a kernel."""
    return triton.jit(function)


@_part
def _turned(x: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    return (x >> BITS) | (x << (32 - BITS))


@_part
def _mixed(
    a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, x: tl.tensor, y: tl.tensor
) -> tl.tensor:
    a = a + b + x
    d = _turned(d ^ a, 16)
    c = c + d
    b = _turned(b ^ c, 12)
    a = a + b + y
    d = _turned(d ^ a, 8)
    c = c + d
    b = _turned(b ^ c, 7)
    return a, b, c, d


@_part
def _round(v: tl.tensor, m: tl.tensor) -> tl.tensor:
    a0, b0, c0, d0 = _mixed(v[0], v[4], v[8], v[12], m[0], m[1])
    a1, b1, c1, d1 = _mixed(v[1], v[5], v[9], v[13], m[2], m[3])
    a2, b2, c2, d2 = _mixed(v[2], v[6], v[10], v[14], m[4], m[5])
    a3, b3, c3, d3 = _mixed(v[3], v[7], v[11], v[15], m[6], m[7])
    a0, b1, c2, d3 = _mixed(a0, b1, c2, d3, m[8], m[9])
    a1, b2, c3, d0 = _mixed(a1, b2, c3, d0, m[10], m[11])
    a2, b3, c0, d1 = _mixed(a2, b3, c0, d1, m[12], m[13])
    a3, b0, c1, d2 = _mixed(a3, b0, c1, d2, m[14], m[15])
    return a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3


@_part
def _permuted(m: tl.tensor) -> tl.tensor:
    low = m[2], m[6], m[3], m[10], m[7], m[0], m[4], m[13]
    high = m[1], m[11], m[12], m[5], m[9], m[14], m[15], m[8]
    return low + high


@_part
def _word(like: tl.tensor, VALUE: tl.constexpr) -> tl.tensor:
    return tl.full(like.shape, VALUE, tl.uint32)


@_part
def _half_start(like: tl.tensor) -> tl.tensor:
    return (
        _word(like, 0x6A09E667),
        _word(like, 0xBB67AE85),
        _word(like, 0x3C6EF372),
        _word(like, 0xA54FF53A),
    )


@_part
def _start(like: tl.tensor) -> tl.tensor:
    high = (
        _word(like, 0x510E527F),
        _word(like, 0x9B05688C),
        _word(like, 0x1F83D9AB),
        _word(like, 0x5BE0CD19),
    )
    return _half_start(like) + high


@_part
def _compressed(
    h: tl.tensor, m: tl.tensor, counter: tl.tensor, size: tl.tensor, flags: tl.tensor
) -> tl.tensor:
    """The value after a block: `h` before it, the block's 16 words, 7 rounds."""
    last = counter, _word(flags, 0), size, flags
    v = h + _half_start(flags) + last
    v = _round(v, m)
    for _ in tl.static_range(6):
        m = _permuted(m)
        v = _round(v, m)
    low = v[0] ^ v[8], v[1] ^ v[9], v[2] ^ v[10], v[3] ^ v[11]
    high = v[4] ^ v[12], v[5] ^ v[13], v[6] ^ v[14], v[7] ^ v[15]
    return low + high


@_part
def _four(at: tl.tensor, here: tl.tensor) -> tl.tensor:
    return (
        tl.load(at, here, 0),
        tl.load(at + 1, here, 0),
        tl.load(at + 2, here, 0),
        tl.load(at + 3, here, 0),
    )


@_part
def _block(at: tl.tensor, here: tl.tensor) -> tl.tensor:
    first = _four(at, here) + _four(at + 4, here)
    return first + _four(at + 8, here) + _four(at + 12, here)


@_part
def _chosen(which: tl.tensor, a: tl.tensor, b: tl.tensor) -> tl.tensor:
    low = (
        tl.where(which, a[0], b[0]),
        tl.where(which, a[1], b[1]),
        tl.where(which, a[2], b[2]),
        tl.where(which, a[3], b[3]),
    )
    high = (
        tl.where(which, a[4], b[4]),
        tl.where(which, a[5], b[5]),
        tl.where(which, a[6], b[6]),
        tl.where(which, a[7], b[7]),
    )
    return low + high


@_part
def _value(at: tl.tensor, room: tl.tensor, here: tl.tensor) -> tl.tensor:
    """The eight words of a value, which lie `room` words apart."""
    low = (
        tl.load(at, here, 0),
        tl.load(at + room, here, 0),
        tl.load(at + 2 * room, here, 0),
        tl.load(at + 3 * room, here, 0),
    )
    high = (
        tl.load(at + 4 * room, here, 0),
        tl.load(at + 5 * room, here, 0),
        tl.load(at + 6 * room, here, 0),
        tl.load(at + 7 * room, here, 0),
    )
    return low + high


@_kernel
def _chunks(
    data: tl.tensor,
    target: tl.tensor,
    nbytes: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    blocks: tl.tensor,
    room: tl.tensor,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """So many chunks from the first on, of so many blocks each; the first begins at `data`.

    They are of a piece of `nbytes`; each takes 1 KiB of memory. Flags: 1 begins a chunk, 2 ends it,
    8 is for the last of a leaf.
    """
    place = tl.program_id(0) * LANES + tl.arange(0, LANES)
    here = place < count
    chunk = first + place
    words = data.to(tl.pointer_type(tl.uint32)) + place * 256
    size = tl.minimum(nbytes - chunk * 1024, 1024)
    leaf = chunk // WIDTH * WIDTH
    alone = tl.where(tl.minimum(nbytes - leaf * 1024, WIDTH * 1024) <= 1024, 8, 0)
    counter = (chunk - leaf).to(tl.uint32)
    h = _start(counter)
    begin = 1
    for block in range(blocks):
        left = size - block * 64
        flags = tl.where(left <= 64, 2 | alone, 0) | begin
        length = tl.minimum(left, 64).to(tl.uint32)
        m = _block(words + block * 16, here)
        h = _compressed(h, m, counter, length, flags.to(tl.uint32))
        begin = 0
    at = target.to(tl.pointer_type(tl.uint32)) + chunk
    for word in tl.static_range(8):
        tl.store(at + word * room, h[word], here)


@_kernel
def _pairs(
    source: tl.tensor,
    target: tl.tensor,
    chunks: tl.tensor,
    level: tl.tensor,
    nodes: tl.tensor,
    room: tl.tensor,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """One level of every leaf's tree: `nodes` places for values, from twice as many.

    Of a piece of so many chunks. Flags: 4 is a pair's, 8 the last one's of a leaf.
    """
    node = tl.program_id(0) * LANES + tl.arange(0, LANES)
    half = WIDTH >> (level + 1)
    leaf = node // half
    inside = node - leaf * half
    count = tl.minimum(chunks - leaf * WIDTH, WIDTH)
    count = (count + (1 << level) - 1) >> level
    here = (node < nodes) & (2 * inside < count)
    pair = here & (2 * inside + 1 < count)
    under = source.to(tl.pointer_type(tl.uint32)) + 2 * node
    left = _value(under, room, here)
    right = _value(under + 1, room, pair)
    flags = tl.where(count == 2, 12, 4).to(tl.uint32)
    made = _compressed(_start(flags), left + right, _word(flags, 0), _word(flags, 64), flags)
    h = _chosen(pair, made, left)
    at = target.to(tl.pointer_type(tl.uint32)) + node
    for word in tl.static_range(8):
        tl.store(at + word * room, h[word], here)
