"""For tests: a driver that refuses one call, any one, and counts them."""

from collections.abc import Callable
from typing import Any, Final

from tensor_dedup.memory_manager.cuda.driver import Result, refused

# What takes something back: when it fails something stays, whatever anybody does.
CLEANING: Final = frozenset(
    {"release", "free", "unmap", "leave", "forget", "deallocate", "ipc_close"}
)


class RefusingDriver:
    """Any driver, but its call number `refuse` (from 1) returns `code` and does nothing.

    `calls` are the names of those made since the count began, the refused one included. Calls
    that clean up are neither counted nor refused unless `cleaning`.
    """

    def __init__(self, inner: object, refuse: int = 0, code: Result = Result.OUT_OF_MEMORY) -> None:
        self._inner = inner
        self.refuse = refuse
        self.code = code
        self.cleaning = False
        self.calls: list[str] = []

    def again(self, refuse: int = 0) -> None:
        """Count from the beginning."""
        self.calls = []
        self.refuse = refuse

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call: Callable[..., Any] = getattr(self._inner, name)
        if name in CLEANING and not self.cleaning:
            return call

        def counted(*arguments: Any) -> Any:
            self.calls.append(name)
            if len(self.calls) == self.refuse:
                raise refused(name, self.code, 0)
            return call(*arguments)

        return counted
