"""Ranges of containers that are read as they arrive: whoever waits for one is told how it ended."""

import threading
from collections.abc import Callable

from remotes import MemoryBucket
from stores import MIB
from tensor_dedup.store.format.tables import PLAIN, Record
from tensor_dedup.store.objects import ContainerId
from tensor_dedup.store.remote.errors import DamagedRemoteError
from tensor_dedup.store.remote.pieces import RemotePieces

CONTAINER = ContainerId("00" * 32, "pack")
COUNT = 10


class Trickling(MemoryBucket):
    """Sends a range in halves, as soon as it may, and `more` bytes than were asked for."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.may, self.more = threading.Event(), more

    def stream_range(
        self, _key: str, start: int, stop: int, arrived: Callable[[memoryview], None]
    ) -> None:
        self.may.wait(60)
        half = (stop - start) // 2
        arrived(memoryview(bytes(half)))
        arrived(memoryview(bytes(stop - start - half + self.more)))


def pieces(bucket: Trickling) -> RemotePieces:
    """Pieces that are each a range."""
    names = [bytes([number]) * 32 for number in range(COUNT)]
    records = [
        Record(name, number * 2 * MIB, MIB, MIB, PLAIN, leaves=b"", base=None)
        for number, name in enumerate(names)
    ]
    return RemotePieces(bucket, {r.digest: (CONTAINER, r) for r in records}, {})


def read(source: RemotePieces, number: int) -> object:
    """The error of reading a piece, or whether it could be read; in a thread that may hang."""
    found: list[object] = []

    def run() -> None:
        try:
            view = memoryview(bytearray(MIB))
            found.append(source.read_stored(CONTAINER, number * 2 * MIB, view))
        except Exception as error:  # noqa: BLE001 - it is what is looked at
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for what nobody sends"
    return found[0]


def test_who_reads_what_was_closed_gets_an_error_each_time() -> None:
    """As when the interpreter ends while another thread pulls: pools take nothing more."""
    source = pieces(bucket := Trickling())
    bucket.may.set()
    assert read(source, 0) is True
    source.close()
    for _ in range(2):
        assert isinstance(read(source, COUNT - 1), Exception)


def test_to_close_ends_what_is_under_way() -> None:
    source = pieces(bucket := Trickling())
    answers: list[object] = []
    reader = threading.Thread(target=lambda: answers.append(read(source, 1)))
    reader.start()
    closing = threading.Thread(target=source.close)
    closing.start()
    while not source._closed:
        pass
    bucket.may.set()
    for each in (closing, reader):
        each.join(60)
        assert not each.is_alive()
    assert isinstance(answers[0], Exception)


def test_more_than_was_asked_for_is_damage() -> None:
    bucket = Trickling(more=1)
    bucket.may.set()
    with pieces(bucket) as source:
        error = read(source, COUNT - 1)
    assert isinstance(error, DamagedRemoteError)
    assert "sends more" in str(error)
