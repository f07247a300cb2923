"""Dockerfiles as data, and what a build does with them, without containers.

A stage is a folder. Its absolute paths are put below that folder, its `python3` is a virtual
environment, and its uid is that of whoever runs the test.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from project import package_source

DEPLOY: Final = package_source.ROOT / "docs" / "deploy"
# What the steps read and write outside of a virtual environment.
_PATHS: Final = re.compile(r"(?<![\w.])/(src|wheels|run/tensor-dedup|home/engine)\b")
_VARIABLE: Final = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a Dockerfile: `RUN`, and all that follows, on one line."""

    verb: str
    text: str


def instructions(dockerfile: Path) -> list[Instruction]:
    """Read a Dockerfile: comments go, and lines that end in a backslash go on."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [Instruction(*line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def ignored(path: str, patterns: list[str]) -> bool:
    """Whether a path is outside of the build context: the last pattern that fits decides."""
    parts = path.split("/")
    prefixes = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    outside = False
    for pattern in patterns:
        bare = pattern.removeprefix("!")
        # `**/` stands for any number of folders, none included; a folder's pattern fits all in it.
        names = parts if bare.startswith("**/") else prefixes
        if any(fnmatchcase(name, bare.removeprefix("**/")) for name in names):
            outside = not pattern.startswith("!")
    return outside


def context(root: Path) -> Iterator[str]:
    """The files of the build context, as `.dockerignore` leaves them."""
    lines = (root / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    # Folders that are ignored as a whole are not entered: an environment has 100,000 files.
    tops = [top.name for top in root.iterdir() if not ignored(top.name, patterns)]
    for top in sorted(tops):
        if not (root / top).is_dir():
            yield top
            continue
        for folder, inner, files in os.walk(root / top):
            links = [name for name in inner if (Path(folder) / name).is_symlink()]
            for name in (*files, *links):
                path = str((Path(folder) / name).relative_to(root))
                if not ignored(path, patterns):
                    yield path


@dataclass(slots=True)
class Stage:
    """A stage of a build. `base` is the image it is from."""

    root: Path
    base: str
    python: Path
    environment: dict[str, str]
    arguments: dict[str, str] = field(default_factory=dict)
    user: str = ""
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    def inside(self, text: str) -> str:
        """Put the paths in a text below this stage's folder."""
        return _PATHS.sub(lambda match: f"{self.root}/{match[1]}", text)

    def variables(self) -> dict[str, str]:
        """The environment of a process in it: nothing of the test's own Python."""
        path = f"{self.python.parent}:{os.environ['PATH']}"
        own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TENSOR_DEDUP"))}
        return own | self.environment | {"PATH": path}

    def run(self, command: str | list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command as the build or the container's runtime would; a list without a shell."""
        argv = ["/bin/sh", "-ec", command] if isinstance(command, str) else list(command)
        found = shutil.which(argv[0], path=self.variables()["PATH"])
        assert found, argv
        return subprocess.run(
            [found, *argv[1:]],
            env=self.variables() | self.arguments,
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
        )


def build(dockerfile: Path, folder: Path, arguments: Mapping[str, str], *, offline: bool) -> Stage:
    """Do what `docker build` does, and return the last stage.

    `offline`: pip asks no index, so that what is installed is our wheel alone; what it depends on
    is then taken from the environment of the test.
    """
    defaults: dict[str, str] = {}  # of the arguments before the first stage
    stages: dict[str, Stage] = {}
    stage: Stage | None = None

    def filled(text: str) -> str:
        known = defaults | (stage.arguments if stage else {})
        return _VARIABLE.sub(lambda match: known[match[1]], text)

    for step in instructions(dockerfile):
        if step.verb == "ARG":
            name, _, value = step.text.partition("=")
            (stage.arguments if stage else defaults)[name] = arguments.get(name, value)
        elif step.verb == "FROM":
            base, _, name = filled(step.text).partition(" AS ")
            root = folder / (name or "last")
            root.mkdir()
            own = bool(name) and offline  # the wheel is built with the setuptools of this test
            stage = Stage(root, base, *_python(root, own=own, offline=offline))
            stages[name or "last"] = stage
        else:
            assert stage is not None, step
            _do(step, stage, stages, filled(step.text) if step.verb != "RUN" else step.text)
    assert stage is not None
    if offline:
        site = next(stage.root.glob("venv/lib/python*/site-packages"))
        names = [path for path in sys.path if path.endswith("site-packages")]
        (site / "dependencies.pth").write_text("\n".join(names) + "\n")
    return stage


def _python(root: Path, *, own: bool, offline: bool) -> tuple[Path, dict[str, str]]:
    environment = {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if offline:
        # "0" turns the isolation off: the variable's name says "no", pip's value means "yes".
        environment |= {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    if own:
        return Path(sys.executable), environment
    subprocess.run([sys.executable, "-m", "venv", str(root / "venv")], check=True)
    return root / "venv" / "bin" / "python3", environment


def _do(step: Instruction, stage: Stage, stages: Mapping[str, Stage], text: str) -> None:
    match step.verb:
        case "COPY":
            assert text == ". /src", text
            _copy_context(stage.root / "src")
        case "RUN":
            _run(text, stage, stages)
        case "ENV":
            for each in shlex.split(text):
                name, _, value = each.partition("=")
                stage.environment[name] = stage.inside(value)
        case "USER":
            stage.user = text
        case "ENTRYPOINT":
            stage.entrypoint = json.loads(text)
        case "CMD":
            stage.command = json.loads(text)
        case "HEALTHCHECK":
            stage.health = json.loads(text.partition(" CMD ")[2])
        case _:
            raise AssertionError(f"{step.verb} is not played here")


def _copy_context(target: Path) -> None:
    for name in context(package_source.ROOT):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(package_source.ROOT / name, target / name, follow_symlinks=False)


def _run(text: str, stage: Stage, stages: Mapping[str, Stage]) -> None:
    while text.startswith("--mount="):
        mount, text = text.split(None, 1)
        told = dict(part.split("=", 1) for part in mount[len("--mount=") :].split(","))
        assert told["type"] == "bind", told
        source = Path(stages[told["from"]].inside(told["source"]))
        Path(stage.inside(told["target"])).symlink_to(source)
    done = stage.run(stage.inside(_as_offline(text, stage)))
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


def _as_offline(text: str, stage: Stage) -> str:
    """Without an index only the wheel can be installed: what is named beside it is dropped."""
    if "PIP_NO_INDEX" not in stage.environment:
        return text
    return re.sub(r' "cuda-bindings\S+" nvidia-ml-py', "", text)
