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
from tensor_dedup.loader.torch_dtypes import dtype_name
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
    packed = dict(_packed(model))
    if None in packed.values():
        return None
    named = {
        name: tensor
        for name, tensor in _tensors(model)
        if name not in packed and tensor is not None
    }
    known = shared_digests({id(each): each for each in named.values()}.values())
    hashed: dict[int, list[Any]] = {}
    entries = [[name, *each] for name, each in packed.items() if each is not None]
    for name, tensor in named.items():
        if id(tensor) not in hashed:
            described = _described(tensor, known.get(id(tensor)))
            if described is None:
                return None
            hashed[id(tensor)] = described
        entries.append([name, *hashed[id(tensor)]])
    return entries


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a state dict would have: all parameters, and the buffers that are kept."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, buffer


def _described(tensor: torch.Tensor, known: str | None) -> list[Any] | None:
    """Return dtype, shape, digest, and stride if needed; hash the bytes unless they are known."""
    data = param_data(tensor)
    if data.is_meta:
        return None
    if known is None and not sharable_anywhere(data):
        data = data.resolve_conj().resolve_neg()
        data = data.to_dense() if data.layout is not torch.strided else data.contiguous()
        if not sharable_anywhere(data):
            data = data.view(torch.uint8)  # of a dtype without a name
    found = digest_of(data) if known is None else known
    entry = [_dtype(tensor), tuple(data.shape), found]
    return entry if data.is_contiguous() else [*entry, tuple(data.stride())]


def _dtype(tensor: torch.Tensor) -> str:
    try:
        return dtype_name(tensor.dtype)
    except UnsupportedError:
        return str(tensor.dtype)


def _packed(model: nn.Module) -> Iterator[tuple[str, list[Any] | None]]:
    """Yield the name of each packed weight, and how it is listed: with the name of what was packed.

    That name is made of the digests of the tensors of the checkpoint that it consists of. If it is
    not known, None is yielded.
    """
    for path, module in model.named_modules():
        for form_of in PACKED_FORMS:
            form = form_of(module)
            if form is not None:
                plain = getattr(getattr(form, RECORD, None), "plain_name", None)
                name = f"{path}.weight" if path else "weight"
                yield name, None if plain is None else ["packed", (), plain]
