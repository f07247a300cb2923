"""Buckets: the interface to objects under keys, wherever these are.

`folder_bucket` implements it for local folders, `server_bucket` for object storage and plain web
servers, and `oci.artifact` for the artifacts of a registry.
"""

import hashlib
import json
import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from tensor_dedup.digest import hand
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    ReadOnlyRemoteError,
    RemoteUnreachableError,
)
from tensor_dedup.remote.layout import PROBE

# What is in the folder of a remote: the first parts of keys, and what conditions need.
OWN_NAMES: Final = {
    *("FORMAT", "refs", "manifests", "containers", "tables", "catalog", "trash"),
    *("probe", "tmp", "lock", "identity", "writers", "lost+found"),
}
# A tag for `put_if` that no object has. Each service compares one of the two, and refuses a value
# of another form in other words.
NO_TAG: Final = json.dumps({"e_tag": f'"{"0" * 32}"', "version": "9" * 18})
_MD5: Final = re.compile("[0-9a-f]{32}")
_THREADS: Final = 8
_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True, slots=True)
class ObjectStatus:
    """The metadata of an object: its key, size in bytes, tag and modification time.

    The tag (ETag) changes with the content. `modified` is in seconds of the server's clock.
    """

    key: str
    size: int
    tag: str
    modified: float

    def surely_is(self, data: bytes) -> bool:
        """Return whether the size and the tag prove that the object is `data`.

        They prove it only on servers where the tag is the MD5 of the content, as on S3.
        """
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return self.size == len(data) and self.tag.strip('"') == md5

    def may_be(self, data: bytes) -> bool:
        """Return False if the size or the tag shows that the object is not `data`, else True.

        A tag that is not an MD5 is not compared.
        """
        is_sum = _MD5.fullmatch(self.tag.strip('"')) is not None
        return self.size == len(data) and (not is_sum or self.surely_is(data))


class Traffic:
    """Counters of a bucket's traffic: payload bytes sent and received, and requests.

    Safe from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent = self.received = self.calls = 0

    def add(self, sent: int = 0, received: int = 0, calls: int = 1) -> None:
        """Add bytes and a number of requests (`calls`) to the counters."""
        with self._lock:
            self.sent += sent
            self.received += received
            self.calls += calls

    def counts(self) -> tuple[int, int]:
        """Return the sum of the bytes sent and received, and the number of requests."""
        with self._lock:
            return self.sent + self.received, self.calls


class Bucket(ABC):
    """A collection of objects, each stored under a key. Safe from any thread.

    An object is always replaced as a whole, so a reader sees either the old or the new object,
    never a mixture.

    Raises:
        RemoteUnreachableError: From any method, if the server does not answer.
        RemoteAccessError: From any method, if the server refuses the request.
    """

    # Whether it is a plain web server's: it takes no objects, and seldom lists any.
    read_only = False
    # Whether no request is sent to read an object.
    is_local = False

    def __init__(self, url: str) -> None:
        self.url = url
        self.traffic = Traffic()

    def at(self, key: str) -> str:
        """Return the URL of the object under `key`, for messages."""
        return f"{self.url}/{key}"

    def check_writable(self) -> None:
        """Check that objects can be written to buckets of this kind.

        Raises:
            ReadOnlyRemoteError: The bucket is that of a plain web server.
        """
        if self.read_only:
            raise ReadOnlyRemoteError.at(self.url, "a web server takes no objects")

    def obstacle(self) -> str | None:
        """Return, as a text, why an empty remote must not be made here; None if nothing is known.

        * A local folder must hold nothing else, and must not lie inside a remote or a store.
        * On a server, the bucket must not be in one of the own folders of a remote, such as `refs`.
        """
        return None

    @abstractmethod
    def get(self, key: str, limit: int) -> tuple[bytes, str] | None:
        """Return an object's bytes and its tag for `put_if`, or None if there is no object.

        Raises:
            DamagedRemoteError: The object is larger than `limit` bytes.
        """

    @abstractmethod
    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        """Return the bytes of an object from `start` to `stop`, fewer if the object ends earlier.

        Raises:
            FileNotFoundError: There is no such object.
        """

    def stream_range(
        self, key: str, start: int, stop: int, arrived: Callable[[memoryview], None]
    ) -> None:
        """Pass the bytes of an object from `start` to `stop` to `arrived`, in order.

        `arrived` is called for each chunk, or once if the bucket cannot stream.

        Raises:
            FileNotFoundError: There is no such object.
        """
        arrived(self.get_range(key, start, stop))

    @abstractmethod
    def head(self, key: str) -> ObjectStatus | None:
        """Return the status of an object, or None if there is no object.

        The tag in the status can be compared with tags from `list`, but not with tags from `get`.
        """

    @abstractmethod
    def put(self, key: str, chunks: Sequence[memoryview] | Iterator[memoryview]) -> None:
        """Write `chunks` as one object under `key`, replacing an existing object.

        A sequence of chunks is sent in one request, an iterator of chunks in several.
        """

    def put_once(self, key: str, data: memoryview) -> bool:
        """Write `data` as an object; return whether the memory of `data` may be reused at once.

        * True: A single request was sent and succeeded.
        * False: The first request failed and was repeated. The first one may still read `data`, and
          the server may still carry it out.
        """
        self.put(key, [data])
        return True

    @abstractmethod
    def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
        """Write an object if its tag is still `tag`; return whether the write certainly succeeded.

        `tag` comes from `get`. If it is None, the object is written only if there is no object
        under `key`. If the result is False, read the object, because the write may have succeeded
        and its response been lost.

        Raises:
            NoConditionsError: The server says that it does not implement the condition.
        """

    @abstractmethod
    def list(self, prefix: str) -> Iterator[ObjectStatus]:
        """Iterate over the statuses of all objects whose keys begin with `prefix`.

        `prefix` is a folder, as in `refs/`, or a folder and the beginning of names in it, as in
        `refs/run@`. The listing is not a snapshot: objects may change while it is read.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete the object under `key`; do nothing if there is no object."""

    def delete_once(self, key: str) -> bool:
        """Send one request to delete an object; return whether it was answered.

        If the result is False, the server may have deleted the object, or may still do so later.
        """
        self.delete(key)
        return True

    def settle(self, key: str) -> None:  # noqa: B027 (what a server shows is durable)
        """Make an existing object durable, because its writer may have died before doing so.

        On a server this does nothing: any object that can be read is durable.
        """

    def now(self) -> float:
        """Return the time of the server's clock, in seconds since the epoch.

        The method writes a small object, reads its modification time and deletes it.
        """
        key = f"{PROBE}{secrets.token_hex(8)}"
        self.put(key, [memoryview(b"now")])
        status = self.head(key)
        self.delete(key)
        if status is None:
            raise RemoteUnreachableError.at(self.at(key), "it was written and is not there")
        return status.modified

    def each(self, call: Callable[[_In], _Out], items: Iterable[_In]) -> Iterator[_Out]:
        """Call `call` for each of `items` on several threads; yield the results in their order.

        The first error ends the iteration, and calls that have not begun are cancelled.
        """
        waiting = [*items]
        if len(waiting) < 2:
            yield from map(call, waiting)
            return
        # Of this call: what waits for a network must not keep others from a disk or from hashing.
        with ThreadPoolExecutor(_THREADS) as pool:
            try:
                for future in [hand(pool, partial(call, item)) for item in waiting]:
                    yield future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def too_large(where: str, size: int, limit: int) -> DamagedRemoteError:
    """Return the error for the object at `where`, whose `size` exceeds the `limit` for its kind."""
    return DamagedRemoteError.at(where, f"{size} bytes, the limit is {limit}", size=size)
