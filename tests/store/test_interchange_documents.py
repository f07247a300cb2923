"""Folders are read by a reader that knows only what tensorcast and ServerlessLLM document.

Nothing of this package reads here: a folder is `tensor.data_0`, `tensor.data_1`, ..., one run of
bytes, and `tensor_index.json`, from a tensor's name to `[offset, size, shape, stride, dtype]` and,
in tensorcast's second version, the offset into the storage in elements.
"""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pytest
import torch
import xxhash

from tensor_dedup.store.interchange import save_dict

MIB = 1 << 20
NUMPY = {
    "torch.float32": "<f4",
    "torch.float16": "<f2",
    "torch.float64": "<f8",
    "torch.bfloat16": "<u2",
    "torch.int64": "<i8",
    "torch.int8": "i1",
    "torch.uint8": "u1",
    "torch.bool": "?",
}


def read(folder: Path, *, index: dict[str, list[Any]] | None = None) -> dict[str, Any]:
    """The tensors of a folder as arrays; bfloat16 as its bits."""
    parts = sorted(folder.glob("tensor.data_*"), key=lambda path: int(path.name.split("_")[-1]))
    assert [path.name for path in parts] == [f"tensor.data_{n}" for n in range(len(parts))]
    data = b"".join(path.read_bytes() for path in parts)
    records = index or json.loads((folder / "tensor_index.json").read_text())
    found = {}
    for name, (offset, size, shape, stride, dtype, *rest) in records.items():
        assert offset % 8 == 0  # records are aligned to 64 bits
        assert offset + size <= len(data)
        kind = np.dtype(NUMPY[dtype])
        first = rest[0] * kind.itemsize if rest else 0
        steps = [step * kind.itemsize for step in stride]
        within = np.frombuffer(data, np.uint8, len(data) - offset - first, offset + first)
        found[name] = np.ndarray(shape, kind, within, 0, steps).copy()
    return found


def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(700, 512, generator=draw)
    return {
        "weight": weight,
        "weight_T": weight.T,
        "half": torch.randn(33, generator=draw).half(),
        "brain": torch.randn(40, 40, generator=draw).bfloat16(),
        "double": torch.randn(3, generator=draw, dtype=torch.float64),
        "ids": torch.arange(5),
        "small": torch.arange(-3, 4, dtype=torch.int8),
        "flags": torch.tensor([True, False, True]),
    }


def expected(tensor: torch.Tensor) -> Any:
    plain = tensor.contiguous()
    return (plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain).numpy()


@pytest.mark.parametrize("verification", [True, False])
@pytest.mark.parametrize("limit", [10_000_000_000, MIB])
def test_tensorcasts_folder(tmp_path: Path, limit: int, verification: bool) -> None:
    held = tensors()
    held["rows"] = held["weight"][5:9, 100:]
    save_dict(held, tmp_path / "a", max_file_bytes=limit, verification=verification)
    assert len(list((tmp_path / "a").glob("tensor.data_*"))) == (1 if limit > MIB else 2)
    binary = cbor2.loads((tmp_path / "a" / "tensor_index.cbor").read_bytes())
    assert binary == json.loads((tmp_path / "a" / "tensor_index.json").read_text())
    for found in (read(tmp_path / "a"), read(tmp_path / "a", index=binary)):
        assert found.keys() == held.keys()
        for name, tensor in held.items():
            assert np.array_equal(found[name], expected(tensor)), name


def test_serverless_llms_folder(tmp_path: Path) -> None:
    held = tensors()
    save_dict(held, tmp_path / "a", fields=5)
    index = json.loads((tmp_path / "a" / "tensor_index.json").read_text())
    assert {len(record) for record in index.values()} == {5}
    found = read(tmp_path / "a")
    assert found.keys() == held.keys()
    for name, tensor in held.items():
        assert np.array_equal(found[name], expected(tensor)), name


def test_the_files_beside_it_are_about_these_bytes(tmp_path: Path) -> None:
    save_dict(tensors(), tmp_path / "a", views={"v": ["ids"]})
    folder = tmp_path / "a"
    descriptor = json.loads((folder / "artifact_descriptor.json").read_text())
    index = hashlib.sha256((folder / "tensor_index.json").read_bytes()).digest()
    name = "b" + base64.b32encode(b"\x12\x20" + index).decode().lower().strip("=")
    assert descriptor["index_multihash"] == name
    assert descriptor["artifact_id"] == f"mi2:{name}:{descriptor['data_multihash']}"
    storages = {entry["storage_id"] for entry in descriptor["storage_entries"]}
    aliases = {each["name"]: each["storage_id"] for each in descriptor["tensor_aliases"]}
    assert aliases["weight"] == aliases["weight_T"]
    assert set(aliases.values()) == storages
    whole = json.loads((folder / "verification.json").read_text())
    view = json.loads((folder / "verification.view_v.json").read_text())
    assert (whole["byte_space_id"], view["byte_space_id"]) == ("", "v")
    last = torch.arange(5).numpy().tobytes()[35:]  # the eighth of eight parts
    assert view["segment_hashes"][-1] == xxhash.xxh64_intdigest(last)
