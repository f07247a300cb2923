"""Checkpoints of several formats: which file is which, and which of a folder's are its weights."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from files import gguf_files, pytorch_files
from files.refusals import refused
from tensor_dedup.errors import (
    FormatError,
    NoSuchPathError,
    SeveralModelsError,
    UnsupportedError,
)
from tensor_dedup.formats import weight_choice as naming
from tensor_dedup.formats.checkpoint import Checkpoint, open_checkpoint
from tensor_dedup.formats.errors import (
    CheckpointFault,
    GgufFault,
    JsonTextError,
    PytorchFault,
    SafetensorsError,
    SafetensorsFault,
)
from tensor_dedup.formats.gguf import GgufHeader
from tensor_dedup.formats.pytorch.reader import PytorchHeader
from tensor_dedup.formats.safetensors import SafetensorsHeader
from tensor_dedup.formats.weights import read_header


def made(path: Path, *names: str) -> Path:
    """A file of these tensors, in the format of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: torch.arange(8) for name in names}
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    elif path.suffix == ".gguf":
        infos = [gguf_files.info(name, offset=32 * i) for i, name in enumerate(names)]
        path.write_bytes(gguf_files.file_of((), infos, bytes(32 * len(names))))
    else:
        torch.save(tensors, path)
    return path


def names(opened: Checkpoint) -> list[str]:
    return [name for name, _, _ in opened.tensors()]


def files(opened: Checkpoint) -> list[str]:
    return [file.path.relative_to(opened.path).as_posix() for file in opened.files]


@pytest.mark.parametrize(
    ("suffix", "header"),
    [
        (".safetensors", SafetensorsHeader),
        (".gguf", GgufHeader),
        *((suffix, PytorchHeader) for suffix in (".bin", ".pt", ".pth", ".ckpt")),
    ],
)
def test_a_file_of_each_format_and_its_blob_without_a_suffix(
    tmp_path: Path, suffix: str, header: type
) -> None:
    path = made(tmp_path / f"model{suffix}", "a", "b")
    opened = open_checkpoint(path)
    assert (names(opened), opened.tensor_count) == (["a", "b"], 2)
    assert isinstance(opened.files[0].header, header)
    data = path.read_bytes()
    for _, _, spec in opened.tensors():
        assert len(data[spec.start : spec.start + spec.nbytes]) == spec.nbytes
    blob = path.rename(tmp_path / "0123abcd")
    assert isinstance(read_header(blob), header)
    with blob.open("rb") as file:
        assert read_header("0123abcd", fd=file.fileno()).tensors == read_header(blob).tensors


def test_bin_may_be_gguf(tmp_path: Path) -> None:
    path = made(tmp_path / "model.gguf", "a").rename(tmp_path / "ggml-model.bin")
    assert isinstance(read_header(path), GgufHeader)


def test_a_header_whose_length_reads_as_a_zip_is_safetensors(tmp_path: Path) -> None:
    length = int.from_bytes(b"PK\x03\x04", "little")
    path = tmp_path / "blob"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", length) + b"{}")
        file.truncate(8 + length)
    with pytest.raises(FormatError) as caught:
        read_header(path)
    assert isinstance(caught.value, SafetensorsError | JsonTextError)


def test_the_suffix_says_what_is_expected(tmp_path: Path) -> None:
    for name, lie in (
        ("a.safetensors", SafetensorsFault.HEADER_TOO_LARGE),
        ("a.gguf", GgufFault.MAGIC),
        ("a.pt", PytorchFault.NOT_PYTORCH),
        ("a.bin", PytorchFault.NOT_PYTORCH),
    ):
        (tmp_path / name).write_bytes(b"\xff nothing of the kind")
        with refused(lie):
            open_checkpoint(tmp_path / name)
    (tmp_path / "old.bin").write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
    with refused(PytorchFault.LEGACY_PYTORCH, match="and torch"):
        open_checkpoint(tmp_path / "old.bin")
    with pytest.raises(NoSuchPathError):
        open_checkpoint(tmp_path / "nothing.gguf")


def test_safetensors_come_first(tmp_path: Path) -> None:
    made(tmp_path / "pytorch_model.bin", "b")
    made(tmp_path / "model.gguf", "g")
    made(tmp_path / "training_args.bin", "t")
    assert files(open_checkpoint(tmp_path)) == ["pytorch_model.bin"]
    made(tmp_path / "model.safetensors", "s")
    made(tmp_path / "deep" / "some.pt", "p")
    assert files(open_checkpoint(tmp_path)) == ["model.safetensors"]
    # A part that only has the older format belongs to it all the same.
    made(tmp_path / "2_Dense" / "pytorch_model.bin", "d")
    assert names(open_checkpoint(tmp_path)) == ["s", "2_Dense/d"]


def test_without_a_known_name_every_file_counts_but_what_training_leaves(tmp_path: Path) -> None:
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth"):
        made(tmp_path / name, "x")
    made(tmp_path / "training_args.bin", "x")
    with pytest.raises(UnsupportedError, match=r"optimizer\.pt"):
        open_checkpoint(tmp_path)
    made(tmp_path / "encoder.pt", "e")
    made(tmp_path / "decoder.pth", "d")
    assert names(open_checkpoint(tmp_path)) == ["d", "e"]
    assert names(open_checkpoint(tmp_path / "optimizer.pt")) == ["x"]


def test_gguf_comes_last(tmp_path: Path) -> None:
    made(tmp_path / "model.Q4_K_M.gguf", "a")
    assert files(open_checkpoint(tmp_path)) == ["model.Q4_K_M.gguf"]
    made(tmp_path / "mmproj-model.gguf", "v")
    assert names(open_checkpoint(tmp_path)) == ["v", "a"]
    made(tmp_path / "model.Q8_0.gguf", "a")
    with pytest.raises(SeveralModelsError):
        open_checkpoint(tmp_path)
    made(tmp_path / "weights.pt", "w")
    assert files(open_checkpoint(tmp_path)) == ["weights.pt"]


def test_parts_of_a_gguf(tmp_path: Path) -> None:
    made(tmp_path / "m-00001-of-00002.gguf", "a")
    with refused(CheckpointFault.MISSING_SHARD, match="m-00002-of-00002"):
        open_checkpoint(tmp_path)
    made(tmp_path / "m-00002-of-00002.gguf", "b")
    assert names(open_checkpoint(tmp_path)) == ["a", "b"]


def test_shards_of_torch_save_are_those_of_the_index(tmp_path: Path) -> None:
    parts = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    made(tmp_path / parts[0], "a", "b")
    made(tmp_path / parts[1], "c")
    made(tmp_path / "pytorch_model.fp16.bin", "z")
    weight_map = {"a": parts[0], "b": parts[0], "c": parts[1]}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    for path in (tmp_path, index):
        assert names(open_checkpoint(path)) == ["a", "b", "c"]
    index.write_text(json.dumps({"weight_map": {**weight_map, "d": parts[1]}}))
    with refused(CheckpointFault.INDEX_TENSOR, match="'d'"):
        open_checkpoint(tmp_path)


def test_an_index_may_name_a_tied_tensor_by_each_of_its_names(tmp_path: Path) -> None:
    weight = torch.ones(2)
    torch.save({"embed": weight, "head": weight}, tmp_path / "pytorch_model.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    weight_map = dict.fromkeys(("embed", "head"), "pytorch_model.bin")
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert names(open_checkpoint(tmp_path)) == ["embed"]


def test_each_component_of_a_pipeline_has_its_own_format(tmp_path: Path) -> None:
    entries = {part: ["diffusers", "Model"] for part in ("unet", "vae", "safety_checker")}
    (tmp_path / "model_index.json").write_text(json.dumps(entries))
    made(tmp_path / "unet" / "diffusion_pytorch_model.safetensors", "w")
    made(tmp_path / "unet" / "diffusion_pytorch_model.bin", "x")
    made(tmp_path / "vae" / "diffusion_pytorch_model.fp16.bin", "w")
    made(tmp_path / "safety_checker" / "odd.ckpt", "w")
    made(tmp_path / "v1-5-pruned.ckpt", "all")
    assert names(open_checkpoint(tmp_path)) == ["safety_checker/w", "unet/w", "vae/w"]


def test_a_dot_begins_no_variant_of_a_gguf() -> None:
    chosen = naming.choose(["m.Q4_0.gguf", "m.gguf", "m.safetensors", "m.bin"], naming.GGUF)
    assert chosen.files == ("m.gguf", "m.Q4_0.gguf")


def test_one_of_two_suffixes_is_taken() -> None:
    assert naming.choose(["m.pt", "m.bin"], naming.PYTORCH).files == ("m.bin",)


def test_bytes_that_are_no_tensors_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    path.write_bytes(pytorch_files.file_of())
    header = read_header(path)
    assert header.header_bytes == path.stat().st_size - 8


POINTER = (
    "version https://git-lfs.github.com/spec/v1\noid sha256:" + "4d7a" * 16 + "\nsize 13535680512\n"
)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".pt", ".gguf", ""])
@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (POINTER, CheckpointFault.POINTER, r"LFS pointer \(13\.5 GB are not here\): git lfs pull"),
        (
            "version https://git-lfs.github.com/spec/v1\n",
            CheckpointFault.POINTER,
            "the weights are not",
        ),
        (
            "# xet version 0\nfilesize = 4200000\nhash = 'ab'\n",
            CheckpointFault.POINTER,
            r"a Git Xet pointer \(4\.2 MB are not here\)",
        ),
        ("<!DOCTYPE html>\n<html>Sign in" + "!" * 2000, CheckpointFault.TEXT, "an HTML page in"),
        ("<?xml version='1.0'?><Error><Code>AccessDenied", CheckpointFault.TEXT, "an XML document"),
        ('{"error": "Repository not found"}', CheckpointFault.TEXT, "a JSON document in place of"),
        ("Access denied\n", CheckpointFault.TEXT, "text in place of weights: 'Access denied'"),
        ("Accès refusé" * 100, CheckpointFault.TEXT, "text in place of weights: 'Accès"),
    ],
)
def test_what_stands_in_place_of_weights_is_called_what_it_is(
    tmp_path: Path, suffix: str, text: str, kind: CheckpointFault, said: str
) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_text(text)
    with refused(kind, match=said):
        open_checkpoint(path)
    with path.open("rb") as file, refused(kind, match=said):
        read_header("named.bin", fd=file.fileno())


def test_a_pointer_in_place_of_an_index_is_called_so(tmp_path: Path) -> None:
    made(tmp_path / "model-00001-of-00001.safetensors", "a")
    (tmp_path / "model.safetensors.index.json").write_text(POINTER)
    with refused(CheckpointFault.POINTER, match=r"index\.json: a Git LFS pointer"):
        open_checkpoint(tmp_path)


def test_old_pickles_are_not_called_text(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"\x80\x02ctorch\n" + b"text\n" * 20)
    with refused(PytorchFault.LEGACY_PYTORCH):
        open_checkpoint(tmp_path)


def part(folder: Path, number: int, count: int, *names: str, tensors: int | None = None) -> Path:
    """A part of a split model, called as its header says."""
    entries = [
        gguf_files.number("split.no", number - 1),
        gguf_files.number("split.count", count),
        *([] if tensors is None else [gguf_files.number("split.tensors.count", tensors)]),
    ]
    infos = [gguf_files.info(name, offset=32 * i) for i, name in enumerate(names)]
    folder.mkdir(exist_ok=True)
    path = folder / f"m-{number:05d}-of-{count:05d}.gguf"
    path.write_bytes(gguf_files.file_of(entries, infos, bytes(32 * len(names))))
    return path


def test_the_first_part_of_a_split_model_is_the_whole_model(tmp_path: Path) -> None:
    first = part(tmp_path, 1, 3, "a", "b", tensors=4)
    second, third = part(tmp_path, 2, 3, "c"), part(tmp_path, 3, 3, "d")
    for path in (first, tmp_path):
        opened = open_checkpoint(path)
        assert names(opened) == ["a", "b", "c", "d"]
        assert [file.path for file in opened.files] == [first, second, third]
    with refused(CheckpointFault.LATER_PART, match=r"part 2 of 3 .*the first part, .*m-00001-of"):
        open_checkpoint(second)
    third.unlink()
    with refused(CheckpointFault.MISSING_SHARD, match=r"part 3 of 3, m-00003-of-00003\.gguf, is"):
        open_checkpoint(first)
    with refused(CheckpointFault.MISSING_SHARD, match=r"m-00003-of-00003\.gguf is not there"):
        open_checkpoint(tmp_path)


def test_parts_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    first, second = part(tmp_path, 1, 2, "a", tensors=3), part(tmp_path, 2, 2, "b")
    for path in (first, tmp_path):
        with refused(CheckpointFault.PART, match="its 2 parts have 2 of 3 tensors"):
            open_checkpoint(path)
    made(second, "b", "c")
    for path in (first, tmp_path):
        with refused(CheckpointFault.PART, match="does not say that it is part 2"):
            open_checkpoint(path)
    second.unlink()
    renamed = first.rename(tmp_path / "model.gguf")
    for path in (renamed, tmp_path):
        with refused(CheckpointFault.PART, match="is not called NAME-00001-of-00002"):
            open_checkpoint(path)
    part(tmp_path, 4, 3, "a")
    with refused(CheckpointFault.PART, match="part 3 of 3, counted from 0"):
        open_checkpoint(tmp_path / "m-00004-of-00003.gguf")


def test_parts_outside_the_folder_are_refused(tmp_path: Path) -> None:
    first, second = part(tmp_path / "m", 1, 2, "a"), part(tmp_path / "other", 2, 2, "b")
    (tmp_path / "m" / second.name).symlink_to(second)
    with refused(CheckpointFault.LINK_OUTSIDE):
        open_checkpoint(first)
    assert names(open_checkpoint(first, follow_links=True)) == ["a", "b"]
