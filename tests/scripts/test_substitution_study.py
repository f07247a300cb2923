"""The study of substitution: the same numbers twice, the base's layers, and honest bits."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import package_source
from bench import substitution_study as study
from bench import substitution_texts as texts_of
from bench.substitution_tunes import HEAD, quantised, rounded
from tensor_dedup import ConfigError
from tensor_dedup.planning.substitution import substitute

sys.path.append(str(package_source.ROOT / "scripts"))
import site_charts
import site_curves


def quick(work: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Run the shortest form; what it wrote as JSON, and what it printed."""
    script = str(package_source.ROOT / "scripts" / "bench" / "substitution_study.py")
    raw = work.with_suffix(".json")
    done = subprocess.run(
        [
            sys.executable,
            script,
            "--quick",
            "--seeds",
            "1",
            "--work",
            work,
            "--json",
            raw,
            *options,
        ],
        env={**os.environ, "PYTHONPATH": str(package_source.SOURCE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(raw.read_text()), done.stdout


def test_two_runs_give_the_same_and_what_was_taken_is_the_bases(tmp_path: Path) -> None:
    one, said = quick(tmp_path / "one")
    two, _ = quick(tmp_path / "two")
    assert one == two
    assert one["tunes"].keys() == {"sections-0", "docstrings-0"}
    assert len({*one["tunes"].values()}) == 2
    for task in ("sections", "docstrings"):
        folder = tmp_path / "one" / f"{task}-0"
        base, tune = (load_file(folder / each / "model.safetensors") for each in ("base", "tune"))
        assert not all(torch.equal(tensor, tune[name]) for name, tensor in base.items())
        of = [each for each in one["measured"] if each["task"] == task]
        taken = [each for each in of if each["budget"] is not None]
        assert {each["form"] for each in taken} == {study.BY_NORM, study.BY_SAMPLES}
        assert all(each["layers"] and each["adds"] <= each["budget"] for each in taken)
        # Once more, by names, from the files themselves: the base's where it was taken.
        chosen = taken[0]["layers"]
        output = tmp_path / f"{task}-again"
        done = substitute(folder / "base", folder / "tune", output, layers=",".join(chosen))
        assert done.adds_bytes == taken[0]["adds"]
        names = {name for layer in done.layers for name in layer.tensors}
        study.check(load_file(output / "model.safetensors"), names, base, tune)
        forms = {each["form"]: each for each in of if each["scope"] == study.EVERYTHING}
        sizes = [forms[form]["adds"] for form in (study.AS_IS, "INT8", "INT4", "INT3")]
        assert sizes == sorted(sizes, reverse=True)
        assert f"**{task}, encoder**" in said


def test_what_was_found_is_kept_and_not_mixed_with_other_settings(tmp_path: Path) -> None:
    task = {"docstrings": study.tasks(quick=True)["docstrings"]}
    said: list[str] = []
    found = study.Study(tmp_path, task, seeds=1, quick=True).run(said.append)
    assert len(said) == 1 + len(found)
    assert study.Study(tmp_path, task, seeds=1, quick=True).run(said.append) == found
    assert len(said) == 1 + len(found)
    with pytest.raises(ConfigError, match="other settings"):
        study.Study(tmp_path, task, seeds=1, quick=False).run(said.append)


def test_a_layer_that_is_not_the_bases_is_found() -> None:
    base, tune = ({"a": torch.full((4,), n).bfloat16()} for n in (1.0, 2.0))
    study.check(tune, set(), base, tune)
    study.check(base, {"a"}, base, tune)
    with pytest.raises(AssertionError, match="a: not the bytes of the base"):
        study.check(tune, {"a"}, base, tune)


@pytest.mark.parametrize(("bits", "levels"), [(8, 255), (4, 15), (3, 7)])
def test_rounding_has_as_many_levels_as_bits_allow(bits: int, levels: int) -> None:
    draw = torch.Generator().manual_seed(bits)
    tensor = torch.randn(64, 128, generator=draw)
    found, scales = rounded(tensor, bits, 64)
    assert scales == 128
    groups = found.reshape(-1, 64)
    assert max(len(group.unique()) for group in groups) <= levels
    plain = tensor.reshape(-1, 64).abs().amax(1, keepdim=True) / ((levels - 1) // 2)
    nearest = (tensor.reshape(-1, 64) / plain).round() * plain
    error, of_nearest = (
        (each - tensor.reshape(-1, 64)).square().sum() for each in (groups, nearest)
    )
    assert error <= of_nearest * 1.01  # scales are rounded to 16 bits


def test_bytes_of_bits_are_counted_and_what_is_the_bases_is_not() -> None:
    weights = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        for name, shape in {
            "a": (32, 64),
            "b": (32, 64),
            f"{HEAD}weight": (4, 64),
            "c": (8,),
        }.items()
    }
    found, nbytes = quantised(weights, 3, {"b"})
    assert nbytes == 32 * 64 * 3 // 8 + 32 * 2 + 4 * 64 * 2 + 8 * 2
    assert all(torch.equal(found[name], weights[name]) for name in ("b", "c", f"{HEAD}weight"))
    assert not torch.equal(found["a"], weights["a"])
    assert quantised(weights, 8, {"b"})[1] == 32 * 64 + 32 * 2 + 4 * 64 * 2 + 8 * 2


def test_what_is_held_out_shares_no_source_and_no_text() -> None:
    found = texts_of._split(
        [(f"source-{n % 40}", f"text {n % 150}", f"code {n}") for n in range(400)], 1000
    )
    assert len(found.pool) + len(found.held_out) == 150
    pool = {int(text.split()[1]) % 10 for text, _ in found.pool}
    sources = {f"source-{n % 40}" for n in range(150) if (f"text {n}", f"code {n}") in found.pool}
    others = {
        f"source-{n % 40}" for n in range(150) if (f"text {n}", f"code {n}") in found.held_out
    }
    assert pool
    assert sources
    assert others
    assert not sources & others


def test_curves_are_the_rows_of_the_tables() -> None:
    text = site_charts.TABLES.read_text()
    page = (package_source.ROOT / "docs" / "study-substitution.md").read_text()
    names = re.findall(r"<!-- chart: (.*) -->", page)
    assert names
    for name in names:
        drawn = site_curves.plotted(name, text)
        assert any(each.best for each in drawn)
        picture = site_curves.svg(name)
        assert picture.count("<title>") == len(drawn)
        assert picture.count('class="best"') == sum(each.best for each in drawn)
        assert "\n" not in picture
        for each in drawn:
            smaller = [o for o in drawn if o.size < each.size and o.score > each.score]
            assert not (each.best and smaller)
