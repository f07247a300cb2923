"""Whole pipelines from one file in the original layout share with folders and with each other."""

from pathlib import Path
from typing import Any

import pytest
import torch

from models import tiny_pipelines
from models.tiny_pipelines import equal, image, nbytes, parameters, shared
from tensor_dedup import enable, report, verify

pytestmark = pytest.mark.usefixtures("nothing_stays")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `sd` and `tuned`, and a file of each."""
    root = tmp_path_factory.mktemp("single")
    tiny_pipelines.make(root)
    for name in ("sd", "tuned"):
        tiny_pipelines.write_single_file(
            tiny_pipelines.load(root / name), root / f"{name}.safetensors"
        )
    return root


def load(folder: Path, name: str, **options: Any) -> Any:
    """A folder, or a file by its suffix."""
    if name.endswith(".safetensors"):
        return tiny_pipelines.load_single_file(folder / name, folder / "sd", **options)
    return tiny_pipelines.load(folder / name, **options)


@pytest.mark.parametrize("order", [("sd", "sd.safetensors"), ("sd.safetensors", "sd")])
def test_a_file_meets_the_folder_it_was_made_of(folder: Path, order: tuple[str, str]) -> None:
    plain = image(load(folder, order[0]))
    with enable():
        first, second = (load(folder, name) for name in order)
    assert shared(first, second) == parameters(first).keys() == parameters(second).keys()
    assert len(parameters(first)) > 300
    last = report().models[-1]
    assert (last.shared_bytes, last.private_bytes, last.skipped) == (nbytes(second), 0, [])
    assert {each["name"] for each in last.components} == {"vae", "text_encoder", "unet"}
    # Weights lie as the first one's did, so both draw what that one draws.
    assert image(first) == image(second) == plain
    assert str(folder) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("turned", [False, True])
def test_two_files_share_what_is_equal(folder: Path, turned: bool) -> None:
    names = ["sd.safetensors", "tuned.safetensors"][:: -1 if turned else 1]
    plain = [image(load(folder, name)) for name in names]
    assert plain[0] != plain[1]
    with enable():
        first, second = (load(folder, name) for name in names)
    same = equal(first, second)
    assert shared(first, second) == same
    assert 300 < len(same) < len(parameters(first))
    assert [image(first), image(second)] == plain
    private = sum(p.nbytes for n, p in parameters(second).items() if n not in same)
    assert report().models[-1].private_bytes == private
    assert verify().ok


def test_a_file_that_is_cast_meets_a_folder_that_is(folder: Path) -> None:
    with enable():
        first = load(folder, "fp16", dtype=torch.float16, variant="fp16")
        second = load(folder, "sd.safetensors", torch_dtype=torch.float16)
    assert shared(first, second) == parameters(first).keys()
    assert {each.dtype for each in parameters(second).values()} == {torch.float16}


def test_the_argument_is_taken_where_a_file_is_loaded(folder: Path) -> None:
    loads = len(report().models)
    first = load(folder, "sd.safetensors", tensor_dedup=True)
    second = load(folder, "sd.safetensors", tensor_dedup=True)
    assert shared(first, second) == parameters(first).keys()
    assert len(report().models) == loads + 2
    assert report().models[-1].known == (report().models[-1].bytes_hashed == 0)
