"""Diffusers' part of a process of the demonstration. Imports this package only where it shares."""

import time
from pathlib import Path
from typing import Any

from demonstration.resident import read_pages

PROMPT = "a cat in a hat"
STEPS = 4


def prepare() -> None:
    """Import the libraries, whose cost is not the first pipeline's; no bars of theirs."""
    import diffusers
    import transformers

    for logging in (diffusers.utils.logging, transformers.utils.logging):
        each: Any = logging
        each.set_verbosity_error()
        each.disable_progress_bar()


def load(path: str, config: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    """Load a pipeline."""
    from diffusers import DiffusionPipeline

    arguments: dict[str, Any] = {"local_files_only": True}
    if config is not None:
        import tensor_dedup  # noqa: F401 (it teaches Diffusers the argument)

        arguments["tensor_dedup"] = config
    kind: Any = DiffusionPipeline
    pipeline = kind.from_pretrained(path, **arguments)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def facts(model: Any) -> dict[str, Any]:
    """Read every page of every parameter: the kernel counts only pages that were used."""
    import torch

    for component in model.components.values():
        if isinstance(component, torch.nn.Module):
            read_pages(component)
    return {}


def answer(model: Any, path: str, number: int, options: dict[str, Any]) -> dict[str, Any]:
    """Draw a picture into `options["folder"]`, `options["size"]` pixels wide and high.

    A size of None is what the pipeline is made for.
    """
    import numpy
    import torch

    size = {} if options["size"] is None else {"height": options["size"], "width": options["size"]}
    began = time.perf_counter()
    drawn = model(
        PROMPT,
        num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        **size,
    )
    seconds = time.perf_counter() - began
    file = Path(options["folder"]) / f"{number}.npy"
    numpy.save(file, drawn.images[0])
    return {"seconds": seconds, "picture": str(file)}
