"""Modules that are named in text, which no import checks and renaming tools miss."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import pytest

from project import package_source

_NAME = re.compile(r"tensor_dedup(\.[a-z_]\w*)+(:\w+)?")
# Names of this form that are no modules.
NO_MODULES = {
    "tensor_dedup.device",  # a key of a command's context
}


@cache
def named() -> tuple[tuple[str, str], ...]:
    """Each name of a module in a string of the package, and the module it stands in."""
    return tuple(_named())


def _named() -> Iterator[tuple[str, str]]:
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
    assert name.partition(":")[0] in package_source.sources()


def shown() -> str:
    """The pages that users read."""
    pages = [package_source.ROOT / "README.md", *(package_source.ROOT / "docs").rglob("*.md")]
    return "\n".join(page.read_text() for page in pages)


def readme_imports() -> list[str]:
    """The import statements of the package in the Python examples that users read."""
    text = shown()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    statements = [node for block in blocks for node in ast.walk(ast.parse(block))]
    return sorted(
        ast.unparse(node)
        for node in statements
        if isinstance(node, ast.Import | ast.ImportFrom) and "tensor_dedup" in ast.unparse(node)
        if not ast.unparse(node).startswith("from vllm")
    )


def test_what_readme_imports_can_be_imported() -> None:
    assert len(readme_imports()) > 5
    for statement in readme_imports():
        exec(statement, {})


# Each page's own imports, in a process of its own: tests/docs/test_snippets.py.
@pytest.mark.long
def test_what_readme_imports_can_be_imported_in_a_new_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join(readme_imports())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def used(texts: Mapping[str, str], roots: Iterable[str]) -> set[str]:
    """The modules that are reached from these, by imports and by names in strings."""
    graph = package_source.import_graph(texts)
    for module, name in named():
        # A package that is named may be run, too: `python -m`.
        graph[module] |= {name.partition(":")[0], f"{name}.__main__"}
    found, waiting = set[str](), [*roots]
    while waiting:
        module = waiting.pop()
        if module in graph and module not in found:
            found.add(module)
            # Whoever imports a module runs the packages that it is in.
            waiting += [*graph[module], module.rpartition(".")[0]]
    return found


def roots() -> set[str]:
    """What users run, and what README.md and the documentation have them import."""
    text = shown()
    public = set(re.findall(r"(?:from|import) (tensor_dedup[\w.]*)", text))
    public |= {n for n in package_source.sources() if n.startswith("tensor_dedup.integrations.")}
    public |= {n for n in package_source.sources() if n.startswith(package_source.SECOND_NAME)}
    commands = {name.partition(":")[0] for name in entry_points()}
    adapters = "tensor_dedup.training.adapters"
    return {
        "tensor_dedup",
        "tensor_dedup.__main__",
        adapters,
        *public,
        *commands,
    }


def test_nothing_that_only_tests_use_is_in_the_package() -> None:
    everything = package_source.sources().keys() - {""}
    assert everything - used(package_source.sources(), roots()) == set()


def test_a_module_that_nobody_uses_is_found() -> None:
    texts = {**package_source.sources(), "tensor_dedup.store.fake": "import tensor_dedup.errors"}
    assert "tensor_dedup.store.fake" not in used(texts, roots())
