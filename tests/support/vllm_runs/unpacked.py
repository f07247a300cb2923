"""A worker extension that stops plain vLLM from packing weights, in any process.

    llm = LLM(..., worker_extension_cls="vllm_runs.unpacked.Worker")

A worker imports this module before it loads the model, and stays in `plain.kept_as("plain")`.
"""

from contextlib import ExitStack

from vllm_runs import plain

_FOREVER = ExitStack()
_FOREVER.enter_context(plain.kept_as("plain"))


class Worker:
    """Adds nothing to vLLM's worker."""
