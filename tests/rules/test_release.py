"""What would be published: a source distribution whose wheel installs and works elsewhere."""

import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import tensor_dedup
from project import package_source

BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of what git holds."""
    tree, folder = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("source")
    run("git", "-C", package_source.ROOT, "checkout-index", "--all", f"--prefix={tree}/")
    name = run(sys.executable, "-c", BUILD, folder, cwd=tree).splitlines()[-1]
    return folder / name


def wheel_of(source: Path, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", folder, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_a_source_distribution_has_the_package_and_nothing_else(source: Path) -> None:
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tops = {name.split("/")[0] for name in names if name}
    made = {"PKG-INFO", "setup.cfg"}
    files = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md"}
    files |= {"pyproject.toml", "setup.py", "src"}
    assert tops == made | files
    modules = package_source.modules(package_source.ROOT / "src")
    assert {str(each.relative_to(package_source.ROOT)) for each in modules.values()} <= names


def test_the_changelog_begins_with_the_version() -> None:
    text = (package_source.ROOT / "CHANGELOG.md").read_text()
    first = next(line for line in text.splitlines() if line.startswith("## "))
    assert first == f"## {tensor_dedup.__version__}"


@pytest.mark.long
def test_its_wheel_works_in_a_new_environment(source: Path, tmp_path: Path) -> None:
    wheel = wheel_of(source, tmp_path / "wheel")
    venv.create(tmp_path / "env", with_pip=True)
    bin_ = tmp_path / "env" / "bin"
    run(bin_ / "python", "-m", "pip", "install", "--quiet", wheel)
    same = np.arange(100_000, dtype=np.float32)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        tensors = {"same": same, "own": np.full(9, ord(name[0]), np.float32)}
        save_file(tensors, tmp_path / name / "model.safetensors")
    command = bin_ / "tensor-dedup"
    assert "tensor-dedup" in run(command, "--version")
    assert "same" in run(command, "analyze", "one", "two", "--json", cwd=tmp_path)
    for name in ("one", "two"):
        run(command, "import", name, "--store", "store", cwd=tmp_path)
    run(command, "verify", "--full", "--store", "store", cwd=tmp_path)
    run(command, "export", "two", "out", "--store", "store", cwd=tmp_path)
    written = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert written == (tmp_path / "two" / "model.safetensors").read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_what_it_needs_is_there_for_later_versions(
    source: Path, tmp_path: Path, version: str
) -> None:
    wheel = wheel_of(source, tmp_path / "wheel")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    target = str(tmp_path / "none")
    platform = ["--python-version", version, "--only-binary=:all:", "--target", target]
    run(*pip, *platform, wheel)
