"""How far numbers have moved, where the bytes of a tensor are not the numbers themselves."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from tensor_dedup import UnsupportedError
from tensor_dedup.analyze import analyze
from tensor_dedup.planning.substitution import substitute

Weights = dict[str, torch.Tensor]
LAST = 448.0  # of float8_e4m3fn


def saved(folder: Path, held: Weights) -> Path:
    folder.mkdir()
    safetensors.torch.save_file(held, folder / "model.safetensors")
    return folder


def spread(scale: torch.Tensor, like: torch.Tensor, blocks: tuple[int, ...]) -> torch.Tensor:
    """A scale for each number of `like`."""
    for dim, block in enumerate(blocks):
        scale = scale.repeat_interleave(block, dim).narrow(dim, 0, like.shape[dim])
    return scale


def coded(
    weight: torch.Tensor, blocks: tuple[int, ...], more: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 codes of a weight with a scale for each block, and the scales; `more` wastes range."""
    counts = [-(-length // block) for length, block in zip(weight.shape, blocks, strict=True)]
    draw = torch.Generator().manual_seed(3)
    scale = more * (1 + torch.rand(counts, generator=draw)) * weight.abs().amax() / LAST
    return (weight / spread(scale, weight, blocks)).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize(
    ("shape", "blocks", "form", "leaf"),
    [
        ((192, 300), (192, 300), (1,), "weight_scale"),
        ((192, 300), (192, 300), (), "weight_scale"),
        ((192, 300), (1, 300), (192, 1), "weight_scale"),
        ((192, 300), (1, 300), (192,), "weight_scale"),
        ((192, 300), (128, 128), (2, 3), "weight_scale_inv"),
        ((128, 64), (64, 16), (2, 4), "weight_scale_inv"),
        ((3, 192, 300), (1, 192, 300), (3,), "weight_scale"),
        ((3, 192, 300), (1, 128, 128), (3, 2, 3), "weight_scale_inv"),
    ],
)
def test_fp8_is_as_far_apart_as_what_it_stands_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    blocks: tuple[int, ...],
    form: tuple[int, ...],
    leaf: str,
) -> None:
    monkeypatch.setattr("tensor_dedup.planning.substitution.distance._PIECE_BYTES", 7000)
    draw = torch.Generator().manual_seed(1)
    weight, noise = (torch.randn(shape, generator=draw) for _ in range(2))
    held: list[Weights] = []
    numbers: list[torch.Tensor] = []
    for each, more in ((weight, 1.0), (weight + 0.3 * noise, 4.0)):
        codes, scale = coded(each, blocks, more)
        numbers.append(codes.double() * spread(scale, each, blocks))
        held.append({"layers.0.mlp.weight": codes, f"layers.0.mlp.{leaf}": scale.reshape(form)})
    base, tune = (saved(tmp_path / name, each) for name, each in zip(("b", "t"), held, strict=True))
    expected = float((numbers[1] - numbers[0]).norm() / numbers[0].norm())
    raw = [each["layers.0.mlp.weight"].double() for each in held]
    assert abs(float((raw[1] - raw[0]).norm() / raw[0].norm()) - expected) > 0.2
    (layer,) = substitute(base, tune, tmp_path / "out", layers="0").layers
    assert layer.distance == pytest.approx(expected, rel=1e-5)


def fp8(folder: Path, moves: tuple[float, ...], more: tuple[float, ...], leaf: str) -> Path:
    held = Weights()
    for block, (move, wasted) in enumerate(zip(moves, more, strict=True)):
        draw = torch.Generator().manual_seed(block)
        weight = torch.randn(64, 64, generator=draw)
        codes, scale = coded(weight + move * torch.randn(64, 64, generator=draw), (64, 64), wasted)
        held |= {f"layers.{block}.mlp.weight": codes, f"layers.{block}.mlp.{leaf}": scale}
    return saved(folder, held)


def test_a_budget_goes_by_the_numbers_and_not_by_the_codes(tmp_path: Path) -> None:
    base = fp8(tmp_path / "b", (0, 0), (1, 1), "weight_scale")
    tune = fp8(tmp_path / "t", (0.1, 0.4), (4, 1), "weight_scale")
    budget = analyze([base, tune]).contributions[1].adds_bytes // 2 + 8
    done = substitute(base, tune, tmp_path / "out", budget=budget)
    assert [layer.name for layer in done.layers] == ["layers.0"]
    assert done.layers[0].distance == pytest.approx(0.1, rel=0.2)


def test_scales_of_an_unknown_form_are_refused(tmp_path: Path) -> None:
    base = fp8(tmp_path / "b", (0, 0), (1, 1), "scale_weight")
    tune = fp8(tmp_path / "t", (0.1, 0.4), (4, 1), "scale_weight")
    with pytest.raises(UnsupportedError, match=r"weight is quantised with scales of an unknown"):
        substitute(base, tune, tmp_path / "out", budget=100)
    done = substitute(base, tune, tmp_path / "out", layers="0")
    assert [layer.distance for layer in done.layers] == [None]
    same = substitute(base, base, tmp_path / "same", layers="0")
    assert [layer.distance for layer in same.layers] == [0.0]


def test_fp8_without_any_scale_was_only_cast(tmp_path: Path) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    held = [{"layers.0.w": each.to(torch.float8_e4m3fn)} for each in (weight, 1.5 * weight)]
    base, tune = (saved(tmp_path / name, each) for name, each in zip(("b", "t"), held, strict=True))
    (layer,) = substitute(base, tune, tmp_path / "out", layers="0").layers
    assert layer.distance == pytest.approx(0.5, rel=0.05)


def normalised(folder: Path, move: float, steps: int, order: list[int] | None = None) -> Path:
    held = Weights()
    for block in range(3):
        draw = torch.Generator().manual_seed(block)
        weight, noise = (torch.randn(64, 64, generator=draw) for _ in range(2))
        held[f"layers.{block}.conv.weight"] = weight + move * (block + 1) * noise
        held[f"layers.{block}.bn.running_mean"] = weight[0] + move * noise[0]
        held[f"layers.{block}.bn.num_batches_tracked"] = torch.tensor(steps)
        held[f"layers.{block}.index"] = torch.tensor(order or [0, 1, 2])
    return saved(folder, held)


def test_a_counter_of_steps_is_no_obstacle_to_a_budget(tmp_path: Path) -> None:
    base, tune = normalised(tmp_path / "b", 0, 100), normalised(tmp_path / "t", 0.01, 150)
    assert analyze([base, tune]).contributions[1].adds_bytes > 40_000
    done = substitute(base, tune, tmp_path / "out", budget=40_000)
    assert [layer.name for layer in done.layers] == ["layers.0"]
    assert done.layers[0].distance == pytest.approx(0.01, rel=0.1)
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert found["layers.0.bn.num_batches_tracked"] == 100


def test_other_integers_that_differ_are_not_guessed_at(tmp_path: Path) -> None:
    base = normalised(tmp_path / "b", 0, 100)
    tune = normalised(tmp_path / "t", 0.01, 100, [2, 1, 0])
    with pytest.raises(UnsupportedError, match=r"layers\.0\.index has the type I64"):
        substitute(base, tune, tmp_path / "out", budget=40_000)
