"""The snippets of a page of documentation, and how they run.

A comment in front of a block says what to do with it:

    <!-- not run: why it cannot run where tests do -->
    <!-- long: why it takes minutes -->
"""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>not run|long): (?P<why>[^\n]*) -->\n)?"
    r"^(?P<indent> *)```(?P<language>[a-z]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.M | re.S,
)
_SECONDS = 600


@dataclass(frozen=True)
class Snippet:
    """A fenced block; `mark` and `why` are those of the comment in front of it."""

    language: str
    text: str
    line: int
    mark: str
    why: str


def snippets(page: str) -> list[Snippet]:
    """All fenced blocks of a page's text, in order."""
    return [
        Snippet(
            found["language"],
            found["text"],
            page.count("\n", 0, found.start("text")),
            found["mark"] or "",
            found["why"] or "",
        )
        for found in _FENCE.finditer(page)
    ]


def run(page: str, blocks: list[tuple[str, str, int]]) -> dict[str, object]:
    """Run the blocks (language, text, line) as a reader would, in this folder and this process.

    Variables of Python, and what the shell exports for this package, last until the page ends.
    Returns Python's names, which may hold engines that have to live as long as the process.
    """
    names: dict[str, object] = {"__name__": "__snippet__"}
    for language, text, line in blocks:
        if language == "bash":
            _run_shell(text)
        elif "__main__" in text:
            script = Path("snippet.py")
            script.write_text(text)
            subprocess.run([sys.executable, script], check=True, timeout=_SECONDS)
        else:
            exec(compile("\n" * line + text, page, "exec"), names)
    return names


def _run_shell(text: str) -> None:
    with tempfile.NamedTemporaryFile() as exported:
        told = f"set -euo pipefail\n{text}\nenv -0 > {exported.name}\n"
        subprocess.run(["bash", "-c", told], check=True, timeout=_SECONDS)
        for entry in Path(exported.name).read_text().split("\0"):
            name, _, value = entry.partition("=")
            if name.startswith("TENSOR_DEDUP_"):
                os.environ[name] = value
