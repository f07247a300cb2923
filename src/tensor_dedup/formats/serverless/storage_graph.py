"""The storages of a state dict, and its tensors as views of them. No I/O, no torch.

The graph determines the bytes of the index. Tensors are ordered by name. The storages are laid out
in the order of their first tensors, each at the next multiple of 8 bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tensor_dedup.formats.errors import TensorIndexError, TensorIndexFault
from tensor_dedup.formats.serverless.tensor_index import (
    ALIGNMENT,
    Fields,
    IndexEntry,
    TensorIndex,
    encode_index,
    parse_index,
)


@dataclass(frozen=True, slots=True)
class StorageEntry:
    """A storage of a state dict: its id, the device it was on, and its size in bytes."""

    storage_id: str
    device: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorAlias:
    """A tensor as a view of a storage. `storage_offset`, `shape` and `stride` are in elements.

    `logical_length` is the size in bytes of the tensor's elements.
    """

    name: str
    storage_id: str
    storage_offset: int
    logical_length: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class StorageGraph:
    """The storages of a state dict, each once, and the tensors that are views of them."""

    storage_entries: tuple[StorageEntry, ...]
    tensor_aliases: tuple[TensorAlias, ...]

    def offsets(self) -> dict[str, int]:
        """Return the byte offset of each storage in the data, by storage id.

        The offsets are in ascending order. Storages without tensors are left out.
        """
        sizes = {entry.storage_id: entry.nbytes for entry in self.storage_entries}
        found: dict[str, int] = {}
        end = 0
        for alias in sorted(self.tensor_aliases, key=lambda alias: alias.name):
            if alias.storage_id not in found:
                found[alias.storage_id] = end
                end += -(-sizes[alias.storage_id] // ALIGNMENT) * ALIGNMENT
        return found

    def index_entries(self) -> list[IndexEntry]:
        """Return the index entries of all tensors."""
        offsets = self.offsets()
        sizes: dict[int, int] = {}
        for entry in self.storage_entries:
            if entry.storage_id in offsets:
                at = offsets[entry.storage_id]
                sizes[at] = max(entry.nbytes, sizes.get(at, 0))
        return [
            IndexEntry(
                alias.name,
                offsets[alias.storage_id],
                sizes[offsets[alias.storage_id]],
                alias.shape,
                alias.stride,
                alias.dtype,
                alias.storage_offset,
            )
            for alias in self.tensor_aliases
        ]

    def normal(self) -> "tuple[StorageGraph, dict[str, str]]":
        """Return the graph with its storages renamed s0, s1, ... by offset, and the new ids.

        Empty storages at the offset of a storage with bytes are removed. Their tensors become views
        of that storage.

        The second result maps old ids to new ids, without the ids of removed storages. Every
        storage with bytes must have a tensor.
        """
        offsets = self.offsets()
        real = {offsets[e.storage_id]: e.storage_id for e in self.storage_entries if e.nbytes}
        owner = {key: real.get(offset, key) for key, offset in offsets.items()}
        ids = {key: f"s{n}" for n, key in enumerate(dict.fromkeys(owner.values()))}
        aliases = tuple(
            replace(alias, storage_id=ids[owner[alias.storage_id]]) for alias in self.tensor_aliases
        )
        sizes = {entry.storage_id: entry for entry in self.storage_entries}
        entries = tuple(replace(sizes[key], storage_id=new) for key, new in ids.items())
        return StorageGraph(entries, aliases), ids

    def select(self, names: Sequence[str]) -> "StorageGraph":
        """Return the graph of the tensors in `names` and the storages that they need."""
        wanted = set(names)
        aliases = tuple(alias for alias in self.tensor_aliases if alias.name in wanted)
        used = {alias.storage_id for alias in aliases}
        entries = (entry for entry in self.storage_entries if entry.storage_id in used)
        return StorageGraph(tuple(entries), aliases)

    def to_json(self) -> dict[str, list[dict[str, object]]]:
        """Return the graph as a descriptor holds it: `storage_entries` and `tensor_aliases`."""
        return {
            "storage_entries": [_fields(entry) for entry in self.storage_entries],
            "tensor_aliases": [_fields(alias) for alias in self.tensor_aliases],
        }


def rebuild_index(
    storage_entries: Sequence[Mapping[str, Any]],
    tensor_aliases: Sequence[Mapping[str, Any]],
    *,
    fields: Fields = 6,
    path: str = "artifact_descriptor.json",
) -> bytes:
    """Return the bytes of `tensor_index.json` from the graph that a descriptor holds.

    `fields` is the number of fields in each entry, 5 or 6. `path` is used in error messages only.

    Raises:
        TensorIndexError: The entries do not form a valid graph.
    """
    graph = parse_graph(storage_entries, tensor_aliases, path)
    return encode_index(graph.index_entries(), fields)


def graph_of(index: TensorIndex) -> StorageGraph:
    """Return the storage graph of an index. Every device is "cpu", because an index names none."""
    ids = {storage.offset: f"s{number}" for number, storage in enumerate(index.storages)}
    entries = (StorageEntry(ids[s.offset], "cpu", s.nbytes) for s in index.storages)
    aliases = (
        TensorAlias(
            entry.name,
            ids[entry.offset],
            entry.storage_offset,
            entry.nbytes,
            entry.shape,
            entry.stride,
            entry.dtype,
        )
        for entry in index.entries
    )
    return StorageGraph(tuple(entries), tuple(aliases))


def parse_graph(storage_entries: object, tensor_aliases: object, path: str) -> StorageGraph:
    """Parse and check the storage graph in a descriptor.

    `storage_entries` and `tensor_aliases` are the lists of these names in the descriptor. `path` is
    used in error messages only.

    Raises:
        TensorIndexError: The lists do not form a valid graph.
    """
    entries = [_make(StorageEntry, row, path) for row in _list(storage_entries, path)]
    aliases = [_make(TensorAlias, row, path) for row in _list(tensor_aliases, path)]
    ids = {entry.storage_id for entry in entries}
    if len(ids) != len(entries) or len({alias.name for alias in aliases}) != len(aliases):
        raise TensorIndexError.at(
            TensorIndexFault.DESCRIPTOR, path, "a storage or a tensor is listed twice"
        )
    for alias in aliases:
        if alias.storage_id not in ids:
            raise TensorIndexError.at(
                TensorIndexFault.DESCRIPTOR, path, "its storage is not listed", alias.name
            )
    graph = StorageGraph(tuple(entries), tuple(aliases))
    # An index of these is checked as one that was read: dtypes, views, sizes.
    checked = {entry.name: entry for entry in parse_index(_encoded(graph), path).entries}
    for alias in aliases:
        if alias.logical_length != checked[alias.name].nbytes:
            raise TensorIndexError.at(
                TensorIndexFault.DESCRIPTOR, path, "its logical_length is wrong", alias.name
            )
    return graph


def _encoded(graph: StorageGraph) -> bytes:
    return encode_index(graph.index_entries())


def _list(value: object, path: str) -> list[object]:
    if not isinstance(value, list | tuple):
        raise TensorIndexError.at(
            TensorIndexFault.DESCRIPTOR, path, "it has no lists storage_entries and tensor_aliases"
        )
    return list(value)


_KINDS: dict[str, type] = {
    "storage_id": str,
    "device": str,
    "nbytes": int,
    "name": str,
    "storage_offset": int,
    "logical_length": int,
    "shape": list,
    "stride": list,
    "dtype": str,
}


def _make(kind: Any, row: object, path: str) -> Any:
    names = list(kind.__dataclass_fields__)
    if not isinstance(row, dict) or set(row) != set(names):
        raise TensorIndexError.at(
            TensorIndexFault.DESCRIPTOR, path, f"an entry is no object with {', '.join(names)}"
        )
    values = {name: list(v) if isinstance(v, tuple) else v for name, v in row.items()}
    for name, value in values.items():
        sizes = value if _KINDS[name] is list and isinstance(value, list) else [value]
        numeric = _KINDS[name] is not str
        wrong = numeric and not all(type(n) is int and 0 <= n < 1 << 63 for n in sizes)
        if type(value) is not _KINDS[name] or wrong:
            raise TensorIndexError.at(
                TensorIndexFault.DESCRIPTOR, path, f"an entry's {name} is not what it has to be"
            )
    return kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})


def _fields(row: StorageEntry | TensorAlias) -> dict[str, object]:
    values = {name: getattr(row, name) for name in row.__dataclass_fields__}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
