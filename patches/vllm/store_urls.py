"""Resolution of `store://NAME` as a model of vLLM, to a folder before vLLM looks at it.

Nothing here imports vllm.
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
    """Return whether a model argument names a stored checkpoint."""
    return isinstance(model, str) and model.startswith(STORE_SCHEME)


def resolve(arguments: MutableMapping[str, Any]) -> None:
    """Replace `store://NAME` in engine arguments by a folder, and add where its tensors are.

    The arguments are already those of a load of this package. What the store does not have is
    pulled from the remote first, if there is one.

    Raises:
        StoreError: There is no such checkpoint, here or there, or it is damaged.
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
    """Create engine arguments for a stored checkpoint from which no engine may be created.

    vLLM creates such arguments from the model's name alone, to see which differ from the defaults;
    with HF_HUB_OFFLINE it would look that name up. `refuse_unresolved` refuses engines of them.
    """
    url = given.arguments["model"]
    given.arguments["model"] = os.curdir
    original(*given.args, **given.kwargs)
    engine_args.model = url


def refuse_unresolved(original: _Engine) -> _Engine:
    """Wrap EngineArgs.create_engine_config, so that only this package loads stored checkpoints."""

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
