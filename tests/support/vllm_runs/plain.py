"""Small engines and what they answer, in a form that can be compared exactly.

The environment that keeps an engine in this process and small is set by tests/conftest.py, before
vllm is first imported.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from torch import nn

if TYPE_CHECKING:
    import torch
    from vllm import LLM

PROMPTS = ([1, 2, 3, 4, 50, 60, 77], list(range(5, 200, 3)))
NEW_TOKENS = 16
TOP = 3

# One prompt's answer: its tokens, and for each the most likely tokens with their logprobs; of a
# pooling model, its embedding.
Answer = tuple[tuple[int, ...], tuple[tuple[tuple[int, float], ...], ...]] | tuple[float, ...]


def engine(path: str | Path, *, pooling: bool = False, **options: Any) -> "LLM":
    """A real engine over `path` with the smallest settings; `options` go to `LLM` and win."""
    from vllm import LLM
    from vllm.model_executor.models import registry

    settings: dict[str, Any] = {
        "model": str(path),
        # A pooling engine insists on a tokenizer; transformers invents one where there is none.
        "skip_tokenizer_init": not pooling,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "enforce_eager": True,
        "disable_log_stats": True,
        "kv_cache_memory_bytes": 16 << 20,
        "seed": 0,
    }
    if pooling:
        settings["runner"] = "pooling"
    # vLLM inspects a model class that is new on this machine in a subprocess, which imports all of
    # vLLM, in order not to initialise CUDA in this one. Here there is no CUDA.
    here = mock.patch.object(registry, "_run_in_subprocess", lambda function: function())
    with _without_numbas_library(), _kernels_replaced_once(), here:
        return LLM(**{**settings, **options})


@contextmanager
def kept_as(policy: str) -> Iterator[None]:
    """Plain vLLM with its weights in the form that `cpu_weights=policy` keeps them in.

    On some CPUs oneDNN's product of a packed weight differs from torch's product of the same weight
    in the last bits, so each form has answers of its own. With "plain", vLLM packs no weight that
    is loaded or reloaded inside the block.
    """
    from vllm.model_executor.layers import utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    if policy == "packed":
        yield
        return
    with mock.patch.object(utils, "dispatch_cpu_unquantized_gemm", dispatch):
        yield


def multiplies(kind: str) -> bool:
    """Has vLLM a kernel on this CPU for a format of `quantised`? Four bits need AVX-512 or more."""
    import torch
    from vllm import _custom_ops  # noqa: F401 (it loads the operations)

    return kind not in ("AWQ", "GPTQ", "w4a16") or hasattr(torch.ops._C, "cpu_gemm_wna16")


def packs() -> bool:
    """Does vLLM pack weights in bf16 on this CPU?

    oneDNN has no product of them for a CPU without AVX-512, or where ONEDNN_MAX_CPU_ISA hides it.
    """
    import torch
    from vllm import _custom_ops

    try:
        _custom_ops.create_onednn_mm(torch.zeros(64, 64, dtype=torch.bfloat16).t(), 32)
    except RuntimeError:
        return False
    return True


@contextmanager
def _without_numbas_library() -> Iterator[None]:
    """Once an n-gram draft has imported numba, vLLM makes no other engine in that process.

    It asks every attribute of every module for its `__dict__`, and one of numba's answers to any
    name with a function.
    """
    name = "llvmlite.binding.ffi"
    held = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if held is not None:
            sys.modules[name] = held


@contextmanager
def _kernels_replaced_once() -> Iterator[None]:
    """Every engine has vLLM look at each attribute of each module for Triton's kernels, to replace
    them by others; after the first they are replaced, and that look is most of what a tiny model
    costs."""
    dispatcher = sys.modules.get("vllm.triton_utils.dispatcher")
    if dispatcher is None or not dispatcher._registry:
        yield
        return
    with mock.patch.object(dispatcher, "register_kernels"):
        yield


@contextmanager
def _ranks_uncompiled() -> Iterator[None]:
    """vLLM compiles one comparison of its sampler, which takes seconds in each new process."""
    from vllm.v1.sample import sampler

    compiled = getattr(sampler, "batched_count_greater_than", None)
    if (eager := getattr(compiled, "_torchdynamo_orig_callable", None)) is None:
        yield
        return
    with mock.patch.object(sampler, "batched_count_greater_than", eager):
        yield


def outputs(
    llm: "LLM", *, pooling: bool = False, prompts: Any = None, **how: Any
) -> tuple[Answer, ...]:
    """What `llm` answers to both prompts: equal only if every token and every float is equal.

    `prompts` are others, as vLLM takes them; `how` goes to `generate`.
    """
    prompts = prompts or [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    if pooling:
        embedded = llm.embed(prompts, use_tqdm=False)
        return tuple(tuple(request.outputs.embedding) for request in embedded)
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0, detokenize=False, logprobs=TOP, ignore_eos=True
    )
    with _ranks_uncompiled():
        generated = llm.generate(prompts, sampling, use_tqdm=False, **how)
    return tuple(answer(request.outputs[0]) for request in generated)


def tokens(answers: tuple[Answer, ...]) -> list[Any]:
    """The tokens alone, of answers of a generating model."""
    return [answer[0] for answer in answers]


def model(llm: "LLM") -> "torch.nn.Module":
    """The model inside an engine that runs in this process."""
    executor: Any = llm.llm_engine.model_executor
    module: torch.nn.Module = executor.driver_worker.worker.model_runner.model
    return module


def let_go(llm: "LLM") -> None:
    """End one engine of several in this process; the caller then drops its references.

    An engine that is merely dropped shuts down in its finalizer and takes the process-wide
    groups with it: every other engine of the process then fails with "parallel group is not
    initialized". That is plain vLLM's; what is tested here is what becomes of the weights.
    """
    client: Any = llm.llm_engine.engine_core
    if hasattr(client, "_finalizer"):  # vLLM 0.28 has none
        client._finalizer.detach()
    client.engine_core.model_executor.shutdown()
    gc.unfreeze()  # vLLM has frozen what there was when it began, other engines too


def answer(completion: Any) -> Answer:
    """What was answered to one prompt with logprobs."""
    likely = tuple(
        tuple(sorted((token, entry.logprob) for token, entry in step.items()))
        for step in completion.logprobs
    )
    return tuple(completion.token_ids), likely
