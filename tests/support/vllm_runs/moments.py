"""Do something at a moment of a call: before a line of one of some modules is run.

moments = Moments(takeover, weight_transfer)
with moments.listed():
    update()
for moment in moments.found:
    with moments.at(moment, act):
        update()

A moment is a line, and the how many-th time it is run. What `act` raises is raised there.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple


class Moment(NamedTuple):
    """Before a line of a function, when it is run for the `time`-th time."""

    file: str
    function: str
    line: int
    time: int


class Moments:
    """The moments of a call, in this thread and those that it starts."""

    def __init__(self, *modules: ModuleType) -> None:
        self.found: list[Moment] = []
        self.struck = False
        self._files = {str(module.__file__) for module in modules}
        self._seen: Counter[tuple[str, int]] = Counter()
        self._wanted: Moment | None = None
        self._act: Callable[[], object] = bool

    @contextmanager
    def listed(self) -> Iterator[None]:
        """Find the moments: of each line, the first time that it is run, and the last."""
        functions: dict[tuple[str, int], str] = {}
        with self._traced(functions):
            yield
        lines = [*functions.items()]
        times = [(line, name, time) for line, name in lines for time in {1, self._seen[line]}]
        self.found = [Moment(line[0], name, line[1], time) for line, name, time in times]

    @contextmanager
    def at(self, moment: Moment, act: Callable[[], object]) -> Iterator[None]:
        """Call `act` at a moment; `struck` says whether it came."""
        self._wanted, self._act, self.struck = moment, act, False
        try:
            with self._traced({}):
                yield
        finally:
            self._wanted = None

    @contextmanager
    def _traced(self, functions: dict[tuple[str, int], str]) -> Iterator[None]:
        self._seen.clear()

        def trace(frame: FrameType, event: str, _: object) -> Any:
            code = frame.f_code
            if event == "call":
                return trace if code.co_filename in self._files else None
            if event == "line":
                line = (Path(code.co_filename).name, frame.f_lineno)
                functions[line] = code.co_name
                self._seen[line] += 1
                wanted = self._wanted
                if wanted and (*line, self._seen[line]) == (wanted.file, wanted.line, wanted.time):
                    self.struck = True
                    self._act()
            return trace

        before = sys.gettrace()
        threading.settrace(trace)
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(before)
            threading.settrace(before)
