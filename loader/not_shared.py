"""The ledger of one load: what was shared, and why other tensors were not, or were read.

A *final tensor* is a weight as the engine uses it. A *source tensor* is a tensor of the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tensor_dedup.loader.report import ModelReport
    from tensor_dedup.types import TensorSpec


class LoadedSource(Protocol):
    """The properties of a source tensor (a tensor of the checkpoint) that the ledger uses."""

    @property
    def spec(self) -> TensorSpec:
        """The tensor's name, dtype and shape, and its position in the file."""

    @property
    def whole(self) -> LoadedSource:
        """The tensor of the checkpoint of which this one is a range, or this one itself."""


class NotShared(StrEnum):
    """Fixed texts that say why a tensor is not shared.

    Reasons that contain sizes or names are plain strings instead.
    """

    BELOW_MIN_BYTES = "it is below min_tensor_bytes"
    CHANGED = "it changed while it was being loaded"
    COLLISION = "another tensor has the same digest"
    COMPARED_ON_GPU = (
        "on a GPU nothing is compared byte by byte: it stays private with verify_bytes"
    )
    EPLB = "enable_eplb: balancing experts overwrites it while the engine runs"
    GAPS = "its processed form has gaps"
    KEPT_ELSEWHERE = "something beside the layer keeps its memory"
    META = "it is not in memory (meta)"
    NEVER_WRITTEN = "part of it is never written"
    NOT_DEFERRED = "the loading code gave it memory of its own"
    NOT_FROM_CHECKPOINT = "it does not come from the checkpoint"
    SCALES_WRITTEN = (
        "weight_transfer_config: scales may be written, and its kernel knows their address"
    )
    SHARED_STORAGE = "it shares its storage with another parameter"
    UNKNOWN_HANDLER = "its kernel does not pack into a handler we know"
    UNSHARABLE_LAYOUT = "its type or layout cannot be shared"
    WRITABLE_BY_OTHERS = "other processes can write to its memory"


class WhyRead(StrEnum):
    """Fixed texts that say why a tensor was read although its digest was remembered."""

    ASKED_FOR = "the loading code asked for its values"
    COMPARED = "it was compared with what is resident (verify_bytes or audit)"
    FOUND_AFTERWARDS = "its bytes were resident, but nothing was found by its recipe"
    NOT_RESIDENT = "nothing resident had its bytes"
    PROCESSED = "vLLM processes its layer after reading"
    REST = "a part of it was resident"


_LARGEST = 8
_REASONS = 16


@dataclass(slots=True)
class FinalTensor:
    """The ledger's entry for one final tensor (a weight as the engine uses it).

    - `nbytes` is the tensor's size in bytes, packed copies included.
    - `shared_bytes` is the part of `nbytes` that was in shared memory before the load.
    - `sources` has the tensors of the checkpoint that it was made from, by `id`.
    """

    nbytes: int = 0
    shared_bytes: int = 0
    sources: dict[int, LoadedSource] = field(default_factory=dict)

    @property
    def is_shared(self) -> bool:
        """Whether every byte of the tensor was in shared memory before the load."""
        return self.nbytes > 0 and self.shared_bytes == self.nbytes


class LoadLedger:
    """A record of what one load shared and what it did not share. For one thread.

    - `finals` maps the name of each final tensor (a weight as the engine uses it) to its entry.
    - `skipped` maps the name of a tensor that is not shared to the reason.
    - `bytes_materialised` is the size of the memory that the load has filled with tensors.
    - `leaf_shared_bytes` is the size of the parts of new tensors that are mapped from older ones.
    - `collisions` is the number of shared tensors that a comparison of bytes rejected.
    - `why_read` maps the name of a final tensor to the reason why its sources were read, where it
      does not follow from the rest.
    """

    def __init__(self) -> None:
        self.finals: dict[str, FinalTensor] = {}
        self.skipped: dict[str, str] = {}
        self.why_read: dict[str, WhyRead] = {}
        self.bytes_materialised = 0
        self.leaf_shared_bytes = 0
        self.collisions = 0
        self._planned_sources: Sequence[LoadedSource] = ()

    def add(
        self,
        name: str,
        nbytes: int,
        *,
        shared: bool,
        made: bool | None = None,
        sources: Iterable[LoadedSource] = (),
    ) -> None:
        """Add `nbytes` bytes to the final tensor `name`.

        Call it once for each form of the tensor in memory, for example a plain and a packed one.

        - `shared` says that these bytes were in shared memory before this load began.
        - `made` says that this load filled new memory with these bytes. It defaults to `not
          shared`.
        - `sources` are the tensors of the checkpoint that the bytes come from.

        If an equal tensor of the model with the same memory was added before, pass False for both
        `shared` and `made`.
        """
        final = self.finals.setdefault(name, FinalTensor())
        final.nbytes += nbytes
        if shared:
            final.shared_bytes += nbytes
        if not shared if made is None else made:
            self.bytes_materialised += nbytes
        final.sources.update((id(source.whole), source.whole) for source in sources)

    def share_sources(self, sources: Sequence[LoadedSource]) -> None:
        """Record that only shared final tensors use `sources`, without saying which.

        A load that follows a load plan does not learn which tensor is made of which.
        """
        self._planned_sources = sources

    def note_leaves(self, nbytes: int) -> None:
        """Record that `nbytes` bytes of a new tensor are mapped from parts of older shared tensors.

        The number is added to `leaf_shared_bytes` and subtracted from `bytes_materialised`.
        """
        self.bytes_materialised -= nbytes
        self.leaf_shared_bytes += nbytes

    def skip(self, name: str, reason: str) -> None:
        """Record `reason`, which tells why the final tensor `name` is not shared.

        Only the first reason for a name is kept.
        """
        self.skipped.setdefault(name, str(reason))

    def enter(self, report: ModelReport) -> None:
        """Write the ledger's totals into `report`."""
        finals = [final for final in self.finals.values() if final.nbytes]
        report.total_bytes = sum(final.nbytes for final in finals)
        report.shared_bytes = sum(final.shared_bytes for final in finals)
        report.private_bytes = report.total_bytes - report.shared_bytes
        report.leaf_shared_bytes = self.leaf_shared_bytes
        report.bytes_materialised = self.bytes_materialised
        report.tensors_total = len(finals)
        report.tensors_shared = sum(final.is_shared for final in finals)
        report.collisions = self.collisions
        report.skipped = sorted(self.skipped.items())
        shared = self.shared_sources()
        report.source_tensors_shared = len(shared)
        report.source_bytes_shared = sum(source.spec.nbytes for source in shared)

    def known_reads(self, reads: Iterable[tuple[LoadedSource, int]]) -> list[dict[str, Any]]:
        """Return the field `known_reads` of a report.

        `reads` has source tensors whose digests were remembered and that were read all the same,
        with the number of bytes. A source counts for the first final tensor that is made of it.
        """
        owners = {key: n for n in reversed(self.finals) for key in self.finals[n].sources}
        nbytes: Counter[str] = Counter()
        for source, read in reads:
            nbytes[owners.get(id(source.whole), source.spec.name)] += read
        names: dict[str, list[str]] = {}
        for name, _ in nbytes.most_common():
            names.setdefault(self._why_read(name), []).append(name)
        groups: list[dict[str, Any]] = [
            {
                "reason": reason,
                "tensors": len(group),
                "bytes": sum(nbytes[name] for name in group),
                "largest": [[name, nbytes[name]] for name in group[:_LARGEST]],
            }
            for reason, group in names.items()
        ]
        return sorted(groups, key=lambda group: -group["bytes"])[:_REASONS]

    def _why_read(self, name: str) -> str:
        final = self.finals.get(name)
        if (reason := self.why_read.get(name)) is not None:
            return str(reason)
        if (skipped := self.skipped.get(name)) is not None:
            return f"not shared: {skipped}"
        if final is None:
            return str(WhyRead.ASKED_FOR)
        return str(WhyRead.FOUND_AFTERWARDS if final.is_shared else WhyRead.NOT_RESIDENT)

    def shared_sources(self) -> list[LoadedSource]:
        """Return the tensors of the checkpoint that only shared final tensors use."""
        used = {key: s for final in self.finals.values() for key, s in final.sources.items()}
        private = {
            key for final in self.finals.values() if not final.is_shared for key in final.sources
        }
        shared = [source for key, source in used.items() if key not in private]
        return [*shared, *self._planned_sources]
