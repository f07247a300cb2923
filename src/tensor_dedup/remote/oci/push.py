"""The order of a push to a registry: what is referred to is sent before what refers to it.

Layers that the repository lacks are sent, then the tables, then the manifest of the tables, and
last that of the model under its tag. So the tag never names missing layers.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from typing import Final
from urllib.parse import quote

import msgspec

from tensor_dedup.digest import leaf_digests
from tensor_dedup.remote.errors import RemoteNameTakenError, RemoteUrlError
from tensor_dedup.remote.oci import modelpack
from tensor_dedup.remote.oci.connection import Body
from tensor_dedup.remote.oci.modelpack import ArtifactLayer, Descriptor
from tensor_dedup.remote.oci.registry import (
    INDEX,
    MANIFEST,
    ArtifactName,
    RegistryRepository,
    digest_of,
)
from tensor_dedup.remote.results import TransferListener, TransferResult
from tensor_dedup.settings import cache_folder
from tensor_dedup.store.files import Files
from tensor_dedup.store.folders import content_of, make_folders
from tensor_dedup.store.format.manifests import Piece
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint

_log = logging.getLogger(__name__)
# Whole leaves, so that verifying a piece reads nothing twice.
_STEP: Final = 32 << 20
# So much is handed on at once, and may go before an error or an interrupt ends what is under way.
_SLICE: Final = 1 << 20
_AT_ONCE: Final = 3
_REMEMBERED: Final = 20_000
# The layers of an artifact with their digests, in order. Equal files are equal layers.
Layers = Sequence[tuple[str, ArtifactLayer]]


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
        if not replace and work.is_there():
            return work.result((), unchanged=True, done=not dry_run)
        layers = work.layers()
        missing = work.missing(layers)
        if dry_run:
            return work.result(missing.values(), unchanged=False, done=False)
        sent = work.send(layers, missing)
        tables = work.send_tables(layers, objects)
        model = work.model(layers, tables)
        work.refer(model, tables)
        registry.put_manifest(name.reference, MANIFEST, model)
        return work.result(sent, unchanged=False, done=True)


class _Push:
    def __init__(
        self,
        registry: RegistryRepository,
        checkpoint: StoredCheckpoint,
        files: Files,
        progress: TransferListener,
    ) -> None:
        self._registry, self._checkpoint, self._progress = registry, checkpoint, progress
        self._known = _KnownBlobs(files, registry.name.host)
        self._began, self._is_ended = time.monotonic(), False

    def is_there(self) -> bool:
        """Whether the tag stands for the checkpoint, with its tables.

        A copy of the model alone leaves the tables behind.
        """
        name = self._registry.name
        held = self._registry.manifest(name.reference)
        if held is None:
            return False
        document = modelpack.decode_document(held, name.url)
        if document.manifest != self._checkpoint.manifest:
            what = f"the tag {name.reference!r} stands for another artifact there"
            raise RemoteNameTakenError.at(name.url, what, name=name.reference)
        return document.tables is not None and self._registry.has_blob(document.tables)

    def layers(self) -> Layers:
        layers = modelpack.layers_of(self._checkpoint.files)
        # Not the store's pool: SHA-256 of whole layers, a layer a thread.
        with self._threads() as pool:
            digest = partial(layer_digest, self._checkpoint, advance=self._check_going_on)
            return [*zip(pool.map(digest, layers), layers, strict=True)]

    @contextmanager
    def _threads(self) -> Iterator[ThreadPoolExecutor]:
        """Context manager: threads that an error or an interrupt ends, not at the layers' ends."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            try:
                yield pool
            except BaseException:
                self._is_ended = True
                pool.shutdown(cancel_futures=True)
                raise

    def _check_going_on(self, _: int) -> None:
        if self._is_ended:
            raise CancelledError

    def missing(self, layers: Layers) -> dict[str, ArtifactLayer]:
        wanted = dict(layers)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            there = pool.map(self._registry.has_blob, wanted)
            return {
                each: wanted[each] for each, held in zip(wanted, there, strict=True) if not held
            }

    def send(self, layers: Layers, missing: Mapping[str, ArtifactLayer]) -> list[ArtifactLayer]:
        """Send the missing layers; return those that could not be mounted."""
        registry, progress = self._registry, self._progress
        origins = self._known.repositories(missing, registry.name.repository)
        nbytes = sum(layer.nbytes for layer in missing.values())
        progress.saved(sum(layer.nbytes for layer in dict(layers).values()) - nbytes)
        progress.start(nbytes)

        def advance(nbytes: int) -> None:
            self._check_going_on(nbytes)
            progress.advance(nbytes)

        def send(digest: str) -> bool:
            layer = missing[digest]
            content = partial(_content, self._checkpoint, layer, advance)
            sent = registry.upload(digest, Body(layer.nbytes, content), origins.get(digest))
            if not sent:
                progress.saved(layer.nbytes)
            return sent

        with self._threads() as pool:
            under_way = [pool.submit(send, digest) for digest in missing]
            for each in as_completed(under_way):
                each.result()  # the first error, be it that of the last layer
            sent = [each.result() for each in under_way]
        self._known.remember([*dict(layers)], registry.name.repository)
        return [layer for layer, was_sent in zip(missing.values(), sent, strict=True) if was_sent]

    def send_tables(self, layers: Layers, objects: Sequence[bytes]) -> Descriptor:
        tables = [(digest, modelpack.table_of(layer, self._leaves)) for digest, layer in layers]
        blob = modelpack.encode_tables(self._checkpoint.manifest, objects, tables)
        return self._put(modelpack.TABLES, blob)

    def _leaves(self, piece: Piece) -> bytes:
        records = self._checkpoint.records(piece.digest)
        if records:
            return records[0].leaves
        # The header of a file that an export makes: it is in no container.
        made = self._checkpoint.read_piece(piece.digest, 0, piece.nbytes, piece.nbytes)
        return b"".join(leaf_digests(memoryview(made)))

    def model(self, layers: Layers, tables: Descriptor) -> bytes:
        """Return the manifest of the model, whose configuration is sent."""
        name, manifest = self._checkpoint.name, self._checkpoint.manifest
        listed = [
            Descriptor(layer.media_type, digest, layer.nbytes, layer.annotations)
            for digest, layer in layers
        ]
        config = self._put(modelpack.MODEL_CONFIG, modelpack.model_config(name, listed))
        notes = {modelpack.OUR_MANIFEST: manifest, modelpack.OUR_TABLES: tables.digest}
        return modelpack.manifest_blob(modelpack.MODEL, config, listed, annotations=notes)

    def refer(self, model: bytes, tables: Descriptor) -> None:
        """Write the manifest of the tables, which refers to that of the model.

        A registry that answers without `OCI-Subject` keeps no list of what refers to a manifest.
        The distribution specification then wants an index whose tag is that manifest's digest.
        """
        registry, subject = self._registry, Descriptor(MANIFEST, digest_of(model), len(model))
        empty = self._put(modelpack.EMPTY, modelpack.EMPTY_BLOB)
        blob = modelpack.manifest_blob(modelpack.TABLES, empty, [tables], subject=subject)
        referrer = Descriptor(MANIFEST, digest_of(blob), len(blob), None, modelpack.TABLES)
        if not registry.put_manifest(referrer.digest, MANIFEST, blob):
            tag = subject.digest.replace(":", "-", 1)
            held, listed = registry.manifest(tag), list[Descriptor]()
            if held is not None:
                listed = modelpack.decode_document(held, registry.at(tag)).manifests
            others = [each for each in listed if each.digest != referrer.digest]
            registry.put_manifest(tag, INDEX, modelpack.index_blob([*others, referrer]))

    def _put(self, media_type: str, blob: bytes) -> Descriptor:
        """Send a small blob, if the repository lacks it."""
        digest = digest_of(blob)
        if not self._registry.has_blob(digest):
            self._registry.upload(digest, Body.of(blob))
        return Descriptor(media_type, digest, len(blob))

    def result(
        self, moved: Collection[ArtifactLayer], *, unchanged: bool, done: bool
    ) -> TransferResult:
        nbytes, calls = self._registry.traffic.counts()
        held = (part for file in self._checkpoint.files for part in file.pieces)
        return TransferResult(
            url=self._registry.name.url,
            names=(self._checkpoint.name,),
            pieces=self._count(held),
            nbytes=self._checkpoint.nbytes,
            moved_pieces=self._count(part for layer in moved for part in layer.parts),
            moved_bytes=sum(layer.nbytes for layer in moved),
            wire_bytes=nbytes,
            requests=calls,
            seconds=time.monotonic() - self._began,
            unchanged=unchanged,
            done=done,
        )

    def _count(self, parts: Iterable[bytes | Piece]) -> int:
        """The pieces that a pull counts, too: none that only archives and generated files have."""
        pieces = {part.digest for part in parts if isinstance(part, Piece) and part.nbytes}
        return sum(bool(self._checkpoint.records(piece)) for piece in pieces)


def _content(
    checkpoint: StoredCheckpoint, layer: ArtifactLayer, advance: Callable[[int], None]
) -> Iterator[bytes | memoryview]:
    """The bytes of a layer, from a store, which compares them with their digests."""
    for part in layer.parts:
        if isinstance(part, bytes):
            advance(len(part))
            yield part
            continue
        for start in range(0, part.nbytes, _STEP):
            stop = min(start + _STEP, part.nbytes)
            data = memoryview(checkpoint.read_piece(part.digest, start, stop, part.nbytes))
            for at in range(0, len(data), _SLICE):
                chunk = data[at : at + _SLICE]
                advance(len(chunk))
                yield chunk


def layer_digest(
    checkpoint: StoredCheckpoint,
    layer: ArtifactLayer,
    advance: Callable[[int], None] = lambda _: None,
) -> str:
    """Return the digest that a layer of the open `checkpoint` has in a registry.

    `advance` receives the number of bytes before each part, and may raise an error to end it.
    """
    hasher = hashlib.sha256()
    for chunk in _content(checkpoint, layer, advance):
        hasher.update(chunk)
    return f"sha256:{hasher.hexdigest()}"


class _KnownBlobs:
    """In which repository of a registry this user has pushed a blob: a cache, for mounts."""

    def __init__(self, files: Files, host: str) -> None:
        self._files = files
        self._path = cache_folder() / "registries" / f"{quote(host, '')}.json"

    def _read(self) -> dict[str, str]:
        try:
            text = b"".join(content_of(self._files, self._path))
            return msgspec.json.decode(text, type=dict[str, str])
        except (OSError, msgspec.DecodeError, ValueError):
            return {}

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
