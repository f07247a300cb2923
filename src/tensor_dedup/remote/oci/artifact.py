"""Checkpoints in OCI registries: pushed as ordinary artifacts, pulled tensor by tensor.

A push makes two artifacts (`modelpack`): one has the files of the model, and the other has tables
that say where each tensor lies in these files. The push sends the blobs first and sets the tag of
the model last, so the tag never names missing layers. A pull treats an artifact with tables as a
read-only remote (`ArtifactBucket`), and downloads only missing pieces. If there are no tables, or
the registry does not support ranges, the pull downloads whole layers and imports them.
"""

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace as replace_fields
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import quote

import msgspec

from tensor_dedup.digest import digest, leaf_digests
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import Bucket, ObjectStatus, too_large
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    MissingRemoteError,
    NotARemoteError,
    ReadOnlyRemoteError,
    RemoteAccessError,
    RemoteNameTakenError,
    RemoteUnreachableError,
    RemoteUrlError,
    remote_damage,
)
from tensor_dedup.remote.oci import modelpack as artifacts
from tensor_dedup.remote.oci.archives import ChunkStream, check_file, unpack, write_file
from tensor_dedup.remote.oci.modelpack import (
    EMPTY,
    EMPTY_BLOB,
    FILE_PATH,
    MODEL,
    MODEL_CONFIG,
    OUR_MANIFEST,
    OUR_TABLES,
    RAW,
    TABLES,
    TITLE,
    ArtifactLayer,
    ArtifactTables,
    Descriptor,
    ManifestDocument,
)
from tensor_dedup.remote.oci.registry import (
    INDEX,
    MANIFEST,
    MANIFEST_BYTES,
    SCHEME,
    ArtifactName,
    RegistryManifest,
    RegistryRepository,
    is_digest,
)
from tensor_dedup.remote.results import TransferListener, TransferResult
from tensor_dedup.settings import cache_folder
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import (
    DamagedFileError,
    NameTakenError,
    NewerFormatError,
    os_errors,
)
from tensor_dedup.store.files import Files, Handle
from tensor_dedup.store.folders import files_below, make_folders, remove_folder
from tensor_dedup.store.format import frames
from tensor_dedup.store.format.manifests import Piece
from tensor_dedup.store.format.tables import KIND, Table
from tensor_dedup.store.locks import lock_of
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint

_log = logging.getLogger(__name__)
# Whole leaves, so that verifying a piece reads nothing twice.
_STEP: Final = 32 << 20
_AT_ONCE: Final = 3
_HEX: Final = re.compile("[0-9a-f]{64}")
_REMEMBERED: Final = 20_000
_ORAS_FOLDER: Final = "io.deis.oras.content.unpack"


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


# --- push


class _Blob:
    """The bytes of a layer, from a store; each read compares them with their digests."""

    def __init__(
        self, checkpoint: StoredCheckpoint, layer: ArtifactLayer, advance: Callable[[int], None]
    ) -> None:
        self._checkpoint, self._layer, self._advance = checkpoint, layer, advance

    def __len__(self) -> int:
        return self._layer.nbytes

    def __iter__(self) -> Iterator[bytes]:
        for part in self._layer.parts:
            if isinstance(part, bytes):
                self._advance(len(part))
                yield part
                continue
            for start in range(0, part.nbytes, _STEP):
                stop = min(start + _STEP, part.nbytes)
                data = self._checkpoint.read_piece(part.digest, start, stop, part.nbytes)
                self._advance(len(data))
                yield bytes(data)


def push(
    url: str,
    checkpoint: StoredCheckpoint,
    objects: Sequence[bytes],
    files: Files,
    progress: TransferListener,
    *,
    replace: bool = False,
    dry_run: bool = False,
) -> TransferResult:
    """Push the open `checkpoint` under the tag in `url`.

    `objects` are the encoded pages and manifest of the checkpoint. A layer is not sent if the
    repository has it, or if the registry can copy it from another repository to which this user has
    pushed it. If the tag already stands for this checkpoint, no layer is sent. With `replace`, or
    if the registry has lost the checkpoint's tables, missing layers are sent even then. With
    `dry_run`, nothing is sent.

    Raises:
        RemoteUrlError: The URL has a digest in place of a tag.
        RemoteNameTakenError: The tag stands for another artifact, and `replace` is False.
    """
    name = ArtifactName.parse(url)
    if name.is_pinned:
        raise RemoteUrlError.at(name.url, "a push needs a tag, and this is a digest")
    with RegistryRepository(name) as registry:
        work = _Push(registry, checkpoint, files, progress)
        result = work.run(objects, replace=replace, dry_run=dry_run)
        return replace_fields(result, done=not dry_run)


class _Push:
    def __init__(
        self,
        registry: RegistryRepository,
        checkpoint: StoredCheckpoint,
        files: Files,
        progress: TransferListener,
    ) -> None:
        self._registry, self._name = registry, registry.name
        self._checkpoint, self._progress = checkpoint, progress
        self._known = _KnownBlobs(files, registry.name.host)
        self._began = time.monotonic()
        self._moved: dict[str, ArtifactLayer] = {}

    def run(self, objects: Sequence[bytes], *, replace: bool, dry_run: bool) -> TransferResult:
        checkpoint, registry = self._checkpoint, self._registry
        held = registry.manifest(self._name.reference)
        if held is not None:
            document = artifacts.decode_document(held.blob, self._name.url)
            notes = document.annotations or {}
            same, tables_ = notes.get(OUR_MANIFEST) == checkpoint.manifest, _tables_of(notes)
            # A copy of the model alone leaves the tables behind. To replace an artifact by itself
            # is to send what the registry has lost of it.
            if same and not replace and tables_ and registry.has_blob(tables_):
                return self._result(unchanged=True)
            if not same and not replace:
                what = f"the tag {self._name.reference!r} stands for another artifact there"
                raise RemoteNameTakenError.at(self._name.url, what, name=self._name.reference)
        layers = artifacts.layers_of(checkpoint.files)
        # Not the store's: SHA-256 of whole layers, a layer a thread.
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            digests = [*pool.map(partial(_hashed, checkpoint), layers)]
            if dry_run:
                there = pool.map(registry.has_blob, digests)
                both = zip(digests, layers, there, strict=True)
                self._moved = {digest: layer for digest, layer, held in both if not held}
                return self._result(unchanged=False)
        tables = [artifacts.table_of(layer, self._leaves) for layer in layers]
        blob = artifacts.encode_tables(
            checkpoint.manifest, objects, [*zip(digests, tables, strict=True)]
        )
        descriptors = [
            Descriptor(layer.media_type, digest, layer.nbytes, _annotations(layer))
            for layer, digest in zip(layers, digests, strict=True)
        ]
        config = artifacts.model_config(checkpoint.name, descriptors)
        self._send(dict(zip(digests, layers, strict=True)), [config, blob, EMPTY_BLOB])
        self._publish(config, descriptors, blob)
        self._known.remember(digests, self._name.repository)
        return self._result(unchanged=False)

    def _leaves(self, piece: Piece) -> bytes:
        records = self._checkpoint.records(piece.digest)
        if records:
            return records[0].leaves
        # The header of a file that an export makes: it is in no container.
        made = self._checkpoint.read_piece(piece.digest, 0, piece.nbytes, piece.nbytes)
        return b"".join(leaf_digests(memoryview(made)))

    def _send(self, layers: Mapping[str, ArtifactLayer], others: Sequence[bytes]) -> None:
        registry = self._registry
        # Of this call: its requests wait for the network.
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            there = dict(zip(layers, pool.map(registry.has_blob, layers), strict=True))
            missing = {each: layers[each] for each in layers if not there[each]}
            self._progress.saved(sum(layers[each].nbytes for each in layers if there[each]))
            self._progress.start(sum(layer.nbytes for layer in missing.values()))
            origins = self._known.repositories(missing, self._name.repository)

            def send(digest: str) -> None:
                layer = missing[digest]
                content = _Blob(self._checkpoint, layer, self._progress.advance)
                if registry.upload(digest, content, origins.get(digest)):
                    self._moved[digest] = layer
                else:
                    self._progress.saved(layer.nbytes)

            try:
                for _ in pool.map(send, missing):
                    pass
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        for blob in others:
            name = _sha256(blob)
            if not registry.has_blob(name):
                registry.upload(name, _Bytes(blob))

    def _publish(self, config: bytes, layers: Sequence[Descriptor], blob: bytes) -> None:
        """Write what refers to the model, and then the model under its tag: now it is there.

        A registry that answers without `OCI-Subject` keeps no list of what refers to a manifest.
        The distribution specification then wants an index whose tag is that manifest's digest.
        """
        registry, tables = self._registry, _sha256(blob)
        model = artifacts.manifest_blob(
            MODEL,
            Descriptor(MODEL_CONFIG, _sha256(config), len(config)),
            layers,
            annotations={OUR_MANIFEST: self._checkpoint.manifest, OUR_TABLES: tables},
        )
        if len(model) > MANIFEST_BYTES:
            raise too_large(self._name.url, len(model), MANIFEST_BYTES)
        subject = Descriptor(MANIFEST, _sha256(model), len(model))
        empty = Descriptor(EMPTY, _sha256(EMPTY_BLOB), len(EMPTY_BLOB))
        referrer = artifacts.manifest_blob(
            TABLES, empty, [Descriptor(TABLES, tables, len(blob))], subject=subject
        )
        named = _sha256(referrer)
        if not registry.put_manifest(named, MANIFEST, referrer):
            tag = subject.digest.replace(":", "-", 1)
            listed = [Descriptor(MANIFEST, named, len(referrer), None, TABLES)]
            held = registry.manifest(tag)
            if held is not None:
                found = artifacts.decode_document(held.blob, registry.at(tag)).manifests
                listed = [each for each in found if each.digest != named] + listed
            registry.put_manifest(tag, INDEX, artifacts.index_blob(listed))
        registry.put_manifest(self._name.reference, MANIFEST, model)

    def _result(self, *, unchanged: bool) -> TransferResult:
        nbytes, calls = self._registry.traffic.counts()
        moved = self._moved.values()
        held = (part for file in self._checkpoint.files for part in file.pieces)
        return TransferResult(
            url=self._name.url,
            names=(self._checkpoint.name,),
            pieces=len(self._pieces(held)),
            nbytes=self._checkpoint.nbytes,
            moved_pieces=len(self._pieces(part for layer in moved for part in layer.parts)),
            moved_bytes=sum(layer.nbytes for layer in moved),
            wire_bytes=nbytes,
            requests=calls,
            seconds=time.monotonic() - self._began,
            unchanged=unchanged,
        )

    def _pieces(self, parts: Iterable[bytes | Piece]) -> set[bytes]:
        """Those that a pull counts, too: none that only archives and generated files have."""
        pieces = (part for part in parts if isinstance(part, Piece) and part.nbytes)
        return {piece.digest for piece in pieces if self._checkpoint.records(piece.digest)}


class _Bytes:
    """Content that is in memory."""

    def __init__(self, blob: bytes) -> None:
        self._blob = blob

    def __len__(self) -> int:
        return len(self._blob)

    def __iter__(self) -> Iterator[bytes]:
        yield self._blob


def _hashed(checkpoint: StoredCheckpoint, layer: ArtifactLayer) -> str:
    hasher = hashlib.sha256()
    for chunk in _Blob(checkpoint, layer, lambda _: None):
        hasher.update(chunk)
    return f"sha256:{hasher.hexdigest()}"


def _tables_of(notes: Mapping[str, str]) -> str | None:
    """The digest of the tables that annotations name, if it is one."""
    named = notes.get(OUR_TABLES)
    return named if named is not None and is_digest(named) else None


def _annotations(layer: ArtifactLayer) -> dict[str, str] | None:
    # ModelPack's clients go by the one, ORAS by the other.
    return None if layer.path is None else {FILE_PATH: layer.path, TITLE: layer.path}


def _sha256(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


class _KnownBlobs:
    """In which repository of a registry this user has pushed a blob: a cache, for mounts."""

    def __init__(self, files: Files, host: str) -> None:
        self._files = files
        self._path = cache_folder() / "registries" / f"{quote(host, '')}.json"

    def _read(self) -> dict[str, str]:
        files = self._files
        try:
            handle = files.open(self._path, "read")
        except OSError:
            return {}
        try:
            view = memoryview(bytearray(files.status_of(handle).size))
            found = view[: files.pread(handle, view, 0)]
            return msgspec.json.decode(found, type=dict[str, str])
        except (OSError, msgspec.DecodeError, ValueError):
            return {}
        finally:
            files.close(handle)

    def repositories(self, digests: Mapping[str, object], but: str) -> dict[str, str]:
        """Return where blobs are, other than in the repository `but`."""
        held = self._read()
        return {each: held[each] for each in digests if held.get(each, but) != but}

    def remember(self, digests: Sequence[str], repository: str) -> None:
        """Take note of where blobs are; a cache that cannot be written is left alone."""
        files, held = self._files, self._read()
        new = dict.fromkeys(digests, repository)
        kept = [*({k: v for k, v in held.items() if k not in new} | new).items()][-_REMEMBERED:]
        tmp = self._path.with_name(f".{files.token()}")
        try:
            make_folders(files, self._path.parent)
            handle = files.open(tmp, "create")
            try:
                files.pwrite(handle, msgspec.json.encode(dict(kept)), 0)
            finally:
                files.close(handle)
            files.rename(tmp, self._path)
        except OSError as error:
            _log.debug("%s is not kept: %s", self._path, str(error))


# --- pull


class NoTablesError(RemoteUnreachableError):
    """The tables of an artifact are missing or damaged, so whole layers must be pulled."""

    advice = "push it again with --replace"


class ArtifactBucket(Bucket):
    """An artifact with tables, presented as a read-only remote with one checkpoint.

    Tables say where each tensor lies in the layers; they are read when they are first needed. The
    checkpoint is called `name`, and `manifest` is the name of its manifest. `layers` has the digest
    and the size of each layer.

    Raises:
        NoTablesError: From any method, if the tables cannot be read, or do not fit the manifest and
            the layers.
    """

    def __init__(
        self,
        registry: RegistryRepository,
        name: str,
        manifest: str,
        tables: Callable[[], ArtifactTables],
        layers: set[tuple[str, int]],
    ) -> None:
        super().__init__(registry.name.url)
        self.traffic, self._registry = registry.traffic, registry
        self._manifest, self._tables, self._expected = manifest, tables, layers
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
                except (DamagedRemoteError, MissingRemoteError, NewerFormatError) as error:
                    _log.warning("whole layers are pulled: %s", str(error))
                    raise NoTablesError.at(self.url, "its tables cannot be read") from error
                self._is_open = True

    def _read(self) -> None:
        tables = self._tables()
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
        if found != self._expected:
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
        return self._registry.blob_range(self._layers[key], start, stop)

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
        self.registry, self._name = registry, registry.name
        held: RegistryManifest | None = self.registry.manifest(self._name.reference)
        if held is None:
            raise NotARemoteError.at(self._name.url, "there is no such artifact")
        self.digest: str = held.digest
        self._document: ManifestDocument = artifacts.decode_document(held.blob, self._name.url)
        if self._document.manifests:
            what = "it is an index of several artifacts; pull one of them by its digest"
            raise UnsupportedError(f"{self._name.url}: {what}", url=self._name.url)

    @property
    def url(self) -> str:
        """The URL of the artifact."""
        return self._name.url

    @property
    def is_ours(self) -> bool:
        """Whether a store pushed the artifact, so that its files are all those of a checkpoint."""
        return OUR_MANIFEST in (self._document.annotations or {})

    def as_bucket(self, name: str) -> ArtifactBucket | None:
        """Return a bucket that presents the artifact as a remote with the checkpoint `name`.

        Returns None if the artifact's manifest does not name tables, which say where each tensor
        lies in the layers. This method does not read the tables.
        """
        notes = self._document.annotations or {}
        named, manifest = _tables_of(notes), notes.get(OUR_MANIFEST, "")
        if named is None or not _HEX.fullmatch(manifest):
            return None

        def tables() -> ArtifactTables:
            where = self.registry.at(named)
            blob = self.registry.blob(named, layout.FRAME_BYTES)
            if blob is None:
                raise MissingRemoteError.at(where, "it is gone")
            return artifacts.decode_tables(blob, where)

        layers = {(layer.digest, layer.size) for layer in self._document.layers}
        return ArtifactBucket(self.registry, name, manifest, tables, layers)

    def unchanged(self, held: StoredCheckpoint, name: str) -> TransferResult | None:
        """Compare the local checkpoint `held` with the artifact; return a result if they are equal.

        Returns None if the comparison needs a download, because a layer is an archive or the
        artifact has files that the checkpoint lacks.

        Raises:
            RemoteNameTakenError: The local checkpoint, called `name`, differs from the artifact.
        """
        began = time.monotonic()
        layers = {_plain_path_of(layer): layer for layer in self._document.layers}
        if None in layers or len(layers) < len(self._document.layers):
            return None
        if not all(is_digest(layer.digest) for layer in layers.values()):
            return None
        # The small ones first: any may be the one that differs.
        for file in sorted(held.files, key=lambda file: file.nbytes):
            layer, parts = layers.get(file.path), ArtifactLayer("", file.path, file.pieces)
            if layer is None or layer.size != file.nbytes or layer.digest != _hashed(held, parts):
                raise _taken(self.url, name)
        if len(held.files) < len(layers):
            return None
        nbytes, calls = self.registry.traffic.counts()
        return TransferResult(
            url=self.url,
            names=(name,),
            pieces=sum(piece.name is not None for file in held.files for piece in file.pieces),
            nbytes=sum(file.nbytes for file in held.files),
            moved_pieces=0,
            moved_bytes=0,
            wire_bytes=nbytes,
            requests=calls,
            seconds=time.monotonic() - began,
            unchanged=True,
        )

    def planned(self, name: str) -> TransferResult:
        """Return what a download of all layers, to import them as `name`, would transfer.

        How many tensors they hold is not known before.
        """
        nbytes, calls = self.registry.traffic.counts()
        size = sum(layer.size for layer in self._document.layers)
        return TransferResult(
            url=self.url,
            names=(name,),
            pieces=0,
            nbytes=size,
            moved_pieces=0,
            moved_bytes=size,
            wire_bytes=nbytes,
            requests=calls,
            seconds=0.0,
            unchanged=False,
            done=False,
        )

    def download(self, folder: Path, files: Files, progress: TransferListener) -> int:
        """Write the files in all layers into `folder`, and verify the digest of each layer.

        Returns the size of all layers in bytes. A file in `folder` may be the beginning of a layer
        that an earlier attempt has left. Only the rest of that layer is then downloaded. All other
        files in `folder` are deleted first.

        Raises:
            UnsupportedError: A layer has an unknown type or no file name, a file's path is too long
                for this file system, or there are no layers.
            DamagedRemoteError: A layer does not match its digest, or a file's path leads out of the
                folder.
        """
        held = self._document.layers
        layers = [each for each in held if each.media_type != EMPTY or _path_of(each) is not None]
        if not layers:
            what = "it has no layers; pull one that holds a model"
            raise UnsupportedError(f"{self.url}: {what}", url=self.url)
        with os_errors(folder):
            for layer in layers:  # before anything is downloaded
                if (path := _path_of(layer)) is not None:
                    check_file(folder, path, files, self._shown(layer))
            begun = self._begun(folder, layers, files)
        progress.saved(sum(begun.values()))
        progress.start(sum(layer.size for layer in layers) - sum(begun.values()))
        for layer in layers:
            path = _path_of(layer)
            if path is not None and path in begun:
                with os_errors(folder):
                    self._complete(folder / path, begun.pop(path), layer, progress, files)
                continue
            stream = ChunkStream(self._chunks(layer, progress))
            with os_errors(folder):
                if path is not None:
                    write_file(folder, path, stream, files, self._shown(layer))
                else:
                    self._unpack(folder, layer, stream, files)
            stream.drain()
        return sum(layer.size for layer in layers)

    def _chunks(
        self, layer: Descriptor, progress: TransferListener, held: Iterable[memoryview] = ()
    ) -> Iterator[bytes]:
        for chunk in self.registry.chunks(layer.digest, layer.size, held):
            progress.advance(len(chunk))
            yield chunk

    def _begun(
        self, folder: Path, layers: Sequence[Descriptor], files: Files
    ) -> dict[str | None, int]:
        """The sizes of those files that may be the beginning of a layer; others are removed."""
        sizes = {_path_of(layer): layer.size for layer in layers}
        begun = dict[str | None, int]()
        for path in files_below(files, folder):
            name, status = str(path.relative_to(folder)), files.status(path)
            if status is not None and 0 < status.size <= sizes.get(name, 0):
                begun[name] = status.size
            else:
                files.unlink(path)
        return begun

    def _complete(
        self, path: Path, size: int, layer: Descriptor, progress: TransferListener, files: Files
    ) -> None:
        """Write the rest of a file that is a layer."""
        handle = files.open(path, "modify")
        try:
            try:
                held = _content_of(files, handle, size)
                for chunk in self._chunks(layer, progress, held):
                    files.pwrite(handle, chunk, size)
                    size += len(chunk)
            except DamagedRemoteError:
                # The machine may have stopped before what was written was on its disk.
                files.truncate(handle, 0)
                size = 0
                for chunk in self._chunks(layer, progress):
                    files.pwrite(handle, chunk, size)
                    size += len(chunk)
        finally:
            files.close(handle)

    def _unpack(self, folder: Path, layer: Descriptor, stream: ChunkStream, files: Files) -> None:
        packing = _packing_of(layer)
        if packing is None:
            what = f"a layer of the type {layer.media_type!r} without a file's name"
            raise UnsupportedError(f"{self.url}: {what}; pull it with its own client", url=self.url)
        unpack(folder, stream, packing, files, self._shown(layer))

    def _shown(self, layer: Descriptor) -> str:
        """The artifact and one of its layers, for messages."""
        return f"{self.url}, layer {layer.digest}"


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


def _content_of(files: Files, handle: Handle, nbytes: int) -> Iterator[memoryview]:
    for start in range(0, nbytes, _STEP):
        view = memoryview(bytearray(min(_STEP, nbytes - start)))
        yield view[: files.pread(handle, view, start)]


def _path_of(layer: Descriptor) -> str | None:
    """The file that a layer is, or None of one that holds several."""
    if _packing_of(layer) is not None:
        return None
    notes = layer.annotations or {}
    return notes.get(FILE_PATH) or notes.get(TITLE)


def _plain_path_of(layer: Descriptor) -> str | None:
    """The path of the file that a layer is, as an import calls it; None: there may be several."""
    path = _path_of(layer)
    fits = path is not None and path == str(PurePosixPath(path)) and ".." not in path
    return path if fits else None


def _packing_of(layer: Descriptor) -> str | None:
    """How a layer packs files: "" in a tar, "gz" or "zst" in a compressed one; None: not."""
    media, notes = layer.media_type, layer.annotations or {}
    model = (
        media.startswith(artifacts.MODEL_LAYERS) or "image.layer" in media or ".rootfs." in media
    )
    if notes.get(_ORAS_FOLDER) != "true":
        # ORAS calls a file an archive, too, and gives it a title; what it packs, it compresses.
        file = TITLE in notes and "image.layer" in media and media.endswith(".tar")
        if file or not model:
            return None
    for ending, packing in (("gzip", "gz"), ("zstd", "zst"), (".tar", "")):
        if media.endswith(ending):
            return packing
    return None
