"""What the command line connects to: nothing, unless a remote elsewhere is named."""

import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from processes import fresh
from store_runs.stores import safetensors, u8, write
from tensor_dedup.cli import main
from tensor_dedup.training import CheckpointStore

# What an interpreter asks before a name is looked up, or a connection made.
ASKED = {"socket.getaddrinfo", "socket.gethostbyname", "socket.connect", "socket.sendto"}
# Their requests are made outside Python, or go through `socket`: they are not even imported.
CLIENTS = ("obstore", "oras", "requests", "urllib3", "httpx", "aiohttp", "huggingface_hub")


class Asked:
    """What this process asks of the network from now on, until it ends."""

    def __init__(self) -> None:
        self.found: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, values: tuple[Any, ...]) -> None:
        # The address of a socket of the file system, as a memory manager has, is a text.
        if event in ASKED and not isinstance(values[-1], str | bytes):
            self.found.append(f"{event} {values}")


def every_verb(root: str) -> None:
    """Run the verbs that need no manager and no framework, and a training."""
    folder = Path(root)
    store, other = str(folder / "store"), str(folder / "other")
    base, tune = str(folder / "base"), str(folder / "tune")
    remote = (folder / "remote").as_uri()
    with CheckpointStore(store, "run") as run:
        for step in range(2):
            run.save({"weight": np.full(4096, step, np.float32)}, step)
    for arguments in (
        ("import", base, "--name", "base"),
        ("import", tune, "--name", "tune", "--compress", "auto"),
        ("analyze", base, tune),
        ("analyze", "store://base", "store://tune"),
        ("diff", "store://base", "store://tune"),
        ("list",),
        ("show", "base"),
        ("du",),
        ("stats",),
        ("verify", "--full"),
        ("runs", "list"),
        ("push", "base", remote),
        ("push", "run", remote),
        ("remote", "list", remote),
        ("pull", remote, "base", "--store", other),
        ("export", "base", str(folder / "out")),
        ("doctor", "--quick"),
        ("delete", "tune", "--yes"),
        ("gc", "--yes"),
    ):
        remote_only = arguments[0] in ("analyze", "remote", "doctor") or "--store" in arguments
        options = [] if remote_only else ["--store", store]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TENSOR_DEDUP_STORE", store)
            done = CliRunner().invoke(main, [*arguments, *options])
        assert done.exit_code == 0, (arguments, done.output)


def used(root: str) -> tuple[list[str], list[str], list[str]]:
    """What the verbs connected to and imported, and how a connection is seen."""
    asked = Asked()
    every_verb(root)
    verbs = asked.found[:]
    imported = [name for name in CLIENTS if name in sys.modules]
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
    return verbs, imported, asked.found[len(verbs) :]


def test_nothing_is_sent_where_no_remote_elsewhere_is_named(tmp_path: Path) -> None:
    for name, own in (("base", 1), ("tune", 2)):
        weights = u8(shared=bytes(1 << 16), own=bytes([own]) * 4096)
        write(tmp_path / name, {"model.safetensors": safetensors(weights)})
    verbs, imported, seen = fresh.call(used, str(tmp_path))
    assert (verbs, imported) == ([], [])
    assert any("socket.connect" in each for each in seen)  # so it would have been seen above
    assert (tmp_path / "out" / "model.safetensors").is_file()
