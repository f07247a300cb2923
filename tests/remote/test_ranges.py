"""Ranges of containers that are read as they arrive: whoever waits for one is told how it ended."""

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from remote_runs import remotes
from remote_runs.remotes import Faulty, MemoryBucket, Proxy
from store_runs.stores import KIB, MIB, content, noise, open_store, safetensors, stored, u8, write
from tensor_dedup import Store
from tensor_dedup.remote import Remote, layout
from tensor_dedup.remote.catalog import read_table
from tensor_dedup.remote.errors import DamagedRemoteError
from tensor_dedup.remote.pieces import RemotePieces
from tensor_dedup.remote.server_bucket import WebBucket
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.format.tables import PLAIN, Record

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


def gappy(tmp_path: Path, count: int, nbytes: int) -> tuple[Store, MemoryBucket, int]:
    """A remote with tensors side by side, and a store that has every second of them."""
    tensors = {f"t{n:03}": noise(n, nbytes + n % 7) for n in range(count)}
    full, there, bucket = (
        open_store(tmp_path / "full"),
        open_store(tmp_path / "there"),
        MemoryBucket(),
    )
    for name, every in (("all", 1), ("half", 2)):
        held = {n: tensors[n] for n in [*tensors][::every]}
        write(tmp_path / name, {"model.safetensors": safetensors(u8(**held))})
    full.import_(tmp_path / "all", "all")
    full.push(Remote(bucket), "all")
    assert sum(key.startswith(layout.CONTAINERS) for key in bucket.objects) == 1
    there.import_(tmp_path / "half", "half")
    return there, bucket, sum(map(len, [*tensors.values()][1::2]))


def ranges_of(there: Store, bucket: MemoryBucket) -> int:
    """The ranges that are asked for to pull all, which comes whole."""
    gate = Faulty(bucket)
    there.pull(Remote(gate), "all")
    assert stored(there, "all") == content(there.path.parent / "all")
    return sum(call.startswith("get_range") for call in gate.calls)


@pytest.mark.parametrize("nbytes", [2 * KIB, 100 * KIB, 300 * KIB])
def test_gaps_are_bridged_while_little_travels_for_nothing(tmp_path: Path, nbytes: int) -> None:
    there, bucket, wanted = gappy(tmp_path, 40, nbytes)
    before = bucket.traffic.received
    found = ranges_of(there, bucket)
    received = bucket.traffic.received - before
    if nbytes == 2 * KIB:  # all of it is less than what may travel for nothing
        assert found == 1
    elif nbytes == 100 * KIB:
        assert 21 - 6 <= found <= 21 - 4
    else:  # no gap is so small that it is bridged; the header is a range
        assert found == 21
    assert wanted < received < 1.02 * wanted + (1 << 20)


def test_what_lies_side_by_side_is_one_range_however_little_may_travel_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces are aligned, so there is padding between them."""
    monkeypatch.setattr("tensor_dedup.remote.pieces._WASTE_SHARE", 0.0)
    monkeypatch.setattr("tensor_dedup.remote.pieces._WASTE_BYTES", 0)
    _, bucket, _ = gappy(tmp_path, 40, 2 * KIB)
    records = read_table(bucket, next(containers(bucket)).name).records
    assert any(a.offset + a.stored < b.offset for a, b in pairwise(records))
    assert ranges_of(open_store(tmp_path / "other"), bucket) == 1


def containers(bucket: MemoryBucket) -> Iterator[ContainerId]:
    return (found for key in bucket.objects if (found := layout.container_of(key)))


@pytest.mark.parametrize("ranges", [True, False])
def test_whether_a_web_server_knows_ranges_costs_small_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranges: bool
) -> None:
    """Where it knows none, nothing comes twice: neither a container of which several ranges are
    wanted nor one whose range was asked for in vain.
    """
    monkeypatch.setattr("tensor_dedup.remote.pieces._RANGE_BYTES", MIB)
    monkeypatch.setattr(layout, "CONTAINER_BYTES", 2 * MIB)
    store, there = open_store(tmp_path / "store"), open_store(tmp_path / "there")
    tensors = u8(**{f"t{number:02}": noise(number, MIB) for number in range(10)})
    path = write(tmp_path / "many", {"model.safetensors": safetensors(tensors)})
    store.import_(path, "many")
    store.push(f"file://{tmp_path}/served", "many")
    count = sum(each.is_file() for each in (tmp_path / "served" / "containers").rglob("*"))
    assert count == 5
    with remotes.web(tmp_path / "served", ranges=ranges) as url:
        proxy = Proxy(int(url.rpartition(":")[2]))
        done = there.pull(Remote.open(f"http://127.0.0.1:{proxy.port}"), "many")
        requests, nbytes = proxy.requests, proxy.nbytes
        proxy.close()
    assert done.requests == requests
    # Twice the reference, manifest, page, head and segment of the catalog, and tables; then the
    # small ones.
    assert requests == 6 + count + (1 + 2 * count if ranges else 2 + count)
    assert nbytes <= 1.02 * done.moved_bytes + 64 * KIB
    assert stored(there, "many") == content(path)


def test_an_object_that_came_whole_stays_while_somebody_waits_for_it(tmp_path: Path) -> None:
    """A pull asks for ranges of several containers at once; the second of one may be the last."""
    write(tmp_path / "served", {each: each.encode() * 9 for each in "abcd"} | {"FORMAT": b"text"})
    with remotes.web(tmp_path / "served", ranges=False) as url:
        bucket = WebBucket(url)
        assert bytes(bucket.get_range("a", 0, 2)) == b"aa"
        found: dict[str, bytes] = {}

        def read(key: str) -> None:
            found[key] = bytes(bucket.get_range(key, 2, 4))

        threads = [threading.Thread(target=read, args=(key,)) for key in "bcda"]
        with bucket._wholes._lock:
            for number, each in enumerate(threads):
                each.start()
                while len(bucket._wholes._awaited) <= number:
                    assert each.is_alive()
        for each in threads:
            each.join(60)
        assert found == {each: each.encode() * 2 for each in "abcd"}
        assert bucket.traffic.calls == 2 + 4
