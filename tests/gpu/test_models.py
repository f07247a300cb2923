"""Models of real libraries that go to a GPU: the second costs what differs, and answers are plain.

Each library is left out, with its name, where it is not installed. Without a GPU
`tests/patches/test_gpu_conversions.py` does the like over the fake driver. vLLM: `test_vllm.py`.
"""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpu_runs import gpu_world
from tensor_dedup import enable, report, shares_memory, sweep, verify
from tensor_dedup.loader.cuda.devices import DEVICES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpu_world.REHEARSAL, reason="rehearsed by patches/test_gpu_conversions.py"),
]


def nothing_is_left() -> None:
    gc.collect()
    for each in DEVICES.opened():
        assert each.gpu.reap(wait=True) == 0


def a_gibibyte() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(4096, 4096, bias=False) for _ in range(16)]
    return nn.Sequential(*layers).eval().requires_grad_(requires_grad=False)


@pytest.mark.alone
def test_a_model_that_fits_only_because_it_shares() -> None:
    first, second = a_gibibyte(), a_gibibyte()
    for each in (first, second):
        sweep(each)
    rows = torch.ones(2, 4096, device="cuda")
    right = first.to("cuda")(rows)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(free - (256 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        a_gibibyte().to("cuda")
    second.to("cuda")
    both = zip(first.parameters(), second.parameters(), strict=True)
    assert all(shares_memory(p, q) for p, q in both)
    assert torch.equal(second(rows), right)
    assert not report().devices
    del first, second, each, taken, both
    torch.cuda.empty_cache()
    nothing_is_left()


def test_a_pair_of_diffusers(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    from models import tiny_pipelines as tiny

    tiny.make(tmp_path)
    names = ("sd", "tuned")
    alone = [tiny.image(tiny.load(tmp_path / name).to("cuda")) for name in names]
    with enable():
        two = [tiny.load(tmp_path / name) for name in names]
    equal = tiny.equal(*two)
    for each in two:
        each.to("cuda")
    assert "cuda:0" not in report().devices, report().devices
    assert tiny.shared(*two) == equal
    assert [tiny.image(each) for each in two] == alone
    assert verify().ok
    del two, each
    nothing_is_left()


@pytest.mark.parametrize("way", ["to", "device_map"])
def test_a_pair_of_transformers(way: str, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from models import tiny_checkpoints as checkpoints

    made = checkpoints.make("llama_tied", tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokens = torch.arange(8, device="cuda")[None]
    right = load(made.base).to("cuda")(tokens).logits.detach()
    with enable():
        options = {"device_map": "cuda"} if way == "device_map" else {}
        two = [load(made.base, **options).to("cuda") for _ in range(2)]
    first, second = (list(each.parameters()) for each in two)
    assert all(shares_memory(p, q) for p, q in zip(first, second, strict=True))
    assert torch.equal(two[1](tokens).logits.detach(), right)
    del two, first, second
    nothing_is_left()
