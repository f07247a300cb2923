"""Build a model's final tensors in a memory manager before they are needed, and exit.

    python -m tensor_dedup.patches.vllm.preload --socket SOCKET [--engine-args JSON] CHECKPOINT

The manager runs no models, so this is a process of its own. It loads the checkpoint with the
installed vLLM. Set VLLM_ENABLE_V1_MULTIPROCESSING as for the engines that will use the tensors: the
number of vLLM's threads depends on it, and layer keys depend on that number. The tensors stay
pinned under the checkpoint's name until `tensor-dedup unpin`. The exit status is 1 if not all could
be put into the manager.
"""

import json
import sys
from typing import Any

import click

from tensor_dedup.errors import TensorDedupError
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.client.names import checkpoint_name

# Engine arguments do not change weights, but for those the user gives; the engine is dropped.
_SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20, "enforce_eager": True}


def build(path: str, socket: str, engine_args: dict[str, Any]) -> str | None:
    """Load the checkpoint `path` in an engine, and pin its tensors in the manager at `socket`.

    `engine_args` are further arguments of vLLM's engine. Return None on success, otherwise the
    reason for one of these failures:

    * Nothing could be pinned.
    * No loaded model is shared completely. The tensors that could be shared stay pinned.
    """
    from vllm import LLM

    from tensor_dedup.loader.report import report

    given = {**_SMALL, **engine_args}
    dedup = {**(given.pop("tensor_dedup", None) or {}), "memory_manager": socket}
    llm = LLM(model=path, tensor_dedup=dedup, **given)
    loaded = report().models
    if not loaded:
        return "the process that loaded it left no report"
    lent = sum(model.total_bytes for model in loaded if not model.skipped)
    with Admin(socket) as admin:
        # Under the name that its tensors have there, which for a stored one is not its folder's.
        pinned = admin.pin(checkpoint_name(loaded[-1].name))
        if not pinned.count:
            admin.pin(checkpoint_name(loaded[-1].name), pinned=False)
    del llm
    if not lent or not pinned.count:
        reasons = sorted({reason for model in loaded for _, reason in model.skipped})
        return "; ".join(reasons[:3]) or "the manager holds nothing of it"
    sys.stderr.write(f"{path}: {pinned.count} tensors, {pinned.nbytes} bytes pinned\n")
    return None


@click.command()
@click.option("--socket", required=True)
@click.option("--engine-args", default="{}")
@click.argument("checkpoint")
def main(socket: str, engine_args: str, checkpoint: str) -> None:
    """Build the final tensors of CHECKPOINT in the memory manager at SOCKET."""
    try:
        given = json.loads(engine_args)
        reason = build(checkpoint, socket, given)
    except (TensorDedupError, ValueError, RecursionError, OSError) as error:
        reason = str(error)
    if reason is not None:
        raise SystemExit(f"{checkpoint}: not preloaded: {reason}")


if __name__ == "__main__":
    main()
