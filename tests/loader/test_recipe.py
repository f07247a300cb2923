"""Recipes: equal ones for equal bytes however they were asked for, other ones for other bytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tensor_dedup.config import TensorDedupConfig
from tensor_dedup.errors import IntegrityError
from tensor_dedup.loader.deferred.layer_records import structure_of
from tensor_dedup.loader.deferred.recipe import (
    RecipeBook,
    live_writes,
    needs_base,
    only_moves,
    references,
    sources_of,
    whole_source,
)
from tensor_dedup.loader.deferred.recipe_lookup import RecipeLookup
from tensor_dedup.loader.deferred.sharing_plan import SharingPlan
from tensor_dedup.loader.residents.provider import HostProvider
from vllm_runs import deferring
from vllm_runs.deferring import Load, Weights, module

VALUES = torch.arange(16, dtype=torch.float32).view(4, 4)


def checkpoint(folder: Path, **changed: torch.Tensor) -> Path:
    tensors = {"w": VALUES, "v": VALUES * 2, "s": torch.tensor(0.5), **changed}
    return deferring.save(folder / f"{len(list(folder.iterdir()))}.safetensors", tensors)


def recipe(path: Path, load: Load, initial: float = 7.0) -> str:
    with deferring.deferred(module(p=torch.full((4, 4), initial)), path, load) as run:
        return run.recipe("p")


def copy(m: Any, w: Weights) -> None:
    m.p.data.copy_(w["w"])


def test_equal_bytes_in_another_file_give_the_same_recipe(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path), checkpoint(tmp_path, v=VALUES + 1)
    assert recipe(first, copy) == recipe(second, copy)


def test_one_other_bit_gives_another_recipe(tmp_path: Path) -> None:
    other = VALUES.clone()
    other.view(torch.int32)[3, 3] ^= 1
    assert recipe(checkpoint(tmp_path), copy) != recipe(checkpoint(tmp_path, w=other), copy)


def test_equal_bytes_of_another_type_or_shape_give_another_recipe(tmp_path: Path) -> None:
    def load(m: Any, w: Weights) -> None:
        m.p.data.view(-1)[: w["w"].numel()].copy_(w["w"].reshape(-1))

    paths = [
        checkpoint(tmp_path),
        checkpoint(tmp_path, w=VALUES.view(torch.int32)),
        checkpoint(tmp_path, w=VALUES.reshape(2, 8)),
    ]
    assert len({recipe(path, load) for path in paths}) == 3


def _loads() -> dict[str, Load]:
    square = torch.arange(16.0).view(4, 4)
    return {
        "copy": copy,
        "other source": lambda m, w: m.p.data.copy_(w["v"]),
        "turned": lambda m, w: m.p.data.copy_(w["w"].t()),
        "into the turned": lambda m, w: m.p.data.t().copy_(w["w"].clone()),
        "rows": lambda m, w: [m.p.data[:2].copy_(w["w"][:2]), m.p.data[2:].copy_(w["v"][2:])],
        "rows, exchanged": lambda m, w: [
            m.p.data[2:].copy_(w["w"][:2]),
            m.p.data[:2].copy_(w["v"][2:]),
        ],
        "a part": lambda m, w: m.p.data[:3].copy_(w["w"][:3]),
        "one order": lambda m, w: [m.p.data[:3].copy_(w["w"][:3]), m.p.data[1:].copy_(w["v"][1:])],
        "the other": lambda m, w: [m.p.data[1:].copy_(w["v"][1:]), m.p.data[:3].copy_(w["w"][:3])],
        "scaled": lambda m, w: m.p.data.copy_(w["w"] * 2.0),
        "scaled otherwise": lambda m, w: m.p.data.copy_(w["w"] * 3.0),
        "added": lambda m, w: m.p.data.copy_(w["w"] + 2.0),
        "scaled in place": lambda m, w: m.p.data.copy_(w["w"]).mul_(2.0),
        "by half": lambda m, w: m.p.data.copy_(w["w"].half()),
        "by bfloat16": lambda m, w: m.p.data.copy_(w["w"].bfloat16()),
        "joined": lambda m, w: m.p.data.copy_(torch.cat([w["w"][:2], w["v"][:2]])),
        "joined otherwise": lambda m, w: m.p.data.copy_(torch.cat([w["v"][:2], w["w"][:2]])),
        "constant": lambda m, w: m.p.data.copy_(w["w"] * square),
        "constant, turned": lambda m, w: m.p.data.copy_(w["w"] * square.t()),
        # One layout follows from the other, so that only the layout tells these two apart.
        "laid out by a constant": lambda m, w: m.p.data.copy_((square * w["s"]).t()),
        "laid out by it turned": lambda m, w: m.p.data.copy_(square.t().contiguous().t() * w["s"]),
        "filled": lambda m, w: m.p.data.fill_(1.0),
        "filled otherwise": lambda m, w: m.p.data.fill_(2.0),
        "nothing": lambda m, w: None,
    }


def test_recipes_are_equal_exactly_where_bytes_are(tmp_path: Path) -> None:
    """No two of these programs give the same bytes, but the pair that only is written twice."""
    path = checkpoint(tmp_path, w=torch.rand(4, 4), v=torch.rand(4, 4))
    by_recipe: dict[str, bytes] = {}
    for name, load in _loads().items():
        made = deferring.real(module(p=torch.full((4, 4), 7.0)), path, load)["p"]
        found = recipe(path, load)
        assert by_recipe.setdefault(found, made) == made, name
        assert recipe(path, load) == found, name
    assert len(by_recipe) == len(_loads())


_COMPUTED = {
    "scaled", "scaled otherwise", "added", "scaled in place", "by half", "by bfloat16", "constant",
    "constant, turned", "laid out by a constant", "laid out by it turned",
}  # fmt: skip


def test_a_recipe_only_moves_bytes_where_nothing_is_computed(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    found = set()
    for name, load in _loads().items():
        with deferring.deferred(module(p=torch.full((4, 4), 7.0)), path, load) as run:
            if not only_moves(run.view("p")):
                found.add(name)
    assert found == _COMPUTED


@pytest.mark.parametrize("name", ["rows", "joined", "turned", "scaled", "by half"])
def test_the_settings_of_the_process_are_in_the_key_of_what_is_computed_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = module(p=torch.full((4, 4), 7.0))
    with deferring.deferred(model, checkpoint(tmp_path), _loads()[name]) as run:
        run.recipe("p")
        keys = set()
        for threads in ("3", "5"):
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
            provider = HostProvider()
            plan = SharingPlan(TensorDedupConfig(), provider, run.evaluator)
            keys.add(RecipeLookup(plan, provider, run.book).key(run.parameters["p"]))
    assert len(keys) == (2 if name in _COMPUTED else 1)


def test_a_join_of_two_types_is_computed(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, v=VALUES.half())

    def load(m: Any, w: Weights) -> None:
        m.p.data.copy_(torch.cat([w["w"][:2], w["v"][:2]]))

    with deferring.deferred(module(p=torch.zeros(4, 4)), path, load) as run:
        assert not only_moves(run.view("p"))


def test_the_same_numbers_in_another_layout_are_other_recipes(tmp_path: Path) -> None:
    """Square, so that shape, strides and the constant's digest are equal."""
    path = checkpoint(tmp_path)
    constant = torch.rand(4, 4)
    turned = constant.t().contiguous().t()

    def straight(m: Any, w: Weights) -> None:
        m.p.data.copy_((constant * w["s"]).t())

    def crossed(m: Any, w: Weights) -> None:
        m.p.data.copy_(turned * w["s"])

    made = [deferring.real(module(p=torch.zeros(4, 4)), path, f)["p"] for f in (straight, crossed)]
    assert made[0] != made[1]
    assert recipe(path, straight) != recipe(path, crossed)


def test_what_the_constructor_left_counts_only_where_it_stays(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    assert recipe(path, copy, initial=1.0) == recipe(path, copy, initial=2.0)

    def part(m: Any, w: Weights) -> None:
        m.p.data[:3].copy_(w["w"][:3])

    assert recipe(path, part, initial=1.0) == recipe(path, part, initial=1.0)
    assert recipe(path, part, initial=1.0) != recipe(path, part, initial=2.0)


def test_what_is_hidden_by_later_writes_does_not_count(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)

    def twice(m: Any, w: Weights) -> None:
        m.p.data.copy_(w["v"])
        m.p.data.add_(1)
        m.p.data.copy_(w["w"])

    assert recipe(path, twice) == recipe(path, copy)
    with deferring.deferred(module(p=torch.zeros(4, 4)), path, twice) as run:
        assert [s.spec.name for s in run.parameters["p"].sources] == ["w"]
        assert whole_source(run.view("p")) is run.file.tensors["w"]


def test_overlapping_writes_do_not_pass_for_full_coverage(tmp_path: Path) -> None:
    """Three rows twice are as many bytes as six, and one of four rows is still missing."""
    path = checkpoint(tmp_path)

    def load(m: Any, w: Weights) -> None:
        m.p.data[:3].copy_(w["w"][:3])
        m.p.data[:3].copy_(w["v"][:3])

    with deferring.deferred(module(p=torch.full((4, 4), 7.0)), path, load) as run:
        view = run.view("p")
        assert needs_base(view.storage, view.version)
        assert run.make("p")[3].tolist() == [7.0] * 4


def test_memory_that_nobody_wrote_is_never_shared(tmp_path: Path) -> None:
    def load(m: Any, w: Weights) -> None:
        scratch = torch.empty_like(m.p.data)
        scratch[:3].copy_(w["w"][:3])
        m.p.data.copy_(scratch)

    with deferring.deferred(module(p=torch.zeros(4, 4)), checkpoint(tmp_path), load) as run:
        assert run.reason("p") == "part of it is never written"

    def whole(m: Any, w: Weights) -> None:
        scratch = torch.empty_like(m.p.data)
        scratch[:3].copy_(w["w"][:3])
        scratch[2:].copy_(w["v"][2:])
        m.p.data.copy_(scratch)

    with deferring.deferred(module(p=torch.zeros(4, 4)), checkpoint(tmp_path), whole) as run:
        assert run.reason("p") is None


def test_a_recipe_does_not_depend_on_addresses(tmp_path: Path) -> None:
    """Nested lists of arguments hold tensors too: their names must not be where they lie."""
    path = checkpoint(tmp_path)
    kept: list[object] = []

    def joined(m: Any, w: Weights) -> None:
        kept.append(torch.empty(1000))
        m.p.data.copy_(torch.cat([w["w"][:2], torch.ones(1, 4), w["v"][:1]], dim=0))

    assert len({recipe(path, joined) for _ in range(5)}) == 1


def test_a_recipe_before_a_digest_is_an_error(tmp_path: Path) -> None:
    with (
        deferring.deferred(module(p=torch.zeros(4, 4)), checkpoint(tmp_path), copy) as run,
        pytest.raises(IntegrityError, match="w was not hashed"),
    ):
        run.book.digest(run.view("p"))


def test_a_structure_leaves_the_bytes_out(tmp_path: Path) -> None:
    def structure(path: Path, load: Load) -> str:
        with deferring.deferred(module(p=torch.zeros(4, 4)), path, load) as run:
            return structure_of(list(run.parameters.values()))[0]

    first, second = checkpoint(tmp_path), checkpoint(tmp_path, w=VALUES + 1)
    assert structure(first, copy) == structure(second, copy)
    assert structure(first, copy) != structure(first, lambda m, w: m.p.data.copy_(w["w"] * 2))


def test_thousands_of_writes_are_looked_at_once_each(tmp_path: Path) -> None:
    """A mixture of experts: asking again must not go through all writes again and again."""
    count = 600
    names = [f"e{number}" for number in range(count)]
    path = deferring.save(
        tmp_path / "experts.safetensors", {n: torch.full((2, 3), i) for i, n in enumerate(names)}
    )

    def load(m: nn.Module, w: Weights) -> None:
        for number, name in enumerate(names):
            m.get_parameter("p").data[number].copy_(w[name])

    with deferring.deferred(module(p=torch.zeros(count, 2, 3)), path, load) as run:
        view = run.view("p")
        assert len(live_writes(view.storage, view.version)) == count
        assert not needs_base(view.storage, view.version)
        assert view.storage.based == {count: False}
        assert len(sources_of(view)) == len(list(references(view))) == count
        assert run.make("p")[:, 0, 0].tolist() == list(range(count))
        assert set(run.file.reads.values()) == {1}
        assert RecipeBook().digest(view) == run.book.digest(view)
