"""The zip archive that torch.save writes, read from an untrusted file.

The directory at the end of the file names the entries, and each entry has a header of its own
before its data. Directory and headers must agree, entries must be uncompressed, and all entries
together must cover the file from its first byte to the directory. So no two readers can see
different content in the file.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tensor_dedup.formats.errors import PytorchError, PytorchFault, shorten
from tensor_dedup.formats.files import ReadableFile

# As many as the largest header of safetensors may have tensors, and what else torch.save writes.
MAX_ENTRIES = 1_000_100
MAX_DIRECTORY_BYTES = 200_000_000
MAX_NAME_BYTES = 1024

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_END_MARK, _LOCATOR_MARK, _END64_MARK = b"PK\x05\x06", b"PK\x06\x07", b"PK\x06\x06"
_CENTRAL_MARK, _LOCAL_MARK, _FOOTER_MARK = b"PK\x01\x02", b"PK\x03\x04", b"PK\x07\x08"
# What an entry takes of the file at least, besides its data and its name, which is there twice.
ENTRY_BYTES = _CENTRAL.size + _LOCAL.size
_U16, _U32 = 0xFFFF, 0xFFFFFFFF
_FOOTER, _UTF8 = 1 << 3, 1 << 11
_ZIP64 = 1
_LONGEST_FOOTER = 24
_FOLDER = 0x10  # among the attributes of a file in DOS


@dataclass(frozen=True, slots=True)
class Entry:
    """The place of an archive entry's data: `nbytes` bytes from offset `start` of the file."""

    name: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Listed:
    """An entry as the directory has it; `offset` is that of its own header."""

    name: bytes
    flags: int
    method: int
    crc: int
    nbytes: int
    offset: int

    @property
    def shown(self) -> str:
        return shorten(self.name.decode("utf-8", "replace"))


def read_archive(file: ReadableFile) -> Mapping[str, Entry]:
    """Return all entries of the archive `file` by name, in the order of their data.

    Raises:
        PytorchError: The file is not an archive of torch.save, or is malformed.
        ChangedFileError: The file became shorter while it was read.
    """
    start, nbytes, count = _directory_place(file)
    listed = _directory(file, start, nbytes, count)
    entries = _locate(file, sorted(listed, key=lambda entry: entry.offset), start)
    return MappingProxyType({entry.name: entry for entry in entries})


def _directory_place(file: ReadableFile) -> tuple[int, int, int]:
    """Return the place, size and number of entries of the directory; it must end at the end."""
    end = file.size - _END.size
    if end < 0 or not (tail := file.read(end, _END.size)).startswith(_END_MARK):
        raise PytorchError.at(
            PytorchFault.ARCHIVE_END,
            file.path,
            "the file does not end as a zip archive",
            file_size=file.size,
        )
    _, disk, start_disk, here, count, nbytes, start, comment = _END.unpack(tail)
    if comment or disk or start_disk or here != count:
        raise PytorchError.at(
            PytorchFault.ARCHIVE_END, file.path, "its end has a comment, or parts elsewhere"
        )
    large = _directory_place_64(file, end)
    if large is not None:
        end, found = large
        said = (start, nbytes, count)
        if any(a not in (b, c) for a, b, c in zip(said, found, (_U32, _U32, _U16), strict=True)):
            raise PytorchError.at(
                PytorchFault.ARCHIVE_END, file.path, f"its two ends say {said} and {found}"
            )
        start, nbytes, count = found
    if start + nbytes != end:
        raise PytorchError.at(
            PytorchFault.ARCHIVE_DIRECTORY,
            file.path,
            f"{nbytes} bytes of directory at {start} do not end at {end}",
            start=start,
            nbytes=nbytes,
            end=end,
        )
    return start, nbytes, count


def _directory_place_64(file: ReadableFile, end: int) -> tuple[int, tuple[int, int, int]] | None:
    """Return where the larger end begins, and what it says, when there is one."""
    locator = end - _LOCATOR.size
    if locator < 0:
        return None
    mark, disk, place, disks = _LOCATOR.unpack(file.read(locator, _LOCATOR.size))
    if mark != _LOCATOR_MARK:
        return None
    if disk or disks > 1 or place != locator - _END64.size or place < 0:
        raise PytorchError.at(
            PytorchFault.ARCHIVE_END,
            file.path,
            f"the larger end is said to be at {place}, before {locator}",
            place=place,
        )
    fields = _END64.unpack(file.read(place, _END64.size))
    mark, size, _, _, disk, start_disk, here, count, nbytes, start = fields
    if mark != _END64_MARK or size != _END64.size - 12 or disk or start_disk or here != count:
        raise PytorchError.at(
            PytorchFault.ARCHIVE_END, file.path, f"no larger end at {place}", place=place
        )
    return place, (start, nbytes, count)


def _directory(file: ReadableFile, start: int, nbytes: int, count: int) -> list[_Listed]:
    if count > MAX_ENTRIES or nbytes > MAX_DIRECTORY_BYTES:
        raise PytorchError.at(
            PytorchFault.TOO_MANY_ENTRIES,
            file.path,
            f"{count} entries, {nbytes} bytes of directory",
            count=count,
            nbytes=nbytes,
        )
    if count * _CENTRAL.size > nbytes:
        raise PytorchError.at(
            PytorchFault.ARCHIVE_DIRECTORY,
            file.path,
            f"{count} entries in {nbytes} bytes of directory",
            count=count,
            nbytes=nbytes,
        )
    blob, at = file.read(start, nbytes), 0
    found: dict[str, _Listed] = {}
    for _ in range(count):
        entry, at = _listed(blob, at, file.path)
        # PyTorch looks names up without regard to case.
        if found.setdefault(_checked_name(entry, file.path).casefold(), entry) is not entry:
            raise PytorchError.at(
                PytorchFault.DUPLICATE_ENTRY,
                file.path,
                f"the entry {entry.shown!r} is there twice",
                entry=entry.shown,
            )
    if at != nbytes:
        raise PytorchError.at(
            PytorchFault.ARCHIVE_DIRECTORY,
            file.path,
            f"its {count} entries end at {at} of {nbytes}",
            ends=at,
            nbytes=nbytes,
        )
    return list(found.values())


def _listed(blob: bytes, at: int, path: str) -> tuple[_Listed, int]:
    body = at + _CENTRAL.size
    if body > len(blob) or not blob.startswith(_CENTRAL_MARK, at):
        raise PytorchError.at(
            PytorchFault.ARCHIVE_DIRECTORY, path, f"no entry at {at} of the directory", offset=at
        )
    fields = _CENTRAL.unpack_from(blob, at)
    _, _, _, flags, method, _, _, crc, packed, nbytes = fields[:10]
    name_bytes, extra_bytes, comment_bytes, disk, _, attributes, offset = fields[10:]
    end = body + name_bytes + extra_bytes + comment_bytes
    if end > len(blob) or disk not in (0, _U16):
        raise PytorchError.at(
            PytorchFault.ARCHIVE_DIRECTORY,
            path,
            f"the entry at {at} of the directory ends at {end}",
            offset=at,
            ends=end,
        )
    name = blob[body : body + name_bytes]
    extra = blob[body + name_bytes : body + name_bytes + extra_bytes]
    nbytes, packed, offset = _large(extra, (nbytes, packed, offset), name, path)
    entry = _Listed(name, flags, method, crc, nbytes, offset)
    _check_stored(entry, packed, path)
    if nbytes and (attributes & _FOLDER or name.endswith(b"/")):
        raise PytorchError.at(
            PytorchFault.FOLDER_ENTRY,
            path,
            f"the entry {entry.shown!r} of {nbytes} bytes is a folder",
            entry=entry.shown,
        )
    return entry, end


def _large(extra: bytes, sizes: tuple[int, ...], name: bytes, path: str) -> tuple[int, ...]:
    """Return the sizes, with those that did not fit 32 bits from the extra fields.

    An extra field is (id, length, data).
    """
    waiting = [number for number, size in enumerate(sizes) if size == _U32]
    if not waiting:
        return sizes
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == _ZIP64 and length >= 8 * len(waiting) and at + 4 + length <= len(extra):
            large = struct.unpack_from(f"<{len(waiting)}Q", extra, at + 4)
            found = dict(zip(waiting, large, strict=True))
            return tuple(found.get(number, size) for number, size in enumerate(sizes))
        at += 4 + length
    shown = shorten(name.decode("utf-8", "replace"))
    raise PytorchError.at(
        PytorchFault.ENTRY_SIZE,
        path,
        f"the entry {shown!r} does not say how large it is",
        entry=shown,
    )


def _check_stored(entry: _Listed, packed: int, path: str) -> None:
    shown = entry.shown
    if entry.flags & ~(_FOOTER | _UTF8):
        raise PytorchError.at(
            PytorchFault.ENCRYPTED_ENTRY,
            path,
            f"the entry {shown!r} has the flags {entry.flags:#x}",
            entry=shown,
            flags=entry.flags,
        )
    if entry.method:
        raise PytorchError.at(
            PytorchFault.COMPRESSED_ENTRY,
            path,
            f"the entry {shown!r} is compressed (method {entry.method})",
            entry=shown,
            method=entry.method,
        )
    if packed != entry.nbytes:
        raise PytorchError.at(
            PytorchFault.ENTRY_SIZE,
            path,
            f"the entry {shown!r} is {packed} bytes packed and {entry.nbytes} unpacked",
            entry=shown,
            packed=packed,
            nbytes=entry.nbytes,
        )


def _checked_name(entry: _Listed, path: str) -> str:
    try:
        name = entry.name.decode("utf-8")
    except UnicodeDecodeError:
        name = ""
    parts = name.removesuffix("/").split("/")
    if len(entry.name) > MAX_NAME_BYTES or {"", ".", ".."} & {*parts} or set("\0\\") & {*name}:
        raise PytorchError.at(
            PytorchFault.ENTRY_NAME, path, f"an entry is called {entry.shown!r}", entry=entry.shown
        )
    return name


def _locate(file: ReadableFile, listed: list[_Listed], limit: int) -> list[Entry]:
    """Find the data of each entry, in the order of their offsets; they must cover the file."""
    found: list[Entry] = []
    expected, before = 0, "the beginning"
    for entry in listed:
        if entry.offset != expected:
            overlaps = entry.offset < expected
            fault = PytorchFault.ENTRY_OVERLAP if overlaps else PytorchFault.ENTRY_HOLE
            raise PytorchError.at(
                fault,
                file.path,
                f"the entry {entry.shown!r} begins at {entry.offset}, {before} ends at {expected}",
                entry=entry.shown,
                begins=entry.offset,
                expected=expected,
            )
        start = _data_start(file, entry, limit)
        found.append(Entry(entry.name.decode("utf-8"), start, entry.nbytes))
        expected = _after_footer(file, entry, start + entry.nbytes, limit)
        before = repr(entry.shown)
    if expected != limit:
        raise PytorchError.at(
            PytorchFault.ENTRY_HOLE,
            file.path,
            f"{limit - expected} bytes before the directory belong to no entry",
            begins=limit,
            expected=expected,
        )
    return found


def _data_start(file: ReadableFile, entry: _Listed, limit: int) -> int:
    body = entry.offset + _LOCAL.size
    if body + len(entry.name) > limit:
        raise _beyond(file.path, entry, body + len(entry.name), limit)
    blob = file.read(entry.offset, _LOCAL.size + len(entry.name))
    mark, _, flags, method, _, _, crc, packed, nbytes, name_bytes, extra_bytes = _LOCAL.unpack_from(
        blob
    )
    start: int = body + name_bytes + extra_bytes
    named = name_bytes == len(entry.name) and blob[_LOCAL.size :] == entry.name
    if mark != _LOCAL_MARK or not named or (flags, method) != (entry.flags, entry.method):
        raise _disagree(file.path, entry, "name, flags or method")
    if start + entry.nbytes > limit:
        raise _beyond(file.path, entry, start + entry.nbytes, limit)
    if _U32 in (nbytes, packed):
        extra = file.read(body + name_bytes, extra_bytes)
        nbytes, packed = _large(extra, (nbytes, packed), entry.name, file.path)
    # With a footer, the writer did not know yet.
    unknown = (0, 0, 0) if entry.flags & _FOOTER else None
    said = (crc, nbytes, packed)
    if said not in ((entry.crc, entry.nbytes, entry.nbytes), unknown):
        raise _disagree(file.path, entry, "checksum or size")
    return start


def _after_footer(file: ReadableFile, entry: _Listed, end: int, limit: int) -> int:
    """Return where the next entry begins: after the footer, with a mark or not, 32 bits or 64."""
    if not entry.flags & _FOOTER:
        return end
    blob = file.read(end, min(_LONGEST_FOOTER, limit - end))
    for code, most in (("<LLL", _U32), ("<LQQ", file.size)):
        if entry.nbytes <= most:
            body = struct.pack(code, entry.crc, entry.nbytes, entry.nbytes)
            for footer in (_FOOTER_MARK + body, body):
                if blob.startswith(footer):
                    return end + len(footer)
    raise _disagree(file.path, entry, "footer")


def _beyond(path: str, entry: _Listed, ends: int, limit: int) -> PytorchError:
    return PytorchError.at(
        PytorchFault.ENTRY_BEYOND,
        path,
        f"the entry {entry.shown!r} ends at {ends}, the data at {limit}",
        entry=entry.shown,
        ends=ends,
        limit=limit,
    )


def _disagree(path: str, entry: _Listed, what: str) -> PytorchError:
    return PytorchError.at(
        PytorchFault.LOCAL_HEADER,
        path,
        f"the entry {entry.shown!r} at {entry.offset} has another {what} than the directory says",
        entry=entry.shown,
        offset=entry.offset,
    )
