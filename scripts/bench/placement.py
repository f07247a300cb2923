"""Placement by what models share, against schedulers that see sizes, and against the optimum.

    python scripts/bench/placement.py [--seconds 60] [--scale] > placement.md

Twelve synthetic fleets: families of fine-tunes with the overlaps of docs/benchmarks/tables.md, a
hub where 8.3 % of a family's bytes are equal, and strangers. All placers know that a tensor counts
once a node when they ask whether a model fits; only ours asks it when it chooses. `--scale` times
1,000 models on 100 nodes and 10,000 on 1,000 instead. Needs the extra `plan`.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import click

from tensor_dedup.planning.placement.exact import solve
from tensor_dedup.planning.placement.heuristic import best_fit, first_fit, place
from tensor_dedup.planning.placement.placement import Placement
from tensor_dedup.planning.placement.problem import Model, Node, PackingProblem

MIB, GIB = 1 << 20, 1 << 30
# Tensors of a layer, by their share of a layer's bytes in per mille (Llama's proportions).
LAYER = {"q": 83, "k": 83, "v": 83, "o": 83, "gate": 222, "up": 222, "down": 224}
LAYERS = 32
KINDS = ("lora", "frozen half", "frozen quarter", "vocabulary", "hub", "full", "same")


@dataclass(frozen=True)
class Fleet:
    """What one fleet is made of: families by their size in GiB, their members and their kinds."""

    name: str
    families: Sequence[tuple[int, int, Sequence[str]]]
    strangers: int
    nodes: int
    memory_gib: int
    room_mib: int = 1024
    replicas: int = 1


FLEETS = (
    Fleet("one base, merged LoRAs", [(14, 23, ("lora",))], 0, 4, 40),
    Fleet("four bases, merged LoRAs", [(14, 6, ("lora",))] * 4, 0, 4, 48),
    Fleet("six bases, half frozen", [(8, 5, ("frozen half",))] * 6, 0, 6, 32),
    Fleet("four bases, a quarter frozen", [(8, 6, ("frozen quarter",))] * 4, 0, 4, 48),
    Fleet("three bases, new vocabulary", [(14, 8, ("vocabulary",))] * 3, 2, 4, 60),
    Fleet("five bases, all kinds", [(8, 5, KINDS)] * 5, 3, 5, 36),
    Fleet("sizes mixed", [(14, 5, ("lora",)), (8, 8, ("frozen half",)), (3, 9, KINDS)], 4, 4, 30),
    Fleet("a hub: 8.3 % equal", [(6, 6, ("hub",))] * 5, 0, 6, 38),
    Fleet("a hub with LoRAs", [(6, 6, ("hub", "lora"))] * 5, 4, 5, 46),
    Fleet("replicas", [(8, 4, ("lora", "frozen half"))] * 5, 2, 8, 40, replicas=2),
    Fleet("A/B pairs", [(12, 2, ("same",))] * 12, 0, 8, 30),
    Fleet("strangers", [], 24, 6, 40),
)


def models_of(fleet: Fleet, seed: int = 1) -> list[Model]:
    """The models of a fleet, in an order drawn by the seed."""
    draw = random.Random(f"{fleet.name} {seed}")
    found = []
    for number, (gib, members, kinds) in enumerate(fleet.families):
        base = _base(f"{fleet.name}/{number}", gib * GIB)
        found.append((f"base-{number}", base))
        for member in range(members - 1):
            kind = kinds[member % len(kinds)]
            name = f"{kind.replace(' ', '-')}-{number}-{member}"
            found.append((name, _tuned(base, f"{fleet.name}/{name}", kind, draw)))
    for number in range(fleet.strangers):
        size = draw.choice((2, 4, 6, 8)) * GIB
        found.append((f"stranger-{number}", _base(f"{fleet.name}/stranger/{number}", size)))
    draw.shuffle(found)
    return [
        Model(name, {f"{digest}": size for digest, size in tensors.values()},
              room=fleet.room_mib * MIB, replicas=fleet.replicas)
        for name, tensors in found
    ]  # fmt: skip


Tensors = dict[str, tuple[str, int]]


def _base(identity: str, nbytes: int) -> Tensors:
    """A model's tensors: names, digests (here: who made them) and sizes in whole MiB."""
    layer = nbytes * 94 // 100 // LAYERS
    found = {
        f"{number}.{name}": (f"{identity}/{number}.{name}", layer * share // 1000 // MIB * MIB)
        for number in range(LAYERS)
        for name, share in LAYER.items()
    }
    rest = (nbytes - sum(size for _, size in found.values())) // 2 // MIB * MIB
    found["embed"] = (f"{identity}/embed", rest)
    found["head"] = (f"{identity}/head", rest)
    return found


def _tuned(base: Tensors, identity: str, kind: str, draw: random.Random) -> Tensors:
    names = [*base]
    total = sum(size for _, size in base.values())
    match kind:
        case "lora":
            changed = {name for name in names if name.endswith((".q", ".v"))}
        case "frozen half" | "frozen quarter":
            kept = LAYERS // (2 if kind == "frozen half" else 4)
            changed = {n for n in names if "." in n and int(n.split(".")[0]) >= kept}
        case "vocabulary":
            changed = {"embed", "head"}
        case "same":
            changed = set()
        case "hub":
            changed, kept_bytes = {*names}, 0
            for name in draw.sample(names, len(names)):
                if kept_bytes + base[name][1] <= 0.083 * total:
                    changed.discard(name)
                    kept_bytes += base[name][1]
        case _:
            changed = {*names}
    return {
        name: (f"{identity}/{name}" if name in changed else digest, size)
        for name, (digest, size) in base.items()
    }


def nodes_of(fleet: Fleet) -> list[Node]:
    return [Node(f"node-{n + 1}", fleet.memory_gib * GIB) for n in range(fleet.nodes)]


def spread(problem: PackingProblem) -> Placement:
    """Ray's default: first nodes below half of their memory, the fullest; then the emptiest.

    The hybrid policy of Ray 2 (`scheduler_spread_threshold=0.5`), without its random choice among
    the best fifth of nodes.
    """
    placed = Placement(problem)
    for model, count in placed.missing().items():
        for _ in range(count):
            admitted = placed.admits(model, placed.marginal(model)).nonzero()[0].tolist()
            if not admitted:
                continue
            shares = {n: placed.used[n] / problem.capacity[n] for n in admitted}
            low = [n for n in admitted if shares[n] < 0.5]
            node = max(low, key=lambda n: (shares[n], -n)) if low else min(
                admitted, key=lambda n: (shares[n], n)
            )  # fmt: skip
            placed.add(model, node)
    return placed


PLACERS: dict[str, Callable[[PackingProblem], Placement]] = {
    "ours": place,
    "first-fit": first_fit,
    "best-fit": best_fit,
    "Ray": spread,
}


def nodes_needed(
    fleet: Fleet, models: Sequence[Model], placer: Callable[[PackingProblem], Placement]
) -> int:
    """The fewest nodes of the fleet's kind on which a placer places everything."""
    whole = PackingProblem(models, [Node("all", 1)])
    least = -(-whole.used(range(len(models))) // (fleet.memory_gib * GIB))
    for count in range(max(1, least, fleet.replicas), 10 * fleet.nodes):
        problem = PackingProblem(models, nodes_of(replace(fleet, nodes=count)))
        if not placer(problem).missing():
            return count
    raise RuntimeError(f"{fleet.name}: not placed on {10 * fleet.nodes} nodes")


def rows(seconds: float) -> Iterator[list[str]]:
    for fleet in FLEETS:
        models = models_of(fleet)
        problem = PackingProblem(models, nodes_of(fleet))
        placed = {name: placer(problem) for name, placer in PLACERS.items()}
        best = solve(problem, seconds, hint=placed["ours"])
        needed = {name: nodes_needed(fleet, models, placer) for name, placer in PLACERS.items()}
        assert all(each.is_sound() for each in placed.values())
        floor = best.placement.total if best.placement and best.is_proven else best.bound
        found = best.placement.total if best.placement else None
        yield [
            fleet.name,
            f"{len(models)} on {fleet.nodes} x {fleet.memory_gib}",
            *(_total(each) for each in placed.values()),
            "-" if found is None else f"{found / GIB:.1f}",
            f"{floor / GIB:.1f}{'' if best.is_proven else ' (bound)'}",
            f"{100 * (placed['ours'].total / floor - 1):.1f} %",
            f"{100 * (placed['best-fit'].total / floor - 1):.1f} %",
            *(str(each) for each in needed.values()),
        ]


def _total(placed: Placement) -> str:
    lacking = sum(placed.missing().values())
    return f"{placed.total / GIB:.1f}" + (f", {lacking} not placed" if lacking else "")


def scale() -> Iterator[str]:
    """Time large fleets, in this process, on one core."""
    for count, nodes, limit in ((1_000, 100, 10.0), (10_000, 1_000, 300.0)):
        families = tuple((4, 10, KINDS) for _ in range(count // 10))
        fleet = Fleet(f"{count} models", families, 0, nodes, 44)
        models = models_of(fleet)
        began = time.process_time()
        problem = PackingProblem(models, nodes_of(fleet))
        placed = place(problem)
        took = time.process_time() - began
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        whole = sum(model.nbytes + model.room for model in models)
        yield (
            f"{count} models on {nodes} nodes: {took:.1f} s of processor time (aim {limit:.0f}), "
            f"{held:.0f} MiB at most with the fleet itself, {sum(placed.missing().values())} not "
            f"placed, {placed.total / GIB:.0f} GiB, {whole / GIB:.0f} where nothing is shared"
        )


@click.command()
@click.option("--seconds", default=60.0, show_default=True, help="For the solver, a fleet.")
@click.option("--scale", "large", is_flag=True, help="Time large fleets instead.")
def main(seconds: float, large: bool) -> None:
    """Print the table."""
    if large:
        for line in scale():
            click.echo(line)
        return
    names = ["fleet", "models on nodes x GiB", *(f"{n}, GiB" for n in PLACERS), "solver", "optimum"]
    names += ["ours off", "best-fit off", *(f"{n}, nodes" for n in PLACERS)]
    click.echo(f"| {' | '.join(names)} |\n|{' --- |' * len(names)}")
    for row in rows(seconds):
        click.echo(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
