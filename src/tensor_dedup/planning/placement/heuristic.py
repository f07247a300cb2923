"""Heuristics that place models on nodes where they add the fewest bytes.

A family is a group of models that have much in common. Families are placed one by one, the largest
first:

1. The family goes to the node where it adds the fewest bytes, of the nodes that have room for all
   of it. Of equal ones, it goes to the fullest.
2. If no node has that room, the largest model of the family goes where it adds the fewest bytes,
   with as many of the other models as fit there. The remaining models are placed in the same way.

Then replicas and groups of a family are moved or swapped as long as that saves bytes. A second
placement is made by best-fit on size and improved in the same way. The better of the two is
improved further by emptying and refilling nodes, unless the fleet is too large for that.

In general, this problem has no good approximation (Sindelar, Sitaraman and Shenoy, "Sharing-aware
algorithms for virtual machine colocation", SPAA 2011).
"""

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final

import numpy as np

from tensor_dedup.planning.placement.placement import Placement
from tensor_dedup.planning.placement.problem import PackingProblem

# Models are of one family when one has this share of the other's bytes.
_KINSHIP: Final = 0.05
# A part that many models have says enough by its first holders: pairs are never enumerated.
_REPRESENTATIVES: Final = 8
_ROUNDS: Final = 20
# Swaps are tried for as many pairs; then the cheaper moves have to do.
_SWAPS: Final = 20_000
_RUINS: Final = 100
_RUIN_WORK: Final = 200_000  # models times nodes: large fleets have no time for it
_SORTED: Final = 0.5
_EVICTIONS: Final = 64  # nodes on which room is looked for in this way


def place(problem: PackingProblem, start: Placement | None = None) -> Placement:
    """Choose nodes for all replicas, or for as many as the heuristics find room for.

    Replicas in `start`, if given, stay where they are. The same arguments give the same placement.
    """
    families = kin(problem)
    if start is not None:
        placed = start.copy()
        _fill(placed, families)
        return placed
    by_family = Placement(problem)
    _fill(by_family, families)
    found = [by_family, best_fit(problem)]
    for each in found:
        improve(each, families)  # never makes it worse
    return _recreated(min(found, key=_rank), families)


def best_fit(problem: PackingProblem) -> Placement:
    """Place models by size alone, largest first, each on the fullest node that has room for it.

    Replicas that fit on no node are left out.
    """
    placed = Placement(problem)
    missing = placed.missing()
    for model in sorted(missing, key=lambda each: (-problem.needs[each], each)):
        for _ in range(missing[model]):
            nodes = np.flatnonzero(placed.admits(model, placed.marginal(model)))
            if len(nodes):
                placed.add(model, int(nodes[np.argmin(placed.free()[nodes])]))
    return placed


def first_fit(problem: PackingProblem) -> Placement:
    """Place models in the order of the problem, each on the first node that has room for it.

    Replicas that fit on no node are left out.
    """
    placed = Placement(problem)
    for model, count in placed.missing().items():
        for _ in range(count):
            nodes = np.flatnonzero(placed.admits(model, placed.marginal(model)))
            if len(nodes):
                placed.add(model, int(nodes[0]))
    return placed


def kin(problem: PackingProblem) -> list[list[int]]:
    """Group the models into families, as sorted lists of model numbers.

    Each model joins the model that has most in common with it, if the common part is at least 5% of
    the smaller one. A model without such relatives is a family of its own.
    """
    holders: defaultdict[int, list[int]] = defaultdict(list)
    for model, parts in enumerate(problem.parts):
        for part in parts.tolist():
            holders[part].append(model)
    family = [[model] for model in range(len(problem.models))]
    for model in range(len(problem.models)):
        relative = _nearest(problem, holders, model)
        if relative is None or family[model] is family[relative]:
            continue
        small, large = sorted((family[model], family[relative]), key=len)
        large += small
        for each in small:
            family[each] = large
    distinct = {id(each): sorted(each) for each in family}
    return sorted(distinct.values())


def _nearest(
    problem: PackingProblem, holders: Mapping[int, Sequence[int]], model: int
) -> int | None:
    """Return the model that has most in common with this one, if that is a good part of either."""
    common: Counter[int] = Counter()
    for part in problem.parts[model].tolist():
        for other in holders[part][:_REPRESENTATIVES]:
            common[other] += int(problem.sizes[part])
    common.pop(model, None)
    if not common:
        return None
    nearest = min(common, key=lambda each: (-common[each], each))
    least = _KINSHIP * min(problem.weights[model], problem.weights[nearest])
    return nearest if common[nearest] >= least else None


def _rank(placed: Placement) -> tuple[int, int, int]:
    return sum(placed.missing().values()), placed.total, placed.busy


def _recreated(best: Placement, families: Sequence[Sequence[int]]) -> Placement:
    """Empty two nodes and fill them anew, again and again, and keep what is better.

    Ruin and recreate (Schrimpf, Schneider, Stamm-Wilbrandt and Dueck, "Record breaking optimization
    results using the ruin and recreate principle", J. Comput. Phys. 159, 2000). It finds room on
    nodes that are all but full, where single moves find none.
    """
    problem = best.problem
    least = problem.least()
    draw = random.Random(0)
    work = len(problem.models) * len(problem.nodes)
    for _ in range(min(_RUINS, _RUIN_WORK // work) if len(problem.nodes) > 1 else 0):
        if not best.missing() and best.total == least:
            break
        tried = best.copy()
        for node in draw.sample(range(len(problem.nodes)), 2):
            for model in tried.models_on(node):
                tried.remove(model, node)
        order = [[*family] for family in families]
        draw.shuffle(order)
        _fill(tried, order, sort=draw.random() < _SORTED)
        improve(tried, families)
        if _rank(tried) < _rank(best):
            best = tried
    return best


def improve(placed: Placement, families: Sequence[Sequence[int]]) -> None:
    """Move and swap replicas, and groups of a family, as long as that saves bytes.

    A replica that has no node yet is placed if there is room for it, or if moving another replica
    makes room. `families` is the result of `kin`.
    """
    relatives = {model: family for family in families for model in family}
    for _ in range(_ROUNDS):
        before = (sum(placed.missing().values()), placed.total)
        _make_room(placed)
        _move_groups(placed, families)
        _move(placed)
        _swap(placed, relatives)
        if (sum(placed.missing().values()), placed.total) == before:
            return


def _fill(placed: Placement, families: Sequence[Sequence[int]], *, sort: bool = True) -> None:
    problem, missing = placed.problem, placed.missing()
    copies = max(missing.values(), default=0)
    # A second replica needs another node: each family once, then what it has twice, and so on.
    groups = [
        [model for model in family if missing[model] > copy]
        for copy in range(copies)
        for family in families
    ]
    groups = [group for group in groups if group]
    for group in sorted(groups, key=lambda each: -problem.used(each)) if sort else groups:
        _fill_family(placed, group)


def _fill_family(placed: Placement, family: Sequence[int]) -> None:
    rest = sorted(family, key=lambda each: (-placed.problem.needs[each], each))
    while rest:
        added, admitted = placed.together(rest)
        nodes = np.flatnonzero(admitted)
        if len(nodes):
            node = int(nodes[np.lexsort((placed.free()[nodes], added[nodes]))[0]])
            for model in rest:
                placed.add(model, node)
            return
        rest = _fill_one(placed, rest)


def _fill_one(placed: Placement, family: Sequence[int]) -> list[int]:
    """Put as much of a family as fits where its largest model adds least; return what is left."""
    for number, first in enumerate(family):
        marginal = placed.marginal(first)
        nodes = np.flatnonzero(placed.admits(first, marginal))
        if not len(nodes):
            continue
        # Where nothing of it is, the emptiest node takes most of what follows.
        node = int(nodes[np.lexsort((-placed.free()[nodes], marginal[nodes]))[0]])
        placed.add(first, node)
        rest = [*family[:number], *family[number + 1 :]]
        left = [*rest]
        while left:
            added = {model: placed.marginal_on(model, node) for model in left}
            model = min(left, key=lambda each: (added[each], each))
            if not placed.fits(model, node):
                break
            placed.add(model, node)
            left.remove(model)
        return left
    return []


def _make_room(placed: Placement) -> None:
    """Place what has no node by moving one replica out of its way."""
    missing = placed.missing()
    needs = placed.problem.needs
    for model in sorted(missing, key=lambda each: (-needs[each], each)):
        for _ in range(missing[model]):
            marginal = placed.marginal(model)
            nodes = np.flatnonzero(placed.admits(model, marginal))
            if len(nodes):
                placed.add(model, int(nodes[np.argmin(marginal[nodes])]))
            elif not _evict_for(placed, model):
                break


def _evict_for(placed: Placement, model: int) -> bool:
    lacking = placed.marginal(model) - placed.free()
    for node in np.argsort(lacking, kind="stable")[:_EVICTIONS].tolist():
        for other in placed.models_on(node):
            if placed.freed(other, node) < lacking[node]:
                continue
            marginal = placed.marginal(other)
            nodes = np.flatnonzero(placed.admits(other, marginal))
            if not len(nodes):
                continue
            placed.remove(other, node)
            if placed.fits(model, node):
                placed.add(model, node)
                placed.add(other, int(nodes[np.argmin(marginal[nodes])]))
                return True
            placed.add(other, node)
    return False


def _move(placed: Placement) -> None:
    for model, node in [*placed.replicas()]:
        marginal = placed.marginal(model)
        nodes = np.flatnonzero(placed.admits(model, marginal))
        if not len(nodes):
            continue
        best = int(nodes[np.argmin(marginal[nodes])])
        if marginal[best] < placed.freed(model, node):
            placed.remove(model, node)
            placed.add(model, best)


def _move_groups(placed: Placement, families: Sequence[Sequence[int]]) -> None:
    """Bring together what is left of a family on several nodes."""
    for family in families:
        nodes = sorted(set(chain.from_iterable(map(placed.nodes_of, family))))
        if len(family) < 2 or len(nodes) < 2:
            continue
        for node in nodes:
            group = [model for model in family if node in placed.nodes_of(model)]
            if not group:
                continue
            before = placed.total
            for model in group:
                placed.remove(model, node)
            freed = before - placed.total
            added, admitted = placed.together(group)
            admitted[node] = False
            found = np.flatnonzero(admitted & (added < freed))
            best = int(found[np.argmin(added[found])]) if len(found) else node
            for model in group:
                placed.add(model, best)


def _swap(placed: Placement, relatives: dict[int, Sequence[int]]) -> None:
    """Change places of two replicas where that saves: a full node may lack nothing but room."""
    tried = 0
    for model, node in [*placed.replicas()]:
        if node not in placed.nodes_of(model):
            continue  # it has changed places with one before it
        marginal = placed.marginal(model)
        freed = placed.freed(model, node)
        wished = np.flatnonzero((marginal < freed) & (marginal > placed.free()))
        for other_node in wished[np.argsort(marginal[wished], kind="stable")].tolist():
            if other_node in placed.nodes_of(model):
                continue
            kin_here = set(relatives.get(model, ()))
            for other in placed.models_on(other_node):
                if other in kin_here or node in placed.nodes_of(other):
                    continue
                tried += 1
                if tried > _SWAPS:
                    return
                if _swap_pair(placed, (model, node), (other, other_node)):
                    break
            else:
                continue
            break


def _swap_pair(placed: Placement, one: tuple[int, int], two: tuple[int, int]) -> bool:
    (a, here), (b, there) = one, two
    before = placed.total
    placed.remove(a, here)
    placed.remove(b, there)
    if placed.fits(a, there) and placed.fits(b, here):
        placed.add(a, there)
        placed.add(b, here)
        if placed.total < before:
            return True
        placed.remove(a, there)
        placed.remove(b, here)
    placed.add(a, here)
    placed.add(b, there)
    return False
