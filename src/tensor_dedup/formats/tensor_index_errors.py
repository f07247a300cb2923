"""The ways in which a folder of `tensor.data_N` files can lie, one class each.

TensorIndexError
  - of the index:       IndexFieldsError, IndexNumberError, IndexDtypeError, IndexShapeError,
                        IndexStrideError, IndexCborError, IndexesDifferError
  - of the layout:      MisalignedError, ViewBeyondStorageError, StorageOverlapError,
                        StorageHoleError, StorageBeyondDataError, TrailingDataError, DataFilesError
  - of the other files: DescriptorError, VerificationFileError
"""

from tensor_dedup.formats.errors import LocatedError


class TensorIndexError(LocatedError):
    """A folder of data files with a `tensor_index` lies about itself."""

    advice = "save or copy this folder again"


class IndexFieldsError(TensorIndexError):
    """A tensor's entry is not a list of 5 or 6 fields, or not all entries have as many."""


class IndexNumberError(TensorIndexError):
    """An offset or a size that is not a whole number from 0 to 2^63 - 1."""


class IndexDtypeError(TensorIndexError):
    """A dtype that torch does not have, or that has no bytes of its own."""


class IndexShapeError(TensorIndexError):
    """A shape that is not a list of whole numbers, or too large."""


class IndexStrideError(TensorIndexError):
    """A stride that is not a list of whole numbers as long as the shape."""


class IndexCborError(TensorIndexError):
    """The CBOR index is not CBOR, or uses what an index has no need of."""


class IndexesDifferError(TensorIndexError):
    """The index in CBOR says something else than the one in JSON."""


class MisalignedError(TensorIndexError):
    """A storage that does not begin at a multiple of 8 bytes."""


class ViewBeyondStorageError(TensorIndexError):
    """A tensor that reaches beyond the end of its storage."""


class StorageOverlapError(TensorIndexError):
    """Two storages claim the same bytes."""


class StorageHoleError(TensorIndexError):
    """More bytes between two storages than alignment asks for."""


class StorageBeyondDataError(TensorIndexError):
    """A storage that ends after the end of the data files."""


class TrailingDataError(TensorIndexError):
    """More bytes after the last storage than alignment asks for."""


class DataFilesError(TensorIndexError):
    """The data files are not numbered from 0 without a gap."""


class DescriptorError(TensorIndexError):
    """`artifact_descriptor.json` is not what it has to be, or contradicts the index."""


class VerificationFileError(TensorIndexError):
    """A verification file is not what it has to be, or is about other bytes."""
