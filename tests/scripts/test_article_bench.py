"""The article's models, at a sixteenth of their width, load and share what theirs do."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import package_source

SHARED = r"\| shared tensors \| \S* \| (\d+) \| (\d+) in the second \|"
REDUCTION = r"\| reduction \| ([\d.]+) % \| \S+ \| ([\d.]+)% \|"


def run(tmp_path: Path, *options: str) -> str:
    script = str(package_source.ROOT / "scripts" / "bench" / "article.py")
    done = subprocess.run(
        [sys.executable, script, "--scale", "16", "--work", str(tmp_path), *options],
        env={**os.environ, "PYTHONPATH": str(package_source.SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    return done.stdout


def test_sdxl_shares_its_text_encoder_with_clip(tmp_path: Path) -> None:
    found = run(tmp_path, "--only", "sdxl")
    ((shared, of),) = re.findall(SHARED, found)
    assert (shared, of) == ("196", "196")
    ((theirs, ours),) = re.findall(REDUCTION, found)
    assert float(ours) == pytest.approx(float(theirs), abs=0.1)


@pytest.mark.long
def test_the_others_share_as_the_article_says(tmp_path: Path) -> None:
    found = run(tmp_path, "--only", "deepfloyd", "--only", "qwen2")
    for component in ("text_encoder", "safety_checker"):
        ((shared, of),) = re.findall(rf"\| {component} \| .* \| ([\d,]+) B of ([\d,]+) \|", found)
        assert shared == of
    for theirs, ours in re.findall(REDUCTION, found):
        assert float(ours) == pytest.approx(float(theirs), abs=0.5)
    assert len(re.findall(REDUCTION, found)) == 2
