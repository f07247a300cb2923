"""Pipelines of Diffusers: the second one costs what differs, and nobody notices the first."""

import dataclasses
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel

from manager_runs import managers
from models import tiny_pipelines
from models.tiny_pipelines import equal, image, load, nbytes, parameters, shared
from processes import fresh, process_state
from tensor_dedup import (
    ConfigError,
    TensorDedupConfig,
    disable,
    enable,
    report,
    shares_memory,
    unshare,
    verify,
)
from tensor_dedup.loader.residents.registry import registry

# Tensors begin at a page of their slab when they are large, and at 64 bytes when not.
_SLACK = 256 << 10


pytestmark = pytest.mark.usefixtures("others")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pipelines")
    tiny_pipelines.make(root)
    tiny_pipelines.make_xl(root)
    return root


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, bytes]:
    """What each pipeline draws when it is loaded plainly."""
    return {name: image(load(folder / name)) for name in ("sd", "tuned")}


@pytest.mark.parametrize("order", [("sd", "tuned"), ("tuned", "sd")])
def test_the_second_pipeline_costs_what_differs(
    folder: Path, alone: dict[str, bytes], order: tuple[str, str], others: int
) -> None:
    before = process_state.slab_memory()
    with enable():
        first = load(folder / order[0])
        resident = registry.resident_bytes() - others
        second = load(folder / order[1])
    same = equal(first, second)
    assert shared(first, second) == same
    assert 300 < len(same) < len(parameters(first))
    every = parameters(second)
    private = sum(every[name].nbytes for name in every.keys() - same)
    assert nbytes(first) <= resident <= nbytes(first) + _SLACK
    assert private <= registry.resident_bytes() - others - resident <= private + _SLACK
    one, two = report().models[-2:]
    assert (one.total_bytes, one.shared_bytes) == (nbytes(first), 0)
    assert (two.total_bytes, two.private_bytes) == (nbytes(second), private)
    assert two.tensors_shared == len(same)
    parts = {each["name"]: each["private_bytes"] for each in two.components}
    assert parts == {"vae": 0, "text_encoder": 0, "unet": private}
    assert two.skipped == []
    assert image(first) == alone[order[0]]
    assert image(second) == alone[order[1]]
    memory = process_state.slab_memory()
    assert memory["Anonymous"] == before["Anonymous"]
    assert memory["Pss"] - before["Pss"] <= registry.resident_bytes() - others
    assert verify().ok


def test_what_is_cast_meets_what_was_saved_that_way(folder: Path, others: int) -> None:
    with enable():
        cast = load(folder / "sd", dtype=torch.float16)
        saved = load(folder / "fp16", dtype=torch.float16, variant="fp16")
    assert shared(cast, saved) == parameters(cast).keys()
    assert {each.dtype for each in parameters(saved).values()} == {torch.float16}
    assert registry.resident_bytes() - others <= nbytes(saved) + _SLACK


def as_bin(source: Path, target: Path) -> None:
    load(source).unet.save_pretrained(target, safe_serialization=False)
    assert list(target.glob("*.bin"))


# Diffusers leaves the file open that it does not map.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "how",
    [{}, {"low_cpu_mem_usage": False}, {"device_map": {"": "cpu"}}, {"disable_mmap": True}],
    ids=str,
)
def test_every_way_to_load_a_model_meets_the_others(
    folder: Path, tmp_path: Path, how: dict[str, Any]
) -> None:
    as_bin(folder / "sd", tmp_path / "bin")
    kind: Any = UNet2DConditionModel
    with enable():
        first = kind.from_pretrained(folder / "sd" / "unet")
        other = kind.from_pretrained(folder / "sd" / "unet", **how)
        pickled = kind.from_pretrained(tmp_path / "bin", use_safetensors=False, **how)
    every = parameters(first).keys()
    assert shared(first, other) == shared(first, pickled) == every


def test_shards_loaded_by_several_threads_are_shared(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = UNet2DConditionModel
    assert len(list((folder / "base" / "unet").glob("*-of-*.safetensors"))) > 1
    with enable():
        first = kind.from_pretrained(folder / "base" / "unet")
        monkeypatch.setattr("diffusers.models.modeling_utils.HF_ENABLE_PARALLEL_LOADING", True)
        second = kind.from_pretrained(folder / "base" / "unet")
    assert shared(first, second) == parameters(first).keys()


def test_a_single_file_meets_the_folder_it_was_made_of(folder: Path) -> None:
    kind: Any = UNet2DConditionModel
    unet = folder / "sd" / "unet"
    (file,) = unet.glob("*.safetensors")
    with enable():
        one = kind.from_single_file(str(file), config=str(unet), local_files_only=True)
        other = kind.from_pretrained(unet)
    assert shared(one, other) == parameters(one).keys()


def test_names_of_one_model_never_get_one_memory(folder: Path, tmp_path: Path) -> None:
    with enable():
        first, second = load(folder / "sd"), load(folder / "sd")
    for pipeline in (first, second):
        ones = [p for p in pipeline.unet.parameters() if torch.equal(p, torch.ones(32))]
        assert len(ones) > 1
        assert not any(shares_memory(a, b) for a in ones for b in ones if a is not b)
    assert shared(first, second) == parameters(first).keys()
    second.save_pretrained(tmp_path / "saved")
    first.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    for name in ("saved", "sharded"):
        with enable():
            again = load(tmp_path / name)
        assert shared(first, again) == parameters(first).keys()


def merge(pipeline: Any) -> None:
    """What peft does to fuse an adapter: it writes to the data of the base's weights."""
    for name, parameter in pipeline.unet.named_parameters():
        if "attn2.to_q" in name:
            parameter.data += 0.05


def load_state_dict(pipeline: Any) -> None:
    state = {name: value + 0.05 for name, value in pipeline.unet.state_dict().items()}
    pipeline.unet.load_state_dict(state)


def step(pipeline: Any) -> None:
    optimizer = torch.optim.SGD(pipeline.vae.parameters(), lr=0.1)
    pipeline.vae.decode(torch.ones(1, 4, 8, 8)).sample.square().sum().backward()
    optimizer.step()


def write_a_word(pipeline: Any) -> None:
    """What textual inversion does where the table has room; the last word ends every prompt."""
    table = pipeline.text_encoder.get_input_embeddings().weight
    table.data[-1] = 0.5


@pytest.mark.parametrize("write", [merge, load_state_dict, step, write_a_word])
def test_who_writes_to_weights_is_alone_in_it(
    folder: Path, alone: dict[str, bytes], write: Callable[[Any], None]
) -> None:
    with enable():
        reader, writer = load(folder / "sd"), load(folder / "sd")
    assert shared(reader, writer) == parameters(reader).keys()
    write(writer)
    touched = parameters(reader).keys() - equal(reader, writer)
    assert touched
    assert shared(reader, writer).isdisjoint(touched)
    assert verify().ok
    assert image(writer) != alone["sd"]
    assert image(reader) == alone["sd"]
    with enable():
        third = load(folder / "sd")
    assert image(third) == alone["sd"]


def test_a_real_adapter_is_fused_and_taken_back(folder: Path, alone: dict[str, bytes]) -> None:
    peft = pytest.importorskip("peft")
    with enable():
        reader, writer = load(folder / "sd"), load(folder / "sd")
    assert shared(reader, writer) == parameters(reader).keys()
    targets = ["to_q", "to_v"]
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights="gaussian")
    writer.unet.add_adapter(config)
    for name, parameter in writer.unet.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)
    writer.fuse_lora()
    assert image(writer) != alone["sd"]
    assert image(reader) == alone["sd"]
    writer.unfuse_lora()
    assert image(reader) == alone["sd"]
    assert verify().ok


def test_ten_loads_leave_nothing(folder: Path, others: int) -> None:
    sizes, lent, size = set(), [], 0
    for _ in range(10):
        with enable():
            pipeline = load(folder / "sd")
        size = nbytes(pipeline)
        sizes.add(registry.resident_bytes())
        del pipeline
        gc.collect()
        assert registry.resident_bytes() == others
        lent.append(process_state.allocated())
    assert len(sizes) == 1
    assert lent[-1] - lent[1] < size / 4  # of eight more


def test_two_threads_get_two_right_pipelines(folder: Path, alone: dict[str, bytes]) -> None:
    found: dict[str, Any] = {}
    names = ("sd", "tuned")
    with enable():
        threads = [
            threading.Thread(target=lambda n=name: found.update({n: load(folder / n)}))
            for name in names
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert shared(found["sd"], found["tuned"]) == equal(found["sd"], found["tuned"])
    assert shared(found["sd"], found["tuned"])
    assert {name: image(found[name]) for name in names} == alone


def test_no_file_stays_mapped(folder: Path) -> None:
    with enable({"min_tensor_bytes": 1024}):
        pipeline = load(folder / "sd")
    small = [p for p in parameters(pipeline).values() if p.nbytes < 1024]
    assert small
    assert len(report().models[-1].skipped) == len(small)
    gc.collect()  # circles of what hashed it
    managers.until(lambda: str(folder) not in Path("/proc/self/maps").read_text())


def test_components_of_the_caller_are_left_alone(folder: Path) -> None:
    vae = load(folder / "sd").vae
    before = {name: p.data_ptr() for name, p in vae.named_parameters()}
    with enable():
        pipeline = load(folder / "sd", vae=vae)
    assert {name: p.data_ptr() for name, p in pipeline.vae.named_parameters()} == before
    last = report().models[-1]
    assert {each["name"] for each in last.components} == {"text_encoder", "unet"}
    assert last.skipped == [("vae", "whoever called brought it")]
    # Of all loads of this process only the most frequent reasons are shown.
    shown = str(dataclasses.replace(report(), models=[last]))
    assert "not shared: 1 x whoever called brought it" in shown


def test_the_argument_is_taken_where_a_pipeline_is_loaded(folder: Path) -> None:
    models = len(report().models)
    first = load(folder / "sd", tensor_dedup=True)
    second = load(folder / "sd", tensor_dedup={"hash_algorithm": "blake3"})
    assert shared(first, second) == parameters(first).keys()
    assert len(report().models) == models + 2
    plain = load(folder / "sd")
    with enable():
        refused = load(folder / "sd", tensor_dedup=False)
    assert not shared(first, plain) | shared(first, refused)
    assert len(report().models) == models + 2
    with pytest.raises(ConfigError, match="hash_algorithm"):
        load(folder / "sd", tensor_dedup={"hash_algoritm": "blake3"})


def test_enable_is_a_call_and_a_context(folder: Path) -> None:
    outer = TensorDedupConfig(hash_algorithm="xxh3_128")
    enable(outer)
    first = load(folder / "sd")
    with enable() as config:
        assert config == TensorDedupConfig()
        second = load(folder / "sd")
    third = load(folder / "sd")
    disable()
    fourth = load(folder / "sd")
    assert shared(first, third) == parameters(first).keys()
    assert not shared(first, second)
    assert not shared(first, fourth)


def test_a_pipeline_that_is_cast_meets_its_like(folder: Path, alone: dict[str, bytes]) -> None:
    with enable():
        first, second, third = (load(folder / "sd") for _ in range(3))
    for pipeline in (first, second):
        pipeline.to(torch.float64)
    assert shared(first, second) == parameters(first).keys()
    assert not shared(first, third)
    first.to(torch.float32)
    assert shared(first, third) == parameters(first).keys()
    assert image(first) == image(third) == alone["sd"]


def test_a_pipeline_can_be_given_memory_of_its_own(folder: Path, alone: dict[str, bytes]) -> None:
    with enable():
        first, second = load(folder / "sd"), load(folder / "sd")
    assert shared(first, second) == parameters(first).keys()
    assert unshare(second) == nbytes(second)
    assert not shared(first, second)
    assert image(second) == alone["sd"]


def costs(root: str, socket: str) -> tuple[int, int]:
    """What a pipeline shared and what it added, in the process that calls this."""
    pipeline = load(Path(root) / "sd", tensor_dedup={"memory_manager": socket})
    last = report().models[-1]
    assert nbytes(pipeline) == last.total_bytes
    return last.shared_bytes, last.private_bytes


def test_processes_share_through_a_manager(folder: Path, tmp_path: Path) -> None:
    plain = load(folder / "sd")
    with managers.running(tmp_path) as manager:
        # Not forked from this process: threads of what ran here before do not survive a fork.
        first = fresh.call_forked(costs, str(folder), str(manager.socket))
        assert first == (0, nbytes(plain))
        pipeline = load(folder / "sd", tensor_dedup={"memory_manager": str(manager.socket)})
        assert equal(pipeline, plain) == parameters(plain).keys()
        last = report().models[-1]
        assert last.shared_bytes + last.private_bytes == nbytes(plain)
        # Tensors with an equal in the same model are this process's own.
        assert 0 < last.private_bytes < 0.05 * nbytes(plain)
        del pipeline
        gc.collect()
