"""What `scripts/test-gpu` puts on a machine that no package index can give it.

    pack WHEEL TO      the parts of vLLM's wheel that its tests need, as TO/vllm-VERSION.tar.xz
    unpack FROM SITE   these again, whole or cut into pieces, unless vLLM is installed
    register PLACE     this repository as an installed distribution, for the plug-ins of vLLM

Needs nothing but Python: it runs before anything is installed.
"""

import io
import lzma
import re
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Kernels of attention backends, quantisations and kinds of models that no test of ours asks for,
# and a server of its own: four fifths of the wheel.
LEFT_OUT = re.compile(
    r"vllm/(vllm-rs$|_flashmla_C|_flashmla_extension_C|_qutlass_C|vllm_flash_attn/[^/]*\.so$"
    r"|third_party/(deep_gemm|fmha_sm100|tml_fa4)/)"
)
# vLLM's layers import flash attention, whatever backend is asked for, and only its use needs more
# than that the module is there.
EMPTY = ("vllm/vllm_flash_attn/_vllm_fa2_C.py",)


def pack(wheel: Path, to: Path) -> Path:
    """Write what is needed of a wheel of vLLM's, and say where."""
    archive = to / f"{'-'.join(wheel.name.split('-')[:2])}.tar.xz"
    with zipfile.ZipFile(wheel) as source, tarfile.open(archive, "w:xz") as target:
        for each in source.infolist():
            if not each.is_dir() and not LEFT_OUT.match(each.filename):
                _add(target, each.filename, source.read(each))
        for name in EMPTY:
            _add(target, name, b"")
    return archive


def _add(target: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    target.addfile(entry, io.BytesIO(content))


class Pieces(io.RawIOBase):
    """Files read as if they were one."""

    def __init__(self, files: list[Path]) -> None:
        super().__init__()
        self._content = self._blocks(files)
        self._left = b""

    @staticmethod
    def _blocks(files: list[Path]) -> Iterator[bytes]:
        for each in files:
            with each.open("rb") as file:
                while block := file.read(1 << 20):
                    yield block

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._left = self._left or next(self._content, b"")
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size


def unpack(source: Path, site: Path) -> str:
    """Unpack what `pack` wrote, and say what was done."""
    pieces = sorted(source.glob("vllm-*.tar.xz*"))
    if not pieces:
        return "there is no vLLM to unpack"
    if find_spec("vllm") is not None:
        return "vLLM is installed"
    if (site / "vllm").is_dir():
        return f"vLLM is there already: {site}"
    names = " ".join(each.name for each in pieces)
    site.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=site) as begun:
        try:
            _extract(pieces, begun)
        except (lzma.LZMAError, EOFError, tarfile.TarError) as error:
            sys.exit(f"{names}: {error}; is a piece missing?")
        for each in Path(begun).iterdir():
            each.rename(site / each.name)
    return f"unpacked {names}"


def _extract(pieces: list[Path], to: str) -> None:
    with (
        lzma.open(io.BufferedReader(Pieces(pieces), 1 << 20)) as plain,
        tarfile.open(fileobj=plain, mode="r|") as archive,
    ):
        archive.extractall(to, filter="data")
        while plain.read(1 << 20):  # to the check sum, which nothing else asks for
            pass


def register(place: Path) -> str:
    """Write the entry points of pyproject.toml where Python looks for them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = project["name"]
    source = (ROOT / "src" / "tensor_dedup" / "__init__.py").read_text()
    [version] = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    folder = place / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    groups = [
        "\n".join([f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())])
        for group, entries in project["entry-points"].items()
    ]
    (folder / "entry_points.txt").write_text("\n\n".join(groups) + "\n")
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return f"{name} {version}"


def main(arguments: list[str]) -> str:
    match arguments:
        case ["pack", wheel, to]:
            return str(pack(Path(wheel), Path(to)))
        case ["unpack", source, site]:
            return unpack(Path(source), Path(site))
        case ["register", place]:
            return register(Path(place))
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1:]) + "\n")
