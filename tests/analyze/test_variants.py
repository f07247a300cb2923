"""The article's table, for checkpoints whose sizes can be counted by hand."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from tensor_dedup.analyze import analyze
from tensor_dedup.analyze.tensors import AnalyzedTensor, Measured
from tensor_dedup.analyze.variants import variants
from tensor_dedup.cli import main
from tensor_dedup.errors import ConfigError
from tensor_dedup.types import Fingerprint


def test_the_articles_numbers() -> None:
    """7B parameters: 70 GB, 17.5 GB with INT4 and 14 GB on a frozen base, when N is 10."""
    # In the article a weight takes one byte; here, two.
    shape = (70_000, 100_000)
    tensor = AnalyzedTensor("w", Fingerprint(shape, "BF16", "d"), 14_000_000_000)
    rows = {row.approach: row.nbytes / 2e9 for row in variants([Measured("m", [tensor])], 10)}
    assert rows.pop("10 independent models") == 70
    assert rows.pop("INT4") == pytest.approx(17.5, rel=0.04)  # scales: one for each 128 weights
    assert rows.pop("INT8") == pytest.approx(35, rel=0.01)
    assert rows.pop("1 frozen base + 10 heads (10%)") == 14
    assert rows == {}


def saved(folder: Path, **held: torch.Tensor) -> Path:
    folder.mkdir()
    safetensors.torch.save_file(held, folder / "model.safetensors")
    return folder


def test_every_row_can_be_counted(tmp_path: Path) -> None:
    big, norm = torch.randn(64, 256), torch.ones(256)
    ids = torch.arange(100)
    base = saved(tmp_path / "base", big=big, norm=norm, ids=ids)
    one = saved(tmp_path / "one", big=big, norm=norm + 1, ids=ids)
    two = saved(tmp_path / "two", big=big + 1, norm=norm, ids=ids)
    rows = {row.approach: row for row in variants(analyze([base, one, two]).checkpoints, 4)}
    whole, small = 64 * 256 * 4 + 1024 + 800, 1024 + 800
    assert rows["4 independent models"].nbytes == 4 * whole
    assert rows["INT8"].nbytes == 4 * (64 * 256 + 64 * 2 + small)
    assert rows["INT4"].nbytes == 4 * (64 * 256 // 2 + 64 * 2 * 2 + small)
    assert rows["1 frozen base + 4 heads (10%)"].nbytes == whole + round(4 * 0.1 * whole)
    # On average a variant adds half of a norm and half of a matrix.
    assert rows["exact sharing, beside the base"].nbytes == whole + 4 * (1024 + 64 * 256 * 4) // 2
    assert [row.measured for row in rows.values()] == [True, False, False, False, True]
    with pytest.raises(ConfigError, match="give 1 or more"):
        variants(analyze([base]).checkpoints, 0)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_has_eight_bits_already_is_half_with_four(tmp_path: Path, kind: torch.dtype) -> None:
    base = saved(tmp_path / "base", big=torch.ones(64, 256).to(kind), norm=torch.ones(256))
    rows = {row.approach: row.nbytes for row in variants(analyze([base]).checkpoints, 10)}
    assert rows["10 independent models"] == rows["INT8"] == 10 * (64 * 256 + 1024)
    assert rows["INT4"] == 10 * (64 * 256 // 2 + 64 * 2 * 2 + 1024)


def test_what_is_packed_already_counts_as_it_is(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", packed=torch.ones(64, 128, dtype=torch.uint8))
    rows = {row.approach: row.nbytes for row in variants(analyze([base]).checkpoints, 10)}
    assert rows["INT4"] == rows["INT8"] == rows["10 independent models"] == 10 * 64 * 128


def test_the_verb_prints_the_table(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", big=torch.randn(64, 256))
    run = CliRunner().invoke(main, ["analyze", str(base), "--variants", "10"])
    assert run.exit_code == 0, run.output
    lines = [line.split() for line in run.output.splitlines()]
    assert ["10", "independent", "models", "640.0", "KiB", "unchanged"] in lines
    assert "What variants share is not known" in " ".join(run.output.split())
    found = CliRunner().invoke(main, ["analyze", str(base), "--variants", "10", "--json"])
    assert json.loads(found.output)["variants"][0]["bytes"] == 640 << 10
    without = CliRunner().invoke(main, ["analyze", str(base), "--json"])
    assert "variants" not in json.loads(without.output)
