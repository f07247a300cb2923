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

from files.pytorch_files import AMBIGUOUS, bytes_of, file_of, flat, parse, seen_by_us
from files.refusals import refused
from tensor_dedup.formats.errors import PytorchError, PytorchFault
from tensor_dedup.formats.pytorch.machine import TENSOR_ATTRIBUTES, wrong_attribute
from tensor_dedup.formats.pytorch.reader import read_header
from tensor_dedup.formats.pytorch.values import PlainDict

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


@pytest.mark.parametrize(("what", "file"), AMBIGUOUS, ids=[what for what, _ in AMBIGUOUS])
def test_what_torch_reads_otherwise_is_refused(tmp_path: Path, what: str, file: bytes) -> None:
    (tmp_path / "plain.pt").write_bytes(file_of())
    plain = seen_by_us(tmp_path / "plain.pt", read_header(tmp_path / "plain.pt"))["w"]
    (tmp_path / "w.pt").write_bytes(file)
    theirs = flat(torch.load(tmp_path / "w.pt", weights_only=True))
    # That torch takes it, and in its own way, is why it is refused.
    seen = theirs.get("w")
    assert (
        seen is None
        or (seen.dtype, seen.device) != (plain.dtype, plain.device)
        or bytes_of(seen) != bytes_of(plain)
    )
    with pytest.raises(PytorchError) as caught:
        parse(file)
    assert caught.value.kind in (
        PytorchFault.FORBIDDEN_CALL,
        PytorchFault.STORAGE_TYPE,
        PytorchFault.STORAGE_ID,
    )


def test_no_attribute_of_a_tensor_that_torch_sets_is_taken() -> None:
    """Whatever is set by a function and not merely kept."""
    found = {
        name
        for kind in torch.nn.Parameter.__mro__
        for name, value in vars(kind).items()
        if hasattr(type(value), "__set__")
    }
    assert {"data", "grad", "requires_grad", "real", "_backward_hooks"} <= found
    for name in found:
        assert wrong_attribute(PlainDict([name, None]), TENSOR_ATTRIBUTES), name
    assert wrong_attribute(PlainDict(["note", None]), TENSOR_ATTRIBUTES) is None


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
        raise AssertionError("something is unpickled")

    real = builtins.__import__

    def loaded(name: str, *rest: Any) -> Any:
        assert name in sys.modules, f"{name} is imported"
        return real(name, *rest)

    with monkeypatch.context() as refusing:
        refusing.setattr(pickle, "loads", refuse)
        refusing.setattr(pickle, "Unpickler", refuse)
        refusing.setattr(builtins, "__import__", loaded)
        read_header(tmp_path / "net.pt")
