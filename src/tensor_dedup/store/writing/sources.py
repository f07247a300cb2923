"""The files of an import, which lie at a path or in a Hugging Face cache."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from tensor_dedup.errors import (
    ChangedFileError,
    CheckpointNotFoundError,
    FormatError,
    SeveralModelsError,
)
from tensor_dedup.formats.checkpoint import (
    Checkpoint,
    CheckpointFile,
    check_text,
    open_checkpoint,
)
from tensor_dedup.formats.hub_cache import HIDDEN, MODELS, SNAPSHOTS, is_repository, snapshot_in
from tensor_dedup.formats.left_out import LeftOut
from tensor_dedup.formats.links import ANYWHERE, LinkBoundary
from tensor_dedup.formats.model_stores import is_manifest, open_model
from tensor_dedup.formats.weight_choice import is_index, why_left_out
from tensor_dedup.formats.weights import Header, aliases_in, read_header
from tensor_dedup.store.files import Files, Handle, RealFiles
from tensor_dedup.store.format.manifests import import_notes
from tensor_dedup.store.format.names import check_name, fit, name_of, shortened, stem_of


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous part of a file. It is a tensor if it has a name."""

    start: int
    nbytes: int
    name: str | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ImportFile:
    """A file to import: its path, its relative path in the checkpoint, and its segments.

    `weights` is True for a file of tensors. A tensor's name in the checkpoint is `prefix` followed
    by its name in the file. `aliases` has pairs of names of a tensor: an additional name, then the
    first name. `superseded` has pairs of a name of a tensor in the file that does not count, and
    the stored path of the file whose tensor does. An `opaque` file is one that only an import of
    all files keeps. `links` limits where symbolic links may lead.
    """

    path: Path
    stored_as: str
    prefix: str
    segments: tuple[Segment, ...]
    weights: bool
    aliases: tuple[tuple[str, str], ...] = ()
    superseded: tuple[tuple[str, str], ...] = ()
    links: LinkBoundary = ANYWHERE
    opaque: bool = False

    def open_with(self, files: Files) -> Handle:
        """Open the file for reading; `files` does the I/O.

        Raises:
            CheckpointFilesError: A symbolic link in the file's path now leads elsewhere.
        """
        handle = files.open(self.path, "read")
        try:
            self.links.check_open(self.path, handle.fd)
        except BaseException:
            files.close(handle)
            raise
        return handle

    @property
    def nbytes(self) -> int:
        """The size of the file in bytes."""
        return sum(segment.nbytes for segment in self.segments)


@dataclass(frozen=True, slots=True)
class ImportSource:
    """All files of a checkpoint to import, weights first, and the files that are left out."""

    files: tuple[ImportFile, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def nbytes(self) -> int:
        """The size of all files in bytes."""
        return sum(file.nbytes for file in self.files)


def read_source(
    files: Files, path: Path, *, follow_links: bool = False, all_files: bool = False
) -> ImportSource:
    """Return the files to import for the checkpoint at `path`. Only headers and names are read.

    If `path` is a folder, its other files (config, tokenizer, indexes) are included. Hidden files
    and weights that `open_checkpoint` does not choose are left out or, with `all_files`, included
    as bytes of which nothing is known. `follow_links` allows symbolic links to lead anywhere. A
    model in the store of another tool has all files that its manifest names, and the manifest.
    Raises the errors of `open_checkpoint`.
    """
    checkpoint = open_checkpoint(path, follow_links=follow_links)
    if is_manifest(checkpoint.path):
        return _model(files, checkpoint, follow_links)
    status = files.status(checkpoint.path)
    if status is None or status.kind != "folder":
        root = checkpoint.path.parent
        taken = [_weights(file, root, checkpoint.links) for file in checkpoint.files]
        if is_index(checkpoint.path.name):
            taken.append(_verbatim(files, checkpoint.path, checkpoint.path.name, ANYWHERE))
        return ImportSource(tuple(taken), ())
    return _folder(files, checkpoint, all_files)


def read_file(path: Path) -> ImportSource:
    """Return a single file of weights as it is, whatever checkpoint it may be a part of.

    Raises:
        CheckpointNotFoundError: The file cannot be opened.
        FormatError: The file is malformed.
    """
    header = read_header(path)
    segments = segments_of(header)
    return ImportSource((ImportFile(path, path.name, "", segments, True, aliases_in(header)),), ())


def _model(files: Files, checkpoint: Checkpoint, follow_links: bool) -> ImportSource:
    model = open_model(checkpoint.path, follow_links=follow_links)
    if [file.path for file in checkpoint.files] != [each.path for each in model.weights]:
        raise ChangedFileError(
            f"{checkpoint.path}: it was written meanwhile; import the model again when nobody "
            "pulls it",
            path=str(checkpoint.path),
        )
    weights = [
        ImportFile(
            file.path,
            each.name,
            file.prefix,
            segments_of(file.header),
            True,
            aliases_in(file.header),
            links=model.links,
        )
        for file, each in zip(checkpoint.files, model.weights, strict=True)
    ]
    others = [_verbatim(files, each.path, each.name, model.links) for each in model.others]
    return ImportSource((*weights, *others), ())


def _folder(files: Files, checkpoint: Checkpoint, all_files: bool) -> ImportSource:
    links = checkpoint.links
    weights = [_weights(file, checkpoint.path, links) for file in checkpoint.files]
    chosen = {file.stored_as for file in weights}
    others: list[ImportFile] = []
    left_out: list[LeftOut] = []
    for name, path in _walk(files, checkpoint.path, links, hidden=all_files):
        if name in chosen:
            continue
        reason = checkpoint.why_left_out(name)
        if reason is not None and not all_files:
            left_out.append(LeftOut(name, reason))
        else:
            opaque = reason is not None or any(part.startswith(".") for part in name.split("/"))
            others.append(_verbatim(files, path, name, links, opaque=opaque))
    return ImportSource((*weights, *others), tuple(sorted(left_out, key=lambda each: each.path)))


def default_name(path: Path, *, follow_links: bool = False) -> str:
    """Return the name that the checkpoint at `path` gets in a store if none is given.

    For a model in the store of another tool, that is the name there. Raises the errors of
    `open_checkpoint` for such a model.
    """
    if is_manifest(path):
        return fit(open_model(path, follow_links=follow_links).name)
    return name_of(path)


@dataclass(frozen=True, slots=True)
class Models:
    """The models at a path: each path, with its name in a store.

    `projectors` are the paths of those that are projectors. `left_out` has the files of the folder
    that are in none of several models.
    """

    named: tuple[tuple[Path, str], ...]
    projectors: frozenset[Path] = frozenset()
    left_out: tuple[LeftOut, ...] = ()


def models_at(path: Path, name: str | None = None, *, follow_links: bool = False) -> Models:
    """Return the models at `path`: those in a folder or, if `path` is a single checkpoint, that.

    In a folder, the names are made of the folder's and each model's path in it, so that models of
    two folders differ. `name` stands in place of the folder's name, and is the name of a single
    checkpoint. Models in the store of another tool, and repositories of a Hugging Face cache, have
    their own names, below `name` if that is given.

    Raises:
        BadNameError: `name` is invalid.
        CheckpointError: One of the errors of `open_checkpoint`.
    """
    if name is not None:
        check_name(name)
    try:
        open_checkpoint(path, follow_links=follow_links)
    except SeveralModelsError as error:
        models = [Path(each).absolute() for each in error.models]
        projectors = frozenset(Path(each).absolute() for each in error.projectors)
        left_out = error.left_out
    else:
        called = name or default_name(path.absolute(), follow_links=follow_links)
        return Models(((path, called),))
    if is_manifest(models[0]) or is_repository(models[0]):
        names = [_tool_name(each, follow_links) for each in models]
        below = [PurePath(each) for each in names]
        if name is not None:
            names = names_within(name, below)
        elif len({*names}) < len(names):
            names = names_within(name_of(path.absolute()), below)
    else:
        inside = [each.relative_to(snapshot_in(path).absolute()) for each in models]
        names = names_within(name or name_of(path.absolute()), inside)
    return Models(tuple(zip(models, names, strict=True)), projectors, left_out)


def _tool_name(model: Path, follow_links: bool) -> str:
    try:
        return default_name(model, follow_links=follow_links)
    except FormatError:  # of a manifest; its import will say so
        return fit(f"{model.parent.name}/{model.name}")


def paths_of_models(path: Path, *, follow_links: bool = False) -> list[Path]:
    """Return the path of each model at `path`; only `path`, if it is a single checkpoint.

    Raises the errors of `open_checkpoint`.
    """
    try:
        open_checkpoint(path, follow_links=follow_links)
    except SeveralModelsError as error:
        return [Path(each).absolute() for each in error.models]
    return [path]


def names_within(folder: str, models: Sequence[PurePath]) -> list[str]:
    """Return a name in a store for each of several models in one folder; no two are equal.

    `folder` is the folder's name in the store, and `models` are the paths of the models in it. A
    name is made of both; `m/m.gguf` is called `m`. Those that would be equal, such as the names of
    `m (1).gguf` and `m [1].gguf`, end in digits of the digest of the path.
    """
    names = []
    for each in models:
        inside = each.with_name(stem_of(each)).as_posix()
        repeats = inside == PurePath(folder).name
        names.append(fit(folder if repeats else f"{folder}/{inside}"))
    times = Counter(names)
    return [
        name if times[name] == 1 else fit(f"{folder}/{each.as_posix()}", marked=True)
        for name, each in zip(names, models, strict=True)
    ]


def small_files(files: Files, root: Path) -> dict[str, bytes]:
    """Return the content of the files in a folder that are not weights, by relative path.

    Hidden files are left out.

    Raises:
        CheckpointNotFoundError: The folder does not exist.
        CheckpointFilesError: A link leads out of the folder.
    """
    status = files.status(root)
    if status is None or status.kind != "folder":
        raise CheckpointNotFoundError(
            f"{root}: no folder; give one with a model's configuration", path=str(root)
        )
    found = {}
    links = LinkBoundary.around(root)
    for name, path in sorted(_walk(files, root, links)):
        if why_left_out(name) is None:
            handle = _verbatim(files, path, name, links).open_with(files)
            try:
                data = bytearray(files.status_of(handle).size)
                found[name] = bytes(data[: files.pread(handle, memoryview(data), 0)])
            finally:
                files.close(handle)
    return found


def _walk(
    files: Files, root: Path, links: LinkBoundary, *, hidden: bool = False
) -> Iterator[tuple[str, Path]]:
    """Every file below a folder by its relative name; links followed, no folder twice.

    Where links to files lead is not checked: not every file is read.
    """
    top = files.status(root)
    seen = {(top.device, top.inode)} if top is not None else set()
    waiting = [("", root)]
    while waiting:
        prefix, folder = waiting.pop(0)
        for name in files.listdir(folder):
            left = name.startswith(".") and not hidden
            status = None if left else files.status(folder / name)
            if status is None:
                continue
            if status.kind == "file":
                yield prefix + name, folder / name
            elif status.kind == "folder" and (status.device, status.inode) not in seen:
                seen.add((status.device, status.inode))
                links.check(folder / name)
                waiting.append((f"{prefix}{name}/", folder / name))


def _weights(file: CheckpointFile, root: Path, links: LinkBoundary) -> ImportFile:
    stored_as, segments = file.path.relative_to(root).as_posix(), segments_of(file.header)
    aliases = tuple(pair for pair in aliases_in(file.header) if pair[0] not in file.superseded)
    superseded = tuple(
        (name, other.relative_to(root).as_posix()) for name, other in file.superseded.items()
    )
    check_text(stored_as, file.path)
    return ImportFile(file.path, stored_as, file.prefix, segments, True, aliases, superseded, links)


def segments_of(header: Header) -> tuple[Segment, ...]:
    """Cut the file with this header into segments, in order. They cover the whole file.

    Each tensor is a segment. So is each range of bytes before, between and after tensors, which
    has no name.
    """
    found: list[Segment] = []
    at = 0
    for spec in header.tensors:
        if spec.start > at:
            found.append(Segment(at, spec.start - at))
        found.append(Segment(spec.start, spec.nbytes, spec.name, spec.dtype, spec.shape))
        at = spec.start + spec.nbytes
    if at < header.file_size:
        found.append(Segment(at, header.file_size - at))
    return tuple(found)


def notes_of(files: Sequence[ImportFile]) -> dict[str, str]:
    """Return the notes of the manifest of a checkpoint with these files."""
    return import_notes(
        {file.prefix + alias: file.prefix + name for file in files for alias, name in file.aliases},
        {file.prefix + name: other for file in files for name, other in file.superseded},
        (file.stored_as for file in files if file.opaque),
    )


def _verbatim(
    files: Files, path: Path, name: str, links: LinkBoundary, *, opaque: bool = False
) -> ImportFile:
    check_text(name, path)
    links.check(path)
    status = files.status(path)
    if status is None:
        raise ChangedFileError(
            f"{path}: it went away; import again when nobody changes the folder", path=str(path)
        )
    if status.kind != "file":
        raise CheckpointNotFoundError(f"{path}: not a regular file; remove it", path=str(path))
    segments = (Segment(0, status.size),) if status.size else ()
    return ImportFile(path, name, "", segments, False, links=links, opaque=opaque)


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    """A snapshot in a Hugging Face cache, and the name for it in a store (`ORG/NAME@REVISION`)."""

    path: Path
    name: str


def snapshots(root: Path, files: Files | None = None) -> Iterator[HubSnapshot]:
    """Yield all snapshots of models in the Hugging Face cache at `root`.

    Data sets and spaces are skipped.
    """
    disk = files or RealFiles()
    for folder in disk.listdir(root):
        if not folder.startswith(MODELS):
            continue
        for revision in disk.listdir(root / folder / SNAPSHOTS):
            path = root / folder / SNAPSHOTS / revision
            status = disk.status(path)
            if not revision.startswith(HIDDEN) and status is not None and status.kind == "folder":
                yield HubSnapshot(path, shortened(name_of(path), f"@{revision}"))
