"""The worker extensions `unpacked` and `with_kernels` as one."""

import unpacked
import with_kernels


class Worker(unpacked.Worker, with_kernels.Worker):
    """Adds nothing to vLLM's worker."""
