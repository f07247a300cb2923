"""The form of artifacts: a ModelPack of whole files, and our tables of its tensors. No I/O.

The ModelPack follows the specification of that name by the CNCF. Each file is an uncompressed
layer, so any OCI client can pull the files.

The second artifact refers to the first. Its tables have the place of each tensor in the layers and
the digests of the tensor, so this package can pull single tensors. An annotation of the ModelPack
has the digest of the tables. So if a user pins the ModelPack by its digest, the tables are pinned
too.
"""

import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

import msgspec

from tensor_dedup.digest import combine, leaf_digests
from tensor_dedup.remote.errors import DamagedRemoteError, remote_damage
from tensor_dedup.remote.oci.registry import INDEX, MANIFEST, is_digest
from tensor_dedup.store.format import frames, tables
from tensor_dedup.store.format.manifests import Piece
from tensor_dedup.store.format.tables import PLAIN, Record, Table
from tensor_dedup.store.reading.checkpoint import StoredFile

MODEL: Final = "application/vnd.cncf.model.manifest.v1+json"
MODEL_CONFIG: Final = "application/vnd.cncf.model.config.v1+json"
MODEL_LAYERS: Final = "application/vnd.cncf.model."
TABLES: Final = "application/vnd.tensor-dedup.tables.v1"
EMPTY: Final = "application/vnd.oci.empty.v1+json"
EMPTY_BLOB: Final = b"{}"
FILE_PATH: Final = "org.cncf.model.filepath"
TITLE: Final = "org.opencontainers.image.title"
OUR_MANIFEST: Final = "dev.tensor-dedup.manifest"
OUR_TABLES: Final = "dev.tensor-dedup.tables"
RAW: Final = "raw"  # the kind of container that a layer is, and the suffix of its media type
_KIND: Final = b"rtab"
# One hosted registry takes no more; and all take manifests of 4 MiB.
_MOST_LAYERS: Final = 500
_KINDS: Final = ("weight", "weight.config", "doc", "code")
_WEIGHTS: Final = frozenset(
    {".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".h5", ".msgpack", ".npz"}
)
_DOCUMENTS: Final = ("readme", "license", "licence", "notice", "model_card")
_BLOCK: Final = tarfile.BLOCKSIZE
_ORAS_FOLDER: Final = "io.deis.oras.content.unpack"


@dataclass(frozen=True, slots=True)
class ArtifactLayer:
    """A layer that a push is to send: a file or, if `path` is None, a tar of several files.

    `parts` are the pieces of the layer and, in a tar, the bytes between the pieces, in order.
    """

    media_type: str
    path: str | None
    parts: tuple[bytes | Piece, ...]

    @property
    def nbytes(self) -> int:
        """The size of the layer in bytes."""
        return sum(len(part) if isinstance(part, bytes) else part.nbytes for part in self.parts)

    @property
    def annotations(self) -> dict[str, str] | None:
        """The annotations that name the file: ModelPack's clients go by one, ORAS by the other."""
        return None if self.path is None else {FILE_PATH: self.path, TITLE: self.path}


def layers_of(files: Sequence[StoredFile], most: int = _MOST_LAYERS) -> list[ArtifactLayer]:
    """Return the layers of a checkpoint with these `files`.

    Each file is a layer of its own. If there are more than `most` files, they are packed into tars.
    The same files always give the same layers.
    """
    found: list[ArtifactLayer] = []
    for kind in _KINDS:
        held = sorted((file for file in files if _kind_of(file.path) == kind), key=lambda f: f.path)
        size = 1 if len(files) <= most else -(-len(held) * len(_KINDS) // most)
        for start in range(0, len(held), max(size, 1)):
            part = held[start : start + size]
            if len(part) == 1:
                media = f"{MODEL_LAYERS}{kind}.v1.raw"
                found.append(ArtifactLayer(media, part[0].path, part[0].pieces))
            else:
                parts = (*(each for file in part for each in _tarred(file)), bytes(2 * _BLOCK))
                found.append(ArtifactLayer(f"{MODEL_LAYERS}{kind}.v1.tar", None, parts))
    return found


def _kind_of(path: str) -> str:
    name = PurePosixPath(path)
    if name.suffix in _WEIGHTS:
        return "weight"
    if name.suffix in (".md", ".rst") or name.name.lower().startswith(_DOCUMENTS):
        return "doc"
    return "code" if name.suffix == ".py" else "weight.config"


def _tarred(file: StoredFile) -> Iterator[bytes | Piece]:
    entry = tarfile.TarInfo(file.path)
    entry.size, entry.mode = file.nbytes, 0o644
    yield entry.tobuf(tarfile.GNU_FORMAT)
    yield from file.pieces
    if rest := -file.nbytes % _BLOCK:
        yield bytes(rest)


def table_of(layer: ArtifactLayer, leaves_of: Callable[[Piece], bytes]) -> Table:
    """Return the table of the pieces in `layer`.

    `leaves_of` returns the leaf digests of a piece, joined.
    """
    records, at = [], 0
    for part in layer.parts:
        if isinstance(part, bytes):
            held = leaf_digests(memoryview(part))
            digest, leaves = bytes.fromhex(combine(len(part), held)), b"".join(held)
            nbytes = len(part)
        else:
            digest, nbytes = part.digest, part.nbytes
            leaves = leaves_of(part) if nbytes else b""
        if nbytes:
            records.append(Record(digest, at, nbytes, nbytes, PLAIN, None, leaves))
        at += nbytes
    return Table(RAW, at, records, None)


class TabledLayer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A layer in the tables blob: the SHA-256 of the layer, and the layer's encoded table."""

    sha256: bytes
    table: bytes


class ArtifactTables(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The decoded tables blob, which is the content of the artifact with the tables.

    `manifest` is the name of the checkpoint's manifest as bytes, and `objects` are the encoded
    manifest and its pages.
    """

    manifest: bytes
    objects: list[bytes]
    layers: list[TabledLayer]


def encode_tables(
    manifest: str, objects: Sequence[bytes], layers: Sequence[tuple[str, Table]]
) -> bytes:
    """Encode the tables blob for the manifest of the name `manifest`.

    `objects` are the encoded pages and manifest. `layers` are pairs of a digest (`sha256:...`) and
    a table.
    """
    listed = [
        TabledLayer(bytes.fromhex(digest.removeprefix("sha256:")), tables.encode(table).blob)
        for digest, table in layers
    ]
    return frames.encode(_KIND, ArtifactTables(bytes.fromhex(manifest), [*objects], listed))


def decode_tables(blob: bytes, where: str) -> ArtifactTables:
    """Decode the tables blob read at the URL `where`. The caller has to check its content.

    Raises:
        DamagedRemoteError: The blob is damaged.
        NewerFormatError: The blob has a later version.
    """
    with remote_damage(where) as path:
        return frames.decode(blob, _KIND, ArtifactTables, path)


class Descriptor(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """An OCI descriptor, which refers to a blob or a manifest by its digest."""

    media_type: str
    digest: str
    size: int
    annotations: dict[str, str] | None = None
    artifact_type: str | None = None

    @property
    def packing(self) -> str | None:
        """How a layer packs files: "" in a tar, "gz" or "zst" in a compressed one. None: not."""
        media, notes = self.media_type, self.annotations or {}
        if notes.get(_ORAS_FOLDER) != "true":
            # ORAS calls a file an archive, too, and gives it a title; what it packs, it compresses.
            file = TITLE in notes and "image.layer" in media and media.endswith(".tar")
            packs = (MODEL_LAYERS, "image.layer", ".rootfs.")
            if file or not any(each in media for each in packs):
                return None
        endings = {"gzip": "gz", "zstd": "zst", ".tar": ""}
        return next((endings[each] for each in endings if media.endswith(each)), None)

    @property
    def path(self) -> str | None:
        """The path of the file that a layer is, or None of a layer that packs several."""
        notes = self.annotations or {}
        found = notes.get(FILE_PATH) or notes.get(TITLE)
        return found if self.packing is None else None


class ManifestDocument(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of an OCI manifest or index that this package uses.

    A manifest has `layers`; an index has `manifests` instead.
    """

    media_type: str = MANIFEST
    artifact_type: str = ""
    layers: list[Descriptor] = []
    manifests: list[Descriptor] = []
    annotations: dict[str, str] | None = None

    @property
    def manifest(self) -> str | None:
        """The name of the checkpoint's manifest; None of an artifact that no store has pushed."""
        return (self.annotations or {}).get(OUR_MANIFEST)

    @property
    def tables(self) -> str | None:
        """The digest of our tables, if the manifest names one."""
        named = (self.annotations or {}).get(OUR_TABLES, "")
        return named if is_digest(named) else None


def model_config(name: str, layers: Sequence[Descriptor]) -> bytes:
    """Return the configuration of the model `name` as JSON, in the schema of ModelPack."""
    suffixes = {
        PurePosixPath((layer.annotations or {}).get(FILE_PATH, "")).suffix for layer in layers
    }
    form = next((each[1:] for each in (".safetensors", ".gguf") if each in suffixes), None)
    return msgspec.json.encode(
        {
            "descriptor": {"name": name},
            "modelfs": {"type": "layers", "diffIds": [layer.digest for layer in layers]},
            "config": {"format": form} if form else {},
        }
    )


def manifest_blob(
    artifact_type: str,
    config: Descriptor,
    layers: Sequence[Descriptor],
    *,
    subject: Descriptor | None = None,
    annotations: dict[str, str] | None = None,
) -> bytes:
    """Return an OCI manifest as JSON; `subject` is the manifest to which it refers, if any."""
    more = {"subject": subject, "annotations": annotations}
    return msgspec.json.encode(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": artifact_type,
            "config": config,
            "layers": [*layers],
            **{name: value for name, value in more.items() if value},
        }
    )


def index_blob(held: Sequence[Descriptor]) -> bytes:
    """Return an OCI index of the manifests in `held` as JSON."""
    return msgspec.json.encode({"schemaVersion": 2, "mediaType": INDEX, "manifests": [*held]})


def decode_document(blob: bytes, where: str) -> ManifestDocument:
    """Decode `blob`, an OCI manifest or index read at the URL `where`.

    Raises:
        DamagedRemoteError: The bytes are neither a manifest nor an index.
    """
    try:
        found = msgspec.json.decode(blob, type=ManifestDocument)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DamagedRemoteError.at(where, f"it is no manifest ({error})") from None
    for layer in found.layers:
        if not 0 <= layer.size < 1 << 63:
            raise DamagedRemoteError.at(where, f"no layer has {layer.size} bytes")
    return found
