"""The random numbers that torch draws next: a load that is begun again must not have drawn any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def rng_restored_on_failure() -> Iterator[None]:
    """When the block fails, torch draws next what it would have drawn without it.

    On the CPU and on all GPUs of this process, if it has begun to use any.
    """
    module = accelerator()
    here = torch.get_rng_state()
    there = None if module is None else module.get_rng_state_all()
    try:
        yield
    except BaseException:
        torch.set_rng_state(here)
        if module is not None:
            module.set_rng_state_all(there)
        raise


def accelerator() -> Any:
    """torch's module of the accelerator that this process uses, such as torch.cuda; or None."""
    kind = torch.accelerator.current_accelerator()
    module: Any = None if kind is None else torch.get_device_module(kind)
    begun = getattr(module, "is_initialized", lambda: False)
    # To ask for a state would begin it, and a load in host memory needs none.
    return module if begun() and hasattr(module, "get_rng_state_all") else None
