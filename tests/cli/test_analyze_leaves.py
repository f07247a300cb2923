"""What `analyze` says of tensors that have leaves in common."""

import os
from pathlib import Path

import pytest

from store_runs.stores import noise, open_store, safetensors, u8, write
from tensor_dedup.analyze import analyze, contributions
from tensor_dedup.analyze.verdict import advice
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.loader.checkpoint_io.hints import HintIndex, StoreHints
from tensor_dedup.loader.residents import registry

BASE = noise(1, 4 * LEAF_BYTES + 1000)
GROWN = BASE[: 4 * LEAF_BYTES] + noise(2, 5000)
SHIFTED = noise(3, 512) + BASE


def made(folder: Path, data: bytes) -> Path:
    tensors = u8(embed=data, same=noise(4, 9000))
    path = write(folder, {"model.safetensors": safetensors(tensors)})
    for file in path.iterdir():  # hints believe nothing that has just been written
        os.utime(file, (1_000_000_000, 1_000_000_000))
    return path


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [made(tmp_path / name, d) for name, d in {"base": BASE, "grown": GROWN}.items()]


def test_leaves_at_the_same_offset_are_counted(paths: list[Path]) -> None:
    found = analyze(paths)
    assert found.shared_bytes == 9000
    assert found.leaf_shared_bytes == 4 * LEAF_BYTES
    document = found.to_dict()
    assert document["leaf_shared_bytes"] == 4 * LEAF_BYTES
    assert [c["leaf_shared_bytes"] for c in document["checkpoints"]] == [0, 4 * LEAF_BYTES]
    why = "shared by leaf: + 4.9 KiB instead of 8.0 MiB: 4,000 new rows"
    assert why in document["checkpoints"][1]["changes"]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (noise(5, 10) + BASE[10:], "1 changed leaf"),
        (noise(5, 10) + BASE[10:-10] + noise(6, 10), "2 changed leaves"),
        (noise(5, 10) + BASE[10:] + b"1", "1 new row, 1 changed leaf"),
        (BASE[:-1], "1 fewer row"),
    ],
)
def test_why_not_more_of_it_is_shared_by_leaf(
    tmp_path: Path, paths: list[Path], data: bytes, why: str
) -> None:
    found = analyze([paths[0], made(tmp_path / "tune", data)])
    assert found.leaf_shared_bytes
    [text] = [each for each in found.reasons[1].changes if "by leaf" in each]
    assert text.endswith(f": {why}")


def test_a_shifted_tail_is_private(tmp_path: Path, paths: list[Path]) -> None:
    assert analyze([paths[0], made(tmp_path / "shifted", SHIFTED)]).leaf_shared_bytes == 0


def test_other_algorithms_know_no_leaves(paths: list[Path]) -> None:
    found = analyze(paths, hash_algorithm="xxh3_128")
    assert (found.shared_bytes, found.leaf_shared_bytes) == (9000, 0)


def test_a_store_knows_the_leaves(tmp_path: Path, paths: list[Path]) -> None:
    store = open_store(tmp_path / "store")
    for path in paths:
        store.import_(path)
    found = analyze(["store://base", "store://grown"], store=store.path)
    assert (found.leaf_shared_bytes, found.bytes_read) == (4 * LEAF_BYTES, 0)


def test_remembered_leaves_are_not_read_again(
    tmp_path: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensor_dedup.loader.checkpoint_io.hints.QUIET_NS", 0)
    hints = HintIndex(tmp_path / "hints.sqlite", trusted=lambda _: True)
    first = analyze(paths, hints=hints)
    assert first.bytes_read == first.total_bytes
    again = analyze(paths, hints=hints)
    assert (again.bytes_read, again.leaf_shared_bytes) == (0, 4 * LEAF_BYTES)
    # What an import has hashed is known with its leaves.
    other = StoreHints(HintIndex(tmp_path / "other.sqlite", trusted=lambda _: True))
    for path in paths:
        open_store(tmp_path / "store").import_(path, hints=other)
    found = analyze(paths, hints=other.index)
    assert (found.bytes_read, found.leaf_shared_bytes) == (0, 4 * LEAF_BYTES)


def test_digests_without_leaves_are_not_read_for_them(
    tmp_path: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hints are a cache, which may know a tensor and not its leaves."""
    monkeypatch.setattr("tensor_dedup.loader.checkpoint_io.hints.QUIET_NS", 0)
    hints = HintIndex(tmp_path / "hints.sqlite", trusted=lambda _: True)
    with monkeypatch.context() as before:
        before.setattr("tensor_dedup.digest.leaf_places", lambda _start, _nbytes: [])
        analyze(paths, hints=hints)
    found = analyze(paths, hints=hints)
    assert (found.bytes_read, found.leaf_shared_bytes, found.shared_bytes) == (0, 0, 9000)


def test_what_no_load_shares_is_not_counted(tmp_path: Path, paths: list[Path]) -> None:
    """What is smaller than 8 MiB, and rows of another shape."""
    assert contributions.LEAF_SHARED_FROM == registry.LEAF_SHARED_FROM
    small = BASE[: 4 * LEAF_BYTES - 1]
    assert analyze([paths[0], made(tmp_path / "small", small)]).leaf_shared_bytes == 0
    assert analyze([made(tmp_path / "small2", small), paths[0]]).leaf_shared_bytes == 0
    wide = BASE[: 4 * LEAF_BYTES]
    rows = {"embed": ("U8", (2 * LEAF_BYTES, 2), wide)}
    other = write(tmp_path / "wide", {"model.safetensors": safetensors(rows)})
    assert analyze([paths[0], other]).leaf_shared_bytes == 0


@pytest.mark.parametrize(("nbytes", "shared"), [(4 * LEAF_BYTES, True), (LEAF_BYTES, False)])
def test_of_a_fused_parameter_plain_weights_share_what_did_not_change(
    tmp_path: Path, nbytes: int, shared: bool
) -> None:
    def saved(name: str, q: int) -> Path:
        parts = {"q_proj": noise(q, nbytes), "k_proj": noise(2, nbytes), "v_proj": noise(3, nbytes)}
        tensors = {f"model.layers.0.self_attn.{k}.weight": each for k, each in parts.items()}
        return write(tmp_path / name, {"model.safetensors": safetensors(u8(**tensors))})

    found = analyze([saved("base", 1), saved("tune", 4)])
    assert found.vllm.lost_bytes == 2 * nbytes
    assert found.vllm.leaf_shared_bytes == found.to_dict()["vllm"]["leaf_shared_bytes"]
    assert found.vllm.leaf_shared_bytes == (2 * nbytes if shared else 0)
    lost = "k_proj, v_proj lost to vLLM's fused qkv"
    assert lost + " unless its weights are plain" * shared in found.reasons[1].changes
    [first, *_] = advice(found)
    serves = "less in vLLM" not in first.sentence and "memory_manager" in first.commands[0]
    assert serves == shared
