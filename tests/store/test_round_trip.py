"""What goes in comes out, byte for byte, and every tensor under its own digest."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store_runs.stores import (
    KIB,
    MIB,
    Tensors,
    assert_clean,
    content,
    elements,
    noise,
    open_store,
    safetensors,
    u8,
    write,
)
from tensor_dedup import Store
from tensor_dedup.digest import digest
from tensor_dedup.formats.safetensors import DTYPE_BITS
from tensor_dedup.store import StoredCheckpoint
from tensor_dedup.store.files import RealFiles

NANS = bytes.fromhex("0100a07f" + "ffffffff" + "010080ff" + "0000c07f")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


@st.composite
def tensors(draw: st.DrawFn) -> Tensors:
    names = draw(st.lists(st.text(min_size=1, max_size=12), unique=True, max_size=6))
    found = {}
    for name in names:
        dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        if DTYPE_BITS[dtype] < 8:
            shape = (*shape, 8)  # whole bytes
        nbytes = elements(dtype, shape)
        found[name] = (dtype, shape, draw(st.binary(min_size=nbytes, max_size=nbytes)))
    return found


def check(checkpoint: StoredCheckpoint, expected: Tensors) -> None:
    assert {tensor.name for tensor in checkpoint} == set(expected)
    for name, (dtype, shape, data) in expected.items():
        tensor = checkpoint[name]
        assert (tensor.dtype, tensor.shape, tensor.nbytes) == (dtype, shape, len(data))
        assert tensor.digest == digest(data)
        assert checkpoint.read(name) == data


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(tensors(), st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3))
def test_any_file_comes_back(expected: Tensors, metadata: dict[str, str]) -> None:
    metadata.pop("__metadata__", None)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "a.safetensors").write_bytes(safetensors(expected, metadata))
        store = Store.open(root / "store", worker_count=1)
        store.import_(root / "a.safetensors")
        with store.checkpoint("a") as checkpoint:
            check(checkpoint, {n: t for n, t in expected.items() if n != "__metadata__"})
        store.export("a", root / "out")
        assert content(root / "out") == {"a.safetensors": (root / "a.safetensors").read_bytes()}


def test_large_and_small_tensors_of_a_folder_come_back(store: Store, tmp_path: Path) -> None:
    first: Tensors = {
        "big": ("BF16", (1200, 1024), noise(1, 1200 * 2 * KIB)),
        "scalar": ("F32", (), b"\x01\0\x80\x7f"),
        "nothing": ("F16", (0, 7), b""),
        "nans": ("F32", (4,), NANS),
    }
    second: Tensors = {"medium": ("F8_E4M3", (100 * KIB,), noise(2, 100 * KIB))}
    files = {
        "model-00001-of-00002.safetensors": safetensors(first, {"format": "pt"}),
        "model-00002-of-00002.safetensors": safetensors(second),
        "config.json": b"{}",
        "sub/deep/vocab.txt": noise(3, 200 * KIB),
        "empty": b"",
    }
    store.import_(write(tmp_path / "m", files))
    with store.checkpoint("m") as checkpoint:
        check(checkpoint, {**first, **second})
    paths = store.export("m", tmp_path / "out")
    assert content(tmp_path / "out") == files
    assert {path.relative_to(tmp_path / "out").as_posix() for path in paths} == set(files)
    again = Store.open(tmp_path / "again")
    assert again.import_(tmp_path / "out", "m").manifest == store.list()[0].manifest


def test_hidden_files_and_other_weights_stay_out(store: Store, tmp_path: Path) -> None:
    files = {
        "model.safetensors": safetensors(u8(a=b"a")),
        "model.fp16.safetensors": safetensors(u8(a=b"b")),
        "pytorch_model.bin": b"pickle",
        ".git/config": b"secret",
    }
    result = store.import_(write(tmp_path / "m", files))
    assert result.skipped == ("model.fp16.safetensors", "pytorch_model.bin")
    store.export("m", tmp_path / "out")
    assert content(tmp_path / "out") == {"model.safetensors": files["model.safetensors"]}


def test_sub_folders_name_their_tensors(store: Store, tmp_path: Path) -> None:
    files = {
        "model_index.json": b'{"unet": ["diffusers", "UNet"], "vae": ["diffusers", "VAE"]}',
        "unet/a.safetensors": safetensors(u8(w=b"1")),
        "vae/a.safetensors": safetensors(u8(w=b"2")),
    }
    store.import_(write(tmp_path / "pipe", files))
    with store.checkpoint("pipe") as checkpoint:
        assert [(t.name, bytes(checkpoint.read(t))) for t in checkpoint] == [
            ("unet/w", b"1"),
            ("vae/w", b"2"),
        ]
    store.export("pipe", tmp_path / "out")
    assert content(tmp_path / "out") == files


def test_bytes_that_are_what_another_digest_is_made_of(store: Store, tmp_path: Path) -> None:
    # Two leaves; then what is hashed to their digest, as a tensor of its own.
    from blake3 import blake3

    large = noise(5, 3 * MIB)
    leaves = [blake3(large[at : at + 2 * MIB]).digest() for at in (0, 2 * MIB)]
    imitation = len(large).to_bytes(8, "little") + b"".join(leaves)
    expected = u8(large=large, imitation=imitation, leaf=leaves[0])
    (tmp_path / "m.safetensors").write_bytes(safetensors(expected))
    store.import_(tmp_path / "m.safetensors")
    with store.checkpoint("m") as checkpoint:
        check(checkpoint, expected)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 5 * MIB), st.integers(0, 5 * MIB))
def test_any_range_is_that_range(sliced: tuple[StoredCheckpoint, bytes], a: int, b: int) -> None:
    checkpoint, data = sliced
    start, stop = sorted((a, b))
    assert checkpoint.read_range("t", start, stop) == data[start:stop]


@pytest.fixture(scope="module")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> tuple[StoredCheckpoint, bytes]:
    root = tmp_path_factory.mktemp("sliced")
    data = noise(6, 5 * MIB)
    (root / "m.safetensors").write_bytes(safetensors(u8(t=data)))
    store = Store.open(root / "store")
    store.import_(root / "m.safetensors")
    return store.checkpoint("m"), data


class OneMoment(RealFiles):
    """A disk on which everything happens in the same second."""

    def now(self) -> int:
        return 1000


def test_what_goes_to_the_trash_twice_in_a_second_is_deleted_once(tmp_path: Path) -> None:
    path = write(tmp_path / "m", {"m.safetensors": safetensors(u8(a=noise(1, 70 * KIB)))})
    store = open_store(tmp_path / "store", OneMoment())
    for grace in (24, 0):
        store.import_(path, "m")
        store.delete("m")
        store.gc(grace)
    assert store.stats().disk_bytes < 70 * KIB
    assert_clean(store, {})
