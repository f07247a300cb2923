"""The ways in which a file of torch.save can lie, or be something this package does not read.

PytorchError
  - of the file:      NotPytorchError, LegacyPytorchError, TorchScriptError, ByteOrderError
  - of the archive:   ArchiveEndError, ArchiveDirectoryError, TooManyEntriesError, EntryNameError,
                      DuplicateEntryError, EncryptedEntryError, CompressedEntryError,
                      EntrySizeError, EntryBeyondError, LocalHeaderError, EntryOverlapError,
                      EntryHoleError, StrayEntryError, FolderEntryError, MissingEntryError
  - of the pickle:    PickleTooLargeError, PickleTruncatedError, PickleOpcodeError,
                      PickleStackError, PickleMemoError, PickleTextError, PickleNumberError,
                      PickleTrailingError, PickleBombError, ForbiddenGlobalError,
                      ForbiddenCallError
  - of its content:   DeepNestingError, TensorNameError, UnusableKeyError, RepeatedKeyError,
                      RepeatedNameError
  - of one tensor:    StorageIdError, StorageMissingError, StorageTypeError, StorageSizeError,
                      GeometryError, BeyondStorageError
"""

from tensor_dedup.formats.errors import LocatedError


class PytorchError(LocatedError):
    """A file of torch.save lies about itself, or is of a kind that is not read."""


class NotPytorchError(PytorchError):
    """The file is no zip archive, as torch.save writes them, and nothing older either."""


class LegacyPytorchError(PytorchError):
    """A file of PyTorch before 1.6: one pickle behind the other, or a tar archive."""

    advice = (
        "where you trust it, load it with torch.load(FILE, weights_only=True) and torch.save it"
    )


class TorchScriptError(PytorchError):
    """A TorchScript archive: it holds a program."""

    advice = "save the state dict of the module instead"


class ByteOrderError(PytorchError):
    """The storages are big-endian, or in an order that nobody knows."""

    advice = "save it again on a little-endian machine"


class ArchiveEndError(PytorchError):
    """The file does not end as a zip archive, or something follows its end."""


class ArchiveDirectoryError(PytorchError):
    """The archive's directory is not where, or what, its end says."""


class TooManyEntriesError(PytorchError):
    """More entries than the largest checkpoint has tensors."""


class EntryNameError(PytorchError):
    """An entry's name is not UTF-8, or leads out of the archive."""


class DuplicateEntryError(PytorchError):
    """Two entries have names that differ in case at most: PyTorch takes either."""


class EncryptedEntryError(PytorchError):
    """An entry is encrypted, or uses a feature that torch.save does not."""


class CompressedEntryError(PytorchError):
    """An entry is compressed, so no tensor in it can be read in place."""

    advice = "load it with torch.load(FILE, weights_only=True) and torch.save it"


class EntrySizeError(PytorchError):
    """An entry that is not compressed has two sizes, or a size it does not say."""


class EntryBeyondError(PytorchError):
    """An entry ends after the data of the archive."""


class LocalHeaderError(PytorchError):
    """An entry's own header is not what the directory says of it."""


class EntryOverlapError(PytorchError):
    """Two entries claim the same bytes."""


class EntryHoleError(PytorchError):
    """Bytes between two entries, or before the first, that belong to none."""


class StrayEntryError(PytorchError):
    """An entry outside the one folder that an archive of torch.save has."""


class FolderEntryError(PytorchError):
    """An entry with data is said to be a folder: PyTorch returns memory nobody has written to."""


class MissingEntryError(PytorchError):
    """The archive has no data.pkl, or several."""


class PickleTooLargeError(PytorchError):
    """The pickle is larger than any honest one."""


class PickleTruncatedError(PytorchError):
    """The pickle ends within an instruction, or without saying so."""


class PickleOpcodeError(PytorchError):
    """An instruction that torch.save does not write."""

    advice = "save the tensors in a plain dict with torch.save"


class PickleStackError(PytorchError):
    """An instruction finds nothing, or something unsuitable, to work on."""


class PickleMemoError(PytorchError):
    """The pickle recalls something it has not remembered."""


class PickleTextError(PytorchError):
    """A text that is not UTF-8."""


class PickleNumberError(PytorchError):
    """A number longer than any honest one."""


class PickleTrailingError(PytorchError):
    """Bytes after the end of the pickle."""


class PickleBombError(PytorchError):
    """Evaluating the pickle would take far more memory or time than its size suggests."""


class ForbiddenGlobalError(PytorchError):
    """The pickle names a class or function that is not needed for tensors. It was not imported."""

    advice = "nothing was run; where you trust it, save its tensors in a plain dict with torch.save"


class ForbiddenCallError(PytorchError):
    """The pickle uses one of the known names in a way that torch.save does not."""

    advice = ForbiddenGlobalError.advice


class DeepNestingError(PytorchError):
    """Containers in containers, deeper than any checkpoint, or without end."""


class TensorNameError(PytorchError):
    """A tensor's name, its keys joined by dots, is longer than any model's."""


class UnusableKeyError(PytorchError):
    """A key that is no text and no number."""


class RepeatedKeyError(PytorchError):
    """A dict has a key twice."""


class RepeatedNameError(PytorchError):
    """Two tensors have one name when their keys are joined by dots."""

    advice = "rename one of them"


class StorageIdError(PytorchError):
    """A storage is not named as torch.save names them."""


class StorageMissingError(PytorchError):
    """A storage has no entry in the archive."""


class StorageTypeError(PytorchError):
    """A storage is said to be of two types or sizes, or of one that is not read."""


class StorageSizeError(PytorchError):
    """A storage's entry has another size than the pickle says."""


class GeometryError(PytorchError):
    """A tensor's shape does not fit 63 bits."""


class BeyondStorageError(PytorchError):
    """A tensor ends after the end of its storage."""
