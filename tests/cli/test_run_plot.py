"""The page of `runs plot`: what is drawn is what is so, and nothing is cut."""

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processes import chromium
from tensor_dedup.cli.run_plot import PlottedRun, labels, page, ticks
from tensor_dedup.store.steps.runs import Step
from tensor_dedup.store.upkeep.run_sizes import Growth

MIB = 1 << 20
_VOID = {"meta", "line", "rect", "circle", "polyline", "polygon"}


def a_run(
    name: str, values: list[float], *, metric: str = "loss", kept: int | None = None
) -> PlottedRun:
    steps = [
        Step(name, n * 10, f"{name}@{n * 10}", "", "numpy", {metric: value}, 4 * MIB, n == kept, 0)
        for n, value in enumerate(values)
    ]
    growth = [
        Growth(
            *(step.step, 2, 2 if not n else 1, 4 * MIB),
            *(4 * MIB if not n else 3 * MIB, 4 * MIB if not n else MIB, 1.0),
        )
        for n, step in enumerate(steps)
    ]
    return PlottedRun(name, steps, growth, steps[-1].step)


class Nesting(HTMLParser):
    """Fails unless each tag is closed in its turn; gathers elements and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.append((self.open[-1], data))


@pytest.mark.parametrize(
    "values",
    [
        *([3.068e6, 3.069e6], [1e-9, 2e-9], [-5.0, 7.0], [2.0], [0.0, 0.0], [1e300, 1e301]),
        *([0.0, 5e-324], [-9e303, 9e303], [1.0, 1e308, -1e308, 2.0]),
    ],
)
def test_no_label_is_cut_at_the_left(values: list[float]) -> None:
    found = page([a_run("run", values)])
    axes = re.findall(r'<text class="y" x="([\d.]+)" y="[\d.]+" text-anchor="end">([^<]*)<', found)
    assert len(axes) > 6
    assert all(float(x) > 20 + 0.6 * 12 * len(label) for x, label in axes)
    assert "inf" not in found
    assert "nan" not in found


@given(st.floats(-1e12, 1e12), st.floats(1e-6, 1e12))
def test_ticks_are_round_and_reach_beyond_all_values(low: float, width: float) -> None:
    high = low + width
    if high <= low or width < abs(low) * 1e-9:
        return
    found = ticks(low, high)
    assert 2 <= len(found) <= 12
    size = found[1] - found[0]
    assert found[0] <= low + size * 1e-6
    assert found[-1] >= high - size * 1e-6
    assert all(b > a for a, b in pairwise(found))
    assert len({*labels(found)}) == len(found)


def test_bars_stack_to_the_size_of_a_step() -> None:
    found = Nesting(page([a_run("run", [1.0, 2.0, 0.5])]))
    bars = [given for tag, given in found.found if tag == "rect" and given.get("class")]
    kinds = [bar["class"] for bar in bars]
    assert kinds == ["new"] + ["new", "encoded", "shared"] * 2
    heights = [float(bar["height"] or 0) for bar in bars]
    first, rest = heights[0], heights[1:4]
    assert sum(rest) == pytest.approx(first, abs=0.05)  # both are steps of 4 MiB
    assert rest == pytest.approx([first / 4, first / 2, first / 4], abs=0.05)
    bottoms = [float(bar["y"] or 0) + float(bar["height"] or 0) for bar in bars]
    assert bottoms[1] == pytest.approx(bottoms[0], abs=0.05)
    assert bottoms[2] == pytest.approx(float(bars[1]["y"] or 0), abs=0.05)
    told = [text for tag, text in found.texts if tag == "title"]
    assert "step 10: 1.00 MiB new on disk, 2.00 MiB new, saved by encoding, 1.00 MiB shared" in (
        " ".join(told)
    )
    assert "3 x 4.0 MiB = 12.0 MiB kept in 6.0 MiB, 50 % saved" in " ".join(
        text for _, text in found.texts
    )
    named = [given["aria-label"] for tag, given in found.found if tag == "svg"]
    assert len(named) == 3
    assert all(named)
    assert [text for tag, text in found.texts if tag == "text"].count("MiB") == 2


def test_the_best_the_latest_and_kept_steps_are_marked() -> None:
    found = Nesting(page([a_run("run", [3.0, 1.0, 2.0], kept=0)]))
    told = [text for tag, text in found.texts if tag == "title"]
    assert "run@0: 3, kept" in told
    assert "run@10: 1, best" in told
    assert "run@20: 2, latest" in told
    [*_, metric] = page([a_run("run", [3.0, 1.0], metric="speed")]).split("<h2>Metrics")
    assert "<polygon" not in metric  # nothing says which speed is best


def test_several_runs_share_the_charts_of_metrics_and_names_are_escaped() -> None:
    runs = [a_run("a", [1.0, 2.0]), a_run("b", [3.0, 4.0]), a_run("c", [1.0], metric="<b>&acc")]
    text = page(runs)
    found = Nesting(text)
    assert "<b>" not in text
    headings = [held for tag, held in found.texts if tag == "h3"]
    assert headings.count("loss") == headings.count("<b>&acc") == 1
    assert [held for tag, held in found.texts if tag == "h2"] == [
        *("a", "b", "c", "Metrics", "Steps of a", "Steps of b", "Steps of c")
    ]


def test_what_is_not_finite_is_left_out_of_charts() -> None:
    text = page([a_run("run", [float("nan"), 1.0, float("inf"), 2.0])])
    assert Nesting(text).open == []
    assert not re.search(r'(points|x|y|cx|cy)="[^"]*(nan|inf)', text)
    assert "no finite values" in page([a_run("run", [float("nan")])])


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1600])
def test_a_browser_shows_it_and_axe_finds_nothing_serious(
    tmp_path: Path, width: int, dark: bool
) -> None:
    target = tmp_path / "page.html"
    runs = [a_run("a", [3.0, 1.0, 2.0], kept=0), a_run("b", [2.0, 1.5])]
    target.write_text(page(runs), encoding="utf-8")
    with chromium.browser() as shown:
        shown.show(target.as_uri(), width, dark=dark)
        assert shown.ask("getComputedStyle(document.body).backgroundColor") == (
            "rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)"
        )
        assert shown.ask("document.documentElement.scrollWidth") <= width
        assert shown.requested == [target.as_uri()]
        assert shown.said == []
        assert shown.accessibility() == []
