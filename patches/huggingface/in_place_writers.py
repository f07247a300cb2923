"""Give tensors private memory before code writes to them in place on a GPU or another device.

In host memory, where the kernel copies on write, this is needed only with
`TENSOR_DEDUP_READ_ONLY=1`. The wrappers are installed when the first memory that needs them is
shared. They then stay in place, but do nothing for models that share no such memory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import torch
import wrapt
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.unsharing.private import make_private, needs_private_copy
from tensor_dedup.seams import Seam, holder_of, usable

if TYPE_CHECKING:
    from types import ModuleType

LOAD_STATE: Final = Seam(
    "torch.nn.modules.module:Module.load_state_dict",
    "call unshare before it, for models on a device",
    "copies into the parameters that are there",
    "(self, state_dict, strict=True, assign=False)",
    versions=("torch 2.13",),
)
INVERSION: Final = Seam(
    "diffusers.loaders.textual_inversion:TextualInversionLoaderMixin.load_textual_inversion",
    "call unshare on the text encoder before it, on a device",
    "writes the new words into the table of embeddings, where it has room for them",
    (
        "(self, pretrained_model_name_or_path, token=None, tokenizer=None, text_encoder=None, "
        "**kwargs)"
    ),
    versions=("diffusers 0.42",),
)
AVERAGES: Final = tuple(
    Seam(
        f"diffusers.training_utils:EMAModel.{name}",
        "call unshare before it, for models on a device",
        "copies into the parameters it is given",
        "(self, parameters)",
        versions=("diffusers 0.42",),
    )
    for name in ("copy_to", "restore")
)
PLANNED: Final = Seam(
    "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.resolve_tensor",
    "call unshare before state_dict(), for models on a device",
    "what it returns is written, and is no parameter but another tensor over its memory",
    "(self, read_item)",
    versions=("torch 2.13",),
)
# Methods of adapter layers that write to the layer they stand for. Some ways to initialise an
# adapter take from the weight what the adapter adds (`pissa_init` and the like).
_WRITING: Final = ("merge", "unmerge")
_BEGINNING: Final = "_init"

Method = Callable[..., Any]
Before = Callable[..., Iterable[torch.Tensor]]


@functools.cache
def install() -> None:
    """Wrap all known functions that write to parameters in place. Idempotent.

    Before a function writes to shared parameters, its wrapper gives them private memory. The
    wrapper for torch.distributed.checkpoint raises UnsupportedError instead: call `unshare` before
    `state_dict()`. Functions in a module that is not imported yet are wrapped when it is imported.
    """
    _guard(LOAD_STATE, _copied_into)
    register_optimizer_step_pre_hook(_before_step)
    wrapt.when_imported("peft.tuners.tuners_utils")(_guard_adapters)
    wrapt.when_imported("diffusers.loaders.textual_inversion")(lambda _: _guard(INVERSION, _tables))
    wrapt.when_imported("diffusers.training_utils")(_guard_averages)
    wrapt.when_imported("torch.distributed.checkpoint.default_planner")(_guard_plans)


def _guard(seam: Seam, written: Before) -> None:
    """Make private what a method is about to write, which `written` finds from its arguments."""
    if usable(seam):
        holder, name = holder_of(seam.target)
        setattr(holder, name, _guarded(getattr(holder, name), written))


def _guarded(original: Method, written: Before) -> Method:
    # Diffusers looks at the signature of what peft merges with; `wraps` shows the original's.
    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        make_private(written(*args, **kwargs))
        return original(*args, **kwargs)

    guarded._tensor_dedup = True  # type: ignore[attr-defined]
    return guarded


def _guard_averages(_: ModuleType) -> None:
    for seam in AVERAGES:
        if usable(seam):
            holder, name = holder_of(seam.target)
            setattr(holder, name, _guarded_average(getattr(holder, name)))


def _guarded_average(original: Method) -> Method:
    @functools.wraps(original)
    def guarded(self: Any, parameters: Iterable[torch.Tensor]) -> Any:
        every = list(parameters)  # a generator can be gone through once
        make_private(every)
        return original(self, every)

    return guarded


def _guard_plans(_: ModuleType) -> None:
    """Refuse shared memory: the parameters cannot be found from what `state_dict()` gave."""
    if not usable(PLANNED):
        return
    holder, name = holder_of(PLANNED.target)
    original = getattr(holder, name)

    @functools.wraps(original)
    def resolve_tensor(self: Any, read_item: Any) -> torch.Tensor:
        target: torch.Tensor = original(self, read_item)
        if needs_private_copy(target):
            raise UnsupportedError(
                f"{read_item.dest_index.fqn} is memory on {target.device} that models share; call "
                "tensor_dedup.unshare(model) before the model's state_dict() and load into that",
                tensor=read_item.dest_index.fqn,
            )
        return target

    resolve_tensor._tensor_dedup = True  # type: ignore[attr-defined]
    setattr(holder, name, resolve_tensor)


def _copied_into(
    module: nn.Module, state_dict: Any, strict: bool = True, assign: bool = False
) -> Iterable[torch.Tensor]:
    return () if assign else chain(module.parameters(), module.buffers())


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    every = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    # `args` begins with the optimizer. A closure computes the gradients within the step.
    if any(each is not None for each in (*args[1:], *kwargs.values())):
        make_private(each for each in every if each.requires_grad)
    else:
        make_private(each for each in every if each.grad is not None)


def _tables(
    pipeline: Any,
    _path: Any,
    token: Any = None,
    tokenizer: Any = None,
    text_encoder: Any = None,
    **_: Any,
) -> Iterator[nn.Parameter]:
    encoders = [text_encoder, *getattr(pipeline, "components", {}).values()]
    for encoder in encoders:
        ask = getattr(encoder, "get_input_embeddings", None)
        if isinstance(encoder, nn.Module) and ask is not None:
            yield from ask().parameters()


def _guard_adapters(module: ModuleType) -> None:
    """Guard all classes of peft that stand for a layer, those defined by now and those to come."""
    base: Any = module.BaseTunerLayer
    for each in _family(base):
        _guard_adapter(each)
    inherited = base.__init_subclass__

    def __init_subclass__(cls: type, /, **options: Any) -> None:
        inherited(**options)
        _guard_adapter(cls)

    base.__init_subclass__ = classmethod(__init_subclass__)


def _family(base: type[Any]) -> Iterator[type[Any]]:
    yield base
    for each in base.__subclasses__():
        yield from _family(each)


def _guard_adapter(kind: type) -> None:
    for name, method in list(vars(kind).items()):
        writes = name in _WRITING or name.endswith(_BEGINNING)
        if writes and inspect.isfunction(method) and not hasattr(method, "_tensor_dedup"):
            setattr(kind, name, _guarded(method, _behind))


def _behind(layer: Any, *_args: Any, **_: Any) -> Iterable[torch.Tensor]:
    parameters: Iterable[torch.Tensor] = layer.get_base_layer().parameters()
    return parameters
