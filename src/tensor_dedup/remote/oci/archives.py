"""How layers become files in a folder, also those of other programs, which may be tar archives.

Either all files in an archive are written, or the pull fails. Members other than files and links to
files are refused. Sparse files are refused too, because a small archive could declare terabytes
with them.
"""

import gzip
import posixpath
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final, NoReturn, Self

import zstandard

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.remote.errors import DamagedRemoteError, remote_damage
from tensor_dedup.store.files import Files
from tensor_dedup.store.folders import content_of, is_too_long, make_folders
from tensor_dedup.store.format.names import check_path

_END: Final = tarfile.EOFHeaderError  # type: ignore[attr-defined]  # which typeshed lacks
_ENDED: Final = "tensor_dedup_ended"
# What tarfile and what unpacks for it raise; ValueErrors are about what should be a number.
_NO_ARCHIVE: Final = (
    *(tarfile.TarError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError),
    *(EOFError, ValueError, RecursionError),
)
# What goes before a member, and is read into memory: a long name, or facts about it in pairs.
_BEFORE_A_MEMBER: Final = frozenset(
    {
        *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
        *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    }
)
# tarfile calls itself for each, and keeps them all: some hundred, or it is a RecursionError.
_BEFORE_BYTES: Final = 1 << 16
# Linux opens no longer path. All links are in memory until the archive has ended, and are looked
# through once for each link of a chain: a compressed archive of some kilobytes can have millions.
_NAME_CHARS: Final = 4096
_MOST_LINKS: Final = 10_000
_SHOWN_CHARS: Final = 200
_OTHERWISE: Final = "pull it with its own client"


class ChunkStream:
    """A file-like reader over an iterator of chunks."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._held = chunks, b""

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, or fewer at the end."""
        while len(self._held) < size:
            chunk = next(self._chunks, b"")
            if not chunk:
                break
            self._held += chunk
        found, self._held = self._held[:size], self._held[size:]
        return found

    def drain(self) -> None:
        """Read and discard all remaining chunks.

        At its end, the iterator verifies the digest of all bytes.
        """
        while self.read(1 << 20):
            pass


def _shown(name: str) -> str:
    return repr(name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}...")


def check_file(folder: Path, path: str, files: Files, layer: str) -> PurePosixPath:
    """Check that a file in `folder` can have the path `path`; return it as a path.

    Messages begin with `layer`, which names the artifact and the layer that the file is from.

    Raises:
        DamagedRemoteError: The path leads out of the folder, or is not in normal form.
        UnsupportedError: The path is longer than the file system takes.
    """
    with remote_damage(layer) as where:
        inner = check_path(path, where)
    if is_too_long(files, folder, inner):
        what = f"the path {_shown(path)} is longer than a file's here can be"
        raise UnsupportedError(f"{layer}: {what}; {_OTHERWISE}", url=layer)
    return inner


def write_file(
    folder: Path, path: str, stream: Any, files: Files, layer: str, held: int = 0
) -> str:
    """Write the content of `stream` to `path` in a folder; return the path in normalised form.

    Of a file that is there already, the first `held` bytes are kept. Messages begin with `layer`,
    which names the artifact and the layer that the file is from.

    Raises:
        DamagedRemoteError: A file with this path exists, a file and a folder have the same path, or
            the path leads out of the folder.
        UnsupportedError: The path is longer than the file system takes.
    """
    inner = check_file(folder, path, files, layer)
    target = folder / inner
    try:
        make_folders(files, target.parent)
        handle, at = files.open(target, "modify" if held else "create"), held
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        what = f"{_shown(path)} is there twice, or a file and a folder"
        raise DamagedRemoteError.at(layer, what) from error
    try:
        while chunk := stream.read(1 << 20):
            files.pwrite(handle, chunk, at)
            at += len(chunk)
    finally:
        files.close(handle)
    return str(inner)


def unpack(folder: Path, stream: ChunkStream, packing: str, files: Files, layer: str) -> None:
    """Write the files in an archive into a folder.

    `stream` has the bytes of the archive, which is a layer of an artifact. `packing` is the
    compression: "" for none, "gz" or "zst". Messages begin with `layer`, which names both.

    Raises:
        UnsupportedError: The archive has a sparse file, a member other than a file, a folder or a
            link to a file, a name or link target of more than 4096 characters, or more than 10,000
            links.
        DamagedRemoteError: A file's name leads out of the folder or is there twice, the bytes are
            not an archive, or the archive is incomplete.
    """
    source: Any = stream
    if packing == "zst":
        source = zstandard.ZstdDecompressor().stream_reader(source, read_across_frames=True)
    elif packing == "gz":
        source = gzip.GzipFile(fileobj=source)
    unpacking = _Unpacking(folder, files, layer)
    try:
        with tarfile.open(fileobj=source, mode="r|", tarinfo=_Entry) as archive:
            for entry in archive:
                unpacking.take(entry, archive)
                # Or all that it has met stays in memory; typeshed lacks it.
                archive.members.clear()  # type: ignore[attr-defined]
            ended = getattr(archive, _ENDED, False)
    except _SparseFileError:
        what = "an archive with a sparse file"
        raise UnsupportedError(f"{layer}: {what}; {_OTHERWISE}", url=layer) from None
    except _NO_ARCHIVE as error:
        why = str(error)[:_SHOWN_CHARS]
        raise DamagedRemoteError.at(layer, f"it is no archive ({why})") from error
    if not ended:
        raise DamagedRemoteError.at(layer, "it is an archive without an end")
    unpacking.follow()


class _Unpacking:
    """An archive that is being unpacked: what it has written, and the links it has met."""

    def __init__(self, folder: Path, files: Files, layer: str) -> None:
        self._folder, self._files, self._layer = folder, files, layer
        self._links, self._written = dict[str, str](), set[str]()

    def take(self, entry: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        """Write a file, or note where a link leads."""
        if max(len(entry.name), len(entry.linkname)) > _NAME_CHARS:
            raise self._unsupported(f"{_shown(entry.name)} in it has a name or a target too long")
        name = posixpath.normpath(entry.name)
        if entry.islnk() or entry.issym():
            folder = posixpath.dirname(name) if entry.issym() else ""
            self._links[name] = posixpath.normpath(posixpath.join(folder, entry.linkname))
            if len(self._links) > _MOST_LINKS:
                raise self._unsupported(f"an archive in it has more than {_MOST_LINKS} links")
        elif (data := archive.extractfile(entry) if entry.isfile() else None) is not None:
            self._write(name, data)
        elif not entry.isdir():
            raise self._unsupported(f"{_shown(name)} in it is neither a file nor a link to one")

    def follow(self) -> None:
        """Write what links lead to, under their names."""
        left = self._links
        while left:
            ready = {name: target for name, target in left.items() if target in self._written}
            if not ready:
                name, target = next(iter(left.items()))
                what = f"{_shown(name)} is a link to {_shown(target)}"
                raise self._unsupported(f"{what}, which is no file of the archive")
            for name, target in ready.items():
                self._write(name, ChunkStream(content_of(self._files, self._folder / target)))
                del left[name]

    def _unsupported(self, what: str) -> UnsupportedError:
        return UnsupportedError(f"{self._layer}: {what}; {_OTHERWISE}", url=self._layer)

    def _write(self, name: str, stream: Any) -> None:
        self._written.add(write_file(self._folder, name, stream, self._files, self._layer))


class _SparseFileError(Exception):
    """A member says where its bytes lie in the file, between zeros that the archive lacks."""


class _Entry(tarfile.TarInfo):
    """An entry of an archive, which notes that its end was there: tarfile also stops elsewhere.

    tarfile reads the map of a sparse file, and all that goes before a member, into memory. A
    compressed archive of some kilobytes can have gigabytes of either.
    """

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        # docstring inherited
        try:
            return super().fromtarfile(tarfile)
        except _END:
            setattr(tarfile, _ENDED, True)
            raise

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        # docstring inherited
        entry = super().frombuf(buf, encoding, errors)
        if entry.type == tarfile.GNUTYPE_SPARSE:
            raise _SparseFileError
        if entry.type in _BEFORE_A_MEMBER and entry.size > _BEFORE_BYTES:
            raise tarfile.ReadError(f"{entry.size} bytes go before a member")
        return entry

    def _refuse(self, *_: object) -> NoReturn:
        raise _SparseFileError

    # Where tarfile reads the other forms of such a map, which are pairs before a member.
    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse
