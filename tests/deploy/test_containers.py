"""The container files: every step of them is done here, as far as that needs no container."""

import json
import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from files import container_files
from files.container_files import DEPLOY, Stage
from manager_runs import managers
from project import package_source

MANAGER = DEPLOY / "manager.Dockerfile"
ENGINE = DEPLOY / "engine.Dockerfile"
BOTH = pytest.mark.parametrize("dockerfile", [MANAGER, ENGINE], ids=lambda path: path.stem)


def built(dockerfile: Path, folder: Path, *, offline: bool = True) -> Stage:
    folder.chmod(0o700)
    uid = {"UID": str(os.getuid())}
    return container_files.build(dockerfile, folder, uid, offline=offline)


def test_the_context_is_what_the_wheel_is_made_of() -> None:
    names = set(container_files.context(package_source.ROOT))
    tracked = {str(path) for path in package_source.tracked_files()}
    assert {"pyproject.toml", "README.md", "src/tensor_dedup/loader"} <= names
    assert "src/tensor_dedup/store/store.py" in names
    assert not [name for name in names if name.startswith((".", "tests/", "docs/", "scripts/"))]
    assert not [name for name in names if "__pycache__" in name]
    assert names <= tracked
    size = sum((package_source.ROOT / name).lstat().st_size for name in names)
    assert size < 8 << 20


@BOTH
def test_images_are_pinned_and_not_run_by_root(dockerfile: Path) -> None:
    steps = container_files.instructions(dockerfile)
    bases = [step.text for step in steps if step.verb == "ARG" and ":" in step.text]
    assert bases
    for base in bases:
        tag = base.rpartition(":")[2]
        assert tag[0] in "v0123456789", base
        assert tag.count(".") == 2, base
    assert ":latest" not in dockerfile.read_text()
    froms = [step.text for step in steps if step.verb == "FROM"]
    assert all(text.startswith("${") for text in froms), "a base that no ARG names is not pinned"
    assert [step.text for step in steps if step.verb == "USER"] == ["${UID}:${UID}"]
    assert [step.text for step in steps if step.text.startswith("UID=")] == ["UID=1000"]


@BOTH
def test_what_is_installed_for_gpus_is_what_the_extra_names(dockerfile: Path) -> None:
    project = tomllib.loads((package_source.ROOT / "pyproject.toml").read_text())["project"]
    extra = set(project["optional-dependencies"]["cuda"])
    for requirement in ("cuda-bindings>=13,<14", "nvidia-ml-py"):
        assert requirement in extra
        assert requirement in dockerfile.read_text()


def test_the_engine_is_of_the_vllm_that_is_supported() -> None:
    project = tomllib.loads((package_source.ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["vllm"] == ["vllm>=0.32,<0.33"]
    assert "ARG VLLM=vllm/vllm-openai:v0.32.0\n" in ENGINE.read_text()


def serves(image: Stage) -> None:
    """What the image starts answers its own health check, and ends when it is told to."""
    socket = Path(image.environment["TENSOR_DEDUP_SOCKET"])
    found = socket.parent.stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.getuid(), 0o700)
    assert image.entrypoint == ["tensor-dedup"]
    command = [str(image.python.parent / "tensor-dedup"), *image.command, "--budget", "64MiB"]
    with subprocess.Popen(command, env=image.variables(), stderr=subprocess.PIPE) as manager:
        try:
            managers.until(socket.exists)
            health = image.run(image.health)
            assert health.returncode == 0, health.stderr
            totals = json.loads(health.stdout)["totals"]
            assert (totals["pid"], totals["budget"]) == (manager.pid, 64 << 20)
            assert totals["name"] == str(socket)
            manager.terminate()
            assert manager.wait(timeout=10) == 0
        finally:
            manager.kill()
    unhealthy = image.run(image.health)
    assert unhealthy.returncode != 0


def is_installed(image: Stage) -> None:
    """The package runs from the image, not from the repository."""
    said = image.run([str(image.python), "-c", "import tensor_dedup; print(tensor_dedup.__file__)"])
    assert Path(said.stdout.strip()).is_relative_to(image.root), said.stderr


def test_the_manager_s_image_serves(tmp_path: Path) -> None:
    image = built(MANAGER, tmp_path)
    is_installed(image)
    serves(image)


@pytest.mark.long
def test_the_manager_s_image_serves_with_what_an_index_has(tmp_path: Path) -> None:
    """The same with nothing of this environment: the wheel brings all that it needs."""
    asked = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "blake3"]
    found = subprocess.run([*asked, "--dest", str(tmp_path / "asked")], check=False)
    if found.returncode:
        pytest.skip("no package index answers")
    image = built(MANAGER, tmp_path, offline=False)
    is_installed(image)
    serves(image)
    without = image.run([str(image.python), "-c", "import torch"])
    assert "No module named 'torch'" in without.stderr


def test_the_engine_s_image_has_the_plug_ins(tmp_path: Path) -> None:
    image = built(ENGINE, tmp_path)
    is_installed(image)
    code = (
        "from importlib.metadata import distribution\n"
        "ours = distribution('tensor-dedup').entry_points\n"
        "print(sorted(p.group for p in ours if p.group.startswith('vllm.')))\n"
        "import getpass; print(getpass.getuser())"
    )
    said = image.run([str(image.python), "-c", code])
    assert said.stdout.splitlines() == [
        "['vllm.general_plugins', 'vllm.platform_plugins']",
        "engine",
    ], said.stderr
    for variable in ("HOME", "TENSOR_DEDUP_SOCKET"):
        folder = Path(image.environment[variable])
        folder = folder if folder.is_dir() else folder.parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert image.entrypoint == ["vllm", "serve"]
