"""Who writes weights in place has memory of its own first, where the kernel would not see to it.

Shown on mappings that may not be written: a writer that was missed does not corrupt a neighbour
there, it stops the process.
"""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models import tiny_pipelines
from models.tiny_pipelines import equal, image, load, parameters, shared
from processes import fresh
from tensor_dedup import enable, sweep, unshare, verify
from tensor_dedup.loader.unsharing.private import READ_ONLY_VARIABLE, needs_private_copy
from tensor_dedup.patches.huggingface.in_place_writers import (
    AVERAGES,
    INVERSION,
    LOAD_STATE,
    PLANNED,
)
from tensor_dedup.seams import usable

Found = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_pipelines.make(tmp_path)
    monkeypatch.setenv(READ_ONLY_VARIABLE, "1")
    return tmp_path


def adapter(pipeline: Any, **how: Any) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], **how)
    pipeline.unet.add_adapter(config)
    for name, parameter in pipeline.unet.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)


def fuse(pipeline: Any) -> None:
    adapter(pipeline, init_lora_weights="gaussian")
    pipeline.fuse_lora()


def fuse_and_unfuse(pipeline: Any) -> None:
    fuse(pipeline)
    pipeline.unfuse_lora()


def begin_with_olora(pipeline: Any) -> None:
    adapter(pipeline, init_lora_weights="olora")


def load_state_dict(pipeline: Any) -> None:
    state = {name: value + 0.05 for name, value in pipeline.unet.state_dict().items()}
    pipeline.unet.load_state_dict(state)


def step(pipeline: Any) -> None:
    decoder = pipeline.vae.decoder.conv_out
    optimizer = torch.optim.SGD(pipeline.vae.parameters(), lr=0.1)
    decoder(torch.ones(1, 32, 8, 8)).square().sum().backward()
    optimizer.step()


def step_with_closure(pipeline: Any) -> None:
    """The gradients come within the step."""
    decoder = pipeline.vae.decoder.conv_out
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.1)

    def closure() -> float:
        loss = decoder(torch.ones(1, 32, 8, 8)).square().sum()
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)


def average(pipeline: Any) -> None:
    from diffusers.training_utils import EMAModel

    wanted = [parameter + 1 for parameter in pipeline.vae.parameters()]
    kind: Any = EMAModel
    kind(wanted).copy_to(pipeline.vae.parameters())


def invert(pipeline: Any) -> None:
    """A new word, for which the table has room."""
    pipeline.load_textual_inversion({"<new>": torch.full((64,), 0.5)})


WRITERS: dict[str, Callable[[Any], None]] = {
    each.__name__: each
    for each in (
        fuse,
        fuse_and_unfuse,
        begin_with_olora,
        load_state_dict,
        step,
        step_with_closure,
        average,
        invert,
    )
}


def with_room(root: str) -> Any:
    """The pipeline with one row more in its table of words than it has words."""
    pipeline = load(Path(root) / "sd")
    torch.manual_seed(0)
    pipeline.text_encoder.resize_token_embeddings(len(pipeline.tokenizer) + 1)
    sweep(pipeline)
    return pipeline


def bases(pipeline: Any) -> dict[str, torch.nn.Parameter]:
    """Parameters by the names they had before adapters."""
    every = parameters(pipeline).items()
    return {name.replace(".base_layer", ""): p for name, p in every if "lora_" not in name}


def each_writer(root: str) -> tuple[dict[str, Found], dict[str, bool]]:
    from tensor_dedup import shares_memory

    found = {}
    with enable():
        reader = with_room(root)
        expected = image(reader)
        for name, write in WRITERS.items():
            writer = with_room(root)
            both = shared(reader, writer) == parameters(reader).keys()
            guarded = all(needs_private_copy(p) for p in parameters(writer).values())
            write(writer)
            theirs, mine = bases(writer), parameters(reader)
            found[name] = {
                "shared before": both and guarded,
                "differs": sorted(n for n, p in theirs.items() if not torch.equal(p, mine[n])),
                "private": sorted(n for n, p in theirs.items() if not shares_memory(p, mine[n])),
                "reader as before": image(reader) == expected,
                "verified": verify().ok,
            }
    return found, moved_saved_and_unshared(root)


def test_every_writer_is_given_memory_of_its_own(folder: Path) -> None:
    pytest.importorskip("peft")
    found, others = fresh.call_forked(each_writer, str(folder))
    assert others == dict.fromkeys(others, True)  # what does not write goes on as ever
    assert found.keys() == WRITERS.keys()
    for name, one in found.items():
        assert one["shared before"], name
        assert one["reader as before"], name
        assert one["verified"], name
        assert set(one["differs"]) <= set(one["private"]), name
    assert found["fuse"]["differs"]
    attention = {n for n in found["fuse"]["private"] if ".to_q." in n or ".to_v." in n}
    assert set(found["fuse"]["private"]) == attention  # only what was touched
    assert set(found["fuse_and_unfuse"]["private"]) == attention
    assert set(found["begin_with_olora"]["private"]) == attention
    assert found["step"]["private"] == ["vae.decoder.conv_out.bias", "vae.decoder.conv_out.weight"]
    assert found["step_with_closure"]["private"] == found["step"]["private"]
    assert {n.partition(".")[0] for n in found["load_state_dict"]["private"]} == {"unet"}
    assert {n.partition(".")[0] for n in found["average"]["private"]} == {"vae"}
    [table] = found["invert"]["private"]
    assert found["invert"]["differs"] == [table]
    assert table.endswith("embedding.weight")


_MISSED = """
import sys, torch, tensor_dedup
from tensor_dedup.loader.unsharing.private import needs_private_copy
first, second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
second.load_state_dict(first.state_dict())
for each in (first, second):
    tensor_dedup.sweep(each)
both = tensor_dedup.shares_memory(first.weight, second.weight)
print(both, needs_private_copy(second.weight), flush=True)
second.weight.data += 1
print("written", flush=True)
"""


@pytest.mark.parametrize("guarded", [True, False])
def test_a_writer_that_is_missed_stops_its_process_and_harms_nobody(
    monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    monkeypatch.setenv(READ_ONLY_VARIABLE, str(int(guarded)))
    done = subprocess.run(
        [sys.executable, "-c", _MISSED], capture_output=True, text=True, check=False
    )
    if guarded:
        assert (done.stdout, done.returncode) == ("True True\n", -signal.SIGSEGV), done.stderr
    else:
        assert (done.stdout, done.returncode) == ("True False\nwritten\n", 0), done.stderr


def moved_saved_and_unshared(root: str) -> dict[str, bool]:
    with enable():
        first, second = load(Path(root) / "sd"), load(Path(root) / "sd")
    expected = image(first)
    for pipeline in (first, second):
        pipeline.to(torch.float64)
        pipeline.to(torch.float32)
    again = shared(first, second) == parameters(first).keys() and image(second) == expected
    second.save_pretrained(Path(root) / "saved")
    with enable():
        third = load(Path(root) / "saved")
    reloaded = shared(first, third) == parameters(first).keys()
    unshare(third)
    third.unet.conv_in.weight.data += 1
    return {
        "moved": again,
        "reloaded": reloaded,
        "alone": not shared(first, third),
        "as before": image(first) == expected,
        "written": "unet.conv_in.weight" not in equal(first, third),
    }


def loaded_in_place(root: str) -> list[object]:
    """A distributed checkpoint, into the tensors of a model's state_dict."""
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException

    models = [torch.nn.Linear(64, 64) for _ in range(2)]
    for each in models:
        torch.nn.init.ones_(each.weight)
        torch.nn.init.ones_(each.bias)
        sweep(each)
    written = {name: value + 1 for name, value in models[0].state_dict().items()}
    folder = Path(root) / "checkpoint"
    state_dict_saver.save(written, checkpoint_id=folder, no_dist=True)
    refusal = ""
    try:
        state_dict_loader.load(models[1].state_dict(), checkpoint_id=folder, no_dist=True)
    except CheckpointException as error:
        refusal = str(error)
    before = float(models[1].weight.max())
    unshare(models[1])
    state_dict_loader.load(models[1].state_dict(), checkpoint_id=folder, no_dist=True)
    after = [float(each.weight.min()) for each in models]
    return ["tensor_dedup.unshare(model) before" in refusal, before, after, verify().ok]


def test_a_distributed_checkpoint_is_not_loaded_into_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(READ_ONLY_VARIABLE, "1")
    assert fresh.call_forked(loaded_in_place, str(tmp_path)) == [True, 1.0, [1.0, 2.0], True]


def test_every_seam_is_what_was_recorded() -> None:
    import diffusers.loaders.textual_inversion
    import diffusers.training_utils  # noqa: F401

    assert [
        seam.target for seam in (LOAD_STATE, INVERSION, PLANNED, *AVERAGES) if not usable(seam)
    ] == []
