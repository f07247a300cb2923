"""A checkpoint, which is one file or a folder with its sub-folders, as named tensors.

Files may be safetensors, files of torch.save (`.bin`, `.pt`, `.pth`, `.ckpt`) or GGUF. In each
folder the first of these that exists is read:

1. safetensors files;
2. files of torch.save with the names that libraries give to weights;
3. the data files of a `tensor_index.json`.

Other files of torch.save are read only if the whole folder, or a component of a pipeline, has none
of these. If there are none either, GGUF files are read. The first part of a split GGUF model stands
for all of its parts. Where a folder has several copies of the same weights,
`tensor_dedup.formats.weight_choice` chooses one.

A tensor in a sub-folder has its path in front of its name: "unet/conv_in.weight". In a Diffusers
pipeline (a folder with a `model_index.json`) only the components that this file names are read, not
single-file versions of the whole pipeline. A sub-folder `original` beside weights holds the same
weights in the publisher's own layout, and is left out. Hidden folders are left out, too. So is a
file called `.bin`, `.pt`, `.pth` or `.ckpt` that torch.save has not written, where there are other
weights: anything may be called so. `Checkpoint.left_out` names what is left out.

An index may name shards in sub-folders. Their tensors keep the names in the index, and no other
file of those folders is read. Each file is read once, however many indexes name it. Where several
shards hold a tensor of one name, as in an overlay, the index says which of them counts.
"""

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import NoReturn

from tensor_dedup.errors import (
    CheckpointNotFoundError,
    FormatError,
    NoSuchPathError,
    SeveralModelsError,
    UnsupportedError,
)
from tensor_dedup.formats.alternatives import is_projector, several_models
from tensor_dedup.formats.errors import (
    CheckpointFault,
    CheckpointFilesError,
    JsonTextError,
    PytorchError,
    PytorchFault,
    shorten,
)
from tensor_dedup.formats.files import opened
from tensor_dedup.formats.gguf_parts import GgufPart
from tensor_dedup.formats.hub_cache import (
    MODELS,
    cache_path,
    is_repository,
    may_name,
    snapshot_in,
)
from tensor_dedup.formats.json import decode_object
from tensor_dedup.formats.left_out import LeftOut, LeftOutReason, described
from tensor_dedup.formats.links import ANYWHERE, LinkBoundary
from tensor_dedup.formats.model_stores import is_manifest, models_in, open_model
from tensor_dedup.formats.placeholders import HEAD_BYTES, placeholder
from tensor_dedup.formats.rank_files import (
    SLICES_FOLDER,
    are_slices,
    refuse_distributed,
    refuse_overlapping_parts,
    refuse_parts,
    refuse_slices,
)
from tensor_dedup.formats.safetensors import MAX_HEADER_BYTES
from tensor_dedup.formats.serverless.data_files import INDEX_NAME, data_files
from tensor_dedup.formats.weight_choice import (
    GGUF,
    PYTORCH,
    SAFETENSORS,
    UNFINISHED,
    WeightFiles,
    called_weights,
    choose,
    is_index,
    is_shard,
    perhaps_weights,
    why_beside,
    why_left_out,
)
from tensor_dedup.formats.weights import (
    GGUF_SUFFIX,
    PYTORCH_SUFFIXES,
    SAFETENSORS_SUFFIX,
    Header,
    members_in,
    names_in,
    read_header,
)
from tensor_dedup.types import TensorSpec

_PIPELINE = "model_index.json"
_CONFIGURATION = "config.json"
_SECOND_COPY = "original"
_UNREAD = (".h5", ".msgpack", ".onnx", ".npz", ".tflite")
_FOREIGN = (*PYTORCH_SUFFIXES, GGUF_SUFFIX, *_UNREAD)
# Where Hugging Face's client keeps what it has not finished of a folder.
_DOWNLOADS = ".cache/huggingface/download"
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A weight file of a checkpoint; `prefix` is its sub-folder ("unet/"), or "" at the top.

    `superseded` maps names of tensors in the file that do not count to the file whose tensor of
    that name does, because the index names that file.
    """

    path: Path
    prefix: str
    header: Header
    superseded: Mapping[str, Path] = field(default_factory=dict)

    @property
    def tensors(self) -> Iterator[TensorSpec]:
        """The tensors of the file that count, in the order of the file."""
        return (spec for spec in self.header.tensors if spec.name not in self.superseded)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint: the checked headers of all its files, ordered by folder and then by name.

    `links` says where symbolic links in the checkpoint may lead. Code that opens one of the files
    again must check the file against `links` again. `not_weights` has the relative paths of files
    that are called as weights are, and are none. `name` is what another tool calls it in whose
    store it is, or "".
    """

    path: Path
    files: tuple[CheckpointFile, ...]
    links: LinkBoundary
    not_weights: frozenset[str] = frozenset()
    name: str = ""

    @property
    def nbytes(self) -> int:
        """The size in bytes of all tensors that count, without headers."""
        return sum(spec.nbytes for _, _, spec in self.tensors())

    @property
    def tensor_count(self) -> int:
        """The number of tensors that count."""
        return sum(1 for _ in self.tensors())

    def tensors(self) -> Iterator[tuple[str, CheckpointFile, TensorSpec]]:
        """Yield each tensor's full name, file and spec, file by file, in the order of each file.

        Copies of a tensor that the index does not name are left out; `not_indexed` yields them.
        """
        for file in self.files:
            for spec in file.tensors:
                yield file.prefix + spec.name, file, spec

    def not_indexed(self) -> Iterator[tuple[str, CheckpointFile, TensorSpec]]:
        """Yield the copies of tensors that do not count, as `tensors` yields those that do."""
        for file in self.files:
            for spec in file.header.tensors:
                if spec.name in file.superseded:
                    yield file.prefix + spec.name, file, spec

    def relative(self, file: CheckpointFile) -> str:
        """Return the path of one of `files` within the checkpoint's folder, with `/`."""
        root = self.path if self.path.is_dir() else self.path.parent
        return file.path.relative_to(root).as_posix()

    def why_left_out(self, path: str) -> LeftOutReason | None:
        """Return why a file of the folder that is none of `files` is left out.

        `path` is relative to the folder. The result is None for a file that belongs to the
        checkpoint without being weights, such as `config.json`.
        """
        return LeftOutReason.NOT_WEIGHTS if path in self.not_weights else why_left_out(path)

    def left_out(self) -> tuple[LeftOut, ...]:
        """List the folder, and return the files in it that are left out, ordered by path.

        Hidden files and folders, and folders outside `links`, are not looked at. If the checkpoint
        is a single file or an index, the result is empty.
        """
        if not self.path.is_dir():
            return ()
        found = [
            LeftOut(path, reason)
            for path in _other_files(self.path, self.files, self.links)
            if (reason := self.why_left_out(path)) is not None
        ]
        return tuple(found)


def open_checkpoint(path: str | os.PathLike[str], *, follow_links: bool = False) -> Checkpoint:
    """Read the headers of the checkpoint at `path`, which is a file, an index, or a folder.

    `path` may also be a model's manifest in the store of Ollama or Docker Model Runner, or the
    folder of a repository in a Hugging Face cache, which stands for one of its snapshots (see
    `hub_cache.snapshot_in`).

    No tensor data is read. Symbolic links are followed within the folder and, in a Hugging Face
    cache, to the blobs of the same repository and to the shared ones. With `follow_links`, they are
    followed anywhere.

    Raises:
        CheckpointNotFoundError: There are no weights at that path.
        SeveralModelsError: The folder holds several models, or a Hugging Face cache. The error has
            the path of each model, or of each repository, and the files that are in no model.
        UnsupportedError: The weights are in formats that this version does not read, or each of
            several processes wrote a part of them.
        FormatError: A file or an index is malformed, or a link leads out of the folder.
    """
    root = snapshot_in(Path(path))
    if is_manifest(root):
        return _open_model(root, follow_links)
    if root.is_dir() and (models := models_in(root, follow_links=follow_links)):
        count = f"{len(models)} models" if len(models) > 1 else "1 model"
        what = f"the store of another tool, with {count}"
        raise SeveralModelsError.of(str(root), what, models)
    folder = root if root.is_dir() else root.parent
    links = ANYWHERE if follow_links else LinkBoundary.around(folder)
    found = _open_tree(root, links) if root.is_dir() else _open_file(root, links)
    files = found.superseding()
    _refuse_repeated(files)
    return Checkpoint(root, tuple(files), found.links, frozenset(found.not_weights))


def _open_model(manifest: Path, follow_links: bool) -> Checkpoint:
    model = open_model(manifest, follow_links=follow_links)
    files = [
        CheckpointFile(each.path, each.prefix, _read_header(each.path, model.links))
        for each in model.weights
    ]
    _refuse_repeated(files)
    _check_parts(manifest, [each.name for each in model.weights], files)
    return Checkpoint(manifest, tuple(files), model.links, name=model.name)


def _check_parts(manifest: Path, names: list[str], files: list[CheckpointFile]) -> None:
    """Check that a manifest names all parts of a split GGUF model, as `names` number them."""
    headers: dict[str, dict[str, Header]] = {}
    for name, file in zip(names, files, strict=True):
        headers.setdefault(file.prefix, {})[PurePosixPath(name).name] = file.header
    for name, file in zip(names, files, strict=True):
        if part := GgufPart.of(manifest / name, file.header):
            part.check(headers[file.prefix])


def _open_file(path: Path, links: LinkBoundary) -> "_OpenFiles":
    if not path.exists():
        cached = f", and no model of that name in {cache_path()}" if may_name(path) else ""
        raise NoSuchPathError(
            f"{path}: no such file or folder{cached}; give the path of a local checkpoint",
            path=str(path),
        )
    if path.suffix in _UNREAD:
        raise _unsupported(path, [path.name])
    refuse_distributed(path, [])
    if path.name.endswith(UNFINISHED):
        raise CheckpointNotFoundError(
            f"{path}: a download that is not finished; give the file when it has its own name",
            path=str(path),
        )
    found = _OpenFiles(links)
    if path.name == _CONFIGURATION:
        raise CheckpointNotFoundError(
            f"{path}: a model's configuration, which holds no weights; give its folder",
            path=str(path),
        )
    if is_index(path.name):
        found.add_index(path, "", _read_json(path, ANYWHERE))
    else:
        header = read_header(path)
        if part := GgufPart.of(path, header):
            found.add_parts(part, header)
        else:
            found = _OpenFiles(ANYWHERE)
            found.add(path, "", header)
    _refuse_slices(path, found.files)
    return found


def _open_tree(root: Path, links: LinkBoundary) -> "_OpenFiles":
    components = _components(root, links)
    found = _walk(root, components, links, bool(components))
    if not found.files:
        found = _walk(root, components, links, True)
    if not found.files:
        for error in found.not_weights.values():
            raise error
        _nothing(root, components, links)
    _refuse_slices(root, found.files)
    if not components and not found.indexed:
        _refuse_several(root, found)
    return found


def _walk(
    root: Path, components: frozenset[str], links: LinkBoundary, any_name: bool
) -> "_OpenFiles":
    """Return the files of a tree; with `any_name`, also those not called as weights are."""
    found = _OpenFiles(links, whole=bool(components))
    for prefix, folder in _folders(root, components, links):
        if prefix and is_repository(folder):
            raise _hub_cache(folder.parent, links)
        top = prefix.partition("/")[0]
        if (top == _SECOND_COPY and found.files) or _identity(folder) in found.indexed:
            continue
        names, before = _names(folder), len(found.files)
        if prefix == f"{SLICES_FOLDER}/" and found.files and are_slices(names):
            continue
        found.add_folder(folder, prefix, names, any_name)
        others = [prefix + name for name in names if name.endswith(_FOREIGN)]
        if components and others and len(found.files) == before:
            raise _unsupported(root, others)
    return found


class _OpenFiles:
    """The files of a checkpoint while they are found; `indexed` are folders with indexed shards.

    `not_weights` has the files that are left out because of their content, by relative path, and
    what is wrong with them as weights. With `whole`, there are none: all files are needed.

    A file is known by its path. What a link leads to does not identify it: in a hub cache equal
    files of two components are one blob, and an index may name one file by two folders.
    """

    def __init__(self, links: LinkBoundary, *, whole: bool = True) -> None:
        self.links = links
        self._whole = whole
        self.files: list[CheckpointFile] = []
        self.not_weights: dict[str, FormatError] = {}
        self.indexed: set[tuple[int, int]] = set()
        self._seen: set[Path] = set()
        self._named: dict[str, set[Path]] = {}  # the files that indexes name for a tensor

    def add(self, path: Path, prefix: str, header: Header) -> None:
        """Add a file, unless it is there already."""
        check_text(prefix, path)  # tensors are called by it
        if path not in self._seen:
            self._seen.add(path)
            self.files.append(CheckpointFile(path, prefix, header))

    def add_folder(self, folder: Path, prefix: str, names: list[str], any_name: bool) -> None:
        """Add the weights among the files of a folder."""
        choice = _choose(names, any_name)
        refuse_parts(folder, choice.files)
        if choice.missing is not None:
            raise CheckpointFilesError.at(
                CheckpointFault.MISSING_SHARD,
                str(folder),
                f"the shard {choice.missing} is not there",
                shard=choice.missing,
            )
        for name in choice.indexes:
            index = folder / name
            self.add_index(index, prefix, _read_json(index, self.links))
        if INDEX_NAME in names:  # which the headers of data files are made of
            self.links.check(folder / INDEX_NAME)
        headers: dict[str, Header] = {}
        for name in choice.files:
            try:
                headers[name] = _read_header(folder / name, self.links)
            except (PytorchError, CheckpointFilesError) as error:
                if self._whole or is_shard(name) or not _is_another_file(error, name):
                    raise
                self.not_weights[prefix + name] = error
            else:
                self.add(folder / name, prefix, headers[name])
        for name, header in headers.items():
            if part := GgufPart.of(folder / name, header):
                part.check(headers)

    def add_parts(self, first: GgufPart, header: Header) -> None:
        """Add all parts of a split GGUF model, whose first part has this header.

        Raises:
            CheckpointFilesError: A part is missing, or `first` is a later one.
        """
        first.check_first()
        headers = {first.path.name: header}
        for name in first.names[1:]:
            path = first.path.with_name(name)
            if _is_file(path):
                headers[name] = _read_header(path, self.links)
        first.check(headers)
        for name, each in headers.items():
            self.add(first.path.with_name(name), "", each)

    def add_index(self, index: Path, prefix: str, content: Mapping[str, object]) -> None:
        """Add the shards that an index of this content names."""
        shards: dict[PurePosixPath, list[str]] = {}
        for tensor, name in _weight_map(index, content).items():
            shards.setdefault(PurePosixPath(name), []).append(tensor)
        for shard, expected in sorted(shards.items()):
            path = index.parent / shard
            self.add(path, prefix, _shard_header(index, str(shard), expected, self.links))
            self.indexed.add(_identity(path.parent))
            for tensor in expected:
                self._named.setdefault(prefix + tensor, set()).add(path)

    def superseding(self) -> list[CheckpointFile]:
        """Return the files, each with the names in it for which the index names another file.

        Raises:
            CheckpointFilesError: A tensor that does not count holds others that do.
        """
        found = []
        for file in self.files:
            instead = dict[str, Path]()
            for name in names_in(file.header):
                named = self._named.get(file.prefix + name, set())
                if len(named) == 1 and file.path not in named:
                    instead[name] = next(iter(named))
            for name, member in members_in(file.header).items():
                if member.held_by in instead and name not in instead:
                    other = instead[member.held_by]
                    raise _repeated(file.path, file.prefix + member.held_by, other)
            found.append(replace(file, superseded=instead) if instead else file)
        return found


def check_text(name: str, path: Path) -> None:
    """Check that `name`, a part of a file's path, is valid UTF-8.

    On Linux a file name can be any bytes. Names that are not UTF-8 cannot be stored or written as
    JSON. `path`, the whole path, is used in error messages only.

    Raises:
        CheckpointFilesError: `name` is not UTF-8.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        shown = str(path).encode("utf-8", "backslashreplace").decode()
        what = "its name, or that of a folder it is in, is not UTF-8"
        raise CheckpointFilesError.at(CheckpointFault.NAME_ENCODING, shown, what) from error


def _is_another_file(error: PytorchError | CheckpointFilesError, name: str) -> bool:
    """Whether a file is no damaged one of torch.save: an empty one, or one of zeros, may be."""
    if error.kind is CheckpointFault.TEXT:
        return name.endswith(PYTORCH_SUFFIXES)
    begins = str(error.facts.get("begins", ""))
    return error.kind is PytorchFault.NOT_PYTORCH and bool(begins.strip("0"))


def _read_header(path: Path, links: LinkBoundary) -> Header:
    links.check(path)
    with opened(path) as file:
        links.check_open(path, file.fd)
        return read_header(path, fd=file.fd)


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _choose(names: list[str], any_name: bool) -> WeightFiles:
    found = choose(names, SAFETENSORS)
    if found == WeightFiles():
        found = choose(called_weights(names), PYTORCH)
    if found == WeightFiles():
        found = data_files(names)
    if found == WeightFiles() and any_name:
        found = choose(perhaps_weights(names), PYTORCH)
    if found == WeightFiles() and any_name:
        found = choose(names, GGUF)
    return found


def _other_files(root: Path, files: Iterable[CheckpointFile], links: LinkBoundary) -> list[str]:
    """The files of a folder that are none of `files`, by relative path, in order.

    Hidden files and folders, and folders outside `links`, are not looked at.
    """
    chosen = {file.path for file in files}
    return sorted(
        prefix + name
        for prefix, folder in _folders(root, frozenset(), links, outside=False)
        for name in _names(folder)
        if folder / name not in chosen and not name.startswith(".")
    )


def _names(folder: Path) -> list[str]:
    return [entry.name for entry in _entries(folder) if not entry.is_dir()]


def _folders(
    root: Path, components: frozenset[str], links: LinkBoundary, *, outside: bool = True
) -> Iterator[tuple[str, Path]]:
    """Yield the folder and all below it, of a pipeline only its components and all below them.

    Links count, no folder twice: they may form circles. A link that leads out of the checkpoint is
    an error or, without `outside`, passed over.
    """
    seen = {_identity(root)} if components else set()
    waiting = [(f"{name}/", root / name) for name in sorted(components)] or [("", root)]
    while waiting:
        prefix, folder = waiting.pop(0)
        if (identity := _identity(folder)) in seen:
            continue
        seen.add(identity)
        try:
            links.check(folder)
        except CheckpointFilesError:
            if outside:
                raise
            continue
        yield prefix, folder
        waiting += [
            (f"{prefix}{entry.name}/", entry)
            for entry in _entries(folder)
            if entry.is_dir() and not entry.name.startswith(".")
        ]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise CheckpointNotFoundError(
            f"{folder}: {error.strerror}; check its permissions", path=str(folder)
        ) from error


def _components(root: Path, links: LinkBoundary) -> frozenset[str]:
    """Return the sub-folders that a Diffusers pipeline consists of; none when it is no pipeline."""
    index = root / _PIPELINE
    if not index.is_file():
        return frozenset()
    entries = _read_json(index, links)
    folders = {entry.name for entry in _entries(root) if entry.is_dir()}
    return frozenset(
        name for name in folders if isinstance(entries.get(name), list) and not name.startswith(".")
    )


def _shard_header(index: Path, shard: str, expected: list[str], links: LinkBoundary) -> Header:
    path = index.parent / shard
    if not _is_file(path):
        raise CheckpointFilesError.at(
            CheckpointFault.MISSING_SHARD,
            str(index),
            f"the shard {shorten(shard)} is not there",
            shard=shorten(shard),
        )
    header = _read_header(path, links)
    # A shard may hold more than the index says: every reader loads what the shard holds.
    held = names_in(header)
    for tensor in expected:
        if tensor not in held:
            raise CheckpointFilesError.at(
                CheckpointFault.INDEX_TENSOR,
                str(index),
                f"not in {shard}, where the index puts it",
                tensor,
                shard=shard,
            )
    return header


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for any file
        return False


def _weight_map(index: Path, content: Mapping[str, object]) -> Mapping[str, str]:
    found = content.get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointFilesError.at(CheckpointFault.INDEX, str(index), "it has no weight_map")
    for tensor, shard in found.items():
        if not isinstance(shard, str):
            raise CheckpointFilesError.at(
                CheckpointFault.INDEX, str(index), "its file is not named by a text", tensor
            )
        if not _stays_inside(shard):
            raise CheckpointFilesError.at(
                CheckpointFault.INDEX_PATH,
                str(index),
                f"its file {shorten(shard)!r} lies outside the checkpoint",
                tensor,
                shard=shorten(shard),
            )
    return found


def _stays_inside(name: str) -> bool:
    # By its letters only: the shards of a hub cache are links to a folder outside, rightly.
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and not {"..", "\0"} & {*path.parts, *name}


def _read_json(path: Path, links: LinkBoundary) -> dict[str, object]:
    links.check(path)
    with opened(path) as file:
        links.check_open(path, file.fd)
        blob = file.read(0, min(file.size, MAX_HEADER_BYTES + 1))
    if len(blob) > MAX_HEADER_BYTES:
        raise CheckpointFilesError.at(
            CheckpointFault.INDEX,
            str(path),
            f"larger than {MAX_HEADER_BYTES} bytes",
            limit=MAX_HEADER_BYTES,
        )
    try:
        return decode_object(blob, str(path))
    except JsonTextError as error:
        found = placeholder(blob[:HEAD_BYTES], str(path))
        if found is None or found.kind is not CheckpointFault.POINTER:
            raise
        raise found from error


def _refuse_slices(root: Path, files: list[CheckpointFile]) -> None:
    weights = [(file.path, file.header) for file in files]
    refuse_slices(root, weights, _names(files[0].path.parent))


def _refuse_several(root: Path, found: _OpenFiles) -> None:
    models = several_models((file.path, file.prefix, file.header) for file in found.files)
    if not models:
        return
    refuse_overlapping_parts(root, [each.name for each in models])
    headers = {file.path: file.header for file in found.files}
    projectors = [str(each) for each in models if is_projector(each, headers[each])]
    left_out = [
        LeftOut(path, LeftOutReason.NOT_WEIGHTS if path in found.not_weights else why_beside(path))
        for path in _other_files(root, found.files, found.links)
    ]
    state = [each for each in left_out if each.reason is LeftOutReason.TRAINING_STATE]
    raise SeveralModelsError.of(
        str(root),
        f"{_counted(len(models), len(projectors))} in this folder, and one was asked for",
        {str(each): "" for each in models},
        projectors=projectors,
        left_out=left_out,
        notes=described(state),
    )


def _counted(files: int, projectors: int) -> str:
    kinds = {"model": files - projectors, "projector": projectors}
    return " and ".join(f"{n} {kind}{'s' * (n > 1)}" for kind, n in kinds.items() if n)


def _hub_cache(cache: Path, links: LinkBoundary) -> SeveralModelsError:
    """The error for a folder with a Hugging Face cache, whose repositories are no one checkpoint.

    Raises:
        CheckpointFilesError: A repository is a link that leads out of the folder.
    """
    held = [each for each in _entries(cache) if is_repository(each)]
    for each in held:
        links.check(each)
    names = [each.name.removeprefix(MODELS).replace("--", "/", 1) for each in held]
    command = f"HF_HUB_CACHE={shlex.quote(str(cache.absolute()))} tensor-dedup import"
    return SeveralModelsError(
        f"{cache}: a Hugging Face cache, with {_listed(names)}; name one of them by ORG/NAME, as "
        f"in `{command} {shlex.quote(names[0])}`, or index all of them with "
        f"`{command} --hub-cache`",
        path=str(cache),
        models=list(map(str, held)),
    )


def _refuse_repeated(files: list[CheckpointFile]) -> None:
    seen: dict[str, Path] = {}
    for file in files:
        for spec in file.tensors:
            name = file.prefix + spec.name
            if (other := seen.setdefault(name, file.path)) != file.path:
                refuse_overlapping_parts(file.path.parent, [other.name, file.path.name])
                raise _repeated(file.path, name, other)


def _repeated(path: Path, name: str, other: Path) -> CheckpointFilesError:
    return CheckpointFilesError.at(
        CheckpointFault.REPEATED_TENSOR,
        str(path),
        f"{other} holds it too",
        name,
        other=str(other),
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")


def _unsupported(path: Path, names: list[str]) -> UnsupportedError:
    return UnsupportedError(
        f"{path}: only {_listed(names)}; this version reads safetensors, GGUF and files of "
        "torch.save: convert the weights first",
        path=str(path),
        files=names,
    )


def _unfinished(path: Path, names: list[str]) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"{path}: only {_listed(names)}, a download that is not finished; download the model "
        "again, and give it then",
        path=str(path),
        files=names,
    )


def _nothing(root: Path, components: frozenset[str], links: LinkBoundary) -> NoReturn:
    names = [
        prefix + name
        for prefix, folder in _folders(root, components, links)
        for name in _names(folder)
    ]
    refuse_distributed(root, names)
    began = (each.relative_to(root).as_posix() for each in (root / _DOWNLOADS).rglob("*"))
    if unfinished := [name for name in (*names, *began) if name.endswith(UNFINISHED)]:
        raise _unfinished(root, unfinished)
    foreign = [name for name in names if name.endswith(_FOREIGN)]
    if foreign:
        raise _unsupported(root, foreign)
    raise CheckpointNotFoundError(
        f"{root}: no *{SAFETENSORS_SUFFIX}, *.bin, *.pt or *{GGUF_SUFFIX} in this folder or below; "
        "give the folder that holds the weights",
        path=str(root),
    )
