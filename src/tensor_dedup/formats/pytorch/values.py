"""What a pickle is evaluated to: values that hold data and can do nothing."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Dtype:
    """The type of an element, by its name in this package; `bits` of one."""

    name: str
    bits: int


@dataclass(frozen=True, slots=True)
class StorageType:
    """A class of storages; without a dtype, plain bytes."""

    dtype: Dtype | None


@dataclass(frozen=True, slots=True)
class Function:
    """A function the pickle may call, by its full name. It is never looked up."""

    name: str


@dataclass(frozen=True, slots=True)
class Inert:
    """A value that holds no tensor, and of which no more is known than where it comes from."""

    name: str


@dataclass(slots=True, eq=False)
class PlainDict:
    """A dict as the list of what was put in, so that nobody's hash decides how long that takes."""

    pairs: list[tuple[object, object]] = field(default_factory=list)
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

    `lazy`: its elements are those of the storage, conjugated or negated when they are read.
    """

    storage: Storage
    dtype: Dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    lazy: bool = False
