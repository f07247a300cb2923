"""The verbs of the store: import, export, list, show, stats, rename, delete, gc, verify, repair."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal, TypeVar

import click
from rich.console import Console
from rich.table import Table

from tensor_dedup.analyze.stored import full_name, pull_suggested, resolved_name
from tensor_dedup.api import Store
from tensor_dedup.cli import Failure, WrongUse, printable, remember_given
from tensor_dedup.cli.tables import Dotted, counted, fitted, listing, shortened
from tensor_dedup.cli.terminal import (
    ByteBar,
    FiniteRange,
    ask,
    console,
    dry_run_option,
    json_option,
    say,
    say_lines,
    short,
    yes_option,
)
from tensor_dedup.errors import (
    CheckpointNotFoundError,
    SeveralModelsError,
    StoreError,
    TensorDedupError,
    UnsupportedError,
)
from tensor_dedup.formats.checkpoint import open_checkpoint
from tensor_dedup.formats.hub_cache import cache_path, locate, name_in_store
from tensor_dedup.formats.left_out import described
from tensor_dedup.formats.model_stores import is_manifest
from tensor_dedup.formats.rank_files import part_of_model
from tensor_dedup.loader.checkpoint_io.hints import StoreHints
from tensor_dedup.store import (
    GcPlan,
    ImportResult,
    Listed,
    RepairResult,
    Stats,
    StoredCheckpoint,
    VerifyResult,
)
from tensor_dedup.store.errors import NameTakenError, NoStoreError, RunNameError
from tensor_dedup.store.format.names import fit, own_name
from tensor_dedup.store.format.tables import PLAIN
from tensor_dedup.store.init import ENVIRONMENT, own_path
from tensor_dedup.store.upkeep.cache_copies import CacheCopies
from tensor_dedup.store.upkeep.gc import DEFAULT_GRACE_HOURS
from tensor_dedup.store.upkeep.usage import Usage
from tensor_dedup.store.writing.sources import (
    HubSnapshot,
    Models,
    models_at,
    names_within,
    snapshots,
)
from tensor_dedup.text_table import human

_Verb = TypeVar("_Verb", bound=Callable[..., Any])


def store_option(verb: _Verb) -> _Verb:
    """Add the option `--store DIR` to a verb, which gets it as `store`; None by default."""
    return click.option(
        "--store",
        type=click.Path(file_okay=False),
        metavar="DIR",
        callback=remember_given,
        help=f"The store; by default ${ENVIRONMENT}, else `store` of tensor-dedup.toml, "
        f"else {short(own_path())}.",
    )(verb)


# The verbs that take the name of a run as well.
_OF_RUNS: Final = ("du", "push", "rename")


def stored_names(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return, for shell completion, the names in the store that begin with `incomplete`.

    The names of runs are included if the verb takes them.
    """
    with suppress(TensorDedupError, OSError):
        opened = existing(context.params.get("store"))
        runs = opened.runs() if context.info_name in _OF_RUNS else []
        return [name for name in (*runs, *opened.names()) if name.startswith(incomplete)]
    return []


def name_argument(verb: _Verb) -> _Verb:
    """Add the argument `NAME`, a checkpoint in the store, to a verb, which gets it as `name`."""
    return click.argument("name", shell_complete=stored_names)(verb)


def follow_links_option(verb: _Verb) -> _Verb:
    """Add the flag `--follow-links` to a verb, which gets it as `follow_links`."""
    return click.option(
        "--follow-links",
        is_flag=True,
        help="Follow symbolic links that lead out of the folder, too.",
    )(verb)


def grace_option(verb: _Verb) -> _Verb:
    """Add the option `--grace HOURS` to a verb, which gets it as `grace`."""
    return click.option(
        "--grace",
        type=FiniteRange(min=0),
        default=DEFAULT_GRACE_HOURS,
        show_default=True,
        metavar="HOURS",
        help="How long the trash is kept; 0 deletes at once.",
    )(verb)


@contextmanager
def run_suggested(command: str) -> Iterator[None]:
    """Context manager: an error that a name is that of a run gets the command for the whole run.

    `command` is the command after `tensor-dedup`, with `{}` in place of the run's name.
    """
    try:
        yield
    except RunNameError as error:
        where = f" --store {shlex.quote(error.facts['path'])}"
        words = f"tensor-dedup {command.format(shlex.quote(error.facts['run']))}{where}"
        said = f"{error.message}, or run `{words}` for all of them"
        raise RunNameError(said, **error.facts) from error


def existing(store: str | None) -> Store:
    """Open the existing store in the folder `store`, by default the user's own.

    Raises:
        NotAStoreError: There is no store, or the folder holds something else. Nothing is created.
    """
    return Store.open(store, create=False)


def store_or_empty(store: str | None) -> Store:
    """Open the existing store or, for a dry run without one, an empty one that is deleted again."""
    try:
        return existing(store)
    except NoStoreError:
        folder = TemporaryDirectory(prefix="tensor-dedup-")
        return Store.open(click.get_current_context().with_resource(folder))


def existing_or_said(
    store: str | None, as_json: bool, document: Mapping[str, object]
) -> Store | None:
    """Open an existing store. If there is none, print a message that says so, and return None.

    If `as_json` is True, `document` is printed instead of the message. Its field `store`, if it has
    one, is printed with the path where a store was expected.
    """
    try:
        return existing(store)
    except NoStoreError as error:
        path = error.facts["path"]
        where = {"store": str(path)} if "store" in document else {}
        say(
            {**document, **where},
            as_json,
            f"no store yet at {path}; `tensor-dedup import` makes one",
        )
        return None


def empty(store: Store, what: str) -> str:
    """Return the message for an empty list; `what` is, for example, "no checkpoints".

    The message has the store's path and says how to name another store.
    """
    return f"{store.path} holds {what}; --store DIR or {ENVIRONMENT} names another store"


def print_fitted(
    store: Store,
    heading: str,
    names: Sequence[str],
    columns: Mapping[str, Sequence[str]],
    least: Sequence[str],
) -> None:
    """Print the store's path and, below it, a table that is fitted to the terminal.

    `heading` and `names` are the title and the cells of the first column. `columns` maps the title
    of each other column to its cells. If the table is too wide, columns in `least` are left out,
    one by one in this order, and a last line names them.
    """
    out = console()
    table, left_out = fitted(out, heading, names, columns, least)
    print_table(store, table)
    if left_out:
        say_lines(left_out)


def print_table(store: Store, table: Table) -> None:
    """Print the store's path and, below it, a table."""
    say_lines(f"store {store.path}")
    console().print(table)


_ALL_FILES = ", or import it with --all-files"
# Of --base: the most similar checkpoint.
_FOUND = "auto"


@click.command(name="import")
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option(
    "--name",
    metavar="N",
    help="Its name in the store; by default that of its folder, file or repository, or "
    "ORG/NAME@REVISION as you gave it (of a commit all digits), in the ASCII letters, digits and "
    "._@+=- that a name can have.",
)
@click.option("--replace", is_flag=True, help="Replace the checkpoint that has this name.")
@click.option(
    "--compress",
    type=click.Choice(["auto"]),
    help="Encode tensors that get at least a tenth smaller.",
)
@click.option(
    "--base",
    metavar="N",
    shell_complete=stored_names,
    help="With --compress: the checkpoint to store differences from; `auto` finds it.",
)
@click.option("--external", is_flag=True, help="Index the weights where they are, without a copy.")
@click.option("--hub-cache", is_flag=True, help="Index your whole Hugging Face cache, in place.")
@click.option(
    "--all-models",
    is_flag=True,
    help="Import each of several models in PATH, as FOLDER/MODEL or, with --name N, N/MODEL.",
)
@click.option("--all-files", is_flag=True, help="Keep every file of the folder for the export.")
@click.option(
    "--dedup-cache",
    is_flag=True,
    help="With --hub-cache: make files that cache and store both have one copy on disk.",
)
@dry_run_option
@follow_links_option
@store_option
@json_option
def import_(
    path: Path | None,
    name: str | None,
    replace: bool,
    compress: Literal["auto"] | None,
    base: str | None,
    external: bool,
    hub_cache: bool,
    all_models: bool,
    all_files: bool,
    dedup_cache: bool,
    dry_run: bool,
    follow_links: bool,
    store: str | None,
    as_json: bool,
) -> None:
    """Import a checkpoint into the store: new tensors are stored, known ones only referenced.

    PATH is a file (safetensors, GGUF, torch.save), an index, a folder, or a name in your Hugging
    Face cache (ORG/NAME or ORG/NAME@REVISION). A folder's other files (config, tokenizer) are kept
    too, so that an export works anywhere.

    A folder may hold several models: quantisations beside each other, the store of Ollama or Docker
    Model Runner (~/.ollama/models, ~/.docker/models), or a Hugging Face cache. Without --all-models
    you are told what there is, and name one. With it, each gets a name of its own: that in the
    tool's store, else the folder's and its own. Only what each model consists of is stored; the
    folder's other files are named.

    A tensor that equals a stored one except for some pieces of 2 MiB takes the space of those
    pieces only. So a vocabulary that grew takes the space of its new rows.

    With --compress auto, new tensors are encoded where samples show that this saves a tenth: by
    themselves, or as differences from a tensor of the stored checkpoint --base, by default (`auto`)
    the most similar one. Tensors that markers in PATH name are compared first. Exports are
    identical byte for byte; reading takes longer.

    With --external the weights are indexed where they are. They are not copied, changed or deleted,
    and if a file changes later, reading it is refused and the file is named. --hub-cache does this
    for every snapshot in HF_HUB_CACHE (or HF_HOME), under names like ORG/NAME@REVISION.

    What an earlier import has copied into the store is on the disk twice then, which --hub-cache
    says. With --dedup-cache, each file of the cache that the store holds whole becomes one copy
    with it, on file systems that can (XFS, Btrfs). The kernel compares the two first, no byte is
    written, and the cache's files keep their inodes and times.

    With --all-files an export brings back every file of the folder: the state of a training
    (optimizer.pt), other copies of the weights, and hidden files, too. These are stored as they
    are. They are never unpickled, and no engine that loads store://NAME sees them.

    A symbolic link that leads out of the folder (or, in a Hugging Face cache, to no blob of its
    repository or of the cache) is refused, because whoever made the folder could make you store any
    of your files. If you trust the folder, pass --follow-links.

    With --dry-run, the files are hashed and looked up, and nothing is written to the store. What
    --compress and equal pieces of 2 MiB would save, what several models have in common, and how
    much of a newly indexed cache is on the disk twice is not known then.
    """
    if (external or hub_cache) and compress is not None:
        raise WrongUse("--compress stores weights; --external and --hub-cache leave them in place")
    if base is not None and compress is None:
        raise WrongUse("--base says what --compress auto compares with; give both")
    if dedup_cache and not hub_cache:
        raise WrongUse("--dedup-cache is about the Hugging Face cache: give --hub-cache, too")
    if hub_cache:
        _check_alone(path, name, all_models, all_files)
        import_cache(store, replace, dedup_cache, follow_links, dry_run, as_json)
        return
    if path is None:
        raise WrongUse("Missing argument 'PATH': name a file of weights or a folder")
    place = locate(path)
    if all_files and place.is_file():
        raise WrongUse(f"--all-files keeps the files of a folder, and {path} is a file")
    revision = name_in_store(str(path), place)
    called = name if name is not None or revision is None else fit(revision)
    models = models_at(place, called, follow_links=follow_links) if all_models else None
    if all_files and models is not None and len(models.named) > 1:
        raise WrongUse(
            f"--all-files keeps the files of a folder with its one model, and {path} has "
            f"{len(models.named)}, which a file beside them would belong to alike: type "
            f"`tensor-dedup import {shlex.quote(str(path))} --all-models`, and keep the folder for "
            "the files that it names as left out"
        )
    target = _target(store, place if models is None else None, follow_links, dry_run)

    def take(model: Path, as_: str | None, label: str = "importing") -> ImportResult:
        with ByteBar(label) as progress:
            return target.import_(
                model,
                as_,
                replace,
                progress=progress,
                hints=StoreHints(),
                compress=compress,
                base=None if base == _FOUND else base,
                external=external,
                follow_links=follow_links,
                all_files=all_files,
                dry_run=dry_run,
            )

    if models is not None:
        _import_all(models, take, as_json)
        return
    result = take(place, called)
    own = revision or own_name(place.absolute())
    said = [*part_lines(place), *_name_lines(place, name, result.name, own)]
    say(result.to_dict(), as_json, *_import_lines(result), *said)


def part_lines(place: Path) -> list[str]:
    """Return a line for people if the file at `place` is only a part of a model."""
    if not place.is_file():
        return []
    with suppress(OSError):
        line = part_of_model(place, [each.name for each in place.parent.iterdir()])
        return [line] if line else []
    return []


def _name_lines(place: Path, given: str | None, name: str, own: str) -> list[str]:
    if given is not None or name == own or is_manifest(place):  # which has a name with its tool
        return []
    return [f"{own!r} cannot be the name of a checkpoint, so it is {name}; --name gives another"]


def _target(store: str | None, place: Path | None, follow_links: bool, dry_run: bool) -> Store:
    """Open the store or, where there is a checkpoint at `place`, make one, but for a dry run."""
    if dry_run:
        return store_or_empty(store)
    try:
        return existing(store)
    except NoStoreError:
        if place is not None:
            open_checkpoint(place, follow_links=follow_links)
        return Store.open(store)


def _import_all(
    models: Models,
    take: Callable[[Path, str, str], ImportResult],
    as_json: bool,
) -> None:
    """Import each model under its name; one that fails is reported, and the others go on.

    Then say which files of the folder are in none of them.
    """
    done: list[ImportResult] = []
    failed: dict[str, str] = {}
    lines: list[str] = []
    advice = ""
    for path, name in models.named:
        try:
            result = take(path, name, name)
        except TensorDedupError as error:
            failed[name] = str(error)
            click.echo(printable(f"{name}: {error}"), err=True)
            if isinstance(error, NameTakenError) and len(models.named) > 1:
                advice = "; with `--name N` they are called N/MODEL, and what is there stays"
        else:
            done.append(result)
            lines += [*_import_lines(result), *part_lines(path)]
            if path in models.projectors:
                lines.append(f"{name} is a projector, to be used beside one of the others")
    document = {
        "imported": [result.to_dict() for result in done],
        "failed": failed,
        "left_out": [each.to_dict() for each in models.left_out],
    }
    say(document, as_json, *lines, *described(models.left_out))
    if failed:
        raise Failure(f"{len(failed)} of {len(models.named)} models could not be imported{advice}")


def _check_alone(path: Path | None, name: str | None, all_models: bool, all_files: bool) -> None:
    if path is not None or name is not None or all_models or all_files:
        raise WrongUse(
            "--hub-cache names every snapshot itself: no PATH, no --name, no --all-models, no "
            "--all-files"
        )


def _import_lines(result: ImportResult) -> list[str]:
    if result.unchanged:
        unchanged = f"{result.name}: unchanged, {counted(result.tensors, 'tensor')}"
        return [unchanged, *described(result.left_out, result.not_indexed, _ALL_FILES)]
    lines = [
        f"{result.name}: {counted(result.tensors, 'tensor')} in {counted(result.files, 'file')}",
    ]
    if not result.done:
        lines += _planned_lines(result)
    elif result.external_bytes:
        # What is new and known is of small files here, and would be taken for the weights'.
        lines += [
            f"in place      {human(result.external_bytes)} of weights stay where they are",
            f"in the store  {human(result.stored_bytes)} written: digests, and the other files",
        ]
    else:
        lines.append(
            f"new {human(result.new_bytes)} in {counted(result.new_tensors, 'tensor')}, "
            f"known {human(result.known_bytes)}; {human(result.stored_bytes)} written"
        )
    if result.leaf_shared_bytes:
        lines.append(f"{human(result.leaf_shared_bytes)} of the new were there, in other tensors")
    if result.encoded_tensors:
        against = f", against {result.base}" if result.base is not None else ""
        encoded = counted(result.encoded_tensors, "tensor")
        lines.append(f"saved {human(result.saved_bytes)} by encoding {encoded}{against}")
    return [*lines, *described(result.left_out, result.not_indexed, _ALL_FILES)]


def _planned_lines(result: ImportResult) -> list[str]:
    new = f"{human(result.new_bytes)} in {counted(result.new_tensors, 'tensor')}"
    if result.external_bytes:
        in_place = f"{human(result.external_bytes)} of weights would be indexed in place"
        return [f"{in_place}, {human(result.new_bytes)} of other files copied; nothing was written"]
    return [f"new {new}, known {human(result.known_bytes)}; nothing was written"]


def import_cache(
    store: str | None,
    replace: bool,
    dedup: bool,
    follow_links: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Index all snapshots of the Hugging Face cache in the store, without copying their weights.

    A snapshot that fails is reported, and the import goes on. Then say how many bytes the cache and
    the store both hold on disk; with `dedup`, make them one copy where that is
    possible. With `dry_run`, nothing is written.

    Raises:
        WrongUse: The cache holds no snapshots.
        Failure: A snapshot could not be imported; raised after all others were tried.
    """
    found = list(snapshots(cache_path()))
    if not found:
        raise WrongUse(f"{cache_path()} holds no models; set HF_HUB_CACHE to your cache")
    target = store_or_empty(store) if dry_run else Store.open(store)
    dedup = dedup and not dry_run
    work = _CacheImport(target, replace, follow_links, dry_run)
    for snapshot in found:
        work.take(snapshot)
    with ByteBar("making one copy") as progress:
        copies = work.store.cache_copies(
            work.taken, dedup=dedup, follow_links=follow_links, progress=progress
        )
    document = {
        "cache": str(cache_path()),
        "imported": [result.to_dict() for result in work.done],
        "left_out": work.left_out,
        "failed": work.failed,
        **copies.to_dict(),
    }
    lines = _copies_lines(copies, dedup)
    if dry_run and work.done:
        # The store has no manifests of these snapshots, so `copies` does not cover them.
        document["twice_bytes"], lines = None, []
    say(document, as_json, *work.lines(), *lines)
    if work.failed:
        raise Failure(f"{len(work.failed)} of {len(found)} snapshots could not be imported")


def _copies_lines(copies: CacheCopies, dedup: bool) -> list[str]:
    files = counted(copies.deduped_files, "file")
    made = [f"one copy now   {human(copies.deduped_bytes)} in {files}"] if dedup else []
    return [
        *made,
        f"twice on disk  {human(copies.twice_bytes)}, in the cache and in the store",
        *(f"of that        {human(size)}: {why}" for why, size in copies.not_deduped.items()),
    ]


class _CacheImport:
    def __init__(self, store: Store, replace: bool, follow_links: bool, dry_run: bool) -> None:
        self.store, self._replace, self._follow_links = store, replace, follow_links
        self._dry_run = dry_run
        # Names have the revision in them: what is there under one is not hashed again to see that.
        self._there = set[str]() if replace else set(store.names())
        self.taken: list[HubSnapshot] = []
        self.done: list[ImportResult] = []
        self.left_out: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def take(self, snapshot: HubSnapshot) -> None:
        """Index one, or each of several models in it.

        What is no checkpoint of ours, or there already, is left out.
        """
        self.taken.append(snapshot)
        if snapshot.name in self._there:
            self.left_out[snapshot.name] = "it is in the store already"
            return
        try:
            with ByteBar(snapshot.name) as progress:
                result = self.store.import_(
                    snapshot.path,
                    snapshot.name,
                    self._replace,
                    progress=progress,
                    hints=StoreHints(),
                    external=True,
                    follow_links=self._follow_links,
                    dry_run=self._dry_run,
                )
        except SeveralModelsError as error:
            models = [Path(each) for each in error.models]
            inside = [path.relative_to(snapshot.path) for path in models]
            for path, name in zip(models, names_within(snapshot.name, inside), strict=True):
                self.take(HubSnapshot(path, name))
        except (NameTakenError, CheckpointNotFoundError, UnsupportedError) as error:
            self.left_out[snapshot.name] = str(error)
        except TensorDedupError as error:
            self.failed[snapshot.name] = str(error)
            click.echo(f"{snapshot.name}: {error}", err=True)
        else:
            self.done.append(result)

    def lines(self) -> list[str]:
        """For people."""
        indexed = sum(result.external_bytes for result in self.done)
        lines = [
            f"{result.name}: {counted(result.tensors, 'tensor')}, "
            f"{human(result.external_bytes)} in place"
            for result in self.done
        ]
        lines += [f"{name}: left out: {why}" for name, why in self.left_out.items()]
        total = f"{counted(len(self.done), 'snapshot')}, {human(indexed)}"
        done = (
            "would be indexed in place; nothing was written"
            if self._dry_run
            else "indexed in place"
        )
        return [*lines, f"{total} {done}"]


@click.command(name="export")
@name_argument
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@store_option
@json_option
def export(name: str, directory: Path, store: str | None, as_json: bool) -> None:
    """Write the files of the checkpoint NAME to DIR, which must be empty or not exist.

    Every byte is verified against its digest.
    """
    if str(directory) == "-":
        raise WrongUse("an export is a folder of files: name one; `cat` writes a tensor to stdout")
    with ByteBar("exporting") as progress, pull_suggested(name):
        opened = existing(store)
        name = resolved_name(opened, name)
        paths = opened.export(name, directory, progress=progress)
    document = {"name": name, "files": [str(path) for path in paths]}
    say(document, as_json, f"{name}: {counted(len(paths), 'file')} in {directory}")


@click.command(name="list")
@store_option
@json_option
@click.pass_context
def list_(ctx: click.Context, store: str | None, as_json: bool) -> None:
    """List the checkpoints of the store, and each training run with its number of steps.

    `gives back` is what deleting one frees, once `gc` has run. The exit status is 1 if one of them
    cannot be read, for example an external one whose files were moved.
    """
    nothing: dict[str, object] = {"store": store, "checkpoints": [], "damaged": [], "usage": []}
    opened = existing_or_said(store, as_json, nothing)
    if opened is None:
        return
    found, usage = opened.list(), opened.usage().checkpoints
    both: list[Listed | Usage] = [*usage, *found]
    damaged = {each.name: each for each in both if each.damage is not None}
    if as_json:
        document = {
            "store": str(opened.path),
            "checkpoints": [each.to_dict() for each in found if each.name not in damaged],
            "damaged": [{"name": n, "what": each.damage} for n, each in damaged.items()],
            "usage": [each.to_dict() for each in usage],
        }
        say(document, as_json)
    elif found:
        print_fitted(opened, *_listing(usage))
        say({}, as_json, *damage_lines(list(damaged.values())))
    else:
        say({}, as_json, empty(opened, "no checkpoints"))
    if damaged:
        ctx.exit(1)


def damage_lines(damaged: Sequence[Listed | Usage]) -> list[str]:
    """Return lines that say which checkpoints or runs cannot be read, and why."""
    return [f"{each.name} cannot be read: {each.damage}" for each in damaged]


def _listing(found: Sequence[Usage]) -> tuple[str, list[str], dict[str, list[str]], list[str]]:
    columns: dict[str, list[str]] = {
        "kind": [each.kind for each in found],
        "steps": [str(each.steps) if each.kind == "run" else "-" for each in found],
        "size": [human(each.nbytes) for each in found],
        "gives back": [known(each.reclaimable_bytes) for each in found],
        "imported": [
            datetime.fromtimestamp(each.imported_at, UTC).strftime("%Y-%m-%d %H:%M")
            for each in found
        ],
        "status": [
            "ok" if each.damage is None else "changed" if each.kind == "external" else "damaged"
            for each in found
        ],
    }
    return "name", [each.name for each in found], columns, ["imported", "steps", "kind"]


def known(nbytes: int | None) -> str:
    """Return a size as text, or "-" if it is None, which means not known."""
    return "-" if nbytes is None else human(nbytes)


_DIGITS: Final = 12  # of a digest; `find` takes the beginning of one, too


@click.command(name="show")
@name_argument
@click.option("--digests", is_flag=True, help="Show digests in full.")
@store_option
@json_option
def show(name: str, digests: bool, store: str | None, as_json: bool) -> None:
    """Show the files and tensors of the checkpoint NAME, with the digests that `analyze` shows."""
    opened = existing(store)
    with (
        run_suggested("runs show {}"),
        opened.checkpoint(resolved_name(opened, name)) as checkpoint,
    ):
        if as_json:
            say(_document(checkpoint), as_json)
            return
        out = console()
        say_lines(checkpoint.name)
        if checkpoint.files:
            out.print(_file_table(checkpoint))
        table, left_out = _tensor_table(checkpoint, out, None if digests else _DIGITS)
        out.print(table)
        if left_out:
            say_lines(left_out)
        say_lines(*described((), checkpoint.not_indexed))


def _document(checkpoint: StoredCheckpoint) -> dict[str, object]:
    return {
        "name": checkpoint.name,
        "stored_bytes": sum(stored for _, stored, _ in map(checkpoint.stored, checkpoint)),
        "manifest": checkpoint.manifest,
        "bytes": checkpoint.nbytes,
        "files": [{"path": file.path, "bytes": file.nbytes} for file in checkpoint.files],
        "not_indexed": [each.to_dict() for each in checkpoint.not_indexed],
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "bytes": tensor.nbytes,
                "digest": tensor.digest,
                "alias_of": tensor.alias_of,
                "codec": codec,
                "stored_bytes": stored,
                "base": base,
            }
            for tensor in checkpoint
            for codec, stored, base in [checkpoint.stored(tensor)]
        ],
    }


def _file_table(checkpoint: StoredCheckpoint) -> Table:
    table = listing("file", "size")
    for file in checkpoint.files:
        table.add_row(Dotted(file.path), human(file.nbytes))
    return table


def _tensor_table(
    checkpoint: StoredCheckpoint, out: Console, digits: int | None
) -> tuple[Table, str]:
    tensors = list(checkpoint)
    stored = [checkpoint.stored(tensor) for tensor in tensors]
    columns = {
        "dtype": [printable(tensor.dtype) for tensor in tensors],
        "shape": ["x".join(map(str, tensor.shape)) or "-" for tensor in tensors],
        "size": [human(tensor.nbytes) for tensor in tensors],
        "stored": [human(nbytes) for _, nbytes, _ in stored],
        "codec": [codec for codec, _, _ in stored],
        "digest": [tensor.digest[:digits] for tensor in tensors],
    }
    names = [tensor.name for tensor in tensors]
    return fitted(out, "tensor", names, columns, ["codec", "stored", "digest", "dtype"])


@click.command(name="stats")
@store_option
@json_option
@click.pass_context
def stats(ctx: click.Context, store: str | None, as_json: bool) -> None:
    """Show how large the store is, what it saves, and what `gc` would free.

    The exit status is 1 if files of its bookkeeping are damaged, which the numbers then leave out.
    """
    opened = existing_or_said(store, as_json, Stats.of_nothing().to_dict())
    if opened is None:
        return
    found = opened.stats()
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found.containers.items()))
    unused = (
        f"unused        {human(found.reclaimable_bytes)} that gc takes, "
        f"{human(found.dead_bytes)} in containers that are still needed"
    )
    damaged = []
    if found.damaged_files:  # gc refuses, and what these files refer to was not counted
        unused = "unused        not known"
        damaged = [f"damaged       {counted(found.damaged_files, 'file')}; see `verify`"]
    say(
        found.to_dict(),
        as_json,
        f"checkpoints   {found.checkpoints} with {counted(found.tensors, 'tensor')}",
        f"their size    {human(found.logical_bytes)}",
        f"distinct      {human(found.unique_bytes)} ({100 * found.dedup_ratio:.1f} %)",
        f"on disk       {human(found.disk_bytes)} in containers: {kinds or 'none'}",
        *_encoded(found),
        unused,
        f"trash         {human(found.trash_bytes)}",
        *damaged,
    )
    if found.damaged_files:
        ctx.exit(1)


def _encoded(found: Stats) -> list[str]:
    """A line on what encoding saves, and one for each codec."""
    encoded = {codec: c for codec, c in sorted(found.codecs.items()) if codec != PLAIN}
    if not encoded:
        return []
    nbytes = sum(coded.nbytes for coded in encoded.values())
    stored = sum(coded.stored_bytes for coded in encoded.values())
    return [
        f"encoded       {human(nbytes)} as {human(stored)} ({100 * stored / nbytes:.1f} %)",
        *(
            f"  {codec:<12}{counted(coded.pieces, 'piece')}, {human(coded.nbytes)} as "
            f"{human(coded.stored_bytes)}"
            for codec, coded in encoded.items()
        ),
    ]


@click.command(name="gc")
@grace_option
@dry_run_option
@yes_option
@store_option
@json_option
def gc(grace: float, dry_run: bool, yes: bool, store: str | None, as_json: bool) -> None:
    """Move files that no checkpoint uses to the trash; delete those that were there for --grace."""
    nothing = GcPlan((), (), (), 0, 0, done=not dry_run)
    opened = existing_or_said(store, as_json, nothing.to_dict())
    if opened is None:
        return
    plan = opened.gc(grace, dry_run=True)
    if not dry_run:
        if plan.trash or plan.delete or plan.unfinished:
            ask(f"{'. '.join(gc_lines(plan, grace))}. Do it?", yes)
        plan = opened.gc(grace)
    files = [str(item.path) for item in (*plan.trash, *plan.delete, *plan.unfinished)]
    if console().is_terminal:
        files = [shortened(file) for file in files]
    say(plan.to_dict(), as_json, *(files if dry_run else []), *gc_lines(plan, grace))


def gc_lines(plan: GcPlan, grace: float) -> list[str]:
    """Return lines that say what a garbage collection did, or would do in a dry run.

    `grace` is the time in hours for which the trash is kept.
    """
    trash = f"To the trash: {counted(len(plan.trash), 'file')}, {human(_trashed(plan))}"
    if plan.trash:
        trash += f", which a gc {_later(grace)} deletes" if grace else ", and deleted at once"
    gone = len(plan.delete) + len(plan.unfinished)
    deleted = f"{counted(gone, 'file')}, {human(plan.freed_bytes)}"
    return [
        trash,
        f"{'Deleted' if plan.done else 'To delete'}: {deleted}",
        f"Kept: {human(plan.kept_bytes)}",
    ]


def _trashed(plan: GcPlan) -> int:
    return sum(item.nbytes for item in plan.trash)


def _later(grace: float) -> str:
    return f"{grace:g} hours later" if grace != 1 else "an hour later"


class Freed:
    """What the deletions since this object was made let `gc` free, and nothing else did before."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._before = self._plan()

    def _plan(self) -> GcPlan | StoreError:
        try:
            return self._store.gc(dry_run=True, wait_s=0.0)
        except StoreError as error:
            return error

    def said(self) -> tuple[dict[str, object], str]:
        """Return it as fields for JSON and as a sentence."""
        before, now = self._before, self._plan()
        if not isinstance(before, GcPlan) or not isinstance(now, GcPlan):
            why = now if isinstance(now, StoreError) else before
            nothing: dict[str, object] = {"freed_bytes": None, "reclaimable_bytes": None}
            return nothing, f"how much `gc` can give back is not known: {why}"
        unused = _trashed(now)
        # Less than nothing, where another process has used again what was unused.
        freed = max(0, unused - _trashed(before))
        dead = max(0, now.dead_bytes - before.dead_bytes)
        known: dict[str, object] = {
            "freed_bytes": freed,
            "reclaimable_bytes": unused,
            "grace_hours": DEFAULT_GRACE_HOURS,
            "dead_bytes": now.dead_bytes,
        }
        if freed:
            later = _later(DEFAULT_GRACE_HOURS)
            text = (
                f"`tensor-dedup gc` moves {human(freed)} that nobody uses any more to the trash, "
                f"and frees them when it runs again {later} (`gc --grace 0`: at once)"
            )
        else:
            text = "there is no space to give back: others need the files that it lies in"
        if 100 * dead > freed:  # less is not worth a word
            text += f"; {human(dead)} that nobody uses lie in files that others need"
        if unused > freed:
            text += f"; {human(unused - freed)} more were not used before"
        return known, text


@click.command(name="delete")
@name_argument
@dry_run_option
@yes_option
@store_option
@json_option
def delete(name: str, dry_run: bool, yes: bool, store: str | None, as_json: bool) -> None:
    """Remove the checkpoint NAME. `gc` frees the space that no other checkpoint uses."""
    opened = existing(store)
    name = full_name(opened, name)
    with run_suggested("runs delete {} --all"):
        opened.check_deletable(name)
    if dry_run:
        _say_deletion(opened, name, as_json)
        return
    ask(f"Delete {name} from {opened.path}?", yes)
    freed = Freed(opened)
    opened.delete(name)
    reclaimable, space = freed.said()
    say({"deleted": name, **reclaimable}, as_json, f"{name} is deleted; {space}")


def _say_deletion(store: Store, name: str, as_json: bool) -> None:
    """What deleting a checkpoint would free, as `list` and `du` have it."""
    found = store.usage(name).checkpoints
    nbytes = next((each.reclaimable_bytes for each in found if each.name == name), None)
    frees = "how much that frees is not known"
    if nbytes is not None:
        frees = f"`tensor-dedup gc` could then free {human(nbytes)}"
    document = {"deleted": name, "done": False, "freed_bytes": nbytes}
    say(document, as_json, f"{name} would be deleted; {frees}; nothing was changed")


@click.command(name="verify")
@click.option(
    "--sample",
    type=FiniteRange(0, 100),
    metavar="P",
    help="Read P percent of the tensors, chosen at random.",
)
@click.option("--full", is_flag=True, help="Read every byte.")
@store_option
@json_option
@click.pass_context
def verify(
    ctx: click.Context, sample: float | None, full: bool, store: str | None, as_json: bool
) -> None:
    """Check the store's bookkeeping, and with --sample or --full the tensors themselves.

    Whatever is damaged is named, and never handed to a reader. The exit status is 1 if anything is.
    """
    if full and sample is not None:
        raise WrongUse("--sample and --full exclude each other: give one of them")
    with ByteBar("verifying") as progress:
        share = None if sample is None else sample / 100
        result = existing(store).verify(sample=share, full=full, progress=progress)
    say(result.to_dict(), as_json, *_verify_lines(result))
    if not result.fine:
        ctx.exit(1)


def _verify_lines(result: VerifyResult) -> list[str]:
    said = (f"{each.path}: {each.what.removeprefix(each.path + ': ')}" for each in result.faults)
    lines = list(dict.fromkeys(said))  # what several checkpoints need is a fault for each
    if result.level == "full":  # which is done
        lines = [line.replace("run `tensor-dedup verify --full`, then ", "run ") for line in lines]
    users = sorted({name for fault in result.faults for name in fault.affected})
    if users:
        lines.append(f"affected: {', '.join(users)}")
    checked = f"{counted(result.checkpoints, 'checkpoint')}, {human(result.bytes_checked)} read"
    lines.append(f"{counted(len(result.faults), 'fault')} ({result.level}: {checked})")
    if not result.bytes_checked and result.level != "full":
        lines.append("only bookkeeping was checked: --sample P and --full read the tensors")
    return lines


@click.command(name="repair")
@click.option(
    "--from",
    "paths",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="A checkpoint that may hold what was lost; can be given several times.",
)
@click.argument("more", nargs=-1, metavar="[PATH]...", type=click.Path(path_type=Path))
@store_option
@json_option
@click.pass_context
def repair(
    ctx: click.Context,
    paths: Sequence[Path],
    more: Sequence[Path],
    store: str | None,
    as_json: bool,
) -> None:
    """Restore what `verify` found damaged, from the trash and from checkpoints that hold it.

    Every restored byte is verified against its digest. The exit status is 1 while anything is
    missing.
    """
    opened = Store.open(store, create=False, mend=True)
    with ByteBar("repairing") as progress:
        result = opened.repair([*paths, *more], progress=progress)
    say(
        result.to_dict(),
        as_json,
        _restored(result),
        *(f"missing: {what}" for what in result.missing),
    )
    if not result.whole:
        ctx.exit(1)


def _restored(result: RepairResult) -> str:
    counts = (result.pieces, result.manifests, result.references, result.from_trash)
    if not any(counts):
        return "nothing was restored" if result.missing else "nothing to restore"
    return (
        f"restored: {counted(result.pieces, 'piece')} ({human(result.bytes)}), "
        f"{counted(result.manifests, 'manifest')}, "
        f"{counted(result.references, 'reference')}, "
        f"{counted(result.from_trash, 'container')} from the trash"
    )


@click.command(name="rename")
@name_argument
@click.argument("new_name")
@store_option
@json_option
def rename(name: str, new_name: str, store: str | None, as_json: bool) -> None:
    """Rename the checkpoint NAME, or the training run NAME with all its steps, to NEW_NAME.

    NEW_NAME must not be taken. A training that has the run open saves no further step under the old
    name: its next save fails, and says so.
    """
    opened = existing(store)
    name = full_name(opened, name)
    steps = 0 if name in opened.names() else len(opened.steps(name))
    opened.rename(name, new_name)
    what = f"{name}, a run with {counted(steps, 'step')}," if steps else name
    say({"renamed": name, "name": new_name, "steps": steps}, as_json, f"{what} is now {new_name}")
