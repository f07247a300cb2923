"""The benchmark of publishing runs, and counts what each step costs."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import publish
from bench.publish_training import SETUPS


@pytest.mark.long
def test_the_steps_of_a_training_are_counted(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    options = ["--quick", "--only", SETUPS[0].name, "--json", str(target)]
    done = CliRunner().invoke(publish.main, [*options, "--work", str(tmp_path / "work")])
    assert done.exit_code == 0, done.output
    [line] = {line for line in done.output.splitlines() if line.startswith("| lr 1e-6, fp32")}
    assert re.search(r"\| ≤ [0-9.]+ % \| (met|missed) \|", line)
    [[[aim], [fetched]]] = json.loads(target.read_text()).values()
    assert aim > 0
    assert 0 < fetched < 1e6
    assert not [*(tmp_path / "work").iterdir()]
