"""A load's use of the memory manager: borrow tensors of other processes, and put new ones there.

A borrowed tensor is a resident (shared tensor) in a slab of the manager. The lease on it ends when
the resident is freed. The same code serves a manager of host memory
(`tensor_dedup.loader.residents.host_manager`) and a manager of a GPU
(`tensor_dedup.loader.cuda.manager_residents`). If the manager fails, the failure is logged once,
and the load goes on with memory of this process.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

from blake3 import blake3

from tensor_dedup.loader.residents.lent import record_of
from tensor_dedup.loader.residents.registry import LEAF_SHARED_FROM
from tensor_dedup.loader.residents.resident import key_anywhere
from tensor_dedup.loader.residents.slab import SlabUsageError
from tensor_dedup.memory_manager.client import (
    AUTO,
    Client,
    Fill,
    LayerFound,
    Lease,
    NewLayer,
    NewTensor,
    connect,
)
from tensor_dedup.memory_manager.client.client import PUT_WAIT_S
from tensor_dedup.memory_manager.client.names import printed
from tensor_dedup.memory_manager.errors import (
    BackendError,
    ManagerGoneError,
    MemoryManagerError,
    RefusedError,
)

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

    from tensor_dedup.loader.residents.resident import ReadInto
    from tensor_dedup.types import ResidentKey

_log = logging.getLogger(__name__)
_CONTEXT: Final = "tensor-dedup manager key v1"


class ResidentQuery(NamedTuple):
    """A resident to look up, by its recipe and its key.

    The key's digest is "" if only the recipe is known. A resident that is found by recipe must have
    the key's dtype, shape and stride.
    """

    recipe: str
    key: ResidentKey


@dataclass(frozen=True, slots=True)
class ResidentRequest:
    """A tensor to make resident: its recipe, the tensor and its digest.

    If the tensor is mapped from a file, `read(into, offset)` fills a buffer with the tensor's bytes
    from the file. `leaves` are the tensor's leaf digests, or are empty if they are not known.
    """

    recipe: str
    tensor: torch.Tensor
    digest: str
    read: ReadInto | None = field(default=None, compare=False)
    leaves: Sequence[bytes] = field(default=(), compare=False)

    @property
    def key(self) -> ResidentKey:
        """The key of the tensor's resident."""
        return key_anywhere(self.tensor, self.digest)

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return self.tensor.nbytes


class AnyRequest(Protocol):
    """An interface for requests to make a tensor resident, in any kind of memory."""

    @property
    def recipe(self) -> str: ...

    @property
    def key(self) -> ResidentKey: ...

    @property
    def nbytes(self) -> int: ...


Request = TypeVar("Request", bound=AnyRequest)
Held = TypeVar("Held")
_Held_co = TypeVar("_Held_co", covariant=True)
Session = TypeVar("Session", bound="ManagerSession[Any, Any]")


class ManagedMemory(Protocol[Request, _Held_co]):
    """An interface to a kind of memory that managers lend: host memory, or that of a GPU."""

    @property
    def namespace(self) -> str:
        """The prefix of the keys that a manager has for tensors in this memory."""

    @property
    def whole_only(self) -> str | None:
        """The reason why tensors in this memory cannot share parts, or None if they can."""

    def resident(self, key: ResidentKey, lease: Lease) -> _Held_co:
        """Return the leased tensor as a resident with the dtype, shape and stride of `key`.

        The digest of `key` is ignored; the resident has the digest of the lease.

        Raises:
            SlabUsageError: In host memory: the lease is on a tensor of another size, or exceeds its
                slab.
            BackendError: On a GPU: the lease is on a tensor of another size.
        """

    def data(self, request: Request) -> Buffer | None:
        """Return the bytes of the requested tensor for the client to copy.

        Returns None if `fill` writes the tensor instead.
        """

    def fill(self, requests: dict[str, Request]) -> Fill | None:
        """Return a function that writes the requested tensors into the manager's memory.

        `requests` has the requests by the keys of the manager's entries. Returns None if the client
        copies the result of `data` instead.
        """

    def with_room(self, ask: Callable[[], None]) -> None:
        """Call `ask`, which requests memory from the manager.

        If the manager refuses and there is unused memory, that memory is freed, and `ask` is called
        again.
        """


class ManagerSession(Generic[Request, Held]):
    """One load's requests to one memory manager. For one thread; sessions may share a client.

    Look-ups and puts raise MemoryManagerError. After a RefusedError, a subclass of it, the caller
    can go on using the manager. After any other error, the caller must do without the manager. If
    the manager lends a tensor that cannot be used, the tensor counts as missing. `unusable` has the
    first reason.
    """

    def __init__(
        self, client: Client, checkpoint: str, memory: ManagedMemory[Request, Held]
    ) -> None:
        self.client: Final = client
        self.checkpoint: Final = checkpoint
        self.memory: Final = memory
        self.unusable: str | None = None
        self.not_by_leaf: str | None = None  # why a large tensor was put whole

    def by_content(self, keys: Sequence[ResidentKey]) -> list[Held | None]:
        """Look up residents by digest, in one batch; return them in order, None for each miss."""
        leases = self.client.lease([key.digest for key in keys], self.checkpoint)
        return [
            None if lease is None else self._resident(key, lease)
            for key, lease in zip(keys, leases, strict=True)
        ]

    def by_recipe(self, queries: Sequence[ResidentQuery]) -> list[Held | None]:
        """Look up residents by recipe, in one batch; return them in order, or None for each miss.

        A resident counts as a miss if its dtype, shape or stride differs from the query's. If the
        query has a digest, a resident with another digest is a miss, too.
        """
        layers = self.client.get([self._key(each.recipe) for each in queries], self.checkpoint)
        return [
            self._of_layer(layer, each.key) for each, layer in zip(queries, layers, strict=True)
        ]

    def put(self, requests: Sequence[Request], found: dict[str, tuple[Held, bool]]) -> None:
        """Put those tensors of `requests` into the manager's memory that are not there yet.

        For each tensor that the manager then lends, `found[request.recipe]` is set to a pair: the
        resident, and whether this call wrote it. This holds after an error, too. Requests whose
        recipes are in `found` already are skipped.
        """
        by_key = {
            self._key(each.recipe): each
            for each in requests
            if each.nbytes and each.recipe not in found
        }
        if not by_key:
            return
        layers = {key: self._layer(each) for key, each in by_key.items()}
        result = self.client.put(layers, self.checkpoint, fill=self.memory.fill(by_key))
        for key, layer in result.layers.items():
            each, [lease] = by_key[key], layer.leases
            if layer.written and each.nbytes >= LEAF_SHARED_FROM and self.not_by_leaf is None:
                self.not_by_leaf = self.memory.whole_only
            resident = self._resident(each.key, lease)
            if resident is not None:
                found[each.recipe] = resident, layer.written
        for error in result.unusable.values():
            self._note_unusable(str(error))
        if result.error is not None:
            raise result.error
        if result.still_building:  # from a slow disk, perhaps; the manager is well
            [first, *_] = result.still_building
            self._note_unusable(f"another process has been building {first} for {PUT_WAIT_S:.0f} s")

    def _remember(
        self,
        resident: Held,
        keys: Sequence[str],
        record: bytes,
        digests: Sequence[str],
    ) -> None:
        new = self.client.remember(keys, record, digests)
        if new:
            weakref.finalize(resident, self.client.forget, new).atexit = False

    def _layer(self, request: Request) -> NewLayer:
        data = self.memory.data(request)
        tensor = NewTensor(request.nbytes, request.key.digest, data)
        return NewLayer(record_of(request.key), (tensor,))

    def _of_layer(self, layer: LayerFound | None, key: ResidentKey) -> Held | None:
        if layer is None or len(layer.leases) != 1 or layer.record != record_of(key):
            return None
        [lease] = layer.leases
        return self._resident(key, lease) if key.digest in ("", lease.digest) else None

    def _resident(self, key: ResidentKey, lease: Lease) -> Held | None:
        """Return the resident that a lease is on, or None if it is on something else."""
        try:
            return self.memory.resident(key, lease)
        except (SlabUsageError, BackendError) as error:
            self._note_unusable(f"what is lent for {lease.digest} is not that tensor: {error}")
            return None

    def _note_unusable(self, reason: str) -> None:
        if self.unusable is None:
            self.unusable = reason
            _log.warning("%s: a tensor stays private: %s", self.checkpoint, reason)

    def _key(self, recipe: str) -> str:
        name = blake3(recipe.encode(), derive_key_context=_CONTEXT).hexdigest()
        return f"{self.memory.namespace}:{name}"


class ManagerResidents(Generic[Request, Held, Session]):
    """One load's use of a memory manager that may be absent or fail. For one thread.

    There is a subclass for each kind of memory, with its kind of `session`.

    No method raises MemoryManagerError. Instead, these attributes have the reasons, or None:

    - `failed`: why the manager is not used, or is no longer used.
    - `refused`: why the manager refused a tensor. Only the first refusal is kept.

    If `session` and `failed` are both None, no manager was requested.
    """

    def __init__(self, session: Session | None = None, failed: str | None = None) -> None:
        self.session: Final = session
        self.failed = failed
        self.refused: str | None = None

    @property
    def in_use(self) -> bool:
        """Whether the load began with a manager. It stays True after the manager has failed."""
        return self.session is not None

    @property
    def not_lent(self) -> str | None:
        """The reason why the requested manager does not hold all residents, or None."""
        unusable = self.session.unusable if self.session is not None else None
        return self.failed or self.refused or unusable

    @property
    def not_by_leaf(self) -> str | None:
        """The reason why a large tensor was put whole and shares no parts with others, or None."""
        return self.session.not_by_leaf if self.session is not None else None

    def find(self, queries: Sequence[ResidentQuery]) -> list[Held | None]:
        """Look up residents; return them in order, or None for each miss.

        A query with a digest is looked up by digest, and any other by recipe. All digests are
        looked up in one batch, and all recipes in another.
        """
        known = list({each.key: None for each in queries if each.key.digest})
        others = list({each: None for each in queries if not each.key.digest})
        by_key: dict[ResidentKey, Held | None] = {}
        by_query: dict[ResidentQuery, Held | None] = {}

        def ask(session: Session) -> None:
            if known:
                by_key.update(zip(known, session.by_content(known), strict=True))
            if others:
                by_query.update(zip(others, session.by_recipe(others), strict=True))

        self._ask(ask)
        return [by_key.get(q.key) if q.key.digest else by_query.get(q) for q in queries]

    def put(self, requests: Sequence[Request]) -> list[tuple[Held, bool] | None]:
        """Put the tensors of `requests` into the manager.

        Returns, in order, the resident for each request and whether this call wrote it, or None for
        a tensor that the manager does not take. If another process is building a tensor, this waits
        for it and uses the result.
        """
        found: dict[str, tuple[Held, bool]] = {}
        if requests:
            self._ask(lambda session: session.put(requests, found))
        return [found.get(each.recipe) for each in requests]

    def _ask(self, ask: Callable[[Session], None]) -> None:
        session = self.session
        if session is None or self.failed is not None:
            return
        try:
            session.memory.with_room(lambda: ask(session))
        except RefusedError as error:
            # No room for these: what is resident can still be borrowed.
            if self.refused is None:
                self.refused = str(error)
                _log.warning("%s: not all of it can be lent: %s", session.checkpoint, str(error))
        except MemoryManagerError as error:
            self.failed = str(error)
            _log.warning(
                "%s: loading without the memory manager from here on: %s",
                session.checkpoint,
                str(error),
            )


# What this process was called.
_called: str | None = None
_clients: dict[tuple[int, str, str], Client] = {}
_clients_lock = threading.Lock()
os.register_at_fork(after_in_child=lambda: globals().update(_clients_lock=threading.Lock()))


def call_this_process(name: str | None) -> None:
    """Give the name by which memory managers are to call this process, from the next connection on.

    None stands for the name of its program.
    """
    global _called
    _called = name


def client_of(where: str, device: str = "") -> Client:
    """Return this process's connection to the memory manager whose socket is `where`.

    `device` is the UUID of the GPU whose memory the manager lends, or "" for host memory. The
    connection is opened at the first call, and again after a fork or if the manager has ended.

    Raises:
        MemoryManagerError: The manager does not answer, or lends memory of another device.
    """
    with _clients_lock:
        key = os.getpid(), where, device
        client = _clients.get(key)
        if client is None or client.closed:
            client = connect(where, name=_program(), device=device)
            _clients[key] = client
        elif not client.connected:
            _reconnect(client, where, device)
        return client


def _program() -> str:
    """Return a name of this process for people; the manager knows its process number."""
    if _called is not None:
        return printed(_called)
    program = Path(sys.argv[0]).name if sys.argv else ""
    program = "python" if program in ("", "-c", "-m") else program
    process = multiprocessing.current_process().name
    return printed(program if process == "MainProcess" else f"{program} {process}")


def _reconnect(client: Client, where: str, device: str) -> None:
    """Offer what is held here to the current manager, or to one that this starts."""
    try:
        client.reconnect()
    except ManagerGoneError:
        if where != AUTO:
            raise
        connect(AUTO, name="starting", keep_connected=False, device=device).close()
        client.reconnect()
