"""Habits that keep the code readable: depth of modules, one home for a name, typed errors."""

import ast
import re
from pathlib import Path

import pytest

from project import package_source

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


def raised(text: str) -> list[str]:
    """The name of every error that is made and raised; a bare `raise` makes none."""
    made = (node.exc for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Raise))
    called = (error.func if isinstance(error, ast.Call) else error for error in made if error)
    return [error.id for error in called if isinstance(error, ast.Name)]


def generic_share(texts: list[str]) -> float:
    names = [name for text in texts for name in raised(text)]
    return sum(name in GENERIC for name in names) / max(1, len(names))


def test_errors_say_what_went_wrong_by_their_type() -> None:
    assert generic_share(list(package_source.sources().values())) <= GENERIC_SHARE


def test_generic_errors_are_counted() -> None:
    text = "try:\n    raise ValueError\nexcept E:\n    raise\nraise ConfigError('x') from None\n"
    assert generic_share([text]) == 0.5


# What asks the wall clock, which can be set, and why it may.
WALL_CLOCK = {
    "tensor_dedup.analyze.digests": "how long a file was left alone before it was hashed",
    "tensor_dedup.loader.checkpoint_io.hints": "what was used last; dates ahead count for nothing",
    "tensor_dedup.loader.checkpoint_io.sources": "how long a file was left alone",
    "tensor_dedup.loader.post_load.mapped_files": "how long a file was left alone",
    "tensor_dedup.loader.report": "the order of loads of several processes",
    "tensor_dedup.patches.vllm.loader": "how long a file was left alone",
    "tensor_dedup.store.files": "the grace of what is set aside",
    "tensor_dedup.store.writing.import_": "how long a file was left alone before it was hashed",
}


def wall_clocks(text: str) -> bool:
    names = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "time_ns"}
    calls = (node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return any(ast.unparse(function) in names for function in calls)


def test_who_asks_the_wall_clock_is_known() -> None:
    """It goes back and forth: no timeout, lock or order of steps may depend on it."""
    assert {n for n, text in package_source.sources().items() if wall_clocks(text)} == {*WALL_CLOCK}


def logged_errors(text: str) -> list[int]:
    """Lines that log a caught error itself: whoever keeps the record keeps its frames' memory."""
    return [
        call.lineno
        for handler in ast.walk(ast.parse(text))
        if isinstance(handler, ast.ExceptHandler) and handler.name
        for call in ast.walk(handler)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "_log"
        and any(isinstance(each, ast.Name) and each.id == handler.name for each in call.args)
    ]


def test_errors_are_logged_as_text() -> None:
    found = {name: logged_errors(text) for name, text in package_source.sources().items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_an_error_that_is_logged_is_found() -> None:
    text = "try:\n    f()\nexcept E as error:\n    _log.warning('%s', {})\n"
    assert logged_errors(text.format("error")) == [4]
    assert logged_errors(text.format("str(error)")) == []


# What uses a logger that is not the module's own, and why.
OTHER_LOGGERS = {
    "tensor_dedup.memory_manager.server.main": "shows what every module of the manager logs",
}


def test_a_logger_is_named_after_its_module() -> None:
    other = re.compile(r"^(?!_log = logging\.getLogger\(__name__\)$).*getLogger\(", re.MULTILINE)
    found = {name for name, text in package_source.sources().items() if other.search(text)}
    assert found == OTHER_LOGGERS.keys()


def copied_sets(text: str) -> list[int]:
    """Lines where a set takes the keys of a dict with `|=`.

    These are no set, so it is copied each time: a sweep of a large remote did that for each of its
    containers, for hours. `update` does not.
    """
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.AugAssign)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr == "keys"
    ]


def test_no_set_is_copied_to_take_more_in() -> None:
    found = {name: copied_sets(text) for name, text in package_source.sources().items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_set_that_is_copied_is_found() -> None:
    assert copied_sets("a.update(b)\na |= b.keys()\na = a | b.keys()\n") == [2]


# Public classes that two modules may call by one name, with the reason.
SEVERAL_HOMES = {
    "StoreCallback": "the callback that users of Trainer and of Lightning each look for",
    "FreezeCallback": "the callback that users of Trainer and of Lightning each look for",
}


def class_homes() -> dict[str, list[str]]:
    """The modules that define a public class of each name."""
    homes: dict[str, list[str]] = {}
    for module, text in package_source.sources().items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    return homes


def test_a_class_name_has_one_home() -> None:
    several = {name: found for name, found in class_homes().items() if len(found) > 1}
    assert several.keys() == SEVERAL_HOMES.keys(), several


# Names of modules and folders that end like a gerund, with the reason.
GERUNDS = {
    "decoding": "a term of the field",
    "freezing": "a term of the field",
    "hashing": "a term of the field",
    "lightning": "a library",
    "naming": "what tensors are called",
    "offloading": "a term of the field",
    "planning": "a term of the field",
    "publishing": "a term of the field",
    "reading": "a term of the field",
    "encoding": "a term of the field",
    "training": "a term of the field",
    "unsharing": "a term of this package, as its public `unshare`",
    "writing": "a term of the field",
}


def test_modules_are_named_by_nouns() -> None:
    names = {part for name in package_source.modules() for part in name.split(".")}
    assert {name for name in names if name.endswith("ing")} == GERUNDS.keys()


# Words of those who wrote the code, which say nothing to those who read it.
WORKSHOP = re.compile(
    r"\b(house|rooms|doors?|crumbs?|workshop|auditors?|"
    r"(a|another|the|one) reader (found|showed|noticed))\b"
    r"|^#+ .*\b20\d\d-\d\d-\d\d\b",
    re.IGNORECASE | re.MULTILINE,
)
# Texts in which such a word is meant as it is, and why.
MEANT = {
    "tests/cli/test_plan.py": "a misspelt key of a fleet's file",
    "src/tensor_dedup/planning/placement/problem.py": "the plural of a key of a fleet's file",
    "tests/rules/test_habits.py": "this list",
}


def test_no_text_has_words_of_the_workshop() -> None:
    texts = {
        str(path): (package_source.ROOT / path).read_text()
        for path in package_source.tracked_files()
        if path.suffix in {".py", ".md"} and (package_source.ROOT / path).is_file()
    }
    assert len(texts) > 500
    found = {path: match[0] for path, text in texts.items() if (match := WORKSHOP.search(text))}
    assert found.keys() == MEANT.keys(), found


@pytest.mark.parametrize("text", ["The door to it", "a\n## Done (2026-01-02)", "An auditor says"])
def test_a_word_of_the_workshop_is_found(text: str) -> None:
    assert WORKSHOP.search(text)


def test_no_hint_names_a_package_that_is_not_published() -> None:
    """Whoever registers the name runs code of theirs where somebody follows the hint."""
    hint = re.compile(r"pip install[^\n`]*\btensor-dedup(?![-/\w])")
    files = [path for path in package_source.tracked_files() if path.suffix in {".py", ".md"}]
    texts = {path: (package_source.ROOT / path).read_text() for path in files}
    assert hint.search("pip install 'tensor-dedup[cuda]'")
    own = Path(__file__).name
    assert [p for p, text in texts.items() if hint.search(text) and p.name != own] == []
