"""The page of `analyze --html`: its structure, and what a browser and axe-core make of it."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy
import pytest
import safetensors.numpy

from models import gallery
from processes import chromium
from tensor_dedup.analyze import analyze
from tensor_dedup.analyze.analysis import compare
from tensor_dedup.analyze.tensors import AnalyzedTensor, Measured
from tensor_dedup.cli.analysis_page import page, write_page
from tensor_dedup.types import Fingerprint

COMMAND = Path(sys.executable).with_name("tensor-dedup")
LABELS = list(gallery.MAKERS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return gallery.make(tmp_path_factory.mktemp("gallery"))


@pytest.fixture(scope="module")
def text(models: list[Path]) -> str:
    return page(analyze(models), LABELS)


class Structure(HTMLParser):
    """The elements of a page with their attributes, the texts, and what is not closed."""

    VOID = frozenset({"meta", "wbr", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def test_it_is_a_table_with_headers_and_a_button_for_each_cell(text: str) -> None:
    found = Structure(text)
    assert found.open == []
    heads = found.all("th")
    assert all(head.get("scope") in ("col", "row", "colgroup") for head in heads)
    assert sum(head["scope"] == "row" for head in heads) == len(LABELS)
    layers = [head.get("aria-label") for head in heads if "layer" in (head.get("class") or "")]
    assert layers == ["embed_tokens", *(f"layers.{n}" for n in range(6)), "lm_head, norm"]
    identities = [each["id"] for each in found.all("div") if "popover" in each]
    opened = [b["popovertarget"] for b in found.all("button") if "popovertargetaction" not in b]
    assert opened == identities
    assert len(opened) == len(LABELS) * len(layers)
    assert len(set(opened)) == len(opened)
    said = {(b.get("aria-label") or "").replace("\xa0", " ") for b in found.all("button")}
    assert "Qwen2-tiny-Instruct, layers.3: 0 % of 29.1 KiB shared" in said
    assert "Qwen2-tiny-sql-lora-merged, layers.0: 91 % of 29.1 KiB shared" in said


def test_it_says_what_the_text_says(text: str) -> None:
    found = "".join(Structure(text).texts).replace("\xa0", " ")
    assert "546.2 KiB instead of 1.1 MiB: 51 % saved" in found
    assert "+29.1 KiB of 224.4 KiB" in found
    assert "changed: q_proj, v_proj; k_proj lost to vLLM's fused qkv" in found
    assert "--compress auto" in found


def test_nothing_is_loaded_and_nothing_runs(text: str) -> None:
    found = Structure(text)
    assert {tag for tag, _ in found.elements} & {"script", "link", "img", "iframe"} == set()
    assert not re.search(r"https?:|url\(|@import|\son\w+=", text)
    assert "default-src 'none'" in text


def test_names_are_text(tmp_path: Path, models: list[Path]) -> None:
    evil = '<script>alert("x")</script>\x1b'
    found = page(analyze(models[:2]), [evil, "b&c"])
    assert "<script" not in found
    assert "\x1b" not in found
    assert "b&amp;c" in found


def test_the_command_writes_it_beside_its_other_output(models: list[Path], tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    arguments = [str(each) for each in (COMMAND, "analyze", *models, "--html", target)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert "instead of" in done.stdout
    assert done.stdout.endswith(f"Wrote {target}.\n")
    assert Structure(target.read_text(encoding="utf-8")).open == []
    other = str(tmp_path / "page.safetensors")
    wrong = subprocess.run([*arguments[:-1], other], capture_output=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, b"")
    assert not (tmp_path / "page.safetensors").exists()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1600])
def test_a_browser_shows_it_and_axe_finds_nothing_serious(
    models: list[Path], tmp_path: Path, width: int, dark: bool
) -> None:
    target = tmp_path / "page.html"
    write_page(target, analyze(models), LABELS)
    with chromium.browser() as shown:
        shown.show(target.as_uri(), width, dark=dark)
        assert shown.ask("getComputedStyle(document.body).backgroundColor") == (
            "rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)"
        )
        # Only the table scrolls sideways.
        assert shown.ask("document.documentElement.scrollWidth") <= width
        # By keyboard: the second cell of the second row opens, and Escape closes it.
        shown.ask("document.querySelector('[popovertarget=p1-4]').focus()")
        shown.press("Enter", 13)
        is_open = "document.querySelector('#p1-4').matches(':popover-open')"
        assert shown.ask(is_open)
        assert "self_attn.q_proj.weight" in shown.ask("document.querySelector('#p1-4').innerText")
        assert shown.requested == [target.as_uri()]
        assert shown.said == []
        open_findings = shown.accessibility()
        shown.press("Escape", 27)
        assert not shown.ask(is_open)
        assert [*open_findings, *shown.accessibility()] == []


def of_layers(name: str, count: int, changed: str = "") -> Measured:
    """A checkpoint with the parts and the sizes of a large model."""
    parts = [f"model.layers.{n}.self_attn.{p}_proj.weight" for n in range(count) for p in "qkvo"]
    return Measured(
        name,
        [
            AnalyzedTensor(
                part,
                Fingerprint((8192, 8192), "BF16", part + name * bool(changed and changed in part)),
                100 << 20,
            )
            for part in ["model.embed_tokens.weight", *parts, "model.norm.weight"]
        ],
    )


def test_a_window_of_1280_pixels_has_all_layers_and_the_reason(tmp_path: Path) -> None:
    seen = "el => el.getBoundingClientRect().right <= document.documentElement.clientWidth"
    cut = "el => el.scrollWidth > el.clientWidth"
    last = "[...document.querySelectorAll('#layers tbody .cell button')].at(-2).textContent"
    reasons = "[...document.querySelectorAll('tr.why')].map(el => el.innerText)"
    with chromium.browser() as shown:
        for count in (24, 28, 61, 80):
            tune = of_layers("Meta-Llama-3.1-70B-Instruct-one-layer", count, f".{count - 1}.")
            analysis = compare([of_layers("Meta-Llama-3.1-70B", count), tune])
            target = tmp_path / f"{count}.html"
            write_page(target, analysis, [each.path for each in analysis.checkpoints])
            shown.show(target.as_uri(), 1280)
            for what in ("#layers", "#layers .cell button", "#layers tr.why td"):
                assert shown.ask(f"[...document.querySelectorAll('{what}')].every({seen})"), what
            # Each cell has its number, whole.
            cells = "[...document.querySelectorAll('#layers .cell button')]"
            assert shown.ask(f"{cells}.every(el => el.innerText !== '')")
            assert not shown.ask(f"{cells}.some({cut})")
            assert int(shown.ask(last)) < 100
            assert shown.ask(reasons) == ["loaded first", f"changed: layer {count - 1}"]
        assert shown.accessibility() == []


def test_axe_finds_what_is_wrong() -> None:
    with chromium.browser() as shown:
        shown.show("data:text/html,<p style='color:%23ddd;background:white'>pale</p>", 400)
        assert any(finding.startswith("color-contrast") for finding in shown.accessibility())


def test_it_has_every_character_whatever_the_terminal_has(tmp_path: Path) -> None:
    tensors = {"gewächs": numpy.ones(4), "<img src=x>\x1b[31m": numpy.zeros(4)}
    safetensors.numpy.save_file(tensors, tmp_path / "a.safetensors")
    done = subprocess.run(
        [COMMAND, "analyze", "a.safetensors", "a.safetensors", "--html", "a.html"],
        cwd=tmp_path,
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.stdout.isascii()
    drawn = (tmp_path / "a.html").read_text()
    assert "gewächs" in drawn
    assert "\x1b" not in drawn
    assert Structure(drawn).all("img") == []
