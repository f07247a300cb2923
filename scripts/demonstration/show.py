"""The demonstration's tables."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from demonstration.run import Side, equal_tokens
from tensor_dedup.cli.tables import Dotted
from tensor_dedup.text_table import human

# Of each load; every heading says all of what stands below it.
BESIDE = ("memory,\nplain", "memory,\nshared", "seconds,\nplain", "seconds,\nshared")
_REPORTED = ("bytes_read", "bytes_hashed", "private_bytes", "shared_bytes")


def show(
    console: Console, names: Sequence[str], plain: Side, shared: Side, *, busy: bool = False
) -> None:
    """Print what each load did, what both sides cost, and whether they said the same."""
    console.print(_loads_table(names, shared))
    console.print("Known: were its files hashed before? Read: from files. Hashed: of that, and of")
    console.print("what was made from it. Allocated: new memory. Shared: there before this load.")
    console.print(_beside_table(names, plain, shared))
    console.print("Memory: what a load added (PSS) beside its KV cache, every page of it read.")
    console.print("The first model's row also has what engines need once.")
    console.print(_costs_table(plain, shared))
    console.print("PSS counts a page once, RSS once for each model of the process that maps it.")
    verdicts = equal_tokens(plain, shared)
    tokens = sum(len(answer) for side in plain.answers for answer in side["tokens"])
    if all(verdicts):
        different = len({str(answer["tokens"]) for answer in plain.answers})
        console.print(f"[bold green]All {tokens} tokens equal plain vLLM's.[/]")
        answers = "answer" if different == 1 else "answers"
        console.print(f"({len(names)} models, {different} different {answers}.)")
    else:
        wrong = [name for name, equal in zip(names, verdicts, strict=True) if not equal]
        console.print(f"[bold red]Tokens differ from plain vLLM's: {', '.join(wrong)}.[/]")
    if not plain.together:
        console.print(
            "Memory is short: plain vLLM loaded one model at a time, its total is their sum."
        )
    if busy:
        console.print("Other work ran on this machine meanwhile: the seconds are worth little.")


def _loads_table(names: Sequence[str], shared: Side) -> Table:
    table = new_table(
        "What each load did", "model", "known", "read", "hashed", "allocated", "shared"
    )
    reports = (shared.report or {}).get("models", [])
    for name, cells in zip(names, _reported(reports, len(names)), strict=True):
        table.add_row(Dotted(name), *cells)
    return table


def _beside_table(names: Sequence[str], plain: Side, shared: Side) -> Table:
    table = new_table("Beside plain vLLM", "model", *BESIDE, "tokens\nequal")
    added = zip(plain.kept(), shared.kept(), strict=True)
    seconds = zip(plain.loads, shared.loads, strict=True)
    verdicts = equal_tokens(plain, shared)
    for name, both, loads, equal in zip(names, added, seconds, verdicts, strict=True):
        table.add_row(
            Dotted(name),
            *(signed(size) for size in both),
            *(f"{load['seconds']:.1f}" for load in loads),
            "[green]yes[/]" if equal else "[bold red]no[/]",
        )
    return table


def new_table(title: str, first: str, *headings: str) -> Table:
    """A table with a column of names and several of numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _reported(models: Sequence[dict[str, Any]], count: int) -> list[list[str]]:
    if len(models) != count:  # sharing was switched off, or workers reported one by one
        return [["-"] * (len(_REPORTED) + 1)] * count
    return [
        ["yes" if model["known"] else "no", *(human(model[field]) for field in _REPORTED)]
        for model in models
    ]


def _costs_table(plain: Side, shared: Side) -> Table:
    table = new_table("All of it", "", "plain vLLM", "shared", "shared / plain")
    was, now = plain.total(), shared.total()
    rows = [
        ("memory (PSS)", was["pss"], now["pss"]),
        ("of it KV caches", plain.kv_cache, shared.kv_cache),
        ("resident (RSS)", was["rss"], now["rss"]),
        ("most ever resident", plain.peak_rss, shared.peak_rss),
    ]
    for label, before, after in rows:
        table.add_row(label, human(before), human(after), ratio(after, before))
    times = [
        ("loading, seconds", plain.load_seconds, shared.load_seconds),
        ("answering, seconds", plain.answer_seconds, shared.answer_seconds),
    ]
    for label, slow, quick in times:
        table.add_row(label, f"{slow:.1f}", f"{quick:.1f}", ratio(quick, slow))
    return table


def ratio(part: float, whole: float) -> str:
    """A quotient as text; a dash for one by nothing."""
    return f"{part / whole:.2f}" if whole else "-"


def signed(nbytes: int) -> str:
    """A size that may be less than nothing."""
    return f"-{human(-nbytes)}" if nbytes < 0 else human(nbytes)
