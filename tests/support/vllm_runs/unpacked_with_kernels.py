"""The worker extensions `unpacked` and `with_kernels` as one."""

from vllm_runs import unpacked, with_kernels


class Worker(unpacked.Worker, with_kernels.Worker):
    """Adds nothing to vLLM's worker."""
