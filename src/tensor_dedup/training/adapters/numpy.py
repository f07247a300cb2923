"""The adapter for NumPy: arrays, structures of arrays and plain values, and random generators."""

import random
from typing import Any, Final

from tensor_dedup.training.adapters.base import StateProvider, register_provider
from tensor_dedup.training.adapters.rebuild import StructureAdapter, mismatched
from tensor_dedup.training.errors import DamagedStateError, UnsupportedValueError

_BIT_GENERATORS: Final = frozenset({"MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"})
# Where they stand in numbers they have made: numpy reads there without looking.
_LARGEST_POSITION: Final = {"MT19937": 624, "Philox": 4}


class NumpyAdapter(StructureAdapter):
    """The adapter for an array, a mapping of arrays, or a structure of arrays and plain values.

    Arrays of numbers, booleans, strings, times and records are supported, but not of long double.
    Arrays of Python objects are supported if the objects can be stored. Arrays keep their byte
    order and their memory order (C or Fortran). The values that `extract` returns share the model's
    memory.

    If `original` has an array of the same shape and dtype at the same place, that array is filled.
    """

    name = "numpy"


def _bit_generator_state(bits: Any) -> dict[str, object]:
    kind = type(bits).__name__
    if kind not in _BIT_GENERATORS:
        raise UnsupportedValueError.at("", f"a bit generator {kind}")
    seeds = getattr(bits, "seed_seq", None)
    spawn = getattr(seeds, "state", None)  # what further generators are spawned from
    return {"kind": kind, "state": bits.state, "seeds": spawn if isinstance(spawn, dict) else None}


def _load_bits(state: Any, original: Any) -> Any:
    from numpy import random as generators

    kind, seeds = state["kind"], state["seeds"]
    if kind not in _BIT_GENERATORS:
        raise DamagedStateError.at("", f"a bit generator {kind!r}")
    if original is not None and type(original).__name__ != kind:
        raise mismatched(original, kind)
    bits = original
    if bits is None:
        sequence = None if seeds is None else generators.SeedSequence(**seeds)
        bits = getattr(generators, kind)(sequence)
    return _with_state(bits, state["state"])


def _check_position(state: Any) -> None:
    """Raise DamagedStateError for a state that would read outside of its numbers."""
    if not isinstance(state, dict):
        raise DamagedStateError.at("", "no state of a generator")
    kind = state["bit_generator"]
    if (largest := _LARGEST_POSITION.get(kind)) is None:
        return
    position = state["state"]["pos"] if kind == "MT19937" else state["buffer_pos"]
    if type(position) is not int or not 0 <= position <= largest:
        raise DamagedStateError.at("", f"a {kind} at position {position!r} of {largest}")


def _with_state(bits: Any, state: Any) -> Any:
    _check_position(state)
    try:
        bits.state = state
    except (TypeError, ValueError, KeyError) as error:
        raise DamagedStateError.at("", f"no state of a generator: {error}") from error
    return bits


def _load_generator(state: Any, original: Any) -> Any:
    from numpy.random import Generator

    if original is None:
        return Generator(state["bits"])
    if not isinstance(original, Generator):
        raise mismatched(original, "a numpy.random.Generator")
    return original


def _random_state(source: Any) -> dict[str, object]:
    state = dict(source.get_state(legacy=False))
    if state["bit_generator"] not in _BIT_GENERATORS:
        raise UnsupportedValueError.at("", f"a bit generator {state['bit_generator']}")
    return state


def _load_random_state(state: Any, original: Any) -> Any:
    from numpy import random as generators

    if original is not None and not isinstance(original, generators.RandomState):
        raise mismatched(original, "a numpy.random.RandomState")
    if state["bit_generator"] not in _BIT_GENERATORS:
        raise DamagedStateError.at("", f"a bit generator {state['bit_generator']!r}")
    _check_position(state)
    source = original
    if source is None:
        source = generators.RandomState(getattr(generators, state["bit_generator"])())
    try:
        source.set_state(state)
    except (TypeError, ValueError, KeyError) as error:
        raise DamagedStateError.at("", f"no state of a generator: {error}") from error
    return source


def _load_python_random(state: Any, original: Any) -> Any:
    if original is not None and not isinstance(original, random.Random):
        raise mismatched(original, "a random.Random")
    source = random.Random() if original is None else original
    try:
        source.setstate(state)
    except (TypeError, ValueError) as error:
        raise DamagedStateError.at("", f"no state of a generator: {error}") from error
    return source


def _masked_state(array: Any) -> dict[str, object]:
    import numpy as np

    return {
        "data": np.asarray(array.data),
        "mask": np.broadcast_to(array.mask, array.shape),  # or one for all
        "fill": array.fill_value,
        "hard": bool(array.hardmask),
    }


def _restore_masked(state: Any, original: Any) -> Any:
    import numpy as np

    return np.ma.MaskedArray(  # type: ignore[no-untyped-call]
        state["data"], state["mask"], fill_value=state["fill"], hard_mask=state["hard"]
    )


_BITS: Final = StateProvider("numpy.random.bits", _bit_generator_state, _load_bits)
for _name, _module in (
    ("MT19937", "_mt19937"),
    ("PCG64", "_pcg64"),
    ("PCG64DXSM", "_pcg64"),
    ("Philox", "_philox"),
    ("SFC64", "_sfc64"),
):
    register_provider(f"numpy.random.{_module}.{_name}", _BITS)
register_provider(
    "numpy.random._generator.Generator",
    StateProvider(
        "numpy.random.generator",
        lambda source: {"bits": source.bit_generator},
        _load_generator,
        lambda source: {"bits": source.bit_generator},
    ),
)
register_provider(
    "numpy.random.mtrand.RandomState",
    StateProvider("numpy.random.state", _random_state, _load_random_state),
)
register_provider(
    "random.Random",
    StateProvider("python.random", lambda source: source.getstate(), _load_python_random),
)
register_provider(
    "an array of which some is masked",
    StateProvider("numpy.masked", _masked_state, _restore_masked),
)
