"""`store://NAME` where vLLM takes a model: made a folder before vLLM looks at it.

Nothing here imports vllm.
"""

import functools
import os
from collections.abc import Callable, Mapping, MutableMapping
from inspect import BoundArguments
from typing import Any

from tensor_dedup.errors import ConfigError
from tensor_dedup.loader.checkpoint_io.stub_folder import SCHEME, check_out
from tensor_dedup.patches.vllm.load_formats import KEY, split
from tensor_dedup.store.store import Store

_Engine = Callable[..., Any]


def is_url(model: object) -> bool:
    """Whether a model argument names a stored checkpoint."""
    return isinstance(model, str) and model.startswith(SCHEME)


def resolve(arguments: MutableMapping[str, Any]) -> None:
    """Replace `store://NAME` among engine arguments by a folder, and say where its tensors are.

    The arguments are already those of a load of ours.

    Raises:
        StoreError: There is no such checkpoint.
        UnsupportedError: It is nothing an engine can load.
    """
    url = arguments["model"]
    extra: Mapping[str, Any] = arguments["model_loader_extra_config"]
    config, _ = split(extra[KEY])
    # The name says that a store is meant: without another it is the user's own.
    entry = {**extra[KEY], "store": True if config.store is None else config.store}
    checkout = check_out(Store.open(config.store_folder, create=False), url)
    entry["stored"] = checkout.to_dict()
    arguments["model_loader_extra_config"] = {**extra, KEY: entry}
    arguments["model"] = checkout.folder
    if arguments.get("tokenizer") == url:
        arguments["tokenizer"] = checkout.folder
    if not arguments.get("served_model_name"):
        arguments["served_model_name"] = url


def make_unresolved(original: Callable[..., None], engine_args: Any, given: BoundArguments) -> None:
    """Make engine arguments that nobody may build an engine of (`refuse_unresolved`).

    vLLM makes such to see which arguments are not the defaults, from the model's name alone; with
    HF_HUB_OFFLINE it would look that name up.
    """
    url = given.arguments["model"]
    given.arguments["model"] = os.curdir
    original(*given.args, **given.kwargs)
    engine_args.model = url


def refuse_unresolved(original: _Engine) -> _Engine:
    """Wrap EngineArgs.create_engine_config: a stored checkpoint is loaded by this package only."""

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
