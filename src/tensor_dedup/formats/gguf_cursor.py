"""Walking through the header of a GGUF file, whose length nothing says in advance."""

import struct
from collections.abc import Callable

from tensor_dedup.formats.errors import GgufError, GgufFault

# Vocabularies make headers of some 10 MB; the largest known is far below this.
MAX_HEADER_BYTES = 100_000_000

_CHUNK = 1 << 20
_LENGTH = struct.Struct("<Q")

Fetch = Callable[[int, int], bytes]


class Cursor:
    """Walks through the header, fetching a chunk at a time, never beyond the file or the limit."""

    def __init__(self, fetch: Fetch, file_size: int, path: str) -> None:
        self._fetch = fetch
        self._blob = b""
        self.size = file_size
        self.path = path
        self.at = 0

    def take(self, nbytes: int) -> bytes:
        """The next bytes."""
        start = self.skip(nbytes)
        return self._blob[start : self.at]

    def skip(self, nbytes: int) -> int:
        """Go over the next bytes, which are then in memory; where they began."""
        start, end = self.at, self.at + nbytes
        if end > len(self._blob):
            self._load(end)
        self.at = end
        return start

    def _load(self, end: int) -> None:
        if end > self.size:
            raise GgufError.at(
                GgufFault.TRUNCATED,
                self.path,
                f"the header goes on to {end}, the file ends at {self.size}",
                offset=end,
                file_size=self.size,
            )
        if end > MAX_HEADER_BYTES:
            raise GgufError.at(
                GgufFault.HEADER_TOO_LARGE,
                self.path,
                f"a header beyond {MAX_HEADER_BYTES} bytes",
                limit=MAX_HEADER_BYTES,
            )
        # Doubling, or a header of many chunks would be copied once for each.
        wanted = min(max(end, 2 * len(self._blob), _CHUNK), self.size, MAX_HEADER_BYTES)
        have = len(self._blob)
        self._blob += self._fetch(have, wanted - have)

    def check_count(self, count: int, least: int, what: str) -> None:
        """Whether the rest of the file can hold so many entries."""
        if count * least > self.size - self.at:
            raise GgufError.at(
                GgufFault.COUNT,
                self.path,
                f"{count} {what} in the {self.size - self.at} bytes from {self.at}",
                count=count,
                left=self.size - self.at,
            )

    def number(self, code: str) -> int:
        """The next number, in struct's letter for its type."""
        found: int = struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]
        return found

    def length(self, what: str) -> int:
        """The next u64, as the length of a text that fits the file."""
        found = self.number("Q")
        if found > self.size - self.at:
            raise self._too_long(what, found)
        return found

    def _too_long(self, what: str, length: int) -> GgufError:
        return GgufError.at(
            GgufFault.LENGTH,
            self.path,
            f"{what} of {length} bytes at {self.at}, the file ends at {self.size}",
            length=length,
            offset=self.at,
        )

    def text(self, what: str) -> str:
        """The next text: a length and UTF-8."""
        start = self.at
        raw = self.take(self.length(what))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise GgufError.at(
                GgufFault.TEXT, self.path, f"{what} at {start} is not UTF-8", offset=start
            ) from error

    def skip_texts(self, count: int) -> None:
        """Go over texts: vocabularies have hundreds of thousands, which are bytes, not UTF-8."""
        for _ in range(count):
            if self.at + 8 > len(self._blob):
                self._load(self.at + 8)
            (length,) = _LENGTH.unpack_from(self._blob, self.at)
            self.at += 8
            if length > self.size - self.at:
                raise self._too_long("a text in a list", length)
            self.at += length
