"""What is opened once for each device, by how its kind is opened."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

_Open = TypeVar("_Open")


class DeviceOpeners(Generic[_Open]):
    """Who opens devices of which kind of torch's. A forked child begins anew: no GPU that its
    parent has used works there.
    """

    def __init__(self, kind: str, opener: _Open) -> None:
        self._openers: dict[str, _Open] = {kind: opener}
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Forget what was opened, and what could not be."""
        raise NotImplementedError

    @contextmanager
    def replaced(self, kind: str, opener: _Open) -> Iterator[None]:
        """For tests: devices of that kind are opened so, within the block."""
        before = self._openers.get(kind)
        self._openers[kind] = opener
        self.reset()
        try:
            yield
        finally:
            self._openers.pop(kind)
            if before is not None:
                self._openers[kind] = before
            self.reset()
