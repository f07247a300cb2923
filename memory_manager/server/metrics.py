"""The totals for Prometheus, on the loopback address only. They contain sizes and counts only."""

from collections.abc import Iterator
from types import TracebackType
from typing import Final, Protocol, Self

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tensor_dedup.memory_manager.protocol.tables import Totals

ADDRESS: Final = "127.0.0.1"
_PREFIX: Final = "tensor_dedup_"
_GAUGES: Final = {
    "budget": ("budget_bytes", "Bytes of slabs that may be charged."),
    "charged": ("charged_bytes", "Bytes of slabs that are charged."),
    "resident_bytes": ("resident_bytes", "Bytes of tensors in memory, each once."),
    "leased_bytes": ("leased_bytes", "Bytes of tensors that some client uses."),
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


class MetricsSource(Protocol):
    """A source of totals."""

    @property
    def totals(self) -> Totals:
        """Return a recent copy of the totals. Safe from any thread."""


class TotalsCollector(Collector):
    """A collector with one metric family for each number of `Totals`."""

    def __init__(self, source: MetricsSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one copy of the totals."""
        totals = self._source.totals
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(_PREFIX + name, text, value=getattr(totals, field))
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(_PREFIX + name, text, value=getattr(totals, field))


class Metrics:
    """An HTTP server that runs while the context is open; without a port it does nothing."""

    def __init__(self, source: MetricsSource, port: int | None) -> None:
        """Start serving. Raises OSError if the port is taken."""
        self._stop = None
        self.where = ""
        if port is not None:
            registry = CollectorRegistry()
            registry.register(TotalsCollector(source))
            server, thread = start_http_server(port, addr=ADDRESS, registry=registry)
            self._stop = (server, thread)
            self.where = f" metrics=http://{ADDRESS}:{server.server_port}/metrics"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stop is not None:
            server, thread = self._stop
            server.shutdown()
            server.server_close()
            thread.join()
