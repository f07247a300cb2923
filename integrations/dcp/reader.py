"""Reading: what a rank's plan asks for, verified, into the tensors that are there."""

from collections import defaultdict
from io import BytesIO
from os import PathLike
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.integrations.dcp.metadata import METADATA, bytes_name, from_json, tensor_name
from tensor_dedup.integrations.dcp.writer import step_of
from tensor_dedup.store.checkpoints import CheckpointStore
from tensor_dedup.store.checkpoints.errors import UnknownStepError
from tensor_dedup.store.checkpoints.state import dtype_names
from tensor_dedup.store.checkpoints.step_names import step_name
from tensor_dedup.store.reading.reader import StoredCheckpoint, StoredTensor


class StoreReader(StorageReader):
    """DCP's way out of a store: steps that StoreWriter has saved, on any number of ranks.

    `checkpoint_id` is the step; without one the latest is read. Every byte is verified.
    """

    def __init__(self, root: str | PathLike[str], run_id: str) -> None:
        """NotAStoreError, BadNameError."""
        super().__init__()
        self._run = CheckpointStore(root, run_id)
        self._step: int | None = None
        self._shards: dict[str, bool] = {}

    def reset(self, checkpoint_id: "str | PathLike[str] | int | None" = None) -> None:
        """Called before each load. BadStepError."""
        self._step = None if checkpoint_id is None else step_of(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the step holds. UnknownStepError; UnsupportedError: StoreWriter did not save it."""
        self._step = self._run.latest() if self._step is None else self._step
        if self._step is None:
            what = f"the run {self._run.run_id!r} has no step"
            raise UnknownStepError.at(self._run.store.path, what)
        with self._open() as checkpoint:
            names = {tensor.name for tensor in checkpoint}
            if METADATA not in names:
                raise UnsupportedError(
                    f"{checkpoint.name} was not saved by StoreWriter; load it with CheckpointStore"
                )
            metadata, self._shards = from_json(bytes(checkpoint.read(METADATA)), checkpoint.name)
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing is to be done."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan asks for. CorruptTensorError, MissingObjectError."""
        wanted: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            wanted[self._name(item)].append(item)
        with self._open() as checkpoint:
            for name, items in wanted.items():
                _give(checkpoint, checkpoint[name], items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Whether it is a step."""
        return str(checkpoint_id).isdecimal()

    def _open(self) -> StoredCheckpoint:
        return self._run.store.checkpoint(step_name(self._run.run_id, self._step or 0))

    def _name(self, item: ReadItem) -> str:
        index: MetadataIndex = item.storage_index
        if item.type is LoadItemType.BYTE_IO:
            return bytes_name(index)
        return tensor_name(index, shard=self._shards[index.fqn])


def _give(
    checkpoint: StoredCheckpoint, stored: StoredTensor, items: list[ReadItem], planner: LoadPlanner
) -> None:
    """Read one tensor, and give each of the items its part of it."""
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
