"""Dashboard and alert rules ask for metrics that a manager has."""

import json
import re
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from files.container_files import DEPLOY
from manager_runs import managers

BOARD = DEPLOY / "monitoring" / "grafana.json"
ALERTS = DEPLOY / "monitoring" / "alerts.yaml"


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of each sample of a manager that runs, with a checkpoint in it."""
    folder = tmp_path_factory.mktemp("manager")
    folder.chmod(0o700)
    with (
        managers.running(folder, "--metrics", "0", "--dashboard") as manager,
        manager.client() as client,
    ):
        kept = managers.build(client, "layer", managers.pattern(1, 1 << 10))
        managers.until(lambda: "metrics=" in manager.log.read_text())
        [url] = re.findall(r"metrics=(\S+)", manager.log.read_text())
        managers.until(lambda: 'checkpoint="base"' in read(url))
        text = read(url)
        del kept
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def read(url: str) -> str:
    return str(urllib.request.urlopen(url).read().decode())


def expressions() -> list[str]:
    yaml: Any = pytest.importorskip("yaml")
    board = json.loads(BOARD.read_text())
    drawn = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = [variable["query"] for variable in board["templating"]["list"]]
    rules = [r for g in yaml.safe_load(ALERTS.read_text())["groups"] for r in g["rules"]]
    return [*drawn, *asked, *(rule["expr"] for rule in rules)]


def test_every_metric_that_is_asked_for_exists(scraped: dict[str, set[str]]) -> None:
    names = {name for text in expressions() for name in re.findall(r"tensor_dedup_\w+", text)}
    assert len(names) > 15
    assert names - scraped.keys() == set()
    assert all("device" in scraped[name] for name in names)


def test_every_label_that_is_asked_for_exists(scraped: dict[str, set[str]]) -> None:
    asked = {
        (name, label)
        for text in expressions()
        for name, labels in re.findall(r"(tensor_dedup_\w+)\{([^}]*)\}", text)
        for label in re.findall(r"(\w+)=", labels)
    }
    assert ("tensor_dedup_saved_bytes", "device") in asked
    assert {(name, label) for name, label in asked if label not in scraped[name]} == set()


def test_the_alerts_are_complete() -> None:
    yaml: Any = pytest.importorskip("yaml")
    rules = [r for g in yaml.safe_load(ALERTS.read_text())["groups"] for r in g["rules"]]
    for rule in rules:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"].keys() == {"severity"}
        assert rule["annotations"].keys() == {"summary", "runbook"}
        assert rule["expr"].count("(") == rule["expr"].count(")")
    by_name = {rule["alert"]: rule["expr"] for rule in rules}
    assert "> 0.9" in by_name["TensorDedupBudgetNearlyFull"]
    for name in ("Refusals", "Takeovers", "Evictions"):
        assert f"TensorDedup{name}" in by_name


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(BOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
