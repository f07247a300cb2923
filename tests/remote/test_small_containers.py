"""A pull from many small containers, which come with their tables, each in one request."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from remote_runs.remotes import FAULTS, READ_FAULTS, Faulty, Killed, MemoryBucket
from remote_runs.s3_faults import Wire
from store_runs.stores import (
    KIB,
    MIB,
    content,
    noise,
    open_store,
    safetensors,
    stored,
    u8,
    weights,
    write,
)
from tensor_dedup import Store
from tensor_dedup.errors import StoreError
from tensor_dedup.remote import Remote, layout, pull
from tensor_dedup.training import CheckpointStore

U16 = NDArray[np.uint16]


def grown(root: Path, remote: Remote, count: int, nbytes: int, *, beside: int = 0) -> Store:
    """A store whose checkpoint `all` has tensors that were each pushed by themselves.

    Each of these pushes has sent `beside` bytes more, which `all` does not have.
    """
    store, tensors = open_store(root / "store"), {}
    for number in range(count):
        tensors[f"t{number:02}"] = noise(number, nbytes)
        more = {"more": noise(1000 + number, beside)} if beside else {}
        one = u8(**{f"t{number:02}": tensors[f"t{number:02}"]}, **more)
        path = write(root / f"one-{number}", {"model.safetensors": safetensors(one)})
        store.import_(path, f"one-{number}")
        store.push(remote, f"one-{number}")
    path = write(root / "all", {"model.safetensors": safetensors(u8(**tensors))})
    store.import_(path, "all")
    store.push(remote, "all")
    return store


def allowed(missing: int, containers: int) -> int:
    """The requests that a pull may make: a jump to another container is a gap."""
    return 12 + 3 * -(-missing // (64 * MIB)) + containers - 1


@pytest.mark.parametrize(("nbytes", "beside"), [(100 * KIB, 0), (KIB, 0), (64 * KIB, 64 * KIB)])
def test_many_small_containers_are_a_request_each(
    tmp_path: Path, wire: Wire, nbytes: int, beside: int
) -> None:
    grown(tmp_path, Remote(wire.bucket), 40, nbytes, beside=beside)
    there = open_store(tmp_path / "there")
    wire.reset()
    done = there.pull(wire.remote, "all")
    used = {key for key in wire.server.requests if key.startswith("GET containers/")}
    assert len(used) == 41  # the header lies in another one
    assert (wire.proxy.requests <= allowed(done.moved_bytes, 41)) == (not beside)
    assert wire.proxy.nbytes <= 1.02 * done.moved_bytes + 64 * KIB
    assert stored(there, "all") == content(tmp_path / "all")
    assert there.verify(full=True).fine


def test_a_step_whose_tensors_many_steps_have_pushed(tmp_path: Path, wire: Wire) -> None:
    """Each step changes one layer, and is pushed by itself."""
    store, layers = open_store(tmp_path / "store"), {}
    with CheckpointStore(store, "run") as run:
        for step in range(40):
            layers[f"layer{step:02}"] = np.frombuffer(noise(step, 60 * KIB), np.uint8)
            run.save(dict(layers), step=step)
            store.push(Remote(wire.bucket), f"run@{step}")
    there = open_store(tmp_path / "there")
    wire.reset()
    done = there.pull(wire.remote, "run@39")
    assert done.moved_pieces >= 40
    assert wire.proxy.requests <= allowed(done.moved_bytes, 40)
    with CheckpointStore(there, "run") as run:
        assert {k: bytes(v) for k, v in run.load(39).items()} == {
            k: bytes(v) for k, v in layers.items()
        }


def layer_of_weights(number: int) -> U16:
    return np.frombuffer(weights(number, 48 * KIB), "<u2")


def layer_of_one_number(number: int) -> U16:
    return np.full(256 * KIB, number, "<u2")


def encoded_run(
    store: Store,
    wire: Wire,
    steps: int,
    *,
    beside: int = 0,
    layer: Callable[[int], U16] = layer_of_weights,
) -> dict[str, U16]:
    """A run each of whose steps adds two layers that are stored encoded, and is pushed by itself.

    Each step also has `beside` such bytes that the next does not have. Returns the last one's.
    """
    layers: dict[str, U16] = {}
    with CheckpointStore(store, "run", compress="always") as run:
        for step in range(steps):
            for number in (2 * step, 2 * step + 1):
                layers[f"layer{number:02}"] = layer(number)
            if beside:
                layers["beside"] = np.frombuffer(weights(1000 + step, beside), "<u2")
            run.save(dict(layers), step=step)
            store.push(Remote(wire.bucket), f"run@{step}")
    kinds = [key.rpartition(".")[2] for key in wire.bucket.objects if "containers/" in key]
    assert len(kinds) == steps
    assert "pack" not in kinds
    return layers


def check_loads(store: Store, step: int, layers: Mapping[str, U16]) -> None:
    with CheckpointStore(store, "run") as run:
        found = run.load(step)
        assert {key: bytes(found[key]) for key in found} == {k: bytes(v) for k, v in layers.items()}
    assert store.verify(full=True).fine


@pytest.mark.parametrize("beside", [0, 48 * KIB])
def test_of_encoded_pieces_the_holders_say_what_is_wanted(
    tmp_path: Path, wire: Wire, beside: int
) -> None:
    """Where a third of each container is not wanted any more, tables are read before."""
    layers = encoded_run(open_store(tmp_path / "store"), wire, 30, beside=beside)
    there = open_store(tmp_path / "there")
    wire.reset()
    done = there.pull(wire.remote, "run@29")
    assert (wire.proxy.requests <= allowed(done.moved_bytes, 30)) == (not beside)
    assert wire.proxy.nbytes <= 1.02 * done.moved_bytes + 64 * KIB
    check_loads(there, 29, layers)


def test_a_share_of_what_is_decoded_may_not_travel_for_nothing(tmp_path: Path, wire: Wire) -> None:
    store = open_store(tmp_path / "store")
    layers = encoded_run(store, wire, 20, beside=48 * KIB, layer=layer_of_one_number)
    there = open_store(tmp_path / "there")
    wire.reset()
    done = there.pull(wire.remote, "run@19")
    assert done.moved_bytes < 0.01 * sum(each.nbytes for each in layers.values())
    assert wire.proxy.nbytes <= 1.02 * done.moved_bytes + 64 * KIB
    check_loads(there, 19, layers)


def test_who_has_half_of_each_encoded_container_fetches_the_other_half(
    tmp_path: Path, wire: Wire
) -> None:
    """The holders say how much all of the pieces take, and not each."""
    layers = encoded_run(open_store(tmp_path / "store"), wire, 20)
    there = open_store(tmp_path / "there")
    with CheckpointStore(there, "mine") as mine:
        mine.save({key: layers[key] for key in sorted(layers)[::2]}, step=0)
    wire.reset()
    done = there.pull(wire.remote, "run@19")
    assert done.moved_pieces < 20 + 3
    assert wire.proxy.nbytes <= 1.02 * done.moved_bytes + 64 * KIB
    check_loads(there, 19, layers)


def test_holders_that_a_verify_or_another_machine_writes_say_it_too(
    tmp_path: Path, wire: Wire
) -> None:
    layers = encoded_run(open_store(tmp_path / "store"), wire, 20)
    other = open_store(tmp_path / "other")
    other.pull(wire.remote, "run@19")
    with CheckpointStore(other, "run", compress="always") as run:
        run.save(layers | {"new": layers["layer00"][:3000]}, step=20)
    other.push(wire.remote, "run@20")
    key = layout.holders_key(Remote(wire.bucket).read("run@19").manifest)
    wire.bucket.put(key, [memoryview(b"nothing")])
    assert [key in fault.url for fault in wire.remote.verify().faults] == [True]
    for step, more in ((19, {}), (20, {"new": layers["layer00"][:3000]})):
        there = open_store(tmp_path / f"there-{step}")
        wire.reset()
        done = there.pull(wire.remote, f"run@{step}")
        assert wire.proxy.requests <= allowed(done.moved_bytes, 20)
        assert wire.proxy.nbytes <= 1.02 * done.moved_bytes + 64 * KIB
        check_loads(there, step, layers | more)


@pytest.fixture
def bucket(tmp_path: Path) -> MemoryBucket:
    made = MemoryBucket()
    grown(tmp_path, Remote(made), 9, 3 * KIB)
    return made


def requests(tmp_path: Path, bucket: MemoryBucket, name: str = "counted") -> list[str]:
    gate = Faulty(bucket)
    open_store(tmp_path / name).pull(Remote(gate), "all")
    return gate.calls


def test_a_container_that_came_wrong_is_fetched_again(tmp_path: Path, bucket: MemoryBucket) -> None:
    calls = requests(tmp_path, bucket)
    wholes = [n for n, call in enumerate(calls) if call.startswith("get_range")]
    assert len(wholes) == 10
    assert not any(call.startswith("get tables/") for call in calls)
    for number, call in enumerate(calls):
        for fault in (*FAULTS, *READ_FAULTS):
            store = open_store(tmp_path / f"{number}-{fault}")
            try:
                store.pull(Remote(Faulty(bucket.copied(), number, fault)), "all")
            except (StoreError, Killed):
                assert number not in wholes or fault not in ("wrong", "truncated"), (call, fault)
            assert store.verify(full=True).fine
            store.pull(Remote(bucket), "all")
            assert stored(store, "all") == content(tmp_path / "all"), (call, fault)


def lost(blob: bytes) -> bytes:
    return blob[:-16]


def spoilt(blob: bytes) -> bytes:
    return bytes([blob[0] ^ 1]) + blob[1:]


@pytest.mark.parametrize("spoil", [lost, spoilt])
def test_a_container_that_is_wrong_there_is_named(
    tmp_path: Path, bucket: MemoryBucket, spoil: Callable[[bytes], bytes]
) -> None:
    key = next(call.split()[1] for call in requests(tmp_path, bucket) if "get_range" in call)
    blob, tag, when = bucket.objects[key]
    bucket.objects[key] = (spoil(blob), tag, when)
    store = open_store(tmp_path / "store2")
    if spoil is lost:  # its data is whole, and its table an object of its own
        store.pull(Remote(bucket), "all")
        assert stored(store, "all") == content(tmp_path / "all")
    else:
        with pytest.raises(StoreError, match=key):
            store.pull(Remote(bucket), "all")
        assert store.names() == []
    assert store.verify(full=True).fine


def test_no_more_is_held_than_there_may_be(
    tmp_path: Path, bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "_WHOLES_BYTES", 13 * KIB)
    calls = requests(tmp_path, bucket)
    assert sum(call.startswith("get tables/") for call in calls) == 10 - 3 - 1
    assert stored(open_store(tmp_path / "counted"), "all") == content(tmp_path / "all")
