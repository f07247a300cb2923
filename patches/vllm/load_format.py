"""The load format's name, and how its config travels in `model_loader_extra_config`."""

from collections.abc import Mapping

from tensor_dedup.config import TensorDedupConfig

LOAD_FORMAT = "tensor_dedup"
KEY = "tensor_dedup"  # of model_loader_extra_config


def split(mine: object) -> tuple[TensorDedupConfig, str]:
    """Take our entry of model_loader_extra_config apart: the config and the inner load format.

    Whatever may be written as a config may be written there, None included. Raises ConfigError.
    What else may stand there, under `stored`, is for `loader.checkout.stored_in`.
    """
    if not isinstance(mine, Mapping):
        return TensorDedupConfig.from_any(mine), "auto"
    fields = {name: mine[name] for name in mine if name not in ("inner", "stored")}
    return TensorDedupConfig.from_any(fields), str(mine.get("inner", "auto"))
