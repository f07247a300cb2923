"""vLLM's part of a process of the demonstration. Imports this package only where it shares."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demonstration.resident import read_pages, resident

if TYPE_CHECKING:
    from vllm import LLM

NEW_TOKENS = 32
_LOGPROBS = 3


def prepare() -> None:
    """Import vLLM, whose cost is not the first model's."""
    import vllm  # noqa: F401


def load(path: str, config: dict[str, Any] | None, options: dict[str, Any]) -> "LLM":
    """Start an engine. `options["kv_cache_bytes"]`: room for its KV cache."""
    from vllm import LLM

    arguments: dict[str, Any] = {
        "model": path,
        "skip_tokenizer_init": True,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "enforce_eager": True,
        "disable_log_stats": True,
        "kv_cache_memory_bytes": options["kv_cache_bytes"],
        "seed": 0,
    }
    if config is not None:
        from tensor_dedup import TensorDedupConfig

        arguments["tensor_dedup"] = TensorDedupConfig(**config)
    return LLM(**arguments)


def facts(model: "LLM") -> dict[str, Any]:
    """Read every page of every parameter: the kernel counts only pages that were used.

    Then measure the engine's KV cache, which its load has added too.
    """
    model.apply_model(read_pages)
    return {"kv_cache": kv_cache(model)}


def answer(model: "LLM", path: str, number: int, options: dict[str, Any]) -> dict[str, Any]:
    """Answer two prompts of token numbers, greedily."""
    from vllm import SamplingParams

    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts(Path(path))]
    greedy: dict[str, Any] = {"temperature": 0, "detokenize": False, "ignore_eos": True}
    model.generate(inputs, SamplingParams(max_tokens=1, **greedy), use_tqdm=False)
    began = time.perf_counter()
    sampling = SamplingParams(max_tokens=NEW_TOKENS, logprobs=_LOGPROBS, **greedy)
    done = model.generate(inputs, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    first = [request.outputs[0] for request in done]
    return {
        "seconds": seconds,
        "tokens": [list(completion.token_ids) for completion in first],
        "logprobs": [
            [sorted((token, entry.logprob) for token, entry in step.items()) for step in steps]
            for completion in first
            if (steps := completion.logprobs) is not None
        ],
    }


def prompts(path: Path) -> list[list[int]]:
    """Two prompts of token numbers that every vocabulary has."""
    config = json.loads((path / "config.json").read_text())
    inner = config.get("text_config") or config
    limit = min(int(inner.get("vocab_size") or 512), 1000) - 10
    return [[5 + 37 * i % limit for i in range(length)] for length in (7, 65)]


def kv_cache(engine: "LLM") -> int:
    """Bytes of an engine's KV cache that are resident: part of what its load has added."""
    storages: dict[int, int] = {}

    def look(model: Any) -> None:
        for module in model.modules():
            held = getattr(module, "kv_cache", None)
            for tensor in held if isinstance(held, list | tuple) else [held]:
                if tensor is not None and tensor.device.type == "cpu":
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()

    engine.apply_model(look)
    return sum(resident(address, nbytes) for address, nbytes in storages.items() if nbytes)
