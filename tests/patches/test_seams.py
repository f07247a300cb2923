"""The table of seams against the installed vLLM, and against one that changed."""

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensor_dedup.patches.vllm import seams

EVERY_TARGET = [seam.target for seam in seams.SEAMS]


@pytest.fixture
def _forget_usable() -> Iterator[None]:
    seams.usable.cache_clear()
    yield
    seams.usable.cache_clear()


@pytest.mark.parametrize("seam", seams.SEAMS, ids=EVERY_TARGET)
def test_the_installed_vllm_is_as_recorded(seam: seams.Seam) -> None:
    assert seams.compare(seam) is None


def test_every_seam_is_listed_once_and_says_why_and_what() -> None:
    assert len(set(EVERY_TARGET)) == len(EVERY_TARGET)
    for seam in seams.SEAMS:
        assert seam.reason
        assert seam.part in seams.WITHOUT
        assert bool(seam.signature) != bool(seam.needs)


def test_every_private_name_we_import_from_vllm_is_listed() -> None:
    imported = {
        f"{node.module}:{alias.name}"
        for file in Path(seams.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")
        for alias in node.names
        if alias.name.startswith("_")
    }

    assert imported
    assert imported <= set(EVERY_TARGET)


@pytest.mark.parametrize(
    ("target", "signature", "needs", "found"),
    [
        ("vllm.no_such_module:function", "()", (), "missing"),
        ("vllm.version:no_such_name", "()", (), "missing"),
        ("vllm.plugins:load_plugins_by_group", "(group, strict)", (), "is (group)"),
        ("vllm.plugins:load_plugins_by_group", "(group=None)", (), "is (group)"),
        ("vllm.plugins:load_plugins_by_group", "", ("group", "strict"), "without strict"),
    ],
)
def test_a_change_is_a_mismatch_that_says_what_is_there(
    target: str, signature: str, needs: tuple[str, ...], found: str
) -> None:
    seam = seams.Seam(target, "loader", "a test", signature, needs)

    mismatch = seams.compare(seam)

    assert mismatch is not None
    assert found in str(mismatch)
    assert target in str(mismatch)


@pytest.mark.usefixtures("_forget_usable")
def test_a_mismatch_is_logged_once_and_only_its_part_is_unusable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = seams.Seam("vllm.version:no_such_name", "reload", "a test", "()")
    monkeypatch.setattr(seams, "SEAMS", (gone,))

    with caplog.at_level(logging.WARNING):
        answers = [seams.usable("reload"), seams.usable("reload"), seams.usable("loader")]

    assert answers == [False, False, True]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no_such_name" in caplog.text
    assert seams.WITHOUT["reload"] in caplog.text
