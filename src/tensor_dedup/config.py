"""What a user can set, checked once, where it is set. No torch and no vllm here."""

import difflib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from os import PathLike, fspath
from typing import Any, Literal, Self, cast, get_args

from tensor_dedup.errors import ConfigError

HashAlgorithm = Literal["blake3", "blake2b", "xxh3_128", "xxhash64"]
CpuWeights = Literal["packed", "plain"]
Verify = Literal["hint", "always"]

HASH_ALGORITHMS: tuple[str, ...] = get_args(HashAlgorithm)
# Without a cryptographic hash somebody can make two tensors of one digest; equal bytes cannot lie.
FORGEABLE = frozenset({"xxh3_128", "xxhash64"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDedupConfig:
    """How one load shares its tensors. Immutable, hashable, picklable, safe from any thread.

    `min_tensor_bytes` is in bytes; `audit` is a share of layer hits between 0.0 and 1.0.
    Every wrong field, value or combination raises ConfigError here, never later in a worker.
    """

    enabled: bool = True
    hash_algorithm: HashAlgorithm = "blake3"
    verify_bytes: bool | None = None
    min_tensor_bytes: int = 0
    memory_manager: str | PathLike[str] | None = None
    store: bool | str | PathLike[str] | None = None
    store_writes: bool = False
    cpu_weights: CpuWeights | None = None
    verify: Verify = "hint"
    audit: float = 0.0

    # The generated __init__ would answer an unknown field with a TypeError that names no neighbour.
    # __new__ sees the same arguments first and leaves the signature that type checkers read alone.
    def __new__(cls, *_args: object, **values: object) -> Self:
        _refuse_unknown(values)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        _check_type("enabled", self.enabled, bool)
        _check_choice("hash_algorithm", self.hash_algorithm, HASH_ALGORITHMS)
        if self.verify_bytes is not None:
            _check_type("verify_bytes", self.verify_bytes, bool)
        _check_size("min_tensor_bytes", self.min_tensor_bytes)
        if self.cpu_weights is not None:
            _check_choice("cpu_weights", self.cpu_weights, get_args(CpuWeights))
        _check_choice("verify", self.verify, get_args(Verify))
        _check_share("audit", self.audit)
        self._check_store()
        self._check_manager()

    def _check_store(self) -> None:
        if isinstance(self.store, PathLike):
            # As text, so that what JSON gives back in a worker equals what was set here.
            object.__setattr__(self, "store", fspath(self.store))
        named = isinstance(self.store, str) and self.store
        if self.store is not None and self.store is not True and not named:
            raise _wrong("store", self.store, "give True (your own store), a folder, or None")
        _check_type("store_writes", self.store_writes, bool)
        if self.store_writes and self.store is None:
            raise _wrong("store_writes", True, "say where to: set store to True or to a folder")
        if self.store is not None and self.hash_algorithm != "blake3":
            advice = "a store names bytes by blake3: leave hash_algorithm 'blake3', or drop store"
            raise _wrong("hash_algorithm", self.hash_algorithm, advice)

    def _check_manager(self) -> None:
        if isinstance(self.memory_manager, PathLike):
            object.__setattr__(self, "memory_manager", fspath(self.memory_manager))
        if self.memory_manager is None:
            return
        if not isinstance(self.memory_manager, str) or not self.memory_manager:
            advice = 'give "auto", the path of a manager\'s socket, or None'
            raise _wrong("memory_manager", self.memory_manager, advice)
        if self.hash_algorithm != "blake3":
            advice = "a memory manager names bytes by blake3: leave hash_algorithm 'blake3'"
            raise _wrong("hash_algorithm", self.hash_algorithm, advice)
        if self.cpu_weights == "packed":
            advice = "a packed weight cannot leave its process: drop cpu_weights, or memory_manager"
            raise _wrong("cpu_weights", self.cpu_weights, advice)

    @property
    def verifies_bytes(self) -> bool:
        """Whether a hit is compared byte by byte before it is mapped."""
        if self.verify_bytes is None:
            return self.hash_algorithm in FORGEABLE
        return self.verify_bytes

    @property
    def store_folder(self) -> str | None:
        """The folder of the store that was named; None is the user's own."""
        return self.store if isinstance(self.store, str) else None

    def to_dict(self) -> dict[str, Any]:
        """Every field as JSON can hold it; `from_any` of the result equals this config."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_any(cls, value: object) -> Self:
        """Make a config of whatever a user may write where a config is taken.

        None and True are the defaults, False is the defaults switched off; a mapping or JSON text
        sets the fields it names. A caller for whom None means "not asked for" tests that first.
        Raises ConfigError.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            value = _parse(value)
        if value is None or isinstance(value, bool):
            return cls(enabled=value is not False)
        if isinstance(value, Mapping):
            return cls._from_mapping(cast("Mapping[object, object]", value))
        raise ConfigError(
            f"tensor_dedup is {value!r}; give True, False, a dict, JSON text of one or a "
            "TensorDedupConfig",
            value=repr(value),
        )

    @classmethod
    def _from_mapping(cls, values: Mapping[object, object]) -> Self:
        # Keyword arguments must be text; a key that is not could only be an unknown field.
        return cls(**cast("Mapping[str, Any]", {str(name): values[name] for name in values}))


FIELDS: tuple[str, ...] = tuple(field.name for field in fields(TensorDedupConfig))


def _parse(text: str) -> object:
    try:
        return cast("object", json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"tensor_dedup is not JSON ({error}): {text[:200]!r}; write for example "
            '\'{"hash_algorithm": "blake3"}\' or true',
            value=text[:200],
        ) from error


def _plain(value: object) -> object:
    return fspath(value) if isinstance(value, PathLike) else value


def _refuse_unknown(values: Mapping[str, object]) -> None:
    for name in values:
        if name not in FIELDS:
            raise ConfigError(
                f"TensorDedupConfig has no field {name!r}; {_advice(name, FIELDS, alike=0.0)}",
                field=name,
            )


def _check_type(name: str, value: object, wanted: type) -> None:
    if not isinstance(value, wanted):
        raise _wrong(name, value, f"give a {wanted.__name__}")


def _check_choice(name: str, value: object, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise _wrong(name, value, _advice(value, choices))


def _check_size(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _wrong(name, value, "give a number of bytes, 0 or more")


def _check_share(name: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0.0 <= (share := cast("float", value)) <= 1.0 or math.isnan(share):
        raise _wrong(name, value, "give a share between 0.0 and 1.0")


def _wrong(name: str, value: object, advice: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r}; {advice}", field=name, value=repr(value))


def _advice(value: object, choices: Collection[str], alike: float = 0.5) -> str:
    every = f"one of {', '.join(sorted(choices))}"
    near = difflib.get_close_matches(str(value), choices, n=1, cutoff=alike)
    return f"did you mean {near[0]!r}? It is {every}" if near else f"give {every}"
