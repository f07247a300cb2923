"""What a layer key can hold, without an engine: what is plain tells apart, no address is in it."""

import dataclasses
import enum
import functools
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensor_dedup.loader.deferred.layer_key import LayerKey, attributes, class_name, plain

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Shape:
    rows: int
    tp_rank: int = 0
    inner: Any = None


class Layer:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def text(value: Any) -> str:
    return json.dumps(plain(value), sort_keys=True)


def typed(value: Any) -> str:
    """What Python holds for different: `1`, `1.0` and `True` are equal and yet not the same."""
    if isinstance(value, dict):
        return f"{{{sorted((k, typed(v)) for k, v in value.items())}}}"
    return f"{[typed(v) for v in value]}" if isinstance(value, list) else repr(value)


@given(TREES, TREES)
def test_different_plain_values_are_different_in_a_key(one: Any, other: Any) -> None:
    assert (text(one) == text(other)) == (typed(one) == typed(other))


@given(TREES)
def test_a_plain_value_is_always_the_same_in_a_key(value: Any) -> None:
    assert LayerKey.of(value=plain(value)) == LayerKey.of(value=plain(value))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (1, "1"),
        (None, "None"),
        (0.0, -0.0),
        (b"a", b"b"),
        ([], None),
        ([1], [[1]]),
        ({1}, {2}),
        (torch.float16, torch.bfloat16),
        (Colour.RED, Colour.BLUE),
        (Shape(1), Shape(2)),
        (Shape(1, inner=[Shape(3)]), Shape(1, inner=[Shape(4)])),
        (Layer(), Shape(1)),
        (len, max),
    ],
)
def test_told_apart(one: Any, other: Any) -> None:
    assert text(one) == text(one)
    assert text(one) != text(other)


def test_what_is_not_plain_stands_in_by_its_class_and_never_by_its_address() -> None:
    assert text(Layer(a=1)) == text(Layer(a=2))
    assert "0x" not in text([Layer(), object(), torch.nn.Linear(2, 2), lambda: 1])


def test_a_set_has_no_order() -> None:
    assert text({"a", "b", "c", 1, 2.5}) == text({2.5, "c", 1, "b", "a"})


def test_place_is_not_content() -> None:
    assert attributes(Layer(prefix="a.0", tp_rank=0, size=4)) == attributes(
        Layer(prefix="a.1", tp_rank=1, size=4)
    )
    assert attributes(Layer(size=4)) != attributes(Layer(size=5))
    assert text(Shape(1, tp_rank=0)) == text(Shape(1, tp_rank=1))
    # Inside a value, `name` is no place: it may be what the value is about.
    assert text({"name": "a"}) != text({"name": "b"})


def test_parameters_and_submodules_are_not_attributes() -> None:
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert attributes(one) == attributes(other)
    assert attributes(one) != attributes(torch.nn.Linear(2, 3))


def test_class_names() -> None:
    assert class_name(Layer) == class_name(Layer()) == f"{__name__}.Layer"
    assert class_name(functools.reduce).endswith("reduce")


def test_a_key_is_of_what_was_put_in() -> None:
    key = LayerKey.of(size=4)
    assert json.loads(key.preimage)["size"] == 4
    assert key == LayerKey.of(size=4)
    assert key.digest != LayerKey.of(size=5).digest
    assert len(key.digest) == 64


@pytest.mark.parametrize("switch", [torch.use_deterministic_algorithms, torch.set_default_dtype])
def test_settings_of_the_process_are_in_it(switch: Any) -> None:
    before = LayerKey.of().digest
    on, off = (torch.float64, torch.float32) if switch is torch.set_default_dtype else (True, False)
    switch(on)
    try:
        assert LayerKey.of().digest != before
    finally:
        switch(off)
    assert LayerKey.of().digest == before


def test_a_switch_in_the_environment_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = LayerKey.of()
    monkeypatch.setenv("VLLM_SOME_SWITCH_TO_COME", "1")
    assert LayerKey.of().digest != before.digest
    monkeypatch.delenv("VLLM_SOME_SWITCH_TO_COME")
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    monkeypatch.setenv("VLLM_PORT", "1234")
    assert LayerKey.of() == before
