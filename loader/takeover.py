"""Take over the weights of a newly loaded model into a running model of the same structure.

A running model must not be half-way between two checkpoints. Therefore the new checkpoint is loaded
into a second module tree, beside the running one, and `Takeover.plan` compares the two trees. If
they fit, `Takeover.apply` moves the memory of the new parameters, and what processing has set, into
the running tree. It only rebinds, so nothing can fail half-way, and it takes no longer for large
tensors. The running tree keeps its modules and parameters, so whoever refers to them sees the new
weights.

Captured CUDA graphs refer to addresses. With `keep_addresses`, nothing is rebound: the tensors of
the running tree get the new contents where they are (`loader.cuda.exchange`), and whatever else
processing has set must be equal in both trees.

Processing a model after its load (packing, quantising) sets attributes of modules and of their
helper objects, such as quantisation methods. To tell these from attributes that a running engine
has set, such as the cache of an attention layer, the attributes of a model are noted when it was
built (`Built`) and compared when it is loaded (`note_loaded`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.cuda.exchange import MOST_ARRIVE, AddressExchange, require_own_places
from tensor_dedup.loader.residents.param_data import memory_state, param_data, set_param_data
from tensor_dedup.loader.unsharing.model_digests import take_over as take_over_digests

if TYPE_CHECKING:
    from tensor_dedup.loader.cuda.exchange import Pair
    from tensor_dedup.loader.cuda.shared import SharedGpu

# The name of a module, and the attributes that lead from it to an object that it holds.
_Key: TypeAlias = str | int
_Path: TypeAlias = tuple[str, tuple[_Key, ...]]

_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module()))
_SIMPLE: Final = (
    type(None), bool, int, float, complex, str, bytes, set, frozenset, type, enum.Enum, CodeType,
    torch.dtype, torch.device,
)  # fmt: skip
_NOT_HELPERS: Final = (
    nn.Module,
    torch.Tensor,
    type,
    FunctionType,
    MethodType,
    dict,
    list,
    tuple,
    set,
    frozenset,
)
# From a module to its quantisation method, to that one's kernels, and to what a kernel holds.
_MOST_LEVELS: Final = 6


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What the load of a model has set.

    - `names` has the names of the attributes that were set, by the path of their object.
    - `kept` has the paths of the objects that were there before the load.
    """

    names: Mapping[_Path, frozenset[str]]
    kept: frozenset[_Path]


class Built:
    """What the modules of a model, and the helper objects that they hold, had as attributes."""

    def __init__(self, model: nn.Module) -> None:
        """Note the attributes of `model`, which was just built and has no weights yet."""
        self._held = {
            path: (thing, {key: (each, _content(each)) for key, each in found.items()})
            for path, thing, found in _objects(model)
        }

    def loaded(self, model: nn.Module) -> _Loaded:
        """Return what was set since."""
        names: dict[_Path, frozenset[str]] = {}
        kept = set()
        modules = dict(model.named_modules())
        for path, (thing, before) in self._held.items():
            if _follow(modules, path) is not thing:
                continue  # what replaces it comes with the attribute in which it was set
            kept.add(path)
            new = {
                key
                for key, each in _attributes(thing).items()
                if key not in before
                or before[key][0] is not each
                or before[key][1] != _content(each)
            }
            if new:
                names[path] = frozenset(new)
        return _Loaded(names, frozenset(kept))


_LOADED: Final[WeakKeyDictionary[nn.Module, _Loaded]] = WeakKeyDictionary()


def note_loaded(model: nn.Module, built: Built) -> None:
    """Record which attributes the load of `model` has set since it was `built`."""
    _LOADED[model] = built.loaded(model)


def _content(value: object) -> object:
    """Return what changes when a container or a tensor is written to in place."""
    if isinstance(value, dict):
        return [*map(id, value.keys()), *map(id, value.values())]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [*map(id, value)]
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        return memory_state(value)
    return None


def _objects(model: nn.Module) -> Iterator[tuple[_Path, object, dict[str, Any]]]:
    """Yield the modules of a model and their helper objects, each once, with their attributes."""
    seen: set[int] = set()

    def held(path: _Path, thing: object) -> Iterator[tuple[_Path, object, dict[str, Any]]]:
        seen.add(id(thing))
        found = _attributes(thing)
        yield path, thing, found
        if len(path[1]) < _MOST_LEVELS:
            for name, value in found.items():
                for keys, each in _items(value):
                    if id(each) not in seen and _is_helper(each):
                        yield from held((path[0], (*path[1], name, *keys)), each)

    for name, module in model.named_modules():
        yield from held((name, ()), module)


def _items(value: object) -> Iterator[tuple[tuple[_Key, ...], object]]:
    """Yield `value`, and what is in it if it is a container, with the keys that lead there."""
    if isinstance(value, dict):
        yield from (((key,), each) for key, each in value.items() if isinstance(key, (str, int)))
    elif isinstance(value, (list, tuple)):
        yield from (((number,), each) for number, each in enumerate(value))
    else:
        yield (), value


def _attributes(thing: object) -> dict[str, Any]:
    if isinstance(thing, nn.Module):
        return {key: each for key, each in vars(thing).items() if key not in _OF_EVERY_MODULE}
    return vars(thing)


def _is_helper(value: object) -> bool:
    return not isinstance(value, _NOT_HELPERS) and isinstance(
        getattr(value, "__dict__", None), dict
    )


@dataclass(slots=True)
class Takeover:
    """The steps that give a running model the weights of a newly loaded one. For one thread.

    Until `apply`, both models are as they were. Afterwards the newly loaded model must not be used.
    """

    running: nn.Module
    fresh: nn.Module
    _tensors: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    # Where the running model has its tensors.
    _places: list[tuple[dict[str, Any], str, torch.Tensor]] = field(default_factory=list)
    # Of the running object and of the new one, what is set, and what is removed.
    _attributes: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], frozenset[str]]] = (
        field(default_factory=list)
    )
    _keep_addresses: SharedGpu | None = None

    @classmethod
    def plan(
        cls, running: nn.Module, fresh: nn.Module, keep_addresses: SharedGpu | None = None
    ) -> Takeover:
        """Compare the two models, and return how `running` gets the weights of `fresh`.

        Both must have been recorded by `note_loaded`. With `keep_addresses`, the GPU on which both
        lie, the tensors of `running` keep their addresses.

        Raises:
            UnsupportedError: The models differ in more than their weights. The error says where.
        """
        if running not in _LOADED or fresh not in _LOADED:
            raise UnsupportedError(
                "the running model cannot take over these weights: another loader than vLLM's "
                "default one has loaded them; start a new engine"
            )
        plan = cls(running, fresh)
        there = dict(running.named_modules(remove_duplicate=False))
        here = dict(fresh.named_modules(remove_duplicate=False))
        if odd := there.keys() ^ here.keys():
            raise _differs(min(odd), "is a module of one of them only")
        tied: dict[int, torch.Tensor] = {}
        owners: set[int] = set()
        for name, module in there.items():
            if type(module) is not type(here[name]):
                raise _differs(
                    name, f"is a {type(module).__name__} and a {type(here[name]).__name__}"
                )
            plan._plan_tensors(name, module, here[name], tied, owners)
        parts: dict[int, object] = dict(tied)
        for path in _LOADED[fresh].kept & _LOADED[running].kept:
            parts[id(_follow(here, path))] = _follow(there, path)
        plan._plan_attributes(there, here, parts)
        if keep_addresses is not None:
            plan._keep_addresses = keep_addresses
            plan._require_same_places(parts)
        return plan

    def _plan_tensors(
        self,
        name: str,
        module: nn.Module,
        fresh: nn.Module,
        tied: dict[int, torch.Tensor],
        owners: set[int],
    ) -> None:
        """Pair the tensors of two modules. `tied` and `owners` have what was paired before."""
        for kind in ("_parameters", "_buffers"):
            mine, theirs = getattr(module, kind), getattr(fresh, kind)
            if odd := mine.keys() ^ theirs.keys():
                raise _differs(f"{name}.{min(odd)}", "is a tensor of one of them only")
            for key, tensor in theirs.items():
                place, own = f"{name}.{key}", mine[key]
                if (tensor is None) is not (own is None):
                    raise _differs(place, "is set in one of them only")
                if tensor is None or tensor is own:
                    continue
                if _geometry(own) != _geometry(tensor):
                    if kind == "_buffers" and key in module._non_persistent_buffers_set:
                        continue  # the engine has made it longer, as a table of positions
                    raise _differs(place, f"is {_geometry(own)} and {_geometry(tensor)}")
                known = id(tensor) in tied
                if known is not (id(own) in owners) or tied.setdefault(id(tensor), own) is not own:
                    raise _differs(place, "is tied to another tensor in one of them only")
                owners.add(id(own))
                if not known:
                    self._tensors.append((own, tensor))
                self._places.append((mine, key, own))

    def _plan_attributes(
        self,
        there: Mapping[str, nn.Module],
        here: Mapping[str, nn.Module],
        parts: Mapping[int, object],
    ) -> None:
        before, after = _LOADED[self.running].names, _LOADED[self.fresh].names
        for path in before.keys() | after.keys():
            theirs, mine = _follow(here, path), _follow(there, path)
            if mine is theirs or theirs is None or type(mine) is not type(theirs):
                continue  # a helper that a load has replaced comes with an attribute of its holder
            names = after.get(path, frozenset())
            new = {key: _moved(value, parts) for key, value in vars(theirs).items() if key in names}
            gone = before.get(path, frozenset()) - new.keys()
            self._attributes.append((vars(mine), vars(theirs), new, gone))

    def _require_same_places(self, parts: Mapping[int, object]) -> None:
        """Check that only contents of tensors differ, of which those in attributes are added."""
        for own, tensor in self._tensors:
            if own.stride() != tensor.stride():
                raise _differs("a tensor", f"has strides {own.stride()} and {tensor.stride()}")
        same = _SameValues(parts)
        for own, tensor in self._tensors:
            if not same(vars(own), vars(tensor)):
                raise _differs("a tensor", "has other attributes, and captured graphs may use them")
        for mine, theirs, new, gone in self._attributes:
            odd = [key for key in new if key not in mine or not same(mine[key], theirs[key])]
            if odd or gone:
                raise _differs(min([*odd, *gone]), "is set otherwise, and captured graphs use it")
        known = {id(tensor) for _, tensor in self._tensors}
        self._tensors += (pair for key, pair in same.tensors.items() if key not in known)
        require_own_places(self._tensors)

    def apply(self, note: Callable[[], None] | None = None) -> None:
        """Give the running model the new weights. No thread may compute with it meanwhile.

        `note` is called when it has them. If an exception arrives in the middle, as from a signal
        handler, all is done nevertheless, `note` perhaps twice, and then the exception is raised.

        Raises:
            UnsupportedError: The running model has other tensors than when this was planned. It
                stays as it is.
            BackendError: There is no room on the GPU to keep addresses, or its driver refuses. The
                running model stays as it is.
            LostWeightsError: The same, and it could not be made as it was.
        """
        for held, key, own in self._places:
            if held.get(key) is not own:
                raise _differs(key, "was replaced meanwhile")
        exchange = None
        if self._keep_addresses is not None:
            exchange = AddressExchange(self._keep_addresses, self._tensors)
            exchange.prepare()
        arrived: BaseException | None = None
        for _ in range(MOST_ARRIVE):
            try:
                self._change(exchange)
                if note is not None:
                    note()
                break
            except BaseException as error:
                if exchange is not None and exchange.ended:
                    raise
                arrived = error  # raised below
        else:
            if exchange is not None and arrived is not None:
                exchange.lose(arrived)
        self._let_go()
        if arrived is not None:
            raise arrived

    def _change(self, exchange: AddressExchange | None) -> None:
        """Change all weights. May be done again, in part or whole."""
        if exchange is None:
            self._rebind()
        else:
            exchange.change()
        take_over_digests(self.running, self.fresh)

    def _let_go(self) -> None:
        """Let go of what is not needed of the new model, and of the one before."""
        tensors = [tensor for _, tensor in self._tensors]
        if self._keep_addresses is not None:
            _Remains(tensors, []).let_go()  # nothing of it was moved
            return
        former = _FORMER.pop(self.running, None)
        _FORMER[self.running] = _Remains(
            tensors, [(theirs, [*new]) for _, theirs, new, _ in self._attributes]
        )
        if former is not None:
            former.let_go()

    def _rebind(self) -> None:
        """Give the running model tensors and attributes. May be done again, in part or whole."""
        for own, tensor in self._tensors:
            # Both have the memory now: what a load has set may refer to the new model's parameter.
            set_param_data(own, param_data(tensor))
        # An object may have been reached by another path in the new model.
        for held, _, _, gone in self._attributes:
            for key in gone:
                held.pop(key, None)
        for held, _, new, _ in self._attributes:
            held.update(new)
        _LOADED[self.running] = _LOADED[self.fresh]


class _SameValues:
    """A comparison of what the loads of two models have set. For one thread.

    `tensors` has the pairs of tensors that were met, by the id of the new model's.
    """

    def __init__(self, parts: Mapping[int, object]) -> None:
        """Compare values of a new model with the running one's.

        `parts` has the running model's part for each part of the new one, by its id.
        """
        self._parts = parts
        # With what was met, so that nothing else gets its id meanwhile.
        self._met: dict[tuple[int, int], tuple[Any, Any]] = {}
        self.tensors: dict[int, Pair] = {}

    def __call__(self, mine: Any, theirs: Any) -> bool:
        """Return whether two values are equal but for the contents of tensors."""
        if mine is theirs:
            return True
        if id(theirs) in self._parts:
            return self._parts[id(theirs)] is mine
        if type(mine) is not type(theirs):
            return False
        if (id(mine), id(theirs)) in self._met:
            return True  # within itself, or again
        self._met[id(mine), id(theirs)] = mine, theirs
        if isinstance(mine, torch.Tensor):
            return self._are_alike(mine, theirs)
        if isinstance(mine, _SIMPLE):
            return bool(mine == theirs)
        held, other = _held(mine), _held(theirs)
        if held is None or other is None:
            return False  # what it refers to cannot be seen
        return held.keys() == other.keys() and all(self(held[key], other[key]) for key in held)

    def _are_alike(self, mine: torch.Tensor, theirs: torch.Tensor) -> bool:
        if _geometry(mine) != _geometry(theirs) or mine.stride() != theirs.stride():
            return False
        if not self(vars(mine), vars(theirs)):
            return False
        return self.tensors.setdefault(id(theirs), (mine, theirs))[0] is mine


def _held(value: Any) -> dict[Any, Any] | None:
    """Return what a value consists of or refers to, or None if that cannot be seen."""
    found = getattr(value, "__dict__", None)
    if _has_slots(value) or (found and isinstance(value, (dict, list, tuple, partial))):
        return None
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, MethodType):
        return {"function": value.__func__, "self": value.__self__}
    if isinstance(value, FunctionType):
        cells = (each.cell_contents for each in value.__closure__ or ())
        defaults = {"defaults": value.__defaults__, "keywords": value.__kwdefaults__}
        seen = {"code": value.__code__, "globals": id(value.__globals__), "set": vars(value)}
        return {**seen, **defaults, **dict(enumerate(cells))}
    if isinstance(value, partial):
        return {"function": value.func, "values": value.args, "keywords": value.keywords}
    if isinstance(value, nn.Module):
        return None  # of the new model's modules, each has its place
    return found if isinstance(found, dict) else None


def _has_slots(value: object) -> bool:
    slots = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    names = {name for each in slots for name in ([each] if isinstance(each, str) else each)}
    return bool(names - {"__dict__", "__weakref__"})


@dataclass(frozen=True, slots=True)
class _Remains:
    """What a model was, after a running one has taken over its weights: tensors and attributes.

    Its modules and parameters refer to each other, so by themselves they would keep the memory of
    a former step until a full garbage collection. And whoever should still compute with them must
    fail, and not compute with former weights.
    """

    tensors: list[torch.Tensor]
    attributes: list[tuple[dict[str, Any], list[str]]]

    def let_go(self) -> None:
        for tensor in self.tensors:
            set_param_data(tensor, tensor.new_empty(0))
        for held, names in self.attributes:
            for name in names:
                held.pop(name, None)


_FORMER: Final[WeakKeyDictionary[nn.Module, _Remains]] = WeakKeyDictionary()


def _geometry(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def _follow(modules: Mapping[str, nn.Module], path: _Path) -> Any:
    thing: Any = modules.get(path[0])
    for name in path[1]:
        if isinstance(thing, dict):
            thing = thing.get(name)
        elif isinstance(thing, (list, tuple)):
            thing = thing[name] if isinstance(name, int) and name < len(thing) else None
        else:
            thing = getattr(thing, "__dict__", {}).get(name)
    return thing


def _moved(value: Any, parts: Mapping[int, object]) -> Any:
    """Return `value` with what belongs to the new model replaced by the running one's."""
    if id(value) in parts:
        return parts[id(value)]
    if isinstance(value, MethodType) and id(value.__self__) in parts:
        return MethodType(value.__func__, parts[id(value.__self__)])
    if type(value) in (list, tuple):
        return type(value)(_moved(item, parts) for item in value)
    if type(value) is dict:
        return {key: _moved(item, parts) for key, item in value.items()}
    return value


def _differs(place: str, how: str) -> UnsupportedError:
    return UnsupportedError(
        f"the running model cannot take over these weights: {place} {how}; start a new engine",
        place=place,
    )
