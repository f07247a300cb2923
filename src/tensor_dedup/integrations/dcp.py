"""Save and load PyTorch Distributed Checkpoints (DCP) through a store.

    import torch.distributed.checkpoint as dcp
    from tensor_dedup.integrations.dcp import StoreReader, StoreWriter

    writer = StoreWriter("checkpoints", "run-001")
    dcp.save(state, checkpoint_id=step, storage_writer=writer)
    dcp.load(state, checkpoint_id=step, storage_reader=StoreReader("checkpoints", "run-001"))

The writer also works with `dcp.async_save`. Keep one writer for a whole run: it remembers the last
step, which makes saving the next one faster.

Every rank stores those tensors of its shards that the store does not have, and the coordinator
merges the parts into one step (`tensor_dedup.training.sharded`). The step also has DCP's own
metadata, as JSON and not as a pickle.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from typing import Any, Final, Literal

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.store.errors import AdvisedError
from tensor_dedup.store.format.manifests import STATE_MARK
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint, StoredTensor
from tensor_dedup.store.steps.errors import BadStepError, UnknownStepError
from tensor_dedup.store.steps.notes import Notes
from tensor_dedup.store.steps.runs import StepOrder, check_run, step_name
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.errors import DamagedStateError, NamedTwiceError
from tensor_dedup.training.sharded import (
    PART_ADAPTER,
    check_free,
    forget_parts,
    merge,
    order_of,
    part_run,
)
from tensor_dedup.training.state import NamedValue, dtype_names
from tensor_dedup.types import StrPath

__all__ = ["StoreReader", "StoreWriter"]

_MOST_DIGITS: Final = 18  # of a step
_UNFIT: Final = (*(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError),)
_META: Final = "meta"  # in the place of a rank: the coordinator's metadata
_ADAPTER: Final = "dcp"
# Names that begin with the mark are no weights to an engine that loads the step.
_METADATA: Final = f"{STATE_MARK}dcp"
_BYTES: Final = f"{STATE_MARK}bytes "
_SHARD: Final = f"{STATE_MARK}part "


class StoreWriter(StorageWriter):
    """A DCP storage writer that saves checkpoints as steps of a run.

    `checkpoint_id` is the number of the step, a non-negative integer. Ranks may be processes on one
    machine, or on several machines that share a file system with locks. A tensor that is in the
    store already is not stored again, whichever rank, step or run has stored it.

    A step exists once the coordinator has merged the parts of all ranks. If a rank dies during a
    save, the parts that are left behind are deleted when the next step is finished. Save one step
    at a time, and wait for the future of an `async_save` before the next save.

    A writer may be pickled; the copy opens the store again.
    """

    def __init__(
        self,
        root: StrPath,
        run_id: str,
        *,
        compress: Literal["auto"] | None = "auto",
        config: "StrPath | Mapping[str, str | bytes] | None" = None,
        weights: str = "",
    ) -> None:
        """Prepare to save the run `run_id` into the store in the folder `root`.

        `compress`, `config` and `weights` have the same meaning as in `CheckpointStore`. With
        `config`, engines can load steps whose tensors are not sharded. The store is opened, or
        created, when the first step is saved.

        Raises:
            BadNameError: `run_id` is not a valid name of a run.
        """
        super().__init__()
        self.run_id = check_run(run_id)
        self._root, self._compress = root, compress
        self._config, self._weights = config, weights
        self._step: int | None = None
        self._parts: dict[int | str, CheckpointStore] = {}
        self._order: StepOrder | None = None
        self._rank = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_parts": {}, "_order": None}

    def close(self) -> None:
        """Release the memory and files that the writer keeps between saves.

        The writer can be used again afterwards.
        """
        for part in self._parts.values():
            part.close()
        self._parts = {}

    def reset(self, checkpoint_id: "StrPath | int | None" = None) -> None:
        """Set the step of the next save to `checkpoint_id`; None leaves the step as it is.

        DCP calls this before each save to which a `checkpoint_id` is passed.

        Raises:
            BadStepError: `checkpoint_id` does not consist of digits, as 7 and "7" do.
        """
        if checkpoint_id is not None:
            self._step = _step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare this rank for a save.

        Raises:
            UnsupportedError: The save was requested with `use_collectives=False`.
            BadStepError: Neither this save nor an earlier one was given a `checkpoint_id`.
        """
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError("without collectives no step is whole; use_collectives=True")
        self._number()
        self._rank = kwargs.get("rank") or 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Store the tensors and other values in `plan` as this rank's part of the step.

        They are durable when the method returns.

        Raises:
            TakenPartError: Another checkpoint has the part's name, RUN/part-RANK@STEP.
            StoreError: The part cannot be saved.
            UnsupportedArrayError: An array in the part cannot be saved.
            NamedTwiceError: A tensor and another value would be stored under the same name.
        """
        held: dict[str, torch.Tensor | NamedValue] = {}
        results = []
        for item in plan.items:
            name, value = _resolved(item, planner)
            if name in held:
                what = f"a tensor and another value are both stored as {name!r}"
                raise NamedTwiceError.at(self.run_id, what, name=name)
            held[name] = value
        self._save(self._rank, held)  # first: what cannot be stored may have no size either
        for item, value in zip(plan.items, held.values(), strict=True):
            shard = item.type is WriteItemType.SHARD
            results.append(WriteResult(item.index, value.nbytes, storage_data=shard))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Merge the parts of all ranks into one step. DCP calls this on the coordinator.

        Raises:
            NamedTwiceError: Two ranks have saved tensors with the same name.
            KeptStepError: The step exists and is kept.
            NotATrainingError: An imported checkpoint has the step's name.
        """
        step = self._number()
        shards = {each.index.fqn: each.storage_data for held in results for each in held}
        blob = _to_json(metadata, shards)
        meta = self._save(_META, {_METADATA: NamedValue(_METADATA, "U8", (len(blob),), blob)})
        notes = Notes(self.run_id, step, _ADAPTER, part=self._weights)
        # The part with the small files is the first: their pieces come first in a manifest.
        if self._order is None:
            self._order = order_of(meta.store, self.run_id)
        merge(meta.store, notes, [_META, *range(len(results))], self._order)
        forget_parts(meta.store, self.run_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Return whether `checkpoint_id` can be the number of a step."""
        return str(checkpoint_id).isdecimal()

    def _save(
        self, rank: int | str, held: Mapping[str, torch.Tensor | NamedValue]
    ) -> CheckpointStore:
        # The last part to be stored has the longest name: is it one?
        step_name(part_run(self.run_id, _META), self._number())
        part = self._part(rank)
        check_free(part.store, part.run_id, self._number())
        part.save(held, self._number())
        return part

    def _part(self, rank: int | str) -> CheckpointStore:
        """Return the run that a rank saves into, kept because it remembers what it saved last."""
        if rank not in self._parts:
            config = self._config if rank == _META else None
            run = part_run(self.run_id, rank)
            self._parts[rank] = CheckpointStore(
                self._root, run, _AsIs(), compress=self._compress, config=config
            )
        return self._parts[rank]

    def _number(self) -> int:
        if self._step is None:
            raise BadStepError.at(f"run {self.run_id!r}", "no checkpoint_id was given")
        return self._step


class _AsIs:
    """An adapter for values that already have their final names."""

    name = PART_ADAPTER

    def extract(self, model: Any) -> Any:
        return model

    def reconstruct(self, tensors: Any, original: Any = None) -> Any:
        return dict(tensors)


def _step_of(checkpoint_id: object) -> int:
    """Return the step that a `checkpoint_id` names: a number, or its digits."""
    text = str(checkpoint_id)
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise BadStepError.at("checkpoint_id", f"the step {checkpoint_id!r}", step=text)
    return int(text)


def _resolved(item: WriteItem, planner: SavePlanner) -> tuple[str, torch.Tensor | NamedValue]:
    """Return the value to be stored and its name: a tensor on any device, or bytes."""
    data = planner.resolve_data(item)
    if isinstance(data, BytesIO):
        name, blob = _bytes_name(item.index), data.getbuffer()
        return name, NamedValue(name, "U8", (blob.nbytes,), blob)
    return _tensor_name(item.index, shard=item.type is WriteItemType.SHARD), data.detach()


class ChangedStepError(AdvisedError):
    """A step was saved while a load began, so parts of two steps would be loaded.

    The load has failed on all ranks. Some of the tensors to be loaded may have new values already.
    """

    advice = "give `checkpoint_id`, or load again with a new StoreReader, while no step is saved"


class StoreReader(StorageReader):
    """A DCP storage reader for steps that `StoreWriter` has saved, on any number of ranks.

    `checkpoint_id` is the number of the step. Without it, the first load reads the latest step, and
    each later load reads the same step as the load before. Every byte that is read is verified. All
    ranks load the same content, or none: if a step is saved while they look it up, they may find
    different ones, and the load fails with a ChangedStepError.
    """

    def __init__(self, root: StrPath, run_id: str) -> None:
        """Open the run `run_id` in the store in the folder `root`.

        Raises:
            NotAStoreError: There is no store at `root`.
            BadNameError: `run_id` is not a valid name of a run.
        """
        super().__init__()
        self._run = CheckpointStore(root, run_id)
        self._step: int | None = None
        self._manifest = ""
        self._shards: dict[str, bool] = {}

    def reset(self, checkpoint_id: "StrPath | int | None" = None) -> None:
        """Set the step of the next load to `checkpoint_id`; None stands for the latest step.

        DCP calls this before each load to which a `checkpoint_id` is passed.

        Raises:
            BadStepError: `checkpoint_id` does not consist of digits, as 7 and "7" do.
        """
        self._step = None if checkpoint_id is None else _step_of(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata that DCP has saved with the step.

        Raises:
            UnknownStepError: The run has no such step.
            UnsupportedError: The step was not saved by `StoreWriter`.
            DamagedStateError: The stored metadata is not valid.
        """
        self._step = self._run.latest() if self._step is None else self._step
        if self._step is None:
            what = f"the run {self._run.run_id!r} has no step"
            raise UnknownStepError.at(self._run.store.path, what)
        with self._open() as checkpoint:
            self._manifest = checkpoint.manifest
            names = {tensor.name for tensor in checkpoint}
            if _METADATA not in names:
                raise UnsupportedError(
                    f"{checkpoint.name} was not saved by StoreWriter; load it with CheckpointStore"
                )
            metadata, self._shards = _from_json(bytes(checkpoint.read(_METADATA)), checkpoint.name)
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing, because the store is already open."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note in the plan which step this rank has found."""
        return replace(plan, storage_data=(self._step, self._manifest))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks have found the same step. DCP calls this on the coordinator.

        Raises:
            ChangedStepError: They have not.
        """
        if len(found := {plan.storage_data for plan in plans}) > 1:
            steps = ", ".join(sorted({str(step) for step, _ in found}))
            raise self._changed(f"ranks have found different content for the step to load: {steps}")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items in the plan into the tensors that `planner` provides for them.

        Raises:
            ChangedStepError: The step was saved again since the metadata was read.
            CorruptTensorError: The store has no intact copy of a tensor.
            MissingObjectError: The store has lost an object.
        """
        wanted: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            wanted[self._name(item)].append(item)
        with self._open() as checkpoint:
            if checkpoint.manifest != self._manifest:
                raise self._changed(f"{checkpoint.name} was saved again while it was loaded")
            for name, items in wanted.items():
                _load_items(checkpoint, checkpoint[name], items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Return whether `checkpoint_id` can be the number of a step."""
        return str(checkpoint_id).isdecimal()

    def _open(self) -> StoredCheckpoint:
        assert self._step is not None, "DCP reads the metadata before anything else"
        return self._run.store.checkpoint(step_name(self._run.run_id, self._step))

    def _changed(self, what: str) -> ChangedStepError:
        return ChangedStepError.at(self._run.store.path, what, run=self._run.run_id)

    def _name(self, item: ReadItem) -> str:
        index: MetadataIndex = item.storage_index
        if item.type is LoadItemType.BYTE_IO:
            return _bytes_name(index)
        return _tensor_name(index, shard=self._shards[index.fqn])


def _load_items(
    checkpoint: StoredCheckpoint, stored: StoredTensor, items: list[ReadItem], planner: LoadPlanner
) -> None:
    """Read one tensor and load each item from its part of that tensor."""
    data = checkpoint.read(stored)
    if items[0].type is LoadItemType.BYTE_IO:
        for item in items:
            planner.load_bytes(item, BytesIO(data))
        return
    whole = _tensor(stored, data)
    for item in items:
        part = whole
        for axis, (start, length) in enumerate(
            zip(item.storage_offsets, item.lengths, strict=True)
        ):
            part = part.narrow(axis, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(part)
        planner.commit_tensor(item, target)


def _tensor(stored: StoredTensor, data: bytearray) -> torch.Tensor:
    dtype = next(dtype for dtype, name in dtype_names().items() if name == stored.dtype)
    if not data:
        return torch.empty(stored.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(stored.shape)


def _tensor_name(index: MetadataIndex, *, shard: bool) -> str:
    """Return the store's name of a tensor, or of a shard, whose name includes its offsets."""
    if not shard:
        return index.fqn
    return f"{_SHARD}{','.join(map(str, index.offset or ()))} {index.fqn}"


def _bytes_name(index: MetadataIndex) -> str:
    """Return the name in the store of a value that is not a tensor."""
    return _BYTES + index.fqn


def _to_json(metadata: Metadata, shards: Mapping[str, bool]) -> bytes:
    """Encode the metadata; `shards` tells which tensors were written as shards.

    Raises:
        UnsupportedError: A custom planner keeps data there other than paths.
    """
    parts = {
        name: _of_tensor(held, shards.get(name, False))
        for name, held in metadata.state_dict_metadata.items()
        if isinstance(held, TensorStorageMetadata)
    }
    values = [name for name in metadata.state_dict_metadata if name not in parts]
    paths = metadata.planner_data
    if not _are_paths(paths):
        raise UnsupportedError(
            f"a planner with data of its own ({type(paths).__name__}): StoreWriter keeps what "
            "DefaultSavePlanner does; use FileSystemWriter with this planner"
        )
    return json.dumps({"tensors": parts, "bytes": values, "paths": paths}).encode()


def _from_json(blob: bytes, where: str) -> tuple[Metadata, dict[str, bool]]:
    """Decode the metadata of a step.

    Raises:
        DamagedStateError: The bytes are not valid metadata.
    """
    try:
        found = json.loads(blob)
        state: dict[str, Any] = {name: BytesStorageMetadata() for name in found["bytes"]}
        state |= {name: _to_tensor(each) for name, each in found["tensors"].items()}
        paths = found["paths"] and {name: tuple(path) for name, path in found["paths"].items()}
        shards = {name: bool(each["shard"]) for name, each in found["tensors"].items()}
    except _UNFIT as error:
        raise DamagedStateError.at(where, f"no metadata of a checkpoint: {error}") from error
    return Metadata(state, planner_data=paths, storage_data={}), shards


def _are_paths(paths: object) -> bool:
    return paths is None or (
        isinstance(paths, dict)
        and all(isinstance(part, str | int) for path in paths.values() for part in path)
    )


def _of_tensor(held: TensorStorageMetadata, shard: bool) -> dict[str, object]:
    return {
        "dtype": str(held.properties.dtype).removeprefix("torch."),
        "grad": held.properties.requires_grad,
        "size": list(held.size),
        "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in held.chunks],
        "shard": shard,
    }


def _to_tensor(found: dict[str, Any]) -> TensorStorageMetadata:
    dtype = getattr(torch, found["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(found["dtype"])
    chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in found["chunks"]
    ]
    properties = TensorProperties(dtype=dtype, requires_grad=bool(found["grad"]))
    return TensorStorageMetadata(properties, torch.Size(found["size"]), chunks)
