"""Load base and fine-tune of architectures with a large vocabulary; write down what leaves do.

As `pair_run`, which says why it is a process of its own. Checkpoints are removed when they have
been loaded. Embedding and head are of five leaves; one row of the fine-tune's third differs, and it
has more rows. So each of them consists of four pieces: the base's, its own, and again.
"""

import gc
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from models import tiny_checkpoints as checkpoints
from tensor_dedup import shared_bytes, verify
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.loader.report import ModelReport
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.unsharing.lookup import residents_of
from vllm_runs import engines, pair_run, plain, shared

if TYPE_CHECKING:
    from vllm import LLM

# All architectures have 128 numbers of two bytes in a row.
ROWS_OF_A_LEAF = LEAF_BYTES // 256
ROWS = 5 * ROWS_OF_A_LEAF
NEW_ROWS = 256
CHANGED_ROW = 20_000
_PROMPTS = [*plain.PROMPTS, (7, 9_000, CHANGED_ROW, 26_000, 33_000, ROWS - 1)]
# The fine-tune's new rows.
_NEW = (7, ROWS, CHANGED_ROW, ROWS + NEW_ROWS - 1)


class Load(msgspec.Struct):
    """One load of the fine-tune beside its base, and how it compares with plain vLLM's.

    `pieces` is the number of them in every tensor of which a part is the base's. `common` are the
    bytes that both models have in one memory.
    """

    equal_outputs: bool
    pieces: list[int]
    common: int
    report: ModelReport


class Result(msgspec.Struct):
    """One architecture: the fine-tune when it is unknown, and when it is known.

    `bases_outputs` are equal to plain vLLM's: before the fine-tune is loaded, beside it, and when
    it was overwritten. `alone` is whether the fine-tune's are when its base is gone. `changed` are
    the bytes of the leaves of its file that differ.
    """

    different_outputs: bool
    loads: list[Load]
    bases_outputs: list[bool]
    alone: bool
    verified: bool
    left_alive: int
    changed: int


def run(arch: str, root: Path) -> Result:
    """Load both plainly; then sharing, the fine-tune unknown and known."""
    pooling = arch in checkpoints.POOLING
    pair = checkpoints.make_large(arch, root, ROWS, NEW_ROWS, CHANGED_ROW)
    changed = _changed_leaves(pair)
    engines.leave_alone(*root.rglob(checkpoints.WEIGHTS))

    paths = pair.base, pair.fine_tune
    expected = []
    with plain.kept_as("plain"):
        for path in paths:
            llm = plain.engine(path, pooling=pooling)
            expected.append(_outputs(llm, path, pooling))
            engines.drop(llm)
            del llm
            gc.collect()
    of_base, of_tune = expected
    base = engines.sharing(pair.base, pooling=pooling, cpu_weights="plain")
    bases = [_outputs(base, pair.base, pooling) == of_base]
    tune, unknown = _load(pair.fine_tune, base, of_tune, pooling)
    bases.append(_outputs(base, pair.base, pooling) == of_base)
    _overwrite(tune)
    bases.append(_outputs(base, pair.base, pooling) == of_base)
    engines.drop(tune)
    del tune
    gc.collect()
    tune, known = _load(pair.fine_tune, base, of_tune, pooling)
    bases.append(_outputs(base, pair.base, pooling) == of_base)
    verified = verify().ok
    engines.drop(base)
    del base
    gc.collect()
    alone = _outputs(tune, pair.fine_tune, pooling) == of_tune
    engines.drop(tune)
    del tune
    gc.collect()
    shutil.rmtree(root / arch)
    return Result(
        different_outputs=of_base != of_tune[: len(_PROMPTS)],
        loads=[unknown, known],
        bases_outputs=bases,
        alone=alone,
        verified=verified,
        left_alive=len(registry.residents()) + len(registry.records()),
        changed=changed,
    )


def _load(path: Path, base: "LLM", expected: Any, pooling: bool) -> "tuple[LLM, Load]":
    tune = engines.sharing(path, pooling=pooling, cpu_weights="plain")
    mine, theirs = shared.parameters(tune), shared.parameters(base)
    made = [found for _, found in residents_of(mine.values()).values()]
    return tune, Load(
        equal_outputs=_outputs(tune, path, pooling) == expected,
        pieces=[len(each.extents) for each in made if len(each.extents) > 1],
        common=sum(
            shared_bytes(each, theirs[name])
            for name, each in mine.items()
            if not name.endswith(pair_run.DERIVED)
        ),
        report=engines.last_report(),
    )


def _outputs(llm: "LLM", path: Path, pooling: bool) -> Any:
    prompts = [*_PROMPTS, _NEW] if path.name == checkpoints.FINE_TUNE else _PROMPTS
    found = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return plain.outputs(llm, pooling=pooling, prompts=found)


def _overwrite(llm: "LLM") -> None:
    with torch.no_grad():
        for each in shared.parameters(llm).values():
            each.zero_()


def _changed_leaves(pair: checkpoints.Pair) -> int:
    """How many bytes the leaves of the fine-tune's file have that are not the base's."""
    old, new = checkpoints.tensors(pair.base), checkpoints.tensors(pair.fine_tune)
    found = 0
    for name in pair.changed:
        mine, theirs = shared.raw(new[name]), shared.raw(old[name])
        starts = range(0, len(mine), LEAF_BYTES)
        leaves = ((mine[at : at + LEAF_BYTES], theirs[at : at + LEAF_BYTES]) for at in starts)
        found += sum(len(leaf) for leaf, other in leaves if leaf != other)
    return found


def main(root: Path, result: Path, archs: list[str]) -> None:
    """Run these architectures, and write the result of each."""
    first = checkpoints.make(archs[0], root / "first").base
    pair_run.in_turn(archs, first, result, lambda arch: run(arch, root))
