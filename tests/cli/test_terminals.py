"""Every verb at terminals of several widths and piped, where the locale knows ASCII only."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import click
import numpy
import pytest

from manager_runs import managers
from models import gallery
from processes import terminal
from store_runs.stores import KIB, memory_folder, noise, safetensors, u8, write
from tensor_dedup import Store
from tensor_dedup.cli import VERBS
from tensor_dedup.cli.runs import command as runs
from tensor_dedup.cli.tables import shortened
from tensor_dedup.training import CheckpointStore

WIDTHS = [60, 80, 140]
PIPED = [1000, 1001]
REVISION = "0e9e39f249a16976918f6564b8830bc894c89659"
LONG = f"meta-llama/Llama-3.2-1B-Instruct-sql-lora-merged@{REVISION}"
RUN = "llama-finetune-with-a-long-name/run"
# With {} there is something new to do at each width.
COMMANDS = [
    "analyze Qwen2-tiny Qwen2-tiny-Instruct gewächs",
    "analyze Qwen2-tiny store://tuned gewächs --details",
    "analyze Qwen2-tiny gewächs --html page.html",
    "diff base tuned",
    "diff base gewächs --stat",
    "import Qwen2-tiny-de-extended-vocab --name new-{}",
    "import gewächs --external --name outside-{}",
    "import --hub-cache",
    "list",
    f"show {LONG}",
    "show base --digests",
    "du",
    "du gewächs",
    f"du {LONG}",
    "stats",
    "find {digest}",
    "export base out-{}",
    "rename new-{} other-{}",
    "substitute Qwen2-tiny Qwen2-tiny-Instruct --layers 0-2 --output mixed-{}",
    "plan --models models.toml --nodes 3 --memory 1GiB",
    "push base {url}",
    f"push {RUN} {{url}}",
    "pull {url} base --store pulled-{}",
    "remote list {url}",
    "remote show {url} base",
    "remote du {url}",
    "remote verify {url}",
    "remote gc {url} --dry-run",
    "runs list",
    f"runs show {RUN}",
    f"runs show {{url}} --run {RUN}",
    f"runs stats {RUN} --tensors",
    f"runs best {RUN} validation/loss",
    f"runs diff {RUN}@0 {RUN}@3000",
    f"runs compare {RUN} b",
    f"runs plot {RUN} b",
    "runs keep b 2000",
    f"runs prune {RUN} --keep-last 2 --dry-run",
    "runs drain b drained",
    "runs delete b --step {} --yes",
    "gc --dry-run",
    "delete other-{} --yes",
    "gc --yes",
    "verify",
    "verify --full",
    "repair",
    "doctor --quick",
    "help import",
    "status",
    "pin path/to/some/model-{} --ahead",
    "unpin path/to/some/model-{}",
]
FAILING = [
    "show nope",
    "cat base model.layers.1.nope",
    "export base Qwen2-tiny",
    "rename base tuned",
    "evict nope",
    "pin nope",
    "serve",  # a second one
    "runs best b nope",
    "analyze nowhere",
    "stop --socket nowhere/m.sock",
    "top --every 0",
    "follow nowhere --once",
]
FLEET = """
room = "10MiB"
[models.base]
path = "Qwen2-tiny"
replicas = 2
[models.customer-17-of-the-southern-region]
path = "Qwen2-tiny-Instruct"
"""
BORDER = re.compile(r"[-+|=]+")
SIZE = re.compile(r"[\d.]+ (?:B|[KMG]iB)\b")
NUMBER = re.compile(r"[\d.,]+(?: (?:B|[KMG]iB|s))?|-")
UNITS = {"B", "KiB", "MiB", "GiB"}
PICTURE = re.compile(r"[#+.]+")
CHANGES = re.compile(r"\{\}|import|push|gc|repair|delete")
World = tuple[terminal.Terminal, Store]
ENDS = "./_@+=:-"  # what a word that has no room may be broken after


@contextmanager
def world(environment: Mapping[str, str]) -> Iterator[tuple[terminal.Terminal, Store]]:
    """Commands in a folder with a store, checkpoints outside of it, and a manager with a client."""
    with memory_folder() as folder:
        folder.chmod(0o700)
        gallery.make(folder)
        (folder / "Qwen2-tiny-sql-lora-merged").rename(folder / "gewächs")
        (folder / "models.toml").write_text(FLEET)
        store = Store.open(folder / "store")
        names = {"base": "Qwen2-tiny", "tuned": "Qwen2-tiny-Instruct", LONG: "Qwen2-tiny-full-ft"}
        for name, source in names.items():
            store.import_(folder / source, name)
        store.import_(folder / "gewächs", "accents", external=True)
        snapshot = folder / "hub" / "models--org--name" / "snapshots" / REVISION
        write(snapshot, {"model.safetensors": safetensors(u8(a=noise(1, 90 * KIB)))})
        for name in (RUN, "b"):
            run = CheckpointStore(store, name)
            for step in (0, *WIDTHS, *PIPED, 2000, 3000):
                model = {"w": numpy.arange(2e4) * (step // 2000), "head.bias": numpy.ones(9000)}
                run.save(model, step=step, metrics={"validation/loss": 9 / (step + 1), "top_5": 1})
        own = {
            "TENSOR_DEDUP_STORE": str(folder / "store"),
            "TENSOR_DEDUP_SOCKET": str(folder / "m.sock"),
            "HF_HUB_CACHE": str(folder / "hub"),
        }
        with (
            managers.running(folder) as manager,
            manager.client("an engine") as client,
            terminal.terminal(folder, {**own, **environment}) as commands,
        ):
            kept = managers.build(client, "layer", managers.pattern(1, 1 << 20))
            yield commands, store
            del kept


def words(text: str) -> list[str]:
    """The words of a text, each number as a 0, without the borders of tables.

    A rate may have another unit in the next run.
    """
    return [
        re.sub(r"[KMGT]iB/s", "MiB/s", re.sub(r"\d+", "0", word))
        for word in text.split()
        if not BORDER.fullmatch(word) and word != "\\"
    ]


def unbroken(word: str, known: set[str]) -> bool:
    """Is it a known word, or a piece of one that begins and ends where words may be broken?"""
    if word in known or word in UNITS or PICTURE.fullmatch(word):
        return True
    return any(
        (at == 0 or whole[at - 1] in ENDS) and (at + len(word) == len(whole) or word[-1] in ENDS)
        for whole in known
        for at in [match.start() for match in re.finditer(re.escape(word), whole)]
    )


def columns(lines: Sequence[str]) -> Iterator[list[str]]:
    """The cells of each column of each table, without its heading."""
    tables: list[list[list[str]]] = [[]]
    for line in lines:
        if line.startswith("| "):
            tables[-1].append(line.strip("|").split("|"))
        elif tables[-1] and not line.startswith("|-"):
            tables.append([])
    for _, *rows in filter(None, tables):
        yield from map(list, zip(*rows, strict=True))


def assert_fits(shown: terminal.Shown, piped: Sequence[terminal.Shown], width: int) -> None:
    lines = shown.lines + shown.err.splitlines()
    assert max(map(len, lines), default=0) <= width, shown.out + shown.err
    whole = " ".join(each.out + each.err for each in piped)
    known = {*words(whole), *words(shortened(whole))}
    text = re.sub(r"No room for: [^;]*; a pipe\s+and\s+--json\s+have\s+all\.", "", shown.out)
    # Whether digests are remembered by now is a matter of seconds.
    text = re.sub(r"Hashed:\s+nothing,\s+all\s+digests\s+were\s+known\.", "", text)
    bad = [word for word in words(text) if not NUMBER.fullmatch(word) and not unbroken(word, known)]
    assert bad == [], shown.out
    for cells in columns(shown.lines):
        filled = [cell for cell in cells if cell.strip()]
        if all(NUMBER.fullmatch(cell.strip()) for cell in filled):
            assert all(cell[-2:-1] != " " for cell in filled), shown.out
    blocks = shown.out.split("\n\n") if "unchanged  " in shown.out else []
    for block in blocks:
        sizes = [size for line in block.splitlines() if (size := SIZE.search(line))]
        assert len({size.end() for size in sizes}) == 1, block


def tensor_digest(store: Store) -> str:
    """The beginning of the digest of a tensor that several checkpoints have."""
    with store.checkpoint("base") as checkpoint:
        return checkpoint["model.layers.0.mlp.up_proj.weight"].digest[:20]


def assert_no_width_breaks_a_word(made: World, widths: Sequence[int]) -> None:
    commands, store = made
    names = {"digest": tensor_digest(store), "url": f"file://{store.path.parent}/remote"}
    for command in [*COMMANDS, *FAILING]:

        def run(number: int, width: int | None = None, command: str = command) -> terminal.Shown:
            numbers = [number] * command.count("{}")
            return commands.run(*command.format(*numbers, **names).split(), width=width)

        # What changes something may say another thing the first time, and the last time.
        first = run(PIPED[0])
        fitted = {width: run(width, width) for width in widths}
        piped = [first, run(PIPED[1])] if CHANGES.search(command) else [first]
        for each in piped:
            assert (each.status == 0) == (command in COMMANDS), (command, each)
            assert "\x1b" not in each.out
        for width, shown in fitted.items():
            assert (shown.status, shown.coloured) == (first.status, False), (command, shown)
            assert_fits(shown, piped, width)


@pytest.fixture(scope="module")
def strict() -> Iterator[World]:
    """Of several tests: none needs the store as it was."""
    with world(terminal.STRICT) as made:
        yield made


def test_no_verb_breaks_a_word_at_sixty_columns(strict: World) -> None:
    assert_no_width_breaks_a_word(strict, WIDTHS[:1])


# Python writes UTF-8 in the locale C unless it is told not to.
@pytest.mark.long
@pytest.mark.parametrize("environment", [terminal.STRICT, {}], ids=["strict", "as Python has it"])
def test_no_width_breaks_a_word(environment: Mapping[str, str]) -> None:
    with world(environment) as made:
        assert_no_width_breaks_a_word(made, WIDTHS)


def test_a_live_view_fits(strict: World) -> None:
    commands, _ = strict
    piped = commands.run("status")
    for width in WIDTHS:
        assert_fits(commands.run("top", width=width, keys="q"), [piped], width)


def test_every_verb_is_tried() -> None:
    # `cat` sends bytes, and `completion` a script; a question is asked by tests of prompts.
    tried = {command.split()[0] for command in [*COMMANDS, *FAILING]}
    assert tried | {"top", "cat", "completion"} == VERBS.keys()
    of_runs = {command.split()[1] for command in COMMANDS if command.startswith("runs ")}
    assert of_runs == set(runs.list_commands(click.Context(runs)))


def test_what_a_broken_word_is() -> None:
    known = {"model.layers.0", "gives", "0e9e39f249a1"}
    assert all(unbroken(word, known) for word in ("model.", "layers.0", "gives", "#.+"))
    assert not any(unbroken(word, known) for word in ("mod", "yers.0", "giv", "0e9e", "other"))
