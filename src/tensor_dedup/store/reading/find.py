"""A search for stored tensors by their digest or the beginning of it."""

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from tensor_dedup.errors import StoreError
from tensor_dedup.store.errors import BadDigestError, UnknownNameError
from tensor_dedup.store.format.manifests import Manifest, Piece, named_tensors
from tensor_dedup.store.objects import Objects

_log = logging.getLogger(__name__)
_DIGEST: Final = re.compile(r"[0-9a-f]{4,64}")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor that was found, and the checkpoint it belongs to.

    `nbytes` is the size of the tensor when it is decoded, not the space it takes on disk.
    """

    checkpoint: str
    tensor: str
    digest: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def to_dict(self) -> dict[str, object]:
        """Return all fields as a dict for JSON."""
        return asdict(self)


def find(objects: Objects, digest: str) -> list[TensorPlace]:
    """Return the tensors whose digest begins with `digest`, ordered by checkpoint.

    Checkpoints that cannot be read are left out, and a warning is logged for each. Call it inside
    `with locks.session(...):`.

    Raises:
        BadDigestError: `digest` is not 4 to 64 hex digits.
    """
    if not _DIGEST.fullmatch(digest.lower()):
        raise BadDigestError.at(repr(digest), "this is not a digest", digest=digest)
    pages: dict[bytes, Sequence[Piece]] = {}
    found = list[TensorPlace]()
    for name in objects.names():
        try:
            content = objects.manifest(objects.ref(name))
            for page in content.pages:
                if page not in pages:
                    pages[page] = objects.page(page.hex()).pieces
        except UnknownNameError:  # deleted since the names were read
            continue
        except StoreError as error:
            _log.warning("%s is left out: %s", name, str(error))
            continue
        pieces = [piece for page in content.pages for piece in pages[page]]
        found += _in_checkpoint(name, content, pieces, digest.lower())
    return found


def _in_checkpoint(
    name: str, content: Manifest, pieces: Sequence[Piece], digest: str
) -> Iterator[TensorPlace]:
    for tensor, piece in named_tensors(content, pieces):
        if piece.digest.hex().startswith(digest):
            yield TensorPlace(
                name,
                tensor,
                piece.digest.hex(),
                piece.dtype or "",
                piece.shape or (),
                piece.nbytes,
            )
