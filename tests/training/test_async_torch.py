"""Saves in the background of torch's models: hooks, statistics, devices."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from store_runs.stores import PageablePool, shares
from tensor_dedup.store.errors import ChangedModelError
from tensor_dedup.store.gathered import Gathered
from tensor_dedup.store.steps.notes import Notes
from tensor_dedup.training import CheckpointStore, state
from tensor_dedup.training.capture import CaptureContext, StepCapture
from tensor_dedup.training.devices import CudaDevice, host_tensor
from tensor_dedup.training.errors import UnsupportedArrayError
from tensor_dedup.training.host_pool import HostPool
from tensor_dedup.training.snapshot import ExtractedStep, StepSnapshot
from tensor_dedup.training.state import StateChunk
from training_runs.trainings import Training

NOTES = Notes("run", 0, "pytorch", {})


def state_of(training: Training) -> Any:
    model = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    return copy.deepcopy([model, training.optimizer.state_dict(), training.generator.get_state()])


def assert_equal(found: Any, expected: Any) -> None:
    """Bit for bit, whatever it is nested in."""
    assert type(found) is type(expected) or isinstance(found, dict)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert_equal(found[name], value)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("hooked", [True, False])
def test_steps_are_what_they_were_when_they_were_saved(tmp_path: Path, hooked: bool) -> None:
    training, kept = Training(), {}
    with CheckpointStore(tmp_path, "run") as run:
        if hooked:
            run.hook(training.optimizer)
        for step in range(5):
            training.step()
            kept[step] = state_of(training)
            run.save_async(training.state, step)
    assert shares(run)
    for step, (model, optimizer, generator) in kept.items():
        found = run.load(step)
        assert_equal(found["model"], model)
        assert_equal(found["optimizer"], optimizer)
        assert_equal(found["generator"].get_state(), generator)
        assert len(found["losses"]) == step + 1


def test_a_training_that_resumes_goes_on_as_before(tmp_path: Path) -> None:
    first, second = Training(), Training()
    with CheckpointStore(tmp_path, "run") as run:
        for step in range(4):
            first.step()
            run.save_async(first.state, step)
    assert shares(run)
    assert second.resume(run) == 4
    assert [second.step() for _ in range(4)] == [first.step() for _ in range(4)]


def test_hooks_are_taken_off(tmp_path: Path) -> None:
    training, run = Training(), CheckpointStore(tmp_path, "run")
    assert not run._saves._hooked
    hook = run.hook(training.optimizer)
    assert run._saves._hooked
    hook.remove()
    assert not run._saves._hooked
    run.hook(training.optimizer)
    del training, hook
    assert not run._saves._hooked  # an optimizer that is gone makes nothing wait


def step_of(values: dict[str, Any]) -> ExtractedStep:
    return ExtractedStep(NOTES, [StateChunk(each, name) for name, each in values.items()], {})


def capture_of(values: dict[str, torch.Tensor], pool: int = 1 << 20, **more: Any) -> StepCapture:
    return StepCapture(
        step_of(values), CaptureContext(HostPool(pool), more.get("devices", []), set(), {})
    )


def held(snapshot: StepSnapshot) -> list[bytes]:
    return [bytes(piece.data) for piece in snapshot.pieces]


def data_of(*tensors: torch.Tensor) -> list[bytes]:
    return [bytes(each.contiguous().view(-1).view(torch.uint8).numpy()) for each in tensors]


def test_a_write_before_the_update_is_found() -> None:
    weight = nn.Parameter(torch.randn(200, 200))
    capture = capture_of({"weight": weight.detach()})
    with torch.no_grad():
        weight.add_(1)
    capture.work()
    with pytest.raises(ChangedModelError, match="'weight'"):
        capture.snapshot()


@pytest.mark.parametrize("first", ["tensor", "array"])
def test_an_array_is_copied_at_once_where_a_tensor_shares_its_memory(first: str) -> None:
    tensor = torch.randn(200, 200)
    array, expected = tensor.numpy(), data_of(tensor)
    values: dict[str, Any] = {"tensor": tensor, "array": array}
    order = [first, *(values.keys() - {first})]
    capture = StepCapture(
        step_of({name: values[name] for name in order}),
        CaptureContext(HostPool(1 << 20), [], set(), {}),
    )
    assert len(capture._large) == 1
    capture.guard()
    array += 1
    capture.hold()
    assert held(capture.snapshot()) == 2 * expected


def test_a_write_is_found_through_any_tensor_of_one_memory() -> None:
    for number in range(2):
        array = np.zeros((200, 200))
        tensors = [torch.from_numpy(array), torch.from_numpy(array)]  # each counts its own
        capture = capture_of({"a": tensors[0], "b": tensors[1]})
        assert len(capture._large) == 1
        tensors[number].add_(1)
        capture.work()
        with pytest.raises(ChangedModelError, match="'a'"):
            capture.snapshot()


def test_all_kinds_of_tensors_are_copied_in_order() -> None:
    values = {
        "plain": torch.randn(200, 200),
        "turned": torch.randn(200, 300).T,
        "half": torch.randn(300, 300).bfloat16(),
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(3),
        "conj": torch.randn(200, 200, dtype=torch.complex64).conj(),
        "inference": _inference(),
    }
    expected = data_of(*(each.resolve_conj() for each in values.values()))
    capture = capture_of(values, 8 << 20)
    capture.hold()
    for tensor in values.values():
        tensor.resolve_conj().numpy().fill(7) if tensor.dtype != torch.bfloat16 else tensor.fill_(7)
    assert held(capture.snapshot()) == expected
    capture.release()


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(150, 150)


class Slow:
    """A device whose copies are made when somebody waits for them, and not before."""

    def __init__(self) -> None:
        self.begun: list[_SlowCopies] = []

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() == 2

    def begin(self, tensor: torch.Tensor) -> "_SlowCopies":
        self.begun.append(_SlowCopies())
        return self.begun[-1]


class _SlowCopies:
    def __init__(self) -> None:
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._lock = threading.Lock()

    def copy(
        self, tensor: torch.Tensor, into: memoryview
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        host = host_tensor(tensor, into)
        self.waiting.append((host, tensor))
        return host, self.hold

    def hold(self) -> None:
        with self._lock:  # each once, as a stream does: the background waits while training goes on
            for host, tensor in self.waiting:
                host.copy_(tensor)
            self.waiting = []


def staged(values: dict[str, torch.Tensor], room: int = 1 << 20) -> tuple[StepCapture, Slow]:
    device = Slow()
    context = CaptureContext(PageablePool(room), [device], set(), {})
    return StepCapture(step_of(values), context), device


def test_copies_from_a_device_are_waited_for_before_the_update() -> None:
    values = {"a": torch.randn(200, 200), "b": torch.randn(9), "c": torch.randn(90, 3).bfloat16()}
    expected = data_of(*values.values())
    capture, device = staged(values)
    assert [len(each.waiting) for each in device.begun] == [1]
    values["c"].fill_(1)  # what is small is copied at once: forward passes change statistics
    values["b"].fill_(1)
    capture.hold()
    for tensor in values.values():
        tensor.fill_(0)
    assert held(capture.snapshot()) == expected


def test_memory_of_a_save_that_failed_is_used_again_when_the_device_has_written_to_it() -> None:
    capture, device = staged({"large": torch.randn(200, 200), "small": torch.randn(9, 1)})
    pool = capture._context.pool
    capture.release()
    assert [len(each.waiting) for each in device.begun] == [0]
    pool.clear()
    assert pool.allocated == 0


def test_memory_to_which_a_broken_device_may_write_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: _SlowCopies) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(_SlowCopies, "hold", fail)
    values = {"large": torch.randn(200, 200)}
    pool = PageablePool(1 << 20)
    context = CaptureContext(pool, [Slow()], set(), {})
    capture = StepCapture(step_of(values), context)
    capture.release()
    pool.clear()
    assert pool.allocated >= values["large"].nbytes


def test_views_are_resolved_by_the_copies_of_a_device() -> None:
    plain = torch.randn(300, 200, dtype=torch.complex64)
    values = {"plain": plain, "conj": plain.conj(), "neg": plain.conj().imag}
    expected = data_of(plain, plain.conj().resolve_conj(), values["neg"].resolve_neg())
    capture, device = staged(values, 4 << 20)
    given = [tensor for _, tensor in device.begun[0].waiting]
    assert [(each.is_conj(), each.is_neg()) for each in given] == [
        (False, False),
        (True, False),
        (False, True),
    ]
    capture.hold()
    assert held(capture.snapshot()) == expected


def test_a_device_waits_at_once_for_what_could_change_unnoticed() -> None:
    with torch.inference_mode():
        values = {"a": torch.randn(200, 200)}
    expected = data_of(*values.values())
    capture, _ = staged(values)
    values["a"].numpy().fill(0)  # before anybody has called hold
    assert held(capture.snapshot()) == expected


def test_a_write_on_a_device_before_the_update_is_found() -> None:
    for held_back in (True, False):
        weight = torch.randn(200, 200)
        capture, _ = staged({"weight": weight})
        weight.add_(1)
        if held_back:
            capture.hold()
        with pytest.raises(ChangedModelError, match="'weight'"):
            capture.snapshot()


def test_what_there_is_no_room_for_is_taken_from_where_it_lies() -> None:
    values = {"a": torch.randn(200, 200), "b": torch.randn(200, 100)}
    expected = data_of(*values.values())
    capture, device = staged(values, 40 * 4096)
    assert [len(each.waiting) for each in device.begun] == [1]
    capture.hold()
    assert capture.lacks_room()  # whoever wants to change it waits until it is saved
    assert held(capture.snapshot()) == expected


def test_what_a_device_has_no_room_for_is_read_there_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "_is_elsewhere", lambda tensor: tensor.dim() == 2)
    plain = torch.randn(200, 200)
    values = {"a": torch.randn(200, 300), "b": plain, "turned": plain.T, "same": plain}
    expected = data_of(*values.values())
    capture, device = staged(values, 60 * 4096)
    assert [len(each.waiting) for each in device.begun] == [1]
    assert all(isinstance(capture._pieces[at].data, Gathered) for at in (1, 2, 3))
    capture.hold()
    assert capture.lacks_room()
    snapshot = capture.snapshot()
    assert held(snapshot) == expected
    snapshot.check_unchanged()
    plain.mul_(1)
    with pytest.raises(ChangedModelError, match=r"'(b|turned)'"):
        snapshot.check_unchanged()


def test_what_was_begun_is_given_back_when_something_has_no_form() -> None:
    pool = PageablePool(1 << 20)
    values = {"a": _inference(), "b": torch.randn(9).to_sparse()}  # a is copied in its turn
    with pytest.raises(UnsupportedArrayError):
        StepCapture(step_of(values), CaptureContext(pool, [Slow()], set(), {}))
    assert pool.allocated == 22 * 4096
    pool.clear()
    assert pool.allocated == 0


def test_steps_through_a_device(tmp_path: Path) -> None:
    training, kept = Training(), {}
    run = CheckpointStore(tmp_path, "run")
    run._saves._devices, run._saves._pool = [Slow()], PageablePool(1 << 24)
    run.hook(training.optimizer)
    for step in range(4):
        training.step()
        kept[step] = state_of(training)
        run.save_async(training.state, step)
    run.close()
    assert shares(run)
    for step, (model, optimizer, _) in kept.items():
        assert_equal(run.load(step)["model"], model)
        assert_equal(run.load(step)["optimizer"], optimizer)


@pytest.mark.gpu
@pytest.mark.parametrize("hooked", [True, False])
def test_steps_from_a_gpu(tmp_path: Path, hooked: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 4096), nn.BatchNorm1d(4096), nn.Linear(4096, 64)).cuda()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([*model[1:].parameters()], lr=1e-3)
    kept = {}
    with CheckpointStore(tmp_path, "run") as run:
        if hooked:
            run.hook(optimizer)
        for step in range(6):
            optimizer.zero_grad()
            model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
            optimizer.step()
            kept[step] = {name: each.cpu().clone() for name, each in model.state_dict().items()}
            run.save_async({"model": model, "optimizer": optimizer}, step)
    assert shares(run)
    for step, expected in kept.items():
        assert_equal(run.load(step)["model"], expected)


@pytest.mark.gpu
def test_copies_from_a_gpu_do_not_hold_up_the_host() -> None:
    weight = torch.randn(8192, 8192, device="cuda")
    expected = weight.cpu()
    capture = StepCapture(
        step_of({"weight": weight}), CaptureContext(HostPool(1 << 30), [CudaDevice()], set(), {})
    )
    stream = capture._streams[weight.device]
    assert isinstance(stream._event.query(), bool)  # type: ignore[attr-defined]
    capture.hold()
    weight.fill_(0)  # the device waits, so this comes after the copy
    assert held(capture.snapshot()) == data_of(expected)
