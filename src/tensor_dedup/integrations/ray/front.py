"""The HTTP front of a fleet, which routes each request to an engine."""

import asyncio
import logging
from typing import Any, Final

import msgspec

from tensor_dedup.integrations.ray.cluster import engine_apps, import_ray
from tensor_dedup.integrations.ray.keeper import ensure_keeper
from tensor_dedup.suggestions import perhaps
from tensor_dedup.text_table import human

# A request is held as a whole here, and again by the engine. Images travel in it as base64.
MOST_BODY_BYTES: Final = 64 << 20
_REFRESH_S: Final = 2.0
_KINDS: Final = {
    404: "NotFoundError",
    413: "ContentTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
# They are about one connection, and the front has others.
_HOP_BY_HOP: Final = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade"})
_log = logging.getLogger(__name__)


class Front:
    """The HTTP front of a fleet, which passes each request to an engine of the requested model."""

    # Serve awaits it.
    async def __init__(  # type: ignore[misc]
        self, fleet: str, wanted: bytes | None = None
    ) -> None:
        """Serve the fleet `fleet`.

        If `wanted`, an encoded `FleetSpecification`, is given and new, it first becomes the
        specification of the fleet.
        """
        self._fleet = fleet
        self._running: dict[str, list[str]] = {}
        self._turn = 0
        if wanted is not None:
            await ensure_keeper(fleet).declare.remote(wanted)
        self._refreshing = asyncio.create_task(self._refresh())

    async def _refresh(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._look)
            except Exception:  # noqa: BLE001  # of Ray, while it recovers: what ran is tried
                _log.exception("Serve does not say what runs")
            await asyncio.sleep(_REFRESH_S)

    def _look(self) -> None:
        found: dict[str, list[str]] = {}
        for app, state in engine_apps(self._fleet).items():
            names = found.setdefault(app.model, [])
            if state.status == "RUNNING":
                names.append(app.name)
        self._running = {model: sorted(names) for model, names in found.items()}

    async def __call__(self, request: Any) -> Any:
        """Answer `request`, a Starlette request."""
        from starlette.responses import JSONResponse

        if request.url.path == "/v1/models" and request.method == "GET":
            models = [{"id": each, "object": "model"} for each in sorted(self._running)]
            return JSONResponse({"object": "list", "data": models})
        body = await body_of(request)
        if body is None:
            return _refusal(413, f"the request has more than {human(MOST_BODY_BYTES)}")
        return await self._answered(_model_of(body), request, body)

    async def _answered(self, model: str, request: Any, body: bytes) -> Any:
        """What an engine of the model answers, or why none does."""
        failed = import_ray("ray.exceptions").RayTaskError
        tried: set[str] = set()
        for look in (False, True):
            if look:  # what was known may be a moment old
                await asyncio.to_thread(self._look)
            self._turn += 1
            apps = self._running.get(model, [])
            for app in (*apps[self._turn % max(len(apps), 1) :], *apps):
                if app in tried:
                    continue
                tried.add(app)
                try:
                    return await self._forwarded(app, model, request, body)
                except failed as error:  # another engine would fail with this request, too
                    return _refusal(500, f"{model!r} failed: {error}")
                except Exception as error:  # noqa: BLE001  # of Ray: there may be another replica
                    _log.warning("%s does not answer: %s", app, str(error))
                    if len(tried) > 1:  # a request that ends engines must not end all of them
                        return _refusal(503, f"two engines of {model!r} were lost; ask again")
        if model in self._running:
            return _refusal(503, f"no engine of {model!r} runs just now; ask again in a moment")
        known = ", ".join(sorted(self._running)) or "none"
        near = perhaps(model, self._running)
        return _refusal(404, f"no model {model!r} in this fleet{near}; there are {known}")

    async def _forwarded(self, app: str, model: str, request: Any, body: bytes) -> Any:
        from starlette.responses import StreamingResponse

        handle = import_ray("ray.serve").get_app_handle(app).options(stream=True)
        headers = [pair for pair in request.headers.raw if pair[0].lower() not in _HOP_BY_HOP]
        parts = handle.http.remote(
            request.method, request.url.path, request.url.query.encode(), headers, body
        )
        # Serve keeps a request for a replica that was lost until there is another one.
        first = asyncio.ensure_future(anext(parts))
        while not (await asyncio.wait([first], timeout=_REFRESH_S))[0]:
            if app not in self._running.get(model, ()):
                first.cancel()
                raise LookupError(f"{app} was lost")
        status, answered = await first
        response = StreamingResponse(parts, status_code=status)
        response.raw_headers = [
            (name, value) for name, value in answered if name.lower() not in _HOP_BY_HOP
        ]
        return response


async def body_of(request: Any, limit: int = MOST_BODY_BYTES) -> bytes | None:
    """Return the body of a Starlette request, or None if it is longer than `limit` bytes.

    A longer body is read to its end and discarded, because a client does not read the answer before
    it has sent the whole request.
    """
    body, length = bytearray(), 0
    async for piece in request.stream():
        length += len(piece)
        if length > limit:
            body.clear()
        else:
            body += piece
    return bytes(body) if length <= limit else None


class _Wanted(msgspec.Struct):
    """What matters of a request; the rest is skipped, and takes no memory."""

    model: str = ""


def _model_of(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Wanted).model
    except (msgspec.MsgspecError, RecursionError):
        return ""


def _refusal(status: int, message: str) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(
        {"error": {"message": message, "type": _KINDS[status], "code": status}}, status_code=status
    )
