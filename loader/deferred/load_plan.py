"""Load plans: what the load of a whole model led to, found again by one key.

A load runs the model's loading code over deferred tensors, derives a recipe for each parameter and
a key for each layer, and looks each of them up. A *load plan* has the outcome, if every parameter
became shared: the resident of each parameter, and the record of each layer. A later load of the
same checkpoint into the same model uses the plan and does none of this.

A plan, like a layer key, is a memo of a pure function. Its key has two parts:

- The *head* describes the model as it was built: the configuration, the process, and the tree of
  modules with their attributes, parameters and code.
- The *contents* are the names of the checkpoint's tensors in the order in which they are loaded,
  with their dtypes and shapes, and with the digests of all that are used.

What cannot be described gets no plan. Neither does a model whose loading code does more than fill
parameters (`ModuleStates`), for a plan does not repeat that.
"""

from __future__ import annotations

import dataclasses
import enum
import weakref
from array import array
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from blake3 import blake3
from torch import nn

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.deferred.layer_key import class_name
from tensor_dedup.loader.residents.param_data import memory_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensor_dedup.loader.checkpoint_io.sources import Placed, SourceTensor
    from tensor_dedup.loader.deferred.layer_records import LayerRecord
    from tensor_dedup.loader.residents.resident import Resident

_T = TypeVar("_T")
_CONTEXT: Final = "tensor-dedup load plan v1"
_PLAIN: Final = frozenset({bool, int, float, complex, str, bytes, type(None)})
_BY_TEXT: Final = (torch.dtype, torch.device, torch.layout, PurePath)
_CONTAINERS: Final = (dict, list, tuple, set, frozenset)
# Modules are listed by themselves, and what a class or function holds is the same for all models.
_NOT_EXPANDED: Final = (nn.Module, type, FunctionType)
_MOST_LEVELS: Final = 24
# An attribute of modules that loads do not read, and that modules which several models share, such
# as vLLM's rotary embeddings, have from the model before.
_TRAINING: Final = "training"


class UndescribedError(UnsupportedError):
    """A configuration has an object in it that cannot be described."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class LoadPlan:
    """The outcome of one load, all of whose parameters became shared. Immutable.

    - `head` and `key` are the digests of the head alone, and of head and contents.
    - `residents` maps the names of parameters to the residents that they are mappings of.
    - `records` maps the names of layers to the layer records that they use.
    - `sources` has the positions, in the order of loading, of the source tensors that were used.
    - `code` keeps the classes and functions alive that the head names by `id`.

    Residents and records are referred to weakly.
    """

    head: str
    key: str
    residents: dict[str, weakref.ref[Resident]]
    records: dict[str, weakref.ref[LayerRecord]]
    sources: array[int]
    code: tuple[object, ...]

    def held(self) -> HeldPlan | None:
        """Return the plan with strong references, or None if a part of it no longer exists."""
        residents = _alive(self.residents)
        records = _alive(self.records)
        if residents is None or records is None:
            return None
        forms = [each.opaque() for each in records.values() if each.opaque is not None]
        return None if None in forms else HeldPlan(self, residents, records, forms)


def _alive(refs: Mapping[str, weakref.ref[_T]]) -> dict[str, _T] | None:
    found = {name: each for name, ref in refs.items() if (each := ref()) is not None}
    return found if len(found) == len(refs) else None


@dataclass(eq=False, slots=True)
class HeldPlan:
    """A load plan whose residents, records and packed weights (`forms`) are kept alive."""

    plan: LoadPlan
    residents: dict[str, Resident]
    records: dict[str, LayerRecord]
    forms: list[object]


class LoadPlans:
    """The load plans of this process. For threads that hold the load lock.

    A plan lives as long as a model that was loaded with it or from which it was made.
    """

    def __init__(self) -> None:
        self._plans: WeakValueDictionary[str, LoadPlan] = WeakValueDictionary()
        self._models: WeakKeyDictionary[nn.Module, LoadPlan] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._plans)

    def has_head(self, head: str) -> bool:
        """Return whether there is a plan with this `head`."""
        return any(plan.head == head for plan in list(self._plans.values()))

    def find(self, key: str) -> HeldPlan | None:
        """Return the plan with this `key`, or None if there is none or a part of it is gone."""
        plan = self._plans.get(key)
        return None if plan is None else plan.held()

    def keep(self, model: nn.Module, plan: LoadPlan) -> None:
        """Let `plan` be found, instead of an earlier one with its key, while `model` lives."""
        self._plans[plan.key] = plan
        self._models[model] = plan


PLANS: Final = LoadPlans()


@dataclass(frozen=True, slots=True)
class Head:
    """The first part of a plan's key: its digest, and the objects that it names by `id`."""

    digest: str
    code: tuple[object, ...]

    @classmethod
    def of(cls, model: nn.Module, *inputs: object, code: Sequence[object] = ()) -> Head:
        """Return the head for `model`, just built, and for what else its load depends on.

        `inputs` are configurations, and `code` are functions.

        Raises:
            UndescribedError: One of `inputs` cannot be described, or weights are loaded by an
                object that is neither a function nor a method.
        """
        text, used = _tree(model)
        names = [id(each) for each in code]
        every = f"{[described(each) for each in inputs]!r}\n{names}\n{text}"
        return cls(_hash(every), (*used, *code))

    def with_contents(self, sources: Iterable[tuple[str, SourceTensor, Placed | None]]) -> str:
        """Return the key for these named source tensors in this order.

        Source tensors without a digest are named without one. A plan is made only when those that
        were used have theirs, so such a tensor of a plan is one that nothing follows from.
        """
        lines = [self.digest]
        for name, source, placed in sources:
            spec = source.spec
            lines.append(f"{name!r} {spec.dtype} {spec.shape} {source.digest}")
            if placed is not None:
                lines.append(repr(placed))
        return _hash("\n".join(lines))


def _hash(text: str) -> str:
    data = text.encode("utf-8", "surrogatepass")
    return blake3(data, derive_key_context=_CONTEXT).hexdigest()


def described(value: object, levels: int = _MOST_LEVELS) -> Any:
    """Return `value`, a configuration, as nested lists and dicts of plain values.

    Raises:
        UndescribedError: `value` has an object in it that is neither plain, nor a container, nor
            itself a configuration.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, enum.Enum):
        return [class_name(kind), value.name]
    if isinstance(value, _BY_TEXT):
        return [class_name(kind), str(value)]
    if levels > 0:
        if isinstance(value, (list, tuple)):
            return [described(item, levels - 1) for item in value]
        if isinstance(value, (set, frozenset)):
            return sorted(repr(described(item, levels - 1)) for item in value)
        if isinstance(value, Mapping):
            return [[described(k, 1), described(v, levels - 1)] for k, v in value.items()]
        if not isinstance(value, type) and (
            dataclasses.is_dataclass(value) or hasattr(value, "to_diff_dict")
        ):
            return [class_name(kind), described(_fields(value), levels - 1)]
    raise UndescribedError(f"a {class_name(kind)} in a configuration cannot be described")


def _fields(value: Any) -> dict[str, object]:
    """Return all attributes of a configuration, whether they were declared or not."""
    if hasattr(value, "__dict__"):
        return dict(vars(value))
    return {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)}


def _tree(model: nn.Module) -> tuple[str, tuple[object, ...]]:
    """Describe all modules of a model, and return the objects that are described by `id`."""
    code: dict[int, object] = {}
    numbers: dict[int, int] = {}

    def known(thing: object) -> int:
        code[id(thing)] = thing
        return id(thing)

    def loader_of(method: object) -> int:
        function = _function(method)
        if not isinstance(function, FunctionType | None):
            raise UndescribedError(f"a {class_name(type(function))} loads weights")
        return known(function)

    lines = []
    kinds: dict[type, None] = {}
    for name, module in model.named_modules():
        kind, own = type(module), vars(module)
        kinds[kind] = None
        helpers = [
            (known(type(helper)), _plain_items(vars(helper)))
            for key in ("quant_method", "scheme")
            if (helper := own.get(key)) is not None and hasattr(helper, "__dict__")
        ]
        parameters = [
            (
                key,
                numbers.setdefault(id(each), len(numbers)),
                known(type(each)),
                each.dtype,
                tuple(each.shape),
                each.stride(),
                loader_of(getattr(each, "weight_loader", None)),
                _plain_items(each.__dict__),
            )
            for key, each in own["_parameters"].items()
            if each is not None
        ]
        buffers = [
            (key, each.dtype, tuple(each.shape))
            for key, each in own["_buffers"].items()
            if each is not None
        ]
        loads = loader_of(own.get("load_weights", getattr(kind, "load_weights", None)))
        lines.append(
            f"{name} {known(kind)} {loads} {_plain_items(own)} {helpers} {parameters} {buffers}"
        )
    # What was replaced in a class since, or where a class finds the loader of most parameters.
    for base in {base: None for kind in kinds for base in kind.__mro__ if base is not nn.Module}:
        held = [(key, known(each)) for key, each in vars(base).items()]
        load_weights = vars(base).get("load_weights")
        found = getattr(load_weights, "__globals__", {}).get("default_weight_loader")
        lines.append(f"{known(base)} {held} {known(found)}")
    return "\n".join(lines), tuple(code.values())


def _plain_items(attributes: Mapping[str, object]) -> list[tuple[str, object]]:
    return [
        (key, value)
        for key, value in attributes.items()
        if type(value) in _PLAIN and key != _TRAINING
    ]


def _function(method: object) -> object:
    """Return the function of a bound method: each layer binds its own."""
    return getattr(method, "__func__", method)


class ModuleStates:
    """What the modules of a model held at one moment, to see whether loading code changed it.

    That is every attribute of every module, what containers and objects among them hold, the
    attributes of parameters, and the memory of other tensors. What parameters contain is not
    compared, nor what an object holds that is itself an attribute of an object.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = _states(model)

    def unchanged(self, model: nn.Module) -> bool:
        """Return whether the modules of `model` hold what they held then."""
        before, now = self._before, _states(model)
        return len(now) == len(before) and all(
            type(a) in _PLAIN and type(a) is type(b) and a == b
            for a, b in zip(before, now, strict=True)
            if a is not b
        )


def _states(model: nn.Module) -> list[object]:
    """List what the modules of a model hold, each object once, in an order that is always the same.

    What an object holds is listed where it is first met.
    """
    found: list[object] = []
    seen: set[int] = set()
    for module in model.modules():
        found.append(module)
        _list_held(vars(module), found, seen)
        for parameter in module._parameters.values():
            if parameter is not None:
                _list_held(parameter.__dict__, found, seen)
    return found


def _list_held(
    held: Mapping[Any, object] | Collection[object],
    found: list[object],
    seen: set[int],
    *,
    by_object: bool = False,
) -> None:
    """Add what `held` holds to `found`, and what the containers and objects in it hold in turn.

    `held` are the members of a container, or the attributes of an object or module. `by_object`
    says that an object holds it: then the attributes of objects in it are not added.
    """
    found += held
    values = held.values() if isinstance(held, Mapping) else held
    found += values
    for value in values:
        if type(value) in _PLAIN or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _CONTAINERS):
            if value:
                _list_held(value, found, seen, by_object=by_object)
        elif isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter):
                found += memory_state(value)
        elif not by_object and not isinstance(value, _NOT_EXPANDED):
            _list_held(getattr(value, "__dict__", {}), found, seen, by_object=True)


def plan_of(
    head: Head,
    key: str,
    residents: Mapping[str, Resident],
    records: Mapping[str, LayerRecord],
    sources: Sequence[int],
) -> LoadPlan:
    """Return the plan of a load that ended with these residents and layer records."""
    return LoadPlan(
        head.digest,
        key,
        {name: weakref.ref(each) for name, each in residents.items()},
        {name: weakref.ref(each) for name, each in records.items()},
        array("L", sources),
        head.code,
    )
