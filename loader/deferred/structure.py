"""What two recipes have in common beside their digests: the same operations on numbered sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensor_dedup.loader.deferred.layer_records import SourceLocation
from tensor_dedup.loader.deferred.recipe import RecipeBook

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensor_dedup.loader.checkpoint_io.sources import SourceTensor
    from tensor_dedup.loader.deferred.parameters import DeferredParameter


def structure_of(parameters: Sequence[DeferredParameter]) -> tuple[str, tuple[SourceLocation, ...]]:
    """The recipes with sources numbered instead of named, and where the sources are."""
    sources = distinct_sources(parameters)
    numbers = {id(source): number for number, source in enumerate(sources)}
    book = RecipeBook(lambda source: ("source", numbers[id(source)], source.spec.dtype))
    names = [book.digest(each.view) for each in parameters if each.view is not None]
    return " ".join(names), tuple(SourceLocation.of(source) for source in sources)


def distinct_sources(parameters: Sequence[DeferredParameter]) -> list[SourceTensor]:
    """The source tensors of these parameters, each once, in order."""
    return list({id(s): s for each in parameters for s in each.sources}.values())
