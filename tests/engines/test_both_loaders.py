"""vLLM and Transformers in one process: what one has loaded, the other finds."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from models import tiny_checkpoints as checkpoints
from processes import fresh
from tensor_dedup import report, shares_memory
from tensor_dedup.loader.load_lock import LOAD_LOCK
from tensor_dedup.patches.huggingface import model_load
from vllm_runs import plain, shared

pytestmark = pytest.mark.vllm

# Weights that vLLM keeps as the checkpoint has them; the others it fuses or pads.
WHOLE = ("o_proj.weight", "down_proj.weight", "norm.weight", "layernorm.weight")


def encoder(path: str, **options: Any) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(path, **options)


def common(llm: Any, model: Any) -> tuple[set[str], set[str]]:
    """Names of parameters with equal bytes in both, and of those that are one memory."""
    theirs = dict(model.named_parameters())
    pairs = {n: (p, theirs[n]) for n, p in shared.parameters(llm).items() if n in theirs}
    equal = {n for n, (a, b) in pairs.items() if a.shape == b.shape and torch.equal(a, b)}
    return equal, {name for name, pair in pairs.items() if shares_memory(*pair)}


def logits(model: Any) -> list[float]:
    with torch.no_grad():
        found: list[float] = model(torch.arange(8)[None]).logits.float().flatten().tolist()
    return found


def both(one: str, other: str) -> dict[str, Any]:
    """`one` by Transformers first, `other` by vLLM first."""
    alone = [logits(encoder(path)) for path in (one, other)]
    engines = [plain.engine(path) for path in (one, other)]
    first = encoder(one, tensor_dedup=True)
    engines.append(shared.engine(one, cpu_weights="plain"))
    by_vllm = report().models[-1].shared_bytes
    engines.append(shared.engine(other, cpu_weights="plain"))
    second = encoder(other, tensor_dedup=True)
    answers = [plain.tokens(plain.outputs(each)) for each in engines]
    return {
        "after Transformers": common(engines[2], first),
        "after vLLM": common(engines[3], second),
        "found by vLLM": by_vllm,
        "found by Transformers": report().models[-1].shared_bytes,
        "as alone": [logits(first), logits(second)] == alone,
        "as plain vLLM": answers[:2] == answers[2:],
    }


def test_a_text_encoder_of_one_is_found_by_the_other(tmp_path: Path) -> None:
    one, other = (str(checkpoints.make(arch, tmp_path).base) for arch in ("llama", "qwen2"))
    found = fresh.call_forked(both, one, other)
    for order in ("after Transformers", "after vLLM"):
        equal, same = found[order]
        assert equal == same
        assert {kind for kind in WHOLE if any(n.endswith(kind) for n in same)} == set(WHOLE)
    assert found["found by vLLM"] > 0
    assert found["found by Transformers"] > 0
    assert found["as alone"]
    assert found["as plain vLLM"]


def test_they_wait_for_one_lock(tmp_path: Path) -> None:
    from tensor_dedup.patches.vllm import loader

    assert vars(loader)["LOAD_LOCK"] is LOAD_LOCK
    path = str(checkpoints.make("llama", tmp_path).base)
    loaded = threading.Event()

    def load() -> None:
        encoder(path, tensor_dedup=True)
        loaded.set()

    thread = threading.Thread(target=load)
    with LOAD_LOCK:
        thread.start()
        assert not loaded.wait(1.0)
        assert model_load.under_way() is None
    thread.join()
    assert loaded.is_set()
