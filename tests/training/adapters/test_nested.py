"""Nested states of plain values, arrays and tensors: the same afterwards, of the same types."""

import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy._core._rational_tests import rational  # type: ignore[import-not-found]

from store_runs.stores import frozen, thawed, there_and_back
from tensor_dedup.store.steps.errors import BadOption, BadOptionError
from tensor_dedup.training.adapters import (
    NumpyAdapter,
    PieceSeries,
    PyTorchAdapter,
    StateProvider,
    adapter_for,
    by_name,
    plain,
    register_provider,
)
from tensor_dedup.training.adapters.base import ModelAdapter, Providers
from tensor_dedup.training.errors import (
    CyclicStateError,
    DamagedStateError,
    ProviderTakenError,
    UnknownAdapterError,
    UnknownModelError,
    UnknownProviderError,
    UnsupportedArrayError,
    UnsupportedValueError,
)
from tensor_dedup.training.state import NamedValue

NUMPY = NumpyAdapter()


def same(a: Any, b: Any) -> bool:
    """Equal in every bit and every type."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a.hex() == b.hex() if not math.isnan(a) else math.isnan(b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, torch.Tensor):
        alike = (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        return alike and same(a.detach().numpy(), b.detach().numpy())
    if isinstance(a, np.ndarray | np.generic):
        return (a.shape, a.dtype) == (b.shape, b.dtype) and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True)
        )
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 200), 1 << 200),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(), max_size=5),
    st.binary(max_size=5),
    st.binary(max_size=5).map(bytearray),
    st.sampled_from([torch.float32, torch.bfloat16, torch.Size([2, 3]), torch.device("cpu")]),
    st.sampled_from([torch.device("cuda", 1), np.dtype("<f4"), np.float64, range(1, 9, 2)]),
    st.sampled_from([slice(1, None, 2), np.float32(1.5), np.int64(-3), np.bool_(True)]),
    st.sampled_from([np.datetime64("2026-01-01"), np.float64("nan")]),
    st.binary(max_size=3).map(np.bytes_),
    st.text(st.characters(), max_size=3).map(np.str_),
)
KEYS = st.recursive(
    st.one_of(st.text(max_size=3), st.integers(), st.booleans(), st.none()),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
ARRAYS = hnp.arrays(
    st.sampled_from(
        ["f4", "<f8", ">f8", "f2", "?", "c8", "c16", "u1", ">i8", "M8[ns]", "U3", "S2"]
    ),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
    elements=None,
)
TENSORS = hnp.arrays(
    st.sampled_from(["f4", "f8", "f2", "?", "i8"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
).map(torch.from_numpy)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    listed = st.lists(inner, max_size=4)
    mapped = st.dictionaries(KEYS, inner, max_size=4)
    hashable = st.lists(st.integers() | st.text(max_size=2), max_size=3)
    return st.one_of(
        listed,
        listed.map(tuple),
        mapped,
        mapped.map(OrderedDict),
        mapped.map(lambda held: defaultdict(list, held)),
        listed.map(lambda held: deque(held, 5)),
        hashable.map(set),
        hashable.map(frozenset),
        hashable.map(Counter),
    )


@given(st.recursive(st.one_of(SCALARS, ARRAYS, TENSORS), containers, max_leaves=20))
def test_every_state_comes_back_as_it_was(state: Any) -> None:
    assert same(there_and_back(NUMPY, state), state)
    assert frozen(NUMPY, state) == frozen(NUMPY, state)


@given(st.recursive(SCALARS, containers, max_leaves=20))
def test_plain_values_are_two_pieces(state: Any) -> None:
    assert set(frozen(NUMPY, state)) == {"#structure", "#values"}


def test_the_shape_stays_the_same_while_numbers_change() -> None:
    def state(step: int) -> dict[str, Any]:
        return {"lr": 0.1 / step, "step": step, "betas": (0.9, step), "w": np.full(3, step)}

    first, second = frozen(NUMPY, state(1)), frozen(NUMPY, state(2))
    assert first["#structure"] == second["#structure"]
    assert first["#values"] != second["#values"]


def test_pieces_are_called_by_the_keys_that_lead_to_them() -> None:
    array = np.ones(2)
    state = {"a": {"b": array.copy(), 3: [array.copy()]}, "a.b": array.copy(), "#x": array.copy()}
    held = frozen(NUMPY, state)
    assert list(held) == ["a.b", "a.3.0", "a.b~1", "_#x", "#structure", "#values"]
    assert same(thawed(NUMPY, held), state)
    assert list(frozen(NUMPY, array)) == ["tensor", "#structure", "#values"]


def test_a_series_has_names_that_nobody_else_has() -> None:
    series = PieceSeries("tree", [b"a", b"b"])
    state = {"tree_000001": np.ones(1), "all": series, "all.tree_000000": np.zeros(1)}
    held = frozen(NUMPY, {**state, "tree~_000000": np.ones(1)})
    assert len(held) == 2 + 2 + 3
    back = thawed(NUMPY, held)
    assert [bytes(item) for item in back["all"].items] == [b"a", b"b"]
    assert back["all.tree_000000"] == 0
    twice = there_and_back(NUMPY, [series, series, PieceSeries("x", [])])
    assert [[bytes(item) for item in each.items] for each in twice] == [[b"a", b"b"]] * 2 + [[]]


def test_what_is_most_comes_first() -> None:
    short, long = PieceSeries("short", [b"a"] * 2), PieceSeries("long", [b"b"] * 4)
    state = {"a": short, "b": long, "c": np.ones(1)}
    grown = [*["b.long"] * 4, *["a.shor"] * 2, "c", "#struc", "#value"]
    assert [name[:6] for name in frozen(NUMPY, state)] == grown
    # What grows beside many tensors leaves them where they are.
    weights = {f"w{n}": np.ones(1) for n in range(4)}
    grown = [*weights, *["b.long"] * 4, *["a.shor"] * 2, "#struc", "#value"]
    assert [name[:6] for name in frozen(NUMPY, {"a": short, "b": long, **weights})] == grown


def test_the_format_stays() -> None:
    state: dict[str, Any] = {
        "w": np.arange(2, dtype="<f4"),
        "n": [1, -0.5, None, True, "é", b"\x00", (1, 2), {3}],
        "big": 1 << 70,
        "o": OrderedDict([(1, torch.ones(1))]),
        "s": PieceSeries("t", [b"ab"]),
        "d": defaultdict[Any, Any](int, {(1,): np.int8(-1)}),
        "c": 1j,
    }
    held = {
        name: (each.dtype, bytes(each.data).hex()) for name, each in frozen(NUMPY, state).items()
    }
    # What was written once must be read by every later version: never change these.
    assert held == {
        "w": ("F32", "000000000000803f"),
        "o.1": ("F32", "0000803f"),
        "s.t_000000": ("U8", "6162"),
        "#structure": (
            "U8",
            "9201950002c097a177a16ea3626967a16fa173a164a163979502a177c0c0c0c0c0950005c0910191960"
            "1a36f2e31c0c0c2c29206a3732e74c0c0",
        ),
        "#values": (
            "U8",
            "95990001cbbfe0000000000000c0c3a2c3a9c40100930101029203039211c40900000000000000004001"
            "9407a3696e749201019320a37c6931c401ff9312cb0000000000000000cb3ff0000000000000",
        ),
    }


TEXTS: list[Any] = [
    *map(np.bytes_, (b"", b"a", b"a\0", b"\0", b"\0a\0\0", b"\xff\0")),
    *map(np.str_, ("", "é", "a\0", "\0", "\0a\0\0", "\U0001f600\0", "\ud800")),
]


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_texts_of_numpy_keep_their_length(text: Any) -> None:
    states: list[Any] = [text, [text, text], {text: 1}, {"held": (text,)}]
    for state in states:
        assert same(there_and_back(NUMPY, state), state)
    [back] = there_and_back(NUMPY, np.array([text], object))
    assert same(back, text)


def with_value(wire: Any) -> Any:
    """What is read of a list whose only value is written like this."""
    data = msgspec.msgpack.encode([[plain.LIST, wire]])
    held = frozen(NUMPY, [1])
    held["#values"] = NamedValue("#values", "U8", (len(data),), data)
    [value] = thawed(NUMPY, held)
    return value


@pytest.mark.parametrize(
    ("code", "data", "text"),
    [
        ("|S2", b"a\0", np.bytes_(b"a\0")),
        ("<U2", b"a" + bytes(7), np.str_("a\0")),
        (">U2", bytes(3) + b"a" + bytes(3) + b"b", np.array("ab", ">U2")[()]),
    ],
)
def test_texts_come_back_with_zeros_at_their_ends(code: str, data: bytes, text: Any) -> None:
    assert same(with_value([32, code, data]), text)


def test_names_are_text_that_can_be_written() -> None:
    for name in list(frozen(NUMPY, {"\ud800": np.ones(1), "": np.ones(1)})):
        assert name
        name.encode()


def test_one_array_in_two_places_is_one_afterwards() -> None:
    array, tensor = np.ones(3), torch.ones(3)
    back = there_and_back(NUMPY, {"a": array, "b": [array], "c": tensor, "d": tensor.view(3)})
    assert back["a"] is back["b"][0]
    assert back["c"] is back["d"]
    apart = there_and_back(NUMPY, [np.ones(3), np.ones(3)])
    assert apart[0] is not apart[1]


def test_fortran_order_stays() -> None:
    array = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    tensor = torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last)
    back = there_and_back(PyTorchAdapter(), {"a": array, "t": tensor})
    assert same(back["t"], tensor)
    assert back["a"].flags.f_contiguous
    assert same(back["a"], array)


def test_records_lose_what_lay_between_their_fields() -> None:
    dtype = np.dtype([("a", "i1"), ("b", "<f8")], align=True)
    raw = np.full(2 * dtype.itemsize, 0xAB, np.uint8)
    dirty = raw.view(dtype)
    clean = np.zeros(2, dtype)
    clean["a"], clean["b"] = dirty["a"], dirty["b"]
    assert frozen(NUMPY, {"x": dirty}) == frozen(NUMPY, {"x": clean})
    back = there_and_back(NUMPY, {"x": dirty})["x"]
    assert back.dtype == dtype
    np.testing.assert_array_equal(back, clean)


def test_arrays_of_python_values_are_taken_one_by_one() -> None:
    array = np.array([["a", 1], [None, np.ones(2)]], object)
    back = there_and_back(NUMPY, array)
    assert (back.shape, back.dtype) == ((2, 2), object)
    assert same(back[0, 0], "a")
    assert same(back[1, 1], array[1, 1])


def test_parameters_and_gradients_are_remembered() -> None:
    state = [torch.nn.Parameter(torch.ones(2), requires_grad=False), torch.ones(2).requires_grad_()]
    back = there_and_back(PyTorchAdapter(), state)
    assert [type(held) for held in back] == [torch.nn.Parameter, torch.Tensor]
    assert [held.requires_grad for held in back] == [False, True]


@pytest.mark.parametrize(
    "source",
    [
        random.Random(3),
        np.random.RandomState(3),
        *(
            np.random.Generator(getattr(np.random, name)(3))
            for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
        ),
    ],
)
def test_random_generators_go_on_where_they_were(source: Any) -> None:
    source.random()
    held = frozen(NUMPY, {"rng": source})
    expected = [source.random() for _ in range(5)]
    fresh = thawed(NUMPY, held)["rng"]
    assert type(fresh) is type(source)
    assert [fresh.random() for _ in range(5)] == expected
    assert thawed(NUMPY, held, {"rng": source})["rng"] is source
    assert [source.random() for _ in range(5)] == expected


def test_generators_spawn_as_they_would_have() -> None:
    source = np.random.default_rng(5)
    source.spawn(2)
    back = there_and_back(NUMPY, {"rng": source})["rng"]
    assert back.spawn(1)[0].random() == source.spawn(1)[0].random()


def test_states_of_global_generators_are_plain_structures() -> None:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    assert same(there_and_back(PyTorchAdapter(), state), state)


@pytest.mark.parametrize("dtype", ["f4", "U3", object])
def test_masks_come_back(dtype: Any) -> None:
    array = np.ma.array(  # type: ignore[no-untyped-call]
        [[1, 2], [3, 4]], mask=[[True, False], [False, True]], dtype=dtype, fill_value=7
    )
    back = there_and_back(NUMPY, {"x": array})["x"]
    assert (type(back), back.dtype, back.fill_value) == (type(array), array.dtype, array.fill_value)
    assert same(np.asarray(back.mask), np.asarray(array.mask))
    assert back.data.tolist() == array.data.tolist()


def test_an_original_is_filled_and_stays() -> None:
    state = {"w": np.ones(3), "n": 4, "list": [np.zeros(2), 1], "new": 5}
    original: dict[str, Any] = {"w": np.zeros(3), "n": 0, "list": [np.ones(2), 0], "gone": 1}
    weights, items = original["w"], original["list"]
    back = there_and_back(NUMPY, state, original)
    assert back is original
    assert (back["w"] is weights, back["list"] is items) == (True, True)
    assert same(dict(back), state)


class Opaque:
    """A value of a type that nobody knows."""


@pytest.mark.parametrize(
    ("state", "place"),
    [
        (
            {"optimizer": {"param_groups": [{"foo": Opaque()}]}},
            r'optimizer["param_groups"][0]["foo"]',
        ),
        ({"f": len}, "f"),
        ([1, {Opaque}], "[1][0]"),
        ({"a b": [np.zeros(2), Opaque()]}, '["a b"][1]'),
        ({"a": {(1, Opaque): 1}}, "a.keys()[1]"),
        ({"d": defaultdict(lambda: 1)}, "d"),
        (np.longdouble(1), "the model"),
        ({"t": torch.strided}, "t"),
        ({"error": ValueError("x")}, "error"),
        ({"d": np.dtype(("f4", (2,)))}, "d"),
        ({"d": np.dtype({"names": ["a", "b"], "formats": ["f4", "f4"], "offsets": [4, 0]})}, "d"),
        ({"d": np.dtypes.StringDType()}, "d"),
        ({"d": np.dtype(rational)}, "d"),
    ],
)
def test_what_has_no_form_is_refused_with_its_place(state: Any, place: str) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        NUMPY.extract(state)
    assert str(caught.value).startswith(f"{place}: a")
    assert "StateProvider" in str(caught.value)


@pytest.mark.parametrize(
    "held",
    [
        np.zeros(1).view(np.recarray),
        np.zeros(1, np.longdouble),
        np.zeros(1, [("a", object)]),
        np.array(["a", "bc"], np.dtypes.StringDType()),
        np.zeros(1, rational),
        np.zeros(1, [("a", rational)]),
        torch.empty(1, device="meta"),
    ],
)
def test_arrays_without_a_form_are_refused_with_their_place(held: Any) -> None:
    with pytest.raises(UnsupportedArrayError, match=r"^layers\[1\]:"):
        NUMPY.extract({"layers": [1, held]})


def test_circles_are_refused() -> None:
    listed: list[Any] = [1]
    listed.append(listed)
    mapped: dict[str, Any] = {"a": np.ones(1)}
    mapped["b"] = mapped
    for circle in (listed, mapped):
        with pytest.raises(CyclicStateError):
            NUMPY.extract({"x": circle})


class Scaler:
    """A type with a provider of its own."""

    def __init__(self, mean: Any, name: str) -> None:
        self.mean, self.name = mean, name


class Special(Scaler):
    """Is served by the provider of what it is made from."""


def restore_scaler(state: Any, original: Any) -> Scaler:
    scaler = Scaler(None, "") if original is None else original
    scaler.mean, scaler.name = state["mean"], state["name"]
    return scaler


SCALER = StateProvider(
    "tests.scaler", lambda held: {"mean": held.mean, "name": held.name}, restore_scaler
)
register_provider(Scaler, SCALER)


def test_types_can_be_taught() -> None:
    scaler = Special(np.ones(3), "first")
    held = frozen(NUMPY, {"a": scaler, "b": [scaler, 1]})
    assert list(held) == ["a.mean", "#structure", "#values"]
    back = thawed(NUMPY, held)
    assert back["a"] is back["b"][0]
    assert same(vars(back["a"]), vars(scaler))
    original = {"a": Scaler(None, "")}
    kept = original["a"]
    assert thawed(NUMPY, held, original)["a"] is kept
    assert kept.name == "first"
    assert adapter_for(scaler).name == "numpy"


def test_a_second_provider_of_a_name_or_type_is_refused() -> None:
    held = Providers()
    other = StateProvider("other", SCALER.state, SCALER.restore)
    held.register(Scaler, SCALER)
    held.register(Scaler, SCALER)
    with pytest.raises(ProviderTakenError, match="this type has a provider; register each type"):
        held.register(Scaler, other)
    with pytest.raises(ProviderTakenError, match=r"of this name .* each name, once"):
        held.register(Special, StateProvider("tests.scaler", SCALER.state, SCALER.restore))


@pytest.mark.parametrize(
    "given", [(Scaler, SCALER.state), (Scaler, None), (SCALER, Scaler), (np.ones(2), SCALER)]
)
def test_what_is_no_provider_is_refused(given: tuple[Any, ...]) -> None:
    with pytest.raises(BadOptionError, match=r"StateProvider\(name=, state=, restore=\)") as caught:
        register_provider(*given)
    assert caught.value.kind is BadOption.PROVIDER


def test_a_provider_that_is_not_there_is_named() -> None:
    held = frozen(NUMPY, {"x": {"s": Scaler(np.ones(2), "n")}})
    data = bytes(held["#structure"].data).replace(b"tests.scaler", b"tests.sc4ler")
    held["#structure"] = NamedValue("#structure", "U8", (len(data),), data)
    with pytest.raises(UnknownProviderError, match=r"""^x\["s"\]: no provider 'tests.sc4ler'"""):
        thawed(NUMPY, held)


@pytest.mark.parametrize("name", ["#structure", "#values", "w"])
def test_a_piece_that_is_gone_is_damage(name: str) -> None:
    held = frozen(NUMPY, {"w": np.ones(2), "n": 1})
    del held[name]
    with pytest.raises(DamagedStateError, match=name):
        thawed(NUMPY, held)


WIRES: list[Any] = [
    [[99]],
    [[]],
    [1, 2],
    [],
    [[32, "O", b"x"]],
    [[32, "<f4", b"x"]],
    [[32, "|S0", b"x"]],
    [[32, "|S2", b"abc"]],
    [[32, "<U1", b"\0\0\x11\0"]],
    [[32, ">U1", b"\0\x11\0\0"]],
    [[32, "V99999999", b""]],
    [[16, 1 << 40]],
    [[7, "eval"]],
    [[48, "load"]],
    [[48, "_inductor"]],
    [[48, "onnx"]],
    [[34, "f2py"]],
    [[35, "testing"]],
    [[50, "x", None]],
    [[34, "load"]],
    [[2, [0], 1]],
    [[17, "x"]],
    [["x"]],
]


@pytest.mark.parametrize("values", WIRES, ids=map(str, WIRES))
def test_values_no_encoder_wrote_are_damage(values: Any) -> None:
    held = frozen(NUMPY, [1])
    data = msgspec.msgpack.encode(values)
    held["#values"] = NamedValue("#values", "U8", (len(data),), data)
    with pytest.raises(DamagedStateError):
        thawed(NUMPY, held)


@given(st.binary(max_size=60), st.sampled_from(["#structure", "#values"]), st.integers(0, 60))
def test_damage_is_an_error_of_ours(noise: bytes, name: str, at: int) -> None:
    held = frozen(NUMPY, {"w": np.ones(2), "o": [np.array(["a"]), Scaler(1, "n")], "t": (1, 2.5)})
    data = bytes(held[name].data)
    data = data[:at] + noise + data[at + len(noise) :]
    held[name] = NamedValue(name, "U8", (len(data),), data)
    with suppress(DamagedStateError, UnknownProviderError):
        thawed(NUMPY, held)


def test_adapters_are_chosen_by_what_they_are_given() -> None:
    layer = torch.nn.Linear(1, 1)
    chosen: list[tuple[Any, str]] = [
        (layer, "pytorch"),
        (layer.state_dict(), "pytorch"),
        (torch.optim.SGD(layer.parameters()), "pytorch"),
        ({"epoch": 1, "parts": [layer, np.ones(1)]}, "pytorch"),
        (torch.ones(1), "pytorch"),
        (np.ones(1), "numpy"),
        ({"a": np.ones(1), "b": 1}, "numpy"),
        ({"a": 1}, "numpy"),
        (random.Random(1), "numpy"),
    ]
    assert [adapter_for(model).name for model, _ in chosen] == [name for _, name in chosen]
    for name in ("pytorch", "numpy"):
        assert isinstance(by_name(name), ModelAdapter)
        assert by_name(name).name == name
    with pytest.raises(UnknownModelError, match="Opaque"):
        adapter_for(Opaque())
    with pytest.raises(UnknownAdapterError, match="there are lightgbm, numpy, pytorch"):
        by_name("pickle")
