"""Checkpoints without a framework, and what must hold of a store that holds them."""

import json
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tensor_dedup.formats.safetensors import DTYPE_BITS
from tensor_dedup.store import Store
from tensor_dedup.store.files import Files

MIB = 1 << 20
KIB = 1 << 10
Tensors = Mapping[str, tuple[str, tuple[int, ...], bytes]]
Content = dict[str, bytes]


def noise(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def weights(seed: int, nbytes: int) -> bytes:
    """Words of two bytes as models have them: few exponents, any mantissa."""
    dice = np.random.default_rng(seed)
    low, high = dice.integers(0, 256, nbytes // 2), dice.choice([0x3C, 0x3D, 0xBC], nbytes // 2)
    data: bytes = (low + 256 * high).astype("<u2").tobytes()
    return data


def tuned(data: bytes, seed: int, share: float = 0.4) -> bytes:
    """The same words, of which a share moved by up to three."""
    dice = np.random.default_rng(seed)
    words = np.frombuffer(data, "<u2")
    moved = dice.integers(-3, 4, len(words)) * (dice.random(len(words)) < share)
    return (words + moved).astype("<u2").tobytes()


def safetensors(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> bytes:
    """A file of these tensors: name, (dtype, shape, bytes); in the order given."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + b"".join(d for _, _, d in tensors.values())


def u8(**tensors: bytes) -> Tensors:
    return {name: ("U8", (len(data),), data) for name, data in tensors.items()}


def elements(dtype: str, shape: tuple[int, ...]) -> int:
    """How many bytes a tensor has."""
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
    return bits // 8


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    """A folder with these files."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def content(folder: Path) -> Content:
    """Every file below a folder, by relative path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def stored(store: Store, name: str) -> Content:
    """Every file of a stored checkpoint as an export would write it, read piece by piece."""
    with store.checkpoint(name) as checkpoint:
        return {
            file.path: b"".join(
                checkpoint.read_piece(piece.digest, 0, piece.nbytes, piece.nbytes)
                for piece in file.pieces
            )
            for file in checkpoint.files
        }


def size_on_disk(folder: Path) -> int:
    """Bytes of all files below, the index with them."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def three(root: Path) -> dict[str, Path]:
    """Three checkpoints that leave a raw file, a slab and a pack in a store.

    `base` is one large file, `tune` differs from it in one large tensor (`b`, by little, so that it
    leaves a delta when it is compressed) and in small ones, `tiny` has small tensors only.
    """
    a, b = noise(1, 700 * KIB), weights(2, 400 * KIB)
    base = safetensors(u8(a=a, b=b, c=noise(3, 100), tail=noise(9, 5 * KIB)), {"format": "pt"})
    tune = safetensors(u8(a=a, b=tuned(b, 4), c=noise(5, 100), d=noise(6, 70 * KIB)))
    tiny = safetensors(u8(x=noise(7, 5000), y=noise(8, 77)))
    config = b'{"model_type": "toy"}'
    return {
        "base": write(root / "base", {"model.safetensors": base, "config.json": config}),
        "tune": write(root / "tune", {"model.safetensors": tune, "config.json": config}),
        "tiny": write(root / "tiny", {"model.safetensors": tiny, "empty.txt": b""}),
    }


def open_store(path: Path, files: Files | None = None) -> Store:
    """With one thread, so that operations come in one order."""
    return Store.open(path, files=files, worker_count=1)


def assert_holds(store: Store, expected: Mapping[str, Content]) -> None:
    """Exactly these checkpoints, each byte for byte."""
    assert [listed.name for listed in store.list()] == sorted(expected)
    for name, files in expected.items():
        assert stored(store, name) == files


def assert_clean(store: Store, expected: Mapping[str, Content]) -> None:
    """Everything reads back, verify finds nothing, gc leaves nothing that is not needed."""
    assert_holds(store, expected)
    assert store.verify(full=True).faults == []
    store.gc(0)
    assert store.verify(full=True).faults == []
    assert_holds(store, expected)
    stats = store.stats()
    assert (stats.reclaimable_bytes, stats.trash_bytes, stats.damaged_files) == (0, 0, 0)
    assert list((store.path / "tmp").iterdir()) == []
