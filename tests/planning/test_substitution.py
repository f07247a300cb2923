"""Chosen layers of a fine-tune are its base's, byte for byte; everything else stays its own."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models import kinds, tiny_checkpoints
from tensor_dedup import ConfigError, FormatError, Store, UnsupportedError
from tensor_dedup.analyze import analyze
from tensor_dedup.errors import ChangedFileError, CheckpointNotFoundError
from tensor_dedup.formats.markers import KEY, content_digest
from tensor_dedup.loader.checkpoint_io.hints import HintIndex
from tensor_dedup.planning.substitution import substitute
from tensor_dedup.training import CheckpointStore

BLOCKS = 4
Weights = dict[str, torch.Tensor]


def weights(seed: int, *, rows: int = 40) -> Weights:
    draw = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(torch.bfloat16)

    found = {"model.embed_tokens.weight": made(rows, 16), "lm_head.weight": made(rows, 16)}
    for block in range(BLOCKS):
        found[f"model.layers.{block}.attn.weight"] = made(16, 16)
        found[f"model.layers.{block}.mlp.weight"] = made(32, 16)
        found[f"model.layers.{block}.norm.weight"] = torch.ones(16, dtype=torch.bfloat16)
    return found | {"model.norm.weight": made(16)}


def moved(base: Weights) -> Weights:
    """Block N moves by N + 1 per mille, everything else by a hundred."""
    found = {}
    for name, tensor in base.items():
        block = int(name.split(".")[2]) + 1 if ".layers." in name else 100
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))
        same = "norm" in name
        found[name] = tensor if same else (tensor + block / 1000 * noise).to(tensor.dtype)
    return found


def saved(folder: Path, held: Weights, **metadata: str) -> Path:
    folder.mkdir()
    safetensors.torch.save_file(held, folder / "model.safetensors", {"format": "pt", **metadata})
    (folder / "config.json").write_text('{"layers": 4}')
    return folder


def tensors(folder: Path) -> dict[str, bytes]:
    return {
        name: tensor.contiguous().view(torch.uint8).numpy().tobytes()
        for file in sorted(folder.rglob("*.safetensors"))
        for name, tensor in safetensors.torch.load_file(file).items()
    }


def metadata_of(folder: Path) -> dict[str, str]:
    file: Any = safetensors.safe_open(folder / "model.safetensors", "pt")
    found: dict[str, str] = file.metadata()
    return found


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return saved(tmp_path / "base", weights(1))


@pytest.fixture
def tune(tmp_path: Path) -> Path:
    return saved(tmp_path / "tune", moved(weights(1)), author="me")


def mixed(base: Path, tune: Path, output: Path, taken: set[str]) -> None:
    """`output` has the base's bytes in `taken`, and the fine-tune's elsewhere."""
    old, new, found = tensors(base), tensors(tune), tensors(output)
    assert found == {name: old[name] if name in taken else new[name] for name in new}


def test_chosen_blocks_are_the_bases_and_shared_with_it(
    base: Path, tune: Path, tmp_path: Path
) -> None:
    before = tensors(tune)
    done = substitute(base, tune, tmp_path / "out", layers="0-1,3")
    taken = {name for name in before if ".layers." in name and ".layers.2." not in name}
    assert before == tensors(tune)
    assert taken
    assert any(before[name] != tensors(base)[name] for name in taken)
    mixed(base, tune, tmp_path / "out", taken)
    compared = analyze([base, tmp_path / "out"])
    assert done.adds_bytes == compared.contributions[1].adds_bytes < done.tune_adds_bytes
    assert done.tune_adds_bytes == analyze([base, tune]).contributions[1].adds_bytes
    assert [layer.name for layer in done.layers] == [f"model.layers.{n}" for n in (0, 1, 3)]
    assert {name for layer in done.layers for name in layer.tensors} == taken
    assert json.loads(json.dumps(done.to_dict()))["adds_bytes"] == done.adds_bytes
    # A distance is relative, and block N moved by N + 1 per mille of numbers of size one.
    for layer, block in zip(done.layers, (1, 2, 4), strict=True):
        assert layer.distance == pytest.approx(block / 1000, rel=0.5)


def test_all_layers_are_the_base_and_none_the_fine_tune(
    base: Path, tune: Path, tmp_path: Path
) -> None:
    assert tensors(base) != tensors(tune)
    everything = substitute(base, tune, tmp_path / "all", layers="*")
    assert tensors(tmp_path / "all") == tensors(base)
    assert everything.adds_bytes == 0
    nothing = substitute(base, tune, tmp_path / "none", layers="")
    assert tensors(tmp_path / "none") == tensors(tune)
    assert nothing.adds_bytes == nothing.tune_adds_bytes > 0
    assert (tmp_path / "all" / "config.json").read_text() == '{"layers": 4}'


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    blocks=st.sets(st.integers(0, BLOCKS - 1)),
    more=st.sets(st.sampled_from(["*embed*", "lm_head", "*.mlp.weight", "model.norm"])),
)
def test_any_choice_is_exact(
    tmp_path_factory: pytest.TempPathFactory, blocks: set[int], more: set[str]
) -> None:
    folder = tmp_path_factory.mktemp("choice")
    base, tune = saved(folder / "base", weights(1)), saved(folder / "tune", moved(weights(1)))
    substitute(base, tune, folder / "out", layers=",".join([*map(str, blocks), *more]))
    taken = {
        name
        for name in tensors(tune)
        if any(f".layers.{block}." in name for block in blocks)
        or ("*embed*" in more and "embed" in name)
        or ("lm_head" in more and name.startswith("lm_head"))
        or ("*.mlp.weight" in more and name.endswith(".mlp.weight"))
        or ("model.norm" in more and name == "model.norm.weight")
    }
    mixed(base, tune, folder / "out", taken)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.35, 0.7, 1.0])
def test_the_budget_is_kept_and_what_moved_least_is_taken(
    base: Path, tune: Path, tmp_path: Path, share: float
) -> None:
    alone = analyze([base, tune]).contributions[1].adds_bytes
    budget = int(share * alone)
    done = substitute(base, tune, tmp_path / "out", budget=budget)
    assert (
        analyze([base, tmp_path / "out"]).contributions[1].adds_bytes == done.adds_bytes <= budget
    )
    blocks = [int(each.name[-1]) for each in done.layers if ".layers." in each.name]
    assert blocks == list(range(len(blocks)))  # the first ones have moved least
    # Nothing was taken that could have stayed.
    for layer in done.layers:
        assert done.adds_bytes + layer.nbytes > budget - 2 * 16 * BLOCKS


def test_a_budget_that_cannot_be_kept_says_what_can(tmp_path: Path, base: Path) -> None:
    grown = saved(tmp_path / "grown", moved(weights(1, rows=44)))
    with pytest.raises(ConfigError, match=r"still adds .* give a larger one") as caught:
        substitute(base, grown, tmp_path / "out", budget=10)
    least = caught.value.facts["least"]
    assert not (tmp_path / "out").exists()
    assert substitute(base, grown, tmp_path / "out", budget=least).adds_bytes == least


def test_shards_links_and_other_files(base: Path, tune: Path, tmp_path: Path) -> None:
    held = safetensors.torch.load_file(tune / "model.safetensors")
    sharded = tmp_path / "hub" / "models--me--tune" / "snapshots" / "abc"
    blobs = tmp_path / "hub" / "models--me--tune" / "blobs"
    sharded.mkdir(parents=True)
    blobs.mkdir()
    where: dict[str, str] = {}
    for number, names in enumerate((sorted(held)[::2], sorted(held)[1::2])):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        safetensors.torch.save_file({name: held[name] for name in names}, blobs / str(number))
        (sharded / file).symlink_to(os.path.relpath(blobs / str(number), sharded))
        where |= dict.fromkeys(names, file)
    index = json.dumps({"metadata": {}, "weight_map": where})
    (sharded / "model.safetensors.index.json").write_text(index)
    (sharded / "pytorch_model.bin").write_bytes(b"the fine-tune's own weights")
    (sharded / "pytorch_model.bin.index.json").write_text("{}")
    (sharded / "model.gguf.incomplete").write_bytes(b"its beginning")
    (sharded / "tokenizer").mkdir()
    (sharded / "tokenizer" / "vocab.txt").write_text("a\nb")
    (sharded / ".cache").write_text("hidden")
    before = {path: path.read_bytes() for path in blobs.iterdir()}
    done = substitute(base, sharded, tmp_path / "out", layers="1", hints=HintIndex())
    mixed(base, sharded, tmp_path / "out", {n for n in held if ".layers.1." in n})
    assert {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*.*")} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer/vocab.txt",
    }
    assert not any(p.is_symlink() for p in (tmp_path / "out").rglob("*"))
    assert done.left_out == (
        "model.gguf.incomplete",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    )
    assert before == {path: path.read_bytes() for path in blobs.iterdir()}
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".partial")]


OVERLAID = "model.layers.1.mlp.weight"
SHARD, OVERLAY = "model-00001-of-00001.safetensors", "overlay.safetensors"


def overlaid(tune: Path, folder: Path, *, old: torch.Tensor, counts: str = OVERLAY) -> Path:
    """The fine-tune with a second tensor of one name; the index names that in `counts`."""
    folder.mkdir()
    held = safetensors.torch.load_file(tune / "model.safetensors")
    where = dict.fromkeys(held, SHARD) | {"lm_head.weight": OVERLAY, OVERLAID: counts}
    more = {name: held.pop(name) for name in ("lm_head.weight", OVERLAID)}
    safetensors.torch.save_file(held | {OVERLAID: old}, folder / SHARD)
    safetensors.torch.save_file(more, folder / OVERLAY)
    index = json.dumps({"metadata": {}, "weight_map": where})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


@pytest.mark.parametrize("counts", [SHARD, OVERLAY])
def test_every_copy_of_a_tensor_is_replaced_whichever_the_index_names(
    base: Path, tune: Path, tmp_path: Path, counts: str
) -> None:
    old = torch.ones(32, 16, dtype=torch.bfloat16)
    overlay = overlaid(tune, tmp_path / "overlay", old=old, counts=counts)
    (found,) = analyze([overlay]).checkpoints
    assert [each.differs for each in found.not_indexed] == [True]
    out = tmp_path / "out"
    substitute(base, overlay, out, layers="1")
    taken = safetensors.torch.load_file(base / "model.safetensors")[OVERLAID]
    for file in (SHARD, OVERLAY):
        assert torch.equal(safetensors.torch.load_file(out / file)[OVERLAID], taken)
    # A copy of a tensor that was not chosen stays what it is.
    substitute(base, overlay, tmp_path / "other", layers="0")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "other" / SHARD)[OVERLAID], old)


@pytest.mark.parametrize(
    "old", [torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(32, 16, dtype=torch.float16)]
)
def test_copies_of_another_dtype_or_shape_are_not_replaced(
    base: Path, tune: Path, tmp_path: Path, old: torch.Tensor
) -> None:
    overlay = overlaid(tune, tmp_path / "overlay", old=old)
    with pytest.raises(UnsupportedError, match=f"{OVERLAID}: .* in {OVERLAY} and .* in {SHARD}"):
        substitute(base, overlay, tmp_path / "out", layers="1")
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []
    substitute(base, overlay, tmp_path / "out", layers="0")


def test_the_file_says_which_tensors_come_from_which_base(
    base: Path, tune: Path, tmp_path: Path
) -> None:
    substitute(base, tune, tmp_path / "out", layers="2,lm_head")
    metadata = metadata_of(tmp_path / "out")
    assert (metadata["format"], metadata["author"]) == ("pt", "me")
    said = json.loads(metadata[KEY])
    assert said["version"] == 1
    assert said["base"]["name"] == "base"
    assert said["base"]["digest"] == content_digest(
        (tensor.name, tensor.fingerprint.digest)
        for tensor in analyze([base]).checkpoints[0].tensors
    )
    assert said["tensors"] == {
        "lm_head.weight": None,
        **{f"model.layers.2.{part}.weight": None for part in ("attn", "mlp", "norm")},
    }
    assert KEY not in metadata_of(tune)


def test_wrapped_names_find_their_counterparts(base: Path, tmp_path: Path) -> None:
    held = {f"module.{name}": tensor for name, tensor in moved(weights(1)).items()}
    wrapped = saved(tmp_path / "wrapped", held)
    done = substitute(base, wrapped, tmp_path / "out", layers="0")
    old, found = tensors(base), tensors(tmp_path / "out")
    assert len(done.layers[0].tensors) == 3
    for name, data in found.items():
        plain = name.removeprefix("module.")
        assert (data == old[plain]) == (".layers.0." in name or "norm" in name)
    names = json.loads(metadata_of(tmp_path / "out")[KEY])["tensors"]
    assert names["module.model.layers.0.mlp.weight"] == "model.layers.0.mlp.weight"


@pytest.mark.parametrize("outer", ["tune", "base"])
def test_a_model_with_a_head_finds_the_one_without(tmp_path: Path, outer: str) -> None:
    """As BertForSequenceClassification beside BertModel: one of them has a name around it."""
    plain = {name.removeprefix("model."): tensor for name, tensor in weights(1).items()}
    del plain["lm_head.weight"]
    tuned = {name: tensor + tensor.new_tensor(1) for name, tensor in plain.items()}
    with_head = {f"bert.{name}": tensor for name, tensor in (plain, tuned)[outer == "tune"].items()}
    with_head["classifier.weight"] = torch.ones(2, 16)
    pair = (plain, with_head) if outer == "tune" else (with_head, tuned)
    base, tune = (saved(tmp_path / name, held) for name, held in zip(("b", "t"), pair, strict=True))
    done = substitute(base, tune, tmp_path / "out", layers="0-1")
    old, new, found = tensors(base), tensors(tune), tensors(tmp_path / "out")
    assert len(done.layers) == 2
    for name, data in found.items():
        its = name.removeprefix("bert.") if outer == "tune" else f"bert.{name}"
        taken = name.removeprefix("bert.").startswith(("layers.0.", "layers.1."))
        assert data == (old[its] if taken else new[name])


def test_two_towers_of_one_shape_are_no_wrappers(base: Path, tmp_path: Path) -> None:
    """Which of them is the base's is not for a guess."""
    held = {
        f"{tower}.{name.removeprefix('model.')}": tensor
        for tower in ("vision", "text")
        for name, tensor in moved(weights(1)).items()
    }
    with pytest.raises(UnsupportedError, match="the base has no"):
        substitute(base, saved(tmp_path / "both", held), tmp_path / "out", layers="text.layers.0")


def changed(held: Weights, what: str) -> Weights:
    name = "model.layers.1.mlp.weight"
    if what == "quantised":
        held[name] = held[name].to(torch.int8)
        held["model.layers.1.mlp.weight_scale"] = torch.ones(1)
    elif what == "merged":
        held["model.layers.1.qkv.weight"] = held.pop("model.layers.1.attn.weight")
    elif what == "less":
        del held[name]
    elif what == "shape":
        held[name] = held[name][:30].clone()
    else:
        held[name] = held[name].float()
    return held


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("quantised", "the base has no model.layers.1.mlp.weight_scale"),
        ("merged", "the base has no model.layers.1.qkv.weight"),
        ("less", "the fine-tune has no model.layers.1.mlp.weight"),
        ("shape", r"BF16 \[32, 16\] in the base and BF16 \[30, 16\]"),
        ("dtype", r"BF16 \[32, 16\] in the base and F32 \[32, 16\]"),
    ],
)
def test_what_cannot_be_taken_is_refused_with_the_reason(
    base: Path, tmp_path: Path, what: str, why: str
) -> None:
    other = saved(tmp_path / "other", changed(moved(weights(1)), what))
    with pytest.raises(UnsupportedError, match=why):
        substitute(base, other, tmp_path / "out", layers="0-2")
    assert not (tmp_path / "out").exists()
    substitute(base, other, tmp_path / "out", layers="0,2")
    mixed(base, other, tmp_path / "out", {n for n in tensors(other) if n[13] in "02" and "s." in n})


def quantised(held: Weights) -> Weights:
    """With int8 in place of the weights of each MLP."""
    found = {}
    for name, tensor in held.items():
        if not name.endswith("mlp.weight"):
            found[name] = tensor
            continue
        scale = tensor.float().abs().amax() / 127
        found[name] = (tensor.float() / scale).round().to(torch.int8)
        found[f"{name}_scale"] = scale.reshape(1)
    return found


def test_layers_that_are_quantised_alike_are_taken_with_their_scales(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", quantised(weights(1)))
    tune = saved(tmp_path / "tune", quantised(moved(weights(1))))
    substitute(base, tune, tmp_path / "out", layers="1-2")
    taken = {n for n in tensors(tune) if ".layers.1." in n or ".layers.2." in n}
    assert {f"model.layers.{n}.mlp.weight_scale" for n in (1, 2)} < taken
    mixed(base, tune, tmp_path / "out", taken)
    shared = analyze([base, tmp_path / "out"]).pairs[0].shared_tensors
    assert shared >= len(taken)


def test_codes_without_their_scales_are_refused(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", quantised(weights(1)))
    tune = saved(tmp_path / "tune", quantised(moved(weights(1))))
    with pytest.raises(UnsupportedError, match=r"without model\.layers\.0\.mlp\.weight_scale"):
        substitute(base, tune, tmp_path / "out", layers="*.mlp.weight")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stored", [False, True])
def test_what_is_quantised_with_other_settings_is_refused(tmp_path: Path, stored: bool) -> None:
    base: Path | str = saved(tmp_path / "base", quantised(weights(1)))
    tune = saved(tmp_path / "tune", quantised(moved(weights(1))))
    for folder, kind in ((tmp_path / "base", "gptq"), (tune, "gptq_v2")):
        said = {"quantization_config": {"bits": 8, "checkpoint_format": kind}}
        (folder / "config.json").write_text(json.dumps(said))
    if stored:
        with Store.open(tmp_path / "store") as store:
            store.import_(tmp_path / "base", "base")
        base = "store://base"
    with pytest.raises(UnsupportedError, match=r'checkpoint_format "gptq" and "gptq_v2"'):
        substitute(base, tune, tmp_path / "out", layers="1", store=tmp_path / "store")
    substitute(base, tune, tmp_path / "out", layers="*.attn.*", store=tmp_path / "store")
    (tune / "config.json").write_bytes((tmp_path / "base" / "config.json").read_bytes())
    substitute(base, tune, tmp_path / "all", layers="*", store=tmp_path / "store")
    assert tensors(tmp_path / "all") == tensors(tmp_path / "base")


def test_a_tied_fine_tune_stays_tied(base: Path, tmp_path: Path) -> None:
    held = moved(weights(1))
    del held["lm_head.weight"]
    tune = saved(tmp_path / "tied", held)
    with pytest.raises(
        ConfigError, match="no tensor, and no layer that has tensors, is called 'lm_head'"
    ):
        substitute(base, tune, tmp_path / "out", layers="lm_head")
    substitute(base, tune, tmp_path / "out", layers="*")
    old = tensors(base)
    del old["lm_head.weight"]
    assert tensors(tmp_path / "out") == old


def test_a_base_that_ties_its_head_has_none_to_take(tune: Path, tmp_path: Path) -> None:
    held = weights(1)
    del held["lm_head.weight"]
    tied = saved(tmp_path / "tied", held)
    with pytest.raises(UnsupportedError, match=r"the base has no lm_head\.weight"):
        substitute(tied, tune, tmp_path / "out", layers="lm_head")


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ("4", r"layers\.4 has no tensors, or is not there; there are 0-3 in .*layers: give some"),
        ("3-1", r"it counts backwards; there are 0-3 in .*layers: write '1-3'"),
        ("encoder.0-1", "no numbered blocks in encoder; give names of layers, as "),
        ("lm_haed", "did you mean 'lm_head'"),
        ("*nothing*", "no tensor, and no layer that has tensors"),
    ],
)
def test_a_layer_that_is_not_there_is_wrong_use(
    base: Path, tune: Path, tmp_path: Path, layers: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        substitute(base, tune, tmp_path / "out", layers=layers)
    assert not (tmp_path / "out").exists()


def test_numbers_of_several_stacks_are_asked_for(tmp_path: Path) -> None:
    held = {f"{side}.block.{n}.w": torch.ones(4) * n for side in ("enc", "dec") for n in range(3)}
    base, tune = (
        saved(tmp_path / "b", held),
        saved(tmp_path / "t", {k: -v for k, v in held.items()}),
    )
    with pytest.raises(ConfigError, match=r"say which: dec\.block\.1-2, enc\.block\.1-2"):
        substitute(base, tune, tmp_path / "out", layers="1-2")
    substitute(base, tune, tmp_path / "out", layers="enc.block.1-2")
    mixed(base, tune, tmp_path / "out", {"enc.block.1.w", "enc.block.2.w"})


def test_outputs_that_are_there_or_lie_within_are_refused(base: Path, tune: Path) -> None:
    for output in (base, tune / "below", tune):
        with pytest.raises(ConfigError):
            substitute(base, tune, output, layers="0")
    with pytest.raises(ConfigError, match="either"):
        substitute(base, tune, base.parent / "out")
    with pytest.raises(CheckpointNotFoundError):
        substitute(base, tune / "nowhere", base.parent / "out", layers="0")


def test_other_formats_and_damage_are_errors(base: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    torch.save(moved(weights(1)), pickled / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match="no safetensors file"):
        substitute(base, pickled, tmp_path / "out", layers="0")
    cut = saved(tmp_path / "cut", moved(weights(1)))
    os.truncate(cut / "model.safetensors", 900)
    with pytest.raises(FormatError):
        substitute(base, cut, tmp_path / "out", layers="0")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "cut", "pickled"]


def test_a_base_may_be_pickled_or_stored(base: Path, tune: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    torch.save(weights(1), pickled / "pytorch_model.bin")
    with Store.open(tmp_path / "store") as store:
        store.import_(base, "base")
    for number, origin in enumerate((str(pickled), "store://base")):
        output = tmp_path / f"out-{number}"
        substitute(origin, tune, output, layers="0", store=tmp_path / "store")
        mixed(base, tune, output, {n for n in tensors(tune) if ".layers.0." in n})


def test_a_fine_tune_may_be_stored(base: Path, tune: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        store.import_(tune, "tune")
    output = tmp_path / "in" / "out"
    done = substitute(base, "store://tune", output, layers="0", store=tmp_path / "store")
    mixed(base, tune, output, {n for n in tensors(tune) if ".layers.0." in n})
    assert (output / "config.json").read_bytes() == (tune / "config.json").read_bytes()
    assert done.tune == "store://tune"
    expected = substitute(base, tune, tmp_path / "expected", layers="0")
    assert done.adds_bytes == expected.adds_bytes
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["out"]


def test_what_has_to_be_exported_is_refused_with_the_command(
    base: Path, tune: Path, tmp_path: Path
) -> None:
    with Store.open(tmp_path / "store") as store:
        store.import_(tune, "tune")
        CheckpointStore(store, "run", weights="model").save({"model": moved(weights(1))}, 7)
    for name, samples in (("tune", ["a text"]), ("run@7", [])):
        command = f"tensor-dedup export {name} DIR --store {tmp_path / 'store'}"
        with pytest.raises(ConfigError, match=f"run `{command}`, and give") as e:
            substitute(
                *(base, f"store://{name}", tmp_path / "x"),
                layers="0",
                samples=samples,
                store=tmp_path / "store",
            )
        assert e.value.exit_status == 2
    assert not (tmp_path / "x").exists()


def test_a_stale_hint_never_makes_a_wrong_file(
    base: Path, tune: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digests are those of other bytes: the copy is read again, and compared."""
    code: Any = sys.modules["tensor_dedup.planning.substitution.substitute"]
    write_files = code.write_files

    def changing(*arguments: Any) -> Any:
        safetensors.torch.save_file(weights(9), base / "model.safetensors", {"format": "pt"})
        return write_files(*arguments)

    monkeypatch.setattr(code, "write_files", changing)
    with pytest.raises(ChangedFileError, match="changed while it was being read"):
        substitute(base, tune, tmp_path / "out", layers="0")
    assert not (tmp_path / "out").exists()


def test_numbers_that_are_none_are_infinitely_far(base: Path, tmp_path: Path) -> None:
    held = moved(weights(1))
    held["model.layers.0.mlp.weight"][0, 0] = float("nan")
    broken = saved(tmp_path / "broken", held)
    done = substitute(base, broken, tmp_path / "out", layers="0-1")
    assert [layer.distance is None for layer in done.layers] == [True, False]
    json.dumps(done.to_dict(), allow_nan=False)
    alone = analyze([base, broken]).contributions[1].adds_bytes
    chosen = substitute(base, broken, tmp_path / "less", budget=alone // 2).layers
    assert chosen
    assert "model.layers.0" not in {layer.name for layer in chosen}


TEXTS = ["w0 w1 w2 w3 w4 w5", "w7 w7 w7", "w9 w8 w7 w6 w5 w4 w3 w2 w1"]
MOVED = {".0.": 0.02, ".1.": 0.001, ".2.": 0.005}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base with a tokenizer, and a fine-tune whose blocks have moved by `MOVED`."""
    folder = tmp_path_factory.mktemp("models")
    base = kinds.with_tokenizer(tiny_checkpoints.make("llama", folder).base)
    tune = folder / "tune"
    shutil.copytree(base, tune)
    (file,) = tune.glob("*.safetensors")
    held = safetensors.torch.load_file(file)
    for name, tensor in held.items():
        if "proj" in name:
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5))
            held[name] = (
                tensor + next(far for part, far in MOVED.items() if part in name) * noise
            ).to(tensor.dtype)
    safetensors.torch.save_file(held, file, {"format": "pt"})
    return base, tune


def outputs(path: Path) -> list[torch.Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return [model.eval()(**tokenizer(text, return_tensors="pt")).logits for text in TEXTS]


def apart(new: list[torch.Tensor], old: list[torch.Tensor]) -> float:
    pairs = list(zip(new, old, strict=True))
    moved = sum(float((a - b).double().square().sum()) for a, b in pairs)
    return float((moved / sum(float(b.double().square().sum()) for _, b in pairs)) ** 0.5)


def test_how_far_outputs_move_is_what_the_new_checkpoint_says(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    base, tune = models
    done = substitute(base, tune, tmp_path / "out", layers="0-1", samples=TEXTS)
    expected = apart(outputs(tmp_path / "out"), outputs(tune))
    assert done.outputs is not None
    assert done.outputs.samples == len(TEXTS)
    assert done.outputs.distance == pytest.approx(expected, rel=1e-4)
    assert expected > 0.001
    alone = [layer.output_distance for layer in done.layers]
    assert [*map(bool, alone)] == [True, True]
    everything = substitute(base, tune, tmp_path / "all", layers="*", samples=TEXTS)
    assert everything.outputs is not None
    assert everything.outputs.distance == pytest.approx(apart(outputs(base), outputs(tune)))
    nothing = substitute(base, tune, tmp_path / "none", layers="", samples=TEXTS)
    assert nothing.outputs is not None
    assert (nothing.outputs.distance, nothing.outputs.agreement) == (0.0, 1.0)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base and a fine-tune of it whose files hold the tied embedding and head both."""
    folder = tmp_path_factory.mktemp("tied")
    base = kinds.with_tokenizer(tiny_checkpoints.make("llama_tied", folder).base)
    tune = shutil.copytree(base, folder / "tune")
    for path, far in ((base, 0.0), (tune, 0.02)):
        (file,) = path.glob("*.safetensors")
        held = safetensors.torch.load_file(file)
        for name, tensor in held.items():
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5))
            held[name] = (tensor + far * noise).to(tensor.dtype)
        assert "lm_head.weight" not in held
        held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
        safetensors.torch.save_file(held, file, {"format": "pt"})
    return base, tune


@pytest.mark.parametrize("layers", ["lm_head", "*embed*", "lm_head,*embed*"])
def test_tied_weights_move_outputs_as_the_new_checkpoint_does(
    tied: tuple[Path, Path], tmp_path: Path, layers: str
) -> None:
    base, tune = tied
    done = substitute(base, tune, tmp_path / "out", layers=layers, samples=TEXTS)
    expected = apart(outputs(tmp_path / "out"), outputs(tune))
    assert expected > 0.001
    assert done.outputs is not None
    assert done.outputs.distance == pytest.approx(expected, rel=1e-4)


def test_a_head_that_only_the_model_has_follows_its_embedding(
    tied: tuple[Path, Path], tmp_path: Path
) -> None:
    base, tune = (shutil.copytree(each, tmp_path / each.name) for each in tied)
    for each in (base, tune):
        (file,) = each.glob("*.safetensors")
        held = safetensors.torch.load_file(file)
        del held["lm_head.weight"]
        safetensors.torch.save_file(held, file, {"format": "pt"})
    done = substitute(base, tune, tmp_path / "out", layers="*embed*", samples=TEXTS)
    assert done.outputs is not None
    expected = apart(outputs(tmp_path / "out"), outputs(tune))
    assert done.outputs.distance == pytest.approx(expected, rel=1e-4)
    assert expected > 0.001


def broken(path: Path, copy: Path, name: str) -> Path:
    """A copy of a checkpoint, with a tensor that has a NaN."""
    shutil.copytree(path, copy)
    (file,) = copy.glob("*.safetensors")
    held = safetensors.torch.load_file(file)
    held[name][0, 0] = float("nan")
    safetensors.torch.save_file(held, file, {"format": "pt"})
    return copy


def test_outputs_of_a_fine_tune_that_are_no_numbers_are_refused(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    base, tune = models
    nan = broken(tune, tmp_path / "nan", "model.layers.2.mlp.up_proj.weight")
    with pytest.raises(UnsupportedError, match=r"outputs on sample 1 \(w0 w1 .* not all finite"):
        substitute(base, nan, tmp_path / "out", layers="0", samples=TEXTS)
    assert not (tmp_path / "out").exists()


def test_a_base_that_makes_outputs_no_numbers_is_infinitely_far(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    base, tune = models
    nan = broken(base, tmp_path / "nan", "model.layers.1.mlp.up_proj.weight")
    done = substitute(nan, tune, tmp_path / "out", layers="0-1", samples=TEXTS)
    assert [layer.output_distance is None for layer in done.layers] == [False, True]
    assert done.outputs is not None
    assert (done.outputs.distance, done.outputs.agreement) == (None, 0.0)
    json.dumps(done.to_dict(), allow_nan=False)
    whole = analyze([nan, tune]).contributions[1].adds_bytes
    chosen = substitute(nan, tune, tmp_path / "less", budget=whole * 2 // 3, samples=TEXTS).layers
    assert chosen
    assert "model.layers.1" not in {layer.name for layer in chosen}


def test_a_budget_with_samples_takes_what_moves_outputs_least(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    base, tune = models
    whole = analyze([base, tune]).contributions[1].adds_bytes
    done = substitute(base, tune, tmp_path / "out", budget=whole * 2 // 3, samples=TEXTS)
    assert [layer.name for layer in done.layers] == ["model.layers.1"]
    other = substitute(base, tune, tmp_path / "other", layers="0", samples=TEXTS)
    assert done.outputs is not None
    assert other.outputs is not None
    assert None not in (done.outputs.distance, other.outputs.distance)
    assert (done.outputs.distance or 0) < (other.outputs.distance or 0)


def test_a_long_sample_is_cut_to_what_the_model_takes(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    base, tune = (shutil.copytree(each, tmp_path / each.name) for each in models)
    for each in (base, tune):
        config = json.loads((each / "config.json").read_text())
        (each / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tune)
    assert tokenizer.model_max_length > 10**9, "it knows by itself"
    first, longer = "w0 w1 w2 w3 w4 w5 w6 w7", "w0 w1 w2 w3 w4 w5 w6 w7 w9 w8 w9 w8"
    found = [
        substitute(base, tune, tmp_path / name, layers="0", samples=[text]).outputs
        for name, text in (("one", first), ("two", longer))
    ]
    assert found[0] == found[1] is not None


def test_samples_without_a_tokenizer_or_a_model_are_refused(
    base: Path, tune: Path, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, CheckpointNotFoundError), match="samples"):
        substitute(base, tune, tmp_path / "out", layers="0", samples=["a"])
    assert not (tmp_path / "out").exists()
