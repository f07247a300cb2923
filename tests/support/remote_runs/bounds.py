"""What a push or a pull may cost: bytes, headers included, and requests.

`Scene` counts what fine-tunes of three kinds cost at a proxy, whatever else the remote holds.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from remote_runs.remotes import MemoryBucket
from remote_runs.s3_faults import Wire
from store_runs.stores import layered, tuned, weights, with_lora
from tensor_dedup import Store
from tensor_dedup.remote import Remote, TransferResult
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.catalog import catalog_of

MIB: Final = 1 << 20
UNIT: Final = 64 * MIB
KINDS: Final = ("one layer", "merged LoRA", "all of it")
# Where nothing is new.
NOTHING_BYTES, NOTHING_REQUESTS = 4 << 10, 2


def most_bytes(missing: int, pieces: int) -> int:
    """The bytes for so many that are missing, if the remote holds so many pieces."""
    return int(1.02 * missing) + MIB + 24 * pieces


def most_requests(missing: int, unit: int = UNIT, *, gaps: int = 0) -> int:
    """The requests for so many bytes that are missing, with so many gaps of over 256 KiB.

    Two containers are such a gap.
    """
    return 30 + 3 * -(-missing // unit) + gaps


def held_pieces(bucket: Bucket) -> int:
    """How many pieces a remote holds."""
    return sum(entry.pieces for entry in catalog_of(bucket).containers.values())


def assert_priced(nbytes: int, requests: int, missing: int, pieces: int, unit: int = UNIT) -> None:
    """Hold what was counted to both bounds."""
    assert nbytes >= missing > 0
    assert nbytes <= most_bytes(missing, pieces), (nbytes, missing, pieces)
    assert requests <= most_requests(missing, unit), (requests, missing)


@dataclass(frozen=True)
class Cost:
    """What a push or a pull of a fine-tune cost, and the bounds of that."""

    verb: str
    kind: str
    missing: int
    nbytes: int
    requests: int
    most_bytes: int
    most_requests: int

    @property
    def is_met(self) -> bool:
        """Whether neither is more than allowed."""
        return self.nbytes <= self.most_bytes and self.requests <= self.most_requests


class Scene:
    """A base of so many layers, in a remote, and fine-tunes of it in a store."""

    def __init__(self, root: Path, layers: int, layer_bytes: int) -> None:
        self._root = root
        base = [weights(n, layer_bytes) for n in range(layers)]
        kinds = {
            "one layer": [weights(1000, layer_bytes), *base[1:]],
            "merged LoRA": [with_lora(d, n) if n % 6 == 1 else d for n, d in enumerate(base)],
            "all of it": [tuned(d, n) for n, d in enumerate(base)],
        }
        assert [*kinds] == [*KINDS]
        self.here, self.start = Store.open(root / "here"), MemoryBucket()
        self.paths = {"base": layered(root, "base", base)}
        self.here.import_(self.paths["base"], "base")
        for kind, made in kinds.items():
            assert len(made) == layers
            self.paths[kind] = layered(root, kind, made)
            self.here.import_(self.paths[kind], _named(kind), compress="auto", base="base")
        self.here.push(Remote(self.start), "base")

    def costs(self, past: Callable[[MemoryBucket], object]) -> Iterator[Cost]:
        """Push and pull each fine-tune, twice, to a remote that has the base and some `past`."""
        bucket = self.start.copied()
        past(bucket)
        there = Store.open(self._root / f"there-{id(bucket)}")
        there.import_(self.paths["base"], "base")
        with closing(Wire(bucket)) as wire:
            for kind in KINDS:
                for verb, work in (("push", self.here.push), ("pull", there.pull)):
                    pieces = held_pieces(bucket)
                    yield self._counted(verb, kind, wire, work, pieces)
                    again = self._counted(verb, kind, wire, work, pieces)
                    assert not again.missing
                    yield again
                assert there.manifest(_named(kind)) == self.here.manifest(_named(kind))

    def _counted(
        self,
        verb: str,
        kind: str,
        wire: Wire,
        work: Callable[[Remote, str], TransferResult],
        pieces: int,
    ) -> Cost:
        wire.reset()
        done = work(wire.remote, _named(kind))
        missing, found = done.moved_bytes, (wire.proxy.nbytes, wire.proxy.requests)
        assert done.requests == wire.proxy.requests
        if done.unchanged:
            return Cost(verb, kind, missing, *found, NOTHING_BYTES, NOTHING_REQUESTS)
        most = most_bytes(missing, pieces), most_requests(missing)
        return Cost(verb, kind, missing, *found, *most)


def _named(kind: str) -> str:
    return kind.replace(" ", "-")
