"""Models that vLLM loads without this package, and whose tensors are shared afterwards.

This is done for formats with a loader of their own, and for weights that are quantised while they
are read. It saves memory but no reading, and during the load it needs memory for the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tensor_dedup.loader.deferred.computed_tensors import share_by_content, slabs
from tensor_dedup.loader.deferred.parameters import replace_data
from tensor_dedup.loader.deferred.trace import UntraceableError
from tensor_dedup.loader.not_shared import NotShared
from tensor_dedup.loader.residents.resident import sharable
from tensor_dedup.loader.residents.slab import SharedMemoryError
from tensor_dedup.patches.vllm.kernels import kept_by_others
from tensor_dedup.patches.vllm.load_formats import OTHER_LOADERS

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import ModelConfig

    from tensor_dedup.loader.deferred.session import LoadSession


class QuantisedWhileLoadedError(UntraceableError):
    """The weights are quantised while they are read, so their final form cannot be predicted.

    The model must be loaded without sharing first. Its tensors are shared afterwards.
    """


def other_format(inner: str, model_config: ModelConfig) -> str | None:
    """Return "gguf" or "bitsandbytes" if the model needs vLLM's loader for that format, or None.

    `inner` is the load format that was asked for. If `inner` is "auto", the model's quantisation
    decides.
    """
    if inner in OTHER_LOADERS:
        return inner
    quantised = str(model_config.quantization)
    return quantised if inner == "auto" and quantised in OTHER_LOADERS else None


def weights_of(model_config: ModelConfig) -> str:
    """Return the path of a model's weights.

    This is `model_config.model`. For a GGUF model it is `model_config.model_weights`, if that is
    set.
    """
    weights = getattr(model_config, "model_weights", "")
    return str(weights if weights and model_config.quantization == "gguf" else model_config.model)


def eplb_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the expert weights that vLLM moves between ranks to balance load (`enable_eplb`)."""
    for module in model.modules():
        config: Any = getattr(module, "moe_config", None)
        parallel = getattr(config, "moe_parallel_config", None)
        # What runs experts has their configuration too, and parts that stay where they are. A
        # method may be a module, or not.
        own = "quant_method" in module._modules or "quant_method" in vars(module)
        if own and getattr(parallel, "enable_eplb", False):
            yield from module.parameters()


def share_loaded(model: nn.Module, session: LoadSession, total: int) -> None:
    """Replace the parameters of a loaded model by shared tensors with equal bytes.

    A parameter without an equal shared tensor becomes a new shared tensor. A parameter that cannot
    be shared stays private, for example if a kernel's handler uses its memory. Load the model
    inside `with scales_kept():`, because otherwise such a use goes unnoticed.

    `total` is the size of the model in bytes, packed weights included. What is not in parameters is
    reported as private.
    """
    overwritten = {id(parameter) for parameter in eplb_parameters(model)}
    seen: set[int] = set()
    for path, module in model.named_modules():
        finals = []
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            label = f"{path}.{name}" if path else name
            reason = _reason(parameter, session.config.min_tensor_bytes)
            if id(parameter) in overwritten:
                reason = NotShared.EPLB
            if reason is None and parameter.numel():
                finals.append((label, parameter))
            else:
                _enter_private(session, label, parameter, reason)
        for group in slabs([parameter.nbytes for _, parameter in finals]):
            _share(session, [finals[number] for number in group])
    rest = total - sum(final.nbytes for final in session.ledger.finals.values())
    if rest > 0:
        session.ledger.add("<packed>", rest, shared=False)


def _share(session: LoadSession, finals: list[tuple[str, nn.Parameter]]) -> None:
    found = share_by_content(session, [(label, each.detach()) for label, each in finals])
    for (label, parameter), (resident, made) in zip(finals, found, strict=True):
        if resident is None:
            _enter_private(session, label, parameter, None)
            continue
        nbytes = parameter.nbytes
        try:
            replace_data(parameter, session.provider.map(resident))
        except (UntraceableError, SharedMemoryError) as error:
            _enter_private(session, label, parameter, str(error))
        else:
            session.memory.enter(label, nbytes, resident, made=made)


def _reason(parameter: nn.Parameter, least: int) -> str | None:
    if parameter.nbytes < least:
        return f"its {parameter.nbytes} bytes are below min_tensor_bytes"
    if not sharable(parameter.detach()):
        return NotShared.UNSHARABLE_LAYOUT
    if kept_by_others(parameter):
        return NotShared.KEPT_ELSEWHERE
    return None


def _enter_private(
    session: LoadSession, label: str, parameter: nn.Parameter, reason: str | None
) -> None:
    session.ledger.add(label, parameter.nbytes, shared=False)
    if reason is not None:
        session.ledger.skip(label, reason)
