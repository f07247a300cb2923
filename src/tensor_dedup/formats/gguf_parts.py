"""A GGUF model that is split into several files, each of which says in its header which part it is.

Parts are called `NAME-00001-of-00003.gguf` and so on. llama.cpp finds them by these names.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from tensor_dedup.formats.errors import CheckpointFault, CheckpointFilesError
from tensor_dedup.formats.gguf import GgufHeader
from tensor_dedup.formats.weights import Header

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MOST: Final = 99_999


@dataclass(frozen=True, slots=True)
class GgufPart:
    """A part of a split model: its path, its number (from 1), and how many parts there are.

    `tensors` is the number of tensors in all parts, or None if the header does not say it.
    """

    path: Path
    number: int
    count: int
    tensors: int | None

    @classmethod
    def of(cls, path: Path, header: Header) -> Self | None:
        """Return which part the file at `path` is, or None if it is no part of a split model.

        Raises:
            CheckpointFilesError: The header names a part that cannot be, or another than the name.
        """
        if not isinstance(header, GgufHeader):
            return None
        count = header.metadata.get("split.count", 0)
        if not isinstance(count, int) or count <= 1:
            return None
        number, tensors = (
            header.metadata.get("split.no"),
            header.metadata.get("split.tensors.count"),
        )
        if not isinstance(number, int) or not 0 <= number < count <= _MOST:
            raise _wrong(path, f"it says that it is part {number} of {count}, counted from 0")
        part = cls(path, number + 1, count, tensors if isinstance(tensors, int) else None)
        named = _NAME.fullmatch(path.name)
        if named is None or (int(named["number"]), int(named["count"])) != (number + 1, count):
            called = f"NAME-{number + 1:05d}-of-{count:05d}.gguf"
            raise _wrong(path, f"part {number + 1} of {count} of a model is not called {called}")
        return part

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the files of all parts, in order."""
        named = _NAME.fullmatch(self.path.name)
        assert named is not None  # `of` has checked it
        numbers = range(1, self.count + 1)
        return tuple(f"{named['stem']}-{n:05d}-of-{self.count:05d}.gguf" for n in numbers)

    def check_first(self) -> None:
        """Check that this is the first part, which stands for the whole model.

        Raises:
            CheckpointFilesError: It is another part; the error names the first one.
        """
        if self.number > 1:
            first = self.path.with_name(self.names[0])
            raise CheckpointFilesError.at(
                CheckpointFault.LATER_PART,
                str(self.path),
                f"part {self.number} of {self.count} of a model; name the first part, {first}",
                first=str(first),
            )

    def check(self, headers: Mapping[str, Header]) -> None:
        """Check that `headers`, by file name, has all parts of the model with all its tensors.

        Raises:
            CheckpointFilesError: A part is missing or belongs to another model.
        """
        for number, name in enumerate(self.names, 1):
            path = self.path.with_name(name)
            if name not in headers:
                raise CheckpointFilesError.at(
                    CheckpointFault.MISSING_SHARD,
                    str(self.path),
                    f"part {number} of {self.count}, {name}, is not there",
                    shard=name,
                )
            part = GgufPart.of(path, headers[name])
            if part is None:
                raise _wrong(path, f"its header does not say that it is part {number} of a model")
        held = sum(len(headers[name].tensors) for name in self.names)
        if self.tensors is not None and held != self.tensors:
            raise _wrong(self.path, f"its {self.count} parts have {held} of {self.tensors} tensors")


def _wrong(path: Path, what: str) -> CheckpointFilesError:
    return CheckpointFilesError.at(CheckpointFault.PART, str(path), what)
