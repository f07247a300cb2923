"""Which tensors of a base are those of a fine-tune: by names, and by one renaming of all names."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from tensor_dedup.errors import ConfigError, UnsupportedError
from tensor_dedup.formats.layers.layer_names import meant, natural
from tensor_dedup.formats.layers.layer_pairs import chosen, layers_of


@dataclass(frozen=True)
class Named:
    name: str
    dtype: str = "F32"
    shape: tuple[int, ...] = (4, 4)

    @property
    def nbytes(self) -> int:
        return 64


def stack(outer: str, blocks: Iterable[int] = range(3)) -> list[Named]:
    return [Named(f"{outer}layers.{n}.w") for n in blocks]


def pairs(tune: list[Named], base: list[Named]) -> dict[str, str | None]:
    return {
        tensor.name: old.name if old is not None else None
        for layer in layers_of(tune, base).values()
        for tensor, old in layer.found
    }


def test_names_with_numbers_of_any_length_are_in_natural_order() -> None:
    names = ["layers.09", "layers.10", "layers.100", f"layers.{'9' * 4999}", f"layers.{'9' * 5000}"]
    assert sorted({*names}, key=natural) == names
    layers = {name: [f"{name}.w"] for name in names}
    assert [*meant(layers, "9-10")] == ["layers.09", "layers.10"]
    with pytest.raises(ConfigError, match="is called"):
        meant(layers, "9" * 5000)


def test_another_stack_of_the_fine_tune_has_no_counterpart() -> None:
    tune = [*stack("model."), *stack("transformer.", range(5))]
    base = stack("model.", range(5))
    found = pairs(tune, base)
    assert {n: old for n, old in found.items() if old} == {t.name: t.name for t in stack("model.")}
    with pytest.raises(UnsupportedError, match=r"the base has no transformer\.layers\.0\.w"):
        chosen(layers_of(tune, base), "transformer.layers.0")


def test_a_stack_that_could_be_either_of_two_is_refused_with_both() -> None:
    tune, base = stack("module."), [*stack("model."), *stack("transformer.")]
    assert set(pairs(tune, base).values()) == {None}
    either = (
        r"no module\.layers\.0\.w, and .* whether model\.layers\.0\.w or transformer\.layers\.0\.w"
    )
    with pytest.raises(UnsupportedError, match=either):
        chosen(layers_of(tune, base), "0")
    assert set(pairs(base, tune).values()) == {None}


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ("module.", ""),
        ("module.model.", "model."),
        ("module.model.", ""),
        ("model.", "transformer."),
        ("bert.", ""),
        ("model.bert.", ""),
        ("model.bert.", "module."),
        ("module.model.bert.", "model.bert."),
    ],
)
def test_one_outer_module_more_or_another(outer: str, inner: str) -> None:
    one, two = stack(outer), stack(inner)
    assert pairs(one, two) == {a.name: b.name for a, b in zip(one, two, strict=True)}
    assert pairs(two, one) == {b.name: a.name for a, b in zip(one, two, strict=True)}


def test_what_stands_outside_of_the_module_is_called_alike() -> None:
    head = Named("lm_head.weight")
    tune, base = [*stack("model."), head], [*stack("transformer."), head]
    found = pairs(tune, base)
    assert found["lm_head.weight"] == "lm_head.weight"
    assert found["model.layers.2.w"] == "transformer.layers.2.w"


def test_each_component_of_a_pipeline_is_renamed_by_itself() -> None:
    tune = [*stack("unet/module."), *stack("vae/"), *stack("encoder/model.")]
    base = [*stack("unet/"), *stack("vae/"), *stack("text/model.")]
    found = pairs(tune, base)
    assert found["unet/module.layers.1.w"] == "unet/layers.1.w"
    assert found["vae/layers.1.w"] == "vae/layers.1.w"
    assert found["encoder/model.layers.1.w"] is None


def test_no_tensor_of_a_base_is_the_counterpart_of_two() -> None:
    tune = [Named("a.weight"), Named("model.a.weight"), *stack("model.")]
    found = pairs(tune, [Named("a.weight"), *stack("")])
    taken = [old for old in found.values() if old]
    assert taken
    assert len(taken) == len(set(taken))


def test_what_the_base_has_more_in_a_layer_is_named() -> None:
    base = [*stack("bert."), Named("bert.layers.1.bias")]
    layers = layers_of(stack(""), base)
    assert layers["layers.0"].obstacle is None
    assert layers["layers.1"].obstacle is not None
    assert "bert.layers.1.bias" in layers["layers.1"].obstacle


def quantised(outer: str, leaves: dict[str, str], dtype: str = "I8") -> list[Named]:
    shapes = {leaf: (4, 4) if kind == "I8" else (1,) for leaf, kind in leaves.items()}
    found = [
        Named(f"{outer}mlp.{leaf}", dtype if kind == "I8" else kind, shapes[leaf])
        for leaf, kind in leaves.items()
    ]
    return [*found, Named(f"{outer}norm.weight", "BF16", (4,))]


@pytest.mark.parametrize("dtype", ["I8", "U8", "F8_E4M3"])
@pytest.mark.parametrize(
    ("codes", "scale"),
    [("weight", "weight_scale"), ("weight", "weight.absmax"), ("weight_packed", "input_scale")],
)
def test_codes_are_taken_with_their_scales_or_not_at_all(
    dtype: str, codes: str, scale: str
) -> None:
    held = quantised("layers.0.", {codes: "I8", scale: "F32", "bias": "BF16"}, dtype)
    layers = layers_of(held, held)
    for spec, other in ((f"*mlp.{codes}", scale), (f"*mlp.{scale}", codes)):
        with pytest.raises(UnsupportedError, match=rf"without layers\.0\.mlp\.{other}: they are"):
            chosen(layers, spec)
    (layer,) = chosen(layers, f"*mlp.{codes},*mlp.{scale}")
    assert len(layer.pairs) == 2  # a bias decodes nothing
    assert [len(each.pairs) for each in chosen(layers, "*norm*")] == [1]
    assert [len(each.pairs) for each in chosen(layers, "0")] == [4]


def test_a_scale_that_only_the_base_has_is_missed_by_a_pattern_too() -> None:
    base = quantised("layers.0.", {"weight": "I8", "weight_scale": "F32", "weight_zero": "F32"})
    tune = quantised("layers.0.", {"weight": "I8", "weight_scale": "F32"})
    with pytest.raises(UnsupportedError, match=r"fine-tune has no layers\.0\.mlp\.weight_zero"):
        chosen(layers_of(tune, base), "*.mlp.*")
    assert chosen(layers_of(tune, base), "*norm*")


def test_scales_outside_of_blocks_are_layers_of_their_own() -> None:
    held = quantised("", {"weight": "I8", "weight.absmax": "F32"})
    layers = layers_of(held, held)
    with pytest.raises(UnsupportedError, match=r"without mlp\.weight\.absmax"):
        chosen(layers, "mlp")
    assert len(chosen(layers, "mlp,mlp.weight")) == 2


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("embed.position_ids", "I32"), ("embed.position_ids", "I64"), ("embed.bias", "U8")],
)
def test_positions_and_masks_are_no_codes(name: str, dtype: str) -> None:
    held = [Named(name, dtype), Named("embed.weight", "BF16")]
    (layer,) = chosen(layers_of(held, held), "embed.weight*")
    assert len(layer.pairs) == 1
