"""Which parameters may be shared at all, whatever they hold."""

from __future__ import annotations

from typing import Final, TypeAlias

from torch import nn

NamedParameter: TypeAlias = tuple[str, nn.Parameter]
# Classes of parameters that are nothing but their bytes and plain attributes.
_CLASSES: Final = frozenset(
    {"torch.nn.parameter.Parameter", "diffusers.quantizers.gguf.utils.GGUFParameter"}
)


def reason_of_class(parameter: nn.Parameter) -> str | None:
    """Why parameters of this one's class are left alone, or None."""
    kind = type(parameter)
    if f"{kind.__module__}.{kind.__qualname__}" in _CLASSES:
        return None
    return f"a parameter of class {kind.__name__} is left alone"
