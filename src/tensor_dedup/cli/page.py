"""The option `--html`, and the head of HTML pages, which several verbs use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

_Verb = TypeVar("_Verb", bound=Callable[..., Any])

# The page loads nothing and runs no script. To be formatted with `headline` and `style`.
HEAD: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{headline}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{headline}</h1>
"""


def html_option(what: str) -> Callable[[_Verb], _Verb]:
    """Return a decorator that adds the option `--html FILE` to a verb, which gets it as `page`.

    `what` says in the help text what the page shows.
    """
    return click.option(
        "--html",
        "page",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help=f"Also write {what} as a self-contained HTML page.",
    )
