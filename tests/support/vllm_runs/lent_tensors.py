"""Tensors of several leaves, and what a process has of a memory manager."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from tensor_dedup.config import TensorDedupConfig
from tensor_dedup.digest import LEAF_BYTES, digest, leaf_places
from tensor_dedup.loader.deferred.evaluate import Scratch
from tensor_dedup.loader.deferred.session import LoadSession
from tensor_dedup.loader.residents.host_manager import HostResidents, host_session
from tensor_dedup.loader.residents.manager import ResidentQuery, ResidentRequest
from tensor_dedup.loader.residents.partial import Content, KnownTensor
from tensor_dedup.loader.residents.provider import HostProvider
from tensor_dedup.loader.residents.resident import (
    Resident,
    Write,
    digest_of,
    resident_key,
    tensor_bytes,
)
from tensor_dedup.memory_manager.client import Client, connect
from vllm_runs import deferring

ROW = 1024  # numbers; 512 rows are a leaf
ROWS_OF_A_LEAF = LEAF_BYTES // (4 * ROW)
LEAVES = 10


def rows(leaves: float, seed: int) -> torch.Tensor:
    """A matrix of so many leaves, of numbers that no other seed has."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(int(leaves * ROWS_OF_A_LEAF), ROW, generator=generator)


def changed(base: torch.Tensor, *leaves: int) -> torch.Tensor:
    """A copy with one number changed in each of these leaves."""
    tune = base.clone()
    for leaf in leaves:
        tune[leaf * ROWS_OF_A_LEAF + 7, 3] += 1
    return tune


class Process:
    """What one process has of a manager; every load of it has a provider of its own."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def provider(self) -> HostProvider:
        return HostProvider(HostResidents(host_session(self.client, "a checkpoint")))

    def load(self, *tensors: torch.Tensor, recipe: str = "") -> list[tuple[Resident, bool]]:
        """Residents as a load of its own makes them."""
        provider = self.provider()
        made = provider.get_or_build([request_for(each, recipe) for each in tensors])
        assert provider.not_lent is None
        assert all(resident.lent for resident, _ in made)
        return made

    def find(self, tensor: torch.Tensor, recipe: str = "", *, known: bool) -> Resident | None:
        """What a load finds by a tensor's digest, or by its recipe alone, of the manager."""
        key = request_for(tensor, recipe).key
        query = ResidentQuery(
            request_for(tensor, recipe).recipe, key if known else replace(key, digest="")
        )
        return self.provider().manager.find([query])[0]


@contextmanager
def processes_of(socket: Path) -> Iterator[Callable[[], Process]]:
    """Makes processes, as far as the manager can tell: each has a connection of its own."""
    with ExitStack() as stack:
        yield lambda: Process(stack.enter_context(connect(socket, keep_connected=False)))
        gc.collect()


def request_for(tensor: torch.Tensor, recipe: str = "") -> ResidentRequest:
    name = digest_of(tensor)
    return ResidentRequest(recipe or f"recipe of {name}", tensor, name)


def contents_of(parts: Sequence[torch.Tensor]) -> list[Content]:
    """What a tensor of these parts, one beside the other, consists of."""
    found, at = [], 0
    for part in parts:
        data = tensor_bytes(part)
        places = leaf_places(0, part.nbytes)
        leaves = tuple(digest(data[start : start + size]) for start, size in places)
        found.append(Content(at, at + part.nbytes, digest(data), leaves))
        at += part.nbytes
    return found


def reader_of(
    parts: Sequence[torch.Tensor], read: list[int]
) -> Callable[[int, Sequence[int] | None, Write], None]:
    """What reads leaves of these parts, or all, and notes in `read` how many bytes each has."""

    def fetch(number: int, leaves: Sequence[int] | None, write: Write) -> None:
        data = tensor_bytes(parts[number])
        wanted = range(-(-len(data) // LEAF_BYTES)) if leaves is None else leaves
        for leaf in wanted:
            piece = data[leaf * LEAF_BYTES : (leaf + 1) * LEAF_BYTES]
            read.append(len(piece))
            write(piece, leaf * LEAF_BYTES)

    return fetch


def known_tensor(
    parts: Sequence[torch.Tensor],
    read: list[int],
    recipe: str = "recipe",
    *,
    contents: Sequence[Content] = (),
) -> KnownTensor:
    """A known tensor of these parts, one beside the other; `read` gets what is read of it."""

    def differs(number: int, found: str) -> None:
        raise AssertionError(f"content {number} hashes to {found}")

    return KnownTensor(
        recipe,
        resident_key(torch.cat([*parts]), ""),
        contents or contents_of(parts),
        reader_of(parts, read),
        digest,
        differs,
    )


def load_known(
    process: Process,
    parts: Sequence[torch.Tensor],
    recipe: str,
    meanwhile: Callable[[], object] = list,
) -> tuple[Resident | None, int]:
    """What a load makes of a known tensor of these parts, and how many bytes it reads for it.

    `meanwhile` is called when it has read them, before it puts them.
    """
    whole, read = torch.cat([*parts]), list[int]()

    def accept(built: Resident) -> bool:
        meanwhile()
        return True

    found = process.provider().share_known(known_tensor(parts, read, recipe), accept)
    if found is None:
        return None, sum(read)
    assert found[0].key == resident_key(whole, digest_of(whole))
    return found[0], sum(read)


def _fuse(model: Any, weights: deferring.Weights) -> None:
    """As vLLM's own code loads q, k and v."""
    at = 0
    for name in "qkv":
        model.fused.data[at : at + len(weights[name])].copy_(weights[name])
        at += len(weights[name])


def load_file_of_qkv(
    process: Process | None,
    path: Path,
    *,
    known: bool,
    lent: bool = True,
    wrong: str = "",
    leaves: Mapping[tuple[str, int], str] | None = None,
    **config: Any,
) -> tuple[torch.Tensor, LoadSession, int]:
    """A fused tensor as a session loads it; how many bytes of the file were read.

    What is known of the source `wrong` is not true, and of the leaves of a source in `leaves`
    their digests there are. `lent`: whether the manager takes the tensor.
    """
    model = deferring.module(fused=torch.zeros(12 * ROWS_OF_A_LEAF, ROW))
    session, read = load_deferred(
        process, path, model, _fuse, known=known, wrong=wrong, leaves=leaves, **config
    )
    assert (session.provider.not_lent is None) == lent
    return model.get_parameter("fused").data, session, read


def load_deferred(
    process: Process | None,
    path: Path,
    model: nn.Module,
    fill: Callable[[Any, deferring.Weights], object],
    *,
    known: bool,
    wrong: str = "",
    leaves: Mapping[tuple[str, int], str] | None = None,
    **config: Any,
) -> tuple[LoadSession, int]:
    """Load a model as a session does, with `fill` its loader; how many bytes were read."""
    with deferring.deferred(model, path, fill) as run:
        for source in run.file.tensors.values() if known else ():
            [content] = contents_of([load_file(path)[source.spec.name]])
            source.digest, source.leaves = content.digest, content.leaves
            source.leaves = tuple(
                (leaves or {}).get((source.spec.name, n), leaf)
                for n, leaf in enumerate(source.leaves)
            )
            if source.spec.name == wrong:
                source.digest = digest(b"of another tensor")
                source.leaves = tuple(digest(b"%d" % n) for n in range(len(content.leaves)))
        provider = HostProvider() if process is None else process.provider()
        session = LoadSession(
            TensorDedupConfig(**config), run.reader, Scratch(), run.evaluator, provider
        )
        session.expect(list(run.parameters.values()))
        session.share(list(run.parameters.values()))
        session.close()
        return session, run.reader.counters.bytes_read
