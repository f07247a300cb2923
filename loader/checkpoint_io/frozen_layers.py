"""Frozen layers: layers of a checkpoint that a load takes from the base model instead.

The chosen tensors of the base replace those of the checkpoint before anything is read. From then
on, digests, recipes, look-ups and reads concern the base's bytes. So a model that was loaded with
frozen layers is never confused with a model that was loaded without. The replaced tensors of the
checkpoint are neither read nor hashed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensor_dedup.config import FrozenBase
from tensor_dedup.errors import ConfigError, UnsupportedError
from tensor_dedup.formats.checkpoint import open_checkpoint
from tensor_dedup.formats.hub_cache import locate
from tensor_dedup.formats.layers.layer_pairs import chosen, layers_of
from tensor_dedup.formats.layers.quantisation import difference, settings_in
from tensor_dedup.loader.checkpoint_io.from_store import FromDisk, FromStore, store_behind
from tensor_dedup.loader.checkpoint_io.hints import HintIndex
from tensor_dedup.loader.checkpoint_io.stub_folder import resolve
from tensor_dedup.store.store import LocalStore
from tensor_dedup.types import STORE_SCHEME

if TYPE_CHECKING:
    from tensor_dedup.config import TensorDedupConfig
    from tensor_dedup.loader.checkpoint_io.from_store import OpenCheckpoint
    from tensor_dedup.loader.checkpoint_io.sources import Placed, SourceFile, SourceTensor

_Place = tuple[Path, str]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of either checkpoint: what it looks like, and the source it lies in."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    place: _Place
    source: SourceTensor
    placed: Placed | None

    @classmethod
    def of(
        cls, file: SourceFile, prefix: str = "", leave: Collection[str] = ()
    ) -> Iterator[_Tensor]:
        for name, source, placed in file.named():
            if name in leave:
                continue
            dtype, shape = (placed or source.spec).dtype, (placed or source.spec).shape
            place = (file.path, name)
            yield cls(prefix + name, dtype, shape, source.spec.nbytes, place, source, placed)


class FrozenLayers:
    """The tensors of a base model that replace tensors of the checkpoint in one load.

    The base's files stay open until `close`. Not thread-safe.
    """

    def __init__(self, config: TensorDedupConfig, *, trust: bool) -> None:
        """Read the configuration; `choose` opens the base later.

        `config.frozen_base` must be set. With `trust`, known digests of the base's tensors are
        used.
        """
        self.wanted = FrozenBase.from_any(config.frozen_base)
        self.files: list[SourceFile] = []
        self._config, self._trust = config, trust
        self._opening: OpenCheckpoint | None = None
        self._instead: dict[_Place, _Tensor] | None = None

    def choose(self, files: Sequence[SourceFile]) -> None:
        """Open the base model and determine which of its tensors replace tensors of `files`.

        `files` are the weights files of the checkpoint. Call it once, with all files: later calls
        have no effect.

        Raises:
            ConfigError: A configured layer does not exist in the checkpoint, or the base model has
                no layer that fits it.
            CheckpointError, StoreError, RemoteError: The base model is missing or cannot be read.
        """
        if self._instead is not None:
            return
        tune = [tensor for file in files for tensor in _Tensor.of(file)]
        try:
            base = list(self._base())
            every = layers_of(tune, base, _quantised_otherwise(base, tune))
            layers = chosen(every, self.wanted.layers)
        except (ConfigError, UnsupportedError) as error:
            raise ConfigError(
                f"frozen_base {self.wanted.base}: {error.message}",
                **{**error.facts, "field": "frozen_base", "base": self.wanted.base},
            ) from error
        self._instead = {t.place: old for layer in layers for t, old in layer.pairs}

    def _base(self) -> Iterator[_Tensor]:
        for path, prefix, leave in self._open():
            assert self._opening is not None
            file = self._opening.open(path)
            self.files.append(file)
            yield from _Tensor.of(file, prefix, leave)

    def _open(self) -> list[tuple[Path, str, Collection[str]]]:
        """Open the base; return the paths of its files, with what precedes the names in them.

        With each path come the names of tensors in the file for which the index names another.
        """
        base, trust = self.wanted.base, self._trust
        if base.startswith(STORE_SCHEME):
            # Each rank is here by itself, and must find the same: RUN@latest is no name.
            where = self._config.store_folder, self._config.remote
            checkout = resolve(base, *where, latest=False)
            store = LocalStore.open(checkout.store, create=False)
            self._opening = FromStore(store, checkout, trust=trust)
            folder = Path(checkout.folder)
            with store.checkpoint(checkout.name) as stored:
                copies = [(folder / each.file, each.tensor) for each in stored.not_indexed]
            paths = [folder / name for name in checkout.weights]
            return [(p, "", {name for file, name in copies if file == p}) for p in paths]
        checkpoint = open_checkpoint(locate(base), follow_links=True)
        behind = store_behind(self._config)
        algorithm = self._config.hash_algorithm
        self._opening = FromDisk(HintIndex(), algorithm, trust=trust, store=behind)
        return [(file.path, file.prefix, file.superseded) for file in checkpoint.files]

    def source(
        self, file: SourceFile, name: str, source: SourceTensor, placed: Placed | None
    ) -> tuple[SourceTensor, Placed | None]:
        """Return the source tensor, and its placement, to load as the tensor `name` of `file`.

        For a tensor of a frozen layer, both are the base model's. Otherwise `source` and `placed`
        are returned unchanged.
        """
        old = (self._instead or {}).get((file.path, name))
        return (source, placed) if old is None else (old.source, old.placed)

    @property
    def bytes_from_store(self) -> int:
        """The number of bytes of the base that were read from a store."""
        return self._opening.bytes_from_store if self._opening is not None else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the `frozen_base` entry of a report.

        The entry contains the base, the layers, and the number and total bytes of the replaced
        tensors.
        """
        taken = [] if self._instead is None else list(self._instead.values())
        return {
            **self.wanted.to_dict(),
            "tensors": len(taken),
            "bytes": sum(tensor.nbytes for tensor in taken),
        }

    def close(self) -> None:
        """Close the base's files. Closing twice has no effect."""
        for file in self.files:
            file.close()
        if self._opening is not None:
            self._opening.close()
            self._opening = None


def _quantised_otherwise(base: Sequence[_Tensor], tune: Sequence[_Tensor]) -> str:
    """Compare what the configurations beside the files say; a checkout of a store has them, too."""
    if not base or not tune:
        return ""
    return difference(*(settings_in(each[0].place[0].parent) for each in (base, tune)))


@contextmanager
def taken_plainly(
    frozen: FrozenLayers, files: Sequence[Path], opening: OpenCheckpoint
) -> Iterator[Callable[[str], SourceTensor | None]]:
    """Context manager: take frozen layers from the base model, in a load without sharing.

    On entry, `opening` opens the checkpoint's `files`, and the tensors to replace are chosen. The
    value of the context manager is a function of a tensor's name. It returns the base model's
    tensor to load instead, or None if the checkpoint's own tensor is to be loaded. On exit, the
    files, `opening` and `frozen` are closed.

    Raises:
        ConfigError: A configured layer does not exist in the checkpoint, or the base model has no
            layer that fits it.
        CheckpointError, StoreError, RemoteError: The base model or one of `files` is missing or
            cannot be read.
        UnsupportedError: The function was called for a tensor that the base model stores as a view
            of another one.
    """
    ours: list[SourceFile] = []
    try:
        for path in files:
            ours.append(opening.open(path))
        frozen.choose(ours)
        named = {name: (file, source) for file in ours for name, source, _ in file.named()}

        def instead(name: str) -> SourceTensor | None:
            if name not in named:
                return None
            file, own = named[name]
            source, placed = frozen.source(file, name, own, None)
            if source is not own and placed is not None:
                raise UnsupportedError(
                    f"{source.place} is a view of another tensor, which a load without sharing "
                    "cannot take from a base; save the base as safetensors",
                    tensor=name,
                )
            return None if source is own else source

        yield instead
    finally:
        for file in ours:
            file.close()
        opening.close()
        frozen.close()
