"""`audit=1.0`: every hit is rebuilt and compared, on every architecture; and it does find lies."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from models import tiny_checkpoints as checkpoints
from processes import fresh
from tensor_dedup import report
from tensor_dedup.errors import AuditError
from tensor_dedup.loader.deferred.layer_records import LayerRecord
from tensor_dedup.loader.deferred.recipe import RecipeBook
from tensor_dedup.loader.residents.registry import registry
from vllm_runs import engines, plain, shared

if TYPE_CHECKING:
    from tensor_dedup.loader.deferred.storage import View

pytestmark = pytest.mark.vllm

EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2")


REST = tuple(arch for arch in checkpoints.ARCHITECTURES if arch not in EXPERTS)


@pytest.mark.parametrize(
    "archs",
    [
        pytest.param((*EXPERTS, *REST), id="all", marks=pytest.mark.long),
        pytest.param(("mixtral", "deepseek_v2", "llama_tied", "gpt2"), id="some"),
    ],
)
def test_every_architecture_passes(archs: tuple[str, ...], tmp_path: Path) -> None:
    """In a process of its own, mixtures of experts first: vLLM makes their groups only then."""
    assert set(archs) <= set(checkpoints.ARCHITECTURES)

    read = fresh.call_forked(audit_every_hit, list(archs), tmp_path)

    assert read.keys() == set(archs)
    for arch, (rebuilt, of_shared) in read.items():
        # A known checkpoint whose layers are all resident is read for nothing but the audit.
        assert rebuilt >= of_shared > 0, f"{arch}: {rebuilt} of {of_shared} bytes were rebuilt"


def audit_every_hit(archs: list[str], root: Path) -> dict[str, tuple[int, int]]:
    """Of an audited second load, by architecture: bytes read, and bytes of sources shared."""
    found = {}
    pairs = {arch: checkpoints.make(arch, root) for arch in archs}
    shared.quiet(*(pair.base for pair in pairs.values()))
    engines.warm_up(pairs[archs[0]].base)
    for arch, pair in pairs.items():
        pooling = arch in checkpoints.POOLING
        donor = shared.engine(pair.base, pooling=pooling)
        audited = shared.engine(pair.base, pooling=pooling, audit=1.0)
        checked = report().models[-1]
        tuned = shared.engine(pair.fine_tune, pooling=pooling, audit=1.0)
        assert shared.everything(donor, audited), arch
        assert not shared.nothing(donor, tuned), arch
        assert checked.known, arch
        assert not checked.collisions, arch
        found[arch] = checked.bytes_read, checked.source_bytes_shared
        for llm in (donor, audited, tuned):
            plain.let_go(llm)
        del donor, audited, tuned, llm
        gc.collect()
    return found


@contextmanager
def recipes_by_name(dimensions: int) -> Iterator[None]:
    """Recipes of tensors of so many dimensions name their sources by name: equal for any content.

    So the layers of any other checkpoint of this shape are hits, wrongly.
    """
    original = RecipeBook.digest

    def digest(self: RecipeBook, view: "View") -> str:
        if len(view.shape) != dimensions:
            return original(self, view)
        return original(RecipeBook(lambda source: ("source", source.spec.name)), view)

    with mock.patch.object(RecipeBook, "digest", digest):
        yield


def tampered(
    arch: str, root: Path, dimensions: int, config: dict[str, Any], is_named: Callable[[str], bool]
) -> None:
    """A wrong recipe shares wrongly, unless it is audited: then nothing is loaded."""
    base = checkpoints.make(arch, root).base
    other = checkpoints.same_header(base, root / "other")
    shared.quiet(other)
    llm = shared.engine(other, **config)  # from now on its digests are known
    answers, contents = plain.outputs(llm), shared.contents(llm)
    plain.let_go(llm)
    del llm
    gc.collect()

    with recipes_by_name(dimensions):
        donor = shared.engine(base, **config)
        before = set(registry.residents())
        wrong = shared.engine(other, **config)
        assert not shared.nothing(donor, wrong), "the tampered recipe leads nowhere"
        assert plain.outputs(wrong) != answers
        with pytest.raises(AuditError, match="was not loaded") as caught:
            shared.engine(other, audit=1.0, **config)

    assert is_named(str(caught.value.facts["tensor"])), caught.value
    plain.let_go(wrong)
    del wrong, caught
    gc.collect()
    assert set(registry.residents()) == before
    # The next load is right again.
    right = shared.engine(other, audit=1.0, **config)
    assert plain.outputs(right) == answers
    assert shared.contents(right) == contents
    plain.let_go(right)
    plain.let_go(donor)


@pytest.fixture(scope="module")
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    first = checkpoints.make("llama", tmp_path_factory.mktemp("audit")).base
    engines.warm_up(first)


@pytest.fixture(autouse=True)
def _dropped() -> Iterator[None]:
    yield
    gc.collect()


TAMPERED = {
    "packed layers": (2, {}, lambda name: "proj" in name or "head" in name or "embed" in name),
    "mapped matrices": (2, {"cpu_weights": "plain"}, lambda name: name.endswith(".weight")),
    "mapped parameters": (1, {}, lambda name: "norm" in name),
}


@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("case", TAMPERED)
def test_a_tampered_recipe_is_caught(case: str, tmp_path: Path) -> None:
    dimensions, config, is_named = TAMPERED[case]
    tampered("llama", tmp_path, dimensions, config, is_named)


def test_a_tampered_recipe_of_experts_is_caught(tmp_path: Path) -> None:
    fresh.call_forked(tamper_with_experts, tmp_path)


def tamper_with_experts(root: Path) -> None:
    engines.warm_up(checkpoints.make("mixtral", root).base)
    tampered("mixtral", root, 3, {}, lambda name: "model.layers." in name)


@pytest.mark.usefixtures("_warm")
def test_a_wrong_digest_of_a_packed_weight_is_caught(tmp_path: Path) -> None:
    """A packed copy cannot be compared; what its plain weight was, just before packing, can."""
    base = checkpoints.make("llama", tmp_path).base
    donor = shared.engine(base)
    again = shared.engine(base, audit=1.0)
    assert shared.everything(donor, again)
    records = [r for r in registry.records().values() if isinstance(r, LayerRecord)]
    assert records
    records[-1].plain_name = "0" * 64

    with pytest.raises(AuditError, match="packed weight"):
        shared.engine(base, audit=1.0)

    plain.let_go(donor)
    plain.let_go(again)
