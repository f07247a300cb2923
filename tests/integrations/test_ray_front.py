"""The front of a fleet without a cluster: tests/integrations/test_ray_fleet.py has one."""

import asyncio
from typing import Any

import pytest

from tensor_dedup.integrations.ray.front import _model_of, body_of


class Sender:
    """A request of Starlette's whose body comes in pieces; it counts those that were read."""

    def __init__(self, pieces: list[bytes]) -> None:
        requests: Any = pytest.importorskip("starlette.requests")
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        self.request = requests.Request(scope, self._receive)
        self._pieces, self.read = pieces, 0

    async def _receive(self) -> dict[str, Any]:
        self.read += 1
        more = self.read < len(self._pieces)
        return {"type": "http.request", "body": self._pieces[self.read - 1], "more_body": more}


def test_a_body_is_what_was_sent() -> None:
    sender = Sender([b"0123", b"4567", b"89"])
    assert asyncio.run(body_of(sender.request, 10)) == b"0123456789"


def test_a_body_that_is_too_long_is_read_to_its_end() -> None:
    sender = Sender([b"0123", b"4567", b"89a", b"b"])
    assert asyncio.run(body_of(sender.request, 10)) is None
    assert sender.read == 4  # else the client would find its connection reset


def test_of_a_body_only_the_model_is_kept() -> None:
    assert _model_of(b'{"messages": [[], {}], "model": "a"}') == "a"
    for body in (b"", b"[1]", b'{"model": 3}', b"{", b"[" * 200_000, b'{"x": ' + b"[" * 200_000):
        assert _model_of(body) == ""
