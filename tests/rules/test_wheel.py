"""The wheel that is built from what git holds: complete, and importable."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tensor_dedup
from project import package_source


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as git has it, without what only lies about in the working tree."""
    folder = tmp_path_factory.mktemp("export")
    command = [
        "git",
        "-C",
        str(package_source.ROOT),
        "checkout-index",
        "--all",
        f"--prefix={folder}/",
    ]
    subprocess.run(command, check=True)
    # What setuptools leaves there it packs again, long after the module is gone.
    stale = folder / "build" / "lib" / "tensor_dedup" / "gone.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    return folder


def built(source: Path, folder: Path) -> zipfile.ZipFile:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def wheel(export: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return built(export, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def stand_in(export: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of the module that DeepSpeed imports."""
    source = export / package_source.STAND_IN_FOLDER.relative_to(package_source.ROOT)
    return built(source, tmp_path_factory.mktemp("stand-in"))


def test_it_holds_every_module(export: Path, wheel: zipfile.ZipFile) -> None:
    modules = package_source.modules(export / "src")
    expected = {str(path.relative_to(export / "src")) for path in modules.values()}
    assert {f"tensor_dedup/{part}/__init__.py" for part in package_source.LINKED} < expected
    assert "tensor_dedup/patches/vllm/__init__.py" in expected
    assert "tensorcas/adapters/sklearn.py" in expected
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == expected | {"tensor_dedup/py.typed", "tensorcas/py.typed"}


def test_building_it_leaves_nothing_to_be_packed_again(
    export: Path, wheel: zipfile.ZipFile
) -> None:
    assert [path.name for path in (export / "build").rglob("*.py")] == ["gone.py"]
    assert "tensor_dedup/__init__.py" in wheel.namelist()


def test_it_announces_its_command_and_its_plug_ins(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    lines = wheel.read(name).decode().splitlines()
    assert "[vllm.general_plugins]" in lines
    assert "[vllm.platform_plugins]" in lines
    assert "tensor-dedup = tensor_dedup.cli:main" in lines


def test_the_stand_in_for_datastates_is_a_wheel_of_its_own(stand_in: zipfile.ZipFile) -> None:
    packed = {name for name in stand_in.namelist() if ".dist-info/" not in name}
    assert packed == {"datastates.py"}
    (name,) = (name for name in stand_in.namelist() if name.endswith("METADATA"))
    lines = stand_in.read(name).decode().splitlines()
    assert "Requires-Dist: tensor-dedup>=0.1.0" in lines
    assert f"Version: {tensor_dedup.__version__}" in lines


def test_it_can_be_imported_without_the_repository(
    wheel: zipfile.ZipFile, stand_in: zipfile.ZipFile, tmp_path: Path
) -> None:
    wheel.extractall(tmp_path)
    stand_in.extractall(tmp_path)
    code = (
        "import tensor_dedup, tensor_dedup.cli, tensor_dedup.loader, tensor_dedup.store\n"
        "import tensor_dedup.memory_manager, tensor_dedup.patches.vllm\n"
        "import tensorcas.store, tensorcas.adapters.pytorch, datastates\n"
        "print(tensor_dedup.TensorDedupConfig().hash_algorithm, tensor_dedup.__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    algorithm, _, file = done.stdout.strip().partition(" ")
    assert (algorithm, Path(file)) == ("blake3", tmp_path / "tensor_dedup" / "__init__.py")
