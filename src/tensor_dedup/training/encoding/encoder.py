"""The encoding of what a run saves: what of it the save itself does, and what a thread does later.

encoding = encoder.begin(...)    when a save begins
encoding.encode(writer, fresh)   stores what is quick to encode (`in_save`)
encoder.encode_later(...)        when the step is committed: the rest is encoded (`background`)
"""

from collections.abc import Callable, Mapping, Sequence

from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.writing.containers import SealedContainer
from tensor_dedup.store.writing.deltas import LeafSharing
from tensor_dedup.store.writing.run_cache import LastStep, Rewritten
from tensor_dedup.training.encoding.background import BackgroundEncoder
from tensor_dedup.training.encoding.decisions import Compress, Decisions
from tensor_dedup.training.encoding.first_base import FirstStep
from tensor_dedup.training.encoding.in_save import CodecEncoding, LeafEncoding, StepEncoding
from tensor_dedup.training.encoding.rewrite import EncodingJob
from tensor_dedup.training.snapshot import StepSource


class RunEncoder:
    """Encodes the tensors that the saves of one CheckpointStore store.

    `compress` and `base` are its options. `last` returns the step that was saved last. `moved` is
    called after the background encoding has replaced a container.
    """

    def __init__(
        self,
        objects: Objects,
        workers: int,
        compress: Compress,
        base: str | None,
        last: Callable[[], LastStep],
        moved: Callable[[Rewritten], None],
    ) -> None:
        self._objects, self._compress, self._base = objects, compress, base
        self.decisions = Decisions()
        self.background = BackgroundEncoder(objects, workers, self.decisions, last, moved)

    def begin(
        self, index: StoreIndex, run: str, before: Callable[[], Mapping[str, bytes]]
    ) -> StepEncoding:
        """Begin a save of a step of the run `run`, in a session. Call `close` on the result.

        `before` returns the digests of the large tensors in the previous step, by name.
        """
        objects, decisions, superseded = self._objects, self.decisions, self.background.superseded
        sharing = LeafSharing(objects, index, superseded.bases().keys())
        if self._compress is None:
            return LeafEncoding(decisions, sharing)

        def staying() -> Mapping[str, bytes]:
            # Nothing is stored against what waits to be removed: it would stay.
            found, instead = before(), superseded.bases()
            return {name: instead.get(digest, digest) for name, digest in found.items()}

        first, defer = FirstStep(run, self._base), self._compress == "auto"
        return CodecEncoding(objects, index, decisions, staying, first, sharing, defer=defer)

    def encode_later(
        self,
        encoding: StepEncoding,
        step: StepSource,
        manifest: str,
        sealed: Sequence[SealedContainer],
    ) -> None:
        """Encode in the background what `encoding` has left, after `step` was committed.

        `sealed` are the containers of the step.
        """
        if encoding.left:
            slab = next(each for each in sealed if each.container.kind == "slab")
            job = EncodingJob(
                slab.container,
                slab.file_bytes,
                step.name,
                manifest,
                encoding.left,
                encoding.first,
                step.background,
            )
            self.background.add(job)
