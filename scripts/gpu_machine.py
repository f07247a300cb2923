"""What `scripts/test-gpu` takes to a machine that no package index can be reached from.

    pack TO WHEELS VERSION CAPABILITY    one archive: this repository, and the wheels, unpacked
    check PLACE                          whether what was packed is for this machine
    register PLACE                       this repository as an installed distribution, for vLLM

VERSION is Python's (3.12), CAPABILITY the GPU's compute capability (9.0). Needs nothing but Python:
it runs before anything is installed.
"""

import io
import json
import re
import struct
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
TOP = "tensor-dedup"  # the folder that an archive unpacks to
PLACE = f"{TOP}/build/test-gpu"
FACTS = "packed.json"  # in PLACE: what was packed, and for which machine
# Kernels of attention backends, quantisations and kinds of models that no test of ours asks for,
# and a server of its own: four fifths of vLLM's wheel.
LEFT_OUT = re.compile(
    r"vllm/(vllm-rs$|_flashmla_C|_flashmla_extension_C|_qutlass_C|vllm_flash_attn/[^/]*\.so$"
    r"|third_party/(deep_gemm|fmha_sm100|tml_fa4)/)"
    r"|[^/]+\.dist-info/RECORD$"
)
# vLLM's layers import flash attention, whatever backend is asked for, and only its use needs more
# than that the module is there.
EMPTY = ("vllm/vllm_flash_attn/_vllm_fa2_C.py",)


def pack(to: Path, wheels: Path, version: str, capability: str) -> str:
    """Write the archive, and say what is in it."""
    found = sorted(wheels.glob("*.whl"))
    facts = {
        "python": version,
        "capability": capability,
        "commit": _git("log", "-1", "--format=%h %s").strip(),
        "wheels": [each.name for each in found],
    }
    with tarfile.open(to, "w:xz") as archive:
        for name in _git("ls-files", "-coz", "--exclude-standard").split("\0"):
            if name and (ROOT / name).is_symlink() | (ROOT / name).is_file():
                archive.add(ROOT / name, f"{TOP}/{name}")
        _add(archive, f"{PLACE}/{FACTS}", json.dumps(facts, indent=1).encode())
        for wheel in found:
            for name, content in _files(wheel):
                _add(archive, f"{PLACE}/site/{name}", without_others(content, capability))
        if any(each.name.startswith("vllm-") for each in found):
            for name in EMPTY:
                _add(archive, f"{PLACE}/site/{name}", b"")
    return f"{to}: {to.stat().st_size / (1 << 20):.1f} MiB, {len(found)} wheels"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _files(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """The modules of a wheel, where an installation would put them, and its metadata."""
    with zipfile.ZipFile(wheel) as source:
        for each in source.infolist():
            apart = re.fullmatch(r"[^/]+\.data/([^/]+)/(.*)", each.filename)
            if apart is not None and apart[1] not in ("purelib", "platlib"):
                continue  # scripts, headers, manuals
            name = each.filename if apart is None else apart[2]
            if not each.is_dir() and not LEFT_OUT.match(name):
                yield name, source.read(each)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


# The form of GPU code in a compiled extension: one section with a container for each object file
# that was linked. A container holds the same code for several GPUs, as machine code and as PTX,
# which the driver would compile; the driver takes what fits its GPU best.
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the code
_MAGIC = 0xBA55ED50
_CODE = struct.Struct("<HHIQIIHHI")  # kind, -, bytes of this header, of the code, -, -, -, -, GPU
_MACHINE = 2  # 1 is PTX
_SECTIONS = frozenset({".nv_fatbin", "__nv_relfatbin"})


class Code(NamedTuple):
    """Code of one kind for one GPU: `gpu` is ten times its compute capability."""

    kind: int
    gpu: int
    start: int
    stop: int


def without_others(content: bytes, capability: str) -> bytes:
    """A compiled extension with zeros in place of its code for other GPUs than this.

    Its size and everything else stay as they were. Any other file is returned as it is.
    """
    gpu = round(10 * float(capability))
    cleared = bytearray()
    for start, stop in _sections(content):
        for container in _containers(content, start, stop):
            kept = _fitting(container, gpu)
            for each in container:
                if each not in kept:
                    cleared = cleared or bytearray(content)
                    cleared[each.start : each.stop] = bytes(each.stop - each.start)
    return bytes(cleared) or content


def _fitting(container: list[Code], gpu: int) -> list[Code]:
    """The machine code that runs there, of several the newest.

    PTX is what Marlin's kernels have for a GPU newer than theirs; none of our tests needs them.
    """
    fits = [
        c for c in container if c.kind == _MACHINE and c.gpu // 10 == gpu // 10 and c.gpu <= gpu
    ]
    return [each for each in fits if each.gpu == max(other.gpu for other in fits)]


def _sections(content: bytes) -> Iterator[tuple[int, int]]:
    """Where GPU code is in an ELF file of 64 bits."""
    if content[:5] != b"\x7fELF\x02" or len(content) < 64:
        return
    (table,) = struct.unpack_from("<Q", content, 40)
    size, count, names = struct.unpack_from("<HHH", content, 58)
    if names >= count or table + count * size > len(content):
        return
    entries = [struct.unpack_from("<IIQQQQ", content, table + n * size) for n in range(count)]
    for entry in entries:
        start = entries[names][4] + entry[0]
        name = content[start : content.index(b"\0", start)].decode(errors="replace")
        if name in _SECTIONS:
            yield entry[4], entry[4] + entry[5]


def _containers(content: bytes, start: int, stop: int) -> Iterator[list[Code]]:
    at = start
    while at + _CONTAINER.size <= stop:
        magic, _, header, size = _CONTAINER.unpack_from(content, at)
        if magic != _MAGIC:  # containers begin at multiples of 8
            at += 8
            continue
        yield list(_codes(content, at + header, at + header + size))
        at += header + size


def _codes(content: bytes, start: int, stop: int) -> Iterator[Code]:
    at = start
    while at + _CODE.size <= stop:
        kind, _, header, size, *_, gpu = _CODE.unpack_from(content, at)
        yield Code(kind, gpu, at + header, at + header + size)
        at += header + size


def check(place: Path) -> str:
    """Say what was packed for this machine; exit with words where it was for another."""
    facts: dict[str, Any] = json.loads((place / FACTS).read_text())
    here = "{}.{}".format(*sys.version_info)
    if facts["python"] != here:
        sys.exit(f"this is Python {here}; gather again for it: --gather FILE {here}")
    import torch

    if not torch.cuda.is_available():
        sys.exit("this torch sees no GPU")
    gpu = "{}.{}".format(*torch.cuda.get_device_capability())
    if facts["capability"] != gpu:
        sys.exit(f"packed for a GPU of {facts['capability']}; gather with --capability {gpu}")
    return f"packed at commit {facts['commit']} for Python {here} and a GPU of {gpu}"


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
        case ["pack", to, wheels, version, capability]:
            return pack(Path(to), Path(wheels), version, capability)
        case ["check", place]:
            return check(Path(place))
        case ["register", place]:
            return register(Path(place))
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1:]) + "\n")
