"""Models that go to a GPU share read-only memory there, over the fake driver.

The device is one of torch's own, `fakegpu`, which the CPU computes for (`torch_gpu`). It stays for
a whole process, so each test is a process; what each of them asserts, it asserts there.
"""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpu_runs import gpus
from gpu_runs.fake_driver import FakeDriver, RefusingDriver
from models import tiny_checkpoints as checkpoints
from processes import fresh
from tensor_dedup import TensorDedupConfig, enable, move, report, shares_memory, sweep, unshare
from tensor_dedup.loader.cuda import new_slabs
from tensor_dedup.loader.cuda.devices import DEVICES
from tensor_dedup.loader.cuda.gpu import Gpu
from tensor_dedup.loader.cuda.transfers import BUFFER_BYTES, MOST_BUFFERS
from tensor_dedup.loader.not_shared import NotShared
from tensor_dedup.loader.unsharing.device_copies import COPIES
from tensor_dedup.loader.unsharing.unshare import verify
from tensor_dedup.memory_manager.cuda.driver import Access, Result, refused

PLACE = "fakegpu"


def install(driver: Any = None) -> FakeDriver:
    from gpu_runs import torch_gpu

    return torch_gpu.install(driver)


def model(seed: int = 0) -> Any:
    """Linear layers, and twins: norms of equal bytes."""
    torch.manual_seed(seed)
    parts = nn.Linear(64, 64), nn.LayerNorm(64), nn.LayerNorm(64), nn.BatchNorm1d(64)
    return nn.Sequential(*parts).eval()


def pair() -> tuple[Any, Any]:
    models = model(), model()
    for each in models:
        sweep(each)
        each.to(PLACE)
    assert one_memory(*models)
    return models


def one_memory(a: nn.Module, b: nn.Module) -> bool:
    return all(shares_memory(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def answer(of: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    inputs = torch.arange(128, dtype=torch.float32).view(2, 64).div_(100).to(dtype)
    with torch.no_grad():
        result: torch.Tensor = of(inputs.to(PLACE))
    return result.cpu()


def gpu() -> Gpu:
    [opened] = DEVICES.opened()
    return opened.gpu


def nothing_is_left(fake: FakeDriver) -> None:
    gc.collect()
    assert gpu().reap(wait=True) == 0
    gpu().transfers.fence()  # what buffers were sent for has an event until then
    assert fake.left() == {}


def in_one_process() -> str:
    fake = install()
    plain = model().to(PLACE)
    right, half = answer(plain), answer(plain.half(), torch.float16)
    first, second = pair()
    assert {fake.access(p.data_ptr()) for p in first.parameters()} == {Access.READ}
    assert len({p.data_ptr() for p in first.parameters()}) == len(list(first.parameters()))
    # Buffers are written by forward passes: each model has its own.
    assert not shares_memory(first[3].running_mean, second[3].running_mean)
    assert torch.equal(answer(first), right)
    assert torch.equal(answer(second), right)
    assert verify().ok
    assert verify().residents >= 6
    assert "devices" in report().to_dict()
    assert not report().devices

    # A cast there is followed, and so is the way back to host memory.
    first.half()
    second.half()
    assert one_memory(first, second)
    assert torch.equal(answer(first, torch.float16), half)
    for each in (first, second):
        each.cpu()
        assert not any(p.device.type == PLACE for p in each.parameters())
        # torch makes new parameters on the way to and from this device, unlike cuda: they are
        # not known for those that were shared.
        sweep(each)
    assert one_memory(first, second)
    for each in (first, second):
        each.to(PLACE)
    assert one_memory(first, second)
    assert torch.equal(answer(second, torch.float16), half)
    del first, second

    # Who writes has memory of its own first, and the other does not notice.
    first, second = pair()
    first.load_state_dict({n: v * 2 for n, v in second.state_dict().items()})
    assert {fake.access(p.data_ptr()) for p in first.parameters()} == {Access.NONE}
    assert torch.equal(answer(second), right)
    third = model()
    sweep(third)
    third.to(PLACE)
    assert one_memory(second, third)
    for each in third.parameters():
        each.grad = torch.ones_like(each)
    torch.optim.SGD(third.parameters(), lr=0.1).step()
    assert torch.equal(answer(second), right)
    assert not torch.equal(answer(third), right)

    # Whole slabs become private where they are.
    fourth = model()
    sweep(fourth)
    move(fourth, PLACE)
    places = [p.data_ptr() for p in fourth.parameters()]
    assert unshare(fourth) > 0
    assert [p.data_ptr() for p in fourth.parameters()] == places
    with torch.no_grad():
        fourth[0].weight.zero_()
    assert torch.equal(answer(second), right)

    # What somebody else put there is shared where it is.
    loaded = [model(1).to(PLACE) for _ in range(2)]
    expected = answer(loaded[0])
    made = [sweep(each) for each in loaded]
    assert made[0].private_bytes >= loaded[0][0].weight.nbytes  # norms are as above
    assert made[1].private_bytes == 0
    assert one_memory(*loaded)
    assert torch.equal(answer(loaded[1]), expected)
    assert sweep(loaded[1]).private_bytes == 0
    # With comparisons asked for nothing is shared on a GPU, and it says so.
    other = model(2).to(PLACE)
    refused = sweep(other, TensorDedupConfig(verify_bytes=True))
    assert refused.shared_bytes == 0
    assert all("verify_bytes" in reason for _, reason in refused.skipped)

    del plain, first, second, third, fourth, loaded, other, each
    nothing_is_left(fake)
    return "done"


def test_models_of_one_process_share_and_stay_apart_when_one_writes() -> None:
    assert fresh.call_forked(in_one_process) == "done"


def large_model(seed: int = 0) -> Any:
    """One weight in blocks, one in a slab of its own, and small ones."""
    torch.manual_seed(seed)
    parts = nn.Linear(4096, 2304, bias=False), nn.Linear(2048, 2176), nn.Linear(64, 64)
    return nn.Sequential(*parts, nn.LayerNorm(64)).eval()


def counted() -> str:
    fake = install(driver := FakeDriver(late=True))
    models = large_model(), large_model()
    size = sum(each.nbytes for each in models[0].parameters())
    for each in models:
        sweep(each)
    for each, copied in zip(models, (size, 0), strict=True):
        driver.traffic.clear()
        each.to(PLACE)
        assert driver.traffic["copy_in"] == copied
        assert driver.traffic["copy_out"] == 0
        assert driver.traffic["synchronize"] <= 1
        assert driver.traffic["page_lock"] <= MOST_BUFFERS * BUFFER_BYTES
    assert one_memory(*models)
    right = [p.detach().clone() for p in large_model().parameters()]
    assert all(map(torch.equal, [p.cpu() for p in models[1].parameters()], right))

    # What lies on the GPU already is not copied to host memory to be hashed, but passes through.
    loaded = [large_model(1).to(PLACE) for _ in range(2)]
    for each, private in zip(loaded, (size, 0), strict=True):
        driver.traffic.clear()
        made = sweep(each)
        assert made.private_bytes == pytest.approx(private, abs=1024)  # norms are as above
        assert driver.traffic["copy_out"] == made.bytes_hashed == size
        assert driver.traffic["copy_in"] == driver.traffic["page_lock"] == 0
        # Before all of it, and after what is in blocks and what is not.
        assert driver.traffic["synchronize"] <= 3
    assert one_memory(*loaded)
    driver.traffic.clear()
    found = verify()
    assert found.ok
    on_gpu = sum(each.nbytes for _, each in DEVICES.opened()[0].alive())
    assert driver.traffic["copy_out"] == on_gpu > size
    del models, loaded, each
    nothing_is_left(driver)
    assert fake.left() == {}
    return "done"


def test_each_byte_passes_once_through_page_locked_memory_and_is_hashed_once() -> None:
    assert fresh.call_forked(counted) == "done"


def without_a_driver() -> str:
    """Where a GPU's memory cannot be mapped, ordinary copies are shared as ever, and it is said."""
    fake = install(RefusingDriver(FakeDriver(), refuse=1))
    first, second = model(), model()
    for each in (first, second):
        sweep(each)
        each.to(PLACE)
    assert {p.device.type for p in first.parameters()} == {PLACE}
    assert len(COPIES) == len(list(first.parameters()))
    assert one_memory(first, second)
    assert torch.equal(answer(first), answer(second))
    [reason] = report().devices.values()
    assert "out of memory" in reason.lower() or "no 0 bytes" in reason
    assert reason in str(report())
    assert fake.left() == {}
    return "done"


def test_without_the_driver_copies_are_shared_and_the_reason_is_said() -> None:
    assert fresh.call_forked(without_a_driver) == "done"


def after_a_shortage() -> str:
    fake = gpus.Full()
    install(fake)
    plain = model().to(PLACE)
    right = answer(plain)
    first, second = model(), model()
    for each in (first, second):
        sweep(each)
    fake.room = 0
    first.to(PLACE)
    assert fake.left() == {}
    assert len(COPIES) == len(list(first.parameters()))
    [reason] = report().devices.values()
    assert "the GPU has no" in reason
    fake.room = 1 << 40
    second.to(PLACE)
    assert {fake.access(p.data_ptr()) for p in second.parameters()} == {Access.READ}
    # Who goes there once more is given what there is by now.
    first.to(PLACE)
    assert one_memory(first, second)
    gc.collect()
    assert len(COPIES) == 0
    assert torch.equal(answer(first), right)

    # What is small may find room where what is large does not.
    wide = [nn.Sequential(nn.Linear(2048, 2048), nn.Linear(64, 64)) for _ in range(2)]
    wide[1].load_state_dict(wide[0].state_dict())
    for each in wide:
        sweep(each)
    fake.room = gpus.in_use() + (1 << 20)
    for each in wide:
        each.to(PLACE)
    assert COPIES.holds(next(wide[0].parameters()))
    assert {fake.access(p.data_ptr()) for p in wide[1][1].parameters()} == {Access.READ}
    assert one_memory(*wide)

    # The same where it lies on the GPU already, which is hashed only once.
    fake.room = 1 << 40
    small, large = (nn.Sequential(nn.Identity(), nn.Linear(64, 64)).to(PLACE) for _ in range(2))
    large[1].load_state_dict(small[1].state_dict())
    large[0] = nn.Linear(2048, 2048).to(PLACE)
    sweep(small)
    fake.room = gpus.in_use() + (1 << 20)
    made = sweep(large)
    assert [name for name, _ in made.skipped] == ["0.weight"]
    assert one_memory(small[1], large[1])
    assert made.bytes_hashed == sum(each.nbytes for each in large.parameters())
    del plain, first, second, wide, each, small, large
    nothing_is_left(fake)
    return "done"


def test_after_a_shortage_a_model_that_moves_again_shares_and_what_fits_is_shared_at_once() -> None:
    assert fresh.call_forked(after_a_shortage) == "done"


class Refusing(FakeDriver):
    """A fake driver whose `nth` call (from 1) of `name` is refused."""

    name, nth = "", 0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name == super().__getattribute__("name"):
            self.nth -= 1
            if not self.nth:
                raise refused(name, Result.OUT_OF_MEMORY, 0)
        return found


def refusing() -> str:
    """A model that lies on the GPU is shared, or stays as it is, and so does what it has twice."""
    install(fake := Refusing())
    vars(new_slabs)["OWN_SLAB_BYTES"] = 16 << 10  # so that one round has two slabs
    sweep(model().to(PLACE))  # which opens the GPU
    gc.collect()
    gpu().reap(wait=True)
    right = list(model(1).parameters())
    # The fourth slab that is mapped is the second that the model maps.
    for name, nth in (("", 0), ("map", 4), ("synchronize", 1)):
        mine = model(1).to(PLACE)
        mine[0].register_buffer("view", mine[0].bias.data[:8])
        before = [each.data_ptr() for each in mine.parameters()]
        fake.name, fake.nth = name, nth
        made = sweep(mine)
        assert fake.nth <= 0  # it was refused
        fake.name = ""
        assert dict(made.skipped)["0.bias"] == NotShared.SHARED_STORAGE
        assert mine[0].view.data_ptr() == mine[0].bias.data_ptr() == before[1]
        same = [a == b.data_ptr() for a, b in zip(before, mine.parameters(), strict=True)]
        assert all(same) if name == "synchronize" else sum(same) == len(made.skipped) == 1
        assert all(torch.equal(a.cpu(), b) for a, b in zip(mine.parameters(), right, strict=True))
        del mine
        gc.collect()
        gpu().reap(wait=True)
    return "done"


def test_where_a_call_fails_a_model_on_the_gpu_is_shared_or_stays_as_it_is() -> None:
    assert fresh.call_forked(refusing) == "done"


def constructed() -> str:
    from tensor_dedup.loader.deferred.uninitialised import UninitialisedStorages
    from tensor_dedup.patches.vllm.run import _on_host

    install()
    untouched, place = UninitialisedStorages(), torch.device(PLACE)
    with place, untouched.watching():
        empty, written = torch.empty(4), torch.empty(4)
        written[1:3].fill_(3)
        made = {
            "empty": empty,
            "like": torch.empty_like(empty),
            "new": empty.new_empty(4),
            "strided": torch.empty_strided((2, 2), (1, 2)),
            "filled": torch.full((4,), 7.0),
            "written": written,
        }
        assert {each.device.type for each in made.values()} == {PLACE}
        # As parameters, which torch puts from this device to the host as it does from cuda only.
        host = {name: _on_host(nn.Parameter(each), untouched) for name, each in made.items()}
    assert {each.device.type for each in host.values()} == {"cpu"}
    known = {name for name, each in host.items() if untouched.holds(each)}
    assert known == {"empty", "like", "new", "strided"}
    assert host["strided"].stride() == (1, 2)
    assert host["filled"].tolist() == [7.0] * 4
    assert host["written"].tolist()[1:3] == [3.0] * 2
    return "done"


@pytest.mark.vllm
def test_of_what_a_constructor_leaves_on_the_gpu_only_what_it_wrote_comes_along() -> None:
    assert fresh.call_forked(constructed) == "done"


def pipelines(root: str) -> str:
    from transformers import AutoModelForCausalLM

    from models import tiny_pipelines as tiny

    fake = install()
    folder = Path(root)
    tiny.make(folder)
    alone = {name: tiny.load(folder / name).to(PLACE) for name in ("sd", "tuned")}
    expected = {name: tiny.image(each) for name, each in alone.items()}
    assert expected["sd"] != expected["tuned"]
    del alone
    with enable():
        base, tuned = (tiny.load(folder / name) for name in ("sd", "tuned"))
    equal = tiny.equal(base, tuned)
    size = {name: each.nbytes for name, each in tiny.parameters(tuned).items()}
    fake.traffic.clear()
    base.to(PLACE)
    # Less than all: components have biases of zeros in common.
    assert sum(size.values()) * 0.9 < fake.traffic["copy_in"] <= sum(size.values())
    fake.traffic.clear()
    move(tuned, PLACE)
    assert tiny.shared(base, tuned) == equal
    differ = sum(size[name] for name in size.keys() - equal)
    assert 0 < fake.traffic["copy_in"] <= differ < sum(size.values())
    assert fake.traffic["copy_out"] == 0
    assert {fake.access(p.data_ptr()) for p in tiny.parameters(tuned).values()} == {Access.READ}
    assert tiny.image(base) == expected["sd"]
    assert tiny.image(tuned) == expected["tuned"]
    assert not report().devices
    del base, tuned

    kind: Any = AutoModelForCausalLM
    tokens = torch.arange(8)[None].to(PLACE)
    made = checkpoints.make("llama_tied", folder)
    right = kind.from_pretrained(made.base).to(PLACE)(tokens).logits.detach().cpu()
    two = []
    for _ in range(2):
        fake.traffic.clear()
        with enable():
            two.append(kind.from_pretrained(made.base, device_map=PLACE))
        last = report().models[-1]
        assert fake.traffic["copy_out"] == last.bytes_hashed == last.total_bytes > 0
        assert fake.traffic["copy_in"] == 0
    assert last.shared_bytes == last.total_bytes > 0, last.skipped
    assert one_memory(*two)
    assert torch.equal(two[1](tokens).logits.detach().cpu(), right)
    del two
    nothing_is_left(fake)
    return "done"


def test_pipelines_and_models_of_transformers_share_on_the_device(tmp_path: Path) -> None:
    assert fresh.call_forked(pipelines, str(tmp_path)) == "done"


def with_a_manager(socket: str) -> list[float]:
    install()
    mine = model()
    config = {"memory_manager": socket}
    sweep(mine, config)
    mine.to(PLACE)
    assert "fakegpu:0" not in report().devices, report().devices
    with enable(config):
        pass
    return [float(number) for number in answer(mine).flatten()]


def test_two_processes_have_it_once_with_a_manager_of_that_gpu(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with gpus.running(tmp_path) as manager:
        socket = str(tmp_path / "m.sock")
        first = fresh.call_forked(with_a_manager, socket)
        held = manager.overview().totals
        assert held.residents > 0
        # One that shares nothing with the first by birth: addresses, seeds of hashes.
        assert fresh.call(with_a_manager, socket) == first
        after = manager.overview().totals
        assert (after.residents, after.resident_bytes) == (held.residents, held.resident_bytes)
        assert after.published == held.published


@pytest.mark.parametrize("kind", ["cuda", "meta"])
def test_a_device_that_is_no_gpu_here_is_none(kind: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert DEVICES.at(torch.device(kind)) is None
    assert (DEVICES.why_not(torch.device(kind)) is not None) == (kind == "cuda")
