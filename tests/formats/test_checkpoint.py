"""Checkpoints: files, shards, pipelines, copies, and indexes that lie."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from files.refusals import refused
from tensor_dedup.errors import CheckpointNotFoundError, FormatError, UnsupportedError
from tensor_dedup.formats import checkpoint
from tensor_dedup.formats.checkpoint import Checkpoint, open_checkpoint
from tensor_dedup.formats.errors import (
    CheckpointFault,
    FormatFault,
    JsonFault,
    PytorchFault,
)
from tensor_dedup.formats.left_out import LeftOutReason, described
from tensor_dedup.formats.links import LinkBoundary

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def write(path: Path, *names: str, dtype: str = "U8") -> Path:
    """A safetensors file with one tensor of 4 bytes for each name: the name's own letters."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {
        name: {"dtype": dtype, "shape": [4], "data_offsets": [4 * i, 4 * i + 4]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    data = b"".join(name.encode()[:4].ljust(4, b".") for name in names)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def write_index(path: Path, weight_map: Mapping[str, object]) -> Path:
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


def sharded(root: Path) -> Path:
    write(root / A, "a", "b")
    write(root / B, "c")
    write_index(root / INDEX, {"a": A, "b": A, "c": B})
    return root


def names(opened: Checkpoint) -> list[str]:
    return [name for name, _, _ in opened.tensors()]


def test_a_single_file(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", "a", "b")
    for opened in (open_checkpoint(path), open_checkpoint(str(tmp_path))):
        assert names(opened) == ["a", "b"]
        assert (opened.nbytes, opened.tensor_count) == (8, 2)
        assert [file.path for file in opened.files] == [path]
    assert open_checkpoint(path).path == path


def test_what_is_found_is_where_its_bytes_are(tmp_path: Path) -> None:
    sharded(tmp_path)
    for name, file, spec in open_checkpoint(tmp_path).tensors():
        data = file.path.read_bytes()[spec.start : spec.start + spec.nbytes]
        assert data == name.encode().ljust(4, b".")


def test_a_blob_of_a_hub_cache_needs_no_suffix(tmp_path: Path) -> None:
    assert names(open_checkpoint(write(tmp_path / "0123abcd", "a"))) == ["a"]


def test_shards_are_those_of_the_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    write(tmp_path / "model.safetensors", "a", "b", "c")
    write(tmp_path / "stray.safetensors", "z")
    for path in (tmp_path, tmp_path / INDEX):
        opened = open_checkpoint(path)
        assert [file.path.name for file in opened.files] == [A, B]
        assert names(opened) == ["a", "b", "c"]


def test_the_order_of_index_and_files_does_not_matter(tmp_path: Path) -> None:
    write(tmp_path / B, "c")
    write(tmp_path / A, "b", "a")
    write_index(tmp_path / INDEX, {"c": B, "b": A, "a": A})
    opened = open_checkpoint(tmp_path)
    assert sorted(names(opened)) == sorted(names(open_checkpoint(sharded(tmp_path / "other"))))
    assert [file.path.name for file in opened.files] == [A, B]


def test_shards_of_other_names(tmp_path: Path) -> None:
    write(tmp_path / "second", "b")
    write(tmp_path / "part" / "first.st", "a")
    write_index(tmp_path / INDEX, {"b": "second", "a": "part/first.st"})
    opened = open_checkpoint(tmp_path / INDEX)
    assert sorted(names(opened)) == ["a", "b"]


def pipeline(root: Path, **parts: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    entries = {part: ["diffusers", "SomeModel"] for part in (*parts, "scheduler", "feature")}
    index = {"_class_name": "SomePipeline", "_version": 1, **entries, "safety": [None, None]}
    (root / "model_index.json").write_text(json.dumps(index))
    (root / "scheduler").mkdir()
    for part, file in parts.items():
        write(root / part / file, "w")
    return root


def test_a_pipeline_is_its_components(tmp_path: Path) -> None:
    root = pipeline(tmp_path, unet="diffusion_pytorch_model.safetensors", vae="model.safetensors")
    write(root / "v1-5-pruned-emaonly.safetensors", "unet.w", "vae.w")
    write(root / "not_named" / "model.safetensors", "z")
    sharded(root / "unet" / "deeper")
    opened = open_checkpoint(root)
    assert names(opened) == ["unet/w", "vae/w", *(f"unet/deeper/{name}" for name in "abc")]
    assert {file.prefix for file in opened.files} == {"unet/", "vae/", "unet/deeper/"}


def test_a_component_without_safetensors_is_not_left_out(tmp_path: Path) -> None:
    root = pipeline(tmp_path, unet="model.safetensors", vae="diffusion_flax_model.msgpack")
    with pytest.raises(UnsupportedError, match=r"vae/diffusion_flax_model\.msgpack"):
        open_checkpoint(root)


def test_sub_folders_of_a_folder_belong_to_it(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", "w")
    write(tmp_path / "2_Dense" / "model.safetensors", "w")
    write(tmp_path / ".cache" / "model.safetensors", "w")
    write(tmp_path / "original" / "model.safetensors", "w")
    assert names(open_checkpoint(tmp_path)) == ["w", "2_Dense/w"]
    assert names(open_checkpoint(tmp_path / "original")) == ["w"]


def test_a_file_that_is_no_weights_is_left_out_beside_weights(tmp_path: Path) -> None:
    first, second = "model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"
    third = "model-00002-of-00002.safetensors"
    for letter, shard in zip("abc", (first, second, third), strict=True):
        write(tmp_path / shard, letter)
    write_index(tmp_path / INDEX, {"a": first, "b": second, "c": third})
    write(tmp_path / "original" / "model.safetensors", "z")
    (tmp_path / "metal").mkdir()
    (tmp_path / "metal" / "model.bin").write_bytes(b"\x93\x0e\x01\x00shaders")
    opened = open_checkpoint(tmp_path)
    assert names(opened) == ["a", "b", "c"]
    assert [(each.path, each.reason) for each in opened.left_out()] == [
        ("metal/model.bin", LeftOutReason.NOT_WEIGHTS),
        ("original/model.safetensors", LeftOutReason.OTHER_COPY),
    ]
    assert described(opened.left_out()) == ["left out: metal/model.bin, original/model.safetensors"]
    with refused(PytorchFault.NOT_PYTORCH, match=r"metal/model\.bin: it begins with"):
        open_checkpoint(tmp_path / "metal")  # where it is alone


@pytest.mark.parametrize(
    "name", ["model.safetensors.part", ".cache/huggingface/download/abc=.1f.incomplete"]
)
def test_a_download_that_is_not_finished_is_called_so(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"its beginning")
    (tmp_path / "config.json").write_text("{}")
    for given in (tmp_path, path):
        with pytest.raises(CheckpointNotFoundError, match="a download that is not finished"):
            open_checkpoint(given)
    write(tmp_path / "model.safetensors", "w")
    assert names(open_checkpoint(tmp_path)) == ["w"]


def test_text_that_is_called_bin_is_left_out_beside_weights_and_a_pointer_is_not(
    tmp_path: Path,
) -> None:
    write(tmp_path / "model.safetensors", "a")
    (tmp_path / "sub").mkdir()
    file = tmp_path / "sub" / "model.bin"
    file.write_text("vocabulary\n")
    [found] = open_checkpoint(tmp_path).left_out()
    assert (found.path, found.reason) == ("sub/model.bin", LeftOutReason.NOT_WEIGHTS)
    file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n")
    with refused(CheckpointFault.POINTER, match=r"sub/model\.bin: a Git LFS pointer"):
        open_checkpoint(tmp_path)
    file.unlink()
    file.with_suffix(".safetensors").write_text("Access denied")
    with refused(CheckpointFault.TEXT, match="'Access denied'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("sub/pytorch_model-00001-of-00001.bin", b"damaged\xff"),
        ("sub/pytorch_model.bin", b""),
        ("sub/pytorch_model.bin", bytes(100)),
    ],
    ids=["a shard", "empty", "zeros"],
)
def test_damaged_weights_beside_others_are_not_left_out(
    tmp_path: Path, name: str, data: bytes
) -> None:
    write(tmp_path / "model.safetensors", "a")
    (tmp_path / "sub").mkdir()
    (tmp_path / name).write_bytes(data)
    with refused(PytorchFault.NOT_PYTORCH, match=name):
        open_checkpoint(tmp_path)


def test_a_damaged_component_of_a_pipeline_is_not_left_out(tmp_path: Path) -> None:
    root = pipeline(tmp_path, unet="model.safetensors", vae="diffusion_pytorch_model.bin")
    (root / "vae" / "diffusion_pytorch_model.bin").write_bytes(b"<damaged>\xff")
    with refused(PytorchFault.NOT_PYTORCH, match=r"vae/diffusion_pytorch_model\.bin"):
        open_checkpoint(root)


def test_what_lies_outside_is_not_looked_at_for_files_that_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "model.fp16.safetensors", "z")
    root = pipeline(tmp_path / "m", unet="model.safetensors")
    write(root / "whole.safetensors", "unet.w")
    write(root / ".cache" / "other.safetensors", "z")
    (root / "link").symlink_to(tmp_path / "elsewhere")
    assert [each.path for each in open_checkpoint(root).left_out()] == ["whole.safetensors"]


def test_many_files_that_are_left_out_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", "a")
    for rank in range(64):
        (tmp_path / f"rng_state_{rank}.pth").write_bytes(b"")
    [line] = described(open_checkpoint(tmp_path).left_out())
    assert line.startswith("left out, state of a training: rng_state_0.pth, rng_state_1.pth, ")
    assert line.endswith(" and 56 more; keep the folder to resume")


def test_one_of_several_variants_is_taken(tmp_path: Path) -> None:
    write(tmp_path / "model.fp16.safetensors", "w", dtype="F8_E4M3")
    assert open_checkpoint(tmp_path).nbytes == 4
    write(tmp_path / "model.safetensors", "w")
    (file,) = open_checkpoint(tmp_path).files
    assert file.path.name == "model.safetensors"


def test_consolidated_weights_beside_shards_are_left_out(tmp_path: Path) -> None:
    sharded(tmp_path)
    write(tmp_path / "consolidated.safetensors", "x")
    assert names(open_checkpoint(tmp_path)) == ["a", "b", "c"]


def hub_snapshot(repository: Path) -> Path:
    """A snapshot as a hub cache has it: links to the blobs of its repository."""
    snapshot, store = repository / "snapshots" / "abc123", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs = {A: write(store / "1", "a", "b"), B: write(store / "2", "c")}
    blobs[INDEX] = write_index(store / "3", {"a": A, "b": A, "c": B})
    for name, blob in blobs.items():
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def test_a_snapshot_of_a_hub_cache(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path / "models--org--name")
    opened = open_checkpoint(snapshot)
    assert names(opened) == ["a", "b", "c"]
    assert [file.path for file in opened.files] == [snapshot / A, snapshot / B]
    assert names(open_checkpoint(snapshot / INDEX)) == ["a", "b", "c"]
    (tmp_path / "cache").symlink_to(tmp_path)
    again = tmp_path / "cache" / "models--org--name" / "snapshots" / "abc123"
    assert names(open_checkpoint(again)) == ["a", "b", "c"]


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", "a")
    write(tmp_path / "below" / "model.safetensors", "b")
    (tmp_path / "below" / "again").symlink_to(tmp_path, target_is_directory=True)
    assert names(open_checkpoint(tmp_path)) == ["a", "below/b"]


def test_a_linked_component_is_followed(tmp_path: Path) -> None:
    root = pipeline(tmp_path / "pipe", unet="model.safetensors", text="model.safetensors")
    (root / "text" / "model.safetensors").unlink()
    (root / "text").rmdir()
    write(tmp_path / "shared_text" / "model.safetensors", "w")
    (root / "text").symlink_to(tmp_path / "shared_text", target_is_directory=True)
    assert sorted(names(open_checkpoint(root, follow_links=True))) == ["text/w", "unet/w"]
    assert_leads_outside(root, root / "text", tmp_path / "shared_text")


def assert_leads_outside(path: Path, link: Path, target: Path) -> None:
    with refused(CheckpointFault.LINK_OUTSIDE, match=f"{link}.*{target}.*--follow-links") as found:
        open_checkpoint(path)
    assert found.value.facts["link"] == str(link)
    assert found.value.facts["target"] == str(target)


def lead_away(path: Path, link: Path, target: Path) -> tuple[Path, Path]:
    """Move `target`, a part of the checkpoint in `path`, out of it, and put a link in its place."""
    away = path.with_name("away") / target.name
    away.parent.mkdir(exist_ok=True)
    target.rename(away)
    link.symlink_to(away, target_is_directory=away.is_dir())
    return link, away


@pytest.mark.parametrize("moved", [A, INDEX, "deeper/model.safetensors", "deeper"])
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, moved: str) -> None:
    root = sharded(tmp_path / "m")
    write(root / "deeper" / "model.safetensors", "z")
    expected = names(open_checkpoint(root))
    link, away = lead_away(root, root / moved, root / moved)
    assert_leads_outside(root, link, away)
    assert names(open_checkpoint(root, follow_links=True)) == expected
    (tmp_path / "named").symlink_to(root)
    assert_leads_outside(tmp_path / "named", tmp_path / "named" / moved, away)


def test_a_link_to_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    root = sharded(tmp_path / "m")
    _, away = lead_away(root, root / "between", root / A)
    (root / A).symlink_to("between")
    assert_leads_outside(root, root / A, away)
    assert_leads_outside(root / INDEX, root / A, away)


def test_shards_in_a_folder_that_is_a_link_outside_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "m"
    write(root / "w" / A, "a")
    index = write_index(root / INDEX, {"a": "w/" + A})
    link, away = lead_away(root, root / "w", root / "w")
    with refused(CheckpointFault.LINK_OUTSIDE) as found:
        open_checkpoint(index)
    assert (found.value.facts["link"], found.value.facts["target"]) == (str(link), str(away / A))
    assert names(open_checkpoint(index, follow_links=True)) == ["a"]


def test_a_description_of_a_pipeline_from_elsewhere_is_refused(tmp_path: Path) -> None:
    root = pipeline(tmp_path / "m", unet="model.safetensors")
    assert_leads_outside(
        root, *lead_away(root, root / "model_index.json", root / "model_index.json")
    )


def test_an_index_of_data_files_from_elsewhere_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "m"
    root.mkdir()
    (root / "tensor.data_0").write_bytes(b"")
    (root / "tensor_index.json").write_text("{}")
    assert names(open_checkpoint(root)) == []
    assert_leads_outside(
        root, *lead_away(root, root / "tensor_index.json", root / "tensor_index.json")
    )


def test_what_is_not_read_may_lead_anywhere(tmp_path: Path) -> None:
    root = pipeline(tmp_path / "m", unet="model.safetensors")
    (root / "unet" / "pytorch_model.bin").symlink_to(write(tmp_path / "file", "z"))
    for name in (".cache", "assets"):
        (root / name).symlink_to(tmp_path)
    assert names(open_checkpoint(root)) == ["unet/w"]


def test_links_within_the_folder_are_followed(tmp_path: Path) -> None:
    write(tmp_path / "files" / "one", "a")
    write(tmp_path / "files" / "two", "b", "c")
    (tmp_path / "x").symlink_to("files", target_is_directory=True)
    (tmp_path / A).symlink_to(Path("x") / "one")
    (tmp_path / "again").symlink_to(tmp_path / "x" / "two")
    (tmp_path / B).symlink_to("again")
    assert names(open_checkpoint(tmp_path)) == ["a", "b", "c"]


def test_a_file_that_is_named_itself_may_be_a_link(tmp_path: Path) -> None:
    file = write(tmp_path / "elsewhere" / "blob", "a")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors").symlink_to(file)
    assert names(open_checkpoint(tmp_path / "m" / "model.safetensors")) == ["a"]


def test_blobs_are_those_of_the_same_repository(tmp_path: Path) -> None:
    other = write(tmp_path / "models--org--other" / "blobs" / "9", "z")
    snapshot = hub_snapshot(tmp_path / "models--org--name")
    (snapshot / "deeper").mkdir()
    link = snapshot / "deeper" / "model.safetensors"
    link.symlink_to(other)
    assert_leads_outside(snapshot, link, other)
    link.unlink()
    link.symlink_to(snapshot.parent.parent / "blobs" / "1")
    assert names(open_checkpoint(snapshot)) == ["a", "b", "c", "deeper/a", "deeper/b"]
    assert names(open_checkpoint(snapshot / "deeper")) == ["a", "b"]


@pytest.mark.parametrize("name", ["models--org--name", "downloads"])
def test_blobs_that_are_elsewhere_are_not_the_cache_s_own(tmp_path: Path, name: str) -> None:
    snapshot = hub_snapshot(tmp_path / name)
    if name.startswith("models--"):
        (tmp_path / name / "blobs").rename(tmp_path / "moved")
        (tmp_path / name / "blobs").symlink_to(tmp_path / "moved")
    with refused(CheckpointFault.LINK_OUTSIDE):
        open_checkpoint(snapshot)


def test_a_link_that_appears_after_the_check_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = sharded(tmp_path / "m")
    check = LinkBoundary.check

    def exchanged(links: LinkBoundary, path: Path) -> None:
        check(links, path)
        if path.name == A and not path.is_symlink():
            lead_away(root, path, path)

    monkeypatch.setattr(LinkBoundary, "check", exchanged)
    with refused(CheckpointFault.LINK_OUTSIDE, match=str(tmp_path / "away" / A)):
        open_checkpoint(root)
    assert (root / A).is_symlink()


def test_a_shard_the_index_names_is_missing(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / B).unlink()
    with refused(CheckpointFault.MISSING_SHARD, match=B) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.facts["shard"] == B


def test_a_shard_that_was_not_downloaded_is_missing(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / B).unlink()
    (tmp_path / B).symlink_to(tmp_path / "blobs" / "nowhere")
    with refused(CheckpointFault.MISSING_SHARD, match=B):
        open_checkpoint(tmp_path)


def test_a_shard_is_missing_where_there_is_no_index(tmp_path: Path) -> None:
    write(tmp_path / A, "a")
    with refused(CheckpointFault.MISSING_SHARD, match=B):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("tensor", ["c", "nowhere"])
def test_an_index_that_puts_a_tensor_where_it_is_not(tmp_path: Path, tensor: str) -> None:
    sharded(tmp_path)
    write_index(tmp_path / INDEX, {"a": A, "b": A, "c": B, tensor: A})
    with refused(CheckpointFault.INDEX_TENSOR, match=tensor):
        open_checkpoint(tmp_path)


def test_tensors_the_index_forgot_are_loaded_all_the_same(tmp_path: Path) -> None:
    sharded(tmp_path)
    write_index(tmp_path / INDEX, {"a": A, "c": B})
    assert names(open_checkpoint(tmp_path)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "shard",
    ["../outside", "a/../../outside", "/etc/passwd", "", ".", "..", "x\0y", "../" + "x" * 9999],
)
def test_an_index_cannot_lead_outside(tmp_path: Path, shard: str) -> None:
    root = sharded(tmp_path / "root")
    write(tmp_path / "outside", "x")
    write_index(root / INDEX, {"x": shard})
    with refused(CheckpointFault.INDEX_PATH) as caught:
        open_checkpoint(root)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("text", "lie"),
    [
        ("", JsonFault.SYNTAX),
        ("{", JsonFault.SYNTAX),
        ("[" * 100_000, JsonFault.NESTING),
        ("{}", CheckpointFault.INDEX),
        ('{"weight_map": {}}', CheckpointFault.INDEX),
        ('{"weight_map": [1]}', CheckpointFault.INDEX),
        ('{"weight_map": {"a": 1}}', CheckpointFault.INDEX),
        ('{"weight_map": {"a": null}}', CheckpointFault.INDEX),
        (f'{{"weight_map": {{"a": "{A}", "a": "{B}"}}}}', JsonFault.DUPLICATE_KEY),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, text: str, lie: FormatFault) -> None:
    sharded(tmp_path)
    (tmp_path / INDEX).write_text(text)
    with refused(lie, match=r"index\.json"):
        open_checkpoint(tmp_path)


def test_an_index_is_not_read_beyond_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded(tmp_path)
    monkeypatch.setattr(checkpoint, "MAX_HEADER_BYTES", 20)
    with refused(CheckpointFault.INDEX, match="larger than 20 bytes"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path / A, "w", "x")
    write(tmp_path / B, "y", "w")
    with refused(CheckpointFault.REPEATED_TENSOR, match=rf"{B}: tensor 'w': .*{A}"):
        open_checkpoint(tmp_path)


def test_the_index_says_which_of_two_tensors_counts(tmp_path: Path) -> None:
    write(tmp_path / A, "a", "b", "c")
    write(tmp_path / B, "c", "b", dtype="I8")
    write_index(tmp_path / INDEX, {"a": A, "b": B, "c": A})
    for path in (tmp_path, tmp_path / INDEX):
        opened = open_checkpoint(path)
        found = [(name, file.path.name, spec.dtype) for name, file, spec in opened.tensors()]
        assert found == [("a", A, "U8"), ("c", A, "U8"), ("b", B, "I8")]
        assert (opened.nbytes, opened.tensor_count) == (12, 3)
        copies = [(name, opened.relative(file)) for name, file, _ in opened.not_indexed()]
        assert copies == [("b", A), ("c", B)]
        assert [len(file.header.tensors) for file in opened.files] == [3, 2]


def test_indexes_that_disagree_about_a_tensor_are_refused(tmp_path: Path) -> None:
    write(tmp_path / A, "a")
    write(tmp_path / B, "a")
    write_index(tmp_path / INDEX, {"a": A})
    write_index(tmp_path / "other.safetensors.index.json", {"a": B})
    with refused(CheckpointFault.REPEATED_TENSOR, match="tensor 'a'"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards_that_the_index_does_not_name_is_refused(tmp_path: Path) -> None:
    write(tmp_path / A, "a", "z")
    write(tmp_path / B, "b", "z")
    write_index(tmp_path / INDEX, {"a": A, "b": B})
    with refused(CheckpointFault.REPEATED_TENSOR, match="tensor 'z'"):
        open_checkpoint(tmp_path)


def test_a_liar_among_shards_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    os.truncate(tmp_path / B, (tmp_path / B).stat().st_size - 1)
    with pytest.raises(FormatError, match=B):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["tf_model.h5", "flax_model.msgpack", "model.onnx"])
def test_other_formats_are_named_not_guessed(tmp_path: Path, name: str) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / name).write_bytes(b"\x80\x02")
    for path in (tmp_path, tmp_path / "deep" / name):
        with pytest.raises(UnsupportedError, match="reads safetensors") as caught:
            open_checkpoint(path)
        assert name in str(caught.value)


def test_nothing_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointNotFoundError, match=r"no \*\.safetensors, \*\.bin, "):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="org/name"):
        open_checkpoint("org/name")
