"""A fast hash that says whether bytes are what they were. It names nothing and is written nowhere.

128 bits, seeded at random in each process, so that nobody can prepare two tensors that look alike.
"""

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xxhash import xxh3_128, xxh3_128_digest

from tensor_dedup.store.writing.hashing import Hasher

if TYPE_CHECKING:
    from typing_extensions import Buffer

SEED = secrets.randbits(64)
# A large one takes long enough to be handed to a thread. Of many, the most are small.
_LARGE = 1 << 20
_MANY = 4096


def fast(data: "Buffer") -> bytes:
    """16 bytes that bytes of another content do not have. Any thread."""
    return xxh3_128_digest(data, SEED)


def fast_all(hasher: Hasher, data: "Sequence[Buffer]") -> list[bytes]:
    """The hash of each, in order; large ones on all threads."""
    large = []
    if len(data) <= _MANY:
        large = [number for number, each in enumerate(data) if memoryview(each).nbytes >= _LARGE]
    if len(large) < 2:
        return [xxh3_128_digest(each, SEED) for each in data]
    found = dict(zip(large, hasher.each(fast, [data[number] for number in large]), strict=True))
    return [found.get(number) or fast(each) for number, each in enumerate(data)]


def fast_stream() -> xxh3_128:
    """The same of bytes that come in parts."""
    return xxh3_128(seed=SEED)
