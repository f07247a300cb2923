"""The ways in which a GGUF file can lie, one class each.

GgufError
  - of the file:      GgufMagicError, GgufBigEndianError, GgufVersionError
  - of the header:    GgufTruncatedError, GgufHeaderTooLargeError, GgufCountError, GgufLengthError
  - of the metadata:  GgufTextError, GgufDuplicateKeyError, GgufValueTypeError, GgufNestingError,
                      GgufBoolError, GgufAlignmentError
  - of one tensor:    GgufNameError, GgufDuplicateTensorError, GgufDimensionsError,
                      GgufTensorTypeError, GgufBlockError, GgufOverflowError, GgufMisalignedError,
                      GgufBeyondFileError
  - of the layout:    GgufOverlapError, GgufHoleError, GgufTrailingBytesError
"""

from tensor_dedup.formats.errors import LocatedError


class GgufError(LocatedError):
    """A GGUF file lies about itself, or is of a kind that is not read."""


class GgufMagicError(GgufError):
    """The file does not begin with `GGUF` and a version."""


class GgufBigEndianError(GgufError):
    """The file is big-endian: its tensors are other bytes than those of all other checkpoints."""

    advice = "convert it to little-endian (gguf-convert-endian)"


class GgufVersionError(GgufError):
    """A version of the format that is not 2 or 3."""

    advice = "convert it with a current llama.cpp"


class GgufTruncatedError(GgufError):
    """The header goes on where the file has ended."""


class GgufHeaderTooLargeError(GgufError):
    """The header is larger than any honest one."""


class GgufCountError(GgufError):
    """More entries are announced than the rest of the file could hold."""


class GgufLengthError(GgufError):
    """A text or a list is announced longer than the rest of the file."""


class GgufTextError(GgufError):
    """A key, or a tensor's name, that is not UTF-8."""


class GgufDuplicateKeyError(GgufError):
    """A key of the metadata appears twice, so readers disagree about its value."""


class GgufValueTypeError(GgufError):
    """A type of value the format does not have."""


class GgufNestingError(GgufError):
    """Lists in lists, deeper than any writer makes them."""


class GgufBoolError(GgufError):
    """A truth value that is neither 0 nor 1."""


class GgufAlignmentError(GgufError):
    """`general.alignment` is no power of two, or no 32-bit number."""


class GgufNameError(GgufError):
    """A tensor's name is longer than any model's."""


class GgufDuplicateTensorError(GgufError):
    """Two tensors have one name."""


class GgufDimensionsError(GgufError):
    """More dimensions than the format has."""


class GgufTensorTypeError(GgufError):
    """A type of tensor that does not exist, exists no longer, or is newer than this version."""

    advice = "convert it with a current llama.cpp, or install a newer tensor-dedup"


class GgufBlockError(GgufError):
    """The first dimension is no whole number of the type's blocks."""


class GgufOverflowError(GgufError):
    """A size that does not fit 63 bits."""


class GgufMisalignedError(GgufError):
    """A tensor's offset is no multiple of the alignment."""


class GgufBeyondFileError(GgufError):
    """A tensor ends after the end of the file."""


class GgufOverlapError(GgufError):
    """Two tensors claim the same bytes."""


class GgufHoleError(GgufError):
    """Bytes between two tensors, or before the first, that are not padding."""


class GgufTrailingBytesError(GgufError):
    """Bytes after the last tensor that are not padding."""
