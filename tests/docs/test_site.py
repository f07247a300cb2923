"""The documentation site builds without a warning, and its pages need no network."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from processes import chromium
from project import package_source
from tensor_dedup.cli import VERBS
from tensor_dedup.errors import NOBODY_THERE, WRONG_DATA, WRONG_USE

ROOT = package_source.ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A warning, such as a link that leads nowhere, fails the build.

    Warnings count only where they are logged: with `--quiet`, `--strict` knows of none.
    """
    for name in ("mkdocs", "material", "mkdocstrings_handlers.python", "mkdocs_click"):
        pytest.importorskip(name, reason="scripts/setup --dev installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert "WARNING" not in done.stderr
    return folder


class Fetched(HTMLParser):
    """What a browser fetches to show a page: not the links that a reader may follow."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        has = {name: value or "" for name, value in attrs}
        if tag == "link" and "canonical" not in has.get("rel", ""):
            self.addresses.append(has.get("href", ""))
        if tag != "a":
            self.addresses.append(has.get("src", ""))


def elsewhere(addresses: list[str]) -> list[str]:
    return [each for each in addresses if re.match(r"(https?:)?//", each)]


def pages(site: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(site.rglob("*.html")):
        yield str(path.relative_to(site)), path.read_text()


def test_what_a_page_fetches_is_found() -> None:
    text = '<link href="//fonts.example/a.css"><a href="https://b">b</a><img src="https://c/d.png">'
    assert elsewhere(Fetched(text).addresses) == ["//fonts.example/a.css", "https://c/d.png"]


def test_no_page_needs_the_network(site: Path) -> None:
    fetched = {name: Fetched(text).addresses for name, text in pages(site)}
    assert len(fetched) > 30
    assert all(any(addresses) for name, addresses in fetched.items() if name != "404.html")
    assert {name: elsewhere(each) for name, each in fetched.items() if elsewhere(each)} == {}
    styles = [path.read_text() for path in site.rglob("*.css")]
    assert styles
    assert [each for text in styles for each in re.findall(r"url\((https?:[^)]*)\)", text)] == []


# Resolves to the addresses of the pages that the open search finds.
FOUND = """
new Promise((resolve) => {
  const began = Date.now();
  const timer = setInterval(() => {
    const links = [...document.querySelectorAll("a.md-search-result__link")];
    if (links.length || Date.now() - began > 20000) {
      clearInterval(timer);
      resolve(links.map((link) => link.href));
    }
  }, 100);
})
"""


def test_search_works_in_a_folder(site: Path) -> None:
    with chromium.browser() as shown:
        shown.show(f"{(site / 'index.html').as_uri()}?q=glossary", 1200)
        found = shown.ask(FOUND)
        assert any(link.startswith((site / "glossary.html").as_uri()) for link in found)
        assert {url.partition(":")[0] for url in shown.requested} <= {"file", "data", "about"}


def test_the_command_line_is_all_there(site: Path) -> None:
    text = (site / "reference" / "cli.html").read_text()
    assert VERBS
    assert [verb for verb in VERBS if f'id="tensor-dedup-{verb}"' not in text] == []
    assert "Sentinel" not in text


def test_every_verb_is_on_a_page_that_shows_its_use() -> None:
    docs = ROOT / "docs"
    parts = (docs / "tutorials", docs / "howto", docs)
    text = "\n".join(path.read_text() for part in parts for path in part.glob("*.md"))
    assert [v for v in VERBS if not re.search(rf"\btensor-dedup {v}\b|`{v}\b", text)] == []


def test_parts_are_generated(site: Path) -> None:
    assert "tensor_dedup_resident_bytes" in (site / "reference" / "metrics.html").read_text()
    assert [name for name, text in pages(site) if "generated:" in text] == []


def test_exit_codes_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    said = [int(each) for each in re.findall(r"^\| (\d+) \|", text, re.M)]
    assert said == [0, WRONG_DATA, WRONG_USE, NOBODY_THERE, 4, 130, 141]


def test_every_variable_of_the_environment_is_documented() -> None:
    code = "\n".join(package_source.sources().values())
    read = set(re.findall(r"\"(TENSOR_DEDUP_[A-Z_]+)\"", code))
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    assert len(read) > 3
    assert {name for name in read if f"`{name}`" not in text} == set()


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    import tensor_dedup

    text = (site / "reference" / "python.html").read_text()
    names = list(tensor_dedup._HOMES)
    assert names
    assert [name for name in names if f'id="tensor_dedup.{name}"' not in text] == []


# With a unit behind it, so that versions are none.
FIGURE = re.compile(r"\d[\d,]*\.\d+(?= (?:s|ms|MB|MiB|GiB)\b| %)")


def test_figures_are_those_of_the_benchmarks() -> None:
    docs = ROOT / "docs"
    measured = set(re.findall(r"\d[\d,]*\.\d+", (docs / "benchmarks" / "tables.md").read_text()))
    pages = [docs / "index.md", docs / "does-it-pay.md"]
    pages += [path for part in ("tutorials", "howto") for path in (docs / part).glob("*.md")]
    said = {path.name: FIGURE.findall(path.read_text()) for path in pages}
    assert sum(map(len, said.values())) > 40
    assert {name: [f for f in each if f not in measured] for name, each in said.items()} == {
        name: [] for name in said
    }
