"""Say which weights a server's models have: in vLLM's `/v1/models`, and in a metric.

Imports no vllm.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from tensor_dedup.patches.vllm.load_formats import KEY, LOAD_FORMAT, split
from tensor_dedup.patches.vllm.seams import usable
from tensor_dedup.patches.vllm.weight_versions import DIGESTS_CALL, OURS

if TYPE_CHECKING:
    from prometheus_client import Gauge

_log = logging.getLogger(__name__)
_CLASS: Final = "OpenAIServingModels"
_LIST: Final = "show_available_models"
_START: Final = "init_static_loras"
_CALL: Final = "collective_rpc"
_NAMES: Final = "_tensor_dedup_names"  # of an engine's client: of the models that it serves
_METRIC: Final = "tensor_dedup_model_info"


def patch(serving: ModuleType) -> None:
    """Wrap the methods of vLLM's server that list models, and that it calls at its start.

    The wrapper of the first adds to each listed model the base from which it takes layers
    (`frozen_base`), and the digest of its checkpoint, as far as it has them. The wrapper of the
    second sets the metric `tensor_dedup_model_info`. `serving` is the module
    vllm.entrypoints.openai.models.serving. A method that it lacks is left out. Idempotent.
    """
    found = getattr(serving, _CLASS, None)
    _wrap(found, _LIST, _listing)
    _wrap(found, _START, _starting)


def patch_client(client: ModuleType) -> None:
    """Wrap the call of vLLM's server to its workers, which may update weights, to set the metric.

    `client` is the module vllm.v1.engine.async_llm. Idempotent.
    """
    _wrap(getattr(client, "AsyncLLM", None), _CALL, _calling)


def _wrap(owner: Any, name: str, wrap: Callable[..., Any]) -> None:
    original = getattr(owner, name, None)
    if original is not None and original.__code__.co_filename != __file__:
        setattr(owner, name, functools.wraps(original)(wrap(original)))


def _listing(original: Callable[..., Any]) -> Callable[..., Any]:
    async def show_available_models(self: Any, *args: Any, **options: Any) -> Any:
        cards = await original(self, *args, **options)
        client = getattr(self, "engine_client", None)
        told = {**_substituted(client), **await _digests(client)}
        # The base models come first; adapters follow, which work on the same weights.
        for card in cards.data if told else ():
            card.tensor_dedup = told
        return cards

    return show_available_models


def _starting(original: Callable[..., Any]) -> Callable[..., Any]:
    async def init_static_loras(self: Any, *args: Any, **options: Any) -> Any:
        done = await original(self, *args, **options)
        client = getattr(self, "engine_client", None)
        if _has_ours(client):
            setattr(client, _NAMES, [path.name for path in self.base_model_paths])
            await _set_metric(client)
        return done

    return init_static_loras


def _calling(original: Callable[..., Any]) -> Callable[..., Any]:
    async def collective_rpc(self: Any, method: str, *args: Any, **options: Any) -> Any:
        done = await original(self, method, *args, **options)
        if hasattr(self, _NAMES) and not method.startswith(OURS):
            await _set_metric(self)
        return done

    return collective_rpc


def _substituted(client: Any) -> dict[str, Any]:
    """Return the base from which layers are taken, or {} where all are the checkpoint's own."""
    if not _has_ours(client):
        return {}
    loading = client.vllm_config.load_config
    config, _ = split((loading.model_loader_extra_config or {}).get(KEY))
    usable("cards")
    return {"frozen_base": config.to_dict()["frozen_base"]} if config.frozen_base else {}


def _has_ours(client: Any) -> bool:
    loading = getattr(getattr(client, "vllm_config", None), "load_config", None)
    return loading is not None and str(loading.load_format) == LOAD_FORMAT


async def _digests(client: Any) -> dict[str, str]:
    """Return the digests that the engine knows without hashing anything; {} if it does not say."""
    call = getattr(getattr(client, "engine_core", None), "call_utility_async", None)
    if call is None or not _has_ours(client):
        return {}
    try:
        found: dict[str, str] = await call(DIGESTS_CALL)
    except Exception as error:  # noqa: BLE001 (a list of models must not fail for it)
        _log.debug("the engine does not say which weights it has: %s", str(error))
        return {}
    return found


async def _set_metric(client: Any) -> None:
    digests = await _digests(client)
    _tell(getattr(client, _NAMES), digests.get("checkpoint_digest", ""))


_told: dict[str, str] = {}


def _tell(names: Sequence[str], digest: str) -> None:
    """Let the metric say 1 for the weights that models have, and 0 for those that they had."""
    for name in names:
        before = _told.get(name)
        if before not in (None, digest):
            _gauge().labels(name, before).set(0)
        _gauge().labels(name, digest).set(1)
        _told[name] = digest


@functools.cache
def _gauge() -> "Gauge":
    # Not before: vLLM decides first whether several processes have one set of metrics.
    from prometheus_client import Gauge

    return Gauge(
        _METRIC,
        "1 for the weights that a model has now, by the digest of its checkpoint.",
        ["model_name", "checkpoint_digest"],
        multiprocess_mode="mostrecent",
    )
