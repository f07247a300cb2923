"""A worker extension that gives vLLM the kernels of `reference_kernels`, in any process.

llm = LLM(..., worker_extension_cls="vllm_runs.with_kernels.Worker")
"""

from contextlib import ExitStack

from vllm_runs import reference_kernels

_FOREVER = ExitStack()
_FOREVER.enter_context(reference_kernels.installed())


class Worker:
    """Adds nothing to vLLM's worker."""
