"""Put and get: each layer is built once, by whichever client comes first."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from manager_runs import managers
from tensor_dedup.digest import digest
from tensor_dedup.memory_manager.client import NewLayer, NewTensor, Put, TensorSlot
from tensor_dedup.memory_manager.client.leases import Lease
from tensor_dedup.memory_manager.client.puts import write_data
from tensor_dedup.memory_manager.errors import (
    BackendError,
    ManagerGoneError,
    ProtocolError,
    RefusedError,
)
from tensor_dedup.memory_manager.protocol.limits import MAX_KEYS

A, B, C = (managers.pattern(seed, 5000) for seed in (1, 2, 3))


def layer(*tensors: bytes, record: bytes = b"record") -> NewLayer:
    return NewLayer(record, tuple(NewTensor(len(data), digest(data), data) for data in tensors))


def test_what_one_client_puts_another_gets(manager: managers.Manager) -> None:
    with manager.client() as writer, manager.client() as reader:
        result = writer.put({"one": layer(A, B), "two": layer(B, C)}, "base")
        assert result.error is None
        assert [put.written for put in result.layers.values()] == [True, True]
        one, none, two = reader.get(["one", "none", "two"], "base")
        assert none is None
        assert one is not None
        assert two is not None
        assert [managers.bytes_of(lease) for lease in one.leases] == [A, B]
        assert [managers.bytes_of(lease) for lease in two.leases] == [B, C]
        assert one.record == b"record"
        assert manager.overview().totals.residents == 3
        again = reader.put({"one": layer(A, B), "three": layer(A)}, "base").layers
        assert [again[key].written for key in ("one", "three")] == [False, False]
        assert manager.overview().totals.slabs == 1


def test_many_layers_take_several_reservations(manager: managers.Manager) -> None:
    count = MAX_KEYS + 10
    datas = {f"k{n}": n.to_bytes(2, "little") * 100 for n in range(count)}
    with manager.client() as client:
        result = client.put({key: layer(data) for key, data in datas.items()})
        assert list(result.layers) == list(datas)
        found = client.get(list(datas))
        assert [managers.bytes_of(each.leases[0]) for each in found if each] == list(datas.values())


def test_another_record_or_other_bytes_under_a_key_are_not_used(manager: managers.Manager) -> None:
    with manager.client() as client, manager.client() as other:
        kept = client.put({"one": layer(A)})
        for wanted in (layer(A, record=b"another"), layer(B), layer(A, B)):
            result = other.put({"one": wanted})
            assert (result.layers, result.error, result.still_building) == ({}, None, [])
        assert kept.layers


def test_a_digest_may_become_known_while_writing(manager: managers.Manager) -> None:
    def fill(put: Put, missing: Sequence[TensorSlot]) -> list[str]:
        assert [index for _, index in missing] == [0]
        put.write(0, A)
        put.progress()
        return [digest(A)]

    with manager.client() as client:
        made = client.put({"one": NewLayer(b"", (NewTensor(len(A)),))}, fill=fill)
        assert made.layers["one"].leases[0].digest == digest(A)
        result = client.put({"two": layer(B)}, fill=fill)
        assert isinstance(result.error, RefusedError)
        assert result.error.code == "mismatch"


def test_other_bytes_than_were_written_are_not_taken(
    manager: managers.Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a manager that does wrong answers so; what it lends must not become a weight."""
    with manager.client() as client:
        right = client.put({"one": layer(A, B)})
        seal = Put.seal

        def mixed_up(put: Put, digests: Sequence[str] = ()) -> list[Lease]:
            return seal(put, digests)[::-1]

        monkeypatch.setattr(Put, "seal", mixed_up)
        result = client.put({"two": layer(A, B), "three": layer(C, C + A)})
        assert right.layers["one"].written
        assert isinstance(result.error, ProtocolError)
        assert result.layers == {}
        assert client.get(["three"]) == [None]


def test_what_was_put_before_a_refusal_stays(folder: Path) -> None:
    # So many that the first reservation cannot hold them all.
    layers = {f"k{n}": layer() for n in range(MAX_KEYS)}
    large = NewTensor(2 << 20, data=bytes(2 << 20))
    with managers.running(folder, "--budget", str(1 << 20)) as manager, manager.client() as client:
        result = client.put(layers | {"large": NewLayer(b"", (large,))})
        assert isinstance(result.error, RefusedError)
        assert result.error.code == "no_room"
        assert list(result.layers) == list(layers)
        assert manager.overview().totals.builds == 0


def test_a_layer_that_another_client_builds_is_waited_for(manager: managers.Manager) -> None:
    with manager.client() as builder, manager.client() as waiter:
        put = builder.reserve(["theirs"]).put
        assert put is not None
        results = []
        thread = threading.Thread(
            target=lambda: results.append(waiter.put({"ours": layer(A), "theirs": layer(B)}))
        )
        thread.start()
        managers.until(lambda: manager.overview().totals.waiting == 1)
        assert builder.get(["ours"]) != [None], "it was built before anything was waited for"
        put.allocate([len(B)])
        put.write(0, B)
        [lease] = put.seal()
        put.publish("theirs", b"record", [lease.digest])
        thread.join()
        [result] = results
        assert {key: each.written for key, each in result.layers.items()} == {
            "ours": True,
            "theirs": False,
        }


@pytest.mark.parametrize("how", ["gives up", "falls silent"])
def test_a_layer_whose_builder_gives_up_is_taken_over(folder: Path, how: str) -> None:
    with managers.running(folder, "--build-timeout", "0.5") as manager:
        builder, waiter = manager.client(), manager.client()
        with builder, waiter:
            put = builder.reserve(["layer"]).put
            assert put is not None
            if how == "gives up":
                threading.Timer(0.1, put.abandon).start()
            assert waiter.put({"layer": layer(A)}).layers["layer"].written


def test_a_wait_has_an_end_and_the_others_are_put(manager: managers.Manager) -> None:
    with manager.client() as builder, manager.client() as waiter:
        put = builder.reserve(["theirs"]).put
        assert put is not None
        began = time.monotonic()
        result = waiter.put({"theirs": layer(A), "ours": layer(B)}, wait_s=0.2)
        assert time.monotonic() - began < 30
        assert (list(result.layers), result.still_building) == (["ours"], ["theirs"])
        assert result.error is None


@pytest.mark.parametrize("own", [False, True], ids=["another client", "another thread"])
def test_a_client_that_builds_waits_for_what_others_build(
    manager: managers.Manager, own: bool
) -> None:
    """One thread of it reads from a disk, with a reservation, and another one puts."""
    with manager.client() as client, manager.client() as other:
        reading = client.reserve(["of-a-slow-disk"]).put
        builder = (client if own else other).reserve(["layer"]).put
        assert reading is not None
        assert builder is not None
        refused = []
        wait = client.wait

        def told(key: str, timeout_s: float) -> str:
            """The manager does not let it wait; then the builder gets done."""
            with pytest.raises(RefusedError) as caught:
                wait(key, timeout_s)
            refused.append(caught.value)
            if len(refused) == 2:
                builder.build({"layer": layer(A)}, write_data({"layer": layer(A)}))
            raise caught.value

        with patch.object(client, "wait", told):
            result = client.put({"layer": layer(A), "ours": layer(B)})
        assert [error.code for error in refused] == ["holds_reservation"] * 2
        assert result.error is None
        assert {key: put.written for key, put in result.layers.items()} == {
            "ours": True,
            "layer": False,
        }
        with patch.object(client, "wait", told):
            stuck = client.put({"of-a-slow-disk": layer(C)}, wait_s=0.1)
        assert (stuck.error, stuck.still_building) == (None, ["of-a-slow-disk"])
        reading.abandon()


def test_a_client_that_builds_takes_over_what_others_give_up(manager: managers.Manager) -> None:
    with manager.client() as client, manager.client() as other:
        reading = client.reserve(["of-a-slow-disk"]).put
        builder = other.reserve(["layer"]).put
        assert reading is not None
        assert builder is not None
        wait, asked = client.wait, 0

        def told(key: str, timeout_s: float) -> str:
            nonlocal asked
            asked += 1
            if asked == 2:
                builder.abandon()
            return wait(key, timeout_s)

        with patch.object(client, "wait", told):
            result = client.put({"layer": layer(A)}, wait_s=30)
        assert asked == 2
        assert (result.error, result.still_building) == (None, [])
        assert result.layers["layer"].written
        reading.abandon()


def test_a_manager_that_is_gone_and_a_digest_of_another_size_are_reported(
    manager: managers.Manager,
) -> None:
    with manager.client() as client:
        kept = client.put({"one": layer(A)})
        short = NewLayer(b"", (NewTensor(10, digest(A), A[:10]),))
        result = client.put({"two": short})
        assert result.error is None
        assert isinstance(result.unusable["two"], BackendError)
        assert client.reserve(["two"]).answers == {"two": "granted"}
        manager.kill()
        result = client.put({"three": layer(B)})
        assert isinstance(result.error, ManagerGoneError)
        assert managers.bytes_of(kept.layers["one"].leases[0]) == A
