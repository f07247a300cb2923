"""An HTTP server for operators: metrics for Prometheus, and health checks.

Any user of the machine can query it. The metrics have sizes and counts but no names. With the
dashboard, which is off by default, names of checkpoints and clients are shown, too.
"""

import asyncio
import json
import logging
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import version
from ipaddress import ip_address
from typing import Any, Final, Protocol, Self

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tensor_dedup.memory_manager.protocol.codec import VERSION
from tensor_dedup.memory_manager.protocol.tables import Totals
from tensor_dedup.memory_manager.server.dashboard import HEADERS, PAGE
from tensor_dedup.memory_manager.server.worker_threads import start_threads

_log = logging.getLogger(__name__)
MAX_DESCRIPTORS: Final = 80
"""The most descriptors that the server uses: for open connections and for those queued."""
_MAX_CONNECTIONS: Final = 32
_MAX_REQUEST: Final = 8 << 10
_PATIENCE_S: Final = 5.0
_END_S: Final = 1.0
_STALLED_S: Final = 30.0  # the event loop goes round once a second when nothing happens
LOOPBACK: Final = "127.0.0.1"
_HOST: Final = "host"  # the label of a manager of the machine's memory
_TEXT: Final = "text/plain; charset=utf-8"
_PREFIX: Final = "tensor_dedup_"
_GAUGES: Final = {
    "budget": ("budget_bytes", "Bytes that may be charged."),
    "charged": (
        "charged_bytes",
        "Bytes of slabs, and of what the manager remembers.",
    ),
    "resident_bytes": ("resident_bytes", "Bytes of tensors in memory, each once."),
    "leased_bytes": ("leased_bytes", "Bytes of tensors that some client uses, each whole."),
    "leaf_shared_bytes": (
        "leaf_shared_bytes",
        "Bytes that clients use as parts of tensors that differ from them in others.",
    ),
    "pinned_bytes": ("pinned_bytes", "Bytes of tensors that are pinned."),
    "lingering_bytes": ("lingering_bytes", "Bytes of slabs that a cut-off process may still map."),
    "residents": ("residents", "Tensors in memory."),
    "records": ("layer_records", "Layers that can be looked up."),
    "slabs": ("slabs", "Slabs in memory."),
    "leases": ("leases", "Leases of all clients."),
    "clients": ("clients", "Connected clients."),
    "builds": ("builds", "Puts under way."),
    "waiting": ("waiting_clients", "Clients that wait for another one's layer."),
    "uptime_s": ("uptime_seconds", "Seconds since the manager started."),
}
_COUNTERS: Final = {
    "hits": ("layer_hits", "Layers that were looked up and found."),
    "misses": ("layer_misses", "Layers that were looked up and not found."),
    "published": ("layers_published", "Layer records that were entered."),
    "evicted_bytes": ("evicted_bytes", "Bytes of slabs that were evicted."),
    "takeovers": ("takeovers", "Puts that were taken over from a silent builder."),
    "refusals": ("refusals", "Requests and connections that were refused."),
}


# An answer takes some 0.1 ms; what takes longer waits for work of other clients.
_ATTACH_BUCKETS: Final = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.5, 2.5)


def attach_seconds(device: str) -> tuple[Histogram, Histogram]:
    """Make a histogram of the seconds that look-ups of layers or tensors take.

    Return the histogram, and its child with the label `device`. The caller records each look-up in
    the child.
    """
    text = "Seconds from a look-up of layers or tensors until its answer is on its way."
    name = _PREFIX + "attach_seconds"
    family = Histogram(name, text, ["device"], registry=None, buckets=_ATTACH_BUCKETS)
    return family, family.labels(device or _HOST)


# Of so many checkpoints, the largest: each is a series of its own in Prometheus.
_CHECKPOINTS: Final = 100
_OF_CHECKPOINTS: Final = {
    "nbytes": ("checkpoint_resident_bytes", "Bytes of its tensors in memory."),
    "leased_bytes": ("checkpoint_leased_bytes", "Bytes of its tensors that some client uses."),
}


class MetricsSource(Protocol):
    """The numbers that the HTTP server reports. Safe from any thread."""

    attach_seconds: Histogram
    """The duration of look-ups, labelled by device. Safe from any thread."""

    @property
    def totals(self) -> Totals:
        """A recent copy of the manager's totals."""

    @property
    def bookkeeping(self) -> int:
        """The part of `totals.charged` that is for the manager's own records, in bytes."""

    @property
    def saved_bytes(self) -> int:
        """A lower bound of the bytes of memory that sharing saves."""

    @property
    def overview(self) -> dict[str, Any]:
        """The tables that the dashboard shows, as a dict that can be encoded as JSON."""

    @property
    def device(self) -> str:
        """The UUID of the GPU whose memory is lent, or "" for host memory."""

    @property
    def silence_s(self) -> float | None:
        """The seconds since the event loop last made progress, or None while it is not running."""


class TotalsCollector(Collector):
    """A Prometheus collector with a metric for each number of `Totals`, labelled by device.

    With the dashboard, it also has metrics of the largest checkpoints.
    """

    def __init__(self, source: MetricsSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, taken from one copy of the totals."""
        source = self._source
        totals, device = source.totals, source.device or _HOST
        for field, (name, text) in _GAUGES.items():
            yield _gauge(name, text, device, getattr(totals, field))
        for field, (name, text) in _COUNTERS.items():
            counter = CounterMetricFamily(_PREFIX + name, text, labels=["device"])
            counter.add_metric([device], getattr(totals, field))
            yield counter
        # Not in Totals, whose fields clients of other builds know.
        text = "Bytes that are charged for what the manager remembers of tensors and clients."
        yield _gauge("bookkeeping_bytes", text, device, source.bookkeeping)
        text = "Bytes that clients would use beyond those that are there if nothing were shared."
        yield _gauge("saved_bytes", text, device, source.saved_bytes)
        yield from source.attach_seconds.collect()
        rows = source.overview.get("checkpoints", [])
        largest = sorted(rows, key=lambda row: (-row["nbytes"], row["name"]))[:_CHECKPOINTS]
        for field, (name, text) in _OF_CHECKPOINTS.items():
            text = f"Of a checkpoint, with `--dashboard` only: {text}"
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=["device", "checkpoint"])
            for row in largest:
                gauge.add_metric([device, row["name"]], row[field])
            yield gauge
        build = InfoMetricFamily(_PREFIX + "build", "What runs.", labels=["device"])
        build.add_metric([device], {"version": version("tensor-dedup"), "protocol": str(VERSION)})
        yield build


def _gauge(name: str, text: str, device: str, value: float) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(_PREFIX + name, text, labels=["device"])
    gauge.add_metric([device], value)
    return gauge


class Metrics:
    """A context manager that runs the HTTP server. Without a port it does nothing.

    One thread serves all connections. There is no authentication, so any client that reaches the
    address can connect. If there are too many connections, a new one replaces the oldest.
    """

    def __init__(
        self,
        source: MetricsSource,
        port: int | None,
        address: str = LOOPBACK,
        *,
        dashboard: bool = False,
    ) -> None:
        """Start the server at `port`, or at any free port if `port` is 0.

        With `dashboard=True` the server also has the dashboard's page.

        Raises:
            NoMemoryError: The system cannot start a thread.
            OSError: The port is in use, or the address is not one of this machine.
        """
        self._source = source
        self._dashboard = dashboard
        self._local = _is_loopback(address)
        self.where = ""
        self._end: Callable[[], object] | None = None
        if port is None:
            return
        self._registry = CollectorRegistry()
        self._registry.register(TotalsCollector(source))
        self._loop = asyncio.new_event_loop()
        self._open: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        with ExitStack() as undo:
            undo.callback(self._loop.close)
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server(
                (address, port), family=family, backlog=_MAX_CONNECTIONS
            )
            undo.callback(listener.close)
            self._server = self._loop.run_until_complete(self._listen(listener))
            [self._thread] = start_threads("tensor-dedup-metrics", 1, self._run)
            undo.pop_all()
        self._end = lambda: self._loop.call_soon_threadsafe(self._loop.stop)
        host = f"[{address}]" if ":" in address else address
        self.where = f" metrics=http://{host}:{listener.getsockname()[1]}/metrics"
        if dashboard:
            self.where += f" dashboard=http://{host}:{listener.getsockname()[1]}/"

    async def _listen(self, listener: socket.socket) -> asyncio.Server:
        return await asyncio.start_server(
            self._answer, sock=listener, limit=_MAX_REQUEST, backlog=_MAX_CONNECTIONS
        )

    def _run(self) -> None:
        self._loop.set_exception_handler(_warn)
        self._loop.run_forever()
        for writer in self._open:
            writer.transport.abort()
        self._server.close()
        tasks = asyncio.all_tasks(self._loop)
        self._loop.run_until_complete(asyncio.wait(tasks, timeout=_END_S) if tasks else _pause())
        self._loop.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        if len(self._open) > _MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._reply(request))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, asyncio.LimitOverrunError):
            # It has gone, is silent (TimeoutError is an OSError), or sends what is no request.
            writer.transport.abort()
        finally:
            self._open.pop(writer, None)

    def _reply(self, request: bytes) -> bytes:
        verb, _, rest = request.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if verb != b"GET":
            return _response("405 Method Not Allowed", "only GET is answered here")
        page = self._dashboard and path in (b"/", b"/overview.json")
        if (page or path == b"/metrics") and not self._is_asked_of_us(request):
            return _response("403 Forbidden", "ask for it as localhost")
        if path == b"/metrics":
            body = generate_latest(self._registry).decode()
            return _response("200 OK", body, CONTENT_TYPE_LATEST)
        if page:
            return self._page(path)
        if path not in (b"/healthz", b"/readyz"):
            return _response("404 Not Found", "ask for /metrics, /healthz or /readyz")
        wrong = self._wrong(ready=path == b"/readyz")
        return _response("503 Service Unavailable" if wrong else "200 OK", wrong or "ok")

    def _is_asked_of_us(self, request: bytes) -> bool:
        """Return whether the request names this host, as those of a web page elsewhere do not.

        A page can have the name of its own server lead to 127.0.0.1 (DNS rebinding) and would read
        the answer; the Host header still has that name. At an address of the network any name may
        be this machine's, and any client there can read the answer anyway.
        """
        if not self._local:
            return True
        hosts = re.findall(rb"\r\nhost:[ \t]*(\[[^]]*\]|[^:\s]*)", request, re.IGNORECASE)
        return len(hosts) == 1 and _is_loopback(hosts[0].decode("latin-1").strip("[]"))

    def _page(self, path: bytes) -> bytes:
        if path == b"/":
            return _response("200 OK", PAGE, "text/html; charset=utf-8", HEADERS)
        return _response("200 OK", json.dumps(self._source.overview), "application/json", HEADERS)

    def _wrong(self, *, ready: bool) -> str:
        silence = self._source.silence_s
        if silence is None:
            return "clients cannot connect: the manager starts or ends" if ready else ""
        if silence > _STALLED_S:
            return f"the event loop has not gone round for {silence:.0f} s"
        return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._end is not None:
            self._end()
            self._thread.join()


def _is_loopback(host: str) -> bool:
    try:
        return host.lower() == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _response(status: str, body: str, kind: str = _TEXT, more: str = "") -> bytes:
    data = body.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n{more}\r\n"
    )
    return head.encode() + data


async def _pause() -> None:
    await asyncio.sleep(0)


def _warn(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # For want of descriptors asyncio stops to accept for a second, and calls this.
    _log.warning("metrics: %s", context.get("exception") or context.get("message"))
