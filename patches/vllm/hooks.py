"""Patch modules of vLLM as soon as they are imported, in any order."""

import importlib
import sys
import threading
from dataclasses import dataclass
from types import ModuleType

import wrapt


@dataclass(frozen=True, slots=True)
class _Hook:
    """A patch of a module, applied once the name `ready`, the last one needed, is defined in it.

    `patch` is the "module:function" of this package that is called with the module. It is imported
    together with its target, because this module is imported by `import tensor_dedup` and must stay
    light.
    """

    module: str
    ready: str
    patch: str

    def apply(self, module: ModuleType) -> None:
        name, _, function = self.patch.partition(":")
        getattr(importlib.import_module(name), function)(module)


_HOOKS = (
    _Hook(
        "vllm.entrypoints.openai.models.serving",
        "OpenAIServingModels",
        "tensor_dedup.patches.vllm.model_cards:patch",
    ),
    _Hook(
        "vllm.entrypoints.rl.offline",
        "RLOfflineMixin",
        "tensor_dedup.patches.vllm.step_updates:patch_offline",
    ),
    _Hook(
        "vllm.v1.engine.async_llm",
        "AsyncLLM",
        "tensor_dedup.patches.vllm.step_updates:patch_async",
    ),
    _Hook(
        "vllm.v1.engine.async_llm",
        "AsyncLLM",
        "tensor_dedup.patches.vllm.model_cards:patch_client",
    ),
    _Hook("vllm.engine.arg_utils", "AsyncEngineArgs", "tensor_dedup.patches.vllm.arguments:patch"),
    _Hook(
        "vllm.config.load", "LoadConfig", "tensor_dedup.patches.vllm.arguments:patch_load_config"
    ),
    _Hook("vllm.v1.engine.core", "EngineCore", "tensor_dedup.patches.vllm.weight_versions:patch"),
)
_lock = threading.Lock()
_installed: set[_Hook] = set()


def install() -> None:
    """Patch vLLM's modules: arguments, load configuration, engine core, server, weight updates.

    A module that is not imported yet is patched when it is imported. Calling this function again
    has no effect. It is safe from any thread, and imports neither vllm nor torch.
    """
    for hook in _HOOKS:
        with _lock:
            if hook in _installed:
                continue
            _installed.add(hook)
        _install(hook)


def _install(hook: _Hook) -> None:
    module = sys.modules.get(hook.module)
    if module is None:
        wrapt.register_post_import_hook(hook.apply, hook.module)
    elif hook.ready in vars(module):
        hook.apply(module)
    else:
        _apply_when_complete(module, hook)


def _apply_when_complete(module: ModuleType, hook: _Hook) -> None:
    """Apply a hook to a module that is being imported, before anybody gets a name from it.

    With `from vllm import EngineArgs` first, arg_utils imports the platforms, which call this
    package in the middle of that import, too late for an import hook. But nobody can use a class of
    the module without asking the module for it, and a module's class may be replaced to intercept
    that.
    """
    plain = type(module)

    class Incomplete(plain):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> object:
            if hook.ready in plain.__getattribute__(self, "__dict__"):
                self.__class__ = plain  # type: ignore[assignment]
                hook.apply(self)
            return plain.__getattribute__(self, name)

    module.__class__ = Incomplete
