"""Fleets made for tests of placement: families of fine-tunes, hubs, and strangers.

A hub's members have 8.3 % of their bytes in common with their base.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tensor_dedup.planning.placement.problem import Model, Node

MIB, GIB = 1 << 20, 1 << 30
# Tensors of a layer, by their share of a layer's bytes in per mille (Llama's proportions).
LAYER = {"q": 83, "k": 83, "v": 83, "o": 83, "gate": 222, "up": 222, "down": 224}
LAYERS = 32
KINDS = ("lora", "frozen half", "frozen quarter", "vocabulary", "hub", "full", "same")


@dataclass(frozen=True)
class Fleet:
    """What one fleet is made of: families by their size in GiB, their members and their kinds.

    `placed_gib` is what `place` needs of it, `optimum_gib` what the solver proved to be the least
    (of one fleet its lower bound, after 30 s).
    """

    name: str
    families: Sequence[tuple[int, int, Sequence[str]]]
    strangers: int
    nodes: int
    memory_gib: int
    placed_gib: float
    optimum_gib: float
    room_mib: int = 1024
    replicas: int = 1


FLEETS = (
    Fleet("one base, merged LoRAs", [(14, 23, ("lora",))], 0, 4, 40, 107.5, 107.5),
    Fleet("four bases, merged LoRAs", [(14, 6, ("lora",))] * 4, 0, 4, 48, 122.5, 122.5),
    Fleet("six bases, half frozen", [(8, 5, ("frozen half",))] * 6, 0, 6, 32, 166.1, 166.1),
    Fleet(
        "four bases, a quarter frozen", [(8, 6, ("frozen quarter",))] * 4, 0, 4, 48, 166.2, 166.2
    ),
    Fleet("three bases, new vocabulary", [(14, 8, ("vocabulary",))] * 3, 2, 4, 60, 103.0, 103.0),
    Fleet("five bases, all kinds", [(8, 5, KINDS)] * 5, 3, 5, 36, 139.1, 139.1),
    Fleet(
        "sizes mixed",
        [(14, 5, ("lora",)), (8, 8, ("frozen half",)), (3, 9, KINDS)],
        4,
        4,
        30,
        109.8,
        109.8,
    ),
    Fleet("a hub: 8.3 % equal", [(6, 6, ("hub",))] * 5, 0, 6, 38, 200.2, 197.7),
    Fleet("a hub with LoRAs", [(6, 6, ("hub", "lora"))] * 5, 4, 5, 46, 177.4, 177.4),
    Fleet("replicas", [(8, 4, ("lora", "frozen half"))] * 5, 2, 8, 40, 208.5, 208.5, replicas=2),
    Fleet("A/B pairs", [(12, 2, ("same",))] * 12, 0, 8, 30, 168.0, 168.0),
    Fleet("strangers", [], 24, 6, 40, 134.0, 134.0),
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
    """The nodes of a fleet, all alike."""
    return [Node(f"node-{n + 1}", fleet.memory_gib * GIB) for n in range(fleet.nodes)]
