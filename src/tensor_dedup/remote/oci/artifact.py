"""Artifacts in OCI registries as a pull sees them: the model's manifest, tables, and layers.

An artifact with tables is presented as a read-only remote (`ArtifactBucket`), from which a pull
reads ranges of layers, those of missing pieces. If there are no tables, or the registry does not
support ranges, the pull downloads whole layers (`Artifact.download`) and imports them.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace as replace_fields
from pathlib import Path, PurePosixPath
from typing import Final

from tensor_dedup.digest import digest
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import Bucket, ObjectStatus
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    NotARemoteError,
    ReadOnlyRemoteError,
    RemoteAccessError,
    RemoteNameTakenError,
    RemoteUnreachableError,
    remote_damage,
)
from tensor_dedup.remote.oci import modelpack
from tensor_dedup.remote.oci.archives import ChunkStream, check_file, unpack, write_file
from tensor_dedup.remote.oci.modelpack import RAW, ArtifactLayer, Descriptor, ManifestDocument
from tensor_dedup.remote.oci.push import layer_digest
from tensor_dedup.remote.oci.registry import (
    SCHEME,
    ArtifactName,
    RegistryRepository,
    digest_of,
    is_digest,
)
from tensor_dedup.remote.results import TransferListener, TransferResult
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import (
    DamagedFileError,
    NameTakenError,
    NewerFormatError,
    os_errors,
)
from tensor_dedup.store.files import Files
from tensor_dedup.store.folders import content_of, files_below, make_folders, remove_folder
from tensor_dedup.store.format import frames
from tensor_dedup.store.format.tables import KIND, Table
from tensor_dedup.store.locks import lock_of
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint

_log = logging.getLogger(__name__)
_HEX: Final = re.compile("[0-9a-f]{64}")


def is_artifact(url: object) -> bool:
    """Return whether a URL names an artifact in an OCI registry (`oci://`)."""
    return isinstance(url, str) and url.startswith(SCHEME)


def default_name(url: str) -> str:
    """Return the default name for a checkpoint pulled from `url`.

    It is the last part of the repository's name.

    Raises:
        RemoteUrlError: The URL does not name an artifact.
    """
    return ArtifactName.parse(url).repository.rpartition("/")[2]


class NoTablesError(RemoteUnreachableError):
    """The tables of an artifact are missing or damaged, so whole layers must be pulled."""

    advice = "push it again with --replace"


class ArtifactBucket(Bucket):
    """An artifact with tables, presented as a read-only remote with one checkpoint.

    Tables say where each tensor lies in the layers; they are read when they are first needed. The
    checkpoint is called `name`, and `manifest` is the name of its manifest. `document` is the
    manifest of the artifact, which names its tables.

    Raises:
        NoTablesError: From any method, if the tables cannot be read, or do not fit the manifest and
            the layers.
    """

    def __init__(
        self, registry: RegistryRepository, name: str, manifest: str, document: ManifestDocument
    ) -> None:
        super().__init__(registry.name.url)
        self.traffic, self._registry = registry.traffic, registry
        self._manifest, self._document = manifest, document
        self._lock, self._is_open = threading.Lock(), False
        self._layers: dict[str, str] = {}
        self._objects = {
            layout.MARKER: frames.encode_text(layout.MARKER_LINES),
            layout.ref_key(name): layout.reference(name, manifest),
        }

    def _open(self) -> None:
        with self._lock:
            if not self._is_open:
                try:
                    self._read()
                except (DamagedRemoteError, NewerFormatError) as error:
                    _log.warning("whole layers are pulled: %s", str(error))
                    raise NoTablesError.at(self.url, "its tables cannot be read") from error
                self._is_open = True

    def _read(self) -> None:
        named = self._document.tables or ""
        blob = self._registry.blob(named, layout.FRAME_BYTES)
        tables = modelpack.decode_tables(blob, self._registry.at(named))
        if tables.manifest.hex() != self._manifest:
            raise DamagedRemoteError.at(self.url, "its tables are those of another manifest")
        for blob in tables.objects:
            self._objects[layout.manifest_key(digest(blob))] = blob
        found = set[tuple[str, int]]()
        for layer in tables.layers:
            container = ContainerId(digest(layer.table), RAW)
            with remote_damage(self.at(layout.table_key(container.name))) as path:
                table = frames.decode(layer.table, KIND, Table, path)
                if table.kind != RAW:
                    raise DamagedFileError.at(path, f"no layer is of the kind {table.kind!r}")
            name = f"sha256:{layer.sha256.hex()}"
            found.add((name, table.data_bytes))
            self._objects[layout.table_key(container.name)] = layer.table
            self._layers[layout.container_key(container)] = name
        # What others pull, scan and sign are the layers, so they have to be what we pull, too.
        if found != {(layer.digest, layer.size) for layer in self._document.layers}:
            raise DamagedRemoteError.at(self.url, "its tables are those of other layers")

    def at(self, key: str) -> str:
        # docstring inherited
        layer = self._layers.get(key)
        return f"{self.url}: {key}" if layer is None else self._registry.at(layer)

    def get(self, key: str, limit: int) -> tuple[bytes, str] | None:
        # docstring inherited
        if key not in self._objects:
            self._open()
        blob = self._objects.get(key)
        return None if blob is None else (blob, "")

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        # docstring inherited
        self._open()
        return memoryview(b"".join(self._registry.blob_range(self._layers[key], start, stop)))

    def stream_range(
        self, key: str, start: int, stop: int, arrived: Callable[[memoryview], None]
    ) -> None:
        # docstring inherited
        self._open()
        for chunk in self._registry.blob_range(self._layers[key], start, stop):
            arrived(memoryview(chunk))

    def head(self, key: str) -> ObjectStatus | None:
        # docstring inherited
        found = self.get(key, layout.FRAME_BYTES)
        return None if found is None else ObjectStatus(key, len(found[0]), "", 0.0)

    def list(self, prefix: str) -> Iterator[ObjectStatus]:
        # docstring inherited
        self._open()
        for key, blob in self._objects.items():
            if key.startswith(prefix):
                yield ObjectStatus(key, len(blob), "", 0.0)

    def put(self, key: str, chunks: Sequence[memoryview] | Iterator[memoryview]) -> None:
        # docstring inherited
        raise self._read_only()

    def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
        # docstring inherited
        raise self._read_only()

    def delete(self, key: str) -> None:
        # docstring inherited
        raise self._read_only()

    def _read_only(self) -> ReadOnlyRemoteError:
        return ReadOnlyRemoteError.at(self.url, "what an artifact holds does not change")


class Artifact:
    """An artifact in a registry, opened for a pull. Any program may have made the artifact."""

    def __init__(self, registry: RegistryRepository) -> None:
        """Read the manifest of the artifact that `registry` names.

        Raises:
            NotARemoteError: There is no artifact of this name.
            UnsupportedError: The name stands for an index of several artifacts.
        """
        self.registry, self.url = registry, registry.name.url
        held = registry.manifest(registry.name.reference)
        if held is None:
            raise NotARemoteError.at(self.url, "there is no such artifact")
        self.digest = digest_of(held)
        self._document = modelpack.decode_document(held, self.url)
        if self._document.manifests:
            what = "it is an index of several artifacts; pull one of them by its digest"
            raise UnsupportedError(f"{self.url}: {what}", url=self.url)

    @property
    def is_ours(self) -> bool:
        """Whether a store pushed the artifact, so that its files are all those of a checkpoint."""
        return self._document.manifest is not None

    def as_bucket(self, name: str) -> ArtifactBucket | None:
        """Return a bucket that presents the artifact as a remote with the checkpoint `name`.

        Returns None if the artifact's manifest does not name tables, which say where each tensor
        lies in the layers. This method does not read the tables.
        """
        manifest = self._document.manifest or ""
        if self._document.tables is None or not _HEX.fullmatch(manifest):
            return None
        return ArtifactBucket(self.registry, name, manifest, self._document)

    def unchanged(self, held: StoredCheckpoint, name: str) -> TransferResult | None:
        """Compare the local checkpoint `held` with the artifact; return a result if they are equal.

        Returns None if the comparison needs a download, because a layer is an archive or the
        artifact has files that the checkpoint lacks.

        Raises:
            RemoteNameTakenError: The local checkpoint, called `name`, differs from the artifact.
        """
        listed = self._document.layers
        layers = {str(PurePosixPath(layer.path or "")): layer for layer in listed}
        if "." in layers or len(layers) < len(listed):
            return None
        if not all(is_digest(layer.digest) for layer in listed):
            return None
        # The small ones first: any may be the one that differs.
        for file in sorted(held.files, key=lambda file: file.nbytes):
            layer, here = layers.get(file.path), ArtifactLayer("", file.path, file.pieces)
            if layer is None or layer.size != file.nbytes:
                raise _taken(self.url, name)
            if layer.digest != layer_digest(held, here):
                raise _taken(self.url, name)
        if len(held.files) < len(layers):
            return None
        pieces = sum(piece.name is not None for file in held.files for piece in file.pieces)
        return self._result(name, pieces, held.nbytes)

    def planned(self, name: str) -> TransferResult:
        """Return what a download of all layers, to import them as `name`, would transfer.

        How many tensors they hold is not known before.
        """
        nbytes = sum(layer.size for layer in self._document.layers)
        result = self._result(name, 0, nbytes)
        return replace_fields(result, moved_bytes=nbytes, unchanged=False, done=False)

    def _result(self, name: str, pieces: int, nbytes: int) -> TransferResult:
        """Of a pull that finds all of the artifact here."""
        wire, calls = self.registry.traffic.counts()
        return TransferResult(self.url, (name,), pieces, nbytes, 0, 0, wire, calls, 0.0, True)

    def download(self, folder: Path, files: Files, progress: TransferListener) -> None:
        """Write the files in all layers into `folder`, and verify the digest of each layer.

        A file in `folder` may be the beginning of a layer that an earlier attempt has left. Only
        the rest of that layer is then downloaded. All other files in `folder` are deleted first.

        Raises:
            UnsupportedError: A layer has an unknown type or no file name, a file's path is too long
                for this file system, or there are no layers.
            DamagedRemoteError: A layer does not match its digest, or a file's path leads out of the
                folder.
        """
        held = self._document.layers
        layers = [each for each in held if each.media_type != modelpack.EMPTY or each.path]
        if not layers:
            what = "it has no layers; pull one that holds a model"
            raise UnsupportedError(f"{self.url}: {what}", url=self.url)
        with os_errors(folder):
            for layer in layers:  # before anything is downloaded
                self._check(folder, layer, files)
            begun = _begun(folder, layers, files)
            progress.saved(sum(begun.values()))
            progress.start(sum(layer.size for layer in layers) - sum(begun.values()))
            for layer in layers:
                size = begun.pop(layer.path, 0)
                try:
                    self._write(folder, layer, size, files, progress)
                except DamagedRemoteError:
                    if not size or layer.path is None:
                        raise
                    # The machine may have stopped before what was written was on its disk.
                    files.unlink(folder / layer.path)
                    self._write(folder, layer, 0, files, progress)

    def _check(self, folder: Path, layer: Descriptor, files: Files) -> None:
        if layer.path is not None:
            check_file(folder, layer.path, files, self._shown(layer))
        elif layer.packing is None:
            what = f"a layer of the type {layer.media_type!r} without a file's name"
            raise UnsupportedError(f"{self.url}: {what}; pull it with its own client", url=self.url)

    def _write(
        self, folder: Path, layer: Descriptor, held: int, files: Files, progress: TransferListener
    ) -> None:
        """Write the files of a layer. Of the one that it is, the first `held` bytes are there."""
        begun = content_of(files, folder / (layer.path or "")) if held else ()

        def chunks() -> Iterator[bytes]:
            for chunk in self.registry.chunks(layer.digest, layer.size, begun):
                progress.advance(len(chunk))
                yield chunk

        stream, shown = ChunkStream(chunks()), self._shown(layer)
        if layer.path is not None:
            write_file(folder, layer.path, stream, files, shown, held)
        else:
            unpack(folder, stream, layer.packing or "", files, shown)
        stream.drain()

    def _shown(self, layer: Descriptor) -> str:
        """The artifact and one of its layers, for messages."""
        return f"{self.url}, layer {layer.digest}"


def _begun(folder: Path, layers: Sequence[Descriptor], files: Files) -> dict[str | None, int]:
    """The sizes of those files that may be the beginning of a layer; others are removed."""
    sizes, found = {layer.path: layer.size for layer in layers}, dict[str | None, int]()
    for path in files_below(files, folder):
        name, status = str(path.relative_to(folder)), files.status(path)
        if status is not None and 0 < status.size <= sizes.get(name, 0):
            found[name] = status.size
        else:
            files.unlink(path)
    return found


def _taken(url: str, name: str) -> RemoteNameTakenError:
    what = f"{name!r} stands for another checkpoint here"
    return RemoteNameTakenError.at(url, what, name=name)


@contextmanager
def advising_pull(url: str, name: str) -> Iterator[None]:
    """Context manager that turns a NameTakenError of an import into a RemoteNameTakenError.

    The new error is about the pull of the checkpoint `name` from `url`. A subclass of
    NameTakenError is not converted.
    """
    try:
        yield
    except NameTakenError as error:
        if type(error) is not NameTakenError:  # of a step, which nothing replaces
            raise
        raise _taken(url, name) from error


@contextmanager
def layers_folder(tmp: Path, artifact: Artifact, files: Files) -> Iterator[Path]:
    """Context manager that yields the path of a folder in `tmp` for the layers of an artifact.

    The folder is removed at the end, unless the registry becomes unreachable or refuses access, or
    the user interrupts. In these cases it stays, so that the next pull of the same artifact can
    continue. The next gc of the store removes it.
    """
    folder, keep = tmp / f"layers-{artifact.digest.rpartition(':')[2]}", False
    make_folders(files, folder)
    lock = lock_of(files, folder / "lock")
    if lock is None:  # another process is pulling it
        folder = tmp / files.token()
    try:
        make_folders(files, folder / "files")
        yield folder / "files"
    except (RemoteUnreachableError, RemoteAccessError, KeyboardInterrupt):
        keep = lock is not None
        raise
    finally:
        if not keep:
            remove_folder(files, folder)
        if lock is not None:
            files.close(lock)
