"""The digests of a model in memory: of the checkpoint that was loaded, and of its weights now.

Each loaded model has a `ModelDigests`, which its load report follows. The digest of the checkpoint
is a fact of the load. The digest of the weights is that of the bytes at the moment of asking:
shared tensors are known by their residents if no page of them was written to, and everything else
is hashed.
"""

from __future__ import annotations

import logging
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from tensor_dedup.digest import weights_root
from tensor_dedup.errors import TensorDedupError, UnsupportedError
from tensor_dedup.loader.report import ModelReport
from tensor_dedup.loader.residents.param_data import param_data
from tensor_dedup.loader.residents.registry import RECORD
from tensor_dedup.loader.residents.resident import digest_of, sharable_anywhere
from tensor_dedup.loader.torch_dtypes import dtype_name, has_name
from tensor_dedup.loader.unsharing.lookup import shared_digests

if TYPE_CHECKING:
    from tensor_dedup.loader.checkpoint_io.checkpoint_contents import CheckpointContents

_log = logging.getLogger(__name__)
_VERSION_CHARACTERS: Final = 16
# Functions that return what holds the packed form of a layer's `weight`, or None if it has none.
PACKED_FORMS: Final[list[Callable[[nn.Module], object | None]]] = []


class ModelDigests:
    """The digests of the models of one load. Safe from any thread.

    - `token` is drawn anew whenever the weights may have changed. So two moments with one token
      have the same weights, unless a program has written to them by itself.
    - `as_loaded` is True until then.
    """

    def __init__(
        self, models: Mapping[str, nn.Module], contents: CheckpointContents | None
    ) -> None:
        """Describe `models`, by the name of each within the load, which were just loaded.

        A model that is loaded by itself has the name "". `contents` are the tensors of their
        checkpoint, if these are known.
        """
        self._models = {name: weakref.ref(model) for name, model in models.items()}
        self._contents = contents
        self.token = secrets.token_hex(16)
        self.as_loaded = True

    @property
    def known_checkpoint(self) -> str | None:
        """The digest of the checkpoint that was loaded, or None if it is not known yet."""
        return None if self._contents is None else self._contents.known

    def checkpoint(self) -> str | None:
        """Return the digest of the checkpoint that was loaded, or None if it cannot be known.

        What was not hashed yet is hashed now and remembered.
        """
        if self._contents is None:
            return None
        try:
            return self._contents.digest()
        except (TensorDedupError, OSError) as error:
            _log.warning("the digest of a checkpoint is not known: %s", str(error))
            return None

    def weights(self) -> str | None:
        """Return the digest of the weights now, or None if it cannot be known.

        It covers all parameters, and the buffers that a state dict has. A packed weight counts with
        the bytes that were packed. No thread may write to the weights meanwhile.
        """
        models = [(name, each()) for name, each in self._models.items()]
        entries: list[list[Any]] = []
        for name, model in models:
            # Without this, classes of parameters intercept every attribute that is read.
            with torch._C.DisableTorchFunctionSubclass():
                found = None if model is None else _entries(model)
            if found is None:
                return None
            entries += ([f"{name}.{own}" if name else own, *rest] for own, *rest in found)
        return weights_root(entries)

    def note_write(self) -> None:
        """Record that the weights may no longer be those that were loaded."""
        self.as_loaded = False
        self.token = secrets.token_hex(16)

    def follow(self, model: nn.Module) -> None:
        """Let these be the digests of `model`, a single one, which has taken over the weights."""
        self._models = {"": weakref.ref(model)}


_digests: Final[weakref.WeakKeyDictionary[nn.Module, ModelDigests]] = weakref.WeakKeyDictionary()


def digests_of(model: nn.Module) -> ModelDigests | None:
    """Return the digests of a model that was loaded with this package, or None for any other."""
    return _digests.get(model)


def keep(
    report: ModelReport, models: Mapping[str, nn.Module], contents: CheckpointContents | None
) -> None:
    """Let `report` and `models`, which were just loaded, have their digests."""
    digests = ModelDigests(models, contents)
    for model in models.values():
        _digests[model] = digests
    report.follow(digests)


def note_write(model: nn.Module) -> None:
    """Record that something is about to write to the weights of `model`."""
    digests = _digests.get(model)
    if digests is not None:
        digests.note_write()


def take_over(model: nn.Module, fresh: nn.Module) -> None:
    """Give `model` the digests of `fresh`, whose weights it has taken over.

    The report of the load of `fresh` follows `model` from now on.
    """
    note_write(model)
    digests = _digests.pop(fresh, None)
    if digests is None:
        return
    digests.follow(model)
    _digests[model] = digests


def weight_version(loaded: nn.Module | ModelReport) -> str:
    """Return a short text that names the weights of a loaded model, for `set_weight_version`.

    `loaded` is the model or the report of its load. The text has the first 16 characters of the
    checkpoint's digest. If the weights are no longer those of a checkpoint, or its digest cannot be
    known, it is `weights:` and the first 16 characters of the digest of the weights.

    Raises:
        UnsupportedError: Neither digest can be known.
    """
    live = loaded.live if isinstance(loaded, ModelReport) else _digests.get(loaded)
    found = None
    if not isinstance(live, ModelDigests) or live.as_loaded:
        found = loaded.checkpoint_digest if isinstance(loaded, ModelReport) else None
        found = live.checkpoint() if found is None and live is not None else found
    if found is not None:
        return short_version(found)
    weights = None if live is None else live.weights()
    if weights is None:
        raise UnsupportedError(
            "the weights of this model have no digest that could be known here; give a version of "
            "your own"
        )
    return f"weights:{short_version(weights)}"


def short_version(digest: str) -> str:
    """Return the part of a digest that versions of weights are named by."""
    return digest[:_VERSION_CHARACTERS]


def _entries(model: nn.Module) -> list[list[Any]] | None:
    """List the tensors of a model for `weights_root`; None if the bytes of one are hidden."""
    entries: list[list[Any]] = []
    named: list[tuple[str, int]] = []
    data: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        packed = _packed(module)
        if packed is not None:
            if packed[-1] is None:
                return None
            entries.append([f"{prefix}weight", *packed])
        for name, tensor in _tensors(module):
            if packed is None or name != "weight":
                named.append((prefix + name, id(tensor)))
                if id(tensor) not in data:
                    data[id(tensor)] = param_data(tensor)
    known = shared_digests(data.values())
    described: dict[int, list[Any]] = {}
    for key, tensor in data.items():
        found = _described(tensor, known.get(id(tensor)))
        if found is None:
            return None
        described[key] = found
    entries += ([name, *described[key]] for name, key in named)
    return entries


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a state dict would have of a module itself: parameters, and kept buffers."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def _described(data: torch.Tensor, known: str | None) -> list[Any] | None:
    """Return dtype, shape, digest, and stride if needed; hash the bytes unless they are known."""
    if known is None:
        if data.is_meta:
            return None
        if not sharable_anywhere(data):
            data = _plain(data)
        known = digest_of(data)
    entry = [_dtype(data.dtype), tuple(data.shape), known]
    return entry if data.is_contiguous() else [*entry, tuple(data.stride())]


def _plain(data: torch.Tensor) -> torch.Tensor:
    """Return a tensor with gaps, of an unusual layout or of a dtype without a name as bytes."""
    data = data.resolve_conj().resolve_neg()
    data = data.to_dense() if data.layout is not torch.strided else data.contiguous()
    return data if sharable_anywhere(data) else data.view(torch.uint8)


def _dtype(dtype: torch.dtype) -> str:
    return dtype_name(dtype) if has_name(dtype) else str(dtype)


def _packed(module: nn.Module) -> list[Any] | None:
    """Return how the packed weight of a layer is listed: with the name of what was packed.

    That name is made of the digests of the tensors of the checkpoint that it consists of. It is
    None if it is not known. A layer without a packed weight gives None.
    """
    for form_of in PACKED_FORMS:
        form = form_of(module)
        if form is not None:
            return ["packed", (), getattr(getattr(form, RECORD, None), "plain_name", None)]
    return None
