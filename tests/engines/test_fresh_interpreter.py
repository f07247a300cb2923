"""What a user types, in a new interpreter, with a real engine: no fixture has prepared anything."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tensor_dedup.loader.report import REPORT_DIR_VARIABLE

# As published, but for the model's path and what keeps the engine small. No import of ours.
SNIPPET = """
from vllm import LLM, SamplingParams
from vllm.config.load import TensorDedupConfig

if __name__ == "__main__":
    dedup_config = TensorDedupConfig(
        enabled=True,
        hash_algorithm="blake2b", # or "xxhash64" for speed
        verify_bytes=False, # optional byte-level collision check
        min_tensor_bytes=4194304, # skip small tensors (4MB threshold)
    )
    llm = LLM(model=MODEL, tensor_dedup=dedup_config{small})
"""
SMALL = (
    ", kv_cache_memory_bytes=64 << 20, enforce_eager=True, max_model_len=256"
    ", skip_tokenizer_init=True"
)
ANSWER = """
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)

    def answer(llm):
        (request,) = llm.generate([{"prompt_token_ids": [1, 2, 3, 50]}], greedy, use_tqdm=False)
        return list(request.outputs[0].token_ids)
"""
END = """
    import json, os, sys
    modules = [name for name in sys.modules if name.startswith("tensor_dedup.")]
    from tensor_dedup import report
    ran = {"pid": os.getpid(), "answers": answers, "modules": modules}
    print(json.dumps({**ran, **report().to_dict()}))
"""


def run(script: str, model: str, **environment: str) -> Any:
    """Run a script that ends in a line of JSON; the engine is a child process, as by default."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ENABLE_V1")}
    # Set by whichever test used the argument in this process; a user's shell has none.
    inherited.pop(REPORT_DIR_VARIABLE, None)
    done = subprocess.run(
        [sys.executable, "-c", f"MODEL = {model!r}\n{script}"],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(
    ("imports", "environment"),
    [
        # The published snippet below begins so, too.
        pytest.param("from vllm import EngineArgs", {}, marks=pytest.mark.long),
        pytest.param(
            "import vllm.engine.arg_utils; EngineArgs = vllm.engine.arg_utils.EngineArgs",
            {},
            marks=pytest.mark.long,
        ),
        pytest.param(
            "from vllm.config.load import TensorDedupConfig; from vllm import EngineArgs",
            {},
            marks=pytest.mark.long,
        ),
        # Every other test imports ours first, too: tests/patches/test_arguments.py.
        pytest.param(
            "import tensor_dedup; from vllm import EngineArgs",
            {"VLLM_TARGET_DEVICE": "cpu"},
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_argument_is_there_in_whichever_order_modules_are_imported(
    imports: str, environment: dict[str, str], model: str
) -> None:
    script = """
import json, sys
args = EngineArgs(model=MODEL, tensor_dedup={"verify": "always"})
module = sys.modules["vllm.engine.arg_utils"]
print(json.dumps([args.load_format, args.model_loader_extra_config["tensor_dedup"]["verify"],
                  type(module).__name__]))
"""
    assert run(f"{imports}\n{script}", model, **environment) == [
        "tensor_dedup",
        "always",
        "module",
    ]


@pytest.mark.vllm
@pytest.mark.parametrize(
    "multiprocessing",
    [
        pytest.param("0", id="in_process"),
        pytest.param("1", id="engine_process", marks=pytest.mark.long),
    ],
)
def test_the_published_snippet_runs_and_its_load_is_reported(
    multiprocessing: str, model: str
) -> None:
    script = SNIPPET.format(small=SMALL) + ANSWER + "    answers = [answer(llm)]\n" + END

    result = run(script, model, VLLM_ENABLE_V1_MULTIPROCESSING=multiprocessing)

    (load,) = result["models"]
    assert len(result["answers"][0]) == 8
    assert (load["pid"] == result["pid"]) is (multiprocessing == "0")
    assert load["total_bytes"] > 0
    assert load["shared_bytes"] + load["private_bytes"] == load["total_bytes"]
    # Nothing in a tiny model is as large as the article's threshold.
    assert load["tensors_shared"] == 0
    if multiprocessing == "0":  # what loads a model needs no remotes and no training
        assert {"tensor_dedup.patches.vllm.run", "tensor_dedup.store.reading.reader"} <= {
            *result["modules"]
        }
        wings = ("tensor_dedup.remote", "tensor_dedup.training", "tensor_dedup.api")
        assert [name for name in result["modules"] if name.startswith(wings)] == []


@pytest.mark.vllm
@pytest.mark.long
def test_a_dict_shares_a_replica_and_answers_like_plain_vllm(model: str) -> None:
    script = f"""
from vllm import LLM, SamplingParams

if __name__ == "__main__":
{ANSWER}
    plain, first, second = (
        LLM(model=MODEL, tensor_dedup=value{SMALL})
        for value in (None, {{"hash_algorithm": "blake3"}}, True)
    )
    answers = [answer(llm) for llm in (plain, first, second)]
{END}"""
    result = run(script, model, VLLM_ENABLE_V1_MULTIPROCESSING="0")

    plain, first, second = result["answers"]
    assert plain == first == second
    one, two = result["models"]
    assert one["shared_bytes"] == 0
    assert two["shared_bytes"] == two["total_bytes"] == one["total_bytes"]


@pytest.mark.vllm
@pytest.mark.long
def test_the_published_snippet_runs_verbatim_compiled_and_with_a_tokenizer(
    model: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    write_tokenizer(folder)
    script = SNIPPET.format(small="") + ANSWER + "    answers = [answer(llm)]\n" + END

    result = run(script, str(folder), VLLM_CPU_KVCACHE_SPACE="1")

    (load,) = result["models"]
    assert load["pid"] != result["pid"]
    assert len(result["answers"][0]) == 8


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of the words t0 to t511, so that an engine with its defaults starts."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(512)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=words, eos_token="t2", unk_token="t0").save_pretrained(folder)
