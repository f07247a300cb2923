"""The steps of one run on a remote, and the order in which they were saved."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import Bucket, ObjectStatus
from tensor_dedup.remote.errors import DamagedRemoteError, MissingRemoteError
from tensor_dedup.remote.manifests import list_all_refs, read_content
from tensor_dedup.store.errors import NewerFormatError
from tensor_dedup.store.format.manifests import Manifest
from tensor_dedup.store.steps.notes import Notes, content_name
from tensor_dedup.store.steps.runs import StepPlace, parse_step_name, step_name

_UNREADABLE: Final = (DamagedRemoteError, MissingRemoteError, NewerFormatError)


@dataclass(frozen=True, slots=True)
class DescribedStep:
    """What the manifest of a name says: its notes, None where no run made it, and its size.

    `content` is its `content_name`.
    """

    notes: Notes | None
    nbytes: int
    content: str

    @classmethod
    def of(cls, content: Manifest) -> "DescribedStep":
        """Return the description of the manifest `content`."""
        return cls(Notes.from_texts(content.notes), content.nbytes, content_name(content))


@dataclass(frozen=True, slots=True)
class StepRef:
    """A reference as it was listed: what it leads to, and when it was written.

    `state` is the name of the manifest or, of a damaged reference, something else that changes when
    it does. `modified` is 0 where it was not listed.
    """

    state: str
    damaged: bool
    modified: float


@dataclass(frozen=True, slots=True)
class RunRefs:
    """The references of a run that a remote has.

    * `steps` maps step numbers to references. `kept` has the numbers of kept steps.
    * `others` has names that begin with `RUN@` and are neither a step nor a mark.
    * `gone` stands for the deleted names and their references: if it is the same for two listings,
      no name was deleted between the beginning of the first and the end of the second. If one was,
      there may be later steps than those in `steps`, which came after their place was listed.
    """

    steps: dict[int, StepRef]
    kept: set[int]
    others: set[str]
    gone: bytes


@dataclass(frozen=True, slots=True)
class RunContent:
    """The steps of a run that a remote has, and its references as `refs`.

    * `places` maps step numbers to places in the order of saving.
    * `taken` has the numbers that no step can use, because the checkpoint with the name RUN@STEP is
      not a step of this run.
    """

    refs: RunRefs
    places: dict[int, StepPlace]
    taken: set[int]


def _gone(deleted: Iterable[str | ObjectStatus]) -> bytes:
    """Return a digest: there are as many deleted names as a run ever had steps."""
    return sha256("\n".join(sorted(map(repr, deleted))).encode()).digest()


@dataclass(slots=True)
class StepMemory:
    """What was read of the steps of a run. It may be used again for the same remote.

    `gone` is that of the last listing that ended.
    """

    # Manifests never change. A reference is read again when it is listed with another state.
    manifests: dict[str, DescribedStep] = field(default_factory=dict)
    refs: dict[str, tuple[ObjectStatus, StepRef | None]] = field(default_factory=dict)
    gone: bytes = _gone([])

    def forget_others(self, content: "RunContent") -> None:
        """Drop the manifests that no step in `content` has; they are read again if need be."""
        used = {ref.state for ref in content.refs.steps.values()}
        for manifest in [*self.manifests]:
            if manifest not in used:
                self.manifests.pop(manifest, None)


class RemoteSteps:
    """The steps of one run on a remote. Safe from any thread.

    Each manifest is read once, and each reference once for each state in which it is listed.
    """

    def __init__(
        self,
        bucket: Bucket,
        run: str,
        *,
        memory: StepMemory | None = None,
        here: Callable[[str], bytes | None] | None = None,
    ) -> None:
        """Prepare to read the steps of `run`; no request is sent.

        `memory` has what was read before, and takes up what is read. `here(name)` returns the bytes
        of a manifest that need not be read from the remote, or None.
        """
        self._bucket, self._run = bucket, run
        self._here = here or (lambda _: None)
        self._memory = StepMemory() if memory is None else memory

    def content(self) -> RunContent:
        """Return the steps of the run that the remote has now."""
        refs = self.listed()
        places, taken, unreadable = dict[int, StepPlace](), set[int](), dict[int, StepRef]()
        for step, ref in refs.steps.items():
            place = self.place_of(step, ref)
            if place is None:
                taken.add(step)
            elif place.readable:
                places[step] = place
            else:
                unreadable[step] = ref
        # As in a store: such a step comes behind the last one that is dated no later.
        dated = [(refs.steps[step].modified, place.sequence) for step, place in places.items()]
        for step, ref in unreadable.items():
            before = (sequence for when, sequence in dated if when <= ref.modified)
            places[step] = StepPlace(max(before, default=0), ref.state, None)
        return RunContent(refs, {step: places[step] for step in sorted(places)}, taken)

    def listed(self) -> RunRefs:
        """Return the references of the run that the remote has now; the steps' manifests are read.

        Whether a manifest could be read, `known` says.
        """
        listed, deleted = list_all_refs(self._bucket, self._run)
        parsed = {name: step for name in listed if (step := parse_step_name(name)) is not None}
        found = {name: listed[name] for name, step in parsed.items() if step.run == self._run}
        before = self._memory.refs
        refs = {n: before[n] for n in found.keys() & before.keys() if before[n][0] == found[n]}
        new = [name for name in found if name not in refs]
        read = self._bucket.each(lambda name: self.ref(name, found[name].modified), new)
        for name, ref in zip(new, read, strict=True):
            refs[name] = (found[name], ref)
        since = [name for name in found if refs[name][1] is None]
        # Replaced as a whole: other threads may use what was there.
        gone = _gone([*deleted.values(), *since])
        self._memory.refs, self._memory.gone = refs, gone
        result = RunRefs({}, set(), {*listed} - {*parsed}, gone)
        for name in found:
            ref = refs[name][1]
            if ref is None:
                continue
            if parsed[name].kept:
                result.kept.add(parsed[name].step)
            else:
                result.steps[parsed[name].step] = ref
        for _ in self._bucket.each(self.described, {ref.state for ref in result.steps.values()}):
            pass
        return result

    def ref(self, name: str, modified: float = 0.0) -> StepRef | None:
        """Read a reference as it is now; None if there is none, or the name was deleted."""
        key = layout.ref_key(name)
        found = self._bucket.get(key, layout.TEXT_BYTES)
        if found is None:
            return None
        try:
            manifest = layout.referred(found[0], name, self._bucket.at(key))
        except _UNREADABLE:
            return StepRef(layout.damaged_state(found[1]), True, modified)
        return None if manifest is None else StepRef(manifest, False, modified)

    def described(self, manifest: str) -> DescribedStep | None:
        """Return what a manifest says; None if it cannot be read, or is none."""
        manifests = self._memory.manifests
        if manifest not in manifests:
            try:
                _, content = read_content(self._bucket, manifest, self._here)
            except _UNREADABLE:
                return None
            manifests[manifest] = DescribedStep.of(content)
        return manifests[manifest]

    def known(self, manifest: str) -> DescribedStep | None:
        """Return what a manifest says if it was read already, else None."""
        return self._memory.manifests.get(manifest)

    def learn(self, manifest: str, content: Manifest) -> None:
        """Take up what the manifest called `manifest` says, so that it is not read."""
        self._memory.manifests[manifest] = DescribedStep.of(content)

    def place_of(self, step: int, ref: StepRef) -> StepPlace | None:
        """Return the place of a step, or None if the checkpoint is no step of this run.

        A step that cannot be read comes first among all.
        """
        described = None if ref.damaged else self.described(ref.state)
        if described is None:
            return StepPlace(0, ref.state, None)
        notes = described.notes
        if notes is None or (notes.run, notes.step) != (self._run, step):
            return None
        return StepPlace(notes.sequence, ref.state, ref.state, described.content)

    def place(self, step: int) -> StepPlace | None:
        """Return the place of a step as it is now, or None if the remote has no such step."""
        ref = self.ref(step_name(self._run, step))
        return None if ref is None else self.place_of(step, ref)
