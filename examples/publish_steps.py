"""Train a policy by its reward, with an engine that samples from each step.

    python examples/publish_steps.py [--steps 20] [--where URL]

A tiny language model with random weights learns to say even numbers. In each step vLLM samples a
group of answers, a policy gradient makes those above the group's mean more likely (as in GRPO), the
new weights are published, and the engine changes to them. On two idle cores it takes a minute. Its
learning rate is high, so most weights change in each step, and much is published.
"""

import argparse
import os
import tempfile
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

from tensor_dedup import Publisher

PROMPT = [1, 2, 3]
ANSWERS = 32  # of a group
TOKENS = 16  # of an answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--where", help="s3://BUCKET/PREFIX or a folder; by default a new folder")
    arguments = parser.parse_args()
    where = arguments.where or tempfile.mkdtemp(prefix="publish-steps-")

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=512, num_hidden_layers=2, max_position_embeddings=64, **sizes)
    model = LlamaForCausalLM(config).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with Publisher(where, run="policy") as policy:
        policy.publish(model, 0)
        llm = LLM(
            "store://policy@latest",
            tensor_dedup={"store": where},
            weight_transfer_config={"backend": "tensor_dedup"},
            skip_tokenizer_init=True,
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
        )
        print("step  reward  published  live after")
        for step in range(1, arguments.steps + 1):
            answers = sample(llm, step)
            rewards = (answers % 2 == 0).float().mean(dim=1)
            train_one_step(model, optimizer, answers, rewards)

            began = time.perf_counter()
            reward = rewards.mean().item()
            published = policy.publish(model, step, {"reward": reward})
            llm.update_weights({"step": step})
            seconds = time.perf_counter() - began
            kilobytes = published.stored_bytes / 1000
            print(f"{step:4}  {reward:6.2f}  {kilobytes:6.0f} kB  {seconds:8.2f} s", flush=True)


def sample(llm: LLM, seed: int) -> torch.Tensor:
    """Return a group of answers to the prompt, as tokens."""
    how = SamplingParams(n=ANSWERS, max_tokens=TOKENS, seed=seed, ignore_eos=True, detokenize=False)
    [found] = llm.generate([{"prompt_token_ids": PROMPT}], how, use_tqdm=False)
    return torch.tensor([each.token_ids for each in found.outputs])


def train_one_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    answers: torch.Tensor,
    rewards: torch.Tensor,
) -> None:
    """Make answers more likely by how far their rewards are above the group's mean."""
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    tokens = torch.cat([torch.tensor(PROMPT).expand(len(answers), -1), answers], dim=1)
    logits = model(tokens).logits[:, len(PROMPT) - 1 : -1].float()
    chosen = logits.log_softmax(-1).gather(-1, answers[..., None]).squeeze(-1)
    loss = -(advantages[:, None] * chosen).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


if __name__ == "__main__":
    main()
