"""A placement plan as an HTML page: one file that needs no network and runs no script."""

from html import escape
from pathlib import Path
from typing import Final

from tensor_dedup.cli import visible
from tensor_dedup.cli.page import HEAD
from tensor_dedup.planning.placement import FleetPlan
from tensor_dedup.planning.placement.plan import PlannedNode
from tensor_dedup.text_table import human

_TONES: Final = 6  # colours; neighbours differ, and every block has its name
_NARROW: Final = 4.0  # percent: a block of less bears no name

_STYLE: Final = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1f24; --quiet: #57606a; --line: #d0d7de;
  --free: #f6f8fa; --c0: #cfe3fb; --c1: #c9ecd2; --c2: #fbe3b8; --c3: #e7d6f7; --c4: #f9d3dd;
  --c5: #d5e9e9; --link: #0b5cad; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --text: #e6edf3; --quiet: #9aa4af;
  --line: #3d444d; --free: #161b22; --c0: #143a63; --c1: #12492a; --c2: #4a3a08; --c3: #3d2458;
  --c4: #55202f; --c5: #1b4444; --link: #79b8ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 76rem; background: var(--page);
  color: var(--text); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: clamp(1.3rem, 4vw, 1.9rem); line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1rem; margin: 1.75rem 0 .35rem; overflow-wrap: anywhere; }
p { margin: .25rem 0; } .quiet { color: var(--quiet); font-weight: 400; }
.bar { display: flex; height: 2.2rem; border: 1px solid var(--line); background: var(--free); }
.bar span { overflow: hidden; white-space: nowrap; text-overflow: ellipsis; font-size: .75rem;
  line-height: 2.1rem; padding: 0 .25rem; border-right: 1px solid var(--page); min-width: 0; }
.bar .narrow { padding: 0; }
.room { background-image: repeating-linear-gradient(45deg, transparent 0 4px,
  var(--line) 4px 5px); }
.scroll { overflow-x: auto; } .scroll:focus-visible { outline: 3px solid var(--link); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin-top: .4rem; }
th, td { text-align: left; padding: .15rem 1rem .15rem 0; font-weight: 400; }
thead th { color: var(--quiet); font-size: .85rem; } tbody th { overflow-wrap: anywhere; }
.n { text-align: right; white-space: nowrap; }
""" + "".join(f".c{n} {{ background-color: var(--c{n}); }}\n" for n in range(_TONES))

_BODY: Final = """\
<p class="quiet">A block is what a model adds to its node; what it shares with those before it is
there already. Hatched: room of its engine.</p>
{nodes}
</main>
</body>
</html>
"""


def write_page(path: Path, found: FleetPlan) -> None:
    """Write the page about the plan `found` to `path`.

    Raises:
        OSError: The page cannot be written.
    """
    path.write_text(page(found), encoding="utf-8")


def page(found: FleetPlan) -> str:
    """Return the page about the plan `found` as HTML."""
    busy = [node for node in found.nodes if node.models]
    replicas = sum(len(node.models) for node in busy)
    headline = (
        f"{replicas} replicas on {len(busy)} of {len(found.nodes)} nodes take "
        f"{human(found.used_bytes)} instead of {human(found.alone_bytes)}"
    )
    nodes = "\n".join(_node(node, f"n{number}") for number, node in enumerate(found.nodes))
    return (HEAD + _BODY).format(headline=escape(headline), style=_STYLE, nodes=nodes)


def _node(node: PlannedNode, identity: str) -> str:
    name = escape(visible(node.name))
    size = f"{human(node.used_bytes)} of {human(node.memory_bytes)}"
    if not node.models:
        return f'<h2>{name} <span class="quiet">is not needed</span></h2>'
    blocks = "".join(
        _block(each.model, nbytes, node.memory_bytes, f"c{number % _TONES}{more}", what)
        for number, each in enumerate(node.models)
        for nbytes, more, what in (
            (each.adds_bytes, "", "adds"),
            (each.room_bytes, " room", "room"),
        )
        if nbytes
    )
    rows = "".join(
        f'<tr><th scope="row">{escape(visible(each.model))}</th>'
        f'<td class="n">{human(each.adds_bytes)}</td><td class="n">{human(each.weights_bytes)}</td>'
        f'<td class="n">{human(each.room_bytes)}</td>'
        f"<td>{escape(visible(each.shares_with or '-'))}</td></tr>"
        for each in node.models
    )
    return (
        f'<section aria-labelledby="{identity}"><h2 id="{identity}">{name} '
        f'<span class="quiet">{size}</span></h2>\n'
        f'<div class="bar" role="img" aria-label="{name}: {size} taken">{blocks}</div>\n'
        f'<div class="scroll" role="region" aria-label="Models of {name}" tabindex="0"><table>'
        '<thead><tr><th scope="col">model</th><th scope="col" class="n">adds</th>'
        '<th scope="col" class="n">of</th><th scope="col" class="n">room</th>'
        f'<th scope="col">shares with</th></tr></thead><tbody>{rows}</tbody></table></div>'
        "</section>"
    )


def _block(name: str, nbytes: int, memory: int, tone: str, what: str) -> str:
    share = 100 * nbytes / memory
    shown = escape(visible(name)) if share >= _NARROW and what == "adds" else ""
    narrow = "" if shown else " narrow"
    title = escape(f"{visible(name)}: {what} {human(nbytes)}")
    return f'<span class="{tone}{narrow}" style="width:{share:.3f}%" title="{title}">{shown}</span>'
