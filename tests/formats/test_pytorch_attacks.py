"""Pickles that would run something: nothing runs, and what they name is named."""

import builtins
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_files import file_of, parse
from refusals import refused
from tensor_dedup.formats.errors import (
    PytorchFault,
)
from tensor_dedup.formats.pytorch.reader import read_header

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")


class Runs:
    """Pickled, this is a call."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.call


class Mine:
    """What somebody else's training script would have pickled."""


def attacks(marker: Path) -> Iterator[tuple[str, object]]:
    """Pickles that make a file when they are unpickled."""
    code = f"open({str(marker)!r}, 'w').close()"
    yield "os.system", Runs(os.system, f"touch {marker}")
    yield "os.mkdir", Runs(os.mkdir, str(marker))
    yield "builtins.exec", Runs(exec, code)
    yield "builtins.eval", Runs(eval, code)
    yield "builtins.open", Runs(open, str(marker), "w")
    yield "builtins.getattr", Runs(getattr, Runs(os.system, f"touch {marker}"), "x")
    yield "subprocess.run", Runs(subprocess.run, ["touch", str(marker)])
    yield "torch.save", Runs(torch.save, torch.zeros(1), str(marker))
    yield "torch.hub.load", Runs(torch.hub.load, "owner/repository", "model")
    yield "importlib.import_module", Runs(__import__, "antigravity")
    yield "functools.reduce", Runs(map, os.mkdir, [str(marker)])
    yield "a class of the user", Runs(Mine)


def globals_of_attacks() -> list[str]:
    return [
        "os.system", "posix.system", "nt.system", "subprocess.Popen", "builtins.exec",
        "builtins.eval", "builtins.getattr", "builtins.__import__", "__builtin__.eval",
        "torch.hub.load", "torch.load", "torch.serialization.load", "torch._utils._rebuild_qtensor",
        "torch.utils.collect_env.run", "torch.utils.data.datapipes.utils.decoder.basichandlers",
        "torch.jit.load", "numpy.load", "numpy.testing._private.utils.runstring", "runpy.run_path",
        "code.InteractiveInterpreter", "pickle.loads", "_pickle.loads", "types.CodeType",
        "operator.attrgetter", "functools.partial", "webbrowser.open", "socket.create_connection",
        "torch._dynamo.guards.GuardBuilder.get", "collections.OrderedDict.__init__",
        "torch.Tensor.__class__", "torch.storage._load_from_bytes", "torch.FloatStorage.from_file",
        "torch.Storage", "torch.nn.Module", "copyreg._reconstructor", "builtins.object",
    ]  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_that_is_pickled_runs(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "marker"
    for number, (what, attack) in enumerate(attacks(marker)):
        for place, held in enumerate((attack, {"w": attack}, [torch.ones(1), (attack,)])):
            path = tmp_path / f"{number}-{place}.pt"
            torch.save(held, path, pickle_protocol=protocol)
            with refused(PytorchFault.FORBIDDEN_GLOBAL, match="nothing was run") as caught:
                read_header(path)
            assert caught.value.facts["name"], what
            assert not marker.exists(), what


def test_the_attacks_are_real(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    pickle.loads(pickle.dumps(Runs(os.system, f"touch {marker}"), 2))
    assert marker.exists()


@pytest.mark.parametrize("name", globals_of_attacks())
def test_no_other_global_is_known(name: str) -> None:
    module, _, last = name.rpartition(".")
    texts = [module.encode(), last.encode()]
    counted = b"".join(b"\x8c" + bytes([len(text)]) + text for text in texts)
    for body in (b"c" + b"\n".join(texts) + b"\n", counted + b"\x93"):
        with refused(PytorchFault.FORBIDDEN_GLOBAL) as caught:
            parse(file_of(b"\x80\x04" + body + b"."))
        assert caught.value.facts["name"] == name


def test_reading_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(torch.nn.Linear(2, 3).state_dict(), tmp_path / "net.pt")
    code = (
        "import sys, pickle\n"
        "from tensor_dedup.formats.pytorch.reader import read_header\n"
        "before = set(sys.modules)\n"
        f"print(len(read_header({str(tmp_path / 'net.pt')!r}).tensors))\n"
        "print(*sorted(set(sys.modules) - before), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something is unpickled or imported")

    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    monkeypatch.setattr(builtins, "__import__", refuse)
    read_header(tmp_path / "net.pt")
