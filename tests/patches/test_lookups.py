"""How often a load asks the memory manager what it already has."""

import gc
import math
from pathlib import Path
from typing import Any

import pytest

import engines
import managers
import plain
import tiny_checkpoints as checkpoints
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.memory_manager.client.connection import Connection
from tensor_dedup.memory_manager.protocol.limits import MAX_KEYS, MAX_PIECES
from tensor_dedup.memory_manager.protocol.messages import Lookup, LookupDigests

pytestmark = pytest.mark.vllm


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[Lookup | LookupDigests]:
    """The look-up messages that this process sends from now on."""
    sent: list[Lookup | LookupDigests] = []
    ask = Connection.ask

    def noting(self: Connection, message: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(message, Lookup | LookupDigests):
            sent.append(message)
        return ask(self, message, *args, **kwargs)

    monkeypatch.setattr(Connection, "ask", noting)
    return sent


def test_a_known_checkpoint_is_looked_up_all_at_once(
    tmp_path: Path, looked_up: list[Lookup | LookupDigests]
) -> None:
    path = checkpoints.make("llama_tied", tmp_path).base
    engines.leave_alone(path / checkpoints.WEIGHTS)
    with managers.running(tmp_path) as manager:
        first = engines.sharing(path, memory_manager=str(manager.socket))
        expected = plain.outputs(first)
        engines.drop(first)
        del first
        gc.collect()
        assert registry.residents() == []
        looked_up.clear()

        second = engines.sharing(path, memory_manager=str(manager.socket))
        asked = list(looked_up)
        report = engines.last_report()
        assert plain.outputs(second) == expected
        engines.drop(second)
        del second
        gc.collect()
    assert report.known
    assert report.shared_bytes == report.total_bytes > 0
    assert report.bytes_read == 0
    keys = sum(len(each.keys) for each in asked if isinstance(each, Lookup))
    digests = sum(len(each.digests) for each in asked if isinstance(each, LookupDigests))
    assert keys > 0
    assert digests > 0
    assert len(asked) <= math.ceil(keys / MAX_KEYS) + math.ceil(digests / MAX_PIECES)
    assert keys + digests <= report.tensors_total
