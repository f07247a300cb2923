"""Modules that are named in text, which no import checks and renaming tools miss."""

import ast
import re
import tomllib
from collections.abc import Iterator

import pytest

import package_source

_NAME = re.compile(r"tensor_dedup(\.[a-z_]\w*)+(:\w+)?")
# Names of this form that are no modules.
NO_MODULES = {
    "tensor_dedup.device",  # a key of a command's context
}


def named() -> Iterator[tuple[str, str]]:
    """Each name of a module in a string of the package, and the module it stands in."""
    for module, text in package_source.sources().items():
        for node in ast.walk(ast.parse(text)):
            text_of = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text_of, str) and _NAME.fullmatch(text_of) and text_of not in NO_MODULES:
                yield module, text_of


def entry_points() -> Iterator[str]:
    project = tomllib.loads((package_source.ROOT / "pyproject.toml").read_text())["project"]
    yield from project["scripts"].values()
    for group in project["entry-points"].values():
        yield from group.values()


@pytest.mark.parametrize("name", sorted({name for _, name in named()} | {*entry_points()}))
def test_a_module_that_is_named_in_text_is_there(name: str) -> None:
    assert name.partition(":")[0] in package_source.modules()


def test_the_modules_that_readme_imports_are_there() -> None:
    text = (package_source.ROOT / "README.md").read_text()
    found = set(re.findall(r"(?:from|import) (tensor_dedup[\w.]*)", text))
    assert found
    assert found <= package_source.modules().keys()
