"""The messages of the runbook are those that the program prints, and what it leads to exists."""

import ast
import re
from functools import cache

from files.container_files import DEPLOY
from project import package_source

RUNBOOK = DEPLOY / "runbook.md"
GAP = "\0"  # what is filled in


@cache
def printed() -> frozenset[str]:
    """Every text in the source, with a gap for each thing that is filled in."""
    found: set[str] = set()
    for text in package_source.sources().values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    str(part.value) if isinstance(part, ast.Constant) else GAP
                    for part in node.values
                ]
                found.add("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(re.sub(r"%(s|d|\.\d+f)", GAP, node.value))
    return frozenset(found)


def messages() -> list[str]:
    blocks = re.findall(r"^```text\n(.*?)^```", RUNBOOK.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_every_message_is_one_that_the_program_prints() -> None:
    said = messages()
    assert len(said) == 13
    unknown = [each for each in said if re.sub(r"<\w+>", GAP, each) not in printed()]
    assert unknown == []


def test_a_message_that_nothing_prints_is_found() -> None:
    assert f"{GAP}: no memory manager answered" not in printed()


def test_each_named_alert_exists_and_leads_here() -> None:
    rules = (DEPLOY / "monitoring" / "alerts.yaml").read_text()
    named = set(re.findall(r"`(TensorDedup\w+)`", RUNBOOK.read_text()))
    assert named == set(re.findall(r"alert: (\w+)", rules))
    headings = re.findall(r"^## (.*)$", RUNBOOK.read_text(), re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"runbook: runbook\.md#(\S+)", rules)) <= anchors
