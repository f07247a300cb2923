"""What the checkpoints of whole experiments take: each method saves all of them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import checkpoint_models as models
from bench.checkpoint_methods import (
    DVC_FILES,
    OURS,
    SKLEARN,
    TENSORCAS,
    TORCH,
    XGBOOST,
    Chunks,
    Files,
    Kind,
    Method,
    Ours,
    Size,
    WholeFiles,
    emptied,
)
from bench.results import Figures
from bench.turns import say

_MB: Final = 1e6
HEAD: Final = (
    "| checkpoints | count | plain files | safetensors | DVC (whole files) | TensorCAS's method |"
    " tensor-dedup | ours / TensorCAS | aim | the article |\n"
    f"{'| --- ' * 10}|"
)


@dataclass(frozen=True)
class Experiment:
    """Models one after the other, and what the article (or the readme) has for them."""

    name: str
    kind: Kind
    steps: Callable[[bool], Iterator[Any]]
    article: str


def _one(quick: bool) -> Iterator[Any]:
    return models.Head(models.pretrained(), 0.01, 0).epochs(3 if quick else 20)


def _sweep(runs: int, *, rates: bool) -> Callable[[bool], Iterator[Any]]:
    def steps(quick: bool) -> Iterator[Any]:
        base = models.pretrained()
        for run in range(runs):
            rate = 0.001 * 2**run if rates else 0.01
            head = models.Head(deepcopy(base), rate, 0 if rates else run)
            yield from head.epochs(1 if quick else 10)

    return steps


def _snapshots(quick: bool) -> Iterator[Any]:
    """Frozen weights, but statistics that move: the head trained in train mode."""
    model = models.pretrained()
    import torch

    for seed in (1, 2):
        models.train(model, [*model.fc.parameters()], torch.optim.SGD, 0.01, 3, seed)
        yield model


def _trees(quick: bool) -> Iterator[Any]:
    forest = models.Forest(5)
    for step in range(4 if quick else 20):
        yield forest.grow(5) if step else forest.model


def _rounds(quick: bool) -> Iterator[Any]:
    rounds = models.Rounds(5)
    for step in range(4 if quick else 20):
        yield rounds.grow(5) if step else rounds.model


def _half(quick: bool) -> Iterator[Any]:
    model, head = models.half_frozen()
    for _ in models.shaken(head, 4 if quick else 20):
        yield model


EXPERIMENTS: Final = (
    Experiment("ResNet-18, frozen", TORCH, _one, "854.5, 790.7, 39.5"),
    Experiment("4 seeds x 10 epochs", TORCH, _sweep(4, rates=False), "1,700, 1,700, 39.7"),
    Experiment("8 rates x 10 epochs", TORCH, _sweep(8, rates=True), "3,300, 3,300, 39.7"),
    Experiment("two snapshots in train mode", TORCH, _snapshots, "85.5, 85.5, 39.6"),
    Experiment("scikit-learn, 5 trees a step", SKLEARN, _trees, "-, 1.4, 0.080"),
    Experiment("XGBoost, 5 rounds a step", XGBOOST, _rounds, "-, 0.721, 0.150"),
    Experiment("perceptron, half of it frozen", TORCH, _half, "-, 10.6, 5.4"),
)


def storage(work: Path, figures: Figures, *, quick: bool, stated: bool) -> list[str]:
    """The table, whose bytes are entered in `figures`, and what takes those of the ensembles.

    `stated`: only the experiment that docs/results.md has.
    """
    lines, parts = [HEAD], []
    for experiment in EXPERIMENTS[: 1 if stated else None]:
        say(f"storage: {experiment.name}")
        count, sizes, folders = measure(experiment, emptied(work / "storage"), quick)
        lines.append(_row(experiment, count, sizes))
        plain, ours = sizes[experiment.kind.plain], sizes[OURS]
        figures[f"bytes: {experiment.name}"] = [plain.apparent], [ours.apparent]
        if experiment.kind in (SKLEARN, XGBOOST):
            parts += [_parts_line(experiment, name, held) for name, held in folders.items()]
    return [*lines, "", *parts]


def measure(
    experiment: Experiment, folder: Path, quick: bool
) -> tuple[int, dict[str, Size], dict[str, dict[str, int]]]:
    """Save every model with every method; how many there were, and what each method needs.

    Last, for those that share, the bytes of the files by what stands first in their path.
    """
    kind = experiment.kind
    methods: list[Method] = [Ours(folder / "ours"), Chunks(folder / "chunks", kind)]
    methods += [Files(name, folder / name, kind) for name in kind.files]
    methods += [WholeFiles(folder / "dvc", kind)]
    count = 0
    with ExitStack() as open_ones:
        for method in methods:
            open_ones.enter_context(closing(method))
        for count, model in enumerate(experiment.steps(quick), 1):
            for method in methods:
                method.save(model, count)
    sizes = {method.name: method.size() for method in methods}
    folders = {method.name: _by_folder(method.folder) for method in methods[:2]}
    emptied(folder)
    return count, sizes, folders


def _by_folder(root: Path) -> dict[str, int]:
    found = Counter[str]()
    for path in root.rglob("*"):
        if path.is_file():
            found[path.relative_to(root).parts[0]] += path.stat().st_size
    return dict(found.most_common())


def _parts_line(experiment: Experiment, name: str, folders: Mapping[str, int]) -> str:
    parts = ", ".join(
        f"{folder} {nbytes / 1000:.1f}" for folder, nbytes in folders.items() if nbytes
    )
    return f"- *{experiment.name}*, {name}, kB: {parts}."


def _row(experiment: Experiment, count: int, sizes: Mapping[str, Size]) -> str:
    ratio = sizes[OURS].apparent / sizes[TENSORCAS].apparent
    plain = experiment.kind.plain
    cells = (
        experiment.name,
        str(count),
        f"{_both(sizes[plain])} ({plain})",
        _both(sizes["safetensors"]) if "safetensors" in sizes else "-",
        _both(sizes[DVC_FILES]),
        _both(sizes[TENSORCAS]),
        _both(sizes[OURS]),
        f"{ratio:.3f}",
        f"≤ 1: {'met' if ratio <= 1 else 'missed'}",
        experiment.article,
    )
    return f"| {' | '.join(cells)} |"


def _both(size: Size) -> str:
    """Megabytes: of the files, and allocated for them."""
    digits = 1 if size.apparent > 50 * _MB else 3
    return f"{size.apparent / _MB:,.{digits}f} / {size.allocated / _MB:,.{digits}f}"
