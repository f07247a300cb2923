"""What a push and a pull take: seconds beside plain copies by obstore, bytes and requests.

    python scripts/bench/remote.py [--only PART] [--pairs N | --quick] [--server SERVER] [--mb MB]
                                   [--work DIR] [--json FILE] [--write]

*speed*: a checkpoint of random bytes, 300 tensors, is pushed to SeaweedFS on the loopback address
and to a folder; and, in pairs with that, obstore sends the same containers, as many at once. It is
pulled into an empty store; and, in pairs with that, obstore copies the containers in ranges as
long, as many at once, into files that are synced. Where ours has less than 0.9 of the copy's
throughput, one more transfer shows what its threads spend their time with. *wire*: fine-tunes are
pushed and pulled through a proxy that counts, to a remote in memory that holds their base and other
checkpoints. Prints sections of Markdown; `--write` puts them into docs/benchmarks/tables.md.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
# Of the tests' helpers, those that start servers, and those that count.
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import tempfile
from collections.abc import Sequence
from typing import Final

import click

from bench import options
from bench.remote_speed import SERVERS, Speed, speeds
from bench.remote_wire import wire
from bench.results import Figures, Row, table, write_figures
from bench.stats import Section, estimate, verdict
from demonstration import models

PACKAGES: Final = ("obstore", "blake3")
PARTS: Final = ("speed", "wire")
SIZES: Final = (100, 1000)
TENSORS: Final = 300
QUICK_MB: Final = 4
MOST_S: Final = 1.0
_SPEED_NOTES: Final = """\
- Megabytes are 10^6 bytes of the checkpoint; what is read is in the page cache. The order changes
  from pair to pair, and ratios are taken pair by pair. An interval is of the median, 95 %, from
  order statistics.
- A push goes to a remote that holds another checkpoint; the server is a new one in every pair. Ours
  compares every leaf with its digest in both directions, the copies compare nothing.
- *At work* are the threads of this process that do not wait for each other, as they are seen every
  3 ms of one transfer more; *wire* is what asks obstore for something.
"""
_WIRE_NOTES: Final = """\
- Bytes are all that goes through the sockets, in both directions, headers included. *At most*:
  1.02 x the missing bytes, 1 MiB and 24 bytes for each piece that the remote holds, in 30 requests
  and 3 for each 64 MiB begun; 4 KiB in 2 requests where nothing is missing.
- Other checkpoints are of Qwen2-0.5B's shapes. Of ten, one is a base, four have one layer of their
  own, three a merged LoRA, and two are full fine-tunes in deltas. The catalog and the list of
  containers are those of a remote that holds them; there is nothing in their containers. *Never
  swept*: the catalog is left in the segments of as many pushes.
- All fine-tunes are stored with `--compress auto`. In *merged LoRA* one of six tensors has changed.
"""


@click.command(context_settings=options.CONTEXT)
@options.repeats("--pairs", 9)
@options.only(PARTS)
@click.option("--server", "servers", multiple=True, type=click.Choice(SERVERS), help="[both]")
@click.option("--mb", "sizes", multiple=True, type=int, help=f"Sizes [{SIZES[0]} and {SIZES[1]}].")
@options.work("six times the largest checkpoint")
@options.json_file("megabytes a second of all pairs, bytes and requests")
@options.write
def main(
    pairs: int,
    quick: bool,
    only: tuple[str, ...],
    servers: tuple[str, ...],
    sizes: tuple[int, ...],
    work: Path | None,
    json_file: Path | None,
    write: bool,
) -> None:
    """Measure pushes and pulls."""
    pairs = options.QUICK if quick else pairs
    folder = work or models.default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    figures = Figures()
    with tempfile.TemporaryDirectory(dir=folder, prefix="remote-bench-") as root:
        if "speed" in (only or PARTS):
            section = Section("remote.py --only speed", "Pushing and pulling", PACKAGES)
            found = list[Speed]()
            for server in servers or SERVERS:
                for mb in [QUICK_MB] if quick else sizes or SIZES:
                    found += speeds(server, mb, TENSORS, pairs, Path(root))
            how = f"{pairs} pairs, {TENSORS} tensors"
            section.finish("remote-speed", how, _table(found), _SPEED_NOTES, write=write)
            figures |= {each.name: each.rates for each in found}
        if "wire" in (only or PARTS):
            section = Section("remote.py --only wire", "Remotes", PACKAGES)
            lines = [*wire(Path(root) / "wire", figures, quick=quick)]
            section.finish("remote-wire", "one run", lines, _WIRE_NOTES, write=write)
    if json_file is not None:
        write_figures(json_file, figures)


def _table(found: Sequence[Speed]) -> list[str]:
    rows = [row for each in found for row in (each.row(), *_seconds(each))]
    spent = [f"- threads at work, {each.name}: {each.spent}" for each in found if each.spent]
    return [*table(rows, "plain copy by obstore"), "", *spent]


def _seconds(found: Speed) -> list[Row]:
    """The row of the seconds that a pull takes, of a size of which an aim says how many."""
    if found.mb != SIZES[0] or not found.name.startswith("pull"):
        return []
    plain, ours = map(estimate, found.seconds)
    said = verdict(ours, most=MOST_S)
    cells = (f"{plain.text()} s", f"{ours.text()} s", "", f"≤ {MOST_S:g} s", said)
    return [Row(f"{found.name}, {TENSORS} tensors", *cells)]


if __name__ == "__main__":
    main()
