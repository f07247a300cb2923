"""Buckets: objects under keys, in a folder, in object storage or behind a plain web server.

All requests to object storage are made in this module. obstore reads credentials from the
environment, and they have no other source. A URL that contains a credential is refused, and
credentials are removed from texts of servers before these appear in a message.
"""

import errno
import json
import os
import re
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

from blake3 import blake3

from tensor_dedup.digest import hand
from tensor_dedup.errors import NotInstalledError, StoreError
from tensor_dedup.remote.answers import ObjectStatus as ObjectStatus
from tensor_dedup.remote.answers import (
    is_about_conditions,
    is_about_credentials,
    is_about_keys,
    is_about_ranges,
    raise_panic,
    status_of,
    version_of,
)
from tensor_dedup.remote.answers import too_large as too_large
from tensor_dedup.remote.environment import allows_http, check_environment
from tensor_dedup.remote.environment import scrubbed as scrubbed
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    NoBucketError,
    NoConditionsError,
    NoRangesError,
    ReadOnlyRemoteError,
    RemoteAccessError,
    RemoteBusyError,
    RemoteUnreachableError,
    RemoteUrlError,
    UnlistedRemoteError,
)
from tensor_dedup.remote.layout import (
    CONTAINER_BYTES,
    MARKER,
    MARKER_LINES,
    PROBE,
    STORE_TITLE,
    TEXT_BYTES,
)
from tensor_dedup.remote.traffic import Traffic as Traffic
from tensor_dedup.store.errors import os_errors
from tensor_dedup.store.files import Files
from tensor_dedup.store.folders import make_folders
from tensor_dedup.suggestions import install_hint

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# What a folder that is a remote holds: the first parts of keys, and what conditions need.
_OF_A_FOLDER: Final = {
    *("FORMAT", "refs", "manifests", "holders", "containers", "tables", "catalog", "trash"),
    *("probe", "tmp", "lock", "identity", "lost+found"),
}
WEB: Final = ("http", "https")
# A tag for `put_if` that no object has. Each service compares one of the two, and refuses a value
# of another form in other words.
NO_TAG: Final = json.dumps({"e_tag": f'"{"0" * 32}"', "version": "9" * 18})
_THREADS: Final = 8
_LOCK_WAIT_S: Final = 60.0
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
# Where a machine in a cloud is asked for its credentials, when the environment has none.
_METADATA: Final = re.compile(r"/latest/(api/token|meta-data)|/metadata/identity|/computeMetadata/")
# So much of an object is held here that has come instead of a range.
_WHOLE_BYTES: Final = 3 * CONTAINER_BYTES
# And of a web server without WebDAV that is asked for a list.
_LISTS_NOTHING: Final = re.compile(r"status code: (4\d\d|501)|decoding PROPFIND")
# So long whole objects are asked for when one has come instead of a range.
_ASK_AGAIN_S: Final = 60.0
# The process that began to use obstore.
_used_by = 0
_In = TypeVar("_In")
_Out = TypeVar("_Out")


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

    def foreign(self) -> str | None:
        """Return the name of a file or folder in the bucket that is not part of a remote, or None.

        Only local folders are searched; other buckets return None.
        """
        return None

    def outer(self) -> str | None:
        """Return the path or URL of a remote or store that contains this bucket, or None.

        * For a local folder, all folders above it are searched.
        * On a server, only a remote is found, and only if the bucket is in one of that remote's own
          folders, such as `refs`.
        * Other buckets return None.
        """
        return None

    @abstractmethod
    def get(self, key: str, limit: int) -> tuple[bytes, str] | None:
        """Return an object's bytes and its tag for `put_if`, or None if there is no object.

        Raises:
            DamagedRemoteError: The object is larger than `limit` bytes.
        """

    def still_has(self, key: str, tag: str) -> bool:
        """Request an object again, and return whether it still has the `tag` that `get` returned.

        Returns False if there is no object any more.
        """
        found = self.get(key, TEXT_BYTES)
        return found is not None and found[1] == tag

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
        """Iterate over the statuses of all objects in the folder `prefix`, as in `refs/`."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete the object under `key`; do nothing if there is no object."""

    def delete_once(self, key: str) -> bool:
        """Delete an object; return whether the deletion is certainly over.

        * True: A single request was sent and answered.
        * False: The first request failed and was repeated. The server may still carry out the first
          one later.
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


class FolderBucket(Bucket):
    """A local folder as a bucket. Conditional writes are safe between processes on one machine."""

    is_local = True

    def __init__(self, root: Path, files: Files) -> None:
        super().__init__(f"file://{root}")
        self._root, self._files = root, files

    @property
    def root(self) -> Path:
        """The path of the folder."""
        return self._root

    def foreign(self) -> str | None:
        # docstring inherited
        names = self._files.listdir(self._root)
        return next((n for n in names if n not in _OF_A_FOLDER and not n.startswith(".")), None)

    def outer(self) -> str | None:
        # docstring inherited; first as it was written, then where links lead
        above = [*self._root.parents, *self._files.resolved(self._root).parents]
        for folder in dict.fromkeys(above):
            with suppress(StoreError):  # what cannot be read is none of ours
                text = FolderBucket(folder, self._files)._read(MARKER, TEXT_BYTES) or b""
                if text.startswith((MARKER_LINES[0].encode(), STORE_TITLE)):
                    return str(folder)
        return None

    def get(self, key: str, limit: int) -> tuple[bytes, str] | None:
        # docstring inherited
        blob = self._read(key, limit)
        self.traffic.add(received=len(blob or b""))
        return None if blob is None else (blob, _tag(blob))

    def _read(self, key: str, limit: int) -> bytes | None:
        files = self._files
        with os_errors(self._root):
            try:
                handle = files.open(self._root / key, "read")
            except (FileNotFoundError, NotADirectoryError):
                return None
            try:
                status = files.status_of(handle)
                if status.kind != "file":
                    return None
                if status.size > limit:
                    raise too_large(self.at(key), status.size, limit)
                blob = bytearray(status.size)
                return bytes(blob[: files.pread(handle, memoryview(blob), 0)])
            finally:
                files.close(handle)

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        # docstring inherited
        files = self._files
        try:
            handle = files.open(self._root / key, "read")
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "no such object", self.at(key)) from None
        with os_errors(self._root):
            try:
                size = max(0, min(stop, files.status_of(handle).size) - start)
                view = memoryview(bytearray(size))
                found = view[: files.pread(handle, view, start)]
            finally:
                files.close(handle)
        self.traffic.add(received=found.nbytes)
        return found

    def head(self, key: str) -> ObjectStatus | None:
        # docstring inherited
        with os_errors(self._root):
            status = self._files.status(self._root / key)
        self.traffic.add()
        if status is None or status.kind != "file":
            return None
        tag = f"{status.mtime_ns}-{status.inode}-{status.size}"
        return ObjectStatus(key, status.size, tag, status.mtime_ns / 1e9)

    def put(self, key: str, chunks: Sequence[memoryview] | Iterator[memoryview]) -> None:
        # docstring inherited
        self.traffic.add(sent=self._write(key, chunks))

    def _write(self, key: str, chunks: Iterable[memoryview]) -> int:
        files, path, at = self._files, self._root / key, 0
        with os_errors(self._root):
            make_folders(files, path.parent)
            make_folders(files, self._root / "tmp")
            tmp = self._root / "tmp" / files.token()
            handle = files.open(tmp, "create")
            try:
                for chunk in chunks:
                    files.pwrite(handle, chunk, at)
                    files.begin_writing(handle, at, chunk.nbytes)
                    at += chunk.nbytes
                files.fsync(handle)
                files.rename(tmp, path)
            except BaseException:
                files.close(handle)
                if files.status(tmp) is not None:
                    files.unlink(tmp)
                raise
            files.close(handle)
        self.settle(key)
        return at

    def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
        # docstring inherited
        with self._locked():
            held = self._read(key, max(len(data), 1 << 30))
            if (None if held is None else _tag(held)) != tag:
                self.traffic.add()
                return False
            self.traffic.add(sent=self._write(key, [memoryview(data)]))
            return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        files = self._files
        with os_errors(self._root):
            make_folders(files, self._root)
            handle = files.open(self._root / "lock", "lock")
        try:
            if not files.flock(handle, exclusive=True, wait_s=_LOCK_WAIT_S):
                raise RemoteBusyError.at(self.url, f"its lock was held for {_LOCK_WAIT_S:g} s")
            yield
        finally:
            files.close(handle)

    def list(self, prefix: str) -> Iterator[ObjectStatus]:
        # docstring inherited
        folder = prefix.rstrip("/")
        with os_errors(self._root):
            names = self._files.listdir(self._root / folder)
        for name in names:
            key = f"{folder}/{name}"
            with os_errors(self._root):
                status = self._files.status(self._root / key)
            if status is not None and status.kind == "folder":
                yield from self.list(f"{key}/")
            elif (found := self.head(key)) is not None:
                yield found

    def delete(self, key: str) -> None:
        # docstring inherited
        self.traffic.add()
        with os_errors(self._root):
            try:
                self._files.unlink(self._root / key)
            except FileNotFoundError:
                return
            self._files.sync_folder((self._root / key).parent)

    def settle(self, key: str) -> None:
        # docstring inherited
        parent = (self._root / key).parent
        with os_errors(self._root):
            # Whoever made the folder may have died before its name was durable.
            for folder in (parent, parent.parent):
                self._files.sync_folder(folder)


def _tag(blob: bytes) -> str:
    return blake3(blob).hexdigest()


class ServerBucket(Bucket):
    """A bucket on a server: S3-compatible, Google, Azure, or a plain web server.

    All requests go through obstore, which repeats failed ones a few times; `traffic` counts a
    repeated request once.
    """

    def __init__(
        self, url: str, *, store: "ObjectStore | None" = None, once: "ObjectStore | None" = None
    ) -> None:
        super().__init__(url)
        self._store: ObjectStore = store or _open_store(url)
        self._sending_store: ObjectStore = store or _open_store(url, sending=True)
        self._once_store: ObjectStore = once or store or _open_store(url, retries=0)
        sending_once = once or store or _open_store(url, sending=True, retries=0)
        self._sending_once_store: ObjectStore = sending_once
        # The last objects that came whole where a range was asked for: two, as a pull is in one
        # container and already asks for the next, and others that somebody waits for.
        self._wholes: dict[str, memoryview] = {}
        self._wholes_lock, self._awaited = threading.Lock(), list[str]()
        self._whole_until = 0.0
        self._asking, self._tried = threading.Lock(), False
        self.read_only = urlsplit(url).scheme in WEB

    @contextmanager
    def _translated(self, key: str, *expected: type[Exception]) -> Iterator[None]:
        """Turn obstore's errors into ours, but for those that are `expected` as an answer."""
        from obstore import exceptions

        self._check_not_forked(key)
        try:
            yield
        except expected:
            raise
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                raise NoBucketError.at(self.url, "there is no such bucket") from None
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

    def outer(self) -> str | None:
        # docstring inherited; a remote has all of its objects below names that we know
        parts = self.url.split("/")
        for number in range(3, len(parts)):
            if parts[number] in _OF_A_FOLDER:
                above = ServerBucket("/".join(parts[:number]))
                above.traffic = self.traffic
                with suppress(StoreError):  # what may not be read is none of ours
                    found = above.get(MARKER, TEXT_BYTES)
                    if found is not None and found[0].startswith(MARKER_LINES[0].encode()):
                        return above.url
        return None

    def still_has(self, key: str, tag: str) -> bool:
        # docstring inherited
        from obstore.exceptions import PreconditionError

        try:
            found = self._get(key, TEXT_BYTES, json.loads(tag).get("e_tag"), PreconditionError)
        except PreconditionError:
            self.traffic.add()
            return False
        return found is not None and found[1] == tag

    def get(self, key: str, limit: int) -> tuple[bytes, str] | None:
        # docstring inherited
        return self._get(key, limit)

    def _get(
        self, key: str, limit: int, e_tag: str | None = None, *expected: type[Exception]
    ) -> tuple[bytes, str] | None:
        import obstore

        options: Any = None if e_tag is None else {"if_match": e_tag}
        try:
            with self._translated(key, *expected):
                found = obstore.get(self._store, key, options=options)
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
        import obstore

        if start >= stop:  # of an object that is empty; obstore refuses to ask
            return memoryview(b"")
        if self._sends_wholes():
            return self._whole(key)[start:stop]
        try:
            with self._translated(key):
                found = memoryview(obstore.get_range(self._store, key, start=start, end=stop))
        except RemoteUnreachableError as error:
            if self._came_whole(error):
                return self._whole(key)[start:stop]
            if "416 " not in str(error):
                raise
            found = memoryview(b"")  # it ends before the range begins
        self.traffic.add(received=found.nbytes)
        return found

    def stream_range(
        self, key: str, start: int, stop: int, arrived: Callable[[memoryview], None]
    ) -> None:
        # docstring inherited
        import obstore

        if self._sends_wholes():
            super().stream_range(key, start, stop, arrived)
            return
        got = 0
        try:
            with self._translated(key):
                found = obstore.get(self._store, key, options={"range": (start, stop)})
                for chunk in found.stream(_CHUNK_BYTES):
                    arrived(memoryview(chunk))
                    got += len(chunk)
        except RemoteUnreachableError as error:
            if got or not (self._came_whole(error) or "416 " in str(error)):
                raise
            super().stream_range(key, start, stop, arrived)
        else:
            self.traffic.add(received=got)

    def _sends_wholes(self) -> bool:
        """Whether ranges are answered with whole objects; a web server is tried, by one thread.

        With a small object: of a container megabytes are under way before its answer is refused.
        """
        with self._asking:
            if self.read_only and not self._tried and time.monotonic() >= self._whole_until:
                import obstore

                self._tried = True
                self.traffic.add()
                try:
                    with self._translated(MARKER):
                        obstore.get_range(self._store, MARKER, start=0, end=1)
                except RemoteUnreachableError as error:
                    return self._came_whole(error)
                except (FileNotFoundError, StoreError):
                    pass  # what is asked for next fails, too, or says what there is to say
            return time.monotonic() < self._whole_until

    def _came_whole(self, error: StoreError) -> bool:
        """Whether it is for that that a range failed: then none is asked for, for a while.

        It may have been a proxy's answer, and that for once.
        """
        if not is_about_ranges(str(error)):
            return False
        self._whole_until, self._tried = time.monotonic() + _ASK_AGAIN_S, False
        return True

    def _whole(self, key: str) -> memoryview:
        """An object that came without a range, if it is not too large to be held here."""
        self._awaited.append(key)
        with self._wholes_lock:
            self._awaited.remove(key)
            if key not in self._wholes:
                try:
                    found = self.get(key, _WHOLE_BYTES)
                except DamagedRemoteError as error:
                    what = "the server sends all of it in place of a range, which is too much"
                    size = error.facts["size"]
                    raise NoRangesError.at(self.at(key), what, size=size) from None
                if found is None:
                    raise FileNotFoundError(errno.ENOENT, "no such object", self.at(key))
                for each in [*self._wholes][:-1]:
                    if each not in self._awaited:
                        del self._wholes[each]
                self._wholes[key] = memoryview(found[0])
            return self._wholes[key]

    def head(self, key: str) -> ObjectStatus | None:
        # docstring inherited
        import obstore

        self.traffic.add()
        try:
            with self._translated(key):
                return status_of(obstore.head(self._store, key))
        except FileNotFoundError:
            return None

    def put(self, key: str, chunks: Sequence[memoryview] | Iterator[memoryview]) -> None:
        # docstring inherited
        import obstore

        self.check_writable()
        if isinstance(chunks, Sequence):
            data = chunks[0] if len(chunks) == 1 else memoryview(b"".join(chunks))
            store = self._store if data.nbytes <= _SHORT_BYTES else self._sending_store
            with self._translated(key):
                obstore.put(store, key, data, use_multipart=False)
            self.traffic.add(sent=data.nbytes)
            return
        sent = 0

        def counted() -> Iterator[memoryview]:
            nonlocal sent
            for chunk in chunks:
                sent += chunk.nbytes
                yield chunk

        with self._translated(key):
            obstore.put(
                self._sending_store,
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
        import obstore

        self.check_writable()
        is_short = data.nbytes <= _SHORT_BYTES
        try:
            with self._translated(key):
                store = self._once_store if is_short else self._sending_once_store
                obstore.put(store, key, data, use_multipart=False)
        except RemoteUnreachableError:
            self.put(key, [data])
            return False
        self.traffic.add(sent=data.nbytes)
        return True

    def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
        # docstring inherited
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        self.check_writable()
        self.traffic.add(sent=len(data))
        try:
            with self._translated(key, AlreadyExistsError, PreconditionError):
                mode: Any = "create" if tag is None else json.loads(tag)
                obstore.put(self._store, key, data, mode=mode)
        except (AlreadyExistsError, PreconditionError, FileNotFoundError):
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
        import obstore

        try:
            with self._translated(prefix):
                for batch in obstore.list(self._store, prefix, chunk_size=1000):
                    self.traffic.add()
                    yield from map(status_of, batch)
        except (RemoteUnreachableError, RemoteAccessError) as error:
            if self.read_only and _LISTS_NOTHING.search(str(error)):
                what = "a web server of plain files cannot be listed"
                raise UnlistedRemoteError.at(self.url, what) from None
            raise

    def delete(self, key: str) -> None:
        # docstring inherited
        import obstore

        self.check_writable()
        self.traffic.add()
        try:
            with self._translated(key):
                obstore.delete(self._store, key)
        except FileNotFoundError:
            return

    def delete_once(self, key: str) -> bool:
        # docstring inherited
        import obstore

        self.check_writable()
        self.traffic.add()
        try:
            with self._translated(key):
                obstore.delete(self._once_store, key)
        except FileNotFoundError:
            pass
        except StoreError:
            self.delete(key)
            return False
        return True


def _open_store(url: str, *, sending: bool = False, retries: int = 5) -> "ObjectStore":
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as error:
        what = f"needs obstore, which is not installed; {install_hint('remote')}"
        raise NotInstalledError(f"{url}: {what}", url=url) from error
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
    retry: Any = {"max_retries": retries, "retry_timeout": retrying}
    try:
        return from_url(url, client_options=client, retry_config=retry)
    except (BaseError, ValueError) as error:
        if "Account must be specified" in str(error):
            what = "no account is named"
            raise RemoteAccessError.at(url, what) from None
        kind = RemoteAccessError if is_about_keys(str(error)) else RemoteUrlError
        raise kind.at(url, scrubbed(str(error))) from None
    except BaseException as error:
        raise_panic(url, error)
        raise
