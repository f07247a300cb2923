"""State dicts in the memory manager: one process publishes, any other maps. Needs torch.

    shared = connect()
    shared.put("llama", model.state_dict())
    # in another process
    weights = connect().get("llama")

A state dict is published as its storages. A storage that several tensors view is published once.
Storages that are in the manager already are not stored again. The name is published last, together
with an index of the tensors. So a put that was killed leaves nothing under the name.
"""

import mmap
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

import msgspec
import torch

from tensor_dedup.digest import digest
from tensor_dedup.errors import ConfigError, FormatError, UnsupportedError
from tensor_dedup.memory_manager.client.client import AUTO, Client
from tensor_dedup.memory_manager.client.client import connect as connect_client
from tensor_dedup.memory_manager.client.leases import Lease, SharedSlab
from tensor_dedup.memory_manager.client.puts import NewLayer, NewTensor, PutLayer
from tensor_dedup.memory_manager.errors import MemoryManagerError
from tensor_dedup.memory_manager.protocol.limits import MAX_RECORD_DIGESTS
from tensor_dedup.memory_manager.protocol.state_dict_names import state_dict_key

_RECORD: Final = b"tensor-dedup state dict 1"


class _Entry(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A tensor: its place in a storage, in elements; `storage` is -1 for one without bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: int


class _Index(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The tensors in order, the sizes of the storages, and the keys of the layers they are in."""

    tensors: list[_Entry]
    storages: list[int]
    layers: list[str]


@dataclass(frozen=True, slots=True)
class PublishedStateDict:
    """The result of `StateDictClient.put`: the number of tensors, and sizes in bytes.

    `nbytes` is the size of all storages. `written_bytes` is the size of the groups of storages that
    were written. A group has up to 128 storages, and some of them may have been in the manager
    already.
    """

    name: str
    tensors: int
    nbytes: int
    written_bytes: int


class StateDictClient:
    """A client that publishes and maps state dicts. Safe from any thread, unusable after a fork.

    A state dict from `put` stays in the manager until this object is closed or `drop` is called. A
    state dict from `get` stays while any of its tensors exists. After that, the manager may evict
    the state dict to make room.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._held: dict[str, list[Lease]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Tensors that `get` has returned stay valid."""
        self._held.clear()
        self._client.close()

    def drop(self, name: str) -> None:
        """Allow the manager to evict the state dict that this client has put under `name`.

        The manager evicts it only when no process uses it. If this client has not put the name,
        nothing is done.
        """
        self._held.pop(name, None)

    def put(self, name: str, state_dict: Mapping[str, torch.Tensor]) -> PublishedStateDict:
        """Publish a state dict of tensors in host memory under `name`.

        A name is 1 to 117 visible ASCII characters, without spaces.
        When this returns, other processes can `get` it. Tensors that share a storage also share one
        in the result of `get`. A storage is published whole, even if only a part of it is used. The
        tensors must not be written during the call. Any process may put the same state dict again.

        Raises:
            ConfigError: The name is not valid, or another state dict has it.
            UnsupportedError: A value is not a plain dense tensor in host memory. Quantized tensors
                are refused, and subclasses of Tensor other than Parameter and Buffer.
            MemoryManagerError: The manager does not answer, or has no room.
        """
        key = state_dict_key(name)
        entries, storages = _taken_apart(state_dict)
        pieces = [NewTensor(len(data), digest(data), data) for data in storages]
        layers: dict[str, NewLayer] = {}
        keys = []
        for start in range(0, len(pieces), MAX_RECORD_DIGESTS):
            part = tuple(pieces[start : start + MAX_RECORD_DIGESTS])
            content = digest("".join(piece.digest for piece in part).encode())
            keys.append(f"state-dict-part:{content}")
            layers[keys[-1]] = NewLayer(_RECORD, part)
        made = self._put(layers, name)
        index = msgspec.msgpack.encode(_Index(entries, [len(data) for data in storages], keys))
        last = NewLayer(_RECORD, (NewTensor(len(index), digest(index), index),))
        made |= self._put({key: last}, name)
        self._held[name] = [lease for layer in made.values() for lease in layer.leases]
        written = sum(
            sum(piece.nbytes for piece in layers[key].tensors)
            for key, layer in made.items()
            if layer.written and key in layers
        )
        return PublishedStateDict(name, len(entries), sum(map(len, storages)), written)

    def _put(self, layers: dict[str, NewLayer], name: str) -> dict[str, PutLayer]:
        result = self._client.put(layers, name)
        for error in (result.error, *result.unusable.values()):
            if error is not None:
                raise error
        if layers.keys() <= result.layers.keys():
            return result.layers
        key = state_dict_key(name)
        if key in layers and key not in result.still_building:
            raise ConfigError(
                f"{name!r} is there already, with other tensors; put this one under another name",
                name=name,
            )
        raise MemoryManagerError(
            f"{name!r} is being put by another process, which has not finished; try again",
            name=name,
        )

    def get(self, name: str) -> dict[str, torch.Tensor] | None:
        """Return the state dict `name`, or None if it is not published or was evicted in part.

        Its tensors are in the order in which they were put. They are mapped, not copied. A write to
        a tensor is private to this result: the kernel copies the page that is written.

        Raises:
            ConfigError: The name is not valid.
            FormatError: The entry of this name is not a state dict of this version.
            MemoryManagerError: The manager does not answer.
        """
        (found,) = self._client.get([state_dict_key(name)], name)
        if found is None:
            return None
        if found.record != _RECORD or len(found.leases) != 1:
            raise _malformed(name, "its record is not one of this version")
        maps = _Maps()
        try:
            index = msgspec.msgpack.decode(bytes(maps.bytes_of(found.leases[0])), type=_Index)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise _malformed(name, str(error)) from error
        layers = self._client.get(index.layers, name)
        leases = [lease for layer in layers if layer is not None for lease in layer.leases]
        if any(layer is None for layer in layers):
            return None
        if [lease.nbytes for lease in leases] != index.storages:
            raise _malformed(name, "its storages have other sizes")
        storages = [torch.frombuffer(maps.bytes_of(each), dtype=torch.uint8) for each in leases]
        return {each.name: _tensor(name, each, storages) for each in index.tensors}


def connect(where: str | os.PathLike[str] = AUTO, *, name: str = "") -> StateDictClient:
    """Connect to the manager at the socket `where`, or at the default path with "auto".

    With "auto", a manager is started if none answers. `name` is shown by `tensor-dedup status`.

    Raises:
        ManagerGoneError: No manager answers.
        UnsafeSocketError: The socket or its folder does not belong to this user alone.
    """
    return StateDictClient(connect_client(where, name=name))


class _Map(mmap.mmap):
    """A private mapping of a slab, which holds the leases of what is used of it."""

    leases: list[Lease]


class _Maps:
    """The slabs that one `get` maps. Tensors keep the mappings, and with them the leases.

    A slab is mapped once; again only for the second of two storages with equal bytes, which are one
    in the slab: a write to one must not change the other.
    """

    def __init__(self) -> None:
        self._maps: dict[tuple[SharedSlab, int], _Map] = {}
        self._uses: Counter[tuple[SharedSlab, int]] = Counter()

    def bytes_of(self, lease: Lease) -> memoryview:
        slab, extent = lease.slab, (lease.slab, lease.offset)
        which = slab, self._uses[extent]
        self._uses[extent] += 1
        if which not in self._maps:
            self._maps[which] = _Map(slab.fileno, slab.nbytes, flags=mmap.MAP_PRIVATE)
            self._maps[which].leases = []
        mapped = self._maps[which]
        mapped.leases.append(lease)
        return memoryview(mapped)[lease.offset : lease.offset + lease.nbytes]


def _taken_apart(
    state_dict: Mapping[str, torch.Tensor],
) -> tuple[list[_Entry], list[memoryview]]:
    """Return where each tensor lies, and the bytes of the storages, each once."""
    entries, storages = list[_Entry](), list[memoryview]()
    numbers: dict[tuple[int, int], int] = {}
    for name, value in state_dict.items():
        reason = _reason(value)
        if reason is not None:
            raise UnsupportedError(f"{name} {reason}", tensor=name)
        tensor = value.detach().resolve_conj().resolve_neg()
        storage = tensor.untyped_storage()
        number = -1
        if tensor.numel() and storage.nbytes():
            place = storage.data_ptr(), storage.nbytes()
            number = numbers.setdefault(place, len(storages))
            if number == len(storages):
                flat = torch.empty(0, dtype=torch.uint8).set_(storage)
                storages.append(flat.numpy().data)
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        offset = int(tensor.storage_offset()) if number >= 0 else 0
        entries.append(_Entry(name, dtype, shape, stride, offset, number))
    return entries, storages


def _reason(value: object) -> str | None:
    """Return why a value cannot be published, or None."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return f"is a {type(value).__name__}; only plain tensors are published, so leave it out"
    assert isinstance(value, torch.Tensor)
    if value.device.type != "cpu":
        return f"is on {value.device}; publish it from host memory: move the model with .cpu()"
    if value.layout is not torch.strided or value.is_quantized:
        return "has no plain layout; publish a dense tensor"
    return None


def _tensor(name: str, entry: _Entry, storages: list[torch.Tensor]) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype, None)
    sizes = entry.shape
    whole = isinstance(dtype, torch.dtype) and len(sizes) == len(entry.stride)
    if not whole or min((*sizes, *entry.stride, entry.offset), default=0) < 0:
        raise _malformed(name, f"{entry.name} has no such type and shape")
    assert isinstance(dtype, torch.dtype)
    if entry.storage == -1 and 0 in sizes:
        return torch.empty_strided(sizes, entry.stride, dtype=dtype)
    last = entry.offset + sum((n - 1) * step for n, step in zip(sizes, entry.stride, strict=True))
    if not 0 <= entry.storage < len(storages) or 0 in sizes:
        raise _malformed(name, f"{entry.name} lies in no storage")
    storage = storages[entry.storage].untyped_storage()
    if (last + 1) * dtype.itemsize > storage.nbytes():
        raise _malformed(name, f"{entry.name} ends after its storage")
    return torch.empty(0, dtype=dtype).set_(storage, entry.offset, sizes, entry.stride)


def _malformed(name: str, why: str) -> FormatError:
    return FormatError(
        f"{name!r} in the memory manager is no state dict ({why}); evict it, and put it again",
        name=name,
    )
