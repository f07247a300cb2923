"""When digests lie: a hash under which everything collides, and byte-by-byte comparison.

Mixtures of experts run in a process of their own, where one can be the first model.
"""

import gc
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from safetensors.torch import save_file

from models import tiny_checkpoints as checkpoints
from processes import fresh, process_state
from tensor_dedup import report
from tensor_dedup.loader.not_shared import NotShared
from vllm_runs import engines, plain, shared

if TYPE_CHECKING:
    from vllm import LLM

    from tensor_dedup.digest import Fill
    from tensor_dedup.loader.report import ModelReport

pytestmark = pytest.mark.vllm

UNTIED = "llama_tied, but for a head in the file"
# Biases, and heads that only the checkpoint unties; in long runs, tied ones and ones of their own.
MORE_DENSE = ("llama_tied", "llama")
DENSE = ("opt", UNTIED, *(pytest.param(arch, marks=pytest.mark.long) for arch in MORE_DENSE))
EXPERTS = ("mixtral", "qwen3_moe")
ONE_DIGEST = "0" * 64


@contextmanager
def everything_collides(root: Path) -> Iterator[None]:
    """Whatever is hashed, of a source or of a final tensor, has the same digest.

    What is remembered of files meanwhile is a lie, and stays in `root`.
    """

    def submit(
        data: Any, _algorithm: str, fill: "Fill | None" = None, _leaves: object = None
    ) -> "Future[str]":
        if fill is not None:
            fill(memoryview(data), 0)
        future: Future[str] = Future()
        future.set_result(ONE_DIGEST)
        return future

    with (
        mock.patch.dict(os.environ, TENSOR_DEDUP_HINTS=str(root / "lies.sqlite")),
        mock.patch("tensor_dedup.loader.checkpoint_io.sources.submit", submit),
        mock.patch("tensor_dedup.loader.checkpoint_io.sources.digest", return_value=ONE_DIGEST),
    ):
        yield


def load(path: Path, **config: Any) -> "tuple[LLM, ModelReport]":
    llm = shared.engine(path, **config)
    return llm, report().models[-1]


def plainly(*paths: Path) -> list[tuple[Any, dict[str, bytes]]]:
    """Answers and parameters of plain engines."""
    found = []
    for path in paths:
        llm = plain.engine(path)
        found.append((plain.outputs(llm), shared.contents(llm)))
        plain.let_go(llm)
    return found


def pair(arch: str, root: Path) -> tuple[Path, Path]:
    """Two checkpoints that differ in every tensor, with equal names and shapes."""
    base = _with_a_head(root) if arch == UNTIED else checkpoints.make(arch, root).base
    other = checkpoints.same_header(base, root / f"{arch}-other")
    assert len(checkpoints.different(base, other)) == len(checkpoints.tensors(base))
    shared.quiet(base, other)
    return base, other


def _with_a_head(root: Path) -> Path:
    """A llama whose configuration ties its head, and whose file has another one all the same."""
    tied = checkpoints.make("llama_tied", root).base
    tensors = checkpoints.tensors(tied)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * -1.5
    untied = shutil.copytree(tied, root / "untied")
    save_file(tensors, untied / checkpoints.WEIGHTS, metadata={"format": "pt"})
    return untied


@pytest.fixture(scope="module")
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    first = checkpoints.make("llama", tmp_path_factory.mktemp("collisions")).base
    engines.warm_up(first)


@pytest.fixture(autouse=True)
def _dropped() -> Iterator[None]:
    yield
    gc.collect()


@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("arch", DENSE)
def test_nothing_wrong_is_shared_when_every_byte_is_compared(arch: str, tmp_path: Path) -> None:
    compare_every_byte(arch, tmp_path)


@pytest.mark.parametrize(
    "archs", [EXPERTS[:1], pytest.param(EXPERTS, marks=pytest.mark.long)], ids=["one", "all"]
)
def test_no_wrong_experts_are_shared_when_every_byte_is_compared(
    archs: tuple[str, ...], tmp_path: Path
) -> None:
    fresh.call_forked(compare_experts, archs, tmp_path)


def compare_experts(archs: tuple[str, ...], root: Path) -> None:
    engines.warm_up(checkpoints.make(EXPERTS[0], root).base)
    for arch in archs:
        compare_every_byte(arch, root)
    compare_nothing(EXPERTS[0], root / "control")


def compare_every_byte(arch: str, root: Path) -> None:
    base, other = pair(arch, root)
    of_base, of_other = plainly(base, other)
    assert of_base[0] != of_other[0]
    others = process_state.remaining()
    with everything_collides(root):
        for known in (False, True):
            _compare(base, other, of_base, of_other, known=known)
            assert not process_state.remaining().beyond(others)


def _compare(base: Path, other: Path, of_base: Any, of_other: Any, *, known: bool) -> None:
    first, _ = load(base, verify_bytes=True)
    again, of_again = load(base, verify_bytes=True)
    assert not shared.nothing(first, again), "equal bytes are kept apart, so this proves nothing"
    assert of_again.known
    third, found = load(other, verify_bytes=True)

    assert found.known is known
    assert shared.nothing(first, third)
    assert shared.nothing(again, third)
    for llm, (answers, parameters) in ((first, of_base), (again, of_base), (third, of_other)):
        assert shared.contents(llm) == parameters
        assert plain.outputs(llm) == answers
    assert found.collisions > 0
    assert NotShared.COLLISION in {reason for _, reason in found.skipped}
    assert found.shared_bytes == 0
    for llm in (first, again, third):
        plain.let_go(llm)


@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("arch", ["llama", pytest.param(UNTIED, marks=pytest.mark.long)])
def test_without_comparing_the_wrong_bytes_are_shared(arch: str, tmp_path: Path) -> None:
    """The control: where nobody compares, these tests would notice."""
    compare_nothing(arch, tmp_path)


def compare_nothing(arch: str, root: Path) -> None:
    base, other = pair(arch, root)
    [_, (answers, _)] = plainly(base, other)
    with everything_collides(root):
        first, _ = load(base, verify_bytes=False)
        third, found = load(other, verify_bytes=False)
        # A fused weight that is not packed is looked up by the digest of its parts together, which
        # is not made of lies.
        assert shared.everything(first, third) or not plain.packs()
        assert not shared.nothing(first, third)
        assert found.collisions == 0
        assert plain.outputs(third) != answers
        plain.let_go(first)
        plain.let_go(third)


@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize(
    "algorithm", ["xxhash64", pytest.param("xxh3_128", marks=pytest.mark.long)]
)
def test_a_hash_that_may_collide_is_not_trusted_by_default(algorithm: str, tmp_path: Path) -> None:
    base, other = pair("llama", tmp_path)
    [(of_base, _), (of_other, _)] = plainly(base, other)
    with everything_collides(tmp_path):
        first, _ = load(base, hash_algorithm=algorithm)
        again, _ = load(base, hash_algorithm=algorithm)
        third, found = load(other, hash_algorithm=algorithm)
        assert not shared.nothing(first, again)
        assert shared.nothing(first, third)
        assert found.collisions > 0
        assert plain.outputs(first) == plain.outputs(again) == of_base
        assert plain.outputs(third) == of_other
        for llm in (first, again, third):
            plain.let_go(llm)


@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("fate", ["kept", "deleted", "rewritten"])
def test_a_packed_layer_is_compared_with_its_donors_file(fate: str, tmp_path: Path) -> None:
    """No stub: what cannot be compared, for its file is gone or another, is not equal."""
    base = checkpoints.make("llama", tmp_path).base
    donor = checkpoints.same(base, tmp_path / "donor")
    [(answers, _)] = plainly(base)
    first, _ = load(donor, verify_bytes=True)
    if fate == "deleted":
        shutil.rmtree(donor)
    elif fate == "rewritten":
        (donor / checkpoints.WEIGHTS).write_bytes((base / checkpoints.WEIGHTS).read_bytes())

    again, found = load(base, verify_bytes=True)

    # What is mapped is compared in memory: that needs no file.
    assert shared.shared_parameters(first, again) == shared.parameters(first).keys()
    kept = shared.shared_handlers(first, again)
    assert kept == (shared.handlers(first).keys() if fate == "kept" else set())
    assert bool(found.skipped) == (fate != "kept")
    assert plain.outputs(first) == plain.outputs(again) == answers
    plain.let_go(first)
    plain.let_go(again)


@pytest.mark.usefixtures("_warm")
def test_a_donor_whose_file_is_gone_is_no_collision(tmp_path: Path) -> None:
    """Packed weights can only be compared through the file that they were made from."""
    base = checkpoints.make("llama", tmp_path).base
    copy = tmp_path / "copy"
    shutil.copytree(base, copy)
    first, _ = load(base, verify_bytes=True)
    second, found = load(copy, verify_bytes=True)
    assert shared.everything(first, second), "equal bytes are kept apart, so this proves nothing"
    assert found.collisions == 0
    plain.let_go(second)
    (base / "model.safetensors").unlink()

    third, found = load(copy, verify_bytes=True)

    assert found.collisions == 0
    assert any("nothing to compare with" in why for _, why in found.skipped)
    assert shared.contents(third) == shared.contents(first)
    plain.let_go(third)
    plain.let_go(first)
