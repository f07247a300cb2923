"""`update_weights` of vLLM's engines, to another step of a training in one call.

vLLM's own protocol has three calls: start, update, finish. With the weight transfer backend
`tensor_dedup`, `update_weights` alone does all of it: the step is pulled from the remote by the
process of the caller, loaded beside the running model while requests are answered, and then
changed to. After `start_weight_update`, the three calls work as vLLM documents them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from tensor_dedup.errors import ConfigError
from tensor_dedup.patches.vllm.load_formats import KEY, follows_steps, split

if TYPE_CHECKING:
    from types import ModuleType

_log = logging.getLogger(__name__)

_PREPARE: Final = "tensor_dedup_prepare_update"
_PREPARED: Final = "tensor_dedup_update_is_prepared"
_ABANDON: Final = "tensor_dedup_abandon_update"
_POLL_S: Final = 0.02
_LOOKS_S: Final = 1.0
# On an engine: between start_weight_update and finish_weight_update of the caller's own.
_STARTED: Final = "_tensor_dedup_update_started"
# On an engine: the loader's configuration as it was before the first update.
_BEGUN: Final = "_tensor_dedup_begun_with"
# On an engine: the lock of updates.
_TURN: Final = "_tensor_dedup_update_turn"


def patch_worker(module: ModuleType) -> None:
    """Add the methods to vLLM's worker that prepare an update, and that end one that failed.

    `module` has the worker's class.
    """

    def prepare(self: Any, update_info: dict[str, Any]) -> None:
        self.weight_transfer_engine.prepare(update_info)

    def is_prepared(self: Any) -> bool:
        return bool(self.weight_transfer_engine.is_prepared())

    def abandon(self: Any) -> None:
        # If one of several workers has failed, vLLM takes the others to be within an update.
        self._weight_update_active = False
        self.weight_transfer_engine.abandon()

    setattr(module.Worker, _PREPARE, prepare)
    setattr(module.Worker, _PREPARED, is_prepared)
    setattr(module.Worker, _ABANDON, abandon)


def patch_offline(module: ModuleType) -> None:
    """Wrap `LLM.update_weights`. `module` is vllm.entrypoints.rl.offline. Idempotent."""
    engine: Any = module.RLOfflineMixin
    update = getattr(engine, "update_weights", None)
    if update is None or update.__code__.co_filename == __file__:
        return

    @functools.wraps(update)
    def update_weights(self: Any, request: Any = None) -> Any:
        vllm_config = self.llm_engine.vllm_config
        if not follows_steps(vllm_config):
            return update(self, request)
        info = {"update_info": _fetched(self, vllm_config, update_info_of(request))}
        # Nothing is answered while the caller is here, so nothing has to be prepared.
        whole = not getattr(self, _STARTED, False)
        try:
            if whole:
                self.llm_engine.collective_rpc("start_weight_update")
            self.llm_engine.collective_rpc("update_weights", kwargs=info)
            if whole:
                self.llm_engine.collective_rpc("finish_weight_update")
        except BaseException:
            setattr(self, _STARTED, False)
            with suppress(Exception):  # the engine may be gone
                self.llm_engine.collective_rpc(_ABANDON)
            raise
        return None

    engine.update_weights = update_weights
    _note_session(engine)


def patch_async(module: ModuleType) -> None:
    """Wrap `AsyncLLM.update_weights`. `module` is vllm.v1.engine.async_llm. Idempotent."""
    engine: Any = module.AsyncLLM
    update = getattr(engine, "update_weights", None)
    if update is None or update.__code__.co_filename == __file__:
        return

    @functools.wraps(update)
    async def update_weights(self: Any, request: Any = None) -> Any:
        if not follows_steps(self.vllm_config):
            return await update(self, request)
        async with vars(self).setdefault(_TURN, asyncio.Lock()):
            wanted = await asyncio.to_thread(
                _fetched, self, self.vllm_config, update_info_of(request)
            )
            await _change(self, {"update_info": wanted})
        return None

    engine.update_weights = update_weights
    _note_session(engine)


async def _change(engine: Any, info: dict[str, Any]) -> None:
    """Load a step beside the model that runs, and change to it. If that fails, nothing stays.

    After `start_weight_update`, the change is left to the caller, who also has paused the model if
    it has to be.
    """
    whole = not getattr(engine, _STARTED, False)
    try:
        if whole:
            await _call(engine, _PREPARE, info)
            while not await _all_prepared(engine):
                await asyncio.sleep(_POLL_S)
            began = time.perf_counter()
            await _call(engine, "start_weight_update")
        await _call(engine, "update_weights", info)
        if whole:
            await _call(engine, "finish_weight_update")
            took = time.perf_counter() - began
            _log.info("changed to %s in %.3f s", info["update_info"]["url"], took)
    except BaseException:
        setattr(engine, _STARTED, False)
        with suppress(Exception):  # the engine may be gone
            await _call(engine, _ABANDON)
        raise


async def _call(engine: Any, method: str, arguments: dict[str, Any] | None = None) -> Any:
    """Call a method of all workers.

    Raises:
        EngineDeadError: The engine is gone.
    """
    return await _answer(engine, engine.collective_rpc(method, kwargs=arguments))


async def _all_prepared(engine: Any) -> bool:
    """Return whether all workers, those of each replica, have loaded the step.

    Raises:
        EngineDeadError: The engine is gone.
    """
    # Of several replicas, `collective_rpc` asks all and returns the answers of the first.
    ask = getattr(engine.engine_core, "call_utility_all_async", None)
    if ask is None:
        return all(await _call(engine, _PREPARED))
    answers = await _answer(engine, ask("collective_rpc", _PREPARED, None, (), None))
    return all(all(each) for each in answers)


async def _answer(engine: Any, call: Coroutine[Any, Any, Any]) -> Any:
    """Wait for the answer to a call. vLLM itself waits for ever if an engine dies meanwhile."""
    called = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait({called}, timeout=_LOOKS_S))[0]:
            if engine.errored:
                raise engine.dead_error
        return called.result()
    finally:
        called.cancel()


def _note_session(engine: Any) -> None:
    """Note on each engine whether its caller has started an update, and not yet finished it."""
    for name, started in (("start_weight_update", True), ("finish_weight_update", False)):
        setattr(engine, name, _noting(getattr(engine, name), started=started))


def _noting(original: Callable[..., Any], *, started: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def noted(self: Any, *args: Any, **options: Any) -> Any:
        setattr(self, _STARTED, started)
        return original(self, *args, **options)

    return noted


def update_info_of(request: object) -> dict[str, Any]:
    """Return the `update_info` of a request to update weights; by default, of the latest step.

    A request is one of vLLM's, a dict with the item "update_info", or that item by itself.

    Raises:
        ConfigError: `request` is something else.
    """
    found = getattr(request, "update_info", request)
    if isinstance(found, Mapping) and set(found) == {"update_info"}:
        found = found["update_info"]
    if found is None:
        return {"step": "latest"}
    if not isinstance(found, Mapping):
        raise ConfigError(
            f'update_weights was given {found!r}; give {{"step": 12}}, {{"step": "latest"}} or '
            '{"url": "store://RUN@STEP"}',
            value=repr(found),
        )
    return dict(found)


def _fetched(engine: Any, vllm_config: Any, update_info: dict[str, Any]) -> dict[str, Any]:
    """Pull the step that is asked for, and return `update_info` with its URL alone.

    What "latest" means, and of which run, is found out here, once for all workers of the engine. A
    step without a URL is one of the run that the engine was started with.
    """
    from tensor_dedup.patches.vllm.weight_transfer import StepUpdateInfo, step_url
    from tensor_dedup.publishing.subscriber import fetch_step, is_of_step

    # In a worker's configuration, which may be this one, a change to another run is noted.
    extra: Mapping[str, Any] = vars(engine).setdefault(
        _BEGUN, vllm_config.load_config.model_loader_extra_config
    )
    try:
        if odd := update_info.keys() - {"step", "url"}:
            raise ValueError(f'it has no {min(odd)!r}; give either "step" or "url"')
        asked = StepUpdateInfo(**update_info)
    except ValueError as error:
        raise ConfigError(f"update_weights: {error}", value=repr(update_info)) from error
    url = asked.url if asked.url is not None else step_url(extra, asked.step)
    config, _ = split(extra[KEY])
    # Another checkpoint than a step is pulled by the first worker that needs it.
    is_step = asked.url is None or is_of_step(asked.url)
    return {"url": fetch_step(config, url) if is_step else url}
