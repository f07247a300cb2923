"""Files that are refused: with which error, and as which kind of it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from tensor_dedup.formats.errors import (
    CheckpointFault,
    CheckpointFilesError,
    FormatFault,
    GgufError,
    GgufFault,
    JsonFault,
    JsonTextError,
    LocatedError,
    PytorchError,
    PytorchFault,
    SafetensorsError,
    SafetensorsFault,
    TensorIndexError,
    TensorIndexFault,
)

ERRORS: Mapping[type[FormatFault], type[LocatedError[Any]]] = {
    CheckpointFault: CheckpointFilesError,
    GgufFault: GgufError,
    JsonFault: JsonTextError,
    PytorchFault: PytorchError,
    SafetensorsFault: SafetensorsError,
    TensorIndexFault: TensorIndexError,
}


@contextmanager
def refused(
    kind: FormatFault, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[LocatedError[Any]]]:
    """Expect the error of this very class and kind."""
    with pytest.raises(LocatedError, match=match) as caught:
        yield caught
    assert (caught.type, caught.value.kind) == (ERRORS[type(kind)], kind)
