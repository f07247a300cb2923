"""What a store is made of reaches the disk by one module, or no test knew what a crash leaves."""

import ast
from collections.abc import Iterator

import pytest

from project import package_source

INTERFACE = "tensor_dedup.store.files"
WINGS = ("tensor_dedup.store.", "tensor_dedup.remote.", "tensor_dedup.training.")
FORBIDDEN = {"shutil", "io", "tempfile", "mmap", "fcntl", "subprocess", "glob", "pathlib.os"}
# What of os is not about files.
HARMLESS = {
    "PathLike",
    "environ",
    "fsdecode",
    "fsencode",
    "getpid",
    "register_at_fork",
    "sched_getaffinity",
    "sysconf",
}
# What a Path can do to a disk; `files.open(...)` is the interface itself, and `LocalStore.open` and
# `Remote.open` go through it.
METHODS = {
    "chmod",
    "exists",
    "glob",
    "is_dir",
    "is_file",
    "iterdir",
    "lstat",
    "mkdir",
    "open",
    "read_bytes",
    "read_text",
    "rename",
    "resolve",
    "rglob",
    "rmdir",
    "stat",
    "symlink_to",
    "touch",
    "unlink",
    "write_bytes",
    "write_text",
}
# An archive is opened from a stream only.
RECEIVERS = {"LocalStore", "Remote", "files", "_files", "self", "tarfile"}


def faults(text: str) -> Iterator[str]:
    """Every way to the disk in a module's text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in FORBIDDEN | {"sqlite3"})
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            if node.module in FORBIDDEN or (node.module == "os" and names - HARMLESS):
                yield f"{node.module}: {names}"
        elif isinstance(node, ast.Attribute):
            yield from _attribute(node)
        elif isinstance(node, ast.Name) and node.id == "open":
            yield "open()"
        elif isinstance(node, ast.Call):
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[str]:
    # A text's replace takes two arguments, a path's one.
    named = isinstance(node.func, ast.Attribute) and node.func.attr == "replace"
    if named and len(node.args) == 1 and not node.keywords:
        yield "replace()"


def _attribute(node: ast.Attribute) -> Iterator[str]:
    base = node.value
    name = base.id if isinstance(base, ast.Name) else getattr(base, "attr", None)
    if name == "os" and node.attr not in HARMLESS:
        yield f"os.{node.attr}"
    elif node.attr in METHODS and name not in RECEIVERS | {"os"}:
        yield f"{ast.unparse(node)}"


def store_modules() -> dict[str, str]:
    return {
        name: text
        for name, text in package_source.sources().items()
        if name.startswith(WINGS) and name != INTERFACE
    }


def test_one_module_touches_files() -> None:
    found = {name: list(faults(text)) for name, text in store_modules().items()}
    # SQLite does the files of the index itself: a cache, which any crash may take. What memory maps
    # is no file. A registry's password is asked of the program that Docker asks.
    assert {name: what for name, what in found.items() if what} == {
        "tensor_dedup.store.index": ["sqlite3"],
        "tensor_dedup.store.buffers": ["mmap", "os.fstat"],
        "tensor_dedup.remote.oci.credentials": ["subprocess"],
    }


@pytest.mark.parametrize(
    "text",
    [
        "import shutil",
        "from tempfile import mkdtemp",
        "import os\nos.unlink(path)",
        "from os import rename",
        "open(path)",
        "path.read_bytes()",
        "path.replace(other)",
        "Path(name).open('rb')",
        "self.path.exists()",
        "layout.root.iterdir()",
        "import sqlite3",
    ],
)
def test_another_way_to_the_disk_is_found(text: str) -> None:
    assert list(faults(text))


@pytest.mark.parametrize(
    "text",
    ["files.open(path, 'read')", "self._objects.files.unlink(path)", "import os\nos.environ['A']"],
)
def test_the_interface_is_no_other_way(text: str) -> None:
    assert list(faults(text)) == []
