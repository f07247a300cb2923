"""An analysis as an HTML page: one file that needs no network and runs no script.

Colours follow the reader's light or dark scheme. Each cell also shows its number, so the page can
be read without colours. The tensors of a layer are in popovers, which can be opened and closed by
keyboard or mouse.
"""

import re
from collections.abc import Iterator, Sequence
from html import escape
from itertools import chain
from pathlib import Path

from tensor_dedup.analyze import Analysis
from tensor_dedup.analyze.picture import Cell, Section, draw, percent, sections
from tensor_dedup.analyze.verdict import advice, headline, left_out
from tensor_dedup.cli import given, visible
from tensor_dedup.cli.page import HEAD
from tensor_dedup.text_table import human

# More columns than this are joined with their neighbours: 80 layers fit a window of 1,280 pixels.
_COLUMNS = 42
# More columns than this are narrow there.
_WIDE_COLUMNS = 26
# A page of more rows of tensors than this is slow to open: fewer of each cell are listed then.
_TENSORS, _MOST, _LEAST = 20_000, 60, 5

_UNIT = re.compile(r"(\d) (?=%|B\b|[KMG]iB\b)")

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1b1f24; --quiet: #57606a;
  --line: #d0d7de; --box: #f6f8fa; --link: #0b5cad;
  --k0: #ffffff; --t0: #57606a; --k1: #fff1c2; --t1: #5c4400; --k2: #c9ecd2; --t2: #0d4a21;
  --k3: #1a7f45; --t3: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --text: #e6edf3; --quiet: #9aa4af;
  --line: #3d444d; --box: #161b22; --link: #79b8ff;
  --k0: #0d1117; --t0: #9aa4af; --k1: #4a3a08; --t1: #ffe39a; --k2: #12492a; --t2: #b6f0c9;
  --k3: #2ea25c; --t3: #04130a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 110rem; background: var(--page);
  color: var(--text); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: clamp(1.3rem, 4vw, 2rem); line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; max-width: 46rem; }
.quiet, figcaption { color: var(--quiet); }
.scroll { overflow-x: auto; margin: 1.25rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--quiet); padding-bottom: .5rem; }
th { font-weight: 600; text-align: left; }
.sizes th, .sizes td { padding: .2rem .75rem .2rem 0; vertical-align: top; }
#layers > thead th { font-size: .8rem; color: var(--quiet); padding: 0 .6rem .2rem 0;
  vertical-align: bottom; white-space: nowrap; }
#layers > thead th.layer { text-align: center; padding: 0 0 .2rem; font-weight: 400; }
#layers > thead th.group { padding: 0 .5rem .2rem 0; }
#layers > tbody > tr > * { border-top: 1px solid var(--line); padding: .4rem .9rem .4rem 0;
  vertical-align: middle; }
#layers > tbody > tr > td.cell { padding: .4rem 1px; }
#layers > thead th.last, #layers > tbody > tr > td.last { padding-right: .75rem; }
#layers > tbody th { min-width: 8rem; max-width: 20rem; overflow-wrap: break-word; }
#layers > tbody > tr.why > td { border-top: 0; padding-top: 0; font-size: .875rem;
  color: var(--quiet); }
#layers.narrow > tbody th { min-width: 6.5rem; max-width: 9rem; }
#layers.narrow > tbody > tr > * { padding-right: .5rem; }
#layers.narrow > tbody > tr > td.cell { padding: .4rem .5px; }
#layers.narrow > thead th.group { font-size: .65rem; padding-right: .25rem; }
#layers.narrow > thead th.layer { font-size: .65rem; white-space: normal; line-height: 1.1; }
#layers.narrow > thead th.last, #layers.narrow > tbody > tr > td.last { padding-right: .5rem; }
#layers.narrow .cell button { font-size: .625rem; min-width: 1.25rem; padding: 0; }
#layers.narrow .of { display: block; }
.number { text-align: right; white-space: nowrap; }
.cell button { font: inherit; font-size: .75rem; line-height: 1; min-width: 2.1rem; height: 2rem;
  padding: 0 .2rem; border: 1px solid var(--line); border-radius: .25rem; cursor: pointer; }
.k0 { background: var(--k0); color: var(--t0); } .k1 { background: var(--k1); color: var(--t1); }
.k2 { background: var(--k2); color: var(--t2); } .k3 { background: var(--k3); color: var(--t3); }
button:focus-visible, .scroll:focus-visible { outline: 3px solid var(--link);
  outline-offset: 1px; }
ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .35rem 1.25rem; padding: 0; }
.legend span { display: inline-block; min-width: 2.4rem; text-align: center; font-size: .75rem;
  line-height: 1.5rem; border: 1px solid var(--line); border-radius: .25rem; margin-right: .4rem; }
pre { background: var(--box); border: 1px solid var(--line); border-radius: .4rem;
  padding: .6rem .8rem; margin: .25rem 0 1rem; max-width: 70rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
pre span { display: inline-block; max-width: 100%; }
@media (max-width: 90rem) { .of { display: block; } }
@media (max-width: 40rem) { #layers { font-size: .85rem; }
  #layers > tbody > tr > * { padding-right: .5rem; } #layers > tbody th { min-width: 7rem; } }
[popover] { color: var(--text); background: var(--page); border: 1px solid var(--quiet);
  border-radius: .5rem; padding: 1rem; max-width: min(46rem, 94vw); max-height: 80vh;
  overflow: auto; }
[popover] h2 { margin: 0 0 .25rem; font-size: 1rem; overflow-wrap: anywhere; }
[popover] table { font-size: .875rem; margin: .5rem 0; }
[popover] td:first-child { overflow-wrap: anywhere; }
.close { font: inherit; color: var(--text); background: var(--box); cursor: pointer;
  border: 1px solid var(--quiet); border-radius: .25rem; padding: .3rem .9rem; }
"""
_BODY = """\
<p class="quiet">{lead}</p>
<div class="scroll" role="region" aria-label="What each checkpoint adds" tabindex="0">
{table}
</div>
<ul class="legend" aria-label="Meaning of the cells">
<li><span class="k3">100</span>shared</li><li><span class="k2">50</span>at least half</li>
<li><span class="k1">1</span>less than half</li><li><span class="k0">0</span>private</li>
</ul>
<h2>What to do</h2>
{advice}
</main>
{popovers}
</body>
</html>
"""


def write_page(path: Path, analysis: Analysis, labels: Sequence[str]) -> None:
    """Write the page about `analysis` to `path`; `labels` are the names of the checkpoints on it.

    Raises:
        OSError: The page cannot be written.
    """
    path.write_text(page(analysis, labels), encoding="utf-8")


def page(analysis: Analysis, labels: Sequence[str]) -> str:
    """Return the page about `analysis` as HTML; `labels` are the names of the checkpoints on it."""
    columns = sections(analysis.checkpoints)
    count = sum(len(section.columns) for section in columns)
    columns = [section.grouped(-(-count // _COLUMNS)) for section in columns]
    rows = [list(chain(*row)) for row in draw(analysis.checkpoints, columns).rows]
    names = list(chain(*map(_column_names, columns)))
    lead = (
        "Loaded in this order, each checkpoint adds only what none before it has. A cell shows "
        "the percentage of a layer that is shared with earlier checkpoints (in the first row, "
        "with later ones). Open a cell to list its tensors."
    )
    lead = " ".join(filter(None, (lead, left_out(analysis))))
    return (HEAD + _BODY).format(
        style=_STYLE,
        headline=_text(headline(analysis)),
        lead=_text(lead),
        table=_table(analysis, labels, columns, rows, names),
        advice="\n".join(_advice(analysis)),
        popovers="\n".join(_popovers(labels, rows, names)),
    )


def _text(text: str) -> str:
    """Text of the page, in which a number and its unit stay on one line."""
    return _UNIT.sub("\\1&nbsp;", escape(visible(text)))


def _column_names(section: Section) -> Iterator[str]:
    """What is read out for each column."""
    for column in section.columns:
        numbered = all(name.rpartition(".")[2].isdecimal() for name in column)
        yield f"{column[0]} to {column[-1]}" if numbered and len(column) > 1 else ", ".join(column)


def _table(
    analysis: Analysis,
    labels: Sequence[str],
    columns: Sequence[Section],
    rows: Sequence[Sequence[Cell]],
    names: Sequence[str],
) -> str:
    ends = _ends(columns)
    groups = "".join(
        f'<th scope="colgroup" class="group" colspan="{len(section.columns)}">'
        f"{_text(section.title)}</th>"
        for section in columns
    )
    layers = "".join(
        f'<th scope="col" class="layer{" last" * (at in ends)}" aria-label="{_text(name)}" '
        f'title="{_text(name)}">{_short(name)}</th>'
        for at, name in enumerate(names)
    )
    spans = "".join(f'<colgroup span="{len(section.columns)}"></colgroup>' for section in columns)
    body = "\n".join(_row(analysis, labels, n, rows[n], names, ends) for n in range(len(rows)))
    narrow = ' class="narrow"' * (len(names) > _WIDE_COLUMNS)
    return (
        f'<table id="layers"{narrow}>\n'
        "<caption>In the order of loading</caption>\n"
        f'<colgroup span="3"></colgroup>{spans}\n'
        '<thead><tr><th scope="col" rowspan="2">checkpoint</th>'
        '<th scope="col" rowspan="2" class="number">adds</th>'
        f'<th scope="col" rowspan="2" class="number">shared</th>{groups}</tr>\n'
        f"<tr>{layers}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody></table>"
    )


def _ends(columns: Sequence[Section]) -> set[int]:
    """The last column of each section."""
    found, at = set(), -1
    for section in columns:
        at += len(section.columns)
        found.add(at)
    return found


def _short(name: str) -> str:
    """The number of a layer, for the eye; the whole name is there for the ear and on hovering."""
    first, _, last = name.partition(" to ")
    numbers = [each.rpartition(".")[2] for each in (first, last) if each]
    return "-<wbr>".join(numbers) if all(map(str.isdecimal, numbers)) else "&nbsp;"


def _row(
    analysis: Analysis,
    labels: Sequence[str],
    number: int,
    cells: Sequence[Cell],
    names: Sequence[str],
    ends: set[int],
) -> str:
    checkpoint, added = analysis.checkpoints[number], analysis.contributions[number]
    size = human(checkpoint.nbytes)
    adds = f'+{human(added.adds_bytes)} <span class="of">of {size}</span>'
    if not number:
        adds = human(added.adds_bytes)
    shared = f"{percent(checkpoint.nbytes - added.adds_bytes, checkpoint.nbytes)} %"
    why = "; ".join(analysis.reasons[number].changes) if number else "loaded first"
    buttons = [
        _button(labels[number], number, at, cell, name)
        for at, (cell, name) in enumerate(zip(cells, names, strict=True))
    ]
    drawn = "".join(
        f'<td class="cell{" last" * (at in ends)}">{button}</td>'
        for at, button in enumerate(buttons)
    )
    return (
        f'<tr><th scope="row" rowspan="2" title="{escape(visible(checkpoint.path))}">'
        f"{_breakable(labels[number])}</th>"
        f'<td class="number">{adds}</td><td class="number">{shared if number else "-"}</td>'
        f'{drawn}</tr>\n<tr class="why"><td colspan="{2 + len(cells)}">{_text(why)}</td></tr>'
    )


def _breakable(name: str) -> str:
    """A name that may be broken after its separators, and nowhere else."""
    shown = _text(name)
    for mark in "/._-":
        shown = shown.replace(mark, f"{mark}<wbr>")
    return shown


def _button(label: str, row: int, at: int, cell: Cell, name: str) -> str:
    if not cell.tensors:
        return f'<span aria-label="{_text(name)} is not in {_text(label)}" role="img"></span>'
    said = f"{label}, {name}: {cell.percent} % of {human(cell.nbytes)} shared"
    return (
        f'<button type="button" class="k{_level(cell)}" popovertarget="p{row}-{at}" '
        f'aria-label="{_text(said)}" title="{_text(said)}">{cell.percent}</button>'
    )


def _level(cell: Cell) -> int:
    if all(cell.shared):
        return 3
    return 0 if not cell.percent else 1 if cell.percent < 50 else 2


def _advice(analysis: Analysis) -> Iterator[str]:
    for each in advice(analysis, given("store")):
        yield f"<p>{_text(each.sentence)}</p>"
        for command in each.commands:
            words = " ".join(f"<span>{_text(word)}</span>" for word in command.split(" "))
            yield f"<pre><code>{words}</code></pre>"


def _popovers(
    labels: Sequence[str], rows: Sequence[Sequence[Cell]], names: Sequence[str]
) -> Iterator[str]:
    cells = sum(map(len, rows))
    most = min(_MOST, max(_LEAST, _TENSORS // max(1, cells)))
    for row, drawn in enumerate(rows):
        for at, cell in enumerate(drawn):
            if cell.tensors:
                yield _popover(f"p{row}-{at}", f"{labels[row]}: {names[at]}", cell, most)


def _popover(identity: str, title: str, cell: Cell, most: int) -> str:
    both = sorted(zip(cell.tensors, cell.shared, strict=True), key=lambda each: -each[0].nbytes)
    rows = "".join(
        f"<tr><td>{_breakable(tensor.name)}</td><td>{_text(tensor.fingerprint.dtype)}</td>"
        f"<td>{'x'.join(map(str, tensor.fingerprint.shape)) or '-'}</td>"
        f'<td class="number">{human(tensor.nbytes)}</td>'
        f"<td>{'shared' if shared else 'its own'}</td></tr>"
        for tensor, shared in both[:most]
    )
    more = f"<p>and {len(both) - most} smaller ones</p>" if len(both) > most else ""
    return (
        f'<div popover id="{identity}" role="dialog" aria-labelledby="{identity}-t">'
        f'<h2 id="{identity}-t">{_text(title)}</h2>'
        f"<p>{cell.percent} % of {human(cell.nbytes)} shared</p>"
        '<table class="sizes"><thead><tr><th scope="col">tensor</th><th scope="col">dtype</th>'
        '<th scope="col">shape</th><th scope="col" class="number">size</th>'
        f'<th scope="col">here</th></tr></thead><tbody>{rows}</tbody></table>{more}'
        f'<button type="button" class="close" popovertarget="{identity}" '
        'popovertargetaction="hide">Close</button></div>'
    )
