"""What is carried to a machine with a GPU: of vLLM what its tests need, in pieces or whole."""

import importlib.metadata
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from project import package_source

sys.path.append(str(package_source.ROOT / "scripts"))
import gpu_machine

NEEDED = {
    "vllm/__init__.py": b"",
    "vllm/_C_stable_libtorch.abi3.so": bytes(range(256)) * 999,
    "vllm/vllm_flash_attn/__init__.py": b"",
    "vllm/third_party/pynvml.py": b"",
    "vllm-0.26.0.dist-info/METADATA": b"Name: vllm\n",
}
NOT_NEEDED = (
    "vllm/vllm-rs",
    "vllm/_flashmla_C.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    "vllm/third_party/deep_gemm/include/cute.hpp",
)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    wheel = tmp_path / "vllm-0.26.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        for name, content in {**NEEDED, **dict.fromkeys(NOT_NEEDED, b"large")}.items():
            made.writestr(name, content)
    return gpu_machine.pack(wheel, tmp_path)


def cut(archive: Path, size: int) -> Path:
    """The archive in pieces of this size, in a folder of their own, as `split` names them."""
    content = archive.read_bytes()
    folder = archive.with_name("pieces")
    folder.mkdir()
    for n, start in enumerate(range(0, len(content), size)):
        piece = folder / f"{archive.name}.{n:02}"
        piece.write_bytes(content[start : start + size])
    assert len(list(folder.iterdir())) > 2
    return folder


def files(site: Path) -> dict[str, bytes]:
    return {str(f.relative_to(site)): f.read_bytes() for f in site.rglob("*") if f.is_file()}


@pytest.fixture
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without vLLM."""
    monkeypatch.setattr(gpu_machine, "find_spec", lambda _name: None)


@pytest.mark.usefixtures("_bare")
@pytest.mark.parametrize("size", [None, 100])
def test_what_is_needed_of_vllm_comes_back(archive: Path, size: int | None, tmp_path: Path) -> None:
    source, site = archive.parent if size is None else cut(archive, size), tmp_path / "site"
    assert gpu_machine.unpack(source, site).startswith("unpacked vllm-0.26.0.tar.xz")
    # Every layer of vLLM imports flash attention, which then has to be there.
    assert files(site) == NEEDED | dict.fromkeys(gpu_machine.EMPTY, b"")
    assert "is there" in gpu_machine.unpack(source, site)


@pytest.mark.usefixtures("_bare")
def test_a_piece_that_is_missing_is_said_and_leaves_nothing(archive: Path, tmp_path: Path) -> None:
    source, site = cut(archive, 100), tmp_path / "site"
    max(source.iterdir()).unlink()
    with pytest.raises(SystemExit, match=r"vllm-0\.26\.0\.tar\.xz\.00.*is a piece missing"):
        gpu_machine.unpack(source, site)
    assert not (site / "vllm").exists()


def test_a_machine_that_has_vllm_keeps_its_own(archive: Path, tmp_path: Path) -> None:
    assert gpu_machine.unpack(tmp_path / "empty", tmp_path) == "there is no vLLM to unpack"
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    assert gpu_machine.unpack(archive.parent, tmp_path / "site") == "vLLM is installed"
    assert not (tmp_path / "site").exists()


def test_plug_ins_are_found_as_if_this_were_installed(tmp_path: Path) -> None:
    assert gpu_machine.register(tmp_path).startswith("tensor-dedup ")
    [found] = importlib.metadata.distributions(path=[str(tmp_path)])
    plug_ins = {e.group: e.load() for e in found.entry_points if e.group.startswith("vllm.")}
    assert set(plug_ins) == {"vllm.general_plugins", "vllm.platform_plugins"}
    assert all(map(callable, plug_ins.values()))
