"""Plain-text tables of load reports, and sizes as text."""

from collections import Counter
from collections.abc import Mapping
from io import StringIO
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Among the names of what could not be shared: the reason is why other processes do not get it all.
BETWEEN_PROCESSES: Final = "<memory manager>"
# The reason is why a tensor was copied whole although a part of it was there.
BY_LEAF: Final = "<leaves>"
_SIZES: Final = (
    ("total", "total_bytes"),
    ("shared", "shared_bytes"),
    ("private", "private_bytes"),
    ("by leaf", "leaf_shared_bytes"),
    ("read", "bytes_read"),
    ("hashed", "bytes_hashed"),
    ("materialised", "bytes_materialised"),
)
_PAIRS: Final = (
    ("tensors", "tensors_shared", "tensors_total"),
    ("source tensors", "source_tensors_shared", "source_tensors_total"),
)
_NAME_WIDTH: Final = 40
_WIDTH: Final = 240
_REASONS_SHOWN: Final = 10
_READS_SHOWN: Final = 3


def human(nbytes: int) -> str:
    """Return a size in bytes as text, in units of 1024: `512 B`, `1.5 KiB`, `3.0 GiB`."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1023.95:  # what would be printed as 1024.0
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} GiB"


def render(report: Mapping[str, Any]) -> str:
    """Return a load report as a plain-text table with totals.

    `report` is what `Report.to_dict()` returns. If it has no models, the text says so instead.
    """
    models: list[Mapping[str, Any]] = report["models"]
    devices = [f"{name}: {reason}" for name, reason in report.get("devices", {}).items()]
    if not models:
        return "\n".join(["tensor-dedup: no model was loaded yet", *devices])
    # This box is also a Markdown table, so that it can go into an issue as it is.
    table = Table(box=box.MARKDOWN)
    table.add_column("model", max_width=_NAME_WIDTH, overflow="fold")
    for heading in ("known", *(h for h, _ in _SIZES), *(h for h, _, _ in _PAIRS), "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for model in models:
        table.add_row(Text(str(model["name"])), "yes" if model["known"] else "no", *_cells([model]))
    table.add_row("all", "", *_cells(models))
    out = StringIO()
    Console(file=out, width=_WIDTH, color_system=None).print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
    frozen = [line for model in models for line in _substituted(model)]
    reads = [line for model in models for line in _known_reads(model)]
    return "\n".join([*lines, "", _saved(report), *frozen, *_reasons(models), *reads, *devices])


def _known_reads(model: Mapping[str, Any]) -> list[str]:
    """Say in one line what was read of a model that is known."""
    groups: list[Mapping[str, Any]] = model.get("known_reads", [])
    if not groups:
        return []
    few = [
        f"{each['tensors']} x {each['reason']} ({human(each['bytes'])}, {each['largest'][0][0]})"
        for each in groups[:_READS_SHOWN]
    ]
    more = [f"{len(groups) - len(few)} more"] if len(groups) > len(few) else []
    return [f"read although known: {model['name']}: {'; '.join([*few, *more])}"]


def _substituted(model: Mapping[str, Any]) -> list[str]:
    """Say that a model computes something else than its checkpoint."""
    found = model.get("frozen_base")
    if found is None:
        return []
    return [
        f"substituted: {model['name']} has layers {found['layers']} of {found['base']} "
        f"({found['tensors']} tensors, {human(found['bytes'])})"
    ]


def _cells(models: list[Mapping[str, Any]]) -> list[str]:
    def total(key: str) -> int:
        return sum(model.get(key, 0) for model in models)

    seconds = sum(sum(model["seconds"].values()) for model in models)
    return [
        *(human(total(key)) for _, key in _SIZES),
        *(f"{total(part)}/{total(whole)}" for _, part, whole in _PAIRS),
        f"{seconds:.2f}",
    ]


def _saved(report: Mapping[str, Any]) -> str:
    total = sum(model["total_bytes"] for model in report["models"])
    saved = sum(m["shared_bytes"] + m.get("leaf_shared_bytes", 0) for m in report["models"])
    share = 100 * saved / total if total else 0.0
    return (
        f"saved {human(saved)} of {human(total)} ({share:.1f} %); "
        f"residents {human(report['resident_bytes'])}, registry {human(report['registry_bytes'])}"
    )


def _reasons(models: list[Mapping[str, Any]]) -> list[str]:
    said = [(str(name), str(reason)) for model in models for name, reason in model["skipped"]]
    between = dict.fromkeys(reason for name, reason in said if name == BETWEEN_PROCESSES)
    reasons = Counter(reason for name, reason in said if name != BETWEEN_PROCESSES)
    lines = [f"not shared: {n} x {reason}" for reason, n in reasons.most_common(_REASONS_SHOWN)]
    if hidden := len(reasons) - len(lines):
        lines.append(f"not shared: {hidden} more {'reason' if hidden == 1 else 'reasons'}")
    few = list(between)[-_REASONS_SHOWN:]
    return [*lines, *(f"not all is shared with other processes: {reason}" for reason in few)]
