"""What README.md and docs/results.md say was measured is in docs/benchmarks/tables.md."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
INTERVAL = re.compile(r"\d[\d.,]* \[[\d.]+, [\d.]+\](?: [^|]*[^| ])?")


def rows(text: str) -> list[list[str]]:
    """The cells of all tables."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def measured() -> list[list[str]]:
    """The rows of the table of loading that have an interval."""
    section = (ROOT / "docs/results.md").read_text().split("## vLLM\n")[1].split("\n## ")[0]
    found = [row for row in rows(section) if any(INTERVAL.fullmatch(cell) for cell in row)]
    assert len(found) > 8
    return found


def load_rows() -> list[list[str]]:
    text = (ROOT / "docs/benchmarks/tables.md").read_text()
    return rows(text.split("<!-- load: begin -->")[1].split("<!-- load: end -->")[0])


def test_every_interval_is_that_of_one_measurement() -> None:
    known = [set(row) for row in load_rows()]
    for row in measured():
        said = {cell for cell in row if INTERVAL.fullmatch(cell)}
        assert any(said <= cells for cells in known), row


def test_the_readme_is_short_and_its_figures_are_measured() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    assert len(text.splitlines()) <= 150
    known = (ROOT / "docs/benchmarks/tables.md").read_text()
    said = re.findall(r"\d[\d.,]* \[[\d.]+, [\d.]+\]", text)
    assert len(said) >= 4
    assert [each for each in said if each not in known] == []


def test_no_missed_aim_is_left_out_and_verdicts_are_those_of_the_benchmark() -> None:
    said = {row[3] or row[2]: row[4] for row in measured()}
    found = dict[str, str]()
    for row in load_rows():
        if row[-1] in ("missed", "met", "not shown"):
            found[row[3] if INTERVAL.fullmatch(row[3]) else row[2]] = f"{row[-2]}: {row[-1]}"
    missed = {compared for compared, verdict in found.items() if verdict.endswith(": missed")}
    assert missed
    assert missed <= set(said)
    assert {c: found.get(c, "") for c in said} == said
