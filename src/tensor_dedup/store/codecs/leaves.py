"""The codec `leaves`: a tensor that shares some leaves with a base; only the others are stored.

An encoded tensor has one chunk for each leaf (2 MiB):

    chunk = nothing: the leaf equals that of the base at the same offset
          | u8 length of a codec's name, the name, the leaf encoded by this codec
          | u8 0, the leaf unencoded

The base may have another size, so a vocabulary that grew can be stored against the smaller one.
Equal leaves are found by their digests, without reading the base.
"""

from tensor_dedup.store.codecs.interface import AGAINST_BASE, LEAVES
from tensor_dedup.store.errors import CorruptFrameError

AS_IT_IS = ""
"""The name that stands before a leaf that no codec has encoded."""


def wrap(name: str, chunk: bytes | memoryview) -> bytes:
    """Return the stored form of a leaf: the name of its codec, then the encoded bytes.

    `chunk` has the encoded bytes. `name` is the name of the codec, or "" if there is none.
    """
    return b"".join((bytes([len(name)]), name.encode("ascii"), chunk))


def unwrap(blob: memoryview) -> tuple[str, memoryview]:
    """Split `blob`, a leaf as stored by `wrap`, into the codec's name and the encoded bytes.

    `blob` is not empty.

    Raises:
        CorruptFrameError: No codec has that name.
    """
    start = 1 + blob[0]
    name = bytes(blob[1:start]).decode("ascii", "replace")
    if name != AS_IT_IS and (name not in AGAINST_BASE or name == LEAVES):
        raise CorruptFrameError.at(f"codec {LEAVES}", f"a leaf of the codec {name!r}", codec=LEAVES)
    return name, blob[start:]
