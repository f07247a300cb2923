"""The journeys that `against.py` measures; only public names, so that other commits run them too.

journeys.py make PART INPUTS        journeys.py PART INPUTS SCRATCH -> what each step takes
"""

import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

PARTS: Final = ("load", "attach", "pipelines", "calls", "checkpoints", "remote")
_SHAPES: Final[dict[str, Any]] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 6,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 32_000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
_SAVES: Final = 4
_LOADS: Final = 5
# A checkpoint of 64 MiB: 16 layers of four tensors.
_LAYERS: Final = 16
_TENSOR_BYTES: Final = 1 << 20
_TRANSFERS: Final = 3


def make_load(inputs: Path) -> None:
    """A model of six layers of Qwen2-0.5B's shapes, and a fine-tune with one changed layer."""
    import torch
    import transformers

    if (inputs / "vllm" / "fine-tune").exists():
        return
    torch.manual_seed(0)
    kind: Any = transformers.Qwen2ForCausalLM
    model = kind(transformers.Qwen2Config(**_SHAPES)).to(torch.bfloat16)
    model.save_pretrained(inputs / "vllm" / "base")
    for parameter in model.model.layers[3].parameters():
        parameter.data.mul_(1.01)
    model.save_pretrained(inputs / "vllm" / "fine-tune")


def make_pipelines(inputs: Path) -> None:
    """The demonstration's two pipelines, tiny."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from demonstration import pictures

    for name in pictures.missing(inputs):
        pictures.make(name, inputs, tiny=True)


def make_remote(inputs: Path) -> None:
    """A checkpoint of random weights, and a fine-tune with one changed layer."""
    import numpy as np
    from safetensors.numpy import save_file

    if (inputs / "remote" / "fine-tune" / "model.safetensors").exists():
        return
    random = np.random.default_rng(0)
    names = [f"model.layers.{n}.{part}.weight" for n in range(_LAYERS) for part in "qkvo"]
    state = {name: random.standard_normal(_TENSOR_BYTES // 4).astype("f4") for name in names}
    for model, changed in (("base", ()), ("fine-tune", names[20:24])):
        for name in changed:
            state[name] = random.standard_normal(_TENSOR_BYTES // 4).astype("f4")
        (inputs / "remote" / model).mkdir(parents=True)
        save_file(state, inputs / "remote" / model / "model.safetensors")


def _engine(path: Path, config: Any) -> tuple[Any, float]:
    """An engine, and the seconds its loader took."""
    from vllm import LLM

    from tensor_dedup.patches.vllm.loader import TensorDedupLoader

    seconds = []
    original = TensorDedupLoader.load_model

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return original(self, *args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - began)

    kind: Any = TensorDedupLoader
    kind.load_model = timed
    try:
        llm = LLM(
            model=str(path),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=128,
            kv_cache_memory_bytes=64 << 20,
            tensor_dedup=config,
        )
    finally:
        kind.load_model = original
    return llm, seconds[-1]


def load(inputs: Path, scratch: Path) -> dict[str, float]:
    """A base, a fine-tune, both unknown; then the base again, of which all is resident."""
    warm, _ = _engine(
        inputs / "vllm" / "base", {"hash_algorithm": "blake2b"}
    )  # imports, first of all
    base, unknown = _engine(inputs / "vllm" / "base", True)
    tuned, fine_tune = _engine(inputs / "vllm" / "fine-tune", True)
    again, resident = _engine(inputs / "vllm" / "base", True)
    assert len({id(each) for each in (warm, base, tuned, again)}) == 4
    return {"unknown": unknown, "fine-tune": fine_tune, "resident": resident}


def attach(inputs: Path, scratch: Path) -> dict[str, float]:
    """A model that another process has in a memory manager."""
    socket = scratch / "s" / "m.sock"
    socket.parent.mkdir(mode=0o700)
    server = [sys.executable, "-P", "-m", "tensor_dedup.memory_manager.server"]
    manager = subprocess.Popen([*server, "--socket", str(socket)], stderr=subprocess.DEVNULL)
    other = [sys.executable, "-P", __file__, "hold", str(inputs), str(scratch)]
    holder = subprocess.Popen(
        other, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        _engine(inputs / "vllm" / "fine-tune", {"hash_algorithm": "blake2b"})
        assert holder.stdout is not None
        while "ready" not in (line := holder.stdout.readline()):
            assert line, "the other engine ended"
        llm, seconds = _engine(inputs / "vllm" / "base", {"memory_manager": str(socket)})
        from tensor_dedup import report

        found = report().to_dict()["models"][-1]
        assert found["shared_bytes"] == found["total_bytes"] > 0
        del llm
    finally:
        holder.kill()
        holder.wait()
        manager.terminate()
        manager.wait()
    return {"second engine": seconds}


def hold(inputs: Path, scratch: Path) -> dict[str, float]:
    """The other engine: loads and waits to be killed."""
    llm, _ = _engine(inputs / "vllm" / "base", {"memory_manager": str(scratch / "s" / "m.sock")})
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    del llm
    return {}


def pipelines(inputs: Path, scratch: Path) -> dict[str, float]:
    """Both pipelines, then the second again: multiples of what loading it plainly takes here.

    The least of several where the same can be loaded again, and no seconds: on a shared machine a
    processor's speed may change twofold from one load to the next.
    """
    found = _pipelines(inputs, _seconds)
    plain = found.pop("plain")
    return {step: seconds / plain for step, seconds in found.items()}


def calls(inputs: Path, scratch: Path) -> dict[str, float]:
    """The same loads in calls, Python's and C's, which no processor's speed changes."""
    return _pipelines(inputs, _calls)


def _pipelines(inputs: Path, measure: Callable[[Callable[[], None]], float]) -> dict[str, float]:
    from diffusers import DiffusionPipeline

    from tensor_dedup import enable

    def load(path: Path) -> None:
        kept.append(kind.from_pretrained(path))

    kind: Any = DiffusionPipeline
    kept: list[Any] = []
    [first, second] = sorted(path.parent for path in inputs.glob("*/model_index.json"))
    load(first)  # imports
    found = {"plain": min(measure(partial(load, second)) for _ in range(_LOADS))}
    with enable():
        found["first"] = measure(partial(load, first))
        found["second"] = measure(partial(load, second))
        found["known"] = min(measure(partial(load, second)) for _ in range(_LOADS))
    return found


def _seconds(work: Callable[[], object]) -> float:
    # A full collection takes as long as such a load, and would come in one or the other.
    gc.collect()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _calls(work: Callable[[], None]) -> float:
    """How many calls `work` makes, in this thread and those that it starts."""
    events = Counter[str]()

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        events[event] += 1

    gc.collect()
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return events["call"] + events["c_call"]


def checkpoints(inputs: Path, scratch: Path) -> dict[str, float]:
    """Steps of 64 tensors of 1 MiB; medians of several saves of each kind."""
    import numpy as np

    from tensor_dedup import CheckpointStore

    random = np.random.default_rng(0)
    state = {f"t{n}": random.standard_normal(1 << 18).astype("f4") for n in range(64)}
    run, step = CheckpointStore(scratch / "run", run_id="run-1", compress=None), 0
    found: dict[str, float] = {}
    for name, changed in (("all changed", 64), ("a tenth changed", 6), ("nothing changed", 0)):
        seconds = []
        for _ in range(_SAVES):
            for n in range(changed):
                state[f"t{n}"] = random.standard_normal(1 << 18).astype("f4")
            step += 1
            began = time.perf_counter()
            run.save(state, step)
            seconds.append(time.perf_counter() - began)
        found[name] = sorted(seconds)[_SAVES // 2]
    began = time.perf_counter()
    run.load(step)
    found["load"] = time.perf_counter() - began
    return found


def remote(inputs: Path, scratch: Path) -> dict[str, float]:
    """A base and a fine-tune to a server of S3's protocol and back; medians of several rounds.

    Each round has a place of its own on the server, and stores of its own to pull into. Neither the
    server's start nor the import of both into the store that is pushed from is timed.
    """
    # Of the tests' helpers, only what imports nothing of the package, whose commit is another's.
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))
    from remote_runs import real_servers
    from tensor_dedup import Store

    store = Store.open(scratch / "pushed")
    for name in ("base", "fine-tune"):
        store.import_(inputs / "remote" / name, name)
    rounds: list[dict[str, float]] = []
    with real_servers.s3(scratch / "server"):
        for number in range(_TRANSFERS + 1):
            url, path = f"s3://bucket/round-{number}", scratch / f"pulled-{number}"
            pulled = Store.open(path)
            os.sync()  # so that no round pays for what the one before it left
            first = _seconds(partial(store.push, url, "base"))
            tuned = _seconds(partial(store.push, url, "fine-tune"))
            nothing = _seconds(partial(store.push, url, "fine-tune"))
            os.sync()
            base = _seconds(partial(pulled.pull, url, "base"))
            tune = _seconds(partial(pulled.pull, url, "fine-tune"))
            shutil.rmtree(path)
            rounds.append(
                {
                    "first push": first,
                    "push of a fine-tune": tuned,
                    "push of nothing new": nothing,
                    "pull of both": base + tune,
                    "pull of the fine-tune alone": tune,
                }
            )
    # The first round imports what a transfer needs.
    return {step: statistics.median(each[step] for each in rounds[1:]) for step in rounds[0]}


def main() -> None:
    """Make inputs, or run one journey and print its seconds as JSON."""
    if sys.argv[1] == "make":
        part, inputs = sys.argv[2], Path(sys.argv[3])
        if part in ("load", "attach"):
            make_load(inputs)
        elif part in ("pipelines", "calls"):
            make_pipelines(inputs)
        elif part == "remote":
            make_remote(inputs)
        return
    journeys: dict[str, Callable[[Path, Path], dict[str, float]]] = {
        "load": load,
        "attach": attach,
        "hold": hold,
        "pipelines": pipelines,
        "calls": calls,
        "checkpoints": checkpoints,
        "remote": remote,
    }
    found = journeys[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
