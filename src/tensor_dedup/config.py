"""The configuration of a load, validated where it is created.

Importing this module loads neither torch nor vllm, because worker processes and the command line
read a config before they import either.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from os import PathLike, fspath
from typing import Any, Literal, Self, cast, get_args
from urllib.parse import unquote, urlsplit

from tensor_dedup.errors import ConfigError
from tensor_dedup.suggestions import nearest
from tensor_dedup.types import is_url

HashAlgorithm = Literal["blake3", "blake2b", "xxh3_128", "xxhash64"]
CpuWeights = Literal["packed", "plain"]
Verify = Literal["hint", "always"]

HASH_ALGORITHMS: tuple[str, ...] = get_args(HashAlgorithm)
# Without a cryptographic hash somebody can make two tensors of one digest; equal bytes cannot lie.
FORGEABLE = frozenset({"xxh3_128", "xxhash64"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenBase:
    """Layers that a load takes from another checkpoint in place of the model's own.

    Attributes:
        base: A folder or file of weights, `store://NAME`, or a name in the Hugging Face cache.
        layers: A comma-separated list of layer numbers, ranges of layer numbers and patterns of
            tensor names, as for `tensor-dedup substitute --layers`.

    Raises:
        ConfigError: A value is empty, or is neither text nor a path.
    """

    base: str
    layers: str

    def __post_init__(self) -> None:
        for name in ("base", "layers"):
            value = getattr(self, name)
            if isinstance(value, PathLike):
                object.__setattr__(self, name, fspath(value))
            elif not isinstance(value, str) or not value:
                raise _wrong(f"{name} of frozen_base", value, f"give text; {_FROZEN_ADVICE}")

    def to_dict(self) -> dict[str, str]:
        """Return the fields as a JSON object."""
        return {"base": self.base, "layers": self.layers}

    @classmethod
    def from_any(cls, value: object) -> "FrozenBase":
        """Return `value` as a FrozenBase.

        `value` is either a FrozenBase, which is returned unchanged, or a mapping with the fields
        `base` and `layers`.

        Raises:
            ConfigError: `value` is neither, the keys of the mapping are not `base` and `layers`, or
                one of its values is wrong.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise _wrong("frozen_base", value, f"give a dict; {_FROZEN_ADVICE}")
        names = [field.name for field in fields(cls)]
        given = {str(name): each for name, each in cast("Mapping[object, Any]", value).items()}
        for name in given:
            if name not in names:
                what = f"frozen_base has no field {name!r}; {_advice(name, names, alike=0.0)}"
                raise ConfigError(what, field=f"frozen_base.{name}")
        for name in names:
            if name not in given:
                what = f"frozen_base lacks {name!r}; {_FROZEN_ADVICE}"
                raise ConfigError(what, field=f"frozen_base.{name}")
        return cls(**given)


_FROZEN_ADVICE = 'for example {"base": "path/to/base", "layers": "0-7"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDedupConfig:
    """The configuration of a load: how it shares tensors.

    A config is immutable, hashable and picklable, and may be used from any thread. Functions that
    take a config also take True, False, a dict of fields or its JSON text.

    Attributes:
        enabled: Whether anything is shared at all; False loads as without this package.
        hash_algorithm: The hash that identifies the bytes of a tensor: "blake3", "blake2b",
            "xxh3_128" or "xxhash64". Only "blake3" can be combined with a memory manager or a
            store; the others work inside one process.
        verify_bytes: Whether a tensor that was found by its digest is also compared byte by byte
            before it is mapped. None means True for the two xxhashes, because equal digests can be
            forged for them, and False for the other algorithms.
        min_tensor_bytes: A final tensor is shared only if every tensor of the checkpoint that goes
            into it has at least this many bytes.
        memory_manager: The path of a memory manager's socket; tensors are then shared with other
            processes, too. "auto" uses the manager at the default path. If none answers there, one
            is started, which ends after ten idle minutes. None shares inside this process only.
        store: The store that known digests and `store://` checkpoints are read from. The value is
            its folder, True for your own store, or None for no store. The URL of a remote, such as
            "s3://bucket/models", means your own store and that URL as `remote`.
        store_writes: Whether tensors that were read from files are also put into `store`.
        remote: The URL of the remote that a `store://` checkpoint is pulled from when it is not in
            the store. If None, the URL is that of the environment variable TENSOR_DEDUP_REMOTE, or
            else that of `remote` in a configuration file. If neither is set, nothing is pulled.
            The URL must not contain a credential: credentials come from the environment.
        frozen_base: Layers that a vLLM model takes from a base in place of its own, given as a
            FrozenBase or as a dict with `base` and `layers`. This changes what the model computes.
            None takes every layer from the model's checkpoint.
        cpu_weights: The layout in which vLLM shares weights on CPUs. "packed" is the layout that
            the CPU kernels use. "plain" is the layout of the checkpoint, which other processes can
            use, too. None means "plain" with a memory manager and "packed" without one.
        verify: Which remembered digests are used: "hint" uses those of files that have not changed
            since they were hashed, "always" uses none and hashes every file again.
        audit: The fraction of hits, 0.0 to 1.0, that are also rebuilt from the checkpoint and
            compared byte by byte. A hit is a tensor or layer that was found in memory. A difference
            raises AuditError.
        salt_prefix_cache: Whether the hashes of a vLLM engine's prefix cache cover its weights, so
            that no entry is used with other weights than those it was computed with.

    Raises:
        ConfigError: A field is unknown, a value is wrong, or two values exclude each other. The
            error is raised here, never later in a worker process.
    """

    enabled: bool = True
    hash_algorithm: HashAlgorithm = "blake3"
    verify_bytes: bool | None = None
    min_tensor_bytes: int = 0
    memory_manager: str | PathLike[str] | None = None
    store: bool | str | PathLike[str] | None = None
    store_writes: bool = False
    remote: str | PathLike[str] | None = None
    frozen_base: FrozenBase | Mapping[str, object] | None = None
    cpu_weights: CpuWeights | None = None
    verify: Verify = "hint"
    audit: float = 0.0
    salt_prefix_cache: bool = True

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
        _check_type("salt_prefix_cache", self.salt_prefix_cache, bool)
        if self.frozen_base is not None:
            object.__setattr__(self, "frozen_base", FrozenBase.from_any(self.frozen_base))
        self._check_store()
        self._check_remote()
        self._check_manager()

    def _check_store(self) -> None:
        if isinstance(self.store, PathLike):
            # As text, so that what JSON gives back in a worker equals what was set here.
            object.__setattr__(self, "store", fspath(self.store))
        named = isinstance(self.store, str) and self.store
        if self.store is not None and self.store is not True and not named:
            advice = "give True (your own store), a folder, the URL of a remote, or None"
            raise _wrong("store", self.store, advice)
        if isinstance(self.store, str) and is_url(self.store):
            self._take_remote(self.store)
        _check_type("store_writes", self.store_writes, bool)
        if self.store_writes and self.store is None:
            raise _wrong("store_writes", True, "say where to: set store to True or to a folder")
        if self.store is not None and self.hash_algorithm != "blake3":
            advice = "a store names bytes by blake3: leave hash_algorithm 'blake3', or drop store"
            raise _wrong("hash_algorithm", self.hash_algorithm, advice)

    def _take_remote(self, url: str) -> None:
        """Let `url`, which was given as the store, be the remote behind the user's own store."""
        _check_secret("store", url)
        if self.remote is not None and fspath(self.remote) != url:
            advice = "store names another remote; give a folder or True as store, or drop remote"
            _check_secret("remote", fspath(self.remote))
            raise _wrong("remote", self.remote, advice)
        object.__setattr__(self, "store", True)
        object.__setattr__(self, "remote", url)

    def _check_remote(self) -> None:
        if isinstance(self.remote, PathLike):
            object.__setattr__(self, "remote", fspath(self.remote))
        if self.remote is None:
            return
        if not isinstance(self.remote, str) or not self.remote:
            raise _wrong("remote", self.remote, "give a URL such as 's3://bucket/models', or None")
        _check_secret("remote", self.remote)

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
        """Whether a tensor found by its digest is compared byte by byte before it is mapped."""
        if self.verify_bytes is None:
            return self.hash_algorithm in FORGEABLE
        return self.verify_bytes

    @property
    def store_folder(self) -> str | None:
        """The folder given as `store`, or None if `store` is True (the user's own) or None."""
        return self.store if isinstance(self.store, str) else None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON object, which `from_any` turns into an equal config."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_any(cls, value: object) -> Self:
        """Return the config that `value` stands for, in any form that users may pass.

        - A config is returned unchanged.
        - None and True stand for the defaults, False for the defaults with `enabled` off.
        - A mapping or JSON text sets the fields that it names.

        Callers for whom None means "not asked for" must handle None themselves.

        Raises:
            ConfigError: `value` is none of these, or a field in it is wrong.
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
    if isinstance(value, FrozenBase):
        return value.to_dict()
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


def _check_secret(name: str, url: str) -> None:
    if _may_hold_secret(url):  # and then no message may show it
        raise ConfigError(
            f"{name}: a user, a password or a query in a URL may be a secret, and a config is "
            "logged; give the URL without, and put keys into the environment",
            field=name,
        )


def _may_hold_secret(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return True  # nobody can say what it holds
    mistyped = parts.scheme and not parts.netloc and "@" in url
    parameters = parts.scheme not in ("", "file") and {*"?#;"} & {*unquote(parts.path)}
    return "@" in parts.netloc or bool(mistyped or parameters or parts.query or parts.fragment)


def _wrong(name: str, value: object, advice: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r}; {advice}", field=name, value=repr(value))


def _advice(value: object, choices: Collection[str], alike: float = 0.5) -> str:
    every = f"one of {', '.join(sorted(choices))}"
    near = nearest(str(value), choices, most=1, alike=alike)
    return f"did you mean {near[0]!r}? It is {every}" if near else f"give {every}"
