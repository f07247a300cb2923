"""Two processes build one known tensor at once: one memory comes of it, whoever is first."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from manager_runs import managers
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.loader.residents.host_manager import host_session
from tensor_dedup.loader.residents.lent import LentInParts, LentResident, record_of
from tensor_dedup.loader.residents.resident import Resident, digest_of, tensor_bytes
from tensor_dedup.memory_manager.client.puts import Put
from vllm_runs.lent_tensors import Process, contents_of, load_known, processes_of, request_for, rows

Make = Callable[[], Process]
RECIPE = "a fine-tune"


@pytest.fixture
def manager(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[managers.Manager]:
    tmp_path.chmod(0o700)
    silence_s = getattr(request, "param", 60)
    options = ("--budget", str(1 << 30), "--build-timeout", str(silence_s))
    with managers.running(tmp_path, *options) as running:
        yield running


@pytest.fixture
def process(manager: managers.Manager) -> Iterator[Make]:
    with processes_of(manager.socket) as make:
        yield make


@pytest.fixture
def parts(process: Make) -> Iterator[list[torch.Tensor]]:
    """What a fine-tune consists of, of whose three parts a resident base has two."""
    base = [rows(4, 200 + number) for number in range(3)]
    provider = process().provider()
    [(held, _)] = provider.get_or_build([request_for(torch.cat(base))])
    provider.note_contents(held, contents_of(base))
    yield [rows(4, 203), *base[1:]]
    del held


def assert_lent(resident: Resident | None, parts: list[torch.Tensor]) -> None:
    assert isinstance(resident, LentInParts)
    assert resident.key.digest == request_for(torch.cat(parts)).digest
    assert torch.equal(resident.map(), torch.cat(parts))


def key_of(process: Process) -> str:
    return host_session(process.client, "a checkpoint")._key(RECIPE)


def test_what_another_has_built_meanwhile_is_used(
    manager: managers.Manager, process: Make, parts: list[torch.Tensor]
) -> None:
    """It was reserved there when this load came, and is there when this load has read its part."""
    first, second = process(), process()
    theirs: list[Resident | None] = []

    def seen() -> None:
        going_on.set()
        done.wait(60)

    def late() -> None:
        """The first goes on when the second has seen that it builds."""
        ours, read = load_known(second, parts, RECIPE, seen)
        assert read == 4 * LEAF_BYTES  # it has not waited before it read
        theirs.append(ours)

    going_on, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=late)

    def second_comes() -> None:
        thread.start()
        assert going_on.wait(60)

    ours, read = load_known(first, parts, RECIPE, second_comes)
    done.set()
    thread.join(60)
    assert read == 4 * LEAF_BYTES
    for each in (ours, *theirs):
        assert_lent(each, parts)
    assert ours is theirs[0]  # of one process's registry: the very same memory
    assert manager.overview().totals.resident_bytes == 16 * LEAF_BYTES
    assert manager.overview().totals.builds == 0


def test_what_another_gives_up_is_put_here(
    manager: managers.Manager, process: Make, parts: list[torch.Tensor]
) -> None:
    first, second = process(), process()
    put = first.client.reserve([key_of(first)]).put
    assert put is not None
    ours, read = load_known(second, parts, RECIPE, put.abandon)
    assert read == 4 * LEAF_BYTES
    assert_lent(ours, parts)
    assert manager.overview().totals.resident_bytes == 16 * LEAF_BYTES
    assert_lent(process().find(torch.cat(parts), RECIPE, known=False), parts)


@contextmanager
def put_when_waited_for(waiting: Process, put: Put, whole: torch.Tensor) -> Iterator[None]:
    """Another process's put ends, of the whole tensor, when this one begins to wait for it."""
    wait, waited = waiting.client.wait, []

    def goes_on(key: str, timeout_s: float) -> str:
        waited.append(key)
        put.allocate([whole.nbytes], [digest_of(whole)])
        put.write(0, tensor_bytes(whole))
        [lease] = put.seal()
        put.publish(key, record_of(request_for(whole).key), [lease.digest])
        return wait(key, timeout_s)

    with patch.object(waiting.client, "wait", goes_on):
        yield
    assert waited == [key_of(waiting)]


def test_what_another_puts_otherwise_is_waited_for(
    process: Make, parts: list[torch.Tensor]
) -> None:
    """It is whole there, and would be in parts here."""
    first, second = process(), process()
    whole = torch.cat(parts)
    put = first.client.reserve([key_of(first)]).put
    assert put is not None
    with put_when_waited_for(second, put, whole):
        ours, read = load_known(second, parts, RECIPE)
    assert read == 4 * LEAF_BYTES
    assert isinstance(ours, LentResident)
    assert torch.equal(ours.map(), whole)


@pytest.mark.parametrize("manager", [2.0], indirect=True)
def test_what_another_has_taken_over_is_used(
    manager: managers.Manager, process: Make, parts: list[torch.Tensor]
) -> None:
    """Nothing was heard for too long of the load that read it, and the other is not done yet."""
    first, second = process(), process()
    key, whole = key_of(second), torch.cat(parts)
    with ExitStack() as stack:

        def taken_over() -> None:
            assert second.client.reserve([key]).answers == {key: "building"}
            assert second.client.wait(key, 60) == "stalled"
            put = second.client.reserve([key]).put
            assert put is not None
            stack.enter_context(put_when_waited_for(first, put, whole))

        ours, _ = load_known(first, parts, RECIPE, taken_over)
    assert manager.overview().totals.takeovers == 1
    assert isinstance(ours, LentResident)
    assert torch.equal(ours.map(), whole)
    assert manager.overview().totals.builds == 0
