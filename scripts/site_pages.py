"""A hook of MkDocs: fills the parts of pages that are generated from the code.

A page says `<!-- generated: metrics -->` where a table is to stand; each name is a function below.
`<!-- chart: load -->` is a chart of `site_charts`, or curves of `site_curves`.
"""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from tensor_dedup import errors
from tensor_dedup.memory_manager.protocol.tables import Totals
from tensor_dedup.memory_manager.server.metrics import TotalsCollector, attach_seconds

sys.path.append(str(Path(__file__).parent))  # a hook is loaded by its path
import site_charts
import site_curves

_MARK: Final = re.compile(r"<!-- generated: ([a-z-]+) -->")
_CHART: Final = re.compile(r"<!-- chart: ([a-z-]+) -->")


class _Idle:
    """A manager that holds nothing: its metrics have names and meanings all the same."""

    totals = msgspec.convert({f.name: f.type() for f in msgspec.structs.fields(Totals)}, Totals)
    bookkeeping = saved_bytes = 0
    device = ""
    attach_seconds, _ = attach_seconds("")
    silence_s: float | None = None
    overview: ClassVar[dict[str, Any]] = {}


def metrics() -> str:
    """Return a table of the metrics of the memory manager."""
    suffix = {"counter": "_total"}  # which Prometheus' text format adds
    rows = (
        f"| `{each.name}{suffix.get(each.type, '')}` | {each.type} | {each.documentation} |"
        for each in TotalsCollector(_Idle()).collect()
    )
    return "\n".join(["| Metric | Type | Meaning |", "| --- | --- | --- |", *rows])


def errors_by_status() -> str:
    """Return a table of the errors that decide an exit status other than 1."""
    rows = (
        f"| {each.exit_status} | `{each.__name__}` | {_first_sentence(each)} |"
        for each in sorted(_subclasses(errors.TensorDedupError), key=_by_status)
    )
    return "\n".join(["| Status | Error | Meaning |", "| --- | --- | --- |", *rows])


def _by_status(error: type[errors.TensorDedupError]) -> tuple[int, str]:
    return error.exit_status, error.__name__


def _first_sentence(thing: type) -> str:
    text = " ".join((thing.__doc__ or "").split())
    return text.split(". ")[0].rstrip(".") + "."


def _subclasses(base: type[errors.TensorDedupError]) -> Iterator[type[errors.TensorDedupError]]:
    yield base
    for each in base.__subclasses__():
        if each.__module__ == errors.__name__:
            yield from _subclasses(each)


_PARTS: Final[dict[str, Callable[[], str]]] = {
    "errors": errors_by_status,
    "metrics": metrics,
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page's text with its generated parts filled in; an unknown name is a KeyError."""
    markdown = _CHART.sub(lambda mark: _drawn(mark[1]), markdown)
    return _MARK.sub(lambda mark: _PARTS[mark[1]](), markdown)


def _drawn(name: str) -> str:
    return site_curves.svg(name) if name in site_curves.CURVES else site_charts.svg(name)


def on_page_content(html: str, **_: Any) -> str:
    """Return the finished page without what mkdocs-click 0.9 writes for "no default"."""
    return html.replace("<code>Sentinel.UNSET</code>", "")
