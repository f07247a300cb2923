"""The ways to load one checkpoint to CPU tensors that store.py compares, behind one interface.

Peers are optional: one that is not installed, or does not do here what it is asked, is left out
with the reason. None is told anything but its defaults and "CPU".
"""

import contextlib
import importlib
import importlib.metadata
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.utils.dlpack

from tensor_dedup import Store
from tensor_dedup.store.buffers import BufferPool, allocate
from tensor_dedup.store.reading.tensors import load_tensors

Tensors = Mapping[str, torch.Tensor]
_STEP = 8 << 20
_THREADS = 4


class Method(ABC):
    """One way to load. `prepare` once, then `load` as often as wanted; `files` is what it reads."""

    name: ClassVar[str]
    # Whether what it returns can be compared with the checkpoint.
    tensors: ClassVar[bool] = True

    def __init__(self, work: Path, source: Path) -> None:
        self.work = work
        self.source = source

    def prepare(self) -> None:  # noqa: B027 (nothing to do is a way to do it)
        """Make the form it reads, once for all runs."""

    @abstractmethod
    def files(self) -> list[Path]:
        """Every file a load reads data from."""

    @abstractmethod
    def load(self) -> Tensors:
        """Every tensor of the checkpoint, by name. What is timed, with a look at every page."""

    def release(self) -> None:  # noqa: B027
        """Let go of what its tensors needed, after them."""

    @cached_property
    def shards(self) -> list[Path]:
        """The safetensors files of the source."""
        return sorted(self.source.glob("*.safetensors"))


class _FromSource(Method):
    def files(self) -> list[Path]:
        return self.shards


class Ours(Method):
    """A store; every byte is compared with its digest."""

    name = "tensor-dedup"
    options: ClassVar[Mapping[str, Any]] = {}

    def prepare(self) -> None:
        store = Store.open(self.work / "store")
        if not store.list():
            store.import_(self.source, "model")

    def files(self) -> list[Path]:
        found = (self.work / "store" / "containers").rglob("*")
        return [path for path in found if path.is_file()]

    def load(self) -> Tensors:
        with Store.open(self.work / "store").checkpoint("model") as checkpoint:
            return load_tensors(checkpoint, **self.options)


class OursAgain(Ours):
    """The same, into the memory of a load that is gone."""

    name = "tensor-dedup, memory used again"

    def __init__(self, work: Path, source: Path) -> None:
        super().__init__(work, source)
        self.options = {"pool": BufferPool(1 << 40)}  # type: ignore[misc]


class OursUnverified(OursAgain):
    """The same, nothing compared."""

    name = "tensor-dedup, memory used again, not verified"

    def __init__(self, work: Path, source: Path) -> None:
        super().__init__(work, source)
        self.options = {**self.options, "verify": False}  # type: ignore[misc]


class OursMapped(Ours):
    """Private mappings of the containers."""

    name = "tensor-dedup, mapped"
    options: ClassVar[Mapping[str, Any]] = {"mapped": True}


class OursMappedUnverified(Ours):
    """Private mappings, nothing compared."""

    name = "tensor-dedup, mapped, not verified"
    options: ClassVar[Mapping[str, Any]] = {"mapped": True, "verify": False}


class Safetensors(_FromSource):
    """`safetensors.torch.load_file`."""

    name = "safetensors load_file"

    def load(self) -> Tensors:
        from safetensors.torch import load_file

        return {name: t for shard in self.shards for name, t in load_file(shard).items()}


class TorchLoad(Method):
    """`torch.load` of what torch.save wrote."""

    name = "torch.load"

    def prepare(self) -> None:
        path = self.files()[0]
        if not path.exists():
            torch.save(dict(Safetensors(self.work, self.source).load()), path)

    def files(self) -> list[Path]:
        return [self.work / "model.pt"]

    def load(self) -> Tensors:
        found: Tensors = torch.load(self.files()[0], weights_only=True)
        return found


class Tensorfs(Method):
    """tensorfs: converted once, read from its own store. It compares lengths, no digests."""

    name = "tensorfs"

    def prepare(self) -> None:
        self.library = importlib.import_module("tensorfs")
        self.library.configure(cache_dir=str(self.work / "tensorfs"))
        shards = [str(shard) for shard in self.shards]
        with self.library.convert_to_cozytensors(shards) as checkpoint:
            self.id = checkpoint.id

    def files(self) -> list[Path]:
        return [path for path in (self.work / "tensorfs" / "blobs").rglob("*") if path.is_file()]

    def load(self) -> Tensors:
        with self.library.open(self.id) as checkpoint:
            return {
                name: torch.utils.dlpack.from_dlpack(array)
                for component in checkpoint.components.values()
                for name, array in component.tensors.read(device="cpu").items()
            }


class Fastsafetensors(_FromSource):
    """fastsafetensors without GPU Direct Storage; tensors live as long as its files are open."""

    name = "fastsafetensors"

    def prepare(self) -> None:
        self.library = importlib.import_module("fastsafetensors")
        self.opened = contextlib.ExitStack()

    def load(self) -> Tensors:
        found: dict[str, torch.Tensor] = {}
        for shard in self.shards:
            file = self.library.fastsafe_open([str(shard)], nogds=True, device="cpu")
            self.opened.enter_context(file)
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return found

    def release(self) -> None:
        self.opened.close()


class RunaiStreamer(_FromSource):
    """The Run:ai streamer, whose default is memory for all it streams."""

    name = "Run:ai streamer"

    def prepare(self) -> None:
        self.library = importlib.import_module("runai_model_streamer")

    def load(self) -> Tensors:
        with self.library.SafetensorsStreamer() as streamer:
            streamer.stream_files([str(shard) for shard in self.shards])
            return dict(streamer.get_tensors())


class Tensorizer(Method):
    """tensorizer: its own format, hashes not checked."""

    name = "tensorizer"

    def prepare(self) -> None:
        self.library = importlib.import_module("tensorizer")
        path = self.files()[0]
        if not path.exists():
            serializer = self.library.TensorSerializer(str(path))
            serializer.write_state_dict(dict(Safetensors(self.work, self.source).load()))
            serializer.close()

    def files(self) -> list[Path]:
        return [self.work / "model.tensors"]

    def load(self) -> Tensors:
        return dict(self.library.TensorDeserializer(str(self.files()[0]), device="cpu"))


class RawBuffered(_FromSource):
    """No tensors: all bytes, through the page cache, into memory that was touched before."""

    name = "raw read, through the page cache"
    tensors = False
    flags = os.O_RDONLY

    def prepare(self) -> None:
        total = sum(-(-shard.stat().st_size // _STEP) * _STEP for shard in self.shards)
        self.memory = allocate(total, huge=True)
        for start in range(0, total, 4096):
            self.memory[start] = 1

    def load(self) -> Tensors:
        at = 0
        with ThreadPoolExecutor(_THREADS) as pool, contextlib.ExitStack() as undo:
            for shard in self.shards:
                fd = os.open(shard, self.flags)
                undo.callback(os.close, fd)
                size = os.fstat(fd).st_size
                list(pool.map(self._reader(fd, at), range(0, size, _STEP)))
                at += -(-size // _STEP) * _STEP
        return {}

    def _reader(self, fd: int, at: int) -> Callable[[int], int]:
        return lambda start: os.preadv(fd, [self.memory[at + start : at + start + _STEP]], start)


class RawDirect(RawBuffered):
    """The same, past the page cache."""

    name = "raw read, past the page cache"
    flags = os.O_RDONLY | os.O_DIRECT


OURS: tuple[type[Method], ...] = (
    Ours,
    OursAgain,
    OursUnverified,
    OursMapped,
    OursMappedUnverified,
)
PEERS: tuple[type[Method], ...] = (
    Safetensors,
    TorchLoad,
    Tensorfs,
    Fastsafetensors,
    RunaiStreamer,
    Tensorizer,
)
RAW: tuple[type[Method], ...] = (RawBuffered, RawDirect)
PACKAGES = (
    "torch",
    "safetensors",
    "tensorfs",
    "fastsafetensors",
    "runai-model-streamer",
    "tensorizer",
    "blake3",
)


def usable(work: Path, source: Path) -> Iterator[Method | tuple[str, str]]:
    """Every method that gives the right tensors here, prepared; else its name and the reason."""
    expected = Safetensors(work, source).load()
    for kind in (*OURS, *PEERS, *RAW):
        method = kind(work, source)
        reason = _unfit(method, expected)
        yield method if reason is None else (method.name, reason)


def _unfit(method: Method, expected: Tensors) -> str | None:
    try:
        method.prepare()
        found = method.load()
    except ImportError as error:
        return f"not installed ({error.name})"
    except Exception as error:  # noqa: BLE001 (a peer may fail in any way; it is then left out)
        return f"{type(error).__name__}: {error}"
    if not method.tensors:
        return None
    wrong = [
        name
        for name, tensor in expected.items()
        if name not in found or not torch.equal(found[name], tensor)
    ]
    del found
    method.release()
    return (
        f"{len(wrong)} tensors are missing or wrong, {wrong[0]!r} is the first" if wrong else None
    )
