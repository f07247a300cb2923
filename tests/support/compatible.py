"""Checkpoints, runs and hints that one version of the code writes and another one reads.

Import it from any test as `import compatible`. It uses names only that users use, so it runs with
older code as well: with `Code(folder)`, in processes of their own.
"""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import nn

from tensor_dedup.training import CheckpointStore

SUPPORT = Path(__file__).parent
RUN, PLAIN = "runs/training", "plain"
# In the order in which they are saved: the training went back to 20, and saved 25 last.
STEPS = (0, 10, 20, 30, 25)
PINNED = 10
FIRST_SAVED_S = 1_700_000_000
GONE = "gone"
DATA = SUPPORT.parent / "compatibility" / "data"
_REPORTS = "TENSOR_DEDUP_REPORT_DIR"
Array = NDArray[Any]


# In an environment of the working tree that is the script, whatever module it calls by then.
_FIND_MAIN = """
from importlib.metadata import entry_points
[found] = entry_points(group="console_scripts", name="tensor-dedup")
main = found.load()
"""
_FIND_OLD_MAIN = "from tensor_dedup.cli import main"
_VERBS = """
import contextlib, io, json, sys
answers = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            main([*arguments, "--json"])
        except SystemExit as end:
            assert not end.code, (arguments, said.getvalue())
    answers.append(json.loads(said.getvalue()))
print(json.dumps(answers))
"""


@dataclass(frozen=True)
class Code:
    """A version of the code: that of the working tree, or that in a checkout's `src`."""

    source: Path | None = None

    @property
    def _find_main(self) -> str:
        # The environment's script may by now call what older code does not have.
        return _FIND_MAIN if self.source is None else _FIND_OLD_MAIN

    @property
    def command(self) -> list[str]:
        """Begins a command line of `tensor-dedup`."""
        return [sys.executable, "-c", f"{self._find_main}\nmain()"]

    def environ(self, **more: str) -> dict[str, str]:
        """What its processes get, with this module among what they can import."""
        known = os.environ.get("PYTHONPATH", "") if self.source is None else str(self.source)
        paths = [path for path in (known, str(SUPPORT)) if path]
        # Engines there do not report to this process, as those in it do.
        kept = {name: each for name, each in os.environ.items() if name != _REPORTS}
        return {**kept, "PYTHONPATH": os.pathsep.join(paths), **more}

    def verb(self, *arguments: str | Path, **environ: str) -> Any:
        """What a verb prints with --json. It must end well."""
        [answer] = self.verbs([arguments], **environ)
        return answer

    def verbs(self, lines: Sequence[Sequence[str | Path]], **environ: str) -> list[Any]:
        """What verbs print with --json, one after the other, in one process."""
        order = json.dumps([[str(each) for each in line] for line in lines])
        answers: list[Any] = self.call(self._find_main + _VERBS, order, **environ)
        return answers

    def call(self, program: str, *arguments: str | Path, **environ: str) -> Any:
        """What a Python program prints last, as JSON."""
        done = subprocess.run(
            [sys.executable, "-c", program, *map(str, arguments)],
            env=self.environ(**environ),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr[-6000:]
        return json.loads(done.stdout.splitlines()[-1])


# --- checkpoints


def words(seed: int, count: int) -> Array:
    """Weights in bf16 as words, few different ones: what git is to keep packs well."""
    found: Array = (0x3C00 + 0x10 * np.random.default_rng(seed).integers(0, 4, count)).astype("<u2")
    return found


def moved(data: Array, seed: int) -> Array:
    """The same words, of which some went up by one."""
    found: Array = data + (np.random.default_rng(seed).random(len(data)) < 0.1).astype("<u2")
    return found


def write_checkpoints(root: Path) -> dict[str, Path]:
    """Folders and files that have tensors in common, by the name under which to import them."""
    large, other = words(1, 36 << 10), words(2, 40 << 10)
    small = {f"norm.{number}": words(3 + number, 70) for number in range(3)}
    write_folder(
        root / "base", {1: {"embed": large, **small}, 2: {"head": other, "bias": words(9, 33)}}
    )
    write_folder(root / "twin", {1: {"embed": large, "head": words(11, 34 << 10), **small}})
    write_folder(root / "gone", {1: {"embed": large, "head": words(12, 34 << 10)}})
    # From 1 MiB on a file that is new as a whole is kept as it came, and from 2 MiB on has leaves.
    write_folder(root / "whole", {1: {"rows": np.tile(words(13, 2048), 600), **small}})
    write_folder(root / "tune", {1: {"embed": large, "head": moved(other, 4), **small}})
    pickled = {"embed": torch.from_numpy(large.copy()).view(torch.bfloat16), "step": torch.ones(3)}
    torch.save(pickled, root / "pickled.bin")
    write_gguf(root / "tiny.gguf", large)
    folders = {name: root / name for name in ("twin", "tune", "whole", GONE)}
    return {
        "org/base": root / "base",
        **folders,
        "pickled": root / "pickled.bin",
        "tiny": root / "tiny.gguf",
    }


def write_folder(folder: Path, shards: Mapping[int, Mapping[str, Array]]) -> None:
    """A folder of safetensors with an index where there are several, and small files."""
    folder.mkdir(parents=True)
    where = {}
    for number, tensors in shards.items():
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: data.view(np.int16) for name, data in tensors.items()}, folder / file)
        where.update(dict.fromkeys(tensors, file))
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "toy"}')
    (folder / "sub").mkdir()
    (folder / "sub" / "empty.txt").write_bytes(b"")


def write_gguf(path: Path, shared: Array) -> None:
    """A GGUF file; its floats are the bytes that the safetensors have as words."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", shared.view(np.float16).reshape(128, -1))
    writer.add_tensor("output_norm.weight", np.arange(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def import_all(code: Code, store: Path, checkpoints: Mapping[str, Path]) -> None:
    """Import them; `tune` as what differs from the base. Leaves something in the trash, too."""
    lines: list[list[str | Path]] = []
    for name, path in checkpoints.items():
        options = ("--compress", "auto", "--base", "org/base") if name == "tune" else ()
        lines.append(["import", path, "--name", name, *options])
    lines += [["delete", GONE, "--yes"], ["gc", "--yes"]]
    code.verbs([[*line, "--store", store] for line in lines])


# --- runs


class Net(nn.Module):
    """A frozen part, a table of which each step changes a row, and a head that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(160, 128)
        self.table = nn.Embedding(128, 160)
        self.head = nn.Linear(128, 4)
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                dice = np.random.default_rng(seed)
                values = dice.integers(-8, 8, tuple(parameter.shape)) / 64
                parameter.copy_(torch.from_numpy(values))
        self.frozen.requires_grad_(requires_grad=False)
        self.table.requires_grad_(requires_grad=False)

    def forward(self, number: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.frozen(self.table(number)))
        return found


def training() -> dict[str, Any]:
    """A training before its first step."""
    model = Net()
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=0.01)
    seen = np.zeros(12, dtype=np.int64)
    return {"model": model, "optimizer": optimizer, "epoch": 0, "rng": torch.zeros(9), "seen": seen}


def train(held: dict[str, Any], step: int) -> None:
    """Make the training's next step."""
    model, optimizer = held["model"], held["optimizer"]
    optimizer.zero_grad()
    model(torch.arange(8)).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        model.table.weight[step] += 1
    held["epoch"] += 1
    held["seen"][held["epoch"]] = step


def structure(step: int) -> dict[str, Any]:
    """A model without a framework: arrays, and about every plain value there is."""
    dice = np.random.default_rng(77)
    array = dice.integers(-9, 9, (6, 5)).astype(np.float32)
    return {
        "arrays": [array, array.astype(np.float16), np.asfortranarray(array), np.zeros((0, 3))],
        "changed": np.arange(40, dtype=np.int32) * (step + 1),
        "numbers": [1, -2.5, 1 << 80, True, None, 1 + 2j, float("nan"), float("-inf")],
        "texts": ("a", "é", "\ud800", b"\0\xff", bytearray(b"xy")),
        "sets": [{1, 2, 3}, frozenset("ab")],
        "maps": [{1: "a", (1, 2): "b"}, OrderedDict(z=1, a=2), Counter("aab")],
        "others": [defaultdict(int, a=1), deque([1, 2], maxlen=5), range(3), slice(1, None, 2)],
        "numpy": [np.float64(2.5), np.int8(-3), np.dtype("int32")],
        "torch": [torch.bfloat16, torch.arange(6).reshape(2, 3).t(), torch.tensor(2.5)],
    }


def save_runs(store: Path, config: Path) -> None:
    """Both runs, with a pinned step."""
    with CheckpointStore(store, RUN, config=config, weights="model") as run:
        held = training()
        for step in STEPS:
            train(held, step)
            # 0.5 twice, of which the earlier is the best one.
            run.save(held, step, {"loss": max(0.5, 3 - step / 10), "bad": float("nan")})
        run.pin(PINNED)
    with CheckpointStore(store, PLAIN) as run:
        for step in range(4):
            run.save(structure(step), step, {"score": step / 4}, files={"note.txt": f"step {step}"})


def settle_times(store: Path) -> None:
    """Whole seconds that are long ago, in the order of saving: what an archive keeps of times."""
    for file in (store / "trash").iterdir():
        file.rename(file.with_name(f"{FIRST_SAVED_S}.{file.name.partition('.')[2]}"))
    saved = {str(step): FIRST_SAVED_S + 60 * place for place, step in enumerate(STEPS)}
    for file in (store / "refs").iterdir():
        run, _, step = file.name.partition("@")
        when = saved[step.split("@")[0]] if run.endswith("training") else FIRST_SAVED_S
        os.utime(file, (when, when))


def steps_of(store: Path) -> dict[str, Any]:
    """What the runs of a store hold, every step of them, as JSON can hold it."""
    with CheckpointStore(store, RUN) as run, CheckpointStore(store, PLAIN) as plain:
        return {
            "training": {
                str(step): described(run.load(step, original=training())) for step in run.steps()
            },
            "plain": {str(step): described(plain.load(step)) for step in plain.steps()},
            "latest": run.latest(),
            "best": run.best("loss"),
            "pinned": sorted(run.pinned()),
            "losses": [each["loss"] for each in run.metrics().values()],
        }


def described(value: Any) -> Any:
    """Type, geometry and content of whatever a step holds, as JSON can hold it."""
    kind = type(value).__name__
    if isinstance(value, nn.Module):
        return [kind, described(dict(value.state_dict()))]
    if isinstance(value, torch.optim.Optimizer):
        # Its groups have what this version of torch has.
        return [kind, described(value.state_dict()["state"])]
    if isinstance(value, torch.Tensor):
        dense = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return [kind, str(value.dtype), list(value.shape), list(value.stride()), _sha256(dense)]
    if isinstance(value, np.ndarray):
        order = [value.flags.c_contiguous, value.flags.f_contiguous]
        return [kind, value.dtype.str, list(value.shape), order, _sha256(value.tobytes())]
    return _plain(kind, value)


def _plain(kind: str, value: Any) -> Any:
    if isinstance(value, np.generic):
        return [kind, value.tobytes().hex()]
    if isinstance(value, Mapping):
        return [kind, [[described(key), described(each)] for key, each in value.items()]]
    if isinstance(value, list | tuple | deque):
        return [kind, getattr(value, "maxlen", None), [described(each) for each in value]]
    if isinstance(value, set | frozenset):
        return [kind, sorted(map(repr, value))]
    return [kind, repr(value)]


def _sha256(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


def hashes(path: Path) -> dict[str, str]:
    """SHA-256 of a file, or of every file below a folder, by relative path."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    root = path.parent if path.is_file() else path
    return {f.relative_to(root).as_posix(): _sha256(f.read_bytes()) for f in sorted(files)}


# --- what the verbs print


def documents(code: Code, store: Path) -> dict[str, Any]:
    """What the verbs that read print of a store, without its place."""
    names = ("org/base", "tune", "whole", "pickled", f"{RUN}@25", f"{PLAIN}@2")
    verbs = ["list", *(f"show {name}" for name in names), "stats", "runs list", "runs stats"]
    verbs += [f"runs show {RUN}", f"runs stats {RUN}", "verify --full"]
    found = code.verbs([[*verb.split(), "--store", store] for verb in verbs])
    return dict(zip(verbs, without(found, store), strict=True))


def without(document: Any, *places: Path) -> Any:
    """A document without places of this machine, so that it can be compared elsewhere."""
    text = json.dumps(document)
    for number, place in enumerate(places):
        text = text.replace(str(place), f"PLACE{number}")
    return json.loads(text)


def said_of(found: Any, old: Any) -> Any:
    """The part of `found` of which `old` speaks: later code may add keys, at any depth."""
    if isinstance(found, dict) and isinstance(old, dict):
        return {key: said_of(value, old[key]) for key, value in found.items() if key in old}
    if isinstance(found, list) and isinstance(old, list) and len(found) == len(old):
        return [said_of(*pair) for pair in zip(found, old, strict=True)]
    return found


def unpack(folder: Path) -> Path:
    """What the old code left, in a folder of its own below this one."""
    with tarfile.open(DATA / "old.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "old"
