"""What a remote costs as it grows: the catalog, the requests of a pull, a sweep, many clients.

    python scripts/bench/remote_scale.py [--checkpoints N] [--clients N] [--pause-ms MS]

Checkpoints have the tensors of a model of 7B in bfloat16. Of ten with one base, one is the base,
four have one other layer, three a LoRA merged into two matrices of each layer, two are full
fine-tunes that take 12 % as deltas. Tables, catalog, manifests and references are those that a push
writes; the bytes of containers are not there, only their sizes. A push of one more fine-tune looks
for what it relies on, and a sweep is a dry run, once at once and once with a pause before each
answer. Then clients push at once to a server in memory that answers each request after a pause.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import click
import numpy as np
from safetensors.numpy import save_file

from remotes import MemoryBucket
from tensor_dedup import Store
from tensor_dedup.digest import LEAF_BYTES, combine
from tensor_dedup.remote import Remote, catalog, holders, layout, loads, pieces, pull
from tensor_dedup.remote import sweep as remote_sweep
from tensor_dedup.remote.buckets import Bucket, ObjectStatus
from tensor_dedup.remote.catalog import Catalog, ListedContainer, unheld
from tensor_dedup.remote.relatives import lost
from tensor_dedup.store.format import frames, manifests
from tensor_dedup.store.format.manifests import Piece
from tensor_dedup.store.format.tables import PLAIN, Record
from tensor_dedup.store.objects import ContainerId

HIDDEN, INNER, WORDS, LAYERS = 4096, 11008, 32000, 32
PER_LAYER: Final = (*(2 * HIDDEN * HIDDEN,) * 4, *(2 * HIDDEN * INNER,) * 3, *(2 * HIDDEN,) * 2)
SIZES: Final = (2 * WORDS * HIDDEN, *PER_LAYER * LAYERS, 2 * HIDDEN, 2 * WORDS * HIDDEN)
KINDS: Final = ("one layer",) * 4 + ("merged LoRA",) * 3 + ("full",) * 2
DELTA: Final = 0.12


class Sizes(MemoryBucket):
    """Objects in memory, of whose containers only the sizes are kept.

    Calls `then`, once, when the next reference is read.
    """

    then: Callable[[], object] | None = None
    each = Bucket.each  # on threads, as with a server

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, int] = {}
        self.pause_s = 0.0
        self.listed = self.pages = self.heads = 0

    def size(self, key: str, nbytes: int) -> None:
        """Take note of a container."""
        self.objects[key] = (b"", f"tag {nbytes}", self.clock)
        self.sizes[key] = nbytes

    def _pause(self) -> None:
        if self.pause_s:
            time.sleep(self.pause_s)

    def get(self, key: str, limit: int) -> tuple[bytes, str] | None:
        # docstring inherited
        if key.startswith(layout.REFS) and self.then is not None:
            then, self.then = self.then, None
            then()
        self._pause()
        return super().get(key, limit)

    def head(self, key: str) -> ObjectStatus | None:
        # docstring inherited
        self._pause()
        self.heads += 1
        found = super().head(key)
        return None if found is None else self._sized(found)

    def list(self, prefix: str) -> Iterator[ObjectStatus]:
        # docstring inherited
        for number, status in enumerate(super().list(prefix)):
            if number % 1000 == 0:
                self._pause()
                self.pages += 1
            self.listed += 1
            yield self._sized(status)

    def _sized(self, status: ObjectStatus) -> ObjectStatus:
        nbytes = self.sizes.get(status.key, status.size)
        return ObjectStatus(status.key, nbytes, status.tag, status.modified)


@dataclass
class Model:
    """A checkpoint: its pieces in order, and what was new when it was pushed."""

    name: str
    kind: str
    pieces: list[Piece]
    new: set[bytes]


class Models:
    """Checkpoints, and how they would be laid out on a remote."""

    def __init__(self, seed: int) -> None:
        self._dice = np.random.default_rng(seed)

    def leaves(self, nbytes: int) -> bytes:
        """Digests of the leaves of a tensor that is nowhere."""
        return self._dice.bytes(32 * -(-nbytes // LEAF_BYTES))

    def record(self, nbytes: int, base: bytes | None) -> Record:
        """A new piece."""
        leaves = self.leaves(nbytes)
        split = [leaves[at : at + 32] for at in range(0, len(leaves), 32)]
        digest = bytes.fromhex(combine(nbytes, split))
        if base is None or nbytes < LEAF_BYTES:
            return Record(digest, 0, nbytes, nbytes, PLAIN, None, leaves)
        return Record(digest, 0, int(DELTA * nbytes), nbytes, "diff2", base, leaves)

    def family(self, number: int) -> Iterator[tuple[Model, list[Record]]]:
        """A base and nine fine-tunes, with the records that each adds."""
        base = [self.record(nbytes, None) for nbytes in SIZES]
        yield self.model(f"base-{number}", "base", base, base), base
        for at, kind in enumerate(KINDS):
            held, added = list(base), []
            for place in changed(kind, at):
                against = base[place].digest if kind == "full" else None
                held[place] = self.record(SIZES[place], against)
                added.append(held[place])
            yield self.model(f"tune-{number}-{at}", kind, held, added), added

    def alike(self, family: Sequence[ListedContainer]) -> Iterator[ListedContainer]:
        """Containers of other pieces as large as these: in the catalog, and nowhere else."""
        for each in family:
            drawn = (self._dice.bytes(len(held)) for held in (each.name, each.alone, each.deltas))
            name, alone, deltas = drawn
            yield ListedContainer(name, each.kind, each.nbytes, alone, deltas, each.width)

    def model(self, name: str, kind: str, held: Sequence[Record], new: Sequence[Record]) -> Model:
        """A checkpoint of these pieces."""
        found = [
            Piece(record.digest, record.nbytes, f"tensors.{n}", "BF16", (record.nbytes // 2,))
            for n, record in enumerate(held)
        ]
        return Model(name, kind, found, {record.digest for record in new})


def changed(kind: str, seed: int) -> list[int]:
    """The numbers of the tensors that a fine-tune of a kind has of its own."""
    per = len(PER_LAYER)
    if kind == "one layer":
        return list(range(1 + per * seed, 1 + per * (seed + 1)))
    if kind == "merged LoRA":
        return [1 + per * layer + matrix for layer in range(LAYERS) for matrix in (0, 2)]
    return list(range(len(SIZES)))


def put(
    bucket: Sizes, family: Catalog, model: Model, records: Sequence[Record]
) -> list[ListedContainer]:
    """Put what a push of a model would: tables, sizes, pages, manifest, holders, reference.

    `family` has the containers of the models with the same base, and gets more.
    """
    plain = [(record, None) for record in records if record.base is None]
    encoded = [(record, None) for record in records if record.base is not None]
    listed: list[ListedContainer] = []
    for load in loads.laid_out([*plain, *encoded]):
        listed.append(catalog.listed(load.container, load.table))
        family.add(listed[-1])
        bucket.size(layout.container_key(load.container), load.nbytes)
        bucket.put(layout.table_key(load.container.name), [memoryview(load.frame.blob)])
    name, blobs = manifests.build([], model.pieces)
    for part, blob in blobs.items():
        bucket.put(layout.manifest_key(part), [memoryview(blob)])
    anchors = [record.base for record in records if record.base is not None]
    own = [piece.digest for piece in model.pieces]
    sizes = {record.digest: record.stored for record in records}
    holders.put_holders(bucket, name, family.only([*own, *anchors]), sizes)
    bucket.put(layout.ref_key(model.name), [memoryview(layout.reference(model.name, name))])
    return listed


def land(bucket: Sizes, models: Models) -> None:
    """Put a model of one layer, with all that a push writes."""
    records = [models.record(nbytes, None) for nbytes in PER_LAYER]
    new = put(bucket, Catalog(), models.model("late", "one layer", records, records), records)
    before = catalog.catalog_of(bucket)
    catalog.commit(bucket, before, lambda now: (catalog.with_more(now, new), now.trash))


def counted(bucket: MemoryBucket, work: Any) -> tuple[Any, int, int, float]:
    """The result of some work, its bytes, its calls and its seconds."""
    before, began = bucket.traffic.counts(), time.perf_counter()
    found = work()
    took, after = time.perf_counter() - began, bucket.traffic.counts()
    return found, after[0] - before[0], after[1] - before[1], took


def places(bucket: Sizes, model: Model, here: set[bytes]) -> tuple[Any, int]:
    """Where a pull finds what is missing, as `pull` does, and in how many ranges."""
    found = pull.read_manifest(bucket, model.name, pull.read_ref(bucket, model.name))
    missing = {p.digest: p.nbytes for p in found.pieces if p.digest not in here}
    index: Any = SimpleNamespace(
        find=lambda bases: {b: [SimpleNamespace(base=None)] for b in bases if b in here}
    )
    held = pull._Lookup(bucket, index, {}, found).places(missing)
    order = sorted(held.values(), key=lambda place: (place[0], place[1].offset))
    return held, len(pieces._downloads(order, ()))


def looks(bucket: Sizes, whole: Catalog, base: Model, models: Models) -> None:
    """Print what a push of one more fine-tune of a base, one layer of it, asks for beside sending.

    The base is there under its name, so no tables need be read of what it has.
    """
    new = {n: models.record(SIZES[n], None) for n in changed("one layer", LAYERS - 1)}
    own = {new[n].digest if n in new else piece.digest for n, piece in enumerate(base.pieces)}
    sent = sum(record.stored for record in new.values())
    whole.assure(piece.digest for piece in base.pieces)
    bucket.listed = bucket.pages = bucket.heads = 0
    before = bucket.traffic.counts()
    missing = unheld(bucket, whole, own)
    assert missing == {record.digest for record in new.values()}
    tables, nbytes = bucket.traffic.counts()[1] - before[1], bucket.traffic.counts()[0] - before[0]
    relied = {whole.holders(digest)[0] for digest in own - missing}
    assert not lost(bucket, whole, relied, sent, 0, mending=False)
    looked = bucket.listed * _LISTED_BYTES + bucket.heads * _HEAD_BYTES
    click.echo(
        f"push of one other layer ({sent / 1e6:,.0f} MB): {tables} tables read ({nbytes:,} B); "
        f"relies on {len(relied)} containers, looks for them by {bucket.pages} pages of a list and "
        f"{bucket.heads} requests for one, {looked / 1e6:.1f} MB ({looked / sent:.1%})"
    )


def scale(count: int, *, sweep: bool, pause_s: float) -> None:
    """Print a block about a remote of so many checkpoints."""
    bucket, models = Sizes(), Models(count)
    bucket.put(layout.MARKER, [memoryview(frames.encode_text(layout.MARKER_LINES))])
    entries: list[ListedContainer] = []
    last: list[Model] = []
    family: list[ListedContainer] = []
    for number in range(count // 10):
        if last and not sweep:
            entries += models.alike(family)
            continue
        last, family, relatives = [], [], Catalog()
        for model, records in models.family(number):
            family += put(bucket, relatives, model, records)
            last.append(model)
        entries += family
    catalog.commit(bucket, Catalog(rebuilt=True), lambda _: (catalog.segment_of(entries), _NONE))
    stored = sum(entry.nbytes for entry in entries)
    whole, nbytes, _, took = counted(bucket, lambda: catalog.catalog_of(bucket))
    click.echo(
        f"\n{count:,} checkpoints of {count // 10:,} bases: {len(entries):,} containers, "
        f"{stored / 1e12:.1f} TB\n"
        f"catalog: {nbytes / 1e6:.1f} MB, read in {took:.2f} s (without a network)"
    )
    base = last[0]
    here = {piece.digest for piece in base.pieces}
    for kind in ("base", *dict.fromkeys(KINDS)):
        model = next(each for each in last if each.kind == kind)
        known = set() if kind == "base" else here
        (held, ranges), nbytes, calls, took = counted(
            bucket, lambda m=model, k=known: places(bucket, m, k)
        )
        missing = sum(record.stored for _, record in held.values())
        click.echo(
            f"pull of {kind}: {missing / 1e6:,.0f} MB missing, bookkeeping {nbytes / 1e6:.1f} MB "
            f"({nbytes / missing:.2%}), {calls} requests and {ranges} ranges "
            f"(allowed {12 + 3 * -(-missing // (64 << 20))}), {took:.2f} s"
        )
    new = catalog.listed(*_one(models))
    merged = catalog.with_more(whole, [new])
    written = sum(
        len(catalog.segment_blob(held))
        for name, held in merged.items()
        if name not in whole.segments
    )
    click.echo(
        f"push of one container more: reads the catalog, writes {written / 1e3:.1f} kB of it"
    )
    looks(bucket, whole, base, models)
    if not sweep:
        return
    bucket.clock += 3600 * 24 * 30
    for bucket.pause_s in (0.0, pause_s) if pause_s else (0.0,):
        bucket.pages = 0
        _, nbytes, calls, took = counted(
            bucket, lambda: remote_sweep.gc(bucket, 3600.0, dry_run=True)
        )
        lists = (layout.CONTAINERS, layout.TABLES, layout.HOLDERS, layout.MANIFESTS, layout.REFS)
        pages = sum(-(-len([*bucket.list(prefix)]) // 1000) for prefix in lists)
        click.echo(
            f"gc: {calls:,} requests and {bucket.pages:,} pages of lists, {nbytes / 1e6:,.0f} MB "
            f"read, {took:.1f} s with {bucket.pause_s * 1e3:.0f} ms a request"
        )
        bucket.then = lambda: land(bucket, models)
        _, _, both, long = counted(bucket, lambda: remote_sweep.gc(bucket, 3600.0))
        more = both - calls
        click.echo(
            f"gc, and a push lands meanwhile: {more:,} requests more (and as many pages of lists), "
            f"{long - took:.1f} s more without a network; with 20 ms a request, "
            f"{more * 0.02 / 8 + pages * 0.02:,.0f} s"
        )


_NONE: Final = catalog.Trash({}, {})
# What SeaweedFS takes for an object in a list, and for a request for one, both ways.
_LISTED_BYTES, _HEAD_BYTES = 277, 912


def _one(models: Models) -> tuple[ContainerId, Any]:
    (load,) = loads.laid_out([(models.record(33 << 20, None), None)])
    return load.container, load.table


class Slow(MemoryBucket):
    """Answers after a pause, as a network does; and one request of a client after the other."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self._pause_s = pause_s

    def get(self, key: str, limit: int) -> tuple[bytes, str] | None:
        # docstring inherited
        time.sleep(self._pause_s)
        return super().get(key, limit)

    def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
        # docstring inherited
        time.sleep(self._pause_s)
        done = super().put_if(key, data, tag)
        if key == layout.HEAD:
            with self._guard:
                self.heads += 1
                self.refused += not done
        return done

    heads = refused = 0


def crowd(clients: int, pause_s: float) -> None:
    """Print how often clients that push at once wait for each other."""
    bucket = Slow(pause_s)
    dice = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as root:
        store = Store.open(f"{root}/store")
        for number in range(clients):
            folder = Path(root, "model")
            folder.mkdir(exist_ok=True)
            save_file({"w": dice.integers(0, 256, 999, np.uint8)}, folder / "model.safetensors")
            store.import_(folder, f"m{number}")
        store.push(Remote(bucket), "m0")
        failed: list[str] = []

        def work(number: int) -> None:
            try:
                Store.open(store.path).push(Remote(bucket), f"m{number}")
            except Exception as error:  # noqa: BLE001 counted
                failed.append(repr(error))

        bucket.heads = bucket.refused = 0
        threads = [threading.Thread(target=work, args=(n,)) for n in range(1, clients)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - began
        assert Remote(bucket).verify(full=True).fine
        click.echo(
            f"\n{clients - 1} clients push at once, {pause_s * 1e3:.0f} ms a request: "
            f"{took:.1f} s, "
            f"{bucket.heads} writes of catalog/HEAD, {bucket.refused} of them too late, "
            f"{len(failed)} failed {failed[:1]}"
        )


@click.command()
@click.option("--checkpoints", default="100,1000", show_default=True)
@click.option("--sweep-up-to", default=1000, show_default=True, help="No gc of more checkpoints.")
@click.option("--clients", default=64, show_default=True, help="0: none.")
@click.option("--pause-ms", default=20.0, show_default=True, help="In a sweep; 0: only without.")
def main(checkpoints: str, sweep_up_to: int, clients: int, pause_ms: float) -> None:
    """Print what it costs at each of these sizes."""
    for count in map(int, checkpoints.split(",")):
        scale(count, sweep=count <= sweep_up_to, pause_s=pause_ms / 1e3)
    if not clients:
        return
    for pause_s in (0.0, 0.02):
        crowd(clients + 1, pause_s)


if __name__ == "__main__":
    main()
