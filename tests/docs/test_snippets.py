"""Every snippet of README.md and of the documentation's pages runs."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models
from torch.distributed.checkpoint import state_dict_saver

from models import tiny_checkpoints, tiny_pipelines
from processes import fresh
from project import package_source, snippets
from tensor_dedup import settings

ROOT = package_source.ROOT
DOCS = ROOT / "docs"
# Pages whose blocks are tried elsewhere or are no instructions.
NOT_HERE = {
    "compatibility.md": "a log of what was tried",
    "benchmarks/tables.md": "written by the benchmarks",
    "decisions.md": "reasons",
    "releasing.md": "for who releases",
    "published-figures.md": "tests/test_published_figures.py runs its examples",
}
PAGES = {
    str(path.relative_to(ROOT)): snippets.snippets(path.read_text())
    for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    if str(path.relative_to(DOCS) if path.is_relative_to(DOCS) else path.name) not in NOT_HERE
    and not path.is_relative_to(DOCS / "deploy")
}
RUN = {"python", "bash"}
NOT_RUN_AT_MOST = 23

Blocks = list[tuple[str, str, int]]


def needs_vllm(page: str) -> bool:
    return any("from vllm" in each.text for each in to_run(page, long=True))


def to_run(page: str, *, long: bool) -> list[snippets.Snippet]:
    wanted = {"", "long"} if long else {""}
    return [each for each in PAGES[page] if each.language in RUN and each.mark in wanted]


def blocks(page: str, *, long: bool) -> Blocks:
    return [(each.language, each.text, each.line) for each in to_run(page, long=long)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pages call path/to/something, tiny."""
    folder = tmp_path_factory.mktemp("prepared")
    pair = tiny_checkpoints.make("llama", tmp_path_factory.mktemp("llama"))
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "Hello": 2}, unk_token="<unk>"))
    make: Any = transformers.PreTrainedTokenizerFast  # typed in part only
    tokenizer = make(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    for name, source in {
        "base": pair.base,
        "fine-tune": pair.fine_tune,
        "model": pair.base,
        "checkpoint": pair.base,
    }.items():
        shutil.copytree(source, folder / name)
        tokenizer.save_pretrained(folder / name)
    made = tmp_path_factory.mktemp("pipelines")
    tiny_pipelines.make(made)
    for name, source in {
        "pipeline": made / "sd",
        "tuned-pipeline": made / "tuned",
        "another": made / "sd",
    }.items():
        shutil.copytree(source, folder / name)
    step = {"w": torch.zeros(4)}
    with pytest.warns(UserWarning, match="single process"):
        state_dict_saver.save(step, checkpoint_id=folder / "step", no_dist=True)
    return folder


@pytest.fixture
def place(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder, with nothing in it that is not the reader's."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    for name in ("HF_HOME", "TENSOR_DEDUP_CACHE", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(private / name))
    monkeypatch.setenv("TENSOR_DEDUP_STORE", str(private / "store"))
    monkeypatch.setenv("TENSOR_DEDUP_SOCKET", str(private / "m.sock"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return tmp_path


def folder_for(page: str, place: Path, prepared: Path) -> str:
    folder = place / page.replace("/", "-")
    shutil.copytree(prepared, folder / "path" / "to")
    return str(folder)


def run_pages(pages: list[tuple[str, str, Blocks]]) -> int:
    """Run pages one after the other in this process; their engines stay until it ends."""
    before = dict(os.environ)
    alive = []
    for page, folder, each in pages:
        os.chdir(folder)
        os.environ.update(before)
        alive.append(snippets.run(page, each))
    return len(alive)


PLAIN = [page for page in PAGES if to_run(page, long=False) and not needs_vllm(page)]
WITH_VLLM = [page for page in PAGES if to_run(page, long=True) and needs_vllm(page)]
LONG = [page for page in PAGES if len(to_run(page, long=True)) > len(to_run(page, long=False))]


@pytest.mark.parametrize("page", PLAIN)
def test_a_page_runs(page: str, place: Path, prepared: Path) -> None:
    order = [(page, folder_for(page, place, prepared), blocks(page, long=False))]
    assert fresh.call_forked(run_pages, order) == 1


@pytest.mark.vllm
def test_pages_with_vllm_run(place: Path, prepared: Path) -> None:
    """In one process: dropping one engine would end the others."""
    assert len(WITH_VLLM) > 2
    order = [(p, folder_for(p, place, prepared), blocks(p, long=False)) for p in WITH_VLLM]
    assert fresh.call_forked(run_pages, order) == len(WITH_VLLM)


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize("page", LONG)
def test_a_page_runs_with_what_takes_long(page: str, place: Path, prepared: Path) -> None:
    order = [(page, folder_for(page, place, prepared), blocks(page, long=True))]
    assert fresh.call_forked(run_pages, order) == 1


@pytest.mark.parametrize("block", [("python", "assert False", 0), ("bash", "false | cat", 0)])
def test_a_snippet_that_is_wrong_fails(block: tuple[str, str, int], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ended with"):
        fresh.call_forked(run_pages, [("page", str(tmp_path), [block])])


def test_few_snippets_are_not_run_and_each_says_why() -> None:
    every = [each for found in PAGES.values() for each in found if each.language in RUN]
    not_run = [each for each in every if each.mark == "not run"]
    assert len(every) > 50
    assert len(not_run) <= NOT_RUN_AT_MOST
    assert [each for each in every if each.mark and len(each.why) < 12] == []


def test_every_block_says_its_language() -> None:
    """One without would not run."""
    assert {each.language for found in PAGES.values() for each in found} <= RUN | {
        "json",
        "text",
        "toml",
    }


def test_the_configuration_file_of_the_page_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = [each for found in PAGES.values() for each in found if each.language == "toml"]
    assert every
    for each in every:
        (tmp_path / settings.FILE).write_text(each.text)
        monkeypatch.chdir(tmp_path)
        assert settings.configured_path("store") == Path("/data/store")
        assert settings.remote_url() == "s3://bucket/models"
        assert settings.configured_budget() == 32 << 30
