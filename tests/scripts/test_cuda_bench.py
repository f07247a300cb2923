"""The benchmark of device memory bears the name of NVIDIA's package, and hides it from nobody."""

import os
import subprocess
import sys
from pathlib import Path

import house

BENCH = house.ROOT / "scripts" / "bench"
ASK = """
import importlib.util, sys
sys.path.insert(0, sys.argv[1])
before = sys.path[:]
try:
    from cuda.bindings import name
except ModuleNotFoundError as error:
    name = f"no module {error.name}"
assert sys.path == before
print(name)
"""


def python(*arguments: str, path: Path | None = None) -> str:
    places = os.pathsep.join(map(str, filter(None, (path, house.SOURCE))))
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": places},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_who_asks_for_the_package_is_given_it(tmp_path: Path) -> None:
    package = tmp_path / "cuda" / "bindings"  # no __init__.py above it, as in NVIDIA's wheels
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("name = 'the package'\n")
    assert python("-c", ASK, str(BENCH), path=tmp_path) == "the package"


def test_where_there_is_no_package_none_is_found() -> None:
    absent = python("-c", "import importlib.util as u; print(u.find_spec('cuda'))") == "None"
    expected = "no module cuda" if absent else None
    found = python("-c", ASK, str(BENCH))
    assert expected in (None, found)


def test_it_is_the_benchmarks_command() -> None:
    assert "--rehearse" in python(str(BENCH / "cuda.py"), "--help", path=BENCH)
