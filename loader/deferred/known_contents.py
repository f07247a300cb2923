"""Build large final tensors from parts of residents, if all source digests are known.

Parts that a resident (shared tensor) already has are mapped from the resident, and only the other
parts are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from tensor_dedup.digest import digest
from tensor_dedup.loader.checkpoint_io.sources import raise_stale
from tensor_dedup.loader.deferred.recipe import parts_of
from tensor_dedup.loader.residents.leaves import Content, build_from_contents
from tensor_dedup.loader.residents.registry import LEAF_SHARED_FROM
from tensor_dedup.loader.torch_dtypes import has_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensor_dedup.loader.checkpoint_io.sources import SourceReader, SourceTensor
    from tensor_dedup.loader.deferred.parameters import DeferredParameter
    from tensor_dedup.loader.residents.provider import Admit, HostProvider
    from tensor_dedup.loader.residents.resident import Resident, Write
    from tensor_dedup.types import ResidentKey


@dataclass(frozen=True, slots=True)
class KnownContents:
    """The source tensors that a large final tensor consists of. Their digests are known.

    `geometry` has the dtype, shape and stride of the final tensor. `parts` has, in order, a pair
    for each part: its source tensor, and its byte range with the digest. The source tensor is None
    for a part of zeros (padding).
    """

    geometry: ResidentKey
    parts: Sequence[tuple[SourceTensor | None, Content]]

    @classmethod
    def of(cls, each: DeferredParameter, algorithm: str) -> Self | None:
        """Return the known contents of the final tensor `each`, or None.

        Returns None in these cases:

        - The tensor is smaller than 8 MiB, or its dtype has no safetensors name.
        - A part of the tensor is neither zeros nor a whole source tensor with a known digest.
        - All parts are zeros.
        - `algorithm`, by which the digests were computed, is not BLAKE3.
        """
        if each.nbytes < LEAF_SHARED_FROM or not has_name(each.parameter.dtype):
            return None
        if algorithm != "blake3":
            return None
        found: list[tuple[SourceTensor | None, Content]] = []
        for start, stop, source, zeros in parts_of(each.require_view()):
            if start == stop:  # padding of a vocabulary that needs none
                continue
            if zeros:
                known = digest(bytes(stop - start))
                found.append((None, Content(start, stop, known, ())))
            elif source is None or source.digest is None:
                return None
            else:
                found.append((source, Content(start, stop, source.digest, source.leaves)))
        some = any(source is not None for source, _ in found)
        return cls(each.geometry, found) if some else None

    @property
    def contents(self) -> list[Content]:
        """The byte range of each part, with the digests of the part and of its leaves."""
        return [content for _, content in self.parts]

    def build(self, recipe: str, provider: HostProvider, reader: SourceReader) -> Resident | None:
        """Build a resident from parts of other residents, and read only the missing parts.

        Returns None in these cases:

        - No resident has a part of the tensor that is worth sharing.
        - The memory manager refuses the tensor.
        - This process has too many mappings.

        Pass the result to `HostProvider.enter_known`. Always call `HostProvider.end_known` at the
        end, also after an error.

        Raises:
            StaleHintError: A part that was read does not have its remembered digest.
            SharedMemoryError: There is no memory for the missing parts.
        """
        contents = self.contents

        def read(number: int, leaves: Sequence[int] | None, write: Write) -> None:
            source, content = self.parts[number]
            if source is None:
                write(memoryview(bytes(content.end - content.start)), 0)
            elif leaves is None:
                reader.read_pieces(source, write)
            else:
                reader.read_leaves(source, leaves, write)

        def check(number: int, data: memoryview) -> None:
            self._require(number, reader.digest(data))

        def build(others: Sequence[Resident], admit: Admit | None) -> Resident | None:
            return build_from_contents(
                self.geometry, contents, read, check, reader.digest_of, others, admit
            )

        resident = provider.build_known(recipe, self.geometry, contents, build)
        if resident is not None and len(contents) == 1:
            self._require(0, resident.key.digest)
        return resident

    def _require(self, number: int, found: str) -> None:
        source, content = self.parts[number]
        assert source is not None, "of zeros no single leaf is taken"
        if found != content.digest:
            raise_stale(source, found, "it", content.digest)
