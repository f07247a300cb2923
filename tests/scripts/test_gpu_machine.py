"""What is carried to a machine with a GPU, one archive, and what the one command runs there."""

import importlib.metadata
import os
import re
import shlex
import struct
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from project import package_source

sys.path.append(str(package_source.ROOT / "scripts"))
import gpu_machine

NEEDED = {
    "vllm/__init__.py": b"",
    "vllm/vllm_flash_attn/__init__.py": b"",
    "vllm/third_party/pynvml.py": b"",
    "vllm-0.26.0.dist-info/METADATA": b"Name: vllm\n",
}
NOT_NEEDED = (
    "vllm/vllm-rs",
    "vllm/_flashmla_C.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    "vllm/third_party/deep_gemm/include/cute.hpp",
    "vllm-0.26.0.dist-info/RECORD",
)
PTX, MACHINE = 1, 2
# What the containers of an extension hold: of what kind, for which GPU.
CONTAINERS = (
    [(MACHINE, 80), (MACHINE, 90), (MACHINE, 100), (PTX, 90)],
    [(MACHINE, 75), (PTX, 75), (PTX, 80)],
    [(MACHINE, 80), (MACHINE, 86)],
)


def code(container: int, kind: int, gpu: int) -> bytes:
    """Code as nvcc writes it: a header that names kind and GPU, and bytes that tell them apart."""
    header = struct.pack("<HHIQIIHHI", kind, 0x101, 64, 48, 0, 0, 0, 0, gpu)
    return header.ljust(64, b"\1") + bytes([1 + container, kind, gpu]) * 16


def extension(containers: tuple[list[tuple[int, int]], ...] = CONTAINERS) -> bytes:
    """A compiled extension: text, a section of GPU code with gaps, and the table of sections."""
    fat = b""
    for number, each in enumerate(containers):
        held = b"".join(code(number, kind, gpu) for kind, gpu in each)
        fat += struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(held)) + held + bytes(8)
    names = b"\0.text\0.nv_fatbin\0.shstrtab\0"
    text = b"\x7fcode of the CPU" * 4
    parts, at = [(0, 0, b"")], 64
    for name, content in ((b".text", text), (b".nv_fatbin", fat), (b".shstrtab", names)):
        parts.append((names.index(name), at, content))
        at += len(content)
    header = b"\x7fELF\x02\x01\x01".ljust(40, b"\0") + struct.pack("<Q", at)
    header = header.ljust(58, b"\0") + struct.pack("<HHH", 64, len(parts), 3)
    table = (struct.pack("<IIQQQQ", n, 1, 0, 0, s, len(c)).ljust(64, b"\0") for n, s, c in parts)
    return header + b"".join(content for _, _, content in parts) + b"".join(table)


@pytest.mark.parametrize(
    ("capability", "kept"),
    [
        ("9.0", {(0, MACHINE, 90)}),
        ("8.9", {(0, MACHINE, 80), (2, MACHINE, 86)}),
        ("7.5", {(1, MACHINE, 75)}),
    ],
)
def test_an_extension_keeps_the_code_that_this_gpu_runs(
    capability: str, kept: set[tuple[int, int, int]]
) -> None:
    expected = whole = extension()
    pruned = gpu_machine.without_others(whole, capability)
    held = {(n, *each) for n, container in enumerate(CONTAINERS) for each in container}
    for other in held - kept:
        full = code(*other)
        expected = expected.replace(full, full[:64] + bytes(len(full) - 64))
    assert pruned == expected != whole
    assert gpu_machine.without_others(pruned, capability) == pruned


def test_any_other_file_is_packed_as_it_is() -> None:
    for content in (b"", b"import torch\n", b"\x7fELF\x02\x01\x01", extension()[:200]):
        assert gpu_machine.without_others(content, "9.0") is content


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "vllm-0.26.0-cp38-abi3-manylinux_2_28_x86_64.whl", "w") as made:
        for name, content in {**NEEDED, **dict.fromkeys(NOT_NEEDED, b"large")}.items():
            made.writestr(name, content)
        made.writestr("vllm/_C.abi3.so", extension())
    with zipfile.ZipFile(folder / "numbers-1.0-py3-none-any.whl", "w") as made:
        made.writestr("numbers-1.0.data/purelib/numbers/__init__.py", "one = 1\n")
        made.writestr("numbers-1.0.data/scripts/count", "no module")
    return folder


def test_one_archive_has_this_repository_and_the_wheels(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = gpu_machine._git
    few = ("--", "scripts", "loader/report.py", "src/tensor_dedup/loader")
    monkeypatch.setattr(gpu_machine, "_git", lambda *a: listed(*a, *few[: 4 * ("-coz" in a)]))
    file = tmp_path / "test-gpu.tar.xz"
    version = "{}.{}".format(*sys.version_info)
    assert "2 wheels" in gpu_machine.pack(file, wheels, version, "9.0")
    with tarfile.open(file) as archive:
        archive.extractall(tmp_path, filter="data")
    top, place = tmp_path / gpu_machine.TOP, tmp_path / gpu_machine.PLACE
    site = place / "site"
    found = {str(f.relative_to(site)): f.read_bytes() for f in site.rglob("*") if f.is_file()}
    assert found == {
        **NEEDED,
        "vllm/_C.abi3.so": gpu_machine.without_others(extension(), "9.0"),
        # Every layer of vLLM imports flash attention, which then has to be there.
        **dict.fromkeys(gpu_machine.EMPTY, b""),
        "numbers/__init__.py": b"one = 1\n",
    }
    assert (top / "src/tensor_dedup/loader/report.py").resolve() == top / "loader/report.py"
    started = [str(top / "scripts/test-gpu"), "--nothing"]
    done = subprocess.run(started, check=False, text=True, capture_output=True)
    assert (done.returncode, "see its first lines" in done.stderr) == (2, True)


def test_an_archive_for_another_python_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / gpu_machine.FACTS).write_text('{"python": "2.7", "capability": "9.0"}')
    with pytest.raises(SystemExit, match=r"gather again for it: --gather FILE \d"):
        gpu_machine.check(tmp_path)


def test_plug_ins_are_found_as_if_this_were_installed(tmp_path: Path) -> None:
    assert gpu_machine.register(tmp_path).startswith("tensor-dedup ")
    [found] = importlib.metadata.distributions(path=[str(tmp_path)])
    plug_ins = {e.group: e.load() for e in found.entry_points if e.group.startswith("vllm.")}
    assert set(plug_ins) == {"vllm.general_plugins", "vllm.platform_plugins"}
    assert all(map(callable, plug_ins.values()))


TEST_GPU = package_source.ROOT / "scripts" / "test-gpu"
FILES = {f"tests/gpu/{each.name}" for each in (package_source.ROOT / "tests/gpu").glob("test_*.py")}


@pytest.fixture
def noted(tmp_path: Path) -> dict[str, str]:
    """An environment in which Python only notes what it is to run, each command as a line."""
    stand_in = tmp_path / "python"
    stand_in.write_text(
        "#!/bin/sh\n"
        '[ "$1" != -c ] || exit 0\n'  # it has torch
        f'echo "$*" >>{shlex.quote(str(tmp_path))}/noted; echo one line\n'
        'case $* in *gigabyte*) echo "== 3 skipped, 9 deselected in 0.02s ==" ;; esac\n'
    )
    stand_in.chmod(0o755)
    return {**os.environ, "TENSOR_DEDUP_PYTHON": str(stand_in), "OUT": str(tmp_path)}


def rehearse(environment: dict[str, str], *options: str) -> str:
    """What the command logs; it passes unless a step has failed or was not run."""
    command = [str(TEST_GPU), "--rehearse", *options]
    done = subprocess.run(command, check=False, text=True, capture_output=True, env=environment)
    name = "more-test-gpu.log" if "--more" in options else "test-gpu.log"
    log = (Path(environment["OUT"]) / name).read_text()
    assert (done.returncode == 0) == ("not run" not in log), done.stdout
    return log


def test_every_test_of_a_gpu_is_in_a_step_and_each_line_names_its_step(
    noted: dict[str, str], tmp_path: Path
) -> None:
    log = rehearse(noted) + rehearse(noted, "--more")
    ran = [line.split() for line in (tmp_path / "noted").read_text().splitlines()]
    assert {word for words in ran for word in words if word.startswith("tests/")} == FILES
    bench = (package_source.ROOT / "scripts/bench/cuda.py").read_text()
    parts = re.findall(r'"(\w+)"', bench.split("\nPARTS = ")[1].splitlines()[0])
    assert {each[2] for each in ran if each[0].endswith("cuda.py")} == set(parts)
    assert "vllm processes | one line" in log
    results = log.split("=== what ran")[1]
    assert "status 0 after" in results
    [skipped] = [line for line in results.splitlines() if "all skipped" in line]
    assert re.fullmatch(r"status 0, all skipped after \d+ s: gigabyte", skipped)


def test_a_python_without_torch_is_named_once(noted: dict[str, str], tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    bare = str(tmp_path / "bare/bin/python")
    for option, said in (("--rehearse", "scripts/setup --dev"), ("--more", "names one")):
        done = subprocess.run(
            [str(TEST_GPU), option], check=False, text=True, capture_output=True,
            env={**noted, "TENSOR_DEDUP_PYTHON": bare},
        )  # fmt: skip
        [line] = done.stdout.splitlines()
        assert re.match(f"this needs a Python with torch.*, which {bare} is not", line)
        assert said in line
        assert done.returncode == 1


def test_what_has_no_time_left_is_not_run_and_that_is_said(
    noted: dict[str, str], tmp_path: Path
) -> None:
    log = rehearse(noted, "--seconds", "0")
    assert not (tmp_path / "noted").exists()
    assert "not run, no time left: sharing alone" in log
    assert "not run, no time left: bench handles" in log


def test_engines_and_copies_of_the_tests_on_a_gpu_over_the_fake_driver() -> None:
    """A few of them, to see that they run; `scripts/test-gpu --rehearse` runs them all."""
    chosen = ["-m", "gpu", "-k", "engines_sleep or fenced or stream or page_locked"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen,
         *sorted(FILES)],
        check=False, text=True, capture_output=True, cwd=package_source.ROOT,
        env={**os.environ, "TENSOR_DEDUP_FAKE_GPU": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "failed" not in done.stdout
    assert int(done.stdout.rsplit(" passed", 1)[0].split()[-1]) >= 6, done.stdout
