"""Where a store can be damaged: a byte in each kind of its files, and flipped bits."""

from collections.abc import Callable
from pathlib import Path

from store_runs.stores import open_store
from tensor_dedup.store import LocalStore
from tensor_dedup.store.files import RealFiles
from tensor_dedup.store.format import tables
from tensor_dedup.store.format.layout import StoreLayout
from tensor_dedup.store.objects import Objects

Flips = Callable[[Path], tuple[Path, int]]


def one(root: Path, pattern: str) -> Path:
    return min(root.glob(pattern))


def manifest_of(root: Path, name: str) -> Path:
    store = open_store(root)
    with store.checkpoint(name) as checkpoint:
        return root / "manifests" / checkpoint.manifest[:2] / checkpoint.manifest


def page(root: Path) -> Path:
    manifests = {manifest_of(root, name) for name in ("base", "tune", "tiny")}
    return min(set(root.glob("manifests/*/*")) - manifests)


def padding(root: Path) -> tuple[Path, int]:
    objects = Objects(RealFiles(), StoreLayout(root))
    gaps = [
        (objects.layout.container(container.name, container.kind), start)
        for container in objects.containers
        for start, _ in tables.gaps(objects.containers.table(container))
    ]
    return min(gaps)


# Each kind of file, a byte in it, and what verify calls the damage.
PLACES: dict[str, tuple[Flips, str]] = {
    "raw, header": (lambda root: (one(root, "containers/*/*.raw"), 20), "tensor"),
    "raw, tensor": (lambda root: (one(root, "containers/*/*.raw"), 500_000), "tensor"),
    "raw, table": (lambda root: (one(root, "containers/*/*.raw.table"), 60), "table"),
    "slab, tensor": (lambda root: (one(root, "containers/*/*.slab"), 70_000), "tensor"),
    "pack, padding": (lambda root: padding(root), "padding"),
    "slab, table": (lambda root: (one(root, "containers/*/*.slab"), -60), "table"),
    "slab, tail": (lambda root: (one(root, "containers/*/*.slab"), -3), "table"),
    "pack, tensor": (lambda root: (one(root, "containers/*/*.pack"), 3), "tensor"),
    "pack, table": (lambda root: (one(root, "containers/*/*.pack"), -100), "table"),
    "manifest": (lambda root: (manifest_of(root, "tune"), 40), "manifest"),
    "page": (lambda root: (page(root), 100), "page"),
    "reference, manifest": (lambda root: (root / "refs" / "base", 70), "reference"),
    "reference, checksum": (lambda root: (root / "refs" / "tiny", -4), "reference"),
}


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def damage_piece(store: LocalStore, name: str, tensor: str) -> None:
    """Flip a bit of every copy of a tensor of a checkpoint."""
    with store.checkpoint(name) as checkpoint:
        places = checkpoint.own_places(bytes.fromhex(checkpoint[tensor].digest))
        assert places
        for container, record in places:
            flip(checkpoint.path(container), record.offset + record.stored // 2)
