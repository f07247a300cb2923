"""Where torch comes from, decided on reports of the form pip prints."""

import importlib.util
from types import ModuleType
from typing import Any

import pytest

import house


@pytest.fixture
def torch_index() -> ModuleType:
    path = house.ROOT / "scripts" / "torch_index.py"
    spec = importlib.util.spec_from_file_location("torch_index", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(*requirements: str) -> dict[str, Any]:
    return {"install": [{"metadata": {"name": "torch", "requires_dist": list(requirements)}}]}


CPU = ("filelock", "sympy>=1.13.3", 'opt-einsum>=3.3; extra == "opt-einsum"')
HERE = 'platform_system != "an other one"'
ELSEWHERE = 'platform_system == "an other one"'


@pytest.mark.parametrize(
    ("requirements", "cuda"),
    [
        ((), False),
        (CPU, False),
        ((*CPU, f"nvidia-cudnn-cu13==9.1; {HERE}"), True),
        ((*CPU, "nvidia-nccl-cu13"), True),
        ((*CPU, f"cuda-bindings>=13; {HERE}"), True),
        ((*CPU, f"nvidia-cudnn-cu13==9.1; {ELSEWHERE}"), False),
        ((*CPU, 'nvidia-cudnn-cu13; extra == "cuda"'), False),
    ],
)
def test_a_build_that_needs_cuda_here_is_known_by_its_metadata(
    torch_index: ModuleType, requirements: tuple[str, ...], cuda: bool
) -> None:
    assert torch_index.brings_cuda(report(*requirements)) is cuda


def test_a_build_without_requirements_is_no_cuda_build(torch_index: ModuleType) -> None:
    assert torch_index.brings_cuda({"install": [{"metadata": {"name": "torch"}}]}) is False


def test_the_version_is_the_one_the_package_pins(torch_index: ModuleType) -> None:
    assert torch_index.requirement().startswith("torch==")


def test_no_index_is_asked_for_when_the_user_wants_none(
    torch_index: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(torch_index.OVERRIDE, "")
    assert torch_index.arguments() == [torch_index.requirement()]
