"""Writing: every rank stores what is new of its part, the coordinator makes a step of them."""

from collections.abc import Mapping
from io import BytesIO
from os import PathLike
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.integrations.dcp.metadata import METADATA, bytes_name, tensor_name, to_json
from tensor_dedup.store.checkpoints import CheckpointStore
from tensor_dedup.store.checkpoints.errors import BadStepError
from tensor_dedup.store.checkpoints.notes import Notes
from tensor_dedup.store.checkpoints.sharded import (
    PART_ADAPTER,
    check_free,
    forget_parts,
    merge,
    part_run,
)
from tensor_dedup.store.checkpoints.state import NamedValue
from tensor_dedup.store.checkpoints.step_names import check_run

_META = "meta"
_ADAPTER = "dcp"
StrPath = str | PathLike[str]


class StoreWriter(StorageWriter):
    """DCP's way into a store: `checkpoint_id` is the step, a whole number from 0 on.

    Ranks may be processes on one machine or on several that have one file system with locks. A
    tensor that any step of any run, or any rank, has stored already is not stored again. A step has
    its name when the coordinator has finished it; until then nobody sees it, and what ranks that
    died have left is forgotten when the next step is finished. One save at a time: wait for the
    future of an `async_save` before the next. Pickled, it opens the store anew.
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
        """As CheckpointStore: `config` and `weights` make unsharded steps loadable by engines.

        BadNameError. The store is opened, or made, with the first step.
        """
        super().__init__()
        self.run_id = check_run(run_id)
        self._root, self._compress = root, compress
        self._config, self._weights = config, weights
        self._step: int | None = None
        self._parts: dict[int | str, CheckpointStore] = {}
        self._rank = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_parts": {}}

    def close(self) -> None:
        """Let go of what is held between saves."""
        for part in self._parts.values():
            part.close()
        self._parts = {}

    def reset(self, checkpoint_id: "StrPath | int | None" = None) -> None:
        """Called before each save. BadStepError."""
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called on every rank. UnsupportedError: saves without collectives."""
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError("without collectives no step is whole; use_collectives=True")
        self._number()
        self._rank = kwargs.get("rank") or 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Store this rank's part; durable when it returns. StoreError, UnsupportedArrayError.

        TakenPartError: a run RUN/part-RANK that is no part of this one has this step.
        """
        held: dict[str, torch.Tensor | NamedValue] = {}
        results = []
        for item in plan.items:
            name, value = _resolved(item, planner)
            held[name] = value
            shard = item.type is WriteItemType.SHARD
            results.append(WriteResult(item.index, value.nbytes, storage_data=shard))
        self._save(self._rank, held)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Give the step its name. The coordinator's. NamedTwiceError, PinnedStepError."""
        step = self._number()
        shards = {each.index.fqn: each.storage_data for held in results for each in held}
        blob = to_json(metadata, shards)
        meta = self._save(_META, {METADATA: NamedValue(METADATA, "U8", (len(blob),), blob)})
        notes = Notes(self.run_id, step, _ADAPTER, part=self._weights)
        # The part with the small files is the first: their pieces come first in a manifest.
        merge(meta.store, notes, [_META, *range(len(results))])
        forget_parts(meta.store, self.run_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Whether it is a step."""
        return str(checkpoint_id).isdecimal()

    def _save(
        self, rank: int | str, held: Mapping[str, torch.Tensor | NamedValue]
    ) -> CheckpointStore:
        part = self._part(rank)
        check_free(part.store, part.run_id, self._number())
        part.save(held, self._number())
        return part

    def _part(self, rank: int | str) -> CheckpointStore:
        """What a rank saves into. Kept, as it knows what it saved last."""
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
    """Values that have their names already."""

    name = PART_ADAPTER

    def extract(self, model: Any) -> Any:
        return model

    def reconstruct(self, tensors: Any, original: Any = None) -> Any:
        return dict(tensors)


def step_of(checkpoint_id: object) -> int:
    """The step that a `checkpoint_id` names: a number, or its digits. BadStepError."""
    text = str(checkpoint_id)
    if not (text.isascii() and text.isdecimal()):
        raise BadStepError.at("checkpoint_id", f"the step {checkpoint_id!r}", step=text)
    return int(text)


def _resolved(item: WriteItem, planner: SavePlanner) -> tuple[str, torch.Tensor | NamedValue]:
    """The value to be stored, and its name: a tensor on any device, or bytes."""
    data = planner.resolve_data(item)
    if isinstance(data, BytesIO):
        name, blob = bytes_name(item.index), data.getbuffer()
        return name, NamedValue(name, "U8", (blob.nbytes,), blob)
    return tensor_name(item.index, shard=item.type is WriteItemType.SHARD), data.detach()
