"""State dicts in the memory manager: published by one process, mapped by others."""

import gc
import json
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from manager_runs import managers
from processes import fresh
from tensor_dedup import Store
from tensor_dedup.digest import digest
from tensor_dedup.errors import ConfigError, FormatError, UnsupportedError
from tensor_dedup.memory_manager import StateDictClient, connect
from tensor_dedup.memory_manager.client import NewLayer, NewTensor, watch
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.client.connection import Connection
from tensor_dedup.memory_manager.errors import ManagerGoneError, MemoryManagerError
from tensor_dedup.memory_manager.protocol.state_dict_names import state_dict_key
from tensor_dedup.memory_manager.server.preload import Preload
from vllm_runs import fleet

PROMPT_S = 10.0  # a second on a machine that has time
FORK = multiprocessing.get_context("fork")
# A process that gets `full`, and writes what it found, and what is of one storage, to a file.
OTHER = """
import pickle, sys
from tensor_dedup.memory_manager import connect

sys.path.insert(0, sys.argv[1])
from test_state_dicts import described

with connect(sys.argv[2]) as shared:
    found = shared.get("full")
    with open(sys.argv[3], "wb") as out:
        pickle.dump(None if found is None else described(found), out)
"""


def full() -> dict[str, torch.Tensor]:
    """Ties, views of every kind, every dtype, equal storages, nothing, and many storages."""
    draw = torch.Generator().manual_seed(0)
    whole = torch.randn(64, 48, generator=draw)
    found = {
        "whole": whole,
        "tied": whole,
        "transposed": whole.T,
        "slice": whole[3:9, ::2],
        "row": whole[5],
        "expanded": torch.arange(7).expand(3, 7),
        "as_bytes": whole.view(torch.uint8)[:, 4:8],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "twin": torch.ones(10),
        "other twin": torch.ones(10),
        "conjugated": torch.randn(4, dtype=torch.complex64, generator=draw).conj(),
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }
    for dtype in (
        *(torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8),
        *(torch.uint16, torch.int64, torch.bool),
    ):
        found[str(dtype)] = torch.arange(9).to(dtype)
    found |= {f"many.{number}": torch.full((5,), float(number)) for number in range(300)}
    return found


def described(found: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Type, geometry and bytes of each tensor, and which of them are of one storage."""
    first: dict[int, str] = {}
    return {
        name: (
            str(tensor.dtype),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).tolist()
            if tensor.numel()
            else [],
            first.setdefault(tensor.untyped_storage().data_ptr(), name)
            if tensor.numel() and name != "conjugated"
            else name,
        )
        for name, tensor in found.items()
    }


def got_elsewhere(manager: managers.Manager, out: Path) -> Any:
    support = Path(__file__).parents[1] / "support"
    path = os.pathsep.join([str(support), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", OTHER, str(Path(__file__).parent), str(manager.socket)]
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([*command, str(out)], env=environment, check=True, timeout=120)
    return pickle.loads(out.read_bytes())


@pytest.fixture
def shared(manager: managers.Manager) -> Iterator[StateDictClient]:
    with connect(manager.socket, name="test") as client:
        yield client


def test_another_process_maps_what_one_has_put(
    manager: managers.Manager, shared: StateDictClient, tmp_path: Path
) -> None:
    given = full()
    assert shared.get("full") is None
    done = shared.put("full", given)
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in given.values()}
    assert (done.name, done.tensors) == ("full", len(given))
    assert done.nbytes == done.written_bytes == sum(sizes.values())
    wanted = described(given)
    assert len({of for *_, of in wanted.values()}) < len(wanted)
    assert got_elsewhere(manager, tmp_path / "out") == wanted
    again = shared.get("full")
    assert again is not None
    assert described(again) == wanted
    assert list(again) == list(given)


def test_a_writer_changes_its_own_views_and_nobody_else(shared: StateDictClient) -> None:
    shared.put("full", full())
    one, two = shared.get("full"), shared.get("full")
    assert one is not None
    assert two is not None
    wanted = described(two)
    one["whole"].zero_()
    one["twin"].add_(1)
    assert not one["row"].any()
    assert not one["transposed"].any()
    assert torch.equal(one["other twin"], torch.ones(10))
    assert described(two) == wanted
    third = shared.get("full")
    assert third is not None
    assert described(third) == wanted


def test_what_others_have_is_not_stored_again(
    manager: managers.Manager, shared: StateDictClient
) -> None:
    base = {f"layer.{n}": torch.randn(256, 256) for n in range(4)}
    first = shared.put("base", base)
    tune = {**base, "layer.3": base["layer.3"] + 1}
    used = manager.overview().totals.resident_bytes
    second = shared.put("tune", tune)
    assert second.nbytes == first.nbytes
    grown = manager.overview().totals.resident_bytes - used
    assert 0 < grown < first.nbytes / 2
    found = shared.get("tune")
    assert found is not None
    assert all(torch.equal(found[name], tensor) for name, tensor in tune.items())
    assert shared.put("base", base).written_bytes == 0


def test_a_name_means_one_state_dict(shared: StateDictClient) -> None:
    shared.put("base", {"w": torch.ones(4)})
    with pytest.raises(ConfigError, match="under another name"):
        shared.put("base", {"w": torch.zeros(4)})
    found = shared.get("base")
    assert found is not None
    assert torch.equal(found["w"], torch.ones(4))
    assert shared.get("none") is None
    assert shared.put("nothing", {}).nbytes == 0
    assert shared.get("nothing") == {}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, "w is a int; only plain tensors"),
        (torch.eye(3).to_sparse(), "w has no plain layout"),
        (torch.empty(3, device="meta"), "w is on meta"),
    ],
)
def test_what_is_no_plain_tensor_is_refused(value: Any, said: str, shared: StateDictClient) -> None:
    with pytest.raises(UnsupportedError, match=said):
        shared.put("wrong", {"w": value})
    assert shared.get("wrong") is None


@pytest.mark.parametrize("name", ["", "my model", "modèle", "a\nb", "a" * 118])
def test_a_name_that_no_key_can_have_is_refused_before_anything_is_published(
    name: str, manager: managers.Manager, shared: StateDictClient, tmp_path: Path
) -> None:
    for use in (lambda: shared.put(name, {"w": torch.ones(9)}), lambda: shared.get(name)):
        with pytest.raises(ConfigError, match=r"cannot be the name of a state dict; give 1 to 117"):
            use()
    assert manager.overview().totals.residents == 0
    shared.put("!" * 117, {})  # the longest
    if name:
        with pytest.raises(ConfigError, match=r"cannot be the name of a state dict"):
            Preload(tmp_path, [f"{name}=x"], "{}")


def test_a_client_s_name_is_shown_as_far_as_it_can_be_printed(manager: managers.Manager) -> None:
    with connect(manager.socket, name="my\nserver \ud800 of modèle"):
        assert [row.name for row in manager.overview().clients] == ["myserver  of modèle"]


def test_tensors_outlive_the_connection_and_the_manager(
    manager: managers.Manager, shared: StateDictClient
) -> None:
    wanted = described(full())
    shared.put("full", full())
    found = shared.get("full")
    assert found is not None
    shared.close()
    manager.kill()
    gc.collect()
    assert described(found) == wanted
    with pytest.raises(MemoryManagerError):
        shared.get("full")
    with pytest.raises(ManagerGoneError):
        connect(manager.socket)


def test_a_checkpoint_is_preloaded_under_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pipe" / "unet").mkdir(parents=True)
    (tmp_path / "pipe" / "text").mkdir()
    held = {"w": torch.randn(70, 30), "b": torch.ones(3, dtype=torch.bfloat16)}
    for part in ("unet", "text"):
        save_file(held, tmp_path / "pipe" / part / "model.safetensors")
    monkeypatch.setenv("TENSOR_DEDUP_STORE", str(tmp_path / "store"))
    with Store.open() as store:
        store.import_(tmp_path / "pipe", "kept")
    (tmp_path / "overlay").mkdir()
    save_file({"w": held["w"]}, tmp_path / "overlay" / "a.safetensors")
    save_file({"w": held["w"] + 1, "b": held["b"]}, tmp_path / "overlay" / "b.safetensors")
    index = {"weight_map": {"w": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "overlay" / "model.safetensors.index.json").write_text(json.dumps(index))
    names = [f"over={tmp_path / 'overlay'}"]
    names += [f"mine={tmp_path / 'pipe'}", "stored=store://kept", "none=nowhere/at/all"]
    options = [each for name in names for each in ("--preload", name)]
    with fleet.manager(tmp_path, *options) as manager:
        manager.wait_for("preload failed")
        with connect(manager.socket) as shared:
            for name in ("mine", "stored"):
                found = shared.get(name)
                assert found is not None
                assert set(found) == {"unet/w", "unet/b", "text/w", "text/b"}
                assert torch.equal(found["unet/w"], held["w"])
            over = shared.get("over")
            assert over is not None
            assert torch.equal(over["w"], held["w"])  # which the index names
            assert shared.get("none") is None
        with Admin(manager.socket) as admin:
            totals = admin.totals()
    assert totals.pinned_bytes == totals.resident_bytes > held["w"].nbytes
    assert totals.resident_bytes < 2 * held["w"].nbytes  # four tensors of two kinds of bytes


def _preload_growth(socket: str, small: str, large: str) -> int:
    """By how many bytes the process grew, at most, while it published `large` after `small`."""
    from tensor_dedup.loader.checkpoint_io.preload import publish

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

    publish(small, "small", socket)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    publish(large, "large", socket)
    return status("VmHWM") - before


@pytest.mark.parametrize("stored", [False, True])
def test_a_preload_takes_no_copy_beside_its_checkpoint_and_what_it_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    mib = 1 << 20
    monkeypatch.setenv("TENSOR_DEDUP_STORE", str(tmp_path / "store"))
    names = []
    for name, count in (("small", 1), ("large", 8)):
        folder = tmp_path / name
        folder.mkdir()
        noise = [bytearray(random.Random(n).randbytes(16 * mib)) for n in range(count)]
        weights = {f"w{n}": torch.frombuffer(d, dtype=torch.uint8) for n, d in enumerate(noise)}
        save_file(weights, folder / "model.safetensors")
        names.append(str(folder))
        if stored:
            with Store.open() as store:
                store.import_(folder, name)
            names[-1] = f"store://{name}"
    with fleet.manager(tmp_path) as manager:
        grown = fresh.call(_preload_growth, str(manager.socket), *names)
        with connect(manager.socket) as shared:
            found = shared.get("large")
            assert found is not None
            assert all(torch.equal(found[key], weights[key]) for key in weights)
    nbytes = 8 * 16 * mib  # mapped from its files; what is published is the manager's memory
    assert 0.9 * nbytes < grown < 1.25 * nbytes


def test_leases_end_with_the_last_tensor(
    manager: managers.Manager, shared: StateDictClient
) -> None:
    shared.put("base", {"w": torch.ones(1000), "v": torch.zeros(10)})
    shared.drop("base")
    found = shared.get("base")
    assert found is not None
    kept = found["w"][3:5]
    del found
    gc.collect()
    assert torch.equal(kept, torch.ones(2))
    assert any(row.name == "base" for row in manager.overview().checkpoints)


def test_clients_that_are_dropped_unclosed_are_gone(
    manager: managers.Manager, shared: StateDictClient
) -> None:
    shared.put("base", {"w": torch.ones(1000)})
    threads, descriptors = threading.active_count(), managers.steady(manager.descriptors)
    for _ in range(50):
        assert connect(manager.socket).get("base") is not None
    gc.collect()
    managers.until(lambda: threading.active_count() == threads, PROMPT_S)
    managers.until(lambda: manager.descriptors() == descriptors, PROMPT_S)
    assert len(manager.overview().clients) == 1


def test_a_client_that_is_dropped_unclosed_stays_as_long_as_its_last_tensor(
    manager: managers.Manager, shared: StateDictClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_CHECK_MS", 3_600_000)  # what ends the connection is not this
    shared.put("base", {"w": torch.ones(1000), "v": torch.zeros(10)})
    shared.drop("base")
    found = connect(manager.socket).get("base")
    assert found is not None
    kept = found["w"][3:5]
    del found
    gc.collect()
    with Admin(manager.socket) as admin:
        admin.evict("base")
    assert manager.overview().totals.leased_bytes > 0
    assert len(manager.overview().clients) == 2
    assert torch.equal(kept, torch.ones(2))
    del kept
    gc.collect()
    managers.until(lambda: len(manager.overview().clients) == 1, PROMPT_S)
    assert manager.overview().totals.leases == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda index: b"no index",
        lambda index: index[:-1] + b"\xff",
        lambda index: index.replace(b"float32", b"float99"),
        lambda index: index.replace(b"\x94\x0a", b"\x94\x0b"),
    ],
)
def test_an_index_that_lies_is_an_error(
    spoil: Callable[[bytes], bytes], manager: managers.Manager, shared: StateDictClient
) -> None:
    shared.put("base", {"w": torch.ones(4)})
    with manager.client() as client:
        (layer,) = client.get([state_dict_key("base")])
    assert layer is not None
    broken = spoil(managers.bytes_of(layer.leases[0]))
    if broken == managers.bytes_of(layer.leases[0]):
        broken = broken[:-2]
    tensor = NewTensor(len(broken), digest(broken), broken)
    with manager.client() as client:
        client.put({state_dict_key("spoiled"): NewLayer(layer.record, (tensor,))})
        with pytest.raises(FormatError, match="is no state dict"):
            shared.get("spoiled")


@pytest.mark.parametrize("step", [2, 5])
def test_a_put_that_is_killed_leaves_nothing_that_is_found(
    step: int, manager: managers.Manager
) -> None:
    assert killed_at(step, manager) == -signal.SIGKILL


@pytest.mark.long
def test_a_put_may_be_killed_at_any_step(tmp_path: Path) -> None:
    step, ended = 0, -signal.SIGKILL
    while ended:
        with managers.running(tmp_path, "--build-timeout", "1", "--stall-timeout", "1") as manager:
            ended = killed_at(step, manager)
        step += 1
    assert step > 5  # reserve, allocate, seal, publish, and again for the index


def killed_at(step: int, manager: managers.Manager) -> int:
    """Let a process put, and kill it at a message; how it ended."""
    given = full()
    process = FORK.Process(target=put_and_die, args=(manager.socket, given, step))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, from Python 3.12 on
        process.start()
    process.join(60)
    ended = process.exitcode
    assert ended in (0, -signal.SIGKILL)
    with connect(manager.socket) as shared:
        found = shared.get("full")
        assert found is None or described(found) == described(given)
        assert ended or found is not None
        shared.put("full", given)
        again = shared.get("full")
        assert again is not None
        assert described(again) == described(given)
    return ended


def put_and_die(socket: Path, given: dict[str, torch.Tensor], step: int) -> None:
    """Put, and be killed before the message of this number is sent."""
    left, ask = step, Connection.ask

    def counted(self: Connection, *args: Any, **more: Any) -> Any:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return ask(self, *args, **more)

    with mock.patch.object(Connection, "ask", counted), connect(socket) as shared:
        shared.put("full", given)
