"""The ways in which a checkpoint file can lie, one class each.

FormatError
  - NotAFileError         a directory, a pipe or a device, not a regular file
  - JsonTextError         the JSON of a header or an index: JsonEncodingError, BadJsonError,
                          JsonConstantError, JsonNumberError, JsonNestingError, JsonBombError,
                          NotAnObjectError, DuplicateKeyError
  - SafetensorsError
      - of the file:      EmptyFileError, FileTooShortError
      - of the header:    HeaderTooLargeError, HeaderTruncatedError, HeaderStartError, MetadataError
      - of one tensor:    TensorEntryError, UnknownDtypeError, BadShapeError, ShapeOverflowError,
                          BadOffsetsError, OffsetsReversedError, OffsetsBeyondFileError,
                          SubByteError, SizeMismatchError
      - of the layout:    OverlapError, HoleError, TrailingBytesError
  - IndexFileError        a *.index.json is not a mapping from tensors to shards
      - IndexPathError, MissingShardError, IndexTensorError
  - RepeatedTensorError   two files of one checkpoint hold a tensor of the same name
  - GgufError             gguf_errors.py
  - PytorchError          pytorch/errors.py

Each carries the path, the tensor's name where there is one, and the numbers, in its message and in
`facts`. Names are cut to MAX_NAME characters there: a hostile name can be 100 MB long.
"""

from typing import ClassVar, Self

from tensor_dedup.errors import FormatError

MAX_NAME = 200


class LocatedError(FormatError):
    """An error of one file, and perhaps of one tensor in it."""

    advice: ClassVar[str] = "download or save this file again"

    @classmethod
    def at(cls, path: str, what: str, tensor: str | None = None, **facts: object) -> Self:
        """The error for `path` (and `tensor`), its message ending in the next step."""
        where = path
        if tensor is not None:
            facts["tensor"] = shown = shorten(tensor)
            where = f"{path}: tensor {shown!r}"
        return cls(f"{where}: {what}; {cls.advice}", path=path, **facts)


def shorten(text: str) -> str:
    """`text`, or its beginning when it is too long for a message."""
    return text if len(text) <= MAX_NAME else text[:MAX_NAME] + "..."


class NotAFileError(LocatedError):
    """It is a directory, a pipe or a device, not a regular file."""

    advice = "name a regular file"


class JsonTextError(LocatedError):
    """The JSON of a header or an index is broken, or a trap."""


class JsonEncodingError(JsonTextError):
    """The text is not UTF-8, or holds an escaped half of a surrogate pair."""


class BadJsonError(JsonTextError):
    """The text is not JSON."""


class JsonConstantError(JsonTextError):
    """The text holds NaN or Infinity, which JSON does not have."""


class JsonNumberError(JsonTextError):
    """The text holds a number no 64-bit integer or float can hold."""


class JsonNestingError(JsonTextError):
    """The text nests deeper than any reader of the format follows."""


class JsonBombError(JsonTextError):
    """The text would take far more memory than its size suggests."""


class NotAnObjectError(JsonTextError):
    """The text is JSON, but not an object."""


class DuplicateKeyError(JsonTextError):
    """An object of the text has a key twice, so readers disagree about its value."""


class SafetensorsError(LocatedError):
    """A safetensors file lies about itself."""


class EmptyFileError(SafetensorsError):
    """The file has no bytes."""


class FileTooShortError(SafetensorsError):
    """The file is shorter than the 8 bytes that hold the header's length."""


class HeaderTooLargeError(SafetensorsError):
    """The announced header is larger than the format allows."""


class HeaderTruncatedError(SafetensorsError):
    """The announced header is longer than the file."""


class HeaderStartError(SafetensorsError):
    """The header does not begin with `{`, as the format demands."""


class MetadataError(SafetensorsError):
    """`__metadata__` is not a mapping from text to text."""


class TensorEntryError(SafetensorsError):
    """A tensor's entry is not an object with dtype, shape and data_offsets."""


class UnknownDtypeError(SafetensorsError):
    """A dtype the format does not have."""


class BadShapeError(SafetensorsError):
    """A shape that is not a list of whole numbers from 0 to 2^64 - 1."""


class ShapeOverflowError(SafetensorsError):
    """A shape whose size in bits does not fit 64 bits."""


class BadOffsetsError(SafetensorsError):
    """data_offsets that are not two whole numbers from 0 to 2^64 - 1."""


class OffsetsReversedError(SafetensorsError):
    """data_offsets that end before they begin."""


class OffsetsBeyondFileError(SafetensorsError):
    """data_offsets that end after the end of the file."""


class SubByteError(SafetensorsError):
    """A tensor of a dtype under 8 bits that does not end at a whole byte."""


class SizeMismatchError(SafetensorsError):
    """dtype and shape make another size than data_offsets."""


class OverlapError(SafetensorsError):
    """Two tensors claim the same bytes."""


class HoleError(SafetensorsError):
    """Bytes between two tensors, or before the first, that belong to none."""


class TrailingBytesError(SafetensorsError):
    """Bytes after the last tensor that belong to none."""


class IndexFileError(LocatedError):
    """An index of shards that is not JSON, or not a mapping from tensors to files."""

    advice = "download or save this checkpoint again"


class IndexPathError(IndexFileError):
    """An index names a file outside its own directory."""


class MissingShardError(IndexFileError):
    """An index names a shard that is not there."""


class IndexTensorError(IndexFileError):
    """An index and its shards disagree about where a tensor is."""


class RepeatedTensorError(LocatedError):
    """Two files of one checkpoint hold a tensor of the same name."""

    advice = "keep one of the files, or name it alone"
