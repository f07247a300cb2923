"""`scripts/bench/all`: its rows are those that the documents state, and it judges them rightly."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import (
    checkpoints,
    digests,
    every_row,
    follow,
    load,
    pipelines,
    publish,
    ranks,
    remote,
    stored_fine_tune,
)
from bench.every_row import judged
from bench.results import Figures
from bench.stated_rows import FINE_TUNE, ROWS, Part, StatedRow, counted
from demonstration import __main__ as demonstration
from demonstration import run
from project import package_source

FINE = Part("fine", "")
SECONDS = StatedRow("seconds", "load", FINE, "load")
WRITES = """
import json, sys
with open(sys.argv[-1], "w") as file:
    json.dump({"load": [[2.0] * 9, [1.0] * 9]}, file)
"""


def first_cells(document: str) -> list[str]:
    """The first cells of the rows of all tables, without their heads."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", document, re.MULTILINE):
        for line in table.splitlines()[2:]:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            found.append(cells[0])
    return found


def test_its_rows_are_those_of_the_results_but_for_a_gpus() -> None:
    _, *sections = (package_source.ROOT / "docs" / "results.md").read_text().split("\n## ")
    stated = [section for section in sections if "GPU" not in section.partition("\n")[0]]
    assert [row.results for row in ROWS] == first_cells("".join(stated))


def test_the_rows_of_the_readme_are_among_them() -> None:
    text = (package_source.ROOT / "README.md").read_text()
    stated = first_cells(text.partition("\n## Measured\n")[2].partition("\n## ")[0])
    assert sorted(row.readme for row in ROWS if row.readme) == sorted(stated)


def test_each_has_a_name_of_its_own() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert len({(row.part, row.figure) for row in ROWS}) == len(ROWS)


def test_what_is_measured_of_a_stored_fine_tune_is_stated() -> None:
    names = [stored_fine_tune.PACED, stored_fine_tune.DISK]
    names += map(stored_fine_tune.decoding, stored_fine_tune.KINDS)
    assert [row.figure for row in ROWS if row.part is FINE_TUNE] == names


def nine(value: float, other: float) -> Figures:
    """Nine pairs, whose values of ours scatter by one percent."""
    return {"load": [[value] * 9, [other * (1 + (n - 4) / 400) for n in range(9)]]}


@pytest.mark.parametrize(("ours", "said"), [(0.9, "met"), (1.1, "missed"), (1.0, "not shown")])
def test_a_ratio_is_held_to_no_more_than_one(ours: float, said: str) -> None:
    found = judged(SECONDS, nine(2.0, 2.0 * ours))
    assert found.verdict == said
    assert found.found is not None
    assert found.found.median == pytest.approx(ours)
    assert found.found.low < found.found.median < found.found.high
    assert f"| {ours:.3f} [" in found.text()
    assert found.text().endswith(f"] x | ≤ 1 x | {said} |")


@pytest.mark.parametrize(("ours", "said"), [(2.1, "met"), (2.5, "missed"), (2.2, "not shown")])
def test_what_it_takes_more_is_held_to_its_allowance(ours: float, said: str) -> None:
    row = StatedRow("more", "load", FINE, "load", compared="more", most=0.2, scale=1e-3)
    assert judged(row, nine(2.0, ours)).verdict == "missed"  # in milliseconds
    row = StatedRow("more", "load", FINE, "load", compared="more", most=0.2)
    found = judged(row, nine(2.0, ours))
    assert found.verdict == said
    assert "s more | ≤ 0.2 s more |" in found.text()


@pytest.mark.parametrize(
    ("ours", "said"), [(1.0, "met"), (0.9, "missed"), (1.1, "missed"), (0.98, "not shown")]
)
def test_an_aim_may_have_two_ends(ours: float, said: str) -> None:
    row = StatedRow("both", "rate", FINE, "load", most=1.02, least=0.98)
    assert judged(row, nine(70.0, 70.0 * ours)).verdict == said


def test_what_is_counted_may_be_a_little_more_than_stated() -> None:
    row = counted("bytes", "20 checkpoints", FINE, "load", (38, "MB", 1e6))
    for nbytes, said in ((37_954_000, "met"), (39_100_000, "met"), (39_200_000, "missed")):
        found = judged(row, {"load": [[896e6], [nbytes]]})
        assert found.verdict == said
        assert f"| 896.000 MB | {nbytes / 1e6:.3f} MB |" in found.text()
    assert judged(row, {"load": [[896e6], [1.0]]}, quick=True).verdict == "not shown"


def test_the_demos_memory_is_in_its_report() -> None:
    answers = [{"seconds": 1.0, "tokens": [[1]], "logprobs": [[0.0]]}]
    plain, shared = (
        run.Side(
            [{"model": "a", "seconds": 1.0, "memory": {"pss": pss, "rss": 0}}],
            answers,
            {"pss": 1 << 30, "rss": 0},
            peak_rss=0,
            together=True,
            report=None,
        )
        for pss in (7 << 30, 3 << 30)
    )
    report = json.loads(json.dumps(run.document(plain, shared)))
    [row] = [row for row in ROWS if row.name == "four-models"]
    found = judged(row, every_row.of_the_demo(report))
    assert "| 7.000 GiB | 3.000 GiB |" in found.text()
    assert found.verdict == "met"


def test_too_few_pairs_show_nothing_and_a_missing_figure_is_a_failure() -> None:
    assert judged(SECONDS, {"load": [[2.0] * 5, [9.0] * 5]}).verdict == "not shown"
    assert judged(SECONDS, {"other": [[2.0] * 9, [1.0] * 9]}).verdict == "failed"


def test_a_part_that_fails_says_so_and_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("fine", WRITES), ("broken", "raise SystemExit('no | memory')")):
        (tmp_path / f"{name}.py").write_text(text)
    rows = [
        StatedRow(name, f"what is {name}", Part(name, str(tmp_path / f"{name}.py")), "load")
        for name in ("broken", "fine")
    ]
    monkeypatch.setattr(every_row, "ROWS", rows)
    target = tmp_path / "found.json"
    options = ["--work", str(tmp_path / "work"), "--json", str(target)]
    done = CliRunner().invoke(every_row.main, options)
    assert done.exit_code == 1
    assert "| what is broken |  |  | status 1, no / memory; see " in done.output
    assert "| what is fine | 2.000 [2.000, 2.000] s |" in done.output
    found = json.loads(target.read_text())["rows"]
    assert [row["verdict"] for row in found] == ["failed", "met"]
    monkeypatch.setattr(every_row, "ROWS", rows[1:])
    assert CliRunner().invoke(every_row.main, options[:2]).exit_code == 0


def test_one_that_stands_still_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "still.py").write_text("import time\ntime.sleep(600)")
    monkeypatch.setattr(every_row, "LIMIT_SECONDS", 0.5)
    row = StatedRow("still", "still", Part("still", str(tmp_path / "still.py")), "load")
    [found] = every_row.outcomes([row], 9, tmp_path, quick=False)
    assert found.verdict == "failed"
    assert found.failure.startswith("not done in 0.5 s; see ")


def test_each_part_takes_the_options_that_it_is_given(tmp_path: Path) -> None:
    commands = {
        "bench/load.py": load.main,
        "bench/checkpoints.py": checkpoints.main,
        "bench/pipelines.py": pipelines.main,
        "bench/publish.py": publish.main,
        "bench/digests.py": digests.main,
        "bench/ranks.py": ranks.main,
        "bench/follow.py": follow.main,
        "bench/remote.py": remote.main,
        "bench/stored_fine_tune.py": stored_fine_tune.main,
        "demonstration": demonstration.main,
    }
    for part in {row.part for row in ROWS}:
        for quick in (False, True):
            _, script, *given = part.command(9, tmp_path, tmp_path / "figures.json", quick=quick)
            assert Path(script).exists()
            commands[part.script].make_context("", given)


@pytest.mark.long
def test_the_rows_of_checkpoints_are_measured(tmp_path: Path) -> None:
    target = tmp_path / "found.json"
    names = ["frozen-bytes", "frozen-save", "full-save"]
    only = [each for name in names for each in ("--only", name)]
    options = ["--quick", "--work", str(tmp_path), "--json", str(target)]
    done = CliRunner().invoke(every_row.main, [*only, *options])
    assert done.exit_code == 0, done.output
    found = json.loads(target.read_text())["rows"]
    assert [row["row"] for row in found] == names
    assert {row["verdict"] for row in found} == {"not shown"}  # of so few rounds
    assert all(row["without"]["median"] > row["with"]["median"] > 0 for row in found[:1])
