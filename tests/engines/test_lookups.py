"""How often a load asks the memory manager what it already has."""

import gc
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from manager_runs import managers
from models import tiny_checkpoints as checkpoints
from processes import fresh
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.memory_manager.client.connection import Connection
from tensor_dedup.memory_manager.protocol.limits import MAX_KEYS, MAX_PIECES
from tensor_dedup.memory_manager.protocol.messages import Lookup, LookupDigests
from vllm_runs import engines, plain

pytestmark = pytest.mark.vllm


def test_a_known_checkpoint_is_looked_up_all_at_once(tmp_path: Path) -> None:
    keys, digests, tensors = fresh.call_forked(looked_up, tmp_path)
    assert sum(keys) > 0
    assert sum(digests) > 0
    messages = len(keys) + len(digests)
    assert messages <= math.ceil(sum(keys) / MAX_KEYS) + math.ceil(sum(digests) / MAX_PIECES)
    assert sum(keys) + sum(digests) <= tensors


def looked_up(root: Path) -> tuple[list[int], list[int], int]:
    """Of the second load of a model: keys and digests of each look-up, and its tensors.

    In a process that holds nothing of other tests.
    """
    root.chmod(0o700)
    path = checkpoints.make("llama_tied", root).base
    engines.leave_alone(path / checkpoints.WEIGHTS)
    sent: list[Any] = []
    ask = Connection.ask

    def noting(self: Connection, message: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(message)
        return ask(self, message, *args, **kwargs)

    with managers.running(root) as manager, mock.patch.object(Connection, "ask", noting):
        first = engines.sharing(path, memory_manager=str(manager.socket))
        expected = plain.outputs(first)
        engines.drop(first)
        del first
        gc.collect()
        assert registry.residents() == []
        sent.clear()

        second = engines.sharing(path, memory_manager=str(manager.socket))
        asked = list(sent)
        report = engines.last_report()
        assert plain.outputs(second) == expected
    assert report.known
    assert report.shared_bytes == report.total_bytes > 0
    assert report.bytes_read == 0
    keys = [len(each.keys) for each in asked if isinstance(each, Lookup)]
    digests = [len(each.digests) for each in asked if isinstance(each, LookupDigests)]
    return keys, digests, report.tensors_total
