"""Finds models in the stores of Ollama and of Docker Model Runner, which keep files by digest.

A *manifest* (JSON) is one model under one name. It names the model's files, its *layers*, by their
SHA-256, and each lies in the folder `blobs` once, however many manifests name it:

    Ollama      manifests/HOST/NAMESPACE/MODEL/TAG (or manifests-v2/…)  blobs/sha256-HEX
    Docker      manifests/sha256/HEX, and models.json has the names     blobs/sha256/HEX

A manifest may be hostile. A layer is only found under a well-formed digest, has to be of the size
that the manifest says, and gets its name in a checkpoint from here, or from the manifest if that
is a path that stays inside. Digests are not compared with the content: every tensor is hashed
anyway when it is imported.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Final

from tensor_dedup.errors import CheckpointNotFoundError, FormatError
from tensor_dedup.formats import gguf
from tensor_dedup.formats.errors import CheckpointFault, CheckpointFilesError, shorten
from tensor_dedup.formats.files import opened
from tensor_dedup.formats.json import decode_object
from tensor_dedup.formats.links import ANYWHERE, LinkBoundary

_MANIFESTS: Final = ("manifests", "manifests-v2")
_BLOBS: Final = "blobs"
_MODELS: Final = "models"
_NAMES: Final = "models.json"
_MANIFEST: Final = "manifest.json"  # what an export calls it
_DIGEST = re.compile(r"sha256[:-](?P<hex>[0-9a-f]{64})")
_HEX = re.compile(r"[0-9a-f]{64}")
_ALGORITHM: Final = "sha256"
# Parts of a manifest's path below `manifests`.
_OLLAMA_PARTS, _DOCKER_PARTS = 4, 2
# What a name need not say: `ollama list` and `docker model list` leave it out, too.
_DEFAULT_HOSTS: Final = ("registry.ollama.ai/library/", "registry.ollama.ai/", "index.docker.io/")

# The largest have some thousand layers of 300 bytes.
MAX_MANIFEST_BYTES: Final = 16 << 20

_LONGEST: Final = 200
_FILE_PATH: Final = "org.cncf.model.filepath"
_PREFIXES: Final = (
    "application/vnd.ollama.image.",
    "application/vnd.docker.ai.",
    "application/vnd.cncf.model.",
)
# Kinds of layers that are weights, without the prefix, and what their files are called.
_WEIGHTS: Mapping[str, str] = MappingProxyType(
    {
        "model": "model",
        "projector": "projector",
        "adapter": "adapter",
        "draft": "draft/model",
        "tensor": "model",
        "gguf.v3": "model",
        "gguf.v3.lora": "adapter",
        "mmproj": "projector",
        "safetensors": "model",
    }
)
_WEIGHT_SUFFIXES: Final = (".gguf", ".safetensors")
_JSON: Final = ("params", "messages", "json")
_OTHERS: Mapping[str, str] = MappingProxyType(
    {"chat.template.jinja": "chat_template.jinja", "vllm.config.tar": "vllm-config.tar"}
)
_LIST: Final = "application/vnd.ollama.manifest.list.v2+json"
# Of several models in one manifest, the one that Ollama takes on Linux.
_RUNNERS: Final = ("ollama", "llamacpp", "mlx")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a model: its blob, and its path in an export, relative and with `/`."""

    path: Path
    name: str

    @property
    def prefix(self) -> str:
        """What its tensors' names begin with: the folder in `name`, "" at the top."""
        folder, slash, _ = self.name.rpartition("/")
        return folder + slash


@dataclass(frozen=True, slots=True)
class ModelInStore:
    """A model in another tool's store.

    `manifest` is the path of its manifest, and `name` what the tool calls it, with slashes only:
    `llama3.2/latest`. `links` limits where symbolic links in the store may lead.
    """

    manifest: Path
    name: str
    weights: tuple[ModelFile, ...]
    others: tuple[ModelFile, ...]
    links: LinkBoundary


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a manifest is: the store's folder, and the parts of its path below `manifests`."""

    root: Path
    parts: tuple[str, ...]


def is_manifest(path: Path) -> bool:
    """Return whether `path` is that of a model's manifest in a store, and of a file."""
    return _place(path) is not None


def open_model(path: Path, *, follow_links: bool = False) -> ModelInStore:
    """Return the model whose manifest is the file `path`; `is_manifest(path)` must be True.

    With `follow_links`, symbolic links in the store may lead anywhere.

    Raises:
        CheckpointFilesError: The manifest is malformed, a file that it names is missing or has
            another size, or a link leads out of the store.
        JsonTextError: It is not JSON.
        CheckpointNotFoundError: It names no weights.
    """
    place = _place(path)
    assert place is not None, path
    links = ANYWHERE if follow_links else LinkBoundary.around(place.root)
    content = _runnable(_json(path, links), place, links, path)
    weights, others = _files(content, place, links, path)
    if not weights:
        raise CheckpointNotFoundError(
            f"{path}: the model has no weights here (it runs elsewhere, or in a format that this "
            "version does not read); name another one",
            path=str(path),
        )
    others.append(ModelFile(path, _MANIFEST))
    return ModelInStore(path, _name(place, links), tuple(weights), tuple(others), links)


def models_in(folder: Path, *, follow_links: bool = False) -> dict[str, str]:
    """Map the manifest's path of each model in the store in `folder` to its name.

    The result is empty if `folder` holds no store.

    `folder` may also be the one that holds the store as `models`, such as `~/.ollama`, or one below
    `manifests`, which stands for the manifests in it. Models
    without weights here are left out. A manifest with an error is not: its name is "", and it fails
    when it is opened.
    Of a model under `manifests` and `manifests-v2`, the one under the latter counts.
    """
    found: dict[tuple[str, ...], Path] = {}
    for top in _tops(folder):
        for path in _below(top, _OLLAMA_PARTS):
            if (place := _place(path)) is not None:
                found[place.parts] = path
    models: dict[str, str] = {}
    for parts in sorted(found):
        try:
            models[str(found[parts])] = open_model(found[parts], follow_links=follow_links).name
        except CheckpointNotFoundError:
            continue
        except FormatError:
            models[str(found[parts])] = ""
    return models


def _tops(folder: Path) -> list[Path]:
    """The folders in and below which the manifests are that a folder stands for."""
    whole = folder.absolute()
    if any(each.name in _MANIFESTS and _is_store(each.parent) for each in (whole, *whole.parents)):
        return [folder]
    root = next((each for each in (folder, folder / _MODELS) if _is_store(each)), None)
    return [] if root is None else [root / top for top in _MANIFESTS]


def _is_store(root: Path) -> bool:
    return (root / _BLOBS).is_dir() and any((root / top).is_dir() for top in _MANIFESTS)


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """All files at most so many levels below; links to folders are not followed."""
    if not folder.is_dir():
        return
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir() and not entry.is_symlink():
            if depth > 1:
                yield from _below(entry, depth - 1)
        elif entry.is_file():
            yield entry


def _place(path: Path) -> _Place | None:
    # By the path as it is named: in `manifests-v2` a manifest is a link to its blob.
    whole = path.absolute()
    for depth in (_OLLAMA_PARTS, _DOCKER_PARTS):
        if len(whole.parents) <= depth:
            continue
        top, root = whole.parents[depth - 1], whole.parents[depth]
        parts = whole.parts[-depth:]
        fits = depth == _OLLAMA_PARTS or (parts[0] == _ALGORITHM and _HEX.fullmatch(parts[1]))
        if fits and top.name in _MANIFESTS and (root / _BLOBS).is_dir() and path.is_file():
            return _Place(root, parts)
    return None


def _name(place: _Place, links: LinkBoundary) -> str:
    if len(place.parts) == _OLLAMA_PARTS:
        return _without_host("/".join(place.parts))
    _, digest = place.parts
    for tag in _tags(place.root, links).get(f"{_ALGORITHM}:{digest}", ()):
        name, colon, version = tag.rpartition(":")
        return _without_host(f"{name}/{version}" if colon and "/" not in version else tag)
    return digest[:12]


def _without_host(name: str) -> str:
    for host in _DEFAULT_HOSTS:
        if name.startswith(host):
            return name.removeprefix(host)
    return name


def _tags(root: Path, links: LinkBoundary) -> dict[str, list[str]]:
    """The names that Docker's list of models gives to manifests, by digest."""
    path = root / _NAMES
    if not path.is_file():
        return {}
    found: dict[str, list[str]] = {}
    models = _json(path, links).get(_MODELS)
    for model in models if isinstance(models, list) else []:
        if not isinstance(model, dict) or not isinstance(model.get("tags"), list):
            continue
        tags = [tag for tag in model["tags"] if isinstance(tag, str)]
        found.setdefault(str(model.get("id")), []).extend(tags)
    return found


def _json(path: Path, links: LinkBoundary) -> dict[str, Any]:
    links.check(path)
    with opened(path) as file:
        links.check_open(path, file.fd)
        if file.size > MAX_MANIFEST_BYTES:
            raise _wrong(path, f"larger than {MAX_MANIFEST_BYTES} bytes")
        blob = file.read(0, file.size)
    return decode_object(blob, str(path))


def _runnable(
    content: dict[str, Any], place: _Place, links: LinkBoundary, path: Path
) -> dict[str, Any]:
    """The manifest itself or, of a list of manifests, the one that Ollama would run."""
    if content.get("mediaType") != _LIST:
        return content
    listed = content.get("manifests")
    able = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    chosen = next(
        (each for runner in _RUNNERS for each in able if each.get("runner") == runner),
        able[0] if able else None,
    )
    if chosen is None:
        raise _wrong(path, "it lists no manifest")
    if "layers" in chosen:
        return chosen
    return _json(_blob(chosen.get("digest"), place, path), links)


def _files(
    content: dict[str, Any], place: _Place, links: LinkBoundary, path: Path
) -> tuple[list[ModelFile], list[ModelFile]]:
    """The layers that are weights, and all others; the configuration is one of these."""
    layers = content.get("layers")
    if not isinstance(layers, list):
        raise _wrong(path, "it has no list of layers")
    weights: list[tuple[Path, str]] = []
    others: list[tuple[Path, str]] = []
    for layer in layers:
        if not isinstance(layer, dict):
            raise _wrong(path, "a layer is not an object")
        blob = _checked(layer, place, links, path)
        kind, given = _kind(layer), _given_name(layer)
        if kind in _WEIGHTS or (given or "").endswith(_WEIGHT_SUFFIXES):
            weights.append((blob, given or _WEIGHTS[kind] + _suffix(blob, links)))
        else:
            others.append((blob, given or _other_name(kind)))
    config = content.get("config")
    if isinstance(config, dict) and config.get("digest"):
        others.append((_checked(config, place, links, path), "manifest-config.json"))
    names = _Names()
    return _numbered(weights, names), _numbered(others, names)


def _checked(layer: dict[str, Any], place: _Place, links: LinkBoundary, path: Path) -> Path:
    """The blob of a layer, which is there and of the size that the manifest says."""
    blob, size = _blob(layer.get("digest"), place, path), layer.get("size")
    if not blob.is_file():
        raise _wrong(path, f"the file {blob} that it names is not there", file=str(blob))
    links.check(blob)
    held = blob.stat().st_size
    if type(size) is not int or size != held:
        raise _wrong(
            path,
            f"the file {blob} has {held} bytes, and should have {shorten(str(size))}",
            file=str(blob),
            nbytes=held,
        )
    return blob


def _blob(digest: object, place: _Place, path: Path) -> Path:
    found = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if found is None:
        raise _wrong(path, f"{shorten(repr(digest))} is no SHA-256 of a file")
    blobs = place.root / _BLOBS
    if len(place.parts) == _OLLAMA_PARTS:
        return blobs / f"{_ALGORITHM}-{found['hex']}"
    return blobs / _ALGORITHM / found["hex"]


def _kind(layer: dict[str, Any]) -> str:
    media = layer.get("mediaType")
    for prefix in _PREFIXES:
        if isinstance(media, str) and media.startswith(prefix):
            return media.removeprefix(prefix)
    return ""


def _given_name(layer: dict[str, Any]) -> str | None:
    """The path that the manifest gives to a file, if it stays inside a folder."""
    annotations = layer.get("annotations")
    given = annotations.get(_FILE_PATH) if isinstance(annotations, dict) else None
    if given is None and _kind(layer) == "json":  # of Ollama's models in safetensors
        given = layer.get("name")
    if not isinstance(given, str) or not given.isprintable() or len(given) > _LONGEST:
        return None
    name = PurePosixPath(given)
    hidden = any(part.startswith(".") for part in name.parts)
    fits = name.parts and not name.is_absolute() and not hidden and str(name) == given
    return given if fits else None


def _other_name(kind: str) -> str:
    plain = re.sub(r"[^a-z0-9.-]", "-", kind[:40].lower()).strip(".-") or "file"
    return _OTHERS.get(kind, plain + (".json" if kind in _JSON else ".txt"))


def _suffix(blob: Path, links: LinkBoundary) -> str:
    with opened(blob) as file:
        links.check_open(blob, file.fd)
        head = file.read(0, min(file.size, len(gguf.MAGIC)))
    return ".gguf" if head == gguf.MAGIC else ".safetensors"


class _Names:
    """The names that a model's files have so far."""

    def __init__(self) -> None:
        self._files = {_MANIFEST}
        self._folders = set[str]()

    def take(self, name: str) -> str:
        """Return a free name, `name` or one like it: no file twice, and none that is a folder."""
        flat = name.replace("/", "-")
        for each in chain([name], (f"{number}-{flat}" for number in count(2))):
            above = {str(parent) for parent in PurePosixPath(each).parents}
            if not (each in self._files or each in self._folders or above & self._files):
                self._files.add(each)
                self._folders |= above
                return each
        raise AssertionError


def _numbered(files: list[tuple[Path, str]], names: _Names) -> list[ModelFile]:
    """Give each file a name of its own. Files of one name get the names of shards."""
    by_name: dict[str, dict[Path, None]] = {}
    for blob, name in files:
        by_name.setdefault(name, {})[blob] = None
    found = []
    for name, blobs in by_name.items():
        stem, dot, suffix = name.rpartition(".")
        for number, blob in enumerate(blobs, 1):
            shard = f"{stem}-{number:05}-of-{len(blobs):05}{dot}{suffix}"
            found.append(ModelFile(blob, names.take(name if len(blobs) == 1 else shard)))
    return found


def _wrong(path: Path, what: str, **facts: object) -> CheckpointFilesError:
    return CheckpointFilesError.at(CheckpointFault.MANIFEST, str(path), what, **facts)
