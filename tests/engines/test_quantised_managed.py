"""Quantised checkpoints in two processes with a memory manager between them.

This process holds the base of each format while another one loads it and its fine-tune. What both
end with alike is one memory, by the kernel's own word: the same place in the same file.
"""

import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from models import quantised
from models import tiny_checkpoints as checkpoints
from processes import fresh, process_state
from tensor_dedup.loader.checkpoint_io.hints import ENVIRONMENT
from vllm_runs import engines, fleet, plain

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.vllm

# Given as a pointer to oneDNN, which keeps it: the packed weight is each process's own.
_PACKED = ("w8a8", "w8a8 static", "w8a8 offset")
# Quantised by vLLM while it loads the plain checkpoint.
_ONLINE = "fp8_per_channel"
_CI = ("fp8", "w4a16", "w8a8")
_LONG = (
    "AWQ",
    "fp8 static",
    "fp8 rows",
    "fp8 block",
    "GPTQ",
    *_PACKED[1:],
    "NVFP4",
    "MXFP4",
    _ONLINE,
)

Loaded = dict[str, Any]


def load(path: str, kind: str, config: dict[str, Any] | None) -> "tuple[LLM, Loaded]":
    """An engine; what it answers, holds and has in slabs."""
    options: dict[str, Any] = {"quantization": _ONLINE} if kind == _ONLINE else {}
    llm = plain.engine(path, tensor_dedup=config or False, **options)
    named = dict(plain.model(llm).named_parameters(remove_duplicate=False))
    held = {name: parameter for name, parameter in named.items() if parameter.numel()}
    return llm, {
        "answers": plain.outputs(llm),
        "final": {name: engines.fingerprint(parameter) for name, parameter in held.items()},
        "sizes": {name: parameter.nbytes for name, parameter in held.items()},
        "places": process_state.slab_places({name: p.data_ptr() for name, p in held.items()}),
        "report": engines.last_report().to_dict() if config else {},
    }


def one_after_the_other(
    kind: str, paths: tuple[str, str], config: dict[str, Any] | None
) -> tuple[Loaded, Loaded]:
    """Both checkpoints of a kind, of which only one is loaded at a time."""
    found = []
    for path in paths:
        llm, loaded = load(path, kind, config)
        found.append(loaded)
        engines.drop(llm)
        del llm
        gc.collect()
    return found[0], found[1]


def elsewhere(
    first: str, jobs: dict[str, tuple[str, str]], config: dict[str, Any], hints: str
) -> dict[str, tuple[Loaded, Loaded]]:
    """In another process: both checkpoints of each kind, loaded one after the other."""
    from vllm_runs import reference_kernels

    os.environ[ENVIRONMENT] = hints
    with reference_kernels.installed():
        engines.warm_up(Path(first))
        return {kind: one_after_the_other(kind, paths, config) for kind, paths in jobs.items()}


@dataclass
class Kind:
    """One format: plain loads, the base held here, and both as another process loaded them."""

    alone: tuple[Loaded, Loaded]
    here: Loaded
    there: tuple[Loaded, Loaded]
    still: tuple[plain.Answer, ...]


class World:
    """Every load of some formats, done once."""

    def __init__(self, root: Path, socket: Path, hints: Path, kinds: tuple[str, ...]) -> None:
        from vllm_runs import reference_kernels  # which imports vllm

        pair = checkpoints.make("llama", root / "plain")
        config = {"memory_manager": str(socket)}
        jobs = {kind: self._paths(kind, pair, root) for kind in kinds}
        engines.leave_alone(*root.rglob(checkpoints.WEIGHTS))
        held: dict[str, LLM] = {}
        self.kinds: dict[str, Kind] = {}
        with reference_kernels.installed():
            engines.warm_up(pair.base)
            alone = {kind: one_after_the_other(kind, paths, None) for kind, paths in jobs.items()}
            here = {}
            for kind, (base, _) in jobs.items():
                held[kind], here[kind] = load(base, kind, config)
            there = fresh.call_forked(elsewhere, str(pair.base), jobs, config, str(hints))
            for kind, llm in held.items():
                answers = plain.outputs(llm)
                self.kinds[kind] = Kind(alone[kind], here[kind], there[kind], answers)
            engines.drop(*held.values())
            held.clear()
            del llm
            gc.collect()

    @staticmethod
    def _paths(kind: str, pair: checkpoints.Pair, root: Path) -> tuple[str, str]:
        sources = (pair.base, pair.fine_tune)
        if kind == _ONLINE:
            return str(sources[0]), str(sources[1])
        folder = root / kind.replace(" ", "-")
        base, tuned = (quantised.make(kind, source, folder / source.name) for source in sources)
        return str(base), str(tuned)


def _world(kinds: tuple[str, ...], root: Path) -> World:
    kinds = tuple(kind for kind in kinds if plain.multiplies(kind))
    hints = root / "hints.sqlite"
    with (
        mock.patch.dict(os.environ, {ENVIRONMENT: str(hints)}),
        fleet.manager(root) as manager,
    ):
        return World(root, manager.socket, hints, kinds)


@pytest.fixture(scope="module")
def ci(tmp_path_factory: pytest.TempPathFactory) -> World:
    return _world(_CI, tmp_path_factory.mktemp("managed"))


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> World:
    return _world(_LONG, tmp_path_factory.mktemp("managed-rest"))


@pytest.fixture(params=[*_CI, *(pytest.param(kind, marks=pytest.mark.long) for kind in _LONG)])
def kind(request: pytest.FixtureRequest) -> str:
    if not plain.multiplies(request.param):
        pytest.skip("vLLM cannot multiply four bits on this CPU")
    return str(request.param)


@pytest.fixture
def found(kind: str, request: pytest.FixtureRequest) -> Kind:
    """The loads of one format, of which it is known that the processes share what is alike."""
    world: World = request.getfixturevalue("ci" if kind in _CI else "rest")
    loads = world.kinds[kind]
    base, tuned = loads.alone
    same = engines.equal(base["final"], tuned["final"])
    assert 0 < len(same) <= len(base["final"])
    assert len(same) < len(base["final"]) or kind in _PACKED
    assert loads.here["places"].keys() == base["final"].keys()
    again, changed = loads.there
    assert again["places"] == loads.here["places"]
    alike = {n for n, place in changed["places"].items() if place == again["places"].get(n)}
    assert alike == same
    return loads


def test_two_processes_have_one_memory_and_answer_as_plain_vllm(found: Kind) -> None:
    base, tuned = found.alone
    again, changed = found.there
    assert base["answers"] != tuned["answers"]
    assert found.here["final"] == again["final"] == base["final"]
    assert changed["final"] == tuned["final"]
    assert found.here["answers"] == again["answers"] == found.still == base["answers"]
    assert changed["answers"] == tuned["answers"]


def test_what_the_first_process_made_is_made_once(found: Kind, kind: str) -> None:
    again, changed = found.there
    base, tuned = found.alone
    # What is no parameter is packed, and each process's own.
    packed = again["report"]["total_bytes"] - sum(again["sizes"].values())
    assert bool(packed) == (kind in (*_PACKED, _ONLINE))
    assert again["report"]["private_bytes"] == packed
    same = engines.equal(base["final"], tuned["final"])
    differing = sum(size for name, size in changed["sizes"].items() if name not in same)
    # A scale that differs from the base's may be equal to that of another format.
    assert packed <= changed["report"]["private_bytes"] <= packed + differing
    # What processing made is found by its content alone: known or not, such layers are read.
    assert again["report"]["known"] == (kind != _ONLINE)
    assert again["report"]["bytes_read"] > 0
