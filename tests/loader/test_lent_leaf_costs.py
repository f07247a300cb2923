"""What sharing by leaf through a memory manager costs: requests, what is remembered.

Numbers of requests are exact, and memory is what the manager charges itself for records.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from manager_runs import managers
from manager_runs.manager_fakes import PlayedClients
from tensor_dedup.digest import LEAF_BYTES, digest
from tensor_dedup.loader.checkpoint_io.sources import StaleHintError
from tensor_dedup.loader.residents import lent
from tensor_dedup.loader.residents.leaves import content_marks, leaf_marks
from tensor_dedup.loader.residents.lent import (
    LentInParts,
    composition_in,
    record_of,
    record_of_parts,
)
from tensor_dedup.loader.residents.partial import Content
from tensor_dedup.loader.residents.registry import LEAF_SHARED_FROM, registry
from tensor_dedup.memory_manager.client import connect
from tensor_dedup.memory_manager.client.connection import Connection
from tensor_dedup.memory_manager.protocol.limits import MAX_RECORD
from tensor_dedup.memory_manager.protocol.messages import Abandon, LookupDigests, Publish
from tensor_dedup.memory_manager.protocol.tables import saved_bytes
from tensor_dedup.types import ResidentKey
from vllm_runs import deferring
from vllm_runs.lent_tensors import (
    LEAVES,
    ROWS_OF_A_LEAF,
    Process,
    changed,
    contents_of,
    load_deferred,
    load_file_of_qkv,
    processes_of,
    request_for,
    rows,
)

Make = Callable[[], Process]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[managers.Manager]:
    tmp_path.chmod(0o700)
    with managers.running(tmp_path, "--budget", str(1 << 30)) as running:
        yield running


@pytest.fixture
def process(manager: managers.Manager) -> Iterator[Make]:
    """Makes a process, as far as the manager can tell: it has a connection of its own."""
    with processes_of(manager.socket) as make:
        yield make


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests of all clients of this process, as they are sent."""
    found: list[Any] = []
    ask = Connection.ask

    def counting(self: Connection, request: Any, *args: Any, **more: Any) -> Any:
        found.append(request)
        return ask(self, request, *args, **more)

    monkeypatch.setattr(Connection, "ask", counting)
    return found


def counted(asked: list[Any]) -> dict[str, int]:
    found = Counter(type(each).__name__ for each in asked)
    asked.clear()
    return dict(found)


def test_requests_do_not_grow_with_the_marks(
    process: Make, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of six tensors of 8 leaves, with 8 marks of leaves and as many of contents each."""
    bases = [rows(8, 100 + n) for n in range(6)]
    one, two = process().provider(), process().provider()
    asked.clear()
    made = one.get_or_build([request_for(each) for each in bases])
    put = {"Reserve": 1, "Allocate": 1, "Seal": 1, "LookupDigests": 3, "Publish": 6}
    assert counted(asked) == {**put, "Lookup": 2}  # by content, and by all marks
    for (resident, _), base in zip(made, bases, strict=True):
        one.note_contents(resident, contents_of([base]))
    assert counted(asked) == {"Publish": 12}
    # To attach costs what it does without leaves.
    with monkeypatch.context() as patch:
        patch.setattr(registry, "_residents", type(registry._residents)())
        assert process().find(bases[0], known=True) is not None
    assert counted(asked) == {"Hello": 1, "LookupDigests": 1}
    # A fine-tune of each: only what differs is put, and each is found by eight marks.
    tunes = [changed(each, 2) for each in bases]
    tuned = two.get_or_build([request_for(each) for each in tunes])
    assert [each.leaf_shared_bytes for each, _ in tuned] == [7 * LEAF_BYTES] * 6
    sent = counted(asked)
    assert sent.pop("Lookup") == 2
    assert sent == {
        **dict.fromkeys(put, 6),
        "LookupDigests": 1 + 2 * 6,
        "Publish": 2 * 6,
    }


def test_a_donor_that_gave_nothing_makes_room(tmp_path: Path) -> None:
    """Its first page is the other's, which is all that a mark says; no leaf is."""
    tmp_path.chmod(0o700)
    one, two = rows(12, 1), rows(12, 2)
    two.view(-1)[:1024] = one.view(-1)[:1024]
    with managers.running(tmp_path, "--budget", str(40 << 20)) as manager:
        assert one.nbytes + two.nbytes > 40 << 20
        for tensor in (one, two):
            with connect(manager.socket, keep_connected=False) as client:
                [(resident, new)] = Process(client).load(tensor)
                assert new
                assert resident.lent
                assert resident.leaf_shared_bytes == 0
                del resident
                gc.collect()


def test_a_donor_in_parts_is_not_hashed_for_its_leaves(
    process: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is taken of it is compared, and hashed with the rest where it is put."""
    base = rows(LEAVES, 111)
    held = process().load(base)
    first = base.clone()
    first[ROWS_OF_A_LEAF : 3 * ROWS_OF_A_LEAF] += 1  # on the pages that marks are of
    [(donor, _)] = process().load(first)
    assert isinstance(donor, LentInParts)
    hashed: list[LentInParts] = []

    def note(self: LentInParts) -> bool:
        hashed.append(self)
        return False

    monkeypatch.setattr(LentInParts, "has_its_digest", note)
    second = changed(first, 8)
    [(resident, _)] = process().load(second)
    assert resident.leaf_shared_bytes == 9 * LEAF_BYTES
    assert torch.equal(resident.map(), second)
    assert not hashed
    assert held


def test_many_keys_are_published_in_messages_of_their_limit(
    process: Make, asked: list[Any]
) -> None:
    mine = process()
    [(held, _)] = mine.load(rows(LEAVES, 110))
    asked.clear()
    keys = [f"key-{n}" for n in range(600)]
    assert mine.client.publish(keys, b"record", [held.key.digest]) == 600
    assert [1 + len(each.also) for each in asked] == [257, 257, 86]
    assert mine.client.publish(keys, b"another", [held.key.digest]) == 0
    [first, last] = mine.client.get([keys[0], keys[-1]])
    assert first is not None
    assert last is not None
    assert first.record == last.record == b"record"


def test_a_key_that_somebody_builds_keeps_no_other_from_the_next_manager(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with ExitStack() as stack:
        with managers.running(tmp_path) as first:
            one = stack.enter_context(first.client())
            [lease] = managers.build(one, "layer", b"w" * 5000)
            one.remember(["layer", "mark"], b"record of layer", [lease.digest])
            first.kill()
        second = stack.enter_context(managers.running(tmp_path))
        other = stack.enter_context(second.client())
        reservation = other.reserve(["layer"])
        assert reservation.put is not None
        assert one.reconnect() == 1
        [built, found] = other.get(["layer", "mark"])
        assert built is None
        assert found is not None
        assert found.record == b"record of layer"
        reservation.put.abandon()


# Llama's shapes, in BF16: of each layer qkv, o, gate_up and down; embedding and head.


def shapes(
    layers: int, hidden: int, heads: int, inner: int, vocabulary: int = 128_256
) -> Iterator[tuple[list[int], int]]:
    """Yield the rows of the sources of each tensor, and the length of a row."""
    for _ in range(layers):
        yield [hidden, heads, heads], hidden
        yield [hidden], hidden
        yield [inner, inner], hidden
        yield [hidden], inner
    yield [vocabulary], hidden
    yield [vocabulary], hidden


def consisting(sources: list[int], row: int, name: str) -> list[Content]:
    """What a tensor of such sources consists of, with digests of nothing that exists."""
    found, at = [], 0
    for number, source in enumerate(sources):
        end = at + source * row * 2
        count = -(-(end - at) // LEAF_BYTES) if end - at >= LEAF_SHARED_FROM else 0
        leaves = tuple(digest(f"{name} {number} {leaf}".encode()) for leaf in range(count))
        found.append(Content(at, end, digest(f"{name} {number}".encode()), leaves))
        at = end
    return found


class Pages:
    """The bytes of a tensor that has its own number on every page; only marks look at it."""

    def __init__(self, nbytes: int, number: int) -> None:
        self.nbytes, self.number = nbytes, number

    def __getitem__(self, place: slice) -> bytes:
        return f"{self.number} {place.start}".encode()


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "inner", "mib"),
    [(32, 4096, 1024, 14336, 2.2), (80, 8192, 1024, 28672, 8.4)],
    ids=["8B", "70B"],
)
def test_what_the_manager_remembers_of_a_model(
    layers: int, hidden: int, heads: int, inner: int, mib: float
) -> None:
    """One record of the contents of a tensor, and of each mark its key."""
    played = PlayedClients()
    client = played.client()
    tensors = [*shapes(layers, hidden, heads, inner)]
    digests = [digest(f"tensor {n}".encode()) for n in range(len(tensors))]
    for start in range(0, len(digests), 64):
        some = digests[start : start + 64]
        put = played.build(client, f"layers-{start}", some)
        played.ask(client, LookupDigests(some))
        played.ask(client, Abandon(put))
    state = played.core.state
    before, count = state.ledger.remembered, 0
    for number, ((sources, row), name) in enumerate(zip(tensors, digests, strict=True)):
        key = ResidentKey("BF16", (sum(sources), row), (row, 1), name)
        contents = consisting(sources, row, name)
        data: Any = Pages(contents[-1].end, number)
        marks = [*leaf_marks(key, data), *content_marks(key, contents)]
        also = [f"tensor-leaf:{mark}" for mark in marks]
        played.ask(client, Publish(0, f"recipe-{number}", record_of(key), [name], also))
        record = record_of_parts(key, [(0, 0, data.nbytes)], contents)
        if len(record) <= MAX_RECORD:
            played.ask(client, Publish(0, f"contents-{number}", record, [name]))
            count += 1
        count += 1 + len(also)
    assert len(state.records) == count > 16 * len(tensors)
    assert len({record for _, record in state.records.items()}) <= 2 * len(tensors)
    assert state.ledger.remembered - before <= mib * (1 << 20)


# What is read of a known fine-tune where the manager cannot have it.


def saved(folder: Path, *tensors: dict[str, torch.Tensor]) -> list[Path]:
    return [deferring.save(folder / f"{n}.safetensors", each) for n, each in enumerate(tensors)]


def test_small_tensors_of_a_known_file_cost_no_requests_of_their_own(
    process: Make, asked: list[Any], tmp_path: Path
) -> None:
    """They have no parts in common with others, so nobody is asked who has them."""
    sent = []
    for known in (False, True):
        tensors = {f"t{n}": torch.rand(64, 64) for n in range(20)}
        path = deferring.save(tmp_path / f"{known}.safetensors", tensors)
        model = deferring.module(**{name: torch.zeros(64, 64) for name in tensors})
        loader = process()
        asked.clear()
        load_deferred(loader, path, model, _copy_all, known=known)
        sent.append(counted(asked))
        assert all(torch.equal(each, tensors[n]) for n, each in model.named_parameters())
    unknown, again = sent
    assert sum(again.values()) <= sum(unknown.values()) + 1  # one for the digests of all


def _copy_all(model: nn.Module, tensors: deferring.Weights) -> None:
    for name, parameter in model.named_parameters():
        parameter.data.copy_(tensors[name])


def test_a_full_manager_costs_no_second_reading(tmp_path: Path) -> None:
    """Whether there is room is known before anything is read."""
    tmp_path.chmod(0o700)
    base = {name: rows(4, 130 + n) for n, name in enumerate("qkv")}
    large, small = {**base, "q": rows(4, 133)}, {**base, "v": changed(base["v"], 1)}
    paths = saved(tmp_path, base, large, small)
    with (
        managers.running(tmp_path, "--budget", str(30 << 20)) as manager,
        ExitStack() as stack,
    ):
        one, two = (
            Process(stack.enter_context(connect(manager.socket, keep_connected=False)))
            for _ in range(2)
        )
        held, _, read = load_file_of_qkv(one, paths[0], known=False)
        assert read == 12 * LEAF_BYTES
        first, session, read = load_file_of_qkv(two, paths[1], known=True, lent=False)
        assert "no room" in (session.provider.not_lent or "")
        assert read == 12 * LEAF_BYTES
        assert torch.equal(first, torch.cat([*large.values()]))
        # What needs less than there is still costs only that.
        second, session, read = load_file_of_qkv(two, paths[2], known=True)
        assert (read, session.ledger.leaf_shared_bytes) == (LEAF_BYTES, 11 * LEAF_BYTES)
        assert torch.equal(second, torch.cat([*small.values()]))
        assert torch.equal(held, torch.cat([*base.values()]))
        assert manager.overview().totals.builds == 0


def test_what_a_tensor_of_nearly_2_gib_consists_of_is_a_record() -> None:
    """Embeddings of 8B models, and stacked experts, have 1 GiB and more."""
    leaves = tuple(digest(b"%d" % n) for n in range(1000))
    sizes = 600 * LEAF_BYTES, 399 * LEAF_BYTES + 7
    first, second = (digest(b"%d bytes" % size) for size in sizes)
    contents = [
        Content(0, sizes[0], first, leaves[:600]),
        Content(sizes[0], sum(sizes), second, leaves[600:]),
    ]
    key = ResidentKey("U8", (sum(sizes),), (1,), digest(b"all"))
    record = record_of_parts(key, [(0, 0, sum(sizes))], contents)
    assert len(record) <= MAX_RECORD
    found = composition_in(record)
    assert found is not None
    assert (found.key, found.contents) == (key, contents)


def test_a_record_that_is_too_large_costs_no_second_reading(
    process: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = {name: rows(4, 140 + n) for n, name in enumerate("qkv")}
    tune = {**base, "q": rows(4, 143)}
    paths = saved(tmp_path, base, tune)
    held, _, _ = load_file_of_qkv(process(), paths[0], known=False)
    monkeypatch.setattr(lent, "MAX_RECORD", 64)
    loaded, session, read = load_file_of_qkv(process(), paths[1], known=True)
    assert (read, session.ledger.leaf_shared_bytes) == (12 * LEAF_BYTES, 0)
    assert torch.equal(loaded, torch.cat([*tune.values()]))
    assert held.nbytes


def test_who_cannot_read_a_known_tensor_reserves_nothing(
    manager: managers.Manager, process: Make, tmp_path: Path
) -> None:
    """Another load builds it meanwhile, and does not wait for the first."""
    base = {name: rows(4, 150 + n) for n, name in enumerate("qkv")}
    tune = {**base, "q": rows(4, 153)}
    paths = saved(tmp_path, base, tune)
    held, _, _ = load_file_of_qkv(process(), paths[0], known=False)
    first, second = process(), process()
    with pytest.raises(StaleHintError):
        load_file_of_qkv(first, paths[1], known=True, wrong="q")
    totals = manager.overview().totals
    assert totals.builds == 0
    assert totals.slabs == 1
    loaded, _, read = load_file_of_qkv(second, paths[1], known=True)
    assert read == 4 * LEAF_BYTES
    assert torch.equal(loaded, torch.cat([*tune.values()]))
    assert held.nbytes


@pytest.mark.parametrize("common", [2, LEAVES - 2])
def test_status_counts_only_the_leaves_of_a_tensor_that_are_used(
    process: Make, manager: managers.Manager, common: int
) -> None:
    base = rows(LEAVES, 71)
    held = process().load(base)
    tuned = process().load(changed(base, *range(common, LEAVES)))
    overview = manager.overview()
    assert [row.leased_bytes for row in overview.clients] == [base.nbytes, base.nbytes]
    assert overview.totals.leaf_shared_bytes == common * LEAF_BYTES
    # As if each connection were of a process of its own.
    clients = [replace(row, pid=number) for number, row in enumerate(overview.clients)]
    assert saved_bytes(clients, overview.totals.leased_bytes) == common * LEAF_BYTES
    held.clear()
    gc.collect()
    managers.until(lambda: not manager.overview().clients[0].leases)
    assert [row.leased_bytes for row in manager.overview().clients] == [0, base.nbytes]
    del tuned
