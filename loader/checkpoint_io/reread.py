"""Reading a tensor again after its file was closed, to compare bytes. No torch."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

from tensor_dedup.store.store import Store

# (offset in the tensor, size) -> bytes
Read: TypeAlias = Callable[[int, int], bytes]
Reread: TypeAlias = Callable[[], AbstractContextManager[Read]]


def from_store(store: Store, digest: bytes, nbytes: int) -> Reread:
    """What reads the piece with a digest, verified. Reading raises StoreError when it is gone."""

    @contextmanager
    def opened() -> Iterator[Read]:
        with store.pieces([digest.hex()]) as pieces:
            yield lambda at, size: bytes(pieces.read_piece(digest, at, at + size, nbytes))

    return opened
