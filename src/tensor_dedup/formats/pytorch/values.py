"""The values to which a pickle is evaluated: plain data without behaviour."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Dtype:
    """An element type: its name in this package, and its size in bits."""

    name: str
    bits: int


@dataclass(frozen=True, slots=True)
class StorageType:
    """A storage class of torch, such as FloatStorage. `dtype` is None for an untyped storage."""

    dtype: Dtype | None

    @property
    def called(self) -> str:
        """The element type's name for error messages; "bytes" for an untyped storage."""
        return "bytes" if self.dtype is None else self.dtype.name


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a pickle may call; `name` is its full name. It is never imported."""

    name: str


@dataclass(frozen=True, slots=True)
class Inert:
    """A value that holds no tensors; only the name of its class or function is kept."""

    name: str


@dataclass(slots=True, eq=False)
class PlainDict:
    """A pickled dict as a list of insertions: `items` is key, value, key, value and so on.

    No key is hashed, so keys with colliding hashes cost no time. `ordered` says that the pickle
    makes an OrderedDict.
    """

    items: list[object] = field(default_factory=list)
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage: `count` elements in the archive entry `key`."""

    key: str
    type: StorageType
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class PickledTensorView:
    """A tensor as a view of a storage. `offset` and `stride` are in elements of `dtype`.

    If `conjugated` or `negated` is True, the elements of the storage have to be conjugated or
    negated when they are read.
    """

    storage: Storage
    dtype: Dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conjugated: bool = False
    negated: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SparseParts:
    """The parts of a sparse tensor as torch.save writes them: indices, values and size."""

    parts: tuple[object, ...]
