"""Ways to make tensors smaller: the store's own, and the libraries it could have used.

Each works on one leaf (2 MiB) in one thread. Those that know no base are given the XOR with it.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import zstandard

from tensor_dedup.digest import leaf_digests
from tensor_dedup.store.codecs.choice import Sample, choose, places
from tensor_dedup.store.codecs.interface import CHUNK_BYTES

Encode = Callable[[memoryview], bytes]
Decode = Callable[[bytes], Any]


@dataclass(frozen=True)
class Tensor:
    """The bytes of a tensor, those of the tensor it is a fine-tune of, and its elements' width."""

    data: memoryview
    base: memoryview | None
    width: int

    def leaves(self) -> list[tuple[memoryview, memoryview | None]]:
        """Both, in pieces of a leaf."""
        return [
            (self.data[at : at + CHUNK_BYTES], self.base and self.base[at : at + CHUNK_BYTES])
            for at in range(0, len(self.data), CHUNK_BYTES)
        ]


@dataclass(frozen=True)
class Method:
    """A name, and what gives the functions that encode and decode the leaves of a tensor.

    Decoding returns the bytes of the leaf, base put back.
    """

    name: str
    prepare: Callable[[Tensor], tuple[Callable[..., bytes], Callable[..., memoryview]]]


def methods(base: bool) -> tuple[list[Method], list[str]]:
    """What can be measured, and why the rest cannot."""
    found = [Method("ours", partial(_ours, verified=False))]
    found.append(Method("ours, every leaf compared with its digest", partial(_ours, verified=True)))
    missing = []
    for name, (package, make) in _LIBRARIES.items():
        try:
            module = importlib.import_module(package)
        except ImportError as error:
            missing.append(f"{name}: {error}")
            continue
        shown = f"XOR, then {name}" if base else name
        found.append(Method(shown, partial(_foreign, partial(make, module))))
    return found, missing


def _ours(tensor: Tensor, verified: bool) -> tuple[Callable[..., bytes], Callable[..., memoryview]]:
    samples = [
        Sample(tensor.data[a:b], tensor.base and tensor.base[a:b])
        for a, b in places(len(tensor.data), tensor.width)
    ]
    choice = choose(samples, tensor.width)
    memory = memoryview(bytearray(CHUNK_BYTES))

    def encode(data: memoryview, base: memoryview | None) -> bytes:
        if choice is None:
            return bytes(data)
        needed = base if choice.codec.against_base else None
        return choice.codec.encode(data, needed, choice.effort)

    def decode(blob: bytes, base: memoryview | None, nbytes: int) -> memoryview:
        out = memory[:nbytes]
        if choice is None:
            out[:] = blob
        else:
            needed = base if choice.codec.against_base else None
            choice.codec.decode(memoryview(blob), needed, out)
        if verified:
            leaf_digests(out)
        return out

    return encode, decode


def _foreign(
    make: Callable[[int], tuple[Encode, Decode]], tensor: Tensor
) -> tuple[Callable[..., bytes], Callable[..., memoryview]]:
    compress, decompress = make(tensor.width)

    def encode(data: memoryview, base: memoryview | None) -> bytes:
        return compress(data if base is None else _xor(data, base))

    def decode(blob: bytes, base: memoryview | None, nbytes: int) -> memoryview:
        data = memoryview(decompress(blob)).cast("B")
        return data if base is None else _xor(data, base)

    return encode, decode


def _xor(data: memoryview, base: memoryview) -> memoryview:
    wide = "<u8" if len(data) % 8 == 0 else "u1"
    found = np.frombuffer(data, wide) ^ np.frombuffer(base, wide)
    return memoryview(found).cast("B")


def _zstd(level: int, _: Any, __: int) -> tuple[Encode, Decode]:
    compressor = zstandard.ZstdCompressor(level=level)
    decompressor = zstandard.ZstdDecompressor()
    return compressor.compress, decompressor.decompress


def _planes(_: Any, width: int) -> tuple[Encode, Decode]:
    """Byte planes by numpy's transposition, zstd level 1: BitX, when it gets an XOR."""
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def encode(data: memoryview) -> bytes:
        flat = np.frombuffer(data, np.uint8)
        return compressor.compress(np.ascontiguousarray(flat.reshape(-1, width).T).data)

    def decode(blob: bytes) -> memoryview:
        flat = np.frombuffer(decompressor.decompress(blob), np.uint8)
        return np.ascontiguousarray(flat.reshape(width, -1).T).data.cast("B")

    return encode, decode


def _zipnn(module: Any, width: int) -> tuple[Encode, Decode]:
    dtype = {2: "bfloat16", 4: "float32"}[width]
    coder = module.ZipNN(input_format="byte", bytearray_dtype=dtype, threads=1)
    return (lambda data: bytes(coder.compress(bytearray(data)))), coder.decompress


def _blosc2(codec: str, module: Any, width: int) -> tuple[Encode, Decode]:
    options = {
        "typesize": width,
        "nthreads": 1,
        "clevel": 1,
        "codec": getattr(module.Codec, codec),
        "filters": [module.Filter.SHUFFLE],
        "filters_meta": [0],
    }
    return (lambda data: module.compress2(data, **options)), (
        lambda blob: module.decompress2(blob, nthreads=1)
    )


_LIBRARIES: Mapping[str, tuple[str, Callable[..., tuple[Encode, Decode]]]] = {
    "zstd 1": ("zstandard", partial(_zstd, 1)),
    "zstd 3": ("zstandard", partial(_zstd, 3)),
    "planes, zstd 1": ("zstandard", _planes),
    "blosc2 shuffle, zstd 1": ("blosc2", partial(_blosc2, "ZSTD")),
    "blosc2 shuffle, lz4": ("blosc2", partial(_blosc2, "LZ4")),
    "zipnn": ("zipnn", _zipnn),
}


def total(tensors: Sequence[Tensor]) -> int:
    """Their bytes."""
    return sum(len(tensor.data) for tensor in tensors)
