"""One process of the demonstration: loads several models, then answers with each, plainly or ours.

Run as a script with one argument, a job in JSON; what happens goes to the descriptor it names, one
JSON object a line. It imports this package only where sharing is asked for, so plain is plain.
"""

import contextlib
import ctypes
import gc
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any, Protocol, TypedDict

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


class Job(TypedDict):
    """What one process does.

    `kind`: "engine" for vLLM, "painter" for Diffusers. `config` None: without sharing; else the
    tensor_dedup argument. `options`: what the kind needs beside that. `events`: a descriptor.
    """

    kind: str
    models: list[str]
    config: dict[str, Any] | None
    options: dict[str, Any]
    events: int


class Library(Protocol):
    """What loads and answers: vLLM (`engine`) or Diffusers (`painter`)."""

    def prepare(self) -> None:
        """Import the library, whose cost is not the first model's."""

    def load(self, path: str, config: dict[str, Any] | None, options: dict[str, Any]) -> Any:
        """Load one model."""

    def facts(self, model: Any) -> dict[str, Any]:
        """Measure what a loaded model takes beside its weights; read all of its memory once."""

    def answer(self, model: Any, path: str, number: int, options: dict[str, Any]) -> dict[str, Any]:
        """Answer with one model; its time in seconds is among the facts."""


def main() -> None:
    """Do the job named on the command line; the last event is the result."""
    job: Job = json.loads(sys.argv[1])
    with os.fdopen(job["events"], "w", buffering=1) as events:

        def say(**event: Any) -> None:
            events.write(json.dumps(event) + "\n")

        run(job, _library(job["kind"]), say)


def run(job: Job, library: Library, say: Any) -> None:
    """Load all models, then answer with each, telling `say` each step."""
    say(event="starting")
    library.prepare()
    before = memory()
    loads, loaded = [], []
    for path in job["models"]:
        say(event="loading", model=path)
        began = time.perf_counter()
        loaded.append(library.load(path, job["config"], job["options"]))
        seconds = time.perf_counter() - began
        facts = library.facts(loaded[-1])
        loads.append({"model": path, "seconds": seconds, "memory": memory(), **facts})
        say(event="loaded", model=path)
    answers = []
    for number, (path, model) in enumerate(zip(job["models"], loaded, strict=True)):
        say(event="answering", model=path)
        answers.append(library.answer(model, path, number, job["options"]))
        say(event="answered", model=path)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {"before": before, "loads": loads, "answers": answers, "peak_rss": peak}
    say(event="result", **result, after=memory(), report=_report(job))


def memory() -> dict[str, int]:
    """Bytes this process has resident; PSS counts a page mapped twice once. Zeros off Linux."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what the allocator keeps is not the model's
    sizes = dict.fromkeys(("rss", "pss", "anonymous"), 0)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
            name, value = line.split()[:2]
            if name.rstrip(":").lower() in sizes:
                sizes[name.rstrip(":").lower()] = int(value) * 1024
    return sizes


def _library(kind: str) -> Library:
    from demonstration import engine, painter

    libraries: dict[str, Library] = {"engine": engine, "painter": painter}
    return libraries[kind]


def _report(job: Job) -> dict[str, Any] | None:
    if job["config"] is None:
        return None
    from tensor_dedup import report

    return report().to_dict()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
