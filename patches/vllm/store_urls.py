"""Replace the model `store://NAME` in vLLM's engine arguments by a folder that stands for it.

This module imports no vllm.
"""

import functools
import os
from collections.abc import Callable, Mapping, MutableMapping
from inspect import BoundArguments
from typing import Any

from tensor_dedup.errors import ConfigError
from tensor_dedup.loader.checkpoint_io import stub_folder
from tensor_dedup.patches.vllm.load_formats import KEY, split
from tensor_dedup.types import STORE_SCHEME

_Engine = Callable[..., Any]


def is_url(model: object) -> bool:
    """Return whether a `model` argument names a checkpoint in a store (`store://NAME`)."""
    return isinstance(model, str) and model.startswith(STORE_SCHEME)


def resolve(arguments: MutableMapping[str, Any]) -> None:
    """Replace the model `store://NAME` in `arguments` by a folder that stands for the checkpoint.

    `arguments` are engine arguments with the load format `tensor_dedup`. Their
    `model_loader_extra_config` gets an entry that says where the tensors are. If the store lacks
    the checkpoint and a remote is configured, the checkpoint is pulled first.

    Raises:
        StoreError: There is no such checkpoint in the store or remote, or it is damaged.
        RemoteError: The remote cannot be used.
        UnsupportedError: No engine can load the checkpoint.
    """
    url = arguments["model"]
    extra: Mapping[str, Any] = arguments["model_loader_extra_config"]
    config, _ = split(extra[KEY])
    # The name says that a store is meant: without another it is the user's own.
    entry = {**extra[KEY], "store": True if config.store is None else config.store}
    checkout = stub_folder.resolve(url, config.store_folder, config.remote)
    entry["stored"] = checkout.to_dict()
    arguments["model_loader_extra_config"] = {**extra, KEY: entry}
    arguments["model"] = checkout.folder
    if arguments.get("tokenizer") == url:
        arguments["tokenizer"] = checkout.folder
    if not arguments.get("served_model_name"):
        arguments["served_model_name"] = url


def make_unresolved(original: Callable[..., None], engine_args: Any, given: BoundArguments) -> None:
    """Initialise `engine_args` for a model `store://NAME` without looking the name up.

    `original` is vLLM's initialiser, and `given` has its arguments. vLLM can compare the result
    with other engine arguments, but cannot start an engine from it: `create_engine_config` raises
    ConfigError.
    """
    url = given.arguments["model"]
    given.arguments["model"] = os.curdir
    original(*given.args, **given.kwargs)
    engine_args.model = url


def refuse_unresolved(original: _Engine) -> _Engine:
    """Wrap EngineArgs.create_engine_config to raise ConfigError for a model `store://NAME`.

    If `tensor_dedup` is enabled in the engine arguments, the model was replaced by a folder before.
    So the error means that `tensor_dedup` is missing or disabled.
    """

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_url(self.model):
            raise ConfigError(
                f"model={self.model!r} is a checkpoint in a tensor-dedup store: add "
                'tensor_dedup={"store": True} (or a folder), on the command line '
                "--tensor-dedup '{\"store\": true}'",
                model=self.model,
            )
        return original(self, *args, **kwargs)

    return create_engine_config
