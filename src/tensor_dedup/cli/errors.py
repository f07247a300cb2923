"""How a failure leaves the command line: one line on stderr and an exit status, never on stdout.

A verb with `--json` prints its one document when it has succeeded; after a failure stdout is empty,
so a reader of the document never takes an error for a result.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import click

from tensor_dedup.errors import ConfigError, NoSuchPathError, TensorDedupError


class BadData(click.ClickException):
    """Something is wrong with the data: click prints one line on stderr and ends with 1."""

    exit_code = 1


class WrongUse(click.ClickException):
    """The command was called wrongly: click prints one line on stderr and ends with 2."""

    exit_code = 2


@contextmanager
def data_errors() -> Iterator[None]:
    """Turn what a verb raises about its data, its settings or its files into an exit status."""
    try:
        yield
    except (ConfigError, NoSuchPathError) as error:
        raise WrongUse(_one_line(error)) from error
    except TensorDedupError as error:
        raise BadData(_one_line(error)) from error
    except BrokenPipeError:
        raise  # `| head` has seen enough: click ends the command without a message
    except OSError as error:
        raise BadData(_one_line(error)) from error


def _one_line(error: Exception) -> str:
    return printable(" ".join(str(error).split()))


def printable(name: str) -> str:
    """The text with what no reader can see (escapes, controls, direction marks) written out."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)
