"""Real text that is at hand without a network, as two tasks: Debian's packages, and docstrings.

*sections*: the one-line description of a Debian package, and the section of the archive it is in.
*docstrings*: the first line of a Python function's docstring, and the function without it.

What is held out is the same for every seed, and shares no source package, and no file, with what is
trained on; texts that occur twice occur once.
"""

import ast
import hashlib
import importlib.util
import random
import re
import subprocess
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tensor_dedup import UnsupportedError

SECTIONS: Final = "sections"
DOCSTRINGS: Final = "docstrings"
# The sections with the most texts; the others have too few to learn from.
_KINDS: Final = 24
# Beside the standard library, what an environment of the tests holds.
_PACKAGES: Final = ("diffusers", "networkx", "numpy", "sklearn", "sympy", "torch", "transformers")
_FILES: Final = 150
_SNIPPET: Final = 400
_HELD_OUT: Final = 5  # one of so many sources
_WORDS: Final = (4, 30)

# A source (package or file), and its text with what belongs to it: a section, or a function.
_Found = tuple[str, str, str]
Example = tuple[str, str]


@dataclass(frozen=True)
class Texts:
    """The examples of a task; `labels` are the classes, or empty for retrieval."""

    labels: tuple[str, ...]
    pool: Sequence[Example]
    held_out: Sequence[Example]

    def training(self, seed: int, count: int) -> list[Example]:
        """Return the examples that the fine-tune of a seed sees."""
        return random.Random(seed).sample(self.pool, min(count, len(self.pool)))

    def digest(self) -> str:
        """Return a short digest of everything in it: what a figure was measured on."""
        content = repr((self.labels, [*self.pool], [*self.held_out]))
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def sections(held_out: int) -> Texts:
    """Return the task of Debian's sections, from the package lists of this machine.

    Raises:
        UnsupportedError: there are no such lists.
    """
    found = sorted(_packages())
    if not found:
        raise UnsupportedError(
            "there are no package lists of Debian here; run apt-get update on Debian or Ubuntu, or "
            "leave this task out with --task docstrings"
        )
    counts = Counter(section for _, _, section in found)
    most = sorted(counts, key=lambda name: (-counts[name], name))[:_KINDS]
    return _split([each for each in found if each[2] in most], held_out, tuple(sorted(most)))


def docstrings(held_out: int, packages: Sequence[str] = _PACKAGES, files: int = _FILES) -> Texts:
    """Return the task of docstrings, from files of the standard library and of packages."""
    roots = [Path(sysconfig.get_path("stdlib"))]
    for package in packages:
        spec = importlib.util.find_spec(package)
        roots += [Path(each) for each in (spec.submodule_search_locations or ())] if spec else []
    return _split([each for root in roots for each in _functions(root, files)], held_out)


def modules(names: Sequence[str]) -> Texts:
    """Return docstrings of the standard library with the modules they are from: few, and quick."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [
        (f"{name}:{code}", text, name)
        for name in names
        for path in sorted((root / name).glob("*.py"))
        for _, text, code in _of_file(path, root)
    ]
    return _split(found, len(found), tuple(sorted(names)))


def _split(found: Iterable[_Found], held_out: int, labels: tuple[str, ...] = ()) -> Texts:
    """Divide by source, each text once, in an order that only their digests decide."""
    once: dict[str, _Found] = {}
    others = set[str]()
    for each in found:
        _, text, other = each
        if text not in once and (labels or other not in others):
            once[text] = each
            others.add(other)
    ordered = sorted(once.values(), key=lambda each: _number(each[1]))
    pool = [(text, other) for source, text, other in ordered if _number(source) % _HELD_OUT]
    rest = [(text, other) for source, text, other in ordered if not _number(source) % _HELD_OUT]
    return Texts(labels, pool, rest[:held_out])


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _packages() -> Iterator[_Found]:
    """Source, description and section of every package in Debian's main archive."""
    try:
        done = subprocess.run(
            ["apt-cache", "dumpavail"], capture_output=True, text=True, errors="replace", check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return
    for block in done.stdout.split("\n\n"):
        fields: dict[str, str] = dict(
            re.findall(r"^(Package|Source|Section|Description): (.+)$", block, re.M)
        )
        if len(fields) < 3 or "Description" not in fields or "/" in fields.get("Section", "/"):
            continue
        source = fields.get("Source", fields["Package"]).split(" ")[0]
        if len(fields["Description"].split()) >= _WORDS[0]:
            yield source, fields["Description"], fields["Section"]


def _functions(root: Path, most: int) -> Iterator[_Found]:
    """File, docstring and code of the functions below a folder, of so many files at most."""
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    files = [
        path for path in root.rglob("*.py") if not left_out & {*path.relative_to(root).parts[:-1]}
    ]
    files.sort(key=lambda path: _number(path.relative_to(root).as_posix()))
    for path in files[:most]:
        yield from _of_file(path, root)


def _of_file(path: Path, root: Path) -> Iterator[_Found]:
    source = path.read_text(encoding="utf-8", errors="replace")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other people's string escapes
            tree = ast.parse(source)
    except SyntaxError:
        return
    lines = source.splitlines()
    name = f"{root.name}/{path.relative_to(root).as_posix()}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        said = node.body[0]
        body = lines[node.lineno - 1 : said.lineno - 1]
        body += lines[said.end_lineno or 0 : node.end_lineno]
        code = " ".join(" ".join(body).split())[:_SNIPPET]
        if _WORDS[0] <= len(text.split()) <= _WORDS[1] and text.isascii() and len(body) > 3:
            yield name, text, code
