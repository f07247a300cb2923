"""Files that several processes wrote a part of a model to: each is said to be that."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save

from files.model_store_files import safetensors_bytes, write
from tensor_dedup.errors import SeveralModelsError, UnsupportedError
from tensor_dedup.formats.checkpoint import open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WHOLE = torch.arange(16.0).reshape(4, 4)


def said(path: Path) -> str:
    with pytest.raises(UnsupportedError) as caught:
        open_checkpoint(path)
    assert "keep one" not in str(caught.value)
    return str(caught.value)


def names(path: Path) -> list[str]:
    return sorted(name for name, _, _ in open_checkpoint(path).tensors())


def slices(root: Path, ranks: int = 2) -> list[Path]:
    """What `HuggingFaceStorageWriter(save_distributed=True)` leaves of `WHOLE`, cut in rows."""
    root.mkdir(parents=True, exist_ok=True)
    rows = len(WHOLE) // ranks
    paths = []
    for rank in range(ranks):
        info = {"w": {"saved_offsets": [rank * rows, 0]}}
        metadata = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}
        paths.append(root / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors")
        part = WHOLE[rank * rows : (rank + 1) * rows].clone()
        save_file({"w": part}, paths[-1], metadata)
    return paths


def consolidate(root: Path, target: Path) -> None:
    """As docs/howto/dcp.md does it."""
    target.mkdir(exist_ok=True)
    held = set[str]()
    for file in root.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            held.update(opened.keys())
    consolidate_safetensors_files(str(root), str(target), dict.fromkeys(sorted(held), 1))


def test_slices_of_two_processes_are_put_together_as_the_error_says(tmp_path: Path) -> None:
    first, second = slices(tmp_path / "slices")
    for path in (tmp_path / "slices", first, second):
        assert "consolidate_safetensors_files" in said(path)
        assert "docs/howto/dcp.md" in said(path)
    consolidate(tmp_path / "slices", tmp_path / "whole")
    ((name, file, spec),) = open_checkpoint(tmp_path / "whole").tensors()
    assert (name, spec.shape) == ("w", (4, 4))
    with safe_open(file.path, "pt") as opened:
        assert torch.equal(opened.get_tensor("w"), WHOLE)


def test_slices_beside_what_was_put_together_are_left_out(tmp_path: Path) -> None:
    slices(tmp_path / "sharded")
    consolidate(tmp_path / "sharded", tmp_path)
    opened = open_checkpoint(tmp_path)
    assert names(tmp_path) == ["w"]
    assert {each.path for each in opened.left_out()} == {
        f"sharded/shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)
    }


def test_a_folder_called_sharded_may_hold_other_weights(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", safetensors_bytes({"w": 1.0}))
    write(tmp_path / "sharded" / "model.safetensors", safetensors_bytes({"w": 2.0}))
    assert names(tmp_path) == ["sharded/w", "w"]


def test_one_process_writes_whole_tensors(tmp_path: Path) -> None:
    (only,) = slices(tmp_path, 1)
    assert names(tmp_path) == names(only) == ["w"]


@pytest.mark.parametrize("text", ["no JSON", "[" * 100_000, "[1]", '{"w": {"saved_offsets": 3}}'])
def test_metadata_that_tells_no_slices_is_none(tmp_path: Path, text: str) -> None:
    write(tmp_path / "m.safetensors", safetensors_bytes({"w": 1.0}, DCP_SHARDING_INFO=text))
    assert names(tmp_path) == ["w"]


def distributed(root: Path) -> Path:
    """A folder of torch.distributed.checkpoint, of one process."""
    save({"model": {"w": WHOLE}}, checkpoint_id=root, no_dist=True)
    return root


def test_files_of_dcp_are_converted_as_the_error_says(tmp_path: Path) -> None:
    root = distributed(tmp_path / "step 1")
    assert {path.name for path in root.iterdir()} == {".metadata", "__0_0.distcp"}
    for path in (root, root / ".metadata", root / "__0_0.distcp"):
        assert f"dcp_to_torch '{root}' model.pt" in said(path)
    dcp_to_torch_save(root, tmp_path / "model.pt")
    assert names(tmp_path / "model.pt") == ["model.w"]


def test_of_accelerates_folders_the_model_is_named(tmp_path: Path) -> None:
    for folder in ("optimizer_0", "pytorch_model_fsdp_0"):
        distributed(tmp_path / folder)
    write(tmp_path / "scheduler.bin", b"x")
    assert f"dcp_to_torch {tmp_path}/pytorch_model_fsdp_0 " in said(tmp_path)


def test_the_state_of_an_optimizer_beside_weights_is_left_out(tmp_path: Path) -> None:
    distributed(tmp_path / "optimizer_0")
    write(tmp_path / "model.safetensors", safetensors_bytes({"w": 1.0}))
    opened = open_checkpoint(tmp_path)
    assert [(each.path, each.reason.value) for each in opened.left_out()] == [
        ("optimizer_0/__0_0.distcp", "state of a training")
    ]


def states(root: Path, files: Mapping[str, str]) -> Path:
    """Files of torch.save, each with one tensor of the name."""
    root.mkdir(parents=True)
    for number, (name, tensor) in enumerate(files.items()):
        if name.endswith(".safetensors"):
            save_file({tensor: torch.full((4,), float(number))}, root / name)
        else:
            torch.save({"module": {tensor: torch.full((4,), float(number))}}, root / name)
    return root


DEEPSPEED = [
    # Tensor parallel; ZeRO 1 and 2; ZeRO 3; pipeline; experts.
    {"mp_rank_00_model_states.pt": "w", "mp_rank_01_model_states.pt": "w"},
    {
        "mp_rank_00_model_states.pt": "w",
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": "o",
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt": "o",
    },
    {
        "zero_pp_rank_0_mp_rank_00_model_states.pt": "w",
        "zero_pp_rank_1_mp_rank_00_model_states.pt": "w",
    },
    {"layer_00-model_00-model_states.pt": "w", "layer_01-model_00-model_states.pt": "w"},
    {
        "mp_rank_00_model_states.pt": "w",
        "layer_0_expert_0_mp_rank_00_model_states.pt": "w",
        "expp_rank_0_mp_rank_00_optim_states.pt": "o",
    },
]


@pytest.mark.parametrize("files", DEEPSPEED)
def test_a_folder_of_deepspeed(tmp_path: Path, files: dict[str, str]) -> None:
    folder = states(tmp_path / "saved" / "global_step10", files)
    write(folder.parent / "latest", b"global_step10")
    for path in (folder, folder.parent):
        text = said(path)
        assert f"python {folder.parent}/zero_to_fp32.py {folder.parent} OUT" in text
        assert "tensor_dedup.integrations.deepspeed" in text
        assert "docs/howto/deepspeed.md" in text
    assert names(folder / next(iter(files))) == ["module.w"]  # one file can be looked into


def test_nothing_of_deepspeed_is_unpickled_to_say_so(tmp_path: Path) -> None:
    names_ = ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    for name in names_:
        write(tmp_path / name, b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00exit\x85R.")
    assert "zero_to_fp32.py" in said(tmp_path)


def test_beside_weights_deepspeeds_folder_is_the_state_of_a_training(tmp_path: Path) -> None:
    states(tmp_path / "global_step10", DEEPSPEED[1])
    write(tmp_path / "model.safetensors", safetensors_bytes({"w": 1.0}))
    assert names(tmp_path) == ["w"]


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        (
            {"model-rank-0-part-0.safetensors": "w", "model-rank-1-part-0.safetensors": "w"},
            "sharded_state",
        ),
        ({"model_world_size_2_rank_0.pt": "w", "model_world_size_2_rank_1.pt": "w"}, "FSDP"),
        ({"consolidated.00.pth": "w", "consolidated.01.pth": "w"}, "Meta"),
        ({"model0-mp2.safetensors": "w", "model1-mp2.safetensors": "w"}, "DeepSeek"),
        ({"rank0.safetensors": "w", "rank1.safetensors": "w"}, "several processes"),
        ({"x_tp_rank_0.pt": "w", "x_tp_rank_1.pt": "w"}, "several processes"),
        ({"w_tp-rank-0-of-2.safetensors": "w", "w_tp-rank-1-of-2.safetensors": "w"}, "processes"),
    ],
)
def test_files_of_other_tools(tmp_path: Path, files: dict[str, str], advice: str) -> None:
    assert advice in said(states(tmp_path / "saved", files))


def test_stages_of_a_pipeline_are_one_model(tmp_path: Path) -> None:
    files = {"rank0.safetensors": "w0", "rank1.safetensors": "w1"}
    assert names(states(tmp_path / "saved", files)) == ["w0", "w1"]


def test_the_rank_of_an_adapter_is_no_process(tmp_path: Path) -> None:
    files = {"lora_rank16.safetensors": "w", "lora_rank32.safetensors": "w"}
    with pytest.raises(SeveralModelsError):
        open_checkpoint(states(tmp_path / "saved", files))


def test_parts_of_one_process_are_one_model(tmp_path: Path) -> None:
    files = {f"model-rank-0-part-{part}.safetensors": f"w{part}" for part in (0, 1)}
    assert names(states(tmp_path / "saved", files)) == ["w0", "w1"]


def test_folders_of_processes_qualify_names(tmp_path: Path) -> None:
    for rank in (0, 1):
        states(tmp_path / "iter_10" / f"mp_rank_0{rank}", {"model_optim_rng.pt": "w"})
    assert names(tmp_path / "iter_10") == ["mp_rank_00/module.w", "mp_rank_01/module.w"]
