"""The front of a fleet without a cluster: tests/integrations/test_ray_fleet.py has one."""

import asyncio
from typing import Any

import pytest

from tensor_dedup.integrations.ray.front import body_of


class Sender:
    """A request of Starlette's whose body comes in pieces; it counts those that were read."""

    def __init__(self, pieces: list[bytes], announced: int | None = None) -> None:
        requests: Any = pytest.importorskip("starlette.requests")
        length = [] if announced is None else [(b"content-length", str(announced).encode())]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": length}
        self.request = requests.Request(scope, self._receive)
        self._pieces, self.read = pieces, 0

    async def _receive(self) -> dict[str, Any]:
        self.read += 1
        more = self.read < len(self._pieces)
        return {"type": "http.request", "body": self._pieces[self.read - 1], "more_body": more}


@pytest.mark.parametrize("announced", [None, 10])
def test_a_body_is_what_was_sent(announced: int | None) -> None:
    sender = Sender([b"0123", b"4567", b"89"], announced)
    assert asyncio.run(body_of(sender.request, 10)) == b"0123456789"


@pytest.mark.parametrize(("announced", "read"), [(None, 3), (12, 0)])
def test_of_a_body_that_is_too_long_no_more_is_read(announced: int | None, read: int) -> None:
    sender = Sender([b"0123", b"4567", b"89a", b"b"], announced)
    assert asyncio.run(body_of(sender.request, 10)) is None
    assert sender.read == read
