"""The first screens of README.md: what it prints, shows and leads to is there."""

import re
from io import StringIO

import pytest
from rich.console import Console

from project import package_source
from tensor_dedup.analyze import verdict
from tensor_dedup.analyze.analysis import compare
from tensor_dedup.analyze.tensors import AnalyzedTensor, Measured
from tensor_dedup.cli.analyze import show_analysis
from tensor_dedup.types import Fingerprint

ROOT = package_source.ROOT
TEXT = (ROOT / "README.md").read_text()
# Of the demonstration's checkpoints: scripts/demonstration/models.py.
HIDDEN, MLP, KEYS, ROWS = 896, 4864, 128, 151_936
CHANGED = 12


def demonstrated(name: str, changed: int | None = None) -> Measured:
    """A checkpoint of the demonstration's shapes, with the contents of one layer changed."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (ROWS, HIDDEN)}
    for number in range(24):
        layer = f"model.layers.{number}"
        for part, rows in (("q", HIDDEN), ("k", KEYS), ("v", KEYS)):
            shapes[f"{layer}.self_attn.{part}_proj.weight"] = (rows, HIDDEN)
            shapes[f"{layer}.self_attn.{part}_proj.bias"] = (rows,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
        for part in ("gate", "up"):
            shapes[f"{layer}.mlp.{part}_proj.weight"] = (MLP, HIDDEN)
        shapes[f"{layer}.mlp.down_proj.weight"] = (HIDDEN, MLP)
        for part in ("input", "post_attention"):
            shapes[f"{layer}.{part}_layernorm.weight"] = (HIDDEN,)
    shapes["model.norm.weight"] = (HIDDEN,)
    tensors = []
    for tensor, shape in shapes.items():
        digest = tensor + name * (f".layers.{changed}." in tensor)
        nbytes = 2
        for length in shape:
            nbytes *= length
        tensors.append(AnalyzedTensor(tensor, Fingerprint(shape, "BF16", digest), nbytes))
    return Measured(name, tensors)


def test_the_output_is_what_analyze_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "vllm_server", lambda: "vllm serve")  # as with published vLLM
    analysis = compare([demonstrated("base"), demonstrated("one-layer", CHANGED)])
    screen = StringIO()
    show_analysis(analysis, Console(file=screen, width=80, force_terminal=False))
    [block] = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
    assert [line.rstrip() for line in screen.getvalue().splitlines()] == block.splitlines()
    assert len(block.splitlines()) == 11


def test_the_two_commands_and_the_state_of_gpus_are_in_the_first_screen() -> None:
    first = "\n".join(TEXT.splitlines()[:20])
    assert all(f"    scripts/{name} " in first for name in ("demo", "test"))
    assert re.search(r"\*\*GPUs:\*\* .* H200 .*\(docs/gpu\.md\)", first)


def test_its_links_and_pictures_are_there() -> None:
    linked = re.findall(r"\]\(([^)#]+)|(?:src|srcset)=\"([^\"]+)\"", TEXT)
    paths = {a or b for a, b in linked if "://" not in (a or b)}
    assert len(paths) > 8
    assert {path for path in paths if not (ROOT / path).is_file()} == set()


def test_the_table_has_every_verb_that_stands_for_a_product() -> None:
    table = TEXT.split("## What there is")[1].split("##")[0]
    for verb in ("serve", "import", "push", "substitute", "plan"):
        assert f"`tensor-dedup {verb}`" in table
