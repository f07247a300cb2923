"""The evaluation of DataStates-LLM on one machine: what saving takes from a training.

    python scripts/bench/datastates.py [--minutes 12] [--quick] [--out FILE] [--write]

By the size of a step, by how often one is saved, by ranks; what a save consists of; what a write
costs by a tensor's size; when each of the largest tensors is written. `--out` gets the raw results,
`--write` puts the section into docs/benchmarks/tables.md, the raw results beside it, the headlines
into docs/seeds.md. torchsnapshot and DeepSpeed take part where they are installed. For at least 50
steps of each size it needs 50 minutes of a machine that does nothing else.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import click

from bench import datastates_write as writing
from bench.datastates_engines import (
    DCP,
    DECOUPLED,
    DEEPSPEED,
    FAST,
    LAZY,
    LAZY_RAW,
    NOTHING,
    SAVE,
    SAVE_RAW,
    SNAPSHOT,
    SYNCED,
    TORCH,
    Training,
    absent,
    quiet,
)
from bench.datastates_ranks import Setup, measure
from bench.stats import DOCUMENT, Estimate, Section, estimate, machine, verdict, write_section

PACKAGES: Final = ("torch", "torchsnapshot", "deepspeed", "numpy", "xxhash", "blake3")
RAW: Final = DOCUMENT.with_name("datastates.json")
SEEDS: Final = DOCUMENT.parents[1] / "seeds.md"
ALL: Final = (
    NOTHING,
    TORCH,
    SYNCED,
    DCP,
    SNAPSHOT,
    DEEPSPEED,
    FAST,
    DECOUPLED,
    SAVE,
    SAVE_RAW,
    LAZY,
    LAZY_RAW,
)
MAIN: Final = (NOTHING, TORCH, SYNCED, DCP, SNAPSHOT, DECOUPLED, SAVE, SAVE_RAW, LAZY)
SWEPT: Final = (NOTHING, TORCH, SYNCED, DCP, SNAPSHOT, DEEPSPEED, LAZY)
FROZEN: Final = (NOTHING, TORCH, SYNCED, DCP, SNAPSHOT, DEEPSPEED, SAVE, LAZY)
FOUR: Final = (NOTHING, TORCH, SYNCED, DCP, SNAPSHOT, DEEPSPEED, SAVE, LAZY)
SMALL, MIDDLE, BIG, TINY = 45_000_000, 420_000_000, 1_700_000_000, 2_000_000
EVERY: Final = (2, 5, 10)
_PAGE: Final = 4096
_SIZES: Final = (1 << 20, 4 << 20, 16 << 20, SMALL, 128 << 20, MIDDLE, BIG)
_LEAST_STEPS: Final = 50
_WRITES_SHARE: Final = 14.0
_NOTES: Final = """\
- The training: blocks of two linear layers and a norm, float32, Adam; the bytes are those of
  weights and both moments over all ranks. Each rank has its own blocks, as under pipeline
  parallelism, and every step has a collective (gloo). A batch is 16 tokens, so that a step is
  short: the regime in which saving has least to hide behind. A rank computes with one thread; with
  one rank on two cores, saving in the background has the other one.
- *Blocked* is the time in calls that save and before updates, with the wait for the last save of a
  turn, a save; *throughput* is the bytes of a step by it. *Longer* is how much longer the turn took
  than the turn of the same round without saves, a save: it has what the background takes from the
  training on the same cores, too. Of several ranks the slowest counts. A turn with a save every n
  steps saves after the first of each n.
- *Left to the kernel* is what an fsync of everything takes afterwards, a turn. DCP syncs its files;
  ours leaves its index, which is a cache, and what its encoder is writing just then.
  *Tidied* is what deleting takes afterwards, a turn, and for ours what encoding is left. Neither is
  in the other columns. So each turn begins with nothing unwritten. Files are new in each turn,
  memory for copies (at most two steps) is kept; all files are in the page cache or on the way there
  except where ours writes past it.
- DeepSpeed's engines are called as its `save_checkpoint` and `step` call them. The writer *fast*
  needs libaio; *python* is its other one. The decoupled engine serialises in another process, the
  update waits for it.
- The parts of a save: *serialise* is what makes headers, plans and pickles, *stage* the copy from
  memory to memory (no GPU was used), *write* the rest until the save has ended. The decoupled
  engine's serialising is in its *write*.
- Intervals are of the median over rounds, 95 %, or all that was seen.
"""


def setups(*, quick: bool) -> list[Setup]:
    """What is measured with ranks."""
    if quick:
        return [
            Setup("by size: 2 MB", TINY, ALL, 0, steps=2, most=1, parts=1),
            Setup("every 2", TINY, SWEPT, 0, steps=2, most=1, every=2),
            Setup("2 ranks", TINY, SWEPT, 0, steps=2, most=1, ranks=2),
        ]
    return [
        Setup("by size: 45 MB", SMALL, ALL, 12),
        Setup("by size: 420 MB", MIDDLE, MAIN, 30, parts=3),
        Setup("by size: 1.7 GB", BIG, SWEPT, 70, steps=4, most=13),
        *(Setup(f"every {n}", SMALL, SWEPT, 5, steps=10, most=5, every=n) for n in EVERY),
        Setup("frozen", SMALL, FROZEN, 6, frozen=True),
        Setup("2 ranks", SMALL, SWEPT, 6, ranks=2),
        Setup("2 ranks, 420 MB", MIDDLE, SWEPT, 14, ranks=2),
        Setup("4 ranks", SMALL, FOUR, 2, ranks=4, steps=2, most=1),
    ]


def blocked(turns: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds a save, of each turn."""
    return [(each["calls"] + each["wait"]) / each["saves"] for each in turns]


def longer(turns: Sequence[dict[str, Any]], without: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds by which each turn is longer than that without saves in the same round, a save."""
    both = zip(turns, without, strict=True)
    return [(one["wall"] - two["wall"]) / one["saves"] for one, two in both]


def _ms(seconds: Sequence[float], digits: int = 0) -> str:
    return estimate([1e3 * each for each in seconds]).text(digits)


def _measured(found: dict[str, Any]) -> Iterator[str]:
    setup, turns = found["setup"], found["turns"]
    size, without = sum(found["rank_bytes"]), turns[NOTHING]
    steps = sum(each["steps"] for each in without)
    ranks = f"{setup['ranks']} ranks, " if setup["ranks"] > 1 else ""
    marks = " Oversubscribed: more ranks than cores." if setup["ranks"] > 2 else ""
    marks += f" Fewer than {_LEAST_STEPS} steps." if steps < _LEAST_STEPS else ""
    yield (
        f"**{setup['name']}**: {size / 1e6:,.0f} MB a step, {ranks}{steps} steps in turns of "
        f"{setup['steps']}, saved every {setup['every']}. A step without saving: "
        f"{_ms([each['wall'] / each['steps'] for each in without])} ms.{marks}"
    )
    yield ""
    yield (
        "| | blocked, ms a save | throughput, GB/s | longer, ms a save | end to end, s a turn "
        "| last wait, ms | left to the kernel, ms | tidied, ms |"
    )
    yield f"|{' --- |' * 8}"
    for name, each in turns.items():
        if name == NOTHING:
            continue
        waits = [f"{1e3 * estimate([t[key] for t in each]).median:.0f}" for key in _AFTER]
        through = estimate([size / 1e9 / seconds for seconds in blocked(each)])
        cells = (_ms(blocked(each)), through.text(2), _ms(longer(each, without)))
        yield (
            f"| {name} | {' | '.join(cells)} | {estimate([t['wall'] for t in each]).text(2)} "
            f"| {' | '.join(waits)} |"
        )
    wrong = [name for name, same in found["restored"].items() if not same]
    right = f"not restored: {', '.join(wrong)}" if wrong else "restored to the last bit by all"
    yield ""
    yield f"The last step was {right}."


_COMPARED: Final = (SYNCED, DCP, SNAPSHOT, DEEPSPEED, DECOUPLED, LAZY)
_HEADLINES: Final = ("by size: 45 MB", "by size: 420 MB", "by size: 1.7 GB", "2 ranks, 420 MB")
_AFTER: Final = ("wait", "flush", "tidy")


def _aims(found: dict[str, Any]) -> Iterator[str]:
    """What is aimed at where all weights are trained and saved at every step."""
    turns = found["turns"]

    def against(name: str, other: str, share: float, values: str) -> str:
        pairs = [(_value(values, turns[each]) for each in (name, other))]
        one, two = pairs[0]
        ratio: Estimate = estimate([a / b for a, b in zip(one, two, strict=True)])
        return (
            f"- {values}: {name} to {other}: {ratio.text(2)} x; aim ≤ {share:.3g} x: "
            f"{verdict(ratio, most=share)}"
        )

    if LAZY in turns:
        frozen = found["setup"]["frozen"]
        if not frozen:
            yield against(LAZY, SYNCED, 0.5, "blocked")
        yield against(LAZY, DCP, 1 / 5.3 if frozen else 1.0, "blocked")
        yield against(LAZY, DCP, 1.0, "end to end")
    if SAVE in turns and SAVE_RAW in turns:
        yield against(SAVE, SAVE_RAW, 1.5, "blocked")


def _value(values: str, turns: Sequence[dict[str, Any]]) -> list[float]:
    return blocked(turns) if values == "blocked" else [each["wall"] for each in turns]


def _parts(found: dict[str, Any]) -> Iterator[str]:
    yield f"**What a save consists of** ({found['setup']['name']})"
    yield ""
    yield "| ms | serialise | stage | write |"
    yield "| --- | --- | --- | --- |"
    for name, each in found["parts"].items():
        cells = [_ms([part[key] for part in each], 1) for key in ("serialise", "stage", "write")]
        yield f"| {name} | {' | '.join(cells)} |"


def _micro(sizes: dict[str, writing.Values]) -> Iterator[str]:
    yield "**One changed tensor until it is durable, GB/s by its size**"
    yield ""
    names = [name for name in next(iter(sizes.values())) if name != writing.SERIALISE]
    shown = [n for n in names if n != writing.CACHED]
    last = "ours to the faster of both ideals | torch.save serialises"
    yield f"| MB | {' | '.join(shown)} | {last} |"
    yield f"|{' --- |' * (len(shown) + 3)}"
    for text, times in sizes.items():
        size = int(text)
        cells = [estimate([size / 1e9 / s for s in times[name]]).text(2) for name in shown]
        best = map(min, times[writing.BUFFERED], times[writing.DIRECT])
        ratio = estimate([b / a for a, b in zip(times[writing.OURS], best, strict=True)])
        aim = f"; aim ≥ 0.8: {verdict(ratio, least=0.8)}" if abs(size - MIDDLE) < _PAGE else ""
        both = zip(times[writing.SERIALISE], times[writing.CACHED], strict=True)
        share = estimate([100 * a / b for a, b in both])
        yield (
            f"| {size / 1e6:,.1f} | {' | '.join(cells)} | {ratio.text(2)}{aim} "
            f"| {share.text(0)} % of its time |"
        )


def _timeline(found: dict[str, Any], size: int) -> Iterator[str]:
    def ms(value: float | None) -> str:
        return "not seen" if value is None else f"{1e3 * value:.0f}"

    yield (
        f"**Five of the largest copies of {size / 1e6:,.0f} MB**, ms since `save_async` was "
        f"called (compress=None): it returned at {ms(found['returned'])}, all was captured at "
        f"{ms(found['captured'])}, durable at {ms(found['durable'])}."
    )
    yield ""
    yield "| MB | copied from | written from | written to |"
    yield "| --- | --- | --- | --- |"
    for each in found["tensors"]:
        cells = [ms(each[key]) for key in ("copied_from", "written_from", "written_to")]
        yield f"| {each['nbytes'] / 1e6:,.1f} | {' | '.join(cells)} |"


def _tables(raw: dict[str, Any]) -> Iterator[str]:
    for found in raw["setups"]:
        yield from _measured(found)
        yield ""
        if found["setup"]["every"] == 1 and found["setup"]["ranks"] <= 2:
            yield from _aims(found)
            yield ""
        if found["parts"]:
            yield from _parts(found)
            yield ""
    yield from _micro(raw["writes"])
    yield ""
    yield from _timeline(raw["timeline"], raw["timeline_bytes"])
    yield ""
    leisure = raw["leisure"]
    yield (
        f"A step of {leisure['nbytes'] / 1e6:,.0f} MB by `save` took {leisure['save']:.2f} s and "
        f"stored {leisure['stored']:.1f} MB; `close` then encoded what was left, in "
        f"{leisure['close']:.2f} s, to {leisure['left']:.1f} MB."
    )
    for engine, reason in raw["absent"].items():
        yield ""
        yield f"- {engine}: {reason}."


def headlines(raw: dict[str, Any]) -> Iterator[str]:
    """The paper's figures beside ours, for docs/seeds.md."""
    setups = {found["setup"]["name"]: found for found in raw["setups"]}
    yield "| | the paper | here |"
    yield "| --- | --- | --- |"
    for name, found in setups.items():
        if name not in _HEADLINES:
            continue
        turns = {key: each for key, each in found["turns"].items() if key in _COMPARED}
        ours = blocked(turns[LAZY])
        both = {key: zip(blocked(each), ours, strict=True) for key, each in turns.items()}
        ratios = [
            f"{estimate([a / b for a, b in pairs]).median:.1f} x {key}"
            for key, pairs in both.items()
            if key != LAZY
        ]
        walls = {key: estimate([t["wall"] for t in each]).median for key, each in turns.items()}
        ends = [f"{w / walls[LAZY]:.1f} x {key}" for key, w in walls.items() if key != LAZY]
        paper = ("3 to 4.2 x", "1.3 to 2.2 x") if name == "by size: 420 MB" else ("", "")
        yield f"| {name}: throughput of saving, ours to others | {paper[0]} | {', '.join(ratios)} |"
        yield f"| {name}: the training's time, others to ours | {paper[1]} | {', '.join(ends)} |"
    if "every 10" in setups and SNAPSHOT in setups["every 10"]["turns"]:
        ends = []
        for every, name in ((2, LAZY), (10, SNAPSHOT)):
            turns = setups[f"every {every}"]["turns"][name]
            step = 1e3 * estimate([each["wall"] / each["steps"] for each in turns]).median
            ends.append(f"{step:.0f} ms")
        yield (
            "| 50 steps, ours saving every 2, torchsnapshot every 10 | 195 and 208 s "
            f"| {' and '.join(ends)} a step |"
        )
    parts = next(found["parts"] for found in setups.values() if found["parts"])[LAZY]
    for key, paper_s in (("serialise", "0.0156"), ("stage", "0.6"), ("write", "3.8")):
        ms = 1e3 * estimate([each[key] for each in parts]).median
        yield f"| {key}, of one save | {paper_s} s (one rank of 7B) | {ms:.1f} ms |"
    times = list(raw["writes"].values())[-2]
    both_s = zip(times[writing.SERIALISE], times[writing.CACHED], strict=True)
    share = 100 * estimate([a / b for a, b in both_s]).median
    yield f"| serialising in `torch.save` | 22 % of its time | {share:.0f} % |"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--minutes", default=12.0, show_default=True, type=click.FloatRange(min=1))
@click.option("--quick", is_flag=True, help="Shows that everything runs; its numbers say little.")
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), help="Where to save.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="The raw results.")
@click.option("--write", is_flag=True, help="Write all of it into docs.")
def main(minutes: float, quick: bool, work: Path | None, out: Path | None, write: bool) -> None:
    """Measure all of it."""
    quiet()
    section = Section("datastates.py", "Saving a training as DataStates-LLM does", PACKAGES)
    raw: dict[str, Any] = {"machine": machine(PACKAGES), "absent": absent(), "setups": []}
    folder = Path(tempfile.mkdtemp(prefix="tensor-dedup-", dir=work))
    end, todo = time.monotonic() + minutes * 60, setups(quick=quick)

    def seconds(share: float) -> float:
        """The share of what time is left, beside all that is still to do."""
        rest = sum(each.share for each in todo[len(raw["setups"]) :]) + _WRITES_SHARE
        return max(0.0, end - time.monotonic()) * share / rest

    try:
        for number, setup in enumerate(todo):
            click.echo(f"{setup.name} ...", err=True)  # it takes a while
            using = [name for name in setup.engines if name not in raw["absent"]]
            given = replace(setup, engines=using)
            raw["setups"].append(measure(given, folder / str(number), seconds(setup.share)))
            shutil.rmtree(folder / str(number))
            if out is not None:  # what there is, should it be stopped
                out.write_text(json.dumps(raw, indent=1) + "\n")
        click.echo("writes ...", err=True)
        sizes = [-(-size // _PAGE) * _PAGE for size in (_SIZES[:3] if quick else _SIZES)]
        until = time.monotonic() + (0 if quick else 0.8 * seconds(_WRITES_SHARE))
        raw["writes"] = writing.by_size(sizes, folder / "writes", until)
        training = Training(TINY if quick else MIDDLE, 0, 1)
        raw["timeline_bytes"] = training.nbytes
        raw["timeline"] = writing.timeline(training, folder / "timeline")
        raw["leisure"] = writing.leisure(
            Training(TINY if quick else SMALL, 0, 1), folder / "leisure"
        )
    finally:
        shutil.rmtree(folder)
    for path in [path for path in (out, RAW if write else None) if path is not None]:
        path.write_text(json.dumps(raw, indent=1) + "\n")
    how = f"{minutes:g} minutes at most" if not quick else "quick"
    section.finish("datastates", how, list(_tables(raw)), _NOTES, write=write)
    if write:
        write_section("datastates", "\n".join(headlines(raw)), SEEDS)


if __name__ == "__main__":
    main()
