"""What docs/published-figures.md says of other systems: examples run, figures are measured."""

import os
import re
from pathlib import Path

import pytest

from processes import fresh
from processes.process_state import forked
from project import package_source

DOCUMENT = package_source.ROOT / "docs" / "published-figures.md"
LINKS = {
    "https://github.com/olamyy/tensorcas",
    "https://github.com/DataStates/datastates-llm",
    "https://www.deepspeed.ai/tutorials/datastates-async-checkpointing/",
}
# A figure: with a decimal point, so that counts and sizes in names are none.
FIGURE = re.compile(r"\d+\.\d+")


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S)


def run(folder: str, texts: list[str]) -> int:
    os.chdir(folder)
    for number, text in enumerate(texts):
        exec(compile(text, f"example {number}", "exec"), {})
    return len(texts)


def test_the_examples_run(tmp_path: Path) -> None:
    assert fresh.call(run, str(tmp_path), examples()) == 4
    assert {each.name for each in tmp_path.iterdir()} == {"checkpoints", "lazy", "folder"}


def test_an_example_that_is_wrong_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="AssertionError"):
        forked(lambda: run(str(tmp_path), ["assert 1 == 2"]))


def test_links_lead_to_the_systems_and_to_files_that_are_there() -> None:
    links = set(re.findall(r"\]\((.*?)\)", DOCUMENT.read_text()))
    local = {link for link in links if not link.startswith("http")}
    assert links - local == LINKS
    assert local
    assert [link for link in local if not (DOCUMENT.parent / link).is_file()] == []


def tables() -> list[list[list[str]]]:
    """The cells of the tables that people wrote; the others come from a benchmark."""
    text = re.sub(
        r"<!-- datastates: begin -->.*<!-- datastates: end -->",
        "",
        DOCUMENT.read_text(),
        flags=re.S,
    )
    found = re.findall(r"(?:^\|.*\n)+", text, re.M)
    lines = [table.splitlines() for table in found]
    return [[[c.strip(" *") for c in row.strip("|").split("|")] for row in each] for each in lines]


def test_figures_of_ours_are_those_of_the_benchmarks() -> None:
    measured = set(FIGURE.findall((DOCUMENT.parent / "benchmarks" / "tables.md").read_text()))
    assert len(tables()) == 4
    for head, _, *rows in tables()[:3]:
        # Where no column is called so, all of them are ours.
        ours = [at for at, name in enumerate(head) if name.endswith("here")] or range(len(head))
        said = {figure for row in rows for at in ours for figure in FIGURE.findall(row[at])}
        assert len(said) > 3
        assert said - measured == set()


def test_every_row_of_the_texts_has_its_place() -> None:
    _, _, *rows = tables()[3]
    assert {source for source, _, _ in rows} >= {"article", "TensorCAS", "DataStates-LLM"}
    for _, what, place in rows:
        kind, _, reason = place.partition(": ")
        assert kind in ("works", "different", "open"), what
        assert reason, what
