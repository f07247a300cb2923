"""An engine in this process that changes between two steps of a run.

engine = Following(steps(folder))
engine.update(1)
engine.step() == 1
"""

import gc
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models import tiny_checkpoints as checkpoints
from tensor_dedup.loader import takeover
from tensor_dedup.patches.vllm import weight_transfer
from tensor_dedup.training import CheckpointStore
from vllm_runs import engines, following, plain
from vllm_runs.moments import Moments

if TYPE_CHECKING:
    from vllm import LLM

RUN = "policy"
_BLOCK = 32
# Full blocks, so that the prefix cache has entries of each step.
_PROMPT = [7 * n % 200 + 3 for n in range(3 * _BLOCK)]
Seen = tuple[plain.Answer, dict[str, str]]


def steps(root: Path) -> Path:
    """A store with two steps of a run."""
    pair = checkpoints.make("llama", root / "checkpoints")
    folders = pair.base, checkpoints.same_header(pair.base, root / "other")
    with CheckpointStore(root / "store", RUN, config=pair.base) as run:
        for number, folder in enumerate(folders):
            run.save(checkpoints.tensors(folder), number)
    return root / "store"


class Following:
    """An engine in this process, with a prefix cache, and what it is to answer at each step."""

    def __init__(self, store: Path, **config: Any) -> None:
        self.store = store
        self.llm: LLM = plain.engine(
            f"store://{RUN}@0",
            tensor_dedup={"store": str(store), "cpu_weights": "plain", **config},
            weight_transfer_config=following.BACKEND,
            enable_prefix_caching=True,
            block_size=_BLOCK,
        )
        self.at = {0: self._seen()}
        self.update(1)
        self.at[1] = self._seen()
        assert self.at[0][0] != self.at[1][0]
        assert self.at[0][1] != self.at[1][1]
        self.update(0)

    def _seen(self) -> Seen:
        """What it answers, with the help of what is cached, and its parameters."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=4, logprobs=plain.TOP, detokenize=False)
        prompt: Any = {"prompt_token_ids": _PROMPT}
        (found,) = self.llm.generate(prompt, params, use_tqdm=False)
        named = plain.model(self.llm).named_parameters(remove_duplicate=False)
        digests = {name: engines.fingerprint(each) for name, each in named}
        return plain.answer(found.outputs[0]), digests

    def step(self) -> int | None:
        """The step at which it is, wholly, or None if it is at none."""
        seen = self._seen()
        found = [step for step, expected in self.at.items() if seen == expected]
        return found[0] if found else None

    def update(self, step: int, *, ahead: bool = False) -> None:
        """Change to a step; with `ahead`, it is loaded in the background before, as by servers."""
        ask = self.llm.llm_engine.collective_rpc
        try:
            if ahead:
                info = {"update_info": {"url": f"store://{RUN}@{step}"}}
                ask("tensor_dedup_prepare_update", kwargs=info)
                while not all(ask("tensor_dedup_update_is_prepared")):
                    time.sleep(0.005)
            self.llm.update_weights({"step": step})
            _wait_for_letting_go()
        except BaseException:
            ask("tensor_dedup_abandon_update")
            raise

    def close(self) -> None:
        plain.let_go(self.llm)
        gc.collect()


def _wait_for_letting_go() -> None:
    """Wait for the threads that let go of former steps, but not for another engine at the step."""
    for thread in threading.enumerate():
        if thread.name == "tensor-dedup-former-step":
            thread.join(2)


def die(caller: Connection, store: str, config: dict[str, str]) -> None:
    """An engine that changes from step 0 to 1, and dies at the moment that it is told."""
    engine = Following(Path(store), **config)
    moments = Moments(weight_transfer, takeover)
    with moments.listed():
        engine.update(1, ahead=True)
    engine.update(0)
    found = {m.function: m for m in reversed(moments.found) if m.time == 1}
    assert {"apply", "_rebind", "load_beside", "_let_go"} <= found.keys()
    caller.send([*found.values()])
    moment = caller.recv()

    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with moments.at(moment, end):
        engine.update(1, ahead=True)
    caller.send(engine.step())
