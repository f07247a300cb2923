"""Folders that hold several models: quantisations, a projector beside them, split ones, links."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from files.model_store_files import gguf_bytes, safetensors_bytes, write
from files.refusals import refused
from tensor_dedup.errors import WRONG_USE, SeveralModelsError
from tensor_dedup.formats.checkpoint import open_checkpoint
from tensor_dedup.formats.errors import CheckpointFault


def folder(root: Path, files: Mapping[str, str]) -> Path:
    """GGUF files, each with the tensors that the letters name; a value differs from file to file.

    A file may be safetensors by its suffix.
    """
    for number, (name, tensors) in enumerate(files.items()):
        made = safetensors_bytes if name.endswith(".safetensors") else gguf_bytes
        write(root / name, made({letter: float(number) for letter in tensors}))
    return root


def models(root: Path) -> list[str]:
    with pytest.raises(SeveralModelsError) as caught:
        open_checkpoint(root)
    assert caught.value.exit_status == WRONG_USE
    for each in caught.value.models:
        assert str(each) in str(caught.value)
        assert open_checkpoint(each).tensor_count  # what is listed can be given
    return [str(Path(each).relative_to(root)) for each in caught.value.models]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"m.Q4_K_M.gguf": "ab", "m.Q8_0.gguf": "ab", "mmproj-F16.gguf": "v"},
            ["m.Q4_K_M.gguf", "m.Q8_0.gguf", "mmproj-F16.gguf"],
        ),
        (
            {"a.gguf": "ab", "mmproj-F16.gguf": "v", "mmproj-F32.gguf": "v"},
            ["a.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"],
        ),
        # Each quantisation in a folder to itself.
        ({"Q4/m.gguf": "ab", "Q8/m.gguf": "ab"}, ["Q4/m.gguf", "Q8/m.gguf"]),
        # Other models, as runners keep them in one folder.
        ({"one/x/a.gguf": "abc", "two/y/b.gguf": "ad"}, ["one/x/a.gguf", "two/y/b.gguf"]),
        # What is not GGUF, without numbers.
        (
            {"base.safetensors": "ab", "tune.safetensors": "ab"},
            ["base.safetensors", "tune.safetensors"],
        ),
    ],
)
def test_each_model_is_listed(tmp_path: Path, files: dict[str, str], expected: list[str]) -> None:
    assert models(folder(tmp_path, files)) == expected


def test_the_parts_of_a_split_file_are_one_model(tmp_path: Path) -> None:
    parts = {f"m-Q8-0000{number}-of-00002.gguf": "ab"[number - 1] for number in (1, 2)}
    folder(tmp_path, {"m-Q4.gguf": "ab", **parts})
    assert models(tmp_path) == ["m-Q4.gguf", "m-Q8-00001-of-00002.gguf"]


@pytest.mark.parametrize(
    "files",
    [
        {"m.gguf": "ab", "mmproj.gguf": "v"},
        {"m-00001-of-00002.gguf": "a", "m-00002-of-00002.gguf": "b"},
        {"one.safetensors": "a", "two.safetensors": "b"},
        {"text/model.safetensors": "a", "vae/model.safetensors": "a"},
    ],
)
def test_files_without_a_name_in_common_are_one_model(
    tmp_path: Path, files: dict[str, str]
) -> None:
    assert {file.path.name for file in open_checkpoint(folder(tmp_path, files)).files} == {
        Path(name).name for name in files
    }


def test_a_set_of_numbered_files_that_is_not_gguf_is_named_by_none_of_them(tmp_path: Path) -> None:
    shards = {
        f"{model}-0000{n}-of-00002.safetensors": "ab"[n - 1] for model in "xy" for n in (1, 2)
    }
    with refused(CheckpointFault.REPEATED_TENSOR):
        open_checkpoint(folder(tmp_path, shards))


def test_a_link_out_of_the_folder_is_no_choice(tmp_path: Path) -> None:
    root = folder(tmp_path / "root", {"m.Q4.gguf": "ab"})
    secret = folder(tmp_path, {"secret.gguf": "ab"}) / "secret.gguf"
    (root / "m.Q8.gguf").symlink_to(secret)
    with refused(CheckpointFault.LINK_OUTSIDE):
        open_checkpoint(root)
