"""Sizes and habits that keep the code readable. Length counts no docstring: those are contracts."""

import ast
import re
import statistics
from pathlib import Path

import pytest

import house

FILE_LINES = 400
TEST_FILE_LINES = 500  # one file tests one module, and tables of cases are long but not deep
FUNCTION_MEDIAN = 10
FUNCTION_P90 = 40
GENERIC_SHARE = 0.10
GENERIC = {
    "AssertionError",
    "BaseException",
    "Exception",
    "OSError",
    "RuntimeError",
    "TypeError",
    "ValueError",
}
# Places that exist on one machine only, and notes to people who are not there. One letter of each
# stands in brackets, or this file would find itself.
FORBIDDEN = re.compile(
    r"""
    (?<![\w.-])/(?:[w]ork|[t]mp|[f]arm|[r]oot)\b
    | (?<![\w.-])/[h]ome/
    | (?<![\w.-])/opt/(?:[w]heels|[p]ypi)
    | [p]ythonhosted\.org | \b[p]ypi\.org
    | \b(?:[C]ONTRACT|[D]ESIGN)\.md
    | \b[s]hared/(?:notes|prototypes|references)
    | \b(?:[T]ODO|[F]IXME|[X]XX)\b
    """,
    re.VERBOSE,
)


def length(function: ast.AST) -> int:
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    text = function.body[0]
    return lines - ((text.end_lineno or text.lineno) - text.lineno + 1)


def function_lengths(texts: list[str]) -> list[int]:
    return sorted(
        length(node)
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def raised(text: str) -> list[str]:
    """The name of every error that is made and raised; a bare `raise` makes none."""
    made = (node.exc for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Raise))
    called = (error.func if isinstance(error, ast.Call) else error for error in made if error)
    return [error.id for error in called if isinstance(error, ast.Name)]


def generic_share(texts: list[str]) -> float:
    names = [name for text in texts for name in raised(text)]
    return sum(name in GENERIC for name in names) / max(1, len(names))


def python_files() -> list[Path]:
    linked = [path for path in house.tracked_files() if (house.ROOT / path).is_file()]
    return [path for path in linked if path.suffix == ".py"]


def longest(path: Path) -> int:
    return TEST_FILE_LINES if path.name.startswith("test_") else FILE_LINES


def test_no_file_is_two_rooms_in_one() -> None:
    lengths = {path: len((house.ROOT / path).read_text().splitlines()) for path in python_files()}
    assert {path: lines for path, lines in lengths.items() if lines > longest(path)} == {}


def test_functions_are_short() -> None:
    lengths = function_lengths(list(house.sources().values()))
    assert statistics.median(lengths) <= FUNCTION_MEDIAN
    assert statistics.quantiles(lengths, n=10)[-1] <= FUNCTION_P90


def test_a_length_is_the_code_without_its_docstring() -> None:
    documented = 'def f():\n    """One.\n\n    Two.\n    """\n    return 1\n'
    assert function_lengths([documented, "async def g():\n    return 1"]) == [2, 2]


def test_errors_say_what_went_wrong_by_their_type() -> None:
    assert generic_share(list(house.sources().values())) <= GENERIC_SHARE


def test_generic_errors_are_counted() -> None:
    text = "try:\n    raise ValueError\nexcept E:\n    raise\nraise ConfigError('x') from None\n"
    assert generic_share([text]) == 0.5


def logged_errors(text: str) -> list[int]:
    """Lines that log a caught error itself: whoever keeps the record keeps its frames' memory."""
    return [
        call.lineno
        for handler in ast.walk(ast.parse(text))
        if isinstance(handler, ast.ExceptHandler) and handler.name
        for call in ast.walk(handler)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) in {"log", "_log"}
        and any(isinstance(each, ast.Name) and each.id == handler.name for each in call.args)
    ]


def test_errors_are_logged_as_text() -> None:
    found = {name: logged_errors(text) for name, text in house.sources().items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_an_error_that_is_logged_is_found() -> None:
    text = "try:\n    f()\nexcept E as error:\n    log.warning('%s', {})\n"
    assert logged_errors(text.format("error")) == [4]
    assert logged_errors(text.format("str(error)")) == []


def test_no_file_speaks_of_one_machine_or_of_work_left() -> None:
    found = [
        f"{path}: {match.group()}"
        for path in house.tracked_files()
        if (house.ROOT / path).is_file() and path.name != "LICENSE"
        for match in FORBIDDEN.finditer((house.ROOT / path).read_text(errors="replace"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    ["see /" + "work/main", "('/" + "tmp/w')", "/" + "home/me", "# TO" + "DO", "in DESIGN" + ".md"],
)
def test_what_is_forbidden_is_found(text: str) -> None:
    assert FORBIDDEN.search(text)


@pytest.mark.parametrize("text", ["a network/workers", "tests/work", "a/root/b", "shared/private"])
def test_ordinary_words_are_not_forbidden(text: str) -> None:
    assert not FORBIDDEN.search(text)
