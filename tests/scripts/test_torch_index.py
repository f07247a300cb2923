"""Where torch comes from, decided on reports of the form pip prints."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from project import package_source

CPU = ("filelock", "sympy>=1.13.3", 'opt-einsum>=3.3; extra == "opt-einsum"')
HERE = 'platform_system != "an other one"'
ELSEWHERE = 'platform_system == "an other one"'
DEFAULT = "https://download.pytorch.org/whl/cpu"
REPORTS = [
    ((), False),
    (CPU, False),
    ((*CPU, f"nvidia-cudnn-cu13==9.1; {HERE}"), True),
    ((*CPU, "nvidia-nccl-cu13"), True),
    ((*CPU, f"cuda-bindings>=13; {HERE}"), True),
    ((*CPU, f"nvidia-cudnn-cu13==9.1; {ELSEWHERE}"), False),
    ((*CPU, 'nvidia-cudnn-cu13; extra == "cuda"'), False),
]


def wanted() -> str:
    project = tomllib.loads((package_source.ROOT / "pyproject.toml").read_text())["project"]
    (line,) = (
        line for line in project["optional-dependencies"]["vllm-cpu"] if line.startswith("torch==")
    )
    return str(line)


def arguments(folder: Path, *requirements: str, index: str | None = None) -> list[str]:
    """What the script prints for a torch with these requirements.

    In a process of its own: pip's modules are not made to be imported into a program.
    """
    report = folder / "report.json"
    item = {"metadata": {"name": "torch", "requires_dist": list(requirements)}}
    report.write_text(json.dumps({"install": [item]}))
    env = {key: text for key, text in os.environ.items() if key != "TENSOR_DEDUP_TORCH_INDEX"}
    if index is not None:
        env["TENSOR_DEDUP_TORCH_INDEX"] = index
    command = [sys.executable, str(package_source.ROOT / "scripts" / "torch_index.py"), str(report)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(("requirements", "cuda"), REPORTS)
def test_a_build_that_needs_cuda_here_comes_from_the_cpu_index(
    requirements: tuple[str, ...], cuda: bool, tmp_path: Path
) -> None:
    extra = ["--index-url", DEFAULT] if cuda else []
    assert arguments(tmp_path, *requirements) == [wanted(), *extra]


@pytest.mark.parametrize(
    ("index", "extra"),
    [("", []), ("https://mirror.example/cpu", ["--index-url", "https://mirror.example/cpu"])],
)
def test_the_user_names_another_index_or_none(index: str, extra: list[str], tmp_path: Path) -> None:
    assert arguments(tmp_path, "nvidia-nccl-cu13", index=index) == [wanted(), *extra]
