"""vLLM engines as replicas of Ray Serve.

An engine is a Serve deployment over vLLM's `AsyncLLM`, with vLLM's own web application inside.
Requests are passed on unchanged, so all routes of `vllm serve` are available. `ray.serve.llm` is
not used, because that module requires vLLM 0.29 in Ray 2.60.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tensor_dedup.errors import ConfigError
from tensor_dedup.integrations.ray.cluster import NAMESPACE, import_ray
from tensor_dedup.integrations.ray.node import actor_name
from tensor_dedup.suggestions import perhaps
from tensor_dedup.types import STORE_SCHEME

Headers = Sequence[tuple[bytes, bytes]]


class Engine:
    """A replica of a model: a Serve actor with vLLM's engine and vLLM's web application."""

    # Serve awaits it.
    async def __init__(  # type: ignore[misc]
        self, model: str, remote: str, options: dict[str, Any]
    ) -> None:
        """Make the node's actor pull the checkpoint `model` from `remote`, and load it in vLLM.

        The engine shares weights through the node's memory manager. `options` are vLLM's engine
        arguments.
        """
        ray = import_ray()
        node = actor_name(ray.get_runtime_context().get_node_id())
        actor = ray.get_actor(node, namespace=NAMESPACE)
        prepared = await actor.prepare.remote(remote, model)
        sharing = {"store": prepared.store, "memory_manager": prepared.socket}
        self._model = model
        await self._open({**options, "model": f"{STORE_SCHEME}{model}", "tensor_dedup": sharing})

    async def _open(self, options: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.async_llm import AsyncLLM

        parser: Any = FlexibleArgumentParser
        arguments = make_arg_parser(parser()).parse_args([])
        for name, value in {**options, "served_model_name": [self._model]}.items():
            if not hasattr(arguments, name):
                near = perhaps(name, vars(arguments)) or "; see `vllm serve --help`"
                raise ConfigError(f"vLLM has no engine argument {name!r}{near}", field=name)
            setattr(arguments, name, value)
        self._engine: Any = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(arguments))
        tasks = await self._engine.get_supported_tasks()
        self._app: Any = build_app(arguments, tasks, self._engine.model_config)
        await init_app_state(self._engine, self._app.state, arguments, tasks)

    async def check_health(self) -> None:
        """Raise an error if the engine is dead; Serve then starts another replica."""
        await self._engine.check_health()

    async def http(
        self, method: str, path: str, query: bytes, headers: Headers, body: bytes
    ) -> AsyncIterator[Any]:
        """Answer an HTTP request: yield `(status, headers)` first, and then chunks of the body."""
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        gone = asyncio.Event()
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if unread:
                return unread.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def answer() -> None:
            try:
                await self._app(scope, receive, messages.put)
            finally:
                await messages.put(None)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "root_path": "",
            "headers": [*headers],
        }
        task = asyncio.create_task(answer())
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], [*message.get("headers", ())]
                elif message.get("body"):
                    yield bytes(message["body"])
            await task  # what the application raised
        finally:
            gone.set()  # vLLM then stops computing
            task.cancel()

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.shutdown()
