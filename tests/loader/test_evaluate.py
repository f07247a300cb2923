"""Deferred loading gives the bytes of plain loading, and equal recipes mean equal bytes."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_runs import deferring

_STEP = st.tuples(*(st.integers(0, 9999),) * 4)
PROGRAMS = st.lists(_STEP, min_size=1, max_size=14)
SEEDS = (0, 1, 2)
# What a recipe gave the first time any program had it: the whole run checks every repetition.
_SEEN: dict[str, bytes] = {}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("programs")
    return {
        seed: deferring.save(folder / f"{seed}.safetensors", deferring.random_sources(seed))
        for seed in SEEDS
    }


def check(files: dict[int, Path], program: list[deferring.Step]) -> None:
    recipes = [check_one(path, program) for path in files.values()]
    for name in recipes[0].keys() & recipes[1].keys():
        # Over other bytes in any source it follows from, a recipe has another name.
        (first, used), (second, _) = recipes[0][name], recipes[1][name]
        assert not used or first != second


def check_one(path: Path, program: list[deferring.Step]) -> dict[str, tuple[str, set[str]]]:
    skip: set[int] = set()
    wanted = deferring.real(
        deferring.random_model(), path, deferring.loader(program, skip, real=True)
    )
    load = deferring.loader(program, skip, real=False)
    found = {}
    with deferring.deferred(deferring.random_model(), path, load) as run:
        assert deferring.raw(run.model.get_buffer("buffer")) == wanted["buffer"]
        used = {
            name: {source.spec.name for source in each.sources}
            for name, each in run.parameters.items()
        }
        for name, each in run.parameters.items():
            assert run.bytes(name) == wanted[name], name
            if each.view is not None:
                found[name] = run.book.digest(each.view), used[name]
                assert _SEEN.setdefault(found[name][0], wanted[name]) == wanted[name]
        assert max(run.file.reads.values(), default=0) <= 1
    return found


@settings(max_examples=250, derandomize=True)
@given(program=PROGRAMS)
def test_any_program_gives_the_bytes_of_plain_loading(
    files: dict[int, Path], program: list[deferring.Step]
) -> None:
    check(files, program)


@pytest.mark.long
@settings(max_examples=5_000)
@given(program=st.lists(_STEP, min_size=1, max_size=40))
def test_any_long_program_gives_the_bytes_of_plain_loading(
    files: dict[int, Path], program: list[deferring.Step]
) -> None:
    check(files, program)
