"""Subclasses of vLLM's loaders for load formats that its default loader does not read.

During a load with this package, they yield deferred tensors, which have no data, instead of opening
files. At other times they do the same as vLLM's loaders.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.model_loader.runai_streamer_loader import RunaiModelStreamerLoader
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
from vllm.transformers_utils.runai_utils import is_runai_obj_uri

from tensor_dedup.loader.deferred.trace import UntraceableError
from tensor_dedup.patches.vllm import weight_iterators

if TYPE_CHECKING:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

_Tensors = Generator[tuple[str, torch.Tensor], None, None]


def _every(_name: str) -> bool:
    return True


class _ShardedState(ShardedStateLoader):
    """The loader of states saved per worker: final tensors, in one or more files per rank."""

    def iterate_over_files(self, paths: Iterable[str], *args: Any, **options: Any) -> _Tensors:
        open_files = weight_iterators.active()
        if open_files is None:
            yield from super().iterate_over_files(paths, *args, **options)
        else:
            yield from open_files(weight_iterators.in_order(paths), _every)

    @staticmethod
    def _filter_subtensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Do what vLLM's own method does by address, which deferred tensors do not have.

        Of tensors that lie in one memory the one that covers the others is kept, and of equal ones
        the first by name.
        """
        kept: dict[str, torch.Tensor] = {}
        taken: dict[int, list[tuple[int, int]]] = {}
        for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
            start = int(tensor.storage_offset()) * tensor.itemsize
            end = start + tensor.nbytes
            ranges = taken.setdefault(tensor.untyped_storage()._cdata, [])
            if start < end and not any(low <= start and end <= high for low, high in ranges):
                kept[name] = tensor
                ranges.append((start, end))
        return kept


class _RunaiStreamer(RunaiModelStreamerLoader):
    """The loader of streamed safetensors files; those in a folder are read like any others."""

    def _get_weights_iterator(
        self, model_or_path: str, revision: str | None, *args: Any, **options: Any
    ) -> _Tensors:
        # vLLM 0.33 adds which weights a model does not use, to leave out files of those alone.
        # Deferred tensors that nobody uses are not read anyway.
        open_files = weight_iterators.active()
        if open_files is None:
            yield from super()._get_weights_iterator(model_or_path, revision, *args, **options)
            return
        if is_runai_obj_uri(model_or_path):
            raise UntraceableError("its weights are streamed from object storage")
        files = self._prepare_weights(model_or_path, revision)
        yield from open_files(weight_iterators.in_order(files), _every)


LOADERS: Mapping[str, type[BaseModelLoader]] = {
    "sharded_state": _ShardedState,
    "runai_streamer": _RunaiStreamer,
}
