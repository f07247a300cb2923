"""Errors about the files of a checkpoint: one class for each format, with a `kind`.

LocatedError                the file that is wrong, and perhaps the tensor in it
  - CheckpointFilesError      the files of a checkpoint do not fit together
  - JsonTextError             the JSON of a header or an index
  - SafetensorsError
  - GgufError
  - PytorchError              a file of torch.save
  - TensorIndexError          a folder of `tensor.data_N` files

The message of an error, and its `facts`, have the path, the tensor's name if there is one, and the
numbers. Names are cut to MAX_NAME characters, because a name in a hostile file can be 100 MB long.
"""

from enum import Enum, unique
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

from tensor_dedup.errors import FormatError, TensorDedupError

MAX_NAME: Final = 200


class FormatFault(Enum):
    """A way in which a file can be malformed. The value is a sentence that describes the fault.

    `advice` says what the user can do about the fault. If it is "", the advice of the error class
    is used.
    """

    advice: str  # the next step, where it is not that of the format

    def __new__(cls, sentence: str, advice: str = "") -> Self:
        member = object.__new__(cls)
        member._value_ = sentence
        member.advice = advice
        return member


_Kind = TypeVar("_Kind", bound=FormatFault)


class LocatedError(FormatError, Generic[_Kind]):
    """A file, or a tensor in it, is malformed; `kind` says in which way."""

    advice: ClassVar[str] = "download or save this file again"

    # By position only: `facts` may have a `kind` of its own.
    def __init__(self, message: str, kind: _Kind, /, **facts: object) -> None:
        super().__init__(message, **facts)
        self.kind = kind

    @classmethod
    def at(
        cls, kind: _Kind, path: str, what: str, tensor: str | None = None, /, **facts: object
    ) -> Self:
        """Return the error about the file `path`, or about one `tensor` in it.

        `what` says what is wrong. The message ends with advice for the user. `facts` are the values
        in the message, by name.
        """
        where = path
        if tensor is not None:
            facts["tensor"] = shown = shorten(tensor)
            where = f"{path}: tensor {shown!r}"
        advice = kind.advice or cls.advice
        return cls(f"{where}: {what}; {advice}", kind, path=path, **facts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.kind, self.facts)


def _rebuild(
    cls: "type[LocatedError[_Kind]]", message: str, kind: _Kind, facts: dict[str, Any]
) -> TensorDedupError:
    return cls(message, kind, **facts)


def shorten(text: str) -> str:
    """Return `text`, cut to MAX_NAME characters and "..." if it is longer than that."""
    return text if len(text) <= MAX_NAME else text[:MAX_NAME] + "..."


@unique
class CheckpointFault(FormatFault):
    """The ways in which the files of a checkpoint can be inconsistent."""

    NOT_A_FILE = (
        "It is a directory, a pipe or a device, not a regular file.",
        "name a regular file",
    )
    INDEX = "An index of shards that is not JSON, or not a mapping from tensors to files."
    INDEX_PATH = "An index names a file outside its own directory."
    MISSING_SHARD = "An index names a shard that is not there."
    INDEX_TENSOR = "An index and its shards disagree about where a tensor is."
    NAME_ENCODING = (
        "The name of a file, or of a directory, is not UTF-8.",
        "rename it",
    )
    LINK_OUTSIDE = (
        "A symbolic link leads out of the checkpoint.",
        "put a copy of what you trust in its place, or follow such links (--follow-links)",
    )
    REPEATED_TENSOR = (
        "Two files of one checkpoint hold a tensor of the same name.",
        "keep one of the files, or name it alone",
    )
    POINTER = (
        "A pointer of Git LFS or Git Xet in place of weights.",
        "or download the file itself",
    )
    TEXT = (
        "Text in place of weights, such as an error page.",
        "download the file again",
    )
    LATER_PART = (
        "A later part of a split GGUF model is named alone.",
        "the other parts are found from there",
    )
    PART = (
        "The parts of a split GGUF model do not fit together.",
        "give each part the name that the splitter gave it, or download them again",
    )
    MANIFEST = (
        "A manifest in the store of a model runner names no files, or none that can be right.",
        "pull the model again with the tool whose store it is",
    )


class CheckpointFilesError(LocatedError[CheckpointFault]):
    """The files of a checkpoint are missing or inconsistent."""

    advice = "download or save this checkpoint again"


@unique
class JsonFault(FormatFault):
    """The ways in which the JSON of a header or an index can be malformed."""

    ENCODING = "The text is not UTF-8, or holds an escaped half of a surrogate pair."
    SYNTAX = "The text is not JSON."
    CONSTANT = "The text holds NaN or Infinity, which JSON does not have."
    NUMBER = "The text holds a number no 64-bit integer or float can hold."
    NESTING = "The text nests deeper than any reader of the format follows."
    BOMB = "The text would take far more memory than its size suggests."
    NOT_AN_OBJECT = "The text is JSON, but not an object."
    DUPLICATE_KEY = "An object of the text has a key twice, so readers disagree about its value."


class JsonTextError(LocatedError[JsonFault]):
    """The JSON of a header or an index is malformed, or would exhaust the reader's memory."""


@unique
class SafetensorsFault(FormatFault):
    """The ways in which a safetensors file can be malformed."""

    # Of the file.
    EMPTY_FILE = "The file has no bytes."
    FILE_TOO_SHORT = "The file is shorter than the 8 bytes that hold the header's length."
    # Of the header.
    HEADER_TOO_LARGE = "The announced header is larger than the format allows."
    HEADER_TRUNCATED = "The announced header is longer than the file."
    HEADER_START = "The header does not begin with `{`, as the format demands."
    METADATA = "`__metadata__` is not a mapping from text to text."
    # Of one tensor.
    TENSOR_ENTRY = "A tensor's entry is not an object with dtype, shape and data_offsets."
    UNKNOWN_DTYPE = "A dtype the format does not have."
    BAD_SHAPE = "A shape that is not a list of whole numbers from 0 to 2^64 - 1."
    SHAPE_OVERFLOW = "A shape whose size in bits does not fit 64 bits."
    BAD_OFFSETS = "data_offsets that are not two whole numbers from 0 to 2^64 - 1."
    OFFSETS_REVERSED = "data_offsets that end before they begin."
    OFFSETS_BEYOND_FILE = "data_offsets that end after the end of the file."
    SUB_BYTE = "A tensor of a dtype under 8 bits that does not end at a whole byte."
    SIZE_MISMATCH = "dtype and shape make another size than data_offsets."
    # Of the layout.
    OVERLAP = "Two tensors claim the same bytes."
    HOLE = "Bytes between two tensors, or before the first, that belong to none."
    TRAILING_BYTES = "Bytes after the last tensor that belong to none."


class SafetensorsError(LocatedError[SafetensorsFault]):
    """A safetensors file is malformed."""


@unique
class GgufFault(FormatFault):
    """The ways in which a GGUF file can be malformed."""

    # Of the file.
    MAGIC = "The file does not begin with `GGUF` and a version."
    BIG_ENDIAN = (
        "The file is big-endian: its tensors are other bytes than those of all other checkpoints.",
        "convert it to little-endian (gguf-convert-endian)",
    )
    VERSION = (
        "A version of the format that is not 2 or 3.",
        "convert it with a current llama.cpp",
    )
    # Of the header.
    TRUNCATED = "The header goes on where the file has ended."
    HEADER_TOO_LARGE = "The header is larger than any honest one."
    COUNT = "More entries are announced than the rest of the file could hold."
    LENGTH = "A text or a list is announced longer than the rest of the file."
    # Of the metadata.
    TEXT = "A key, or a tensor's name, that is not UTF-8."
    DUPLICATE_KEY = "A key of the metadata appears twice, so readers disagree about its value."
    VALUE_TYPE = "A type of value the format does not have."
    NESTING = "Lists in lists, deeper than any writer makes them."
    BOOL = "A truth value that is neither 0 nor 1."
    ALIGNMENT = "`general.alignment` is no power of two, or no 32-bit number."
    # Of one tensor.
    NAME = "A tensor's name is longer than any model's."
    DUPLICATE_TENSOR = "Two tensors have one name."
    DIMENSIONS = "More dimensions than the format has."
    TENSOR_TYPE = (
        "A type of tensor that does not exist, exists no longer, or is newer than this version.",
        "convert it with a current llama.cpp, or install a newer tensor-dedup",
    )
    BLOCK = "The first dimension is no whole number of the type's blocks."
    OVERFLOW = "A size that does not fit 63 bits."
    MISALIGNED = "A tensor's offset is no multiple of the alignment."
    BEYOND_FILE = "A tensor ends after the end of the file."
    # Of the layout.
    OVERLAP = "Two tensors claim the same bytes."
    HOLE = "Bytes between two tensors, or before the first, that are not padding."
    TRAILING_BYTES = "Bytes after the last tensor that are not padding."


class GgufError(LocatedError[GgufFault]):
    """A GGUF file is malformed, or of a kind that is not supported."""


@unique
class PytorchFault(FormatFault):
    """The ways in which a file of torch.save can be malformed."""

    # Of the file.
    NOT_PYTORCH = "The file is no zip archive, as torch.save writes them, and nothing older either."
    LEGACY_PYTORCH = (
        "A file of PyTorch before 1.6: one pickle behind the other, or a tar archive.",
        "where you trust it, load it with torch.load(FILE, weights_only=True) and torch.save it",
    )
    TORCH_SCRIPT = (
        "A TorchScript archive: it holds a program.",
        "save the state dict of the module instead",
    )
    BYTE_ORDER = (
        "The storages are big-endian, or in an order that nobody knows.",
        "save it again on a little-endian machine",
    )
    # Of the archive.
    ARCHIVE_END = "The file does not end as a zip archive, or something follows its end."
    ARCHIVE_DIRECTORY = "The archive's directory is not where, or what, its end says."
    TOO_MANY_ENTRIES = "More entries than the largest checkpoint has tensors."
    ENTRY_NAME = "An entry's name is not UTF-8, or leads out of the archive."
    DUPLICATE_ENTRY = "Two entries have names that differ in case at most: PyTorch takes either."
    ENCRYPTED_ENTRY = "An entry is encrypted, or uses a feature that torch.save does not."
    COMPRESSED_ENTRY = (
        "An entry is compressed, so no tensor in it can be read in place.",
        "load it with torch.load(FILE, weights_only=True) and torch.save it",
    )
    ENTRY_SIZE = "An entry that is not compressed has two sizes, or a size it does not say."
    ENTRY_BEYOND = "An entry ends after the data of the archive."
    LOCAL_HEADER = "An entry's own header is not what the directory says of it."
    ENTRY_OVERLAP = "Two entries claim the same bytes."
    ENTRY_HOLE = "Bytes between two entries, or before the first, that belong to none."
    STRAY_ENTRY = "An entry outside the one folder that an archive of torch.save has."
    FOLDER_ENTRY = (
        "An entry with data is said to be a folder: PyTorch returns memory nobody has written to."
    )
    MISSING_ENTRY = "The archive has no data.pkl, or several."
    # Of the pickle.
    PICKLE_TOO_LARGE = "The pickle is larger than any honest one."
    PICKLE_TRUNCATED = "The pickle ends within an instruction, or without saying so."
    PICKLE_OPCODE = (
        "An instruction that torch.save does not write.",
        "save the tensors in a plain dict with torch.save",
    )
    PICKLE_STACK = "An instruction finds nothing, or something unsuitable, to work on."
    PICKLE_MEMO = "The pickle recalls something it has not remembered."
    PICKLE_TEXT = "A text that is not UTF-8."
    PICKLE_NUMBER = "A number longer than any honest one."
    PICKLE_TRAILING = "Bytes after the end of the pickle."
    PICKLE_BOMB = "Evaluating the pickle would take far more memory or time than its size suggests."
    FORBIDDEN_GLOBAL = (
        "The pickle names a class or function that is not needed for tensors. It was not imported.",
        "nothing was run; where you trust it, save its tensors in a plain dict with torch.save",
    )
    FORBIDDEN_CALL = (
        "The pickle uses one of the known names in a way that torch.save does not.",
        "nothing was run; where you trust it, save its tensors in a plain dict with torch.save",
    )
    # Of its content.
    DEEP_NESTING = "Containers in containers, deeper than any checkpoint, or without end."
    TENSOR_NAME = "A tensor's name, its keys joined by dots, is longer than any model's."
    UNUSABLE_KEY = "A key that is no text and no number."
    REPEATED_KEY = "A dict has a key twice."
    REPEATED_NAME = (
        "Two tensors have one name when their keys are joined by dots.",
        "rename one of them",
    )
    # Of one tensor.
    STORAGE_ID = "A storage is not named as torch.save names them."
    STORAGE_MISSING = "A storage has no entry in the archive."
    STORAGE_TYPE = "A storage is said to be of two types or sizes, or of one that is not read."
    STORAGE_SIZE = "A storage's entry has another size than the pickle says."
    GEOMETRY = "A tensor's shape does not fit 63 bits."
    BEYOND_STORAGE = "A tensor ends after the end of its storage."


class PytorchError(LocatedError[PytorchFault]):
    """A file of torch.save is malformed, or of a kind that is not supported."""


@unique
class TensorIndexFault(FormatFault):
    """The ways in which a folder of `tensor.data_N` files can be malformed."""

    # Of the index.
    TOO_LARGE = "The index is larger than any honest one."
    FIELDS = "A tensor's entry is not a list of 5 or 6 fields, or not all entries have as many."
    NUMBER = "An offset or a size that is not a whole number from 0 to 2^63 - 1."
    DTYPE = "A dtype that torch does not have, or that has no bytes of its own."
    SHAPE = "A shape that is not a list of whole numbers, or too large."
    STRIDE = "A stride that is not a list of whole numbers as long as the shape."
    CBOR = "The CBOR index is not CBOR, or uses what an index has no need of."
    INDEXES_DIFFER = "The index in CBOR says something else than the one in JSON."
    # Of the layout.
    MISALIGNED = "A storage that does not begin at a multiple of 8 bytes."
    VIEW_BEYOND_STORAGE = "A tensor that reaches beyond the end of its storage."
    STORAGE_OVERLAP = "Two storages claim the same bytes."
    STORAGE_HOLE = "More bytes between two storages than alignment asks for."
    STORAGE_BEYOND_DATA = "A storage that ends after the end of the data files."
    TRAILING_DATA = "More bytes after the last storage than alignment asks for."
    DATA_FILES = "The data files are not numbered from 0 without a gap."
    # Of the other files.
    DESCRIPTOR = "`artifact_descriptor.json` is not what it has to be, or contradicts the index."
    VERIFICATION_FILE = "A verification file is not what it has to be, or is about other bytes."


class TensorIndexError(LocatedError[TensorIndexFault]):
    """A folder of data files with a `tensor_index` is malformed."""

    advice = "save or copy this folder again"
