"""The inert values that a pickle evaluates to: they hold data and have no behaviour."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Dtype:
    """An element type, by its name in this package, and its size in bits."""

    name: str
    bits: int


@dataclass(frozen=True, slots=True)
class StorageType:
    """A class of storages; without a dtype, its elements are plain bytes."""

    dtype: Dtype | None

    @property
    def called(self) -> str:
        """Its elements, for messages."""
        return "bytes" if self.dtype is None else self.dtype.name


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the pickle may call, by its full name. It is never looked up."""

    name: str


@dataclass(frozen=True, slots=True)
class Inert:
    """A value without tensors, of which only the origin is known."""

    name: str


@dataclass(slots=True, eq=False)
class PlainDict:
    """A dict as the list of its insertions, so that hostile hashes cannot slow it down.

    `items` are key, value, key, value: a pair of its own for each would take thrice the memory.
    """

    items: list[object] = field(default_factory=list)
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes of one entry of the archive: `count` elements."""

    key: str
    type: StorageType
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class PickledTensorView:
    """A view of a storage. `stride` and `offset` in elements of `dtype`.

    With `conjugated` or `negated`, its elements are those of the storage, conjugated or negated
    when they are read.
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
    """The parts of a sparse tensor: indices, values and size."""

    parts: tuple[object, ...]
