"""One process that loads several pipelines and draws with each: plain Diffusers, or ours.

Run as a script with one argument, a job in JSON; what happens goes to the descriptor it names, one
JSON object a line. It imports this package only where sharing is asked for, so plain is plain.
"""

import contextlib
import importlib.util
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any, TypedDict

PROMPT = "a cat in a hat"
STEPS = 4


class Job(TypedDict):
    """What one process does. `config` None: plain Diffusers; else the tensor_dedup argument.

    `size`: of a picture, in pixels; None: what the pipeline is made for. `folder`: for pictures.
    """

    pipelines: list[str]
    config: dict[str, Any] | None
    size: int | None
    folder: str
    events: int


def main() -> None:
    """Load all, then draw with each; the last line said is the result."""
    job: Job = json.loads(sys.argv[1])
    with os.fdopen(job["events"], "w", buffering=1) as events:

        def say(**event: Any) -> None:
            events.write(json.dumps(event) + "\n")

        run(job, say)


def run(job: Job, say: Any) -> None:
    """Do the job, telling `say` each step."""
    say(event="starting")
    memory = _engine().memory
    _quiet()
    before = memory()
    loads, pipelines = [], []
    for path in job["pipelines"]:
        say(event="loading", model=path)
        began = time.perf_counter()
        pipelines.append(_load(path, job))
        seconds = time.perf_counter() - began
        _touch(pipelines[-1])
        loads.append({"model": path, "seconds": seconds, "memory": memory()})
        say(event="loaded", model=path)
    answers = []
    for number, (path, pipeline) in enumerate(zip(job["pipelines"], pipelines, strict=True)):
        say(event="answering", model=path)
        answers.append(_draw(pipeline, job, Path(job["folder"]) / f"{number}.npy"))
        say(event="answered", model=path)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {"before": before, "loads": loads, "answers": answers, "peak_rss": peak}
    say(event="result", **result, after=memory(), report=_report(job))


def _engine() -> Any:
    """The other script's module, by its file: importing the package would be no plain process."""
    path = Path(__file__).with_name("engine.py")
    spec = importlib.util.spec_from_file_location("engine", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _quiet() -> None:
    """Import the libraries, whose cost is not the first pipeline's; no bars of theirs."""
    import diffusers
    import transformers

    for logging in (diffusers.utils.logging, transformers.utils.logging):
        each: Any = logging
        each.set_verbosity_error()
        each.disable_progress_bar()


def _load(path: str, job: Job) -> Any:
    from diffusers import DiffusionPipeline

    options: dict[str, Any] = {"local_files_only": True}
    if job["config"] is not None:
        import tensor_dedup  # noqa: F401 (it teaches Diffusers the argument)

        options["tensor_dedup"] = job["config"]
    kind: Any = DiffusionPipeline
    pipeline = kind.from_pretrained(path, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _touch(pipeline: Any) -> None:
    """Read every page of every parameter: the kernel counts only pages that were used."""
    import torch

    for component in pipeline.components.values():
        for parameter in component.parameters() if isinstance(component, torch.nn.Module) else ():
            flat = torch.empty(0, dtype=torch.uint8).set_(
                parameter.untyped_storage(), 0, (parameter.untyped_storage().nbytes(),), (1,)
            )
            flat[:: 1 << 12].sum()


def _draw(pipeline: Any, job: Job, file: Path) -> dict[str, Any]:
    import numpy
    import torch

    size = {} if job["size"] is None else {"height": job["size"], "width": job["size"]}
    began = time.perf_counter()
    drawn = pipeline(
        PROMPT,
        num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        **size,
    )
    seconds = time.perf_counter() - began
    numpy.save(file, drawn.images[0])
    return {"seconds": seconds, "picture": str(file)}


def _report(job: Job) -> dict[str, Any] | None:
    if job["config"] is None:
        return None
    from tensor_dedup import report

    return report().to_dict()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
