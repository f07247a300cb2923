"""Load base and fine-tune of architectures, plainly and shared; write down what happened.

Checkpoints are made under ROOT where there are none; hints go beside the result, a new index for
each architecture, so that a checkpoint is unknown at its first load and known at its second.

In a process of its own: vLLM makes the groups that mixtures of experts need only when the first
engine of a process is one. So these come first, and a process has every architecture after them.
"""

import gc
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import msgspec
import pytest

from files import reads
from models import tiny_checkpoints as checkpoints
from processes import forked
from tensor_dedup.loader.checkpoint_io.hints import ENVIRONMENT
from tensor_dedup.loader.deferred import evaluate, session
from tensor_dedup.loader.report import ModelReport
from tensor_dedup.loader.residents.registry import registry
from vllm_runs import engines, plain, planned

if TYPE_CHECKING:
    from vllm import LLM

# Made from the weights by attention's own processing: parameters that no loading code assembles.
DERIVED = ("W_UV", "W_UK_T")
_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "gpt_oss")
_ORDER = (*_EXPERTS, *(a for a in checkpoints.ARCHITECTURES if a not in _EXPERTS))


class Load(msgspec.Struct):
    """One load that shares: what it was of, what it read, and how it compares.

    `shared` is by form (`engines.forms`) against the model that was there before, None for the
    first. `ranges` are those of tensor data in the file, absolute.
    """

    what: str
    equal_outputs: bool
    shared: dict[str, bool] | None
    data_bytes: int
    header_bytes: int
    ranges: list[tuple[int, int]]
    read_twice: int
    unseen: int
    report: ModelReport


class Result(msgspec.Struct):
    """One architecture. `assembled`: by name of each parameter, does plain vLLM assemble the same
    for both? `unseen`: what a plain load read beside the checkpoint. `again`: a load of the model
    that is there, `planned`: did it follow a plan, and `differing`: the modules that hold something
    else than those of the model that was there."""

    assembled: dict[str, bool]
    different_outputs: bool
    left_alive: int
    unseen: int
    loads: list[Load]
    again: Load
    planned: bool
    differing: list[str]


def run(arch: str, root: Path) -> Result:
    """Plain base and fine-tune; then shared, unknown and known, two at a time in memory."""
    pooling = arch in checkpoints.POOLING
    pair = checkpoints.make(arch, root)
    expected, held, unseen = {}, {}, 0
    for path in (pair.base, pair.fine_tune):
        with reads.counted(path) as seen, engines.assembled() as held[path]:
            llm = plain.engine(path, pooling=pooling)
        # That of the second counts: the first imports what the architecture needs.
        unseen = seen.unseen()
        expected[path] = plain.outputs(llm, pooling=pooling)
        engines.drop(llm)
        del llm
        gc.collect()
    loads: list[Load] = []
    before: LLM | None = None
    # Each known load meets the other model: the first of them when it was still unknown.
    for path in (pair.base, pair.fine_tune) * 2:
        llm, load = _load(path, before, expected[path], pooling)
        loads.append(load)
        if before is not None:
            engines.drop(before)
        before = llm
        del llm
        gc.collect()
    assert before is not None
    with planned.counted() as followed:
        llm, again = _load(pair.fine_tune, before, expected[pair.fine_tune], pooling)
    differing = planned.differing(plain.model(llm), plain.model(before))
    engines.drop(before, llm)
    del before, llm
    gc.collect()
    same = engines.equal(held[pair.base], held[pair.fine_tune])
    return Result(
        assembled={name: name in same for name in held[pair.base]},
        different_outputs=expected[pair.base] != expected[pair.fine_tune],
        left_alive=len(registry.residents()) + len(registry.records()),
        unseen=unseen,
        loads=loads,
        again=again,
        planned=bool(followed),
        differing=differing,
    )


def _load(path: Path, before: "LLM | None", expected: object, pooling: bool) -> "tuple[LLM, Load]":
    with reads.counted(path) as seen:
        llm = engines.sharing(path, pooling=pooling)
    shared = None
    if before is not None:
        shared = engines.forms(plain.model(llm), plain.model(before))
    return llm, Load(
        what=path.name,
        equal_outputs=plain.outputs(llm, pooling=pooling) == expected,
        shared=shared,
        data_bytes=seen.data_bytes(),
        header_bytes=seen.header_bytes(),
        ranges=seen.ranges(path / checkpoints.WEIGHTS),
        read_twice=len(seen.twice()),
        unseen=seen.unseen(),
        report=engines.last_report(),
    )


def in_turn(archs: Sequence[str], base: Path, result: Path, run: Callable[[str], Any]) -> None:
    """Run architectures, of the first of which `base` is a checkpoint, each with hints of its own.

    `{architecture: what it returned}` as JSON holds those that are done.
    """
    results = {}
    engines.warm_up(base, pooling=archs[0] in checkpoints.POOLING)
    for number, arch in enumerate(archs):
        os.environ[ENVIRONMENT] = str(result.parent / f"{arch}.sqlite")
        # Every other one takes the way of large tensors; those here are all small.
        with ExitStack() as small:
            if number % 2:
                small.enter_context(patch.object(session, "STREAM_BYTES", 0))
                small.enter_context(patch.object(evaluate, "MAX_AHEAD_BYTES", 0))
            results[arch] = run(arch)
        result.write_bytes(msgspec.json.encode(results))


def apart(
    run_all: Callable[[Path, Path, list[str]], None], root: Path, request: pytest.FixtureRequest
) -> bytes:
    """Have `main` of this module, or another as it, run what the tests of a module ask for by their
    `arch`, in a process of its own.

    Return what it has written; what it said is in the test's output.
    """
    asked = {
        item.callspec.params["arch"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and "arch" in getattr(item, "fixturenames", ())
        if item.path == request.path and hasattr(item, "callspec")
    }
    archs = [arch for arch in _ORDER if arch in asked]
    file, log = root / "result.json", root / "log"
    arguments = (root / "checkpoints", file, archs)
    process = forked.start(run_all, *arguments, environ=os.environ, log=log)
    try:
        process.join()
    finally:
        process.kill()
        process.join()
    sys.stderr.write(log.read_text(errors="replace")[-10_000:])
    return file.read_bytes()


def main(root: Path, result: Path, archs: list[str]) -> None:
    """Run these architectures, and write the result of each."""
    for arch in archs:
        checkpoints.make(arch, root)
    engines.leave_alone(*root.rglob(checkpoints.WEIGHTS))
    in_turn(archs, checkpoints.make(archs[0], root).base, result, lambda arch: run(arch, root))
