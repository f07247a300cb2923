"""Tensors that have some leaves in common with another one: only the other leaves are stored.

    chunk = nothing: the leaf is that of the base at the same place
          | u8 length of a name, the name of a codec, what that codec makes of the leaf
          | u8 0, the leaf as it is

The base may have another size, so a vocabulary that grew is stored against what it was. Which
leaves are equal is known from the digests that every record has; the base is not read for it. A
reader takes each leaf from one of the two records, which costs what reading one tensor costs.
"""

from tensor_dedup.store.codecs.interface import AGAINST_BASE, LEAVES
from tensor_dedup.store.errors import CorruptFrameError

AS_IT_IS = ""
"""The name that stands before a leaf that no codec has encoded."""


def wrap(name: str, chunk: bytes | memoryview) -> bytes:
    """Return the chunk of a leaf that the codec of this name has encoded."""
    return b"".join((bytes([len(name)]), name.encode("ascii"), chunk))


def unwrap(blob: memoryview) -> tuple[str, memoryview]:
    """Return the name of the codec of a chunk that is not empty, and what that codec has made.

    Raises:
        CorruptFrameError: there is no such codec.
    """
    start = 1 + blob[0]
    name = bytes(blob[1:start]).decode("ascii", "replace")
    if name != AS_IT_IS and (name not in AGAINST_BASE or name == LEAVES):
        raise CorruptFrameError.at(f"codec {LEAVES}", f"a leaf of the codec {name!r}", codec=LEAVES)
    return name, blob[start:]
