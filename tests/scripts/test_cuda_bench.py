"""The benchmark of device memory: what it makes of figures, and that its name hides no package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import host_half
from bench.stats import verdict
from project import package_source

BENCH = package_source.ROOT / "scripts" / "bench"
# What a command of the folder finds by that name once it has set its path.
ASK = """
import importlib.util, runpy, sys
sys.path[0], sys.argv = sys.argv[1], [sys.argv[2], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit:
    pass
found = importlib.util.find_spec("cuda")
print(found and list(found.submodule_search_locations or [found.origin]))
"""
COMMANDS = sorted(path.name for path in BENCH.glob("*.py") if os.access(path, os.X_OK))


def python(*arguments: str, path: Path | None = None) -> str:
    places = os.pathsep.join(map(str, filter(None, (path, package_source.SOURCE))))
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": places},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def found_by(command: str, path: Path | None = None) -> str:
    return python("-c", ASK, str(BENCH), str(BENCH / command), path=path).splitlines()[-1]


def test_who_asks_for_the_package_is_given_it(tmp_path: Path) -> None:
    package = tmp_path / "cuda" / "bindings"  # no __init__.py above it, as in NVIDIA's wheels
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("name = 'the package'\n")
    assert str(tmp_path / "cuda") in found_by("store.py", tmp_path)


def test_where_there_is_no_package_none_is_found() -> None:
    there = python("-c", "import importlib.util as u; print(u.find_spec('cuda'))")
    found = found_by("store.py")
    assert str(BENCH) not in found
    assert (found == "None") == (there == "None")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_takes_its_folder_off_the_path(command: str) -> None:
    text = (BENCH / command).read_text()
    assert "sys.path[0] = str(Path(__file__).resolve().parents[1])" in text
    assert text.index("sys.path[0]") < text.index("\nimport", text.index("sys.path[0]"))


def test_it_is_the_benchmarks_command() -> None:
    assert "--rehearse" in python(str(BENCH / "cuda.py"), "--help")


@pytest.mark.parametrize(("ours", "said"), [(3.0, "met"), (3.5, "met"), (4.0, "missed")])
def test_a_share_of_reading_and_hashing_is_taken_round_by_round(ours: float, said: str) -> None:
    rounds = [1.0, 2.0, 4.0, 1.0, 3.0, 1.0, 2.0]  # a machine that is busy now and then
    seconds = {
        "read": rounds,
        "hash": [2 * each for each in rounds],
        "ours": [ours * each for each in rounds],
    }
    found = host_half.share(seconds, "ours")
    assert found.low == found.high == pytest.approx(3 / ours)
    assert verdict(found, least=host_half.LEAST) == said
    assert host_half.share(seconds, "ours", 2).median == pytest.approx(5 / ours)


def test_the_hosts_half_hashes_all_bytes_once_and_parts_with_digests_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_half, "SECONDS", 0.0)
    text = "\n".join(host_half.host(tmp_path, 16))
    assert f"16 MiB in the page cache, {host_half.ROUNDS[0]} rounds" in text
    assert "say nothing about a GPU" in text
    assert all(f"\n| {title} | " in text for title in host_half.TITLES.values())
    # The first part begins at a leaf of the tensor: of it, only what is in the leaf where it ends.
    twice = 16 * host_half.MIB - 10 * host_half.MIB
    (line,) = [each for each in text.splitlines() if each.startswith("* ") and " / hash)" in each]
    assert line.startswith(f"* {host_half.TITLES['twice']}, of ")
    assert f"{1 + twice / (16 * host_half.MIB):.2f} / hash" in line
    assert f"* {host_half.TITLES['woken']}, of reading alone: " in text
    assert not list(tmp_path.iterdir())
