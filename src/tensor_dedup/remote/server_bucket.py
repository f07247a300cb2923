"""Buckets on servers: S3-compatible, Google's and Azure's object storage, and plain web servers.

All requests are made by obstore, which reads credentials from the environment; they have no other
source. Credentials are removed from texts of servers before these appear in a message.
"""

import errno
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import obstore
from obstore import exceptions
from obstore.store import ObjectStore, from_url

from tensor_dedup.errors import StoreError
from tensor_dedup.remote.answers import (
    is_about_conditions,
    is_about_credentials,
    is_about_keys,
    is_about_ranges,
    raise_panic,
    status_of,
    version_of,
)
from tensor_dedup.remote.buckets import OWN_NAMES, Bucket, ObjectStatus, too_large
from tensor_dedup.remote.environment import allows_http, check_environment, scrubbed
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    NoConditionsError,
    NoRangesError,
    NotARemoteError,
    RemoteAccessError,
    RemoteUnreachableError,
    RemoteUrlError,
    UnlistedRemoteError,
)
from tensor_dedup.remote.layout import CONTAINER_BYTES, MARKER, MARKER_LINES, TEXT_BYTES

# Of an upload in parts, so many are being sent while the next is read.
_PART_BYTES: Final = 64 << 20
_PARTS_AT_ONCE: Final = 3
# What arrives is handed over when it is so much.
_CHUNK_BYTES: Final = 4 << 20
# What is larger may take longer to send than a server may be silent.
_SHORT_BYTES: Final = 1 << 20
# Of an answer; obstore counts the time in which a request is sent, too.
_SILENCE_S: Final = 60
_SENDING_S: Final = 1200
_RETRIES: Final = 5
# Where a machine in a cloud is asked for its credentials, when the environment has none.
_METADATA: Final = re.compile(r"/latest/(api/token|meta-data)|/metadata/identity|/computeMetadata/")
# So much of an object is held here that has come instead of a range.
_WHOLE_BYTES: Final = 3 * CONTAINER_BYTES
# So long whole objects are asked for when one has come instead of a range.
_ASK_AGAIN_S: Final = 60.0
# What obstore says of a web server without WebDAV that is asked for a list.
_LISTS_NOTHING: Final = re.compile(r"status code: (4\d\d|501)|decoding PROPFIND")
# The process that began to use obstore.
_used_by = 0


class StoreOpener(Protocol):
    """A function that opens obstore's client for the bucket at a URL."""

    def __call__(self, url: str, *, sending: bool, once: bool) -> ObjectStore:
        """Return a client. `sending` allows for large uploads; `once` does not repeat requests."""


class ServerBucket(Bucket):
    """A bucket in object storage.

    All requests go through obstore, which repeats failed ones a few times; `traffic` counts a
    repeated request once.
    """

    def __init__(self, url: str, opened: StoreOpener | None = None) -> None:
        super().__init__(url)
        self._open, self._clients = opened or _open_store, dict[tuple[bool, bool], ObjectStore]()
        self._store = self._client()
        self._wholes = _Wholes(self)

    def _client(self, *, sending: bool = False, once: bool = False) -> ObjectStore:
        # It takes milliseconds to open one; two threads may open two, of which one stays.
        if (sending, once) not in self._clients:
            self._clients[sending, once] = self._open(self.url, sending=sending, once=once)
        return self._clients[sending, once]

    @contextmanager
    def _translated(self, key: str, *expected: type[Exception]) -> Iterator[None]:
        """Turn obstore's errors into ours, but for those that are `expected` as an answer."""
        self._check_not_forked(key)
        try:
            yield
        except expected:
            raise
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                raise _no_bucket(self.url) from None
            raise FileNotFoundError(errno.ENOENT, "no such object", self.at(key)) from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise RemoteAccessError.at(self.at(key), scrubbed(str(error))) from None
        except (exceptions.BaseError, OSError) as error:
            text = str(error)
            if _METADATA.search(text):
                what = "there are no credentials in the environment"
                raise RemoteAccessError.at(self.url, what) from None
            kind = RemoteAccessError if is_about_credentials(text) else RemoteUnreachableError
            raise kind.at(self.at(key), scrubbed(text)) from None
        except BaseException as error:
            raise_panic(self.at(key), error)
            raise

    def _check_not_forked(self, key: str) -> None:
        """Raise in a process that was forked from one that has used obstore.

        Its threads do not exist there, so that each request would wait forever.
        """
        global _used_by
        _used_by = _used_by or os.getpid()
        if _used_by != os.getpid():
            what = "this process was forked after its parent had used a remote; start one instead"
            raise RemoteUnreachableError.at(self.at(key), what)

    def obstacle(self) -> str | None:
        # docstring inherited; a remote has all of its objects below names that we know
        parts = self.url.split("/")
        for number in range(3, len(parts)):
            if parts[number] in OWN_NAMES:
                above = ServerBucket("/".join(parts[:number]))
                above.traffic = self.traffic
                with suppress(StoreError):  # what may not be read is none of ours
                    found = above.get(MARKER, TEXT_BYTES)
                    if found is not None and found[0].startswith(MARKER_LINES[0].encode()):
                        return f"it lies inside {above.url}, which is a remote"
        return None

    def get(self, key: str, limit: int) -> tuple[bytes, str] | None:
        # docstring inherited
        try:
            with self._translated(key):
                found = obstore.get(self._store, key)
                size = found.meta["size"]
                if size > limit:
                    raise too_large(self.at(key), size, limit)
                blob, tag = bytes(found.bytes()), version_of(found.meta)
        except FileNotFoundError:
            self.traffic.add()
            return None
        self.traffic.add(received=len(blob))
        return blob, tag

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        # docstring inherited
        chunks = list[memoryview]()
        self.stream_range(key, start, stop, chunks.append)
        return chunks[0] if len(chunks) == 1 else memoryview(b"".join(chunks))

    def stream_range(
        self, key: str, start: int, stop: int, arrived: Callable[[memoryview], None]
    ) -> None:
        # docstring inherited
        if start >= stop:  # of an object that is empty; obstore refuses to ask
            return
        if self._wholes.are_sent:
            arrived(self._wholes.get(key)[start:stop])
            return
        got = 0
        try:
            with self._translated(key):
                found = obstore.get(self._store, key, options={"range": (start, stop)})
                for chunk in found.stream(_CHUNK_BYTES):
                    arrived(memoryview(chunk))
                    got += len(chunk)
        except RemoteUnreachableError as error:
            if is_about_ranges(str(error)):
                self.traffic.add()
                self._wholes.note()
                arrived(self._wholes.get(key)[start:stop])
                return
            if got or "416 " not in str(error):
                raise
            # The object ends before the range begins.
        self.traffic.add(received=got)

    def head(self, key: str) -> ObjectStatus | None:
        # docstring inherited
        self.traffic.add()
        try:
            with self._translated(key):
                return status_of(obstore.head(self._store, key))
        except FileNotFoundError:
            return None

    def put(self, key: str, chunks: Sequence[memoryview] | Iterator[memoryview]) -> None:
        # docstring inherited
        if isinstance(chunks, Sequence):
            data = chunks[0] if len(chunks) == 1 else memoryview(b"".join(chunks))
            self._send(key, data, once=False)
            return
        self.check_writable()
        sent = 0

        def counted() -> Iterator[memoryview]:
            nonlocal sent
            for chunk in chunks:
                sent += chunk.nbytes
                yield chunk

        with self._translated(key):
            obstore.put(
                self._client(sending=True),
                key,
                counted(),
                chunk_size=_PART_BYTES,
                max_concurrency=_PARTS_AT_ONCE,
            )
        # Azure's begins with its first part, others' with a request of its own; all end with one.
        around = 1 if urlsplit(self.url).scheme == "az" else 2
        self.traffic.add(sent=sent, calls=-(-sent // _PART_BYTES) + around)

    def put_once(self, key: str, data: memoryview) -> bool:
        # docstring inherited
        try:
            self._send(key, data, once=True)
        except RemoteUnreachableError:
            self._send(key, data, once=False)
            return False
        return True

    def _send(self, key: str, data: memoryview, *, once: bool) -> None:
        self.check_writable()
        client = self._client(sending=data.nbytes > _SHORT_BYTES, once=once)
        with self._translated(key):
            obstore.put(client, key, data, use_multipart=False)
        self.traffic.add(sent=data.nbytes)

    def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
        # docstring inherited
        self.check_writable()
        self.traffic.add(sent=len(data))
        failed = (exceptions.AlreadyExistsError, exceptions.PreconditionError)
        mode: Any = "create" if tag is None else json.loads(tag)
        try:
            with self._translated(key, *failed):
                obstore.put(self._store, key, data, mode=mode)
        except (*failed, FileNotFoundError):
            return False
        except RemoteUnreachableError as error:
            if not is_about_conditions(str(error)):
                raise
            condition = "If-None-Match" if tag is None else "If-Match"
            what = f"the server does not implement {condition}"
            raise NoConditionsError.at(self.url, what, condition=condition) from None
        return True

    def list(self, prefix: str) -> Iterator[ObjectStatus]:
        # docstring inherited
        # obstore lists folders only. What comes before the beginning of a name is not sent; what
        # comes behind it is, as some servers list in no order.
        folder, _, beginning = prefix.rpartition("/")
        offset = prefix if beginning else None
        with self._translated(prefix):
            for batch in obstore.list(self._store, f"{folder}/", offset=offset, chunk_size=1000):
                self.traffic.add()
                yield from (each for each in map(status_of, batch) if each.key.startswith(prefix))

    def delete(self, key: str) -> None:
        # docstring inherited
        self._delete(key, once=False)

    def delete_once(self, key: str) -> bool:
        # docstring inherited
        try:
            self._delete(key, once=True)
        except StoreError:
            return False
        return True

    def _delete(self, key: str, *, once: bool) -> None:
        self.check_writable()
        self.traffic.add()
        with suppress(FileNotFoundError), self._translated(key):
            obstore.delete(self._client(once=once), key)


class WebBucket(ServerBucket):
    """The files of a plain web server as a bucket. Only a server with WebDAV lists them."""

    read_only = True

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._trying, self._tried = threading.Lock(), False

    def stream_range(
        self, key: str, start: int, stop: int, arrived: Callable[[memoryview], None]
    ) -> None:
        # docstring inherited
        with self._trying:
            if self._wholes.are_sent:
                self._tried = False  # it is tried again later
            elif not self._tried:
                # With a small object: of a container megabytes come before its answer is refused.
                self._tried = True
                with suppress(StoreError, FileNotFoundError):  # the next request says what it is
                    super().stream_range(MARKER, 0, 1, lambda _: None)
        super().stream_range(key, start, stop, arrived)

    def list(self, prefix: str) -> Iterator[ObjectStatus]:
        # docstring inherited
        try:
            yield from super().list(prefix)
        except (RemoteUnreachableError, RemoteAccessError) as error:
            if not _LISTS_NOTHING.search(str(error)):
                raise
            what = "a web server of plain files cannot be listed"
            raise UnlistedRemoteError.at(self.url, what) from None


class _Wholes:
    """The last objects of a server that came whole where a range was asked for.

    These are two, as a pull is in one container and already asks for the next, and those that a
    thread waits for.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._objects: dict[str, memoryview] = {}
        self._lock, self._awaited = threading.Lock(), list[str]()
        self._until = 0.0

    @property
    def are_sent(self) -> bool:
        """Whether whole objects are to be asked for, because one came in place of a range."""
        return time.monotonic() < self._until

    def note(self) -> None:
        """Ask for whole objects for a while: it may have been a proxy's answer, and that once."""
        self._until = time.monotonic() + _ASK_AGAIN_S

    def get(self, key: str) -> memoryview:
        """Return an object.

        Raises:
            NoRangesError: It is too large to be held here.
            FileNotFoundError: There is no such object.
        """
        self._awaited.append(key)
        with self._lock:
            self._awaited.remove(key)
            if key not in self._objects:
                where = self._bucket.at(key)
                try:
                    found = self._bucket.get(key, _WHOLE_BYTES)
                except DamagedRemoteError as error:
                    what = "the server sends all of it in place of a range, which is too much"
                    raise NoRangesError.at(where, what, size=error.facts["size"]) from None
                if found is None:
                    raise FileNotFoundError(errno.ENOENT, "no such object", where)
                for each in [*self._objects][:-1]:
                    if each not in self._awaited:
                        del self._objects[each]
                self._objects[key] = memoryview(found[0])
            return self._objects[key]


def _no_bucket(url: str) -> NotARemoteError:
    what = "there is no such bucket"
    advice = "check its name; if it is right, create the bucket with its provider's own tools"
    return NotARemoteError(f"{url}: {what}; {advice}", path=url)


def _open_store(url: str, *, sending: bool, once: bool) -> ObjectStore:
    check_environment(url)
    # A connection that has gone silent is given up long before a slow one is. What is being sent
    # is no silence, but obstore cannot tell.
    client: Any = {"timeout": f"{_SENDING_S}s", "connect_timeout": "10s"}
    if not sending:
        client |= {"timeout": "600s", "read_timeout": f"{_SILENCE_S}s"}
    if allows_http(url):
        client["allow_http"] = True
    # It counts from the first attempt: one that fails late must be sent again, too.
    retrying = timedelta(seconds=2 * _SENDING_S if sending else 120)
    retry: Any = {"max_retries": 0 if once else _RETRIES, "retry_timeout": retrying}
    try:
        return from_url(url, client_options=client, retry_config=retry)
    except (exceptions.BaseError, ValueError) as error:
        if "Account must be specified" in str(error):
            raise RemoteAccessError.at(url, "no account is named") from None
        kind = RemoteAccessError if is_about_keys(str(error)) else RemoteUrlError
        raise kind.at(url, scrubbed(str(error))) from None
    except BaseException as error:
        raise_panic(url, error)
        raise
