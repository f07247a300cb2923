"""What `analyze` says, against numbers worked out by hand and against a naive count."""

import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from unittest import mock

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from files import reads
from tensor_dedup import Store
from tensor_dedup.analyze import analyze, digests, fusion, verdict
from tensor_dedup.analyze.analysis import compare
from tensor_dedup.analyze.changes import name_shown
from tensor_dedup.analyze.tensors import AnalyzedTensor, Measured
from tensor_dedup.errors import (
    ChangedFileError,
    CheckpointNotFoundError,
    ConfigError,
    FormatError,
    StoreError,
)
from tensor_dedup.formats.layers.layer_names import split
from tensor_dedup.loader.checkpoint_io.hints import HintIndex
from tensor_dedup.types import Fingerprint, TensorSpec

Content = Mapping[str, bytes]


def write(path: Path, content: Content, shapes: Mapping[str, tuple[int, ...]] | None = None) -> str:
    """A safetensors file of U8 tensors with these bytes."""
    arrays = {
        name: numpy.frombuffer(data, dtype=numpy.uint8).reshape((shapes or {}).get(name, (-1,)))
        for name, data in content.items()
    }
    save_file(arrays, path)
    return str(path)


def test_by_hand(tmp_path: Path) -> None:
    a = write(tmp_path / "a.safetensors", {"a": b"1111", "b": b"2222", "twin": b"1111"})
    b = write(
        tmp_path / "b.safetensors",
        {"x": b"1111", "y": b"3333", "z": b"1111", "w": b"2222"},
        {"w": (2, 2)},
    )
    found = analyze([a, b]).to_dict()
    layers = [
        [(la["name"], la["bytes"], la["shared_bytes"]) for la in c.pop("layers")]
        for c in found["checkpoints"]
    ]
    assert [c.pop("leaf_shared_bytes") for c in found["checkpoints"]] == [0, 0]
    assert [c.pop("left_out") + c.pop("not_indexed") for c in found["checkpoints"]] == [[], []]
    assert [c.pop("name") for c in found["checkpoints"]] == ["", ""]
    for key in ("small_tensors", "small_bytes"):
        assert [c.pop(key) for c in found["checkpoints"]] == [0, 0]
    assert found["checkpoints"] == [
        {"path": a, "tensors": 3, "bytes": 12, "adds_bytes": 8, "changes": []},
        {"path": b, "tensors": 4, "bytes": 16, "adds_bytes": 4, "changes": ["added: y"]},
    ]
    assert layers == [
        [("a", 4, 0), ("b", 4, 0), ("twin", 4, 4)],
        [("w", 4, 4), ("x", 4, 4), ("y", 4, 0), ("z", 4, 4)],
    ]
    (y,) = [tensor for tensor in found["tensors"] if tensor["places"][0]["name"] == "y"]
    assert y["places"] == [{"checkpoint": 1, "layer": "y", "name": "y"}]
    assert (found["total_bytes"], found["unique_bytes"], found["shared_bytes"]) == (28, 12, 16)
    # 1111 is twice in both; 2222 has another shape, so the two are not one tensor.
    assert found["pairs"] == [{"a": a, "b": b, "shared_tensors": 2, "shared_bytes": 8}]
    assert found["vllm"]["final_shared_bytes"] == 8
    assert (found["bytes_read"], found["bytes_hashed"]) == (28, 28)
    (largest,) = found["largest_shared"]
    assert [place["name"] for place in largest["places"]] == ["a", "twin", "x", "z"]


def test_the_minimum_applies_to_every_number(tmp_path: Path) -> None:
    content = {"big": b"b" * 100, "edge": b"e" * 10, "small": b"s" * 9}
    a = write(tmp_path / "a.safetensors", content)
    b = write(tmp_path / "b.safetensors", content)
    found = analyze([a, b], min_tensor_bytes=10)
    assert [len(c.tensors) for c in found.checkpoints] == [2, 2]
    assert (found.total_bytes, found.unique_bytes, found.bytes_read) == (220, 110, 220)
    assert (found.pairs[0].shared_tensors, found.pairs[0].shared_bytes) == (2, 110)
    assert found.vllm.shared_bytes == 110
    assert sum(layer.tensors for layer in found.shared_layers) == 2


@pytest.mark.parametrize("stored", [False, True])
def test_what_the_minimum_leaves_out_is_not_called_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    content = {"layers.0.big": b"b" * 100, "layers.0.norm": b"s" * 9, "layers.1.big": b"c" * 100}
    changed = {"layers.0.norm": b"t" * 9}
    paths = [
        write(tmp_path / "base.safetensors", content),
        write(tmp_path / "tune.safetensors", content | changed),
    ]
    if stored:
        monkeypatch.setenv("TENSOR_DEDUP_STORE", str(tmp_path / "store"))
        with Store.open() as store:
            names = [store.import_(path).name for path in paths]
        paths = [f"store://{name}" for name in names]
    whole = analyze(paths).to_dict()
    assert whole["checkpoints"][1]["adds_bytes"] == 9  # they do differ
    found = analyze(paths, min_tensor_bytes=10)
    assert found.reasons[1].changes == (
        f"no difference from {name_shown(paths[0])} in the 2 tensors that were compared",
    )
    assert "2 in all with 18 B" in verdict.left_out(found)
    told = found.to_dict()
    assert told["min_tensor_bytes"] == 10
    assert [(c["small_tensors"], c["small_bytes"]) for c in told["checkpoints"]] == [(1, 9)] * 2
    nothing = analyze(paths, min_tensor_bytes=1000)
    assert nothing.reasons[1].changes == ("nothing of it was compared",)
    assert [each.sentence for each in verdict.advice(nothing)] == [
        "No tensor was compared: give a smaller --min-tensor-bytes."
    ]
    # Where nothing is left out, the word is right.
    alike = analyze([paths[0], paths[0]], min_tensor_bytes=9)
    assert alike.reasons[1].changes == (f"equals {name_shown(paths[0])}",)
    assert verdict.left_out(alike) == ""


def test_no_claim_includes_what_the_minimum_leaves_out(tmp_path: Path) -> None:
    first = {f"layers.{n}.w": bytes([n]) * 100 for n in range(4)} | {"norm": b"n" * 5}
    paths = [
        write(tmp_path / "first.safetensors", first),
        write(tmp_path / "second.safetensors", {"layers.1.w": b"\1" * 100, "norm": b"m" * 5}),
        write(tmp_path / "third.safetensors", {n: b"x" + d[1:] for n, d in first.items()}),
        write(tmp_path / "fourth.safetensors", {"other": b"o" * 100, "norm": b"n" * 5}),
    ]
    found = analyze(paths, min_tensor_bytes=10)
    assert [each.changes for each in found.reasons[1:]] == [
        ("all that was compared is there already",),
        ("every tensor that was compared changed: fine-tuned in full, or unrelated",),
        ("another model: no tensor that was compared is shared",),
    ]


BLOCK = {
    "self_attn.q_proj.weight": 8,
    "self_attn.k_proj.weight": 4,
    "self_attn.v_proj.weight": 2,
    "self_attn.o_proj.weight": 8,
    "mlp.gate_proj.weight": 16,
    "mlp.up_proj.weight": 16,
    "mlp.down_proj.weight": 16,
}


def test_a_changed_q_makes_the_fused_qkv_private(tmp_path: Path) -> None:
    base = {k: os.urandom(n) for k, n in _sized(2).items()}
    tuned = base | {"model.layers.1.self_attn.q_proj.weight": os.urandom(8)}
    a = write(tmp_path / "a.safetensors", base)
    b = write(tmp_path / "b.safetensors", tuned)
    found = analyze([a, b])
    assert found.pairs[0].shared_bytes == 140 - 8
    # k and v of block 1 are equal in both, yet their fused parameter is not.
    assert found.vllm.lost_bytes == 4 + 2
    assert found.vllm.shared_bytes == 140 - 8 - 6
    assert found.vllm.broken == 1
    kinds = {g.suffix: (g.fused, g.shared, g.broken, g.lost_bytes) for g in found.vllm.groups}
    assert kinds == {"qkv_proj": (4, 1, 1, 6), "gate_up_proj": (4, 2, 0, 0)}
    assert [layer.places[0][1] for layer in found.shared_layers] == ["model.layers.0"]


def _sized(blocks: int) -> dict[str, int]:
    return {f"model.layers.{n}.{name}": size for n in range(blocks) for name, size in BLOCK.items()}


def test_a_changed_expert_makes_the_stack_of_its_kind_private(tmp_path: Path) -> None:
    base = {
        f"model.layers.0.block_sparse_moe.experts.{expert}.{part}.weight": os.urandom(8)
        for expert in range(12)
        for part in ("w1", "w2", "w3")
    }
    changed = "model.layers.0.block_sparse_moe.experts.10.w2.weight"
    a = write(tmp_path / "a.safetensors", base)
    b = write(tmp_path / "b.safetensors", base | {changed: os.urandom(8)})
    found = analyze([a, b])
    kinds = {g.suffix: (g.fused, g.shared, g.broken, g.lost_bytes) for g in found.vllm.groups}
    assert kinds == {"w13": (2, 1, 0, 0), "w2": (2, 0, 1, 11 * 8)}


def test_experts_are_stacked_in_the_order_of_their_numbers() -> None:
    def of(order: Sequence[int]) -> Measured:
        return Measured(
            "m",
            [
                AnalyzedTensor(
                    f"mlp.experts.{n}.down_proj.weight", Fingerprint((1,), "U8", str(d)), 1
                )
                for n, d in enumerate(order)
            ],
        )

    assert fusion.survives([of(range(12)), of(range(12))]).shared_bytes == 12
    swapped = [1, 0, *range(2, 12)]
    found = fusion.survives([of(range(12)), of(swapped)])
    assert (found.shared_bytes, found.lost_bytes) == (0, 12)


def test_qwen2_half_a_billion_twice_with_the_articles_minimum() -> None:
    minimum = 4_194_304
    model = _qwen2(minimum)
    found = compare([model, model])
    assert found.pairs[0].shared_tensors == 73
    assert found.pairs[0].shared_bytes == 899_842_048
    assert (found.vllm.shared_tensors, found.vllm.shared_bytes) == (49, 899_842_048)


def _qwen2(minimum: int) -> Measured:
    shapes = {"model.embed_tokens.weight": (151_936, 896), "model.norm.weight": (896,)}
    for n in range(24):
        shapes |= {
            f"model.layers.{n}.{name}": shape
            for name, shape in {
                "self_attn.q_proj.weight": (896, 896),
                "self_attn.q_proj.bias": (896,),
                "self_attn.k_proj.weight": (128, 896),
                "self_attn.k_proj.bias": (128,),
                "self_attn.v_proj.weight": (128, 896),
                "self_attn.v_proj.bias": (128,),
                "self_attn.o_proj.weight": (896, 896),
                "mlp.gate_proj.weight": (4864, 896),
                "mlp.up_proj.weight": (4864, 896),
                "mlp.down_proj.weight": (896, 4864),
                "input_layernorm.weight": (896,),
                "post_attention_layernorm.weight": (896,),
            }.items()
        }
    tensors = [
        AnalyzedTensor(name, Fingerprint(shape, "BF16", name), 2 * int(numpy.prod(shape)))
        for name, shape in shapes.items()
    ]
    large = [tensor for tensor in tensors if tensor.nbytes >= minimum]
    return Measured("qwen2", large, [t.name for t in tensors if t.nbytes < minimum])


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.7.mlp.experts.3.up_proj.weight", "model.layers.7"),
        ("transformer.h.11.attn.c_attn.bias", "transformer.h.11"),
        ("encoder.layer.0.output.dense.weight", "encoder.layer.0"),
        ("unet/down_blocks.0.resnets.1.conv1.weight", "unet/down_blocks.0"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("lm_head.weight", "lm_head"),
        ("scale", "scale"),
    ],
)
def test_the_layer_of_a_tensor(name: str, layer: str) -> None:
    assert split(name)[0] == layer


def test_a_layer_moved_to_another_number_is_still_shared_whole(tmp_path: Path) -> None:
    first = {"h.0.a": b"aa", "h.0.b": b"bb", "h.1.a": b"cc", "h.1.b": b"dd"}
    second = {"h.0.a": b"cc", "h.0.b": b"dd", "h.1.a": b"aa", "h.1.b": b"xx"}
    paths = [
        write(tmp_path / "1.safetensors", first),
        write(tmp_path / "2.safetensors", second),
    ]
    (layer,) = analyze(paths).shared_layers
    assert layer.places == ((paths[0], "h.1"), (paths[1], "h.0"))
    assert (layer.tensors, layer.nbytes) == (2, 4)


def test_every_byte_is_read_once_and_a_second_name_costs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    content = {"large": os.urandom(9 << 20), "a": os.urandom(1000), "b": os.urandom(3 << 20)}
    write(file, content)
    link = tmp_path / "link.safetensors"
    link.symlink_to(file)
    size = sum(map(len, content.values()))
    with reads.counted(file) as seen:
        found = analyze([file, link, file])
    assert seen.data_bytes() == size == found.bytes_read
    assert not seen.twice()
    assert found.total_bytes == 3 * size
    assert found.unique_bytes == size


def test_what_was_hashed_before_is_not_read_again(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write(file, {"a": os.urandom(5 << 20), "b": os.urandom(100)})
    index = HintIndex(tmp_path / "hints.sqlite")
    time.sleep(2.1)  # a hint is not trusted for a file written less than 2 s before it was read
    first = analyze([file], hints=index)
    with reads.counted(file) as seen:
        second = analyze([file], hints=index)
    heard = _Listener()
    analyze([file, file], hints=index, progress=heard)
    # Nothing is hashed, so nothing makes progress.
    assert (heard.totals[0], heard.totals[-1], heard.done) == (first.total_bytes, 0, 0)
    assert (second.bytes_read, second.bytes_hashed, seen.data_bytes()) == (0, 0, 0)
    assert first.to_dict() | {"bytes_read": 0, "bytes_hashed": 0} == second.to_dict()


class _Listener:
    """Remembers what it hears."""

    def __init__(self) -> None:
        self.totals: list[int] = []
        self.done = 0

    def start(self, total_bytes: int) -> None:
        self.totals.append(total_bytes)

    def advance(self, nbytes: int) -> None:
        self.done += nbytes


class _Meddler:
    """Writes to a file while it is being hashed."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def start(self, total_bytes: int) -> None: ...

    def advance(self, nbytes: int) -> None:
        with self.file.open("r+b") as opened:
            opened.seek(-1, os.SEEK_END)
            opened.write(b"!")


def test_a_file_written_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write(file, {"a": b"a" * 1000})
    with pytest.raises(ChangedFileError, match=r"model\.safetensors"):
        analyze([file], progress=_Meddler(file))


def test_what_cannot_be_analyzed_is_an_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "liar.safetensors").write_bytes((10**9).to_bytes(8, "little") + b"{}")
    with pytest.raises(FormatError):
        analyze([tmp_path / "liar.safetensors"])
    with pytest.raises(CheckpointNotFoundError):
        analyze([tmp_path / "nothing.safetensors"])
    with pytest.raises(StoreError, match="store"):
        analyze(["store://base"], store=tmp_path)
    with pytest.raises(ConfigError, match="blake3"):
        analyze(["store://base"], store=tmp_path, hash_algorithm="xxh3_128")
    with pytest.raises(ConfigError, match="min_tensor_bytes"):
        analyze([tmp_path], min_tensor_bytes=-1)
    with pytest.raises(ConfigError, match="blake3"):
        analyze([tmp_path], hash_algorithm="md5")


def test_all_algorithms_count_alike(tmp_path: Path) -> None:
    a = write(tmp_path / "a.safetensors", {"x": b"1" * 50, "y": b"2" * 50})
    b = write(tmp_path / "b.safetensors", {"x": b"1" * 50, "y": b"3" * 50})
    results = {
        analyze([a, b], hash_algorithm=algorithm).unique_bytes
        for algorithm in ("blake3", "blake2b", "xxh3_128", "xxhash64")
    }
    assert results == {150}


def test_tensors_of_no_bytes_count_as_tensors(tmp_path: Path) -> None:
    a = write(tmp_path / "a.safetensors", {"empty": b"", "full": b"1"})
    found = analyze([a, a])
    assert (found.pairs[0].shared_tensors, found.pairs[0].shared_bytes) == (2, 1)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), max_size=30))
def test_runs_cover_all_tensors_in_order_and_fit_the_buffer(parts: list[tuple[int, int]]) -> None:
    specs, at = [], 8
    for number, (size, hole) in enumerate(parts):
        at += hole
        specs.append(TensorSpec(str(number), "U8", (size,), at, size))
        at += size
    with mock.patch.multiple(digests, _PIECE_BYTES=16, _GAP_BYTES=4):
        cut = list(digests.runs(specs))
    assert [spec for run in cut for spec in run] == specs
    for run in cut:
        stop = run[-1].start + run[-1].nbytes
        assert len(run) == 1 or stop - run[0].start <= 16
        assert all(b.start - a.start - a.nbytes <= 4 for a, b in pairwise(run))


NAMES = [
    *(f"h.{n}.{p}.weight" for n in (0, 1) for p in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"h.0.experts.{n}.{p}.weight" for n in (0, 1) for p in ("up_proj", "down_proj")),
    "embed.weight",
]
FUSED_BY_HAND = {
    **{f"h.{n}.{p}.weight": f"h.{n}.qkv" for n in (0, 1) for p in ("q_proj", "k_proj", "v_proj")},
    **{f"h.0.experts.{n}.up_proj.weight": "w13" for n in (0, 1)},
    **{f"h.0.experts.{n}.down_proj.weight": "w2" for n in (0, 1)},
}
contents = st.dictionaries(
    st.sampled_from(NAMES), st.sampled_from([b"", b"1", b"22", b"333", b"4" * 20, b"5" * 40])
)


@settings(max_examples=60, deadline=None)
@given(st.lists(contents, min_size=1, max_size=4), st.sampled_from([0, 0, 2, 20]))
def test_the_numbers_of_any_checkpoints_are_those_of_a_naive_count(
    checkpoints: list[dict[str, bytes]], minimum: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(digests, "_PIECE_BYTES", 16):
        paths = [
            write(Path(folder) / f"{number}.safetensors", content)
            for number, content in enumerate(checkpoints)
        ]
        found = analyze(paths, min_tensor_bytes=minimum)
    large = [{k: v for k, v in c.items() if len(v) >= minimum} for c in checkpoints]
    everything = [data for content in large for data in content.values()]
    assert found.total_bytes == sum(map(len, everything))
    assert found.unique_bytes == sum(map(len, set(everything)))
    expected = [Counter(a.values()) & Counter(b.values()) for a, b in combinations(large, 2)]
    assert [pair.shared_tensors for pair in found.pairs] == [c.total() for c in expected]
    assert [pair.shared_bytes for pair in found.pairs] == [
        sum(len(data) * n for data, n in common.items()) for common in expected
    ]
    assert found.vllm.shared_bytes == _naive_final_bytes(checkpoints, minimum)


def _naive_final_bytes(checkpoints: list[dict[str, bytes]], minimum: int) -> int:
    """Of every final tensor, each model needs its own copies and all share the most of them."""
    finals = [Counter(_naive_finals(content, minimum)) for content in checkpoints]
    kinds = {kind for counts in finals for kind in counts}
    return sum(
        sum(map(len, kind)) * (sum(c[kind] for c in finals) - max(c[kind] for c in finals))
        for kind in kinds
    )


def _naive_finals(content: dict[str, bytes], minimum: int) -> list[tuple[bytes, ...]]:
    groups: defaultdict[str, list[bytes]] = defaultdict(list)
    for name in sorted(content):
        groups[FUSED_BY_HAND.get(name, name)].append(content[name])
    return [tuple(g) for g in groups.values() if min(map(len, g)) >= minimum]
