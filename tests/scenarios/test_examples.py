"""The examples, as a user runs them, with few steps."""

import runpy
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from processes import fresh
from project import package_source
from tensor_dedup import Store
from vllm_runs import engines, plain

EXAMPLES = package_source.ROOT / "examples"


def publish_steps(where: str, steps: int) -> tuple[list[str], list[str]]:
    """Run the example; return its lines, and a digest of the weights of each time it sampled."""
    from vllm import LLM

    sampled: list[str] = []
    generate = LLM.generate

    def noted(llm: LLM, *arguments: Any, **options: Any) -> Any:
        sampled.append(engines.fingerprint(next(plain.model(llm).parameters())))
        return generate(llm, *arguments, **options)

    path = str(EXAMPLES / "publish_steps.py")
    sys.argv = [path, "--steps", str(steps), "--where", where]
    screen = StringIO()
    with mock.patch.object(LLM, "generate", noted), redirect_stdout(screen):
        runpy.run_path(path, run_name="__main__")
    return screen.getvalue().splitlines(), sampled


@pytest.mark.vllm
def test_an_engine_samples_from_each_step_that_is_published(tmp_path: Path) -> None:
    where = tmp_path / "policy"
    lines, sampled = fresh.call_forked(publish_steps, str(where), 3)
    assert [line.split()[0] for line in lines if line[:4].strip().isdigit()] == ["1", "2", "3"]
    assert len(set(sampled)) == len(sampled) == 3
    with Store.open(where) as store:
        assert [step.step for step in store.steps("policy")] == [0, 1, 2, 3]
