"""Engines of several processes each, for real: what their ranks load, hold and answer.

Every engine here is two workers below one process: half a minute of work on an idle machine. What
each rank loads is in test_parallel too, quickly and in one process.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fleet
import tiny_checkpoints as checkpoints
from tensor_dedup.memory_manager.client.admin import Admin

pytestmark = [pytest.mark.vllm, pytest.mark.long]

# A core for each of two ranks.
ENVIRON = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
LOOKING = {"worker_extension_cls": "looking.Looking"}
# Not a pipeline, nor experts in parallel: plain vLLM 0.32 fails there, see docs/compatibility.md.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("llama", {"tensor_parallel_size": 2}),
    "experts": ("mixtral", {"tensor_parallel_size": 2}),
}


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[fleet.Fleet]:
    with fleet.fleet(tmp_path) as found:
        yield found


@dataclass
class Mode:
    """A pair of checkpoints, the arguments of an engine of two ranks, and plain vLLM's answers."""

    pair: checkpoints.Pair
    options: dict[str, Any]
    plain: dict[Path, dict[str, Any]]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, tmp_path: Path, engines: fleet.Fleet) -> Mode:
    arch, options = MODES[request.param]
    found = Mode(checkpoints.make(arch, tmp_path), {**options, **LOOKING}, {})
    for path in (found.pair.base, found.pair.fine_tune):
        engine = engines.start(path, None, ENVIRON, **found.options)
        found.plain[path] = engine.loaded
        engine.end()
    return found


def digests(loaded: dict[str, Any]) -> list[dict[str, str]]:
    """By rank; a parameter that nobody could look at fails here."""
    looks = sorted(loaded["looks"], key=lambda look: look["rank"])
    assert [look["rank"] for look in looks] == [0, 1]
    assert all(all(look["digests"].values()) for look in looks)
    return [look["digests"] for look in looks]


def made(loaded: dict[str, Any]) -> int:
    """Bytes that the ranks of an engine made, and did not find."""
    return sum(report["private_bytes"] for report in loaded["reports"])


def test_ranks_hold_what_plain_ranks_hold_once(
    mode: Mode, tmp_path: Path, engines: fleet.Fleet
) -> None:
    base, fine_tune = mode.pair.base, mode.pair.fine_tune
    with fleet.manager(tmp_path) as manager:
        config = {"memory_manager": str(manager.socket)}
        first, tuned = (
            engines.start(path, config, ENVIRON, **mode.options) for path in (base, fine_tune)
        )
        for engine, path in ((first, base), (tuned, fine_tune)):
            assert digests(engine.loaded) == digests(mode.plain[path])
            assert engine.loaded["outputs"] == mode.plain[path]["outputs"]
        assert first.loaded["outputs"] != tuned.loaded["outputs"]
        with Admin(manager.socket) as admin:
            assert sum(bool(row.leases) for row in admin.overview().clients) == 4
        # Whichever came first: of every content one was made, by one rank of one engine.
        assert len(manager.built()) == len(set(manager.built())) > 0
        total = sum(report["total_bytes"] for report in first.loaded["reports"])
        changed = [
            {n for n, digest in mine.items() if digest != theirs[n]}
            for mine, theirs in zip(digests(first.loaded), digests(tuned.loaded), strict=True)
        ]
        assert any(changed)
        assert all("layers.2." in name for names in changed for name in names)
        # The one matrix that is changed, and what vLLM stacks with it.
        assert made(first.loaded) + made(tuned.loaded) < 1.4 * total
        again = [first.outputs(), tuned.outputs()]
        assert again == [mode.plain[path]["outputs"] for path in (base, fine_tune)]
