"""What is stored once, and what that costs."""

from pathlib import Path

import pytest

from store_runs.stores import (
    KIB,
    MIB,
    Tensors,
    content,
    noise,
    safetensors,
    size_on_disk,
    u8,
    write,
)
from tensor_dedup import Store
from tensor_dedup.analyze import analyze

LAYERS = 24


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def model(changed: frozenset[int] = frozenset()) -> Tensors:
    """About 50 MB in large, small and tiny tensors; some layers are another's."""
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for layer in range(LAYERS):
        seed = layer + 1000 * (layer in changed)
        found[f"{layer}.weight"] = ("U8", (2 * MIB,), noise(seed, 2 * MIB))
        found[f"{layer}.norm"] = ("U8", (4 * KIB,), noise(seed + 100, 4 * KIB))
        found[f"{layer}.scale"] = ("F32", (), noise(seed + 200, 4))
    return found


def saved(path: Path, tensors: Tensors) -> Path:
    files = {"model.safetensors": safetensors(tensors), "tokenizer.json": noise(7, 2 * MIB)}
    return write(path, files)


def test_fine_tunes_cost_what_differs(store: Store, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", model())
    total, there = size_on_disk(base), set[int]()
    store.import_(base)
    for number, changed in enumerate([{1}, {2, 3}, set(range(4, LAYERS)), {0, 5}]):
        tune = saved(tmp_path / f"tune{number}", model(frozenset(changed)))
        # Layer 5 changed in two of them, to the same: its three tensors are new once.
        assert store.import_(tune).new_tensors == 3 * len(changed - there)
        there |= changed
        total += size_on_disk(tune)
    differing = len(there) * (2 * MIB + 4 * KIB + 4)
    assert total > 200_000_000
    limit = size_on_disk(base) + differing + total // 1000 + MIB
    assert size_on_disk(store.path) <= limit


def test_a_second_import_writes_nothing(store: Store, tmp_path: Path) -> None:
    path = saved(tmp_path / "m", u8(a=noise(1, 2 * MIB), b=noise(2, 9)))
    first = store.import_(path)
    assert (first.new_bytes, first.known_bytes) == (size_on_disk(path), 0)
    before = content(store.path / "containers"), content(store.path / "manifests")
    again = store.import_(path, "again")
    assert (again.new_bytes, again.stored_bytes, again.containers) == (0, 0, ())
    assert again.manifest == first.manifest
    assert (content(store.path / "containers"), content(store.path / "manifests")) == before
    assert store.import_(path, "again", replace=True).stored_bytes == 0


def test_renamed_and_reshaped_tensors_are_stored_once(store: Store, tmp_path: Path) -> None:
    data = noise(1, 2 * MIB)
    one = write(tmp_path / "one", {"a.safetensors": safetensors({"x": ("U8", (2 * MIB,), data)})})
    two = write(tmp_path / "two", {"b.safetensors": safetensors({"y": ("F16", (MIB, 1), data)})})
    store.import_(one)
    assert store.import_(two).new_tensors == 0


def test_another_sharding_is_stored_once(store: Store, tmp_path: Path) -> None:
    whole = model()
    names = list(whole)
    parts = {
        f"model-0000{n + 1}-of-00003.safetensors": safetensors(
            {name: whole[name] for name in names[n::3]}
        )
        for n in range(3)
    }
    store.import_(saved(tmp_path / "whole", whole))
    result = store.import_(write(tmp_path / "parts", parts))
    assert result.new_tensors == 0
    assert result.stored_bytes < 40 * KIB


def test_equal_tensors_of_one_file_are_stored_once(store: Store, tmp_path: Path) -> None:
    data = noise(1, MIB)
    path = saved(tmp_path / "m", u8(a=data, b=data, c=data))
    result = store.import_(path)
    assert result.new_tensors == 1
    assert size_on_disk(store.path) < 4 * MIB
    with store.checkpoint("m") as checkpoint:
        assert checkpoint.read("c") == data


def test_the_digests_are_those_analyze_shows(store: Store, tmp_path: Path) -> None:
    path = saved(tmp_path / "m", u8(a=noise(1, 3 * MIB), b=b"b", c=b""))
    other = saved(tmp_path / "n", u8(a=noise(1, 3 * MIB), b=b"b", c=b""))
    shown = analyze([path, other]).shared_tensors
    store.import_(path)
    with store.checkpoint("m") as checkpoint:
        digests = {tensor.digest for tensor in checkpoint}
    assert len(shown) == 3
    assert {tensor.fingerprint.digest for tensor in shown} == digests


def test_growing_at_the_end_costs_one_page(store: Store, tmp_path: Path) -> None:
    trees = {f"{n}": ("U8", (500,), noise(n, 500)) for n in range(1500)}
    store.import_(write(tmp_path / "a", {"a.safetensors": safetensors(trees)}))
    before = len(content(store.path / "manifests"))
    grown = {**trees, **{f"{n}": ("U8", (500,), noise(n, 500)) for n in range(1500, 1510)}}
    store.import_(write(tmp_path / "b", {"a.safetensors": safetensors(grown)}))
    # The header is another one, so the first page differs; the four full ones after it do not.
    assert before == 7
    assert len(content(store.path / "manifests")) == before + 3


def test_stats_say_what_there_is(store: Store, tmp_path: Path) -> None:
    path = saved(tmp_path / "m", u8(a=noise(1, 2 * MIB)))
    store.import_(path)
    store.import_(path, "n")
    stats = store.stats()
    size = size_on_disk(path)
    assert (stats.checkpoints, stats.tensors) == (2, 2)
    assert (stats.logical_bytes, stats.unique_bytes, stats.dedup_ratio) == (2 * size, size, 0.5)
    assert stats.disk_bytes == size_on_disk(store.path)
