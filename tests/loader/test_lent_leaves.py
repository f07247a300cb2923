"""Between processes, too, tensors that differ in some leaves have the others in common."""

import gc
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from manager_runs import managers
from processes.process_state import forked, slab_memory
from tensor_dedup import libc, shared_bytes, verify
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.errors import AuditError, ChangedFileError
from tensor_dedup.loader.residents import host_manager, lent, mappings
from tensor_dedup.loader.residents.host_manager import HostSession, host_session
from tensor_dedup.loader.residents.lent import (
    LentInParts,
    LentResident,
    composition_in,
    record_of_parts,
)
from tensor_dedup.loader.residents.manager import ResidentQuery, ResidentRequest
from tensor_dedup.loader.residents.registry import LEAF_SHARED_FROM, registry
from tensor_dedup.loader.residents.resident import Resident, digest_of, tensor_bytes
from tensor_dedup.loader.residents.slab import SlabUsageError, make_private
from tensor_dedup.memory_manager.client import Client, client, connect, puts
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.errors import RefusedError
from tensor_dedup.memory_manager.protocol.layout import PAGE
from vllm_runs import deferring
from vllm_runs.lent_tensors import (
    LEAVES,
    ROW,
    ROWS_OF_A_LEAF,
    Process,
    changed,
    contents_of,
    load_file_of_qkv,
    load_known,
    processes_of,
    request_for,
    rows,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[managers.Manager]:
    """One for all tests: no two of them have numbers in common."""
    folder = tmp_path_factory.mktemp("manager")
    folder.chmod(0o700)
    with managers.running(folder, "--budget", str(1 << 30)) as running:
        yield running


@pytest.fixture
def process(manager: managers.Manager) -> Iterator[Callable[[], Process]]:
    """Makes a process, as far as the manager can tell: it has a connection of its own."""
    with processes_of(manager.socket) as make:
        yield make


Make = Callable[[], Process]


def test_what_changes_after_it_was_hashed_is_put_by_nobody(process: Make) -> None:
    """As a mapped file that somebody writes: the manager hashes the rest only, not the whole."""
    base = rows(LEAVES, 700)
    process().load(base)
    tune = changed(base, 2)
    true, request = tune.clone(), request_for(tune)
    tune[2 * ROWS_OF_A_LEAF + 9, 0] += 1
    provider = process().provider()

    def check(made: object) -> None:
        raise InterruptedError  # as what was built here is not what was hashed, either

    with pytest.raises(InterruptedError):
        provider.get_or_build([request], check)
    assert "has changed since it was hashed" in str(provider.not_lent)
    assert process().find(true, known=True) is None
    [(resident, made)] = process().load(true)
    assert made
    assert resident.leaf_shared_bytes == (LEAVES - 1) * LEAF_BYTES
    assert torch.equal(resident.map(), true)


@pytest.mark.parametrize("known", [True, False])
def test_parts_that_are_not_the_tensor_are_nobodys(known: bool, process: Make) -> None:
    """A peer publishes, under the digest of one tensor, the parts of another."""
    liar, other, wanted = process(), rows(LEAVES, 710 + known), rows(LEAVES, 712 + known)
    [(held, _)] = liar.load(other)
    request = request_for(wanted)
    session = host_session(liar.client, "a lie")
    name = session._content_key(request.key) if known else session._key(request.recipe)
    record = record_of_parts(request.key, [(0, 0, other.nbytes)])
    assert liar.client.publish([name], record, [held.key.digest])
    mine = process()
    assert mine.find(wanted, known=known) is None
    provider = mine.provider()
    [(resident, made)] = provider.get_or_build([request])
    assert made
    assert torch.equal(resident.map(), wanted)
    assert "are not that tensor's" in str(provider.not_lent)


def test_of_a_donor_that_is_not_what_it_is_called_only_equal_leaves_are_taken(
    process: Make,
) -> None:
    """A peer says of parts of another tensor that they are one with the leaves that are looked for.

    Donors are not hashed: their leaves are compared.
    """
    liar, wanted = process(), rows(LEAVES, 714)
    other = changed(wanted, 3, 4)  # with the marks of what is wanted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_manager, "leaf_marks", lambda *_: [])
        [(held, _)] = liar.load(other)
    session = host_session(liar.client, "a lie")
    key = replace(held.key, digest="c" * 64)
    record = record_of_parts(key, [(0, 0, other.nbytes)])
    keys = session._marks(request_for(wanted))
    assert liar.client.publish(keys, record, [held.key.digest]) == len(keys)
    [(resident, made)] = process().load(wanted)
    assert made
    assert resident.leaf_shared_bytes == (LEAVES - 2) * LEAF_BYTES
    assert torch.equal(resident.map(), wanted)


@pytest.mark.parametrize("before", ["marks", "rest"])
def test_a_file_that_is_cut_while_it_is_put_is_an_error(
    before: str, manager: managers.Manager, process: Make, tmp_path: Path
) -> None:
    """Memory that is mapped from it is not looked at: that would end the process."""
    base = rows(LEAVES, 715)
    process().load(base)
    tune = changed(base, 3)
    path = tmp_path / "weights"
    path.write_bytes(tensor_bytes(tune))
    storage: Any = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=tune.nbytes)
    mapped = torch.empty(0).set_(storage, 0, tune.shape, tune.stride())

    def read(into: memoryview, offset: int) -> None:
        if path.stat().st_size == 100:
            raise ChangedFileError("it became shorter", path=str(path))
        into[:] = tensor_bytes(tune)[offset : offset + len(into)]

    request = ResidentRequest("test:cut", mapped, digest_of(tune), read)
    home, name = (host_manager, "leaf_marks") if before == "marks" else (lent.PartsPlan, "fill")
    original: Any = getattr(home, name)

    def put() -> str:
        def cut(*args: Any) -> Any:
            os.truncate(path, 100)
            return original(*args)

        with (
            pytest.MonkeyPatch.context() as patch,
            connect(manager.socket, keep_connected=False) as client,
        ):
            patch.setattr(home, name, cut)
            with pytest.raises(ChangedFileError):
                Process(client).provider().get_or_build([request])
        return "an error"

    assert forked(put) == "an error"


def test_another_process_puts_only_what_differs(manager: managers.Manager, process: Make) -> None:
    base = rows(LEAVES, 1)
    [(held, made)] = process().load(base)
    assert made
    before = manager.overview().totals
    tune = changed(base, 2, 3, 7)
    [(resident, made)] = process().load(tune)
    assert made
    assert resident.leaf_shared_bytes == 7 * LEAF_BYTES
    assert torch.equal(resident.map(), tune)
    after = manager.overview().totals
    assert after.resident_bytes - before.resident_bytes == 3 * LEAF_BYTES
    assert 3 * LEAF_BYTES <= after.charged - before.charged <= 3 * LEAF_BYTES + (64 << 10)
    assert torch.equal(held.map(), base)
    # Whoever comes next finds it whole, by its digest and by its recipe.
    third = process()
    for known in (True, False):
        found = third.find(tune, known=known)
        assert found is not None
        assert torch.equal(found.map(), tune)
        assert found.leaf_shared_bytes == 0
    assert third.find(changed(base, 1), known=True) is None
    [(again, made)] = process().load(tune, recipe="another recipe")
    assert not made
    assert torch.equal(again.map(), tune)
    assert process().find(tune, "another recipe", known=False) is not None
    assert manager.overview().totals.resident_bytes == after.resident_bytes
    assert verify().ok


def test_in_one_process_they_are_one_memory(process: Make) -> None:
    mine = process()
    base = rows(LEAVES, 2)
    [(first, _)] = mine.load(base)
    tune = changed(base, 5)
    [(second, _)] = mine.load(tune)
    assert shared_bytes(first.map(), second.map()) == 9 * LEAF_BYTES == second.leaf_shared_bytes
    writer, reader = second.map(), second.map()
    writer[0, 0] = writer[-1, -1] = 5
    assert torch.equal(reader, tune)
    assert torch.equal(first.map(), base)


@pytest.mark.parametrize("leaves", [10.002, 10.5, 9.5, 9, 12])
def test_more_and_fewer_rows(manager: managers.Manager, process: Make, leaves: float) -> None:
    base = rows(LEAVES, 3)
    held = process().load(base)
    before = manager.overview().totals.charged
    tune = torch.cat([base, rows(3, 4)])[: int(leaves * ROWS_OF_A_LEAF)]
    [(resident, made)] = process().load(tune)
    assert made
    assert resident.leaf_shared_bytes == min(tune.nbytes, base.nbytes)
    assert torch.equal(resident.map(), tune)
    more = manager.overview().totals.charged - before
    new = max(0, tune.nbytes - base.nbytes)
    assert new <= more <= new + (128 << 10)
    found = process().find(tune, known=True)
    assert found is not None
    assert torch.equal(found.map(), tune)
    assert held


def test_a_fine_tune_of_a_fine_tune(manager: managers.Manager, process: Make) -> None:
    """It has leaves of both, and what is only in the first is not needed twice."""
    base = rows(LEAVES, 5)
    held = process().load(base)
    first = base.clone()
    first[ROWS_OF_A_LEAF : 3 * ROWS_OF_A_LEAF] += 1  # marks are of first pages
    held += process().load(first)
    before = manager.overview().totals.charged
    second = changed(first, 8)
    [(resident, _)] = process().load(second)
    assert resident.leaf_shared_bytes == 9 * LEAF_BYTES
    assert manager.overview().totals.charged - before <= LEAF_BYTES + (64 << 10)
    assert torch.equal(resident.map(), second)
    assert held


def test_a_quarter_in_the_middle_is_found(process: Make) -> None:
    """An eighth of a tensor has a mark, wherever it lies."""
    base = rows(40, 6)
    held = process().load(base)
    tune = rows(40, 7)
    part = slice(21 * ROWS_OF_A_LEAF, 31 * ROWS_OF_A_LEAF)
    tune[part] = base[part]
    [(resident, _)] = process().load(tune)
    assert resident.leaf_shared_bytes == 10 * LEAF_BYTES
    assert torch.equal(resident.map(), tune)
    assert held


def test_nothing_in_common_and_small_tensors(manager: managers.Manager, process: Make) -> None:
    base, small = rows(LEAVES, 8), rows(3, 9)
    held = process().load(base, small)
    for tune in (rows(LEAVES, 10), changed(small, 0), changed(base, *range(1, 10))):
        [(resident, made)] = process().load(tune)
        assert made
        assert resident.leaf_shared_bytes == 0
        assert len(resident.extents) == 1
    assert held


def test_names_of_one_load_have_no_leaves_in_common(process: Make) -> None:
    base = rows(LEAVES, 11)
    mine = process()
    [(one, _), (two, _)] = mine.load(base, changed(base, 3))
    assert shared_bytes(one.map(), two.map()) == 0
    [(three, _)] = mine.load(changed(base, 4))
    assert three.leaf_shared_bytes == 9 * LEAF_BYTES


def test_equal_marks_are_no_equal_leaves(process: Make) -> None:
    base = torch.zeros(LEAVES * ROWS_OF_A_LEAF, ROW)
    held = process().load(base)
    tune = base.clone()
    for leaf in range(LEAVES - 1):
        tune[(leaf + 1) * ROWS_OF_A_LEAF - 1, ROW - 1] = 1  # the last number of each but one
    [(resident, _)] = process().load(tune)
    assert resident.leaf_shared_bytes in (0, LEAF_BYTES)
    assert torch.equal(resident.map(), tune)
    assert held


def test_what_a_fine_tune_is_of_is_not_evicted(folder: Path) -> None:
    """Its base is gone, and the manager needs room: the leaves that are mapped stay."""
    with managers.running(folder, "--budget", str(46 << 20)) as manager, ExitStack() as stack:

        def process() -> Process:
            return Process(stack.enter_context(connect(manager.socket, keep_connected=False)))

        base, tune = rows(LEAVES, 12), changed(rows(LEAVES, 12), 0)
        held = process().load(base)
        [(resident, _)] = process().load(tune)
        mapped = resident.map()
        held.clear()
        del resident
        gc.collect()
        for seed in range(3):  # which takes the place of what nobody uses
            other = rows(LEAVES, 13 + seed)
            assert torch.equal(process().load(other)[0][0].map(), other)
            gc.collect()
        assert torch.equal(mapped, tune)
        charged = manager.overview().totals.charged
        assert charged <= 46 << 20
        found = process().find(base, known=True)
        assert found is not None  # all of its slab is kept for what a fine-tune has of it
        del mapped, found
        gc.collect()
        # Nobody has it any more: it goes when there is need.
        most = process().load(rows(LEAVES, 20), rows(LEAVES, 21))
        assert process().find(tune, known=True) is None
        assert most


def test_the_next_manager_is_told_what_a_fine_tune_is_of(folder: Path) -> None:
    base, tune = rows(LEAVES, 22), changed(rows(LEAVES, 22), 4)
    with ExitStack() as stack:
        with managers.running(folder) as first:
            one = Process(stack.enter_context(connect(first.socket, keep_connected=False)))
            two = Process(stack.enter_context(connect(first.socket, keep_connected=False)))
            held = one.load(base)
            [(resident, _)] = two.load(tune)
            mapped = resident.map()
            first.kill()
            assert torch.equal(mapped, tune)
        with managers.running(folder) as second:
            assert two.client.reconnect() == 2  # slabs: of the base, and of the rest
            three = Process(stack.enter_context(connect(second.socket, keep_connected=False)))
            for known in (True, False):
                found = three.find(tune, known=known)
                assert found is not None
                assert torch.equal(found.map(), tune)
            # A slab that has come already is not taken twice.
            one.client.reconnect()
            charged = second.overview().totals.charged
            assert charged <= base.nbytes + LEAF_BYTES + (2 << 20)
            # And it has leaves for others, as before.
            other = changed(base, 6)
            assert three.load(other)[0][0].leaf_shared_bytes == 9 * LEAF_BYTES
            assert held


def test_a_base_that_another_manager_lacks_costs_sharing_and_no_error(
    process: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = rows(LEAVES, 23)
    held = process().load(base)
    lease = Client.lease

    def gone(self: Client, digests: Sequence[str], checkpoint: str = "") -> list[Any]:
        return [None] * len(digests) if digests else lease(self, digests, checkpoint)

    tune = changed(base, 1)
    provider = process().provider()
    monkeypatch.setattr(Client, "lease", gone)
    [(resident, made)] = provider.get_or_build([request_for(tune)])
    assert made
    assert torch.equal(resident.map(), tune)
    assert "not resident" in (provider.not_lent or "")
    assert held


def test_near_the_limit_of_mappings_a_tensor_is_put_whole(
    process: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = rows(LEAVES, 24)
    held = process().load(base)
    monkeypatch.setattr(libc, "max_mappings", libc.count_mappings)
    monkeypatch.setattr(mappings.BUDGET, "_until", 0.0)
    provider = process().provider()
    tune = changed(base, 4)
    [(resident, made)] = provider.get_or_build([request_for(tune)])
    assert made
    assert resident.lent
    assert len(resident.extents) == 1
    assert "max_map_count" in (provider.not_by_leaf or "")
    assert torch.equal(resident.map(), tune)
    assert held


@pytest.mark.parametrize(
    ("limit", "most", "why"),
    [("MAX_RECORD", 100, "takes 100"), ("MAX_RECORD_DIGESTS", 1, "names 1")],
    ids=["record", "tensors"],
)
@pytest.mark.parametrize("known", [False, True], ids=["unknown", "known"])
def test_what_no_record_can_tell_is_put_whole_and_the_reason_is_told(
    limit: str, most: int, why: str, known: bool, process: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, first = rows(LEAVES, 270 + 2 * len(limit) + known), process()
    provider = first.provider()
    [(held, _)] = provider.get_or_build([request_for(base)])
    provider.note_contents(held, contents_of([base]))
    for number, reason in ((3, None), (4, why)):
        tune, mine = changed(base, number), process()
        provider = mine.provider()
        monkeypatch.setattr(mine, "provider", lambda kept=provider: kept)
        if known:
            resident, _ = load_known(mine, [tune], f"known {limit} {number}")
        else:
            [(resident, _)] = provider.get_or_build([request_for(tune)])
        if reason is None:
            assert isinstance(resident, LentInParts)  # or nothing is tested here
            assert provider.not_by_leaf is None
            monkeypatch.setattr(lent, limit, most)
            continue
        assert resident is None if known else isinstance(resident, LentResident)
        if resident is not None:
            assert torch.equal(resident.map(), tune)
        assert reason in (provider.not_by_leaf or "")


def test_a_record_that_is_no_tensor_is_not_used(process: Make) -> None:
    """Records are other clients' word, so what they say is checked before anything is mapped."""
    mine = process()
    tensor = rows(LEAVES, 25)
    [(held, _)] = mine.load(tensor)
    session = mine.provider().manager.session
    assert isinstance(session, HostSession)
    size, digest = tensor.nbytes, held.key.digest
    for number, parts in enumerate(
        [
            [(0, 0, size + 1)],
            [(0, PAGE, size)],
            [(1, 0, size)],
            [(0, 0, size - PAGE)],
            [(0, 0, 0), (0, 0, size)],
            [(0, 0, PAGE + 1), (0, PAGE + 1, size - PAGE - 1)],
            [],
        ]
    ):
        key = replace(held.key, digest=f"{number:064}")
        mine.client.publish([session._content_key(key)], record_of_parts(key, parts), [digest])
        assert session.by_content([key]) == [None]
    for record in (b"", b"\x95", msgspec.msgpack.encode(["F32", [1], [1], "x", [[0, -1, 4]]])):
        assert composition_in(record) is None
        key = replace(held.key, digest="f" * 64)
        mine.client.publish([session._key(f"garbage {len(record)}")], record, [digest])
        assert session.by_recipe([ResidentQuery(f"garbage {len(record)}", key)]) == [None]
    # Another geometry, and another digest.
    key = replace(held.key, digest="e" * 64)
    mine.client.publish([session._key("other")], record_of_parts(key, [(0, 0, size)]), [digest])
    for wanted in (replace(key, shape=(2, size // 8)), replace(key, digest="d" * 64)):
        assert session.by_recipe([ResidentQuery("other", wanted)]) == [None]
    with pytest.raises(SlabUsageError):
        LentInParts(key, [], [(0, 0, size)])


def test_no_memory_for_records_costs_sharing_by_leaf_only(
    process: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = puts.publish

    def full(connection: Any, put: int, record: bytes, digests: Any, keys: Sequence[str]) -> int:
        if not put:
            raise RefusedError("the manager can remember no more", code="no_room")
        return publish(connection, put, record, digests, keys[:1])

    base = rows(LEAVES, 26)
    with monkeypatch.context() as patch:
        patch.setattr(puts, "publish", full)
        patch.setattr(client, "publish", full)
        held = process().load(base)
    [(resident, _)] = process().load(changed(base, 1))
    assert resident.leaf_shared_bytes == 0
    assert held


def test_of_a_known_tensor_only_what_no_other_process_has_is_read(
    manager: managers.Manager, process: Make
) -> None:
    parts = [rows(4, 40), rows(4, 41), rows(4, 42)]
    whole = torch.cat(parts)
    one = process()
    provider = one.provider()
    [(held, _)] = provider.get_or_build([request_for(whole)])
    provider.note_contents(held, contents_of(parts))
    charged = manager.overview().totals.resident_bytes
    # One of the parts is another, and in one a single number has changed, not on its first page.
    tune = [rows(4, 43), parts[1], changed(parts[2], 1)]
    made, read = load_known(process(), tune, "a fine-tune")
    assert isinstance(made, LentInParts)
    assert read == 5 * LEAF_BYTES
    assert made.leaf_shared_bytes == 7 * LEAF_BYTES
    assert torch.equal(made.map(), torch.cat(tune))
    assert manager.overview().totals.resident_bytes - charged == 5 * LEAF_BYTES
    found = process().find(torch.cat(tune), "a fine-tune", known=False)
    assert found is not None
    assert torch.equal(found.map(), torch.cat(tune))
    # Another of that one: what only the first fine-tune has is known, too.
    next_tune = [tune[0], rows(4, 44), tune[2]]
    third, read = load_known(process(), next_tune, "a third")
    assert third is not None
    assert read == 4 * LEAF_BYTES
    assert torch.equal(third.map(), torch.cat(next_tune))
    # What is there by its digest is not put again, and what nobody has a part of is not read.
    again, read = load_known(process(), tune, "the same")
    assert again is not None
    assert read == 0
    assert process().find(torch.cat(tune), "the same", known=False) is not None
    assert load_known(process(), [rows(4, 45), rows(4, 46)], "new") == (None, 0)
    assert verify().ok


def test_a_session_reads_of_a_known_file_what_no_other_process_has(
    manager: managers.Manager, process: Make, tmp_path: Path
) -> None:
    base = {name: rows(4, 50 + n) for n, name in enumerate("qkv")}
    tune = {**base, "q": rows(4, 60), "v": changed(base["v"], 1)}
    paths = [
        deferring.save(tmp_path / f"{n}.safetensors", each) for n, each in enumerate((base, tune))
    ]
    first, session, read = load_file_of_qkv(process(), paths[0], known=False)
    assert (read, session.ledger.leaf_shared_bytes) == (12 * LEAF_BYTES, 0)
    charged = manager.overview().totals.resident_bytes
    second, session, read = load_file_of_qkv(process(), paths[1], known=True)
    assert (read, session.ledger.leaf_shared_bytes) == (5 * LEAF_BYTES, 7 * LEAF_BYTES)
    assert torch.equal(second, torch.cat([*tune.values()]))
    assert manager.overview().totals.resident_bytes - charged == 5 * LEAF_BYTES
    # It is there now; what is checked is read, and is right.
    for config, expected in (({}, 0), ({"audit": 1.0}, 12), ({"verify_bytes": True}, 12)):
        third, session, read = load_file_of_qkv(process(), paths[1], known=True, **config)
        assert read == expected * LEAF_BYTES
        assert session.ledger.leaf_shared_bytes == 0
        assert torch.equal(third, second)
    assert torch.equal(first, torch.cat([*base.values()]))


def test_a_session_without_a_manager_reads_what_nobody_has_here(tmp_path: Path) -> None:
    base = {name: rows(4, 90 + n) for n, name in enumerate("qkv")}
    tune = {**base, "q": rows(4, 93)}
    paths = [
        deferring.save(tmp_path / f"{n}.safetensors", each) for n, each in enumerate((base, tune))
    ]
    first, _, _ = load_file_of_qkv(None, paths[0], known=False)
    held = [*registry.residents()]
    second, session, read = load_file_of_qkv(None, paths[1], known=True)
    assert (read, session.ledger.leaf_shared_bytes) == (4 * LEAF_BYTES, 8 * LEAF_BYTES)
    assert shared_bytes(first, second) == 8 * LEAF_BYTES
    assert torch.equal(second, torch.cat([*tune.values()]))
    assert held


def test_an_audit_finds_that_a_record_lies(process: Make, tmp_path: Path) -> None:
    """As if two digests collided: k is said to be there, and is read by nobody."""
    base = {name: rows(4, 70 + n) for n, name in enumerate("qkv")}
    tune = {**base, "k": rows(4, 80)}
    path = deferring.save(tmp_path / "tune.safetensors", tune)
    one = process()
    provider = one.provider()
    [(held, _)] = provider.get_or_build([request_for(torch.cat([*base.values()]))])
    q, k, v = contents_of([*base.values()])
    [lie] = contents_of([tune["k"]])
    lies = [q, lie._replace(start=k.start, end=k.end), v]
    provider.note_contents(held, lies)
    with pytest.raises(AuditError):
        load_file_of_qkv(process(), path, known=True, audit=1.0)
    loaded, session, _ = load_file_of_qkv(process(), path, known=True, verify_bytes=True)
    assert session.ledger.collisions == 1
    assert torch.equal(loaded, torch.cat([*tune.values()]))
    assert held.nbytes


def test_contents_that_do_not_fill_a_tensor_are_no_contents() -> None:
    """They are another client's word."""
    tensor = rows(LEAVES, 47)
    key = request_for(tensor).key
    [whole] = contents_of([tensor])
    parts = [(0, 0, tensor.nbytes)]
    assert composition_in(record_of_parts(key, parts, [whole])) is not None
    for wrong in (
        [whole._replace(end=whole.end + 1)],
        [whole._replace(start=1)],
        [whole._replace(leaves=whole.leaves[:-1])],
        [whole, whole],
        [whole._replace(end=-5)],
    ):
        assert composition_in(record_of_parts(key, parts, wrong)) is None


class Lent(RuleBasedStateMachine):
    """Bases, fine-tunes, grown and shrunk ones, written and dropped, and managers that die."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.manager = self.stack.enter_context(managers.running(self.folder))
        self.processes = [
            Process(self.stack.enter_context(connect(self.manager.socket, keep_connected=False)))
            for _ in range(2)
        ]
        self.models: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # mapped, and what it is
        self.number = 0

    def add(self, content: torch.Tensor) -> tuple[Resident, bool]:
        process = self.processes[self.number % len(self.processes)]
        ((resident, made),) = process.load(content)
        self.number += 1
        self.models[self.number] = resident.map(), content.clone()
        return resident, made

    def choose(self, number: int) -> int:
        return sorted(self.models)[number % len(self.models)]

    @initialize()
    def first(self) -> None:
        self.add(rows(5, 1000))

    @rule(seed=st.integers(0, 1))
    def base(self, seed: int) -> None:
        self.add(rows(5, 1000 + seed))

    @precondition(lambda self: 0 < len(self.models) < 6)
    @rule(
        number=st.integers(0, 9),
        leaves=st.lists(st.integers(0, 3), max_size=3),
        more=st.sampled_from([0, 0, 1, -1, 40, -40]),
    )
    def fine_tune(self, number: int, leaves: Sequence[int], more: int) -> None:
        origin = self.choose(number)
        content = changed(self.models[origin][1], *leaves)
        content = content[:more] if more < 0 else torch.cat([content, content[:more]])
        if content.nbytes >= LEAF_SHARED_FROM:
            resident, made = self.add(content)
            event(f"made: {made}, shared in part: {resident.leaf_shared_bytes > 0}")

    @precondition(lambda self: self.models)
    @rule(number=st.integers(0, 9), row=st.integers(0, 2000))
    def write(self, number: int, row: int) -> None:
        mapped, content = self.models[self.choose(number)]
        for each in (mapped, content):
            each[row % len(each)] = row

    @precondition(lambda self: self.models)
    @rule(number=st.integers(0, 9))
    def own(self, number: int) -> None:
        mapped, _ = self.models[self.choose(number)]
        make_private(mapped.data_ptr(), mapped.nbytes)

    @precondition(lambda self: self.models)
    @rule(number=st.integers(0, 9))
    def drop(self, number: int) -> None:
        del self.models[self.choose(number)]
        gc.collect()

    @rule()
    def evict(self) -> None:
        with Admin(self.manager.socket) as admin:
            admin.evict("a checkpoint")

    @rule()
    def replace_manager(self) -> None:
        self.manager.kill()
        self.manager = self.stack.enter_context(managers.running(self.folder))
        for process in self.processes:
            process.client.reconnect()

    @invariant()
    def every_model_is_what_a_private_copy_is(self) -> None:
        for mapped, content in self.models.values():
            assert torch.equal(mapped, content)

    def teardown(self) -> None:
        assert verify().ok
        self.models.clear()
        gc.collect()
        managers.until(lambda: self.manager.overview().totals.leases == 0)
        self.stack.close()


TestLent = Lent.TestCase
TestLent.settings = settings(max_examples=3, stateful_step_count=12, deadline=None)

TestLongLent: Any = pytest.mark.long(type("TestLongLent", (Lent.TestCase,), {}))
TestLongLent.settings = settings(max_examples=5, stateful_step_count=12, deadline=None)


# In processes of their own.


def _join(state: dict[str, Any]) -> object:
    state["process"] = Process(connect(Path(str(state["path"])), keep_connected=False))
    return os.getpid()


def _load(tensor: torch.Tensor) -> Callable[[dict[str, Any]], object]:
    def load(state: dict[str, Any]) -> object:
        process: Process = state["process"]
        [(resident, _)] = process.load(tensor)
        state["mapped"] = mapped = resident.map()
        assert torch.equal(mapped, tensor)  # every page is read
        return [resident.leaf_shared_bytes, slab_memory()["Pss"]]

    return load


def _pss(_: dict[str, Any]) -> object:
    return [slab_memory()["Pss"]]


def _is(tensor: torch.Tensor) -> Callable[[dict[str, Any]], object]:
    return lambda state: torch.equal(state["mapped"], tensor)


def _write(state: dict[str, Any]) -> object:
    mapped: torch.Tensor = state["mapped"]
    mapped.zero_()
    return not mapped.any()


def _numbers(actor: managers.Actor) -> list[int]:
    answer: Any = actor.step()
    return list(answer)


def test_memory_of_two_processes_is_one_copy_and_what_differs(manager: managers.Manager) -> None:
    base = rows(LEAVES, 30)
    tune = changed(base, 5)
    one = managers.Actor(manager.socket, _join, _load(base), _pss, _is(base))
    two = managers.Actor(manager.socket, _join, _load(tune), _pss, _write)
    try:
        assert one.step() != two.step()
        _, alone = _numbers(one)
        common, _ = _numbers(two)
        both = sum(_numbers(one) + _numbers(two))
        assert common == 9 * LEAF_BYTES
        assert LEAF_BYTES <= both - alone <= 1.05 * LEAF_BYTES
        assert two.step() is True
        assert one.step() is True  # no neighbour sees what was written
    finally:
        one.kill()
        two.kill()


def test_a_process_that_is_killed_leaves_what_it_put_and_what_others_have_of_it(
    manager: managers.Manager,
) -> None:
    base = rows(LEAVES, 31)
    tune = changed(base, 5)
    one = managers.Actor(manager.socket, _join, _load(base))
    two = managers.Actor(manager.socket, _join, _load(tune), _is(tune), _is(tune))
    three = managers.Actor(manager.socket, _join, _load(tune))
    try:
        for actor in (one, two, three):
            actor.step()
        one.step()
        assert _numbers(two)[0] == 9 * LEAF_BYTES
        one.kill()
        assert two.step() is True
        assert _numbers(three)[0] == 0  # all of it was there
        assert two.step() is True
    finally:
        for actor in (one, two, three):
            with suppress(ProcessLookupError):
                actor.kill()
    managers.until(lambda: manager.overview().totals.leases == 0)
