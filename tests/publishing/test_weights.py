"""What is published of a model has the names and bytes that its checkpoint would have."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from models import tiny_checkpoints as checkpoints
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.publishing.weights import checkpoint_weights, config_files


# The first ties weights; the others have other names in memory than in a checkpoint.
@pytest.mark.parametrize("kind", ["llama_tied", "mixtral", "qwen3_moe"])
def test_a_model_of_transformers_is_published_as_it_is_saved(kind: str, tmp_path: Path) -> None:
    base = checkpoints.make(kind, tmp_path / "made").base
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    found = checkpoint_weights(torch.nn.DataParallel(model))
    assert found.keys() == saved.keys() != model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
    texts = config_files(model)
    assert texts
    assert texts.keys() >= {"config.json"}
    for name, text in texts.items():
        assert text == (tmp_path / "saved" / name).read_bytes()


def test_the_config_of_a_model_made_from_scratch_names_its_class() -> None:
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=16,
    )
    make: Any = transformers.LlamaForCausalLM
    model = make(config).to(torch.bfloat16)
    text = config_files(model)["config.json"].decode()
    assert '"LlamaForCausalLM"' in text
    assert '"bfloat16"' in text
    assert config.architectures is None  # the model's own stays as it was


def test_other_models_have_no_config() -> None:
    assert config_files(torch.nn.Linear(2, 2)) == config_files({}) == {}


def test_views_and_empty_tensors_are_weights_of_their_own() -> None:
    class Views(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.arange(6.0)
            self.whole = torch.nn.Parameter(whole)
            self.first = torch.nn.Parameter(whole[:3])
            self.empty = torch.nn.Parameter(torch.empty(0))
            self.other = torch.nn.Parameter(torch.empty(0))

    assert checkpoint_weights(Views()).keys() == {"whole", "first", "empty", "other"}


@pytest.mark.parametrize(
    "names",
    [[], ["_orig_mod.w"], ["a.base_layer.weight"], ["base_model.model.q.lora_A.default.weight"]],
)
def test_a_mapping_that_is_no_checkpoint_is_refused(names: list[str]) -> None:
    with pytest.raises(UnsupportedError, match="weights by their names"):
        checkpoint_weights(dict.fromkeys(names, torch.zeros(2)))
    assert checkpoint_weights({"lora_alpha": torch.zeros(2)}).keys() == {"lora_alpha"}
