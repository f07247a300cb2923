"""Engines that answer all the time, in processes of their own, while they follow a run.

async with following.engine("store://policy@0", {"store": folder}) as engine:
    await engine.update(1)
    await engine.outputs() == (tokens and logprobs, as `plain.outputs` has them)
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from vllm_runs import fleet, plain

BACKEND = {"backend": "tensor_dedup"}


class Engine:
    """An engine with a request at work all the time; `came` counts the tokens."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.came = 0
        self._numbers = itertools.count()

    @property
    def pid(self) -> int:
        """The process in which the model runs."""
        [process] = self.llm.engine_core.resources.engine_manager.processes
        return int(process.pid)

    async def ask_on(self) -> None:
        """Answer until cancelled."""
        while True:
            async for _ in self._generate(plain.PROMPTS[1], 200):
                self.came += 1

    async def update(self, step: int) -> int:
        """Change to a step; the number of tokens that came meanwhile."""
        before = self.came
        await self.llm.update_weights({"step": step})
        return self.came - before

    async def outputs(self) -> tuple[plain.Answer, ...]:
        """What it answers now, to one prompt after the other."""
        await self.llm.reset_prefix_cache()
        found = []
        for prompt in plain.PROMPTS:
            async for each in self._generate(prompt, plain.NEW_TOKENS, logprobs=plain.TOP):
                last = each.outputs[0]
            found.append(plain.answer(last))
        return tuple(found)

    async def digests(self) -> list[dict[str, str]]:
        """By rank, the digest of each parameter."""
        looks = await self.llm.collective_rpc("look")
        return [each["digests"] for each in sorted(looks, key=lambda look: look["rank"])]

    def _generate(self, prompt: tuple[int, ...] | list[int], tokens: int, **how: Any) -> Any:
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True, **how
        )
        asked = {"prompt_token_ids": list(prompt)}
        return self.llm.generate(asked, sampling, f"request-{next(self._numbers)}")


@asynccontextmanager
async def engine(url: str, config: dict[str, Any], **options: Any) -> AsyncIterator[Engine]:
    """An engine that answers from now on; `options` are more arguments of it."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    settings: dict[str, Any] = {
        "model": url,
        "tensor_dedup": config,
        "weight_transfer_config": BACKEND,
        "worker_extension_cls": fleet.LOOKING,
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "enforce_eager": True,
        "disable_log_stats": True,
        "kv_cache_memory_bytes": 16 << 20,
        "seed": 0,
    }
    arguments: Any = AsyncEngineArgs
    llm = AsyncLLM.from_engine_args(arguments(**{**settings, **options}))
    found = Engine(llm)
    asking = asyncio.create_task(found.ask_on())
    try:
        while not found.came and not asking.done():
            await asyncio.sleep(0.01)
        yield found
    finally:
        asking.cancel()
        llm.shutdown()
