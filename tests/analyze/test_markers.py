"""Markers are hints: written into new files only, always checked, and a lie changes nothing."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tensor_dedup import Store
from tensor_dedup.analyze import analyze
from tensor_dedup.analyze.marker_checks import write_markers
from tensor_dedup.cli import main
from tensor_dedup.errors import ConfigError
from tensor_dedup.formats.markers import KEY, SIDECAR, Marker, content_digest, in_files
from tensor_dedup.store.writing import encoder

Weights = dict[str, torch.Tensor]


def weights(seed: int) -> Weights:
    draw = torch.Generator().manual_seed(seed)
    names = ("embed.weight", *(f"layers.{n}.weight" for n in range(3)), "head.weight")
    return {name: torch.randn(256, 256, generator=draw).to(torch.bfloat16) for name in names}


def saved(folder: Path, held: Weights, marker: Marker | None = None) -> Path:
    folder.mkdir(parents=True)
    metadata = {"format": "pt"} | ({KEY: marker.text()} if marker else {})
    safetensors.torch.save_file(held, folder / "model.safetensors", metadata)
    return folder


def content(path: Path) -> str:
    (found,) = analyze([path]).checkpoints
    return content_digest((t.name, t.fingerprint.digest) for t in found.tensors)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return saved(tmp_path / "base", weights(1))


def tuned() -> Weights:
    """Two layers are the base's, one under another name."""
    old = weights(1)
    other = weights(2)
    return {
        **other,
        "layers.0.weight": old["layers.0.weight"],
        "layers.1.weight": old["layers.2.weight"],
    }


TRUE = {"layers.0.weight": "layers.0.weight", "layers.1.weight": "layers.2.weight"}
FALSE = {**TRUE, "head.weight": "head.weight", "nothing": "nothing", "layers.2.weight": "gone"}


def test_written_markers_are_read_back_and_hold(base: Path, tmp_path: Path) -> None:
    tune, other = saved(tmp_path / "tune", tuned()), saved(tmp_path / "other", weights(3))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.*") if p.is_file()}
    written = write_markers(analyze([base, tune, other]).checkpoints, tmp_path / "out")
    assert written == [tmp_path / "out" / "1-tune"]
    assert before == {p: p.read_bytes() for p in before}
    (marker,) = in_files([written[0] / SIDECAR])
    assert (marker.base, marker.digest, dict(marker.tensors)) == ("base", content(base), TRUE)
    assert "2 of 5 tensors" in (written[0] / "README.md").read_text()
    assert "`base`" in (written[0] / "README.md").read_text()

    shutil.copy(written[0] / SIDECAR, tune)
    (found,) = analyze([base, tune]).markers
    assert (found.path, found.found, found.tensors, found.wrong) == (str(tune), str(base), 2, ())
    (alone,) = analyze([tune]).markers
    assert alone.found is None


def test_markers_are_never_written_into_what_exists(base: Path, tmp_path: Path) -> None:
    tune = saved(tmp_path / "tune", tuned())
    checkpoints = analyze([base, tune]).checkpoints
    with pytest.raises(ConfigError, match="is there already"):
        write_markers(checkpoints, tune)
    with pytest.raises(ConfigError, match="give the base first"):
        write_markers(checkpoints[:1], tmp_path / "out")
    with pytest.raises(ConfigError, match="--min-tensor-bytes"):
        write_markers(analyze([base, tune], min_tensor_bytes=1 << 20).checkpoints, tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"base", "tune"}


def test_the_verb_writes_and_checks_them(base: Path, tmp_path: Path) -> None:
    marker = Marker("base", content(base), FALSE)
    tune = saved(tmp_path / "tune", tuned(), marker)
    run = CliRunner().invoke(
        main, ["analyze", str(base), str(tune), "--write-markers", str(tmp_path / "out")]
    )
    assert run.exit_code == 0, run.output
    assert "5 tensors of it are those of base, and 3 are not" in " ".join(run.output.split())
    assert (tmp_path / "out" / "1-tune" / SIDECAR).is_file()
    again = CliRunner().invoke(
        main, ["analyze", str(base), str(tune), "--write-markers", str(tmp_path / "out")]
    )
    assert again.exit_code == 2


def test_a_marker_that_lies_changes_no_number(base: Path, tmp_path: Path) -> None:
    honest = analyze([base, saved(tmp_path / "plain" / "tune", tuned())]).to_dict()
    lying = analyze(
        [base, saved(tmp_path / "lying" / "tune", tuned(), Marker("base", content(base), FALSE))]
    )
    (found,) = lying.markers
    assert set(found.wrong) == FALSE.keys() - TRUE.keys()
    assert honest["markers"] == []
    told = json.loads(
        json.dumps(lying.to_dict()).replace(str(tmp_path / "lying"), str(tmp_path / "plain"))
    )
    assert {**told, "markers": []} == honest


def near(seed: int) -> Weights:
    """What a fine-tune of `weights(seed)` may look like."""
    draw = torch.Generator().manual_seed(99)
    return {
        name: (t.float() + 1e-3 * torch.randn(t.shape, generator=draw)).to(t.dtype)
        for name, t in weights(seed).items()
    }


def imported(store: Path, path: Path, marker: Marker | None) -> tuple[str | None, int]:
    tune = saved(path / "tune", near(1), marker)
    found = Store.open(store).import_(tune, compress="auto")
    held = Store.open(store).load("tune")
    assert all(torch.equal(held[name], tensor) for name, tensor in near(1).items())
    return found.base, found.stored_bytes


def test_an_import_finds_the_base_that_a_marker_names_among_many(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "_CHECKPOINTS", 2)
    with Store.open(tmp_path / "store") as store:
        store.import_(base, "z-base")
        for number in range(3):
            store.import_(saved(tmp_path / f"other{number}", weights(10 + number)), f"a{number}")
    other = content(tmp_path / "other2")

    def copy(name: str) -> Path:
        return Path(shutil.copytree(tmp_path / "store", tmp_path / name))

    without = imported(copy("one"), tmp_path / "1", None)
    assert without[0] is None  # it is beyond what is looked at
    marked = imported(copy("two"), tmp_path / "2", Marker("b", content(base), dict(TRUE)))
    assert marked[0] == "z-base"
    assert marked[1] < 0.8 * without[1]
    lying = imported(copy("three"), tmp_path / "3", Marker("b", other, FALSE))
    assert lying[0] is None
    assert lying[1] - without[1] < 2048  # the marker itself


def test_the_verb_takes_auto_for_a_base(base: Path, tmp_path: Path) -> None:
    where = ["--store", str(tmp_path / "store"), "--json"]
    assert CliRunner().invoke(main, ["import", str(base), *where]).exit_code == 0
    tune = saved(tmp_path / "tune", near(1))
    run = CliRunner().invoke(
        main, ["import", str(tune), "--compress", "auto", "--base", "auto", *where]
    )
    assert run.exit_code == 0, run.output
    assert json.loads(run.output)["base"] == "base"


@given(
    st.text()
    | st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ).map(json.dumps)
)
def test_what_is_no_marker_counts_as_none(text: str) -> None:
    assert Marker.parse(text) is None


@pytest.mark.parametrize(
    "broken",
    [
        {"version": 2},
        {"tensors": {"a": 1}},
        {"tensors": None},
        {"base": {"name": "b"}},
    ],
)
def test_a_broken_marker_is_none(broken: dict[str, Any], base: Path, tmp_path: Path) -> None:
    whole = {"version": 1, "base": {"name": "b", "digest": "d"}, "tensors": {"a": None}}
    assert Marker.parse(json.dumps(whole)) == Marker("b", "d", {"a": "a"})
    assert Marker.parse(json.dumps(whole | broken)) is None
    tune = saved(tmp_path / "tune", tuned())
    (tune / SIDECAR).write_text(json.dumps(whole | broken))
    assert analyze([base, tune]).markers == ()
