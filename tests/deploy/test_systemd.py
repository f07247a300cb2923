"""The systemd units are valid, and start what the command line understands."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from files.container_files import DEPLOY
from tensor_dedup.cli.serve import command as serve

USER = DEPLOY / "systemd" / "user" / "tensor-dedup.service"
SYSTEM = DEPLOY / "systemd" / "system" / "tensor-dedup@.service"
BOTH = pytest.mark.parametrize("unit", [USER, SYSTEM], ids=["user", "system"])
VALUES = {"%h": "/home/alice", "%t": "/run", "%i": "alice", "${METRICS}": "9464"}


def settings(unit: Path) -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE))


def verified(text: str, unit: Path, folder: Path) -> str:
    """What `systemd-analyze verify` says of a unit with an executable that exists."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is missing; `apt-get install systemd` brings it")
    text = re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", text, flags=re.MULTILINE)
    (folder / unit.name).write_text(text)
    mode = ["--user"] if unit == USER else []
    done = subprocess.run(
        [analyze, *mode, "verify", "--man=no", str(folder / unit.name)],
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(folder), "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr + ("" if done.returncode == 0 else f"status {done.returncode}")


@BOTH
def test_systemd_understands_all_of_it(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text()
    assert verified(text, unit, tmp_path) == ""
    wrong = text.replace("WatchdogSec=", "WatchdogSeconds=")
    assert "WatchdogSeconds" in verified(wrong, unit, tmp_path)


@BOTH
def test_the_manager_understands_its_options_and_has_room(unit: Path) -> None:
    given = settings(unit)
    line = given["ExecStart"]
    for name, value in VALUES.items():
        line = line.replace(name, value)
    program, verb, *options = shlex.split(line)
    assert (Path(program).name, verb) == ("tensor-dedup", "serve")
    parsed = serve.make_context("serve", options).params
    folder = Path("/run", given["RuntimeDirectory"].replace("%i", "alice"))
    assert Path(parsed["socket"]) == folder / "manager.sock"
    assert given["MemoryMax"] == "36G"
    assert parsed["budget"] < 36 << 30
    assert given["RuntimeDirectoryMode"] == "0700"
    assert given["Type"] == "notify"
