"""Which of a folder's files are its weights."""

import pytest

from tensor_dedup.formats.left_out import LeftOutReason
from tensor_dedup.formats.weight_choice import WeightFiles, choose, is_index, why_left_out

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.safetensors"], ["model.safetensors"]),
        (["model.safetensors", "pytorch_model.bin", "config.json"], ["model.safetensors"]),
        (["adapter_model.safetensors"], ["adapter_model.safetensors"]),
        (["a.safetensors", "b.safetensors"], ["a.safetensors", "b.safetensors"]),
        (SHARDS, SHARDS),
        (SHARDS[::-1], SHARDS),
        # A variant beside the plain file is the same weights once more.
        (["model.fp16.safetensors", "model.safetensors"], ["model.safetensors"]),
        (["model.fp16.safetensors"], ["model.fp16.safetensors"]),
        (["model.non_ema.safetensors", "model.fp16.safetensors"], ["model.fp16.safetensors"]),
        ([*SHARDS, "model.fp16.safetensors"], SHARDS),
        (["model.safetensors", "model.fp16-00001-of-00001.safetensors"], ["model.safetensors"]),
        (["model.safetensors", "model-00001-of-00001.fp16.safetensors"], ["model.safetensors"]),
        (
            ["model-00001-of-00002.fp16.safetensors", "model-00002-of-00002.fp16.safetensors"],
            ["model-00001-of-00002.fp16.safetensors", "model-00002-of-00002.fp16.safetensors"],
        ),
        # The single file before shards without an index, as transformers does.
        (["model.safetensors", *SHARDS], ["model.safetensors"]),
        # Some count from 0.
        (
            ["m-0-of-2.safetensors", "m-1-of-2.safetensors"],
            ["m-0-of-2.safetensors", "m-1-of-2.safetensors"],
        ),
        (["consolidated.safetensors", *SHARDS], SHARDS),
        (["consolidated.safetensors"], ["consolidated.safetensors"]),
        # Not variants: a version number is part of the name.
        (
            ["qwen2.5-7b.safetensors", "qwen2.safetensors"],
            ["qwen2.safetensors", "qwen2.5-7b.safetensors"],
        ),
        (["model.safetensors.txt", "notes"], []),
        ([], []),
    ],
)
def test_files(names: list[str], chosen: list[str]) -> None:
    choice = choose(names)
    assert choice.indexes == ()
    assert choice.missing is None
    assert sorted(choice.files) == sorted(chosen)


@pytest.mark.parametrize(
    ("names", "indexes"),
    [
        ([INDEX, *SHARDS], [INDEX]),
        ([INDEX, *SHARDS, "model.safetensors", "extra.safetensors"], [INDEX]),
        ([INDEX, "model.safetensors.index.fp16.json"], [INDEX]),
        (["model.safetensors.index.fp16.json"], ["model.safetensors.index.fp16.json"]),
        (["model.fp16.safetensors.index.json"], ["model.fp16.safetensors.index.json"]),
        ([INDEX, "consolidated.safetensors.index.json"], [INDEX]),
        ([INDEX, "consolidated.safetensors"], [INDEX]),
    ],
)
def test_an_index_comes_before_all_files(names: list[str], indexes: list[str]) -> None:
    assert choose(names) == WeightFiles(indexes=tuple(indexes))


def test_a_plain_file_comes_before_the_index_of_a_variant() -> None:
    names = ["model.safetensors", "model.safetensors.index.fp16.json"]
    assert choose(names) == WeightFiles(files=("model.safetensors",))


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ([SHARDS[0]], SHARDS[1]),
        ([SHARDS[1]], SHARDS[0]),
        (["m-00002-of-00003.fp16.safetensors"], "m-00001-of-00003.fp16.safetensors"),
        (["m.fp16-1-of-2.safetensors"], "m.fp16-2-of-2.safetensors"),
        (["m-1-of-99999999999999.safetensors"], "m-00000000000002-of-99999999999999.safetensors"),
        (["{}-1-of-2.safetensors"], "{}-2-of-2.safetensors"),
    ],
)
def test_a_gap_in_shards_without_an_index_is_seen(names: list[str], missing: str) -> None:
    assert choose(names).missing == missing


def test_indexes_of_other_formats_are_none() -> None:
    assert is_index(INDEX)
    assert is_index("pytorch_model.bin.index.json")
    assert not is_index("tf_model.h5.index.json")
    assert not is_index("model_index.json")


@pytest.mark.parametrize(
    "path",
    [
        # Trainer's, accelerate's, FSDP's and DeepSpeed's.
        "optimizer.pt",
        "optimizer.bin",
        "optimizer_1.bin",
        "scheduler.bin",
        "scaler.pt",
        "rng_state_0.pth",
        "training_args.bin",
        "sampler.bin",
        "checkpoint-500/optimizer.pt",
        "global_step500/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "global_step500/mp_rank_00_model_states.pt",
        "mp_rank_00_model_states.pt",
    ],
)
def test_state_of_a_training_is_called_so(path: str) -> None:
    assert why_left_out(path) is LeftOutReason.TRAINING_STATE


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("original/model.safetensors", LeftOutReason.OTHER_COPY),
        ("pytorch_model_fsdp.bin", LeftOutReason.OTHER_COPY),
        ("optimizers.bin", LeftOutReason.OTHER_COPY),
        ("tf_model.h5", LeftOutReason.OTHER_COPY),
        ("model.safetensors.incomplete", LeftOutReason.UNFINISHED),
        ("original/m.gguf.crdownload", LeftOutReason.UNFINISHED),
        ("optimizer.pt.part", LeftOutReason.UNFINISHED),
        ("model.safetensors.aria2", LeftOutReason.UNFINISHED),
        ("model.safetensors.lock", None),
        ("config.json", None),
        ("tokenizer.model", None),
        ("trainer_state.json", None),
        ("random_states_0.pkl", None),
    ],
)
def test_other_files_are_copies_of_weights_or_belong_to_the_checkpoint(
    path: str, reason: LeftOutReason | None
) -> None:
    assert why_left_out(path) is reason
