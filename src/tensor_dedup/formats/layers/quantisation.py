"""Quantised weights: which tensors belong together, and how two models' settings differ.

The codes of a quantised weight have a meaning only together with its scales and zero points.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

# I64 and BOOL hold positions, counters and masks; I32 does, too, unless its name says otherwise.
_CODES: Final = frozenset({"I8", "U8", "F4"})
_KEYS: Final = ("quantization_config", "compression_config")
_CONFIG: Final = "config.json"
# Of AutoGPTQ and ModelOpt, whose settings may stand in a file of their own.
_OTHERS: Final = ("quantize_config.json", "hf_quant_config.json")
FILES: Final = (_CONFIG, *_OTHERS)


class CodedTensor(Protocol):
    """A tensor with its name, dtype and shape, which may hold quantised codes."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def is_quantised(tensor: CodedTensor) -> bool:
    """Return whether a tensor holds quantised weights, judged by its dtype, shape and name.

    A quantised tensor has two dimensions or more and is not a bias. Its dtype is I8, U8, F4, F6 or
    F8, or it is I32 and the tensor's own name contains "weight".
    """
    leaf = tensor.name.rpartition(".")[2]
    if len(tensor.shape) < 2 or _is_bias(tensor.name):  # old GPT-2 files call a mask `bias`
        return False
    coded = tensor.dtype in _CODES or tensor.dtype.startswith(("F8_", "F6_"))
    return coded or (tensor.dtype == "I32" and "weight" in leaf)


def module_of(name: str) -> str:
    """Return the module that holds the tensor `name`, with a trailing dot.

    The module of `lm_head.weight` is `lm_head.`, and that of a name without a dot is "".
    """
    return name[: name.rfind(".") + 1]


def decodes(name: str, module: str) -> bool:
    """Return whether the tensor `name` may be needed to decode the quantised weights of `module`.

    The result is True for every tensor in the module that is not a bias: weights, scales and zero
    points, for example. `module` is what `module_of` returns. If it is "", the result is False.
    """
    return bool(module) and name.startswith(module) and not _is_bias(name)


def _is_bias(name: str) -> bool:
    return name.endswith("bias")


def groups(tensors: Iterable[CodedTensor]) -> list[frozenset[str]]:
    """Return a set of names for each quantised module.

    A set names the weights of the module and the tensors that decode them.
    """
    held = list(tensors)
    modules = {module_of(tensor.name) for tensor in held if is_quantised(tensor)} - {""}
    found = defaultdict[str, set[str]](set)
    for name in (tensor.name for tensor in held):
        module = module_of(name)
        while module and module not in modules:
            module = module_of(module[:-1])
        if module and decodes(name, module):
            found[module].add(name)
    return [frozenset(names) for names in found.values()]


def settings_in(folder: Path) -> dict[str, Any] | None:
    """Return the quantisation settings in the configuration files of a model's folder.

    The result is {} if the weights are not quantised, and None if there is no configuration or it
    cannot be read.
    """
    texts = {}
    for name in FILES:
        try:
            texts[name] = (folder / name).read_bytes()
        except OSError:
            continue
    return settings(texts)


def settings(texts: Mapping[str, bytes]) -> dict[str, Any] | None:
    """Return the quantisation settings in configuration files that were already read.

    `texts` maps the names of the files, which are among `FILES`, to their contents. The result is
    {} if the weights are not quantised, and None if there is no configuration or it is malformed.
    """
    try:
        read = {name: json.loads(text) for name, text in texts.items()}
    except (ValueError, RecursionError):
        return None
    found: dict[str, Any] = {name: read[name] for name in _OTHERS if name in read}
    config = read.get(_CONFIG)
    if not isinstance(config, dict):
        return found or None
    parts = (part for part in (config, config.get("text_config")) if isinstance(part, dict))
    for said in (part.get(key) for part in parts for key in _KEYS):
        found |= said if isinstance(said, dict) else {}
    return found


def difference(base: Mapping[str, Any] | None, tune: Mapping[str, Any] | None) -> str:
    """Describe how the quantisation settings of two models differ; "" if equal or not known.

    `base` and `tune` are settings as `settings_in` returns them.
    """
    if base is None or tune is None:
        return ""
    keys = sorted(key for key in {*base, *tune} if base.get(key) != tune.get(key))
    return ", ".join(f"{k} {_shown(base.get(k))} and {_shown(tune.get(k))}" for k in keys[:2])


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
