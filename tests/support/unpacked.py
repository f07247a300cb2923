"""Plain vLLM that packs no weight, in whatever process of it the model is loaded.

    llm = LLM(..., worker_extension_cls="unpacked.Worker")

vLLM imports the module there before it loads; what `plain.kept_as` says of a block holds from then
on.
"""

from contextlib import ExitStack

import plain

_FOREVER = ExitStack()
_FOREVER.enter_context(plain.kept_as("plain"))


class Worker:
    """Adds nothing to vLLM's worker."""
