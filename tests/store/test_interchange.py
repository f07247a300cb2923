"""State dicts go to the folders of ServerlessLLM and tensorcast and come back, byte for byte."""

import base64
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store_runs.stores import content, memory_folder
from tensor_dedup.errors import (
    CheckpointNotFoundError,
    ConfigError,
    FormatError,
    IntegrityError,
    StoreError,
    UnsupportedError,
)
from tensor_dedup.formats.serverless.tensor_index import DTYPES
from tensor_dedup.store import buffers
from tensor_dedup.store.errors import ExportTargetError
from tensor_dedup.store.interchange import load_dict, rebuild_index, save, save_dict

MIB = 1 << 20
Tensors = Mapping[str, torch.Tensor]


def raw(tensor: torch.Tensor) -> bytes:
    """Every byte of a tensor, NaN payloads and all."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = torch.empty(plain.numel(), dtype=plain.dtype).copy_(plain.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        other = found[name]
        assert (other.dtype, other.shape, other.stride()) == (
            tensor.dtype,
            tensor.shape,
            tensor.resolve_conj().stride(),
        )
        assert raw(other) == raw(tensor)


def any_bytes(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    """Elements of any bits, so NaNs with payloads among them; a bool is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(0, high, (count * size,), generator=generator, dtype=torch.uint8)
    return data.view(dtype)


def data_of(folder: Path) -> bytes:
    found = sorted(folder.glob("tensor.data_*"), key=lambda path: int(path.name.split("_")[1]))
    return b"".join(path.read_bytes() for path in found)


def several() -> dict[str, torch.Tensor]:
    base = any_bytes(torch.float32, 64 * 32).view(64, 32)
    return {
        "weight": base,
        "weight_T": base.T,
        "slice": base[:8, :8],
        "late": base[5:7, 3:],
        "same": base,
        "column": base[:, 2],
        "repeated": base[3:4].expand(5, 32),
        "none_of_it": base[9:9],
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "odd": any_bytes(torch.uint8, 13),
        "flags": any_bytes(torch.bool, 5),
        "conjugate": any_bytes(torch.complex64, 6).conj(),
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_comes_back(tmp_path: Path, dtype: str) -> None:
    kind = getattr(torch, dtype.removeprefix("torch."))
    tensors = {"many": any_bytes(kind, 1001), "one": any_bytes(kind, 1).reshape(())}
    save_dict(tensors, tmp_path / "a")
    assert_same(load_dict(tmp_path / "a"), tensors)


def test_views_share_their_storage_again_and_it_is_there_once(tmp_path: Path) -> None:
    tensors = several()
    descriptor = save_dict(tensors, tmp_path / "a")
    found = load_dict(tmp_path / "a")
    assert_same(found, tensors)
    views = ("weight", "weight_T", "slice", "late", "same", "column", "repeated", "none_of_it")
    assert len({found[name].untyped_storage().data_ptr() for name in views}) == 1
    found["weight"][5, 3] = 7.0
    assert found["late"][0, 0] == 7.0
    unique = 64 * 32 * 4 + 8 + 16 + 8 + 48 + 16  # each to a multiple of 8
    assert len(data_of(tmp_path / "a")) == unique
    assert descriptor["total_size"] <= unique


def test_a_storage_is_written_at_the_largest_size_of_those_that_begin_with_it(
    tmp_path: Path,
) -> None:
    memory_ = bytearray(range(200))
    short = torch.frombuffer(memory_, dtype=torch.uint8, count=40)
    whole = torch.frombuffer(memory_, dtype=torch.uint8)
    assert short.untyped_storage().nbytes() == 40
    save_dict({"a": short, "b": whole}, tmp_path / "a")
    assert data_of(tmp_path / "a") == bytes(memory_)
    index = json.loads((tmp_path / "a" / "tensor_index.json").read_text())
    assert [index[name][:2] for name in "ab"] == [[0, 200], [0, 200]]
    assert_same(load_dict(tmp_path / "a"), {"a": short, "b": whole})


def test_the_index_can_be_rebuilt_from_the_descriptor(tmp_path: Path) -> None:
    for fields, tensors in ((6, several()), (5, {"é\n": torch.ones(3), "a": torch.ones(2, 2).T})):
        folder = tmp_path / str(fields)
        returned = save_dict(tensors, folder, fields=fields)  # type: ignore[arg-type]
        written = json.loads((folder / "artifact_descriptor.json").read_text())
        assert written == returned
        for found in (returned, written):
            rebuilt = rebuild_index(
                found["storage_entries"],
                found["tensor_aliases"],
                fields=fields,  # type: ignore[arg-type]
            )
            assert rebuilt == (folder / "tensor_index.json").read_bytes()


def test_saving_again_writes_the_same_bytes(tmp_path: Path) -> None:
    tensors = several()
    save_dict(tensors, tmp_path / "a")
    save_dict(dict(reversed(load_dict(tmp_path / "a").items())), tmp_path / "b")
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {path.name for path in (tmp_path / "b").iterdir()}
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_five_fields_cannot_say_where_a_view_begins(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    save_dict({"a": base, "b": base[:2]}, tmp_path / "a", fields=5)
    assert_same(load_dict(tmp_path / "a"), {"a": base, "b": base[:2]})
    with pytest.raises(UnsupportedError, match="5 fields"):
        save_dict({"a": base, "b": base[1:]}, tmp_path / "b", fields=5)
    assert not (tmp_path / "b").exists()


def test_a_folder_of_serverless_llm_is_read(tmp_path: Path) -> None:
    # As its writer leaves it: five fields in any order, spaces, the last page filled with zeros.
    a, b = any_bytes(torch.float16, 5), any_bytes(torch.int64, 2)
    index = {"b": [16, 16, [2], [1], "torch.int64"], "a": [0, 10, [5], [1], "torch.float16"]}
    (tmp_path / "tensor_index.json").write_text(json.dumps(index))
    (tmp_path / "tensor.data_0").write_bytes((raw(a) + bytes(6) + raw(b)).ljust(4096, b"\0"))
    assert_same(load_dict(tmp_path), {"a": a, "b": b})


def test_the_descriptor_names_index_and_data(tmp_path: Path) -> None:
    tensors = {"a": any_bytes(torch.uint8, 9 * MIB + 5), "b": any_bytes(torch.uint8, 3)}
    descriptor = save_dict(tensors, tmp_path / "a")
    data = raw(tensors["a"]) + bytes(3) + raw(tensors["b"])

    def sha(blob: bytes) -> bytes:
        return hashlib.sha256(blob).digest()

    one, two, three = (sha(data[at : at + 4 * MIB]) for at in range(0, len(data), 4 * MIB))
    names = []
    index = (tmp_path / "a" / "tensor_index.json").read_bytes()
    for digest in (sha(index), sha(sha(one + two) + three)):
        names.append("b" + base64.b32encode(b"\x12\x20" + digest).decode().lower().strip("="))
    assert descriptor["artifact_id"] == f"mi2:{names[0]}:{names[1]}"
    assert [descriptor["index_multihash"], descriptor["data_multihash"]] == names
    assert descriptor["total_size"] == len(data)


@pytest.mark.parametrize("config", [{}, {"buffer_size_mb": 5}, {"enable_async_write": False}])
def test_leaves_that_threads_hash_are_those_of_the_whole(
    tmp_path: Path, config: dict[str, Any], made: list[int]
) -> None:
    data = any_bytes(torch.uint8, 41 * MIB + 5)
    descriptor = save_dict({"a": data}, tmp_path / "a", config)
    assert len(made) == 4
    assert all(size % (4 * MIB) == 0 for size in made)
    whole = raw(data)
    assert data_of(tmp_path / "a") == whole + bytes(3)
    level = [
        hashlib.sha256(whole[at : at + 4 * MIB]).digest() for at in range(0, 42 * MIB, 4 * MIB)
    ]
    while len(level) > 1:
        pairs = [level[at : at + 2] for at in range(0, len(level), 2)]
        level = [hashlib.sha256(b"".join(p)).digest() if len(p) == 2 else p[0] for p in pairs]
    name = "b" + base64.b32encode(b"\x12\x20" + level[0]).decode().lower().strip("=")
    assert descriptor["data_multihash"] == name
    found = json.loads((tmp_path / "a" / "verification.json").read_text())
    assert found == expected_verification(whole, "")
    assert_same(load_dict(tmp_path / "a"), {"a": data})


def test_without_verification_there_is_a_descriptor(tmp_path: Path) -> None:
    """As tensorcast writes it: of the two files, only `verification.json` is optional."""
    tensors = several() | {"large": any_bytes(torch.uint8, 5 * MIB + 1)}
    verified = save_dict(tensors, tmp_path / "a")
    plain = save_dict(state_dict=tensors, disk_path=tmp_path / "b", verification=False)
    assert plain == verified
    assert plain["artifact_id"].startswith("mi2:")
    whole, files = content(tmp_path / "a"), content(tmp_path / "b")
    assert whole.keys() - files.keys() == {"verification.json"}
    assert files == {name: whole[name] for name in files}
    assert_same(load_dict(tmp_path / "b"), tensors)
    data = bytearray((tmp_path / "b" / "tensor.data_0").read_bytes())
    data[3 * MIB] ^= 1
    (tmp_path / "b" / "tensor.data_0").write_bytes(data)
    with pytest.raises(IntegrityError):
        load_dict(tmp_path / "b")


def test_without_both_nothing_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = several() | {"large": any_bytes(torch.uint8, 5 * MIB + 1)}
    verified = save_dict(tensors, tmp_path / "a")
    for sums in ("TreeHash", "Verifier"):
        monkeypatch.setattr(save, sums, None)  # which is not even asked
    plain = save_dict(tensors, tmp_path / "b", verification=False, descriptor=False)
    names = {path.name for path in (tmp_path / "b").iterdir()}
    assert names == {"tensor.data_0", "tensor_index.json", "tensor_index.cbor"}
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert plain == {key: verified[key] for key in ("storage_entries", "tensor_aliases")}
    assert (
        rebuild_index(plain["storage_entries"], plain["tensor_aliases"])
        == (tmp_path / "b" / "tensor_index.json").read_bytes()
    )
    assert_same(load_dict(tmp_path / "b"), tensors)
    with pytest.raises(ConfigError, match="leave out views"):
        save_dict(tensors, tmp_path / "c", verification=False, views={"v": ["odd"]})
    assert not (tmp_path / "c").exists()


def expected_verification(data: bytes, space: str) -> dict[str, Any]:
    """By the book, all in memory."""
    length = len(data) // 8
    parts = [data[n * length : (n + 1) * length if n < 7 else len(data)] for n in range(8)]
    chunks = [[p[at : at + 262144] for at in range(0, len(p), 262144)] for p in parts]

    def chain(pieces: list[bytes]) -> int:
        seed = 0
        for piece in pieces:
            seed = xxhash.xxh64_intdigest(piece, seed)
        return seed

    def value(at: int) -> int:
        return int.from_bytes(data[at : at + 8], "little")

    return {
        "version": "1.0",
        "byte_space_id": space,
        "artifact_size": len(data),
        "full_hash": chain([chunk for part in chunks for chunk in part]),
        "segment_hashes": [chain(part) for part in chunks],
        "sample_values": [value(len(data) * n // 16) for n in range(16)],
        "key_values": [value(0), value(len(data) // 2), value(max(0, len(data) - 8))],
    }


@pytest.mark.parametrize("count", [1, 3, 7, 8, 15, 4097, 5 * MIB + 3])
def test_verification_files_are_about_their_byte_space(tmp_path: Path, count: int) -> None:
    tensors = {"a": any_bytes(torch.uint8, 10), "b": any_bytes(torch.uint8, count, seed=1)}
    config = {"buffer_size_mb": 1}
    save_dict(tensors, tmp_path / "a", config, views={"half/b": ["b"], "all": ["a", "b"]})
    whole = raw(tensors["a"]) + bytes(6) + raw(tensors["b"])
    files = {"verification.json": (whole, ""), "verification.view_all.json": (whole, "all")}
    files["verification.view_half_b.json"] = (raw(tensors["b"]), "half/b")
    for name, (data, space) in files.items():
        found = json.loads((tmp_path / "a" / name).read_text())
        assert found == expected_verification(data, space)
    some = load_dict(tmp_path / "a", names=["b"], view="half/b")
    assert_same(some, {"b": tensors["b"]})


def test_a_view_is_compared_with_its_own_file_only(tmp_path: Path) -> None:
    base = torch.arange(100.0)
    tensors = {"a": base, "b": base[50:], "c": torch.ones(7), "none": torch.empty(0)}
    views = {"v": ["b"], "w": ["c", "none"], "n": ["none"]}
    save_dict(tensors, tmp_path / "a", views=views)
    for view, names in views.items():
        assert set(load_dict(tmp_path / "a", names=names, view=view)) == set(names)
    with pytest.raises(IntegrityError, match="view_v"):
        load_dict(tmp_path / "a", names=["c"], view="v")
    with pytest.raises(ConfigError, match="was not saved"):
        load_dict(tmp_path / "a", names=["c"], view="x")
    (tmp_path / "a" / "verification.view_v.json").unlink()
    (tmp_path / "a" / "verification.json").rename(tmp_path / "a" / "verification.view_v.json")
    with pytest.raises(FormatError, match="about ''"):
        load_dict(tmp_path / "a", names=["b"], view="v")


@pytest.mark.parametrize("limit", [4096, 5000, 8192, 1 << 20])
def test_data_is_split_into_files(tmp_path: Path, limit: int) -> None:
    tensors = {name: any_bytes(torch.int32, 3000, seed) for seed, name in enumerate("abc")}
    tensors["d"] = any_bytes(torch.uint8, 5)
    save_dict(tensors, tmp_path / "a", max_file_bytes=limit)
    sizes = [path.stat().st_size for path in (tmp_path / "a").glob("tensor.data_*")]
    assert len(sizes) == -(-36008 // (limit // 4096 * 4096))
    assert max(sizes) <= limit
    assert_same(load_dict(tmp_path / "a"), tensors)
    assert_same(load_dict(tmp_path / "a", names=["b"]), {"b": tensors["b"]})


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_state_dict_comes_back(data: st.DataObject) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for seed, name in enumerate(data.draw(st.lists(st.text(max_size=8), unique=True, max_size=6))):
        kind = getattr(torch, data.draw(st.sampled_from(sorted(DTYPES))).removeprefix("torch."))
        shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
        whole = any_bytes(kind, torch.Size(shape).numel(), seed).view(shape)
        tensors[name] = whole
        if whole.dim() and data.draw(st.booleans()):
            tensors[name + " view"] = whole.transpose(0, -1)[data.draw(st.integers(0, 2)) :]
    limit = data.draw(st.sampled_from([4096, 10**10]))
    asynchronous = data.draw(st.booleans())
    with memory_folder() as folder:
        config = {"enable_async_write": asynchronous, "buffer_size_mb": 1, "num_buffers": 1}
        descriptor = save_dict(tensors, folder / "a", config, max_file_bytes=limit)
        assert_same(load_dict(folder / "a"), tensors)
        index = (folder / "a" / "tensor_index.json").read_bytes()
        graph = (descriptor["storage_entries"], descriptor["tensor_aliases"])
        assert rebuild_index(*graph) == index


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all buffers that a save makes."""
    sizes: list[int] = []

    def counted(nbytes: int) -> memoryview:
        sizes.append(nbytes)
        return buffers.allocate(nbytes)

    monkeypatch.setattr(save, "allocate", counted)
    return sizes


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_memory_is_that_of_the_buffers(
    tmp_path: Path, made: list[int], count: int, asynchronous: bool
) -> None:
    tensors = {str(n): any_bytes(torch.uint8, 3 * MIB + n, n) for n in range(4)}
    config = {"num_buffers": count, "buffer_size_mb": 1, "enable_async_write": asynchronous}
    save_dict(tensors, tmp_path / "a", config)
    assert made == [MIB] * count
    assert_same(load_dict(tmp_path / "a"), tensors)


def test_a_small_save_takes_one_small_buffer(tmp_path: Path, made: list[int]) -> None:
    save_dict({"a": torch.ones(3)}, tmp_path / "a")
    assert made == [4096]


@pytest.mark.parametrize(
    "config",
    [
        {"num_buffers": 0},
        {"num_buffers": 2.0},
        {"buffer_size_mb": -1},
        {"buffer_size_mb": True},
        {"enable_async_write": 1},
        {"pool_size_gb": 1},
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="streaming_config"):
        save_dict({"a": torch.ones(1)}, tmp_path / "a", config)
    assert list(tmp_path.iterdir()) == []


def test_views_that_cannot_be_are_refused(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(1)}
    for views in ({"v": ["b"]}, {"": ["a"]}, {"v/1": ["a"], "v_1": ["a"]}):
        with pytest.raises(ConfigError, match="view"):
            save_dict(tensors, tmp_path / "a", views=views)
    with pytest.raises(ConfigError, match="too small"):
        save_dict(tensors, tmp_path / "a", max_file_bytes=4095)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, device="meta"),
        lambda: torch.eye(2).to_sparse(),
        lambda: 3.5,
    ],
    ids=["meta", "sparse", "number"],
)
def test_what_has_no_plain_memory_is_refused(tmp_path: Path, make: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedError, match="'bad'"):
        save_dict({"bad": make()}, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("full", "file"):
        with pytest.raises(ExportTargetError):
            save_dict({"a": torch.ones(1)}, tmp_path / name)
    (tmp_path / "empty").mkdir()
    save_dict({"a": torch.ones(1)}, tmp_path / "empty")
    save_dict({}, tmp_path / "deep" / "er")
    assert load_dict(tmp_path / "deep" / "er") == {}
    assert {path.name for path in tmp_path.iterdir()} == {"full", "file", "empty", "deep"}


def damage(folder: Path, name: str, at: int) -> None:
    blob = bytearray((folder / name).read_bytes())
    blob[at] ^= 1
    (folder / name).write_bytes(blob)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tensors = {"a": any_bytes(torch.uint8, 5 * MIB + 1), "b": torch.arange(5)}
    save_dict(tensors, tmp_path / "saved")
    return tmp_path / "saved"


PADDING = 5 * MIB + 3


@pytest.mark.parametrize("at", [0, 4 * MIB, PADDING, 5 * MIB + 47])
def test_a_flipped_bit_of_the_data_is_found(saved: Path, at: int) -> None:
    damage(saved, "tensor.data_0", at)
    with pytest.raises(IntegrityError, match="hashes to"):
        load_dict(saved)
    (saved / "artifact_descriptor.json").unlink()
    if at != PADDING:  # which is no tensor's
        with pytest.raises(IntegrityError, match=r"verification\.json"):
            load_dict(saved)
    assert set(load_dict(saved, verify=False)) == {"a", "b"}


@pytest.mark.parametrize("name", ["tensor_index.json", "tensor_index.cbor"])
def test_any_flipped_bit_of_an_index_is_found(saved: Path, name: str) -> None:
    for at in range((saved / name).stat().st_size):
        damage(saved, name, at)
        with pytest.raises(FormatError):
            load_dict(saved)
        damage(saved, name, at)
    load_dict(saved)


@pytest.mark.parametrize("key", ["artifact_id", "index_multihash", "data_multihash", "total_size"])
def test_a_flipped_bit_of_a_descriptor_is_found(saved: Path, key: str) -> None:
    name = "artifact_descriptor.json"
    blob = (saved / name).read_bytes()
    start = blob.index(f'"{key}": '.encode()) + len(key) + 5
    for at in range(start, blob.index(b"\n", start) - 1, 4):
        damage(saved, name, at)
        with pytest.raises((FormatError, IntegrityError)):
            load_dict(saved)
        damage(saved, name, at)
    load_dict(saved)


def test_folders_that_lack_something_are_refused(saved: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        load_dict(saved.parent / "missing")
    (saved / "tensor.data_2").write_bytes(b"")
    with pytest.raises(FormatError, match="not 0, 1, 2"):
        load_dict(saved)
    (saved / "tensor.data_2").unlink()
    (saved / "tensor_index.json").unlink()
    assert set(load_dict(saved)) == {"a", "b"}  # the CBOR alone will do
    (saved / "tensor.data_0").write_bytes((saved / "tensor.data_0").read_bytes()[:-1024])
    with pytest.raises(FormatError, match="storages end at"):
        load_dict(saved)
    (saved / "tensor.data_0").unlink()
    with pytest.raises(FormatError, match="not 0, 1, 2"):
        load_dict(saved)
    (saved / "tensor.data_0").mkdir()
    with pytest.raises((FormatError, StoreError)):
        load_dict(saved)
    (saved / "tensor_index.cbor").unlink()
    with pytest.raises(CheckpointNotFoundError):
        load_dict(saved)


def test_unknown_names_are_refused(saved: Path) -> None:
    with pytest.raises(ConfigError, match="no tensor 'c'"):
        load_dict(saved, names=["a", "c"])
    with pytest.raises(ConfigError, match="names"):
        load_dict(saved, view="v")


def test_the_store_does_without_torch() -> None:
    modules = "tensor_dedup.store, tensor_dedup.formats.serverless.storage_graph"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
