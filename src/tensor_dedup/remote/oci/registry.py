"""A repository in an OCI registry, as the distribution specification describes it.

It has manifests, under tags and digests, and blobs, under digests. A blob is read in ranges, and
sent in one request or, if the registry refuses so much at once, in chunks.
"""

import errno
import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import urlencode, urljoin, urlsplit

from tensor_dedup.remote.buckets import too_large
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    NoRangesError,
    RemoteUnreachableError,
    RemoteUrlError,
)
from tensor_dedup.remote.oci.connection import (
    ATTEMPTS,
    Answer,
    Body,
    BrokenOffError,
    RegistryConnection,
    wait_after,
)

SCHEME: Final = "oci://"
MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
INDEX: Final = "application/vnd.oci.image.index.v1+json"
# What `docker push` makes; who does not accept it is answered with a form without media types.
_DOCKER: Final = "application/vnd.docker.distribution.manifest"
_ACCEPTED: Final = f"{MANIFEST}, {INDEX}, {_DOCKER}.v2+json, {_DOCKER}.list.v2+json"
_BYTES: Final = {"Content-Type": "application/octet-stream"}
# What every registry takes at least.
MANIFEST_BYTES: Final = 4 << 20
# GitHub's registry takes no larger chunk. Elsewhere so small ones are slow: object storage behind a
# registry takes parts of 5 MiB at least.
_PART_BYTES: Final = 4 << 20
# A chunk is in memory; what a registry says that it takes at least is believed up to this.
_MOST_PART_BYTES: Final = 64 << 20
_HOST: Final = re.compile(r"[A-Za-z0-9.-]+(:[0-9]+)?|\[[0-9A-Fa-f:]+\](:[0-9]+)?")
_PART: Final = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY: Final = re.compile(f"{_PART}(/{_PART})*")
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_PLAIN: Final = re.compile(r"[A-Za-z0-9._/:-]*")
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ArtifactName:
    """The parts of the URL of an artifact.

    The URL is `oci://HOST/REPOSITORY:TAG` or `oci://HOST/REPOSITORY@sha256:...`; `reference` is the
    tag or the digest.
    """

    host: str
    repository: str
    reference: str

    @classmethod
    def parse(cls, url: str) -> "ArtifactName":
        """Parse the URL of an artifact. Without a tag or a digest, the tag is `latest`.

        Raises:
            RemoteUrlError: The text is not the URL of an artifact, or contains a credential.
        """
        host, _, path = url.removeprefix(SCHEME).partition("/")
        if "@" in host:
            what = "a user or a password in it may be a secret"
            raise RemoteUrlError.at(f"{SCHEME}{host.rpartition('@')[2]}/{path}", what)
        named, _, digest = path.partition("@")
        repository, _, tag = named.partition(":")
        reference = digest or tag or "latest"
        form = _DIGEST if digest else _TAG
        fits = _HOST.fullmatch(host) and _REPOSITORY.fullmatch(repository)
        if not fits or not form.fullmatch(reference):
            what = "it is no artifact; write oci://REGISTRY/REPOSITORY:TAG, in lower case"
            # What is wrong in it may be a secret that stands in a wrong place.
            plain = _PLAIN.fullmatch(path) is not None
            shown = f"{host if _HOST.fullmatch(host) else '...'}/{path if plain else '...'}"
            raise RemoteUrlError.at(f"{SCHEME}{shown}", what)
        return cls(host, repository, reference)

    @property
    def is_pinned(self) -> bool:
        """Whether `reference` is a digest. A tag, in contrast, may change."""
        return ":" in self.reference

    @property
    def url(self) -> str:
        """The full URL, with the tag or the digest."""
        mark = "@" if self.is_pinned else ":"
        return f"{SCHEME}{self.host}/{self.repository}{mark}{self.reference}"


def is_digest(text: str) -> bool:
    """Return whether `text` is a SHA-256 digest in the form `sha256:...`."""
    return _DIGEST.fullmatch(text) is not None


def digest_of(blob: bytes) -> str:
    """Return the digest by which registries name `blob`."""
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


class RegistryRepository:
    """A repository in an OCI registry, with connections to the registry. Safe from any thread.

    Use the object as a context manager, which closes the connections at the end.

    Raises:
        RemoteUnreachableError: From any method, if the registry does not answer or its answer
            cannot be used.
        RemoteAccessError: From any method, if the credentials are missing or refused.
    """

    def __init__(self, name: ArtifactName) -> None:
        """Open the repository of the artifact `name`; no request is sent yet.

        Raises:
            NotInstalledError: The package requests, of the extra `oci`, is not installed.
            RemoteAccessError: A file with credentials cannot be read.
        """
        self.name = name
        self._connection = RegistryConnection(name.url, name.host, f"/v2/{name.repository}/")
        self._request = self._connection.request
        self.traffic = self._connection.traffic
        # Whether it has refused a blob in one request.
        self._takes_parts_only = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections to the registry."""
        self._connection.close()

    def at(self, reference: str) -> str:
        """Return the URL of a manifest or a blob in this repository, for messages.

        `reference` is a tag or a digest.
        """
        mark = "@" if ":" in reference else ":"
        return f"{SCHEME}{self.name.host}/{self.name.repository}{mark}{reference}"

    # --- manifests

    def manifest(self, reference: str) -> bytes | None:
        """Return the manifest or index with a tag or a digest, or None if there is none.

        Raises:
            DamagedRemoteError: The bytes do not match the requested digest, or are too many.
        """
        path, where, limit = f"manifests/{reference}", self.at(reference), 4 * MANIFEST_BYTES
        for attempt in range(ATTEMPTS):
            blob = b""
            with self._request("GET", path, {"Accept": _ACCEPTED}, stream=True) as answer:
                if answer.status == 404:
                    return None
                answer.check(200, where)
                try:
                    for chunk in answer.chunks(where):
                        blob += chunk
                        if len(blob) > limit:
                            raise too_large(where, len(blob), limit)
                    break
                except BrokenOffError as error:
                    wait_after(attempt, error)
        if ":" in reference and digest_of(blob) != reference:
            raise DamagedRemoteError.at(where, f"its bytes have the digest {digest_of(blob)}")
        return blob

    def put_manifest(self, reference: str, media_type: str, blob: bytes) -> bool:
        """Write a manifest under a tag or a digest.

        A manifest may have a `subject`, which is another manifest. Returns whether the registry now
        lists this manifest among those that refer to its subject.
        """
        media = {"Content-Type": media_type}
        answer = self._request("PUT", f"manifests/{reference}", media, Body.of(blob))
        answer.check(201, self.at(reference))
        return "OCI-Subject" in answer.headers

    # --- blobs

    def _blob_path(self, digest: str) -> str:
        """The path of a blob. A manifest names it, and must not lead to another path of the host.

        Raises:
            DamagedRemoteError: The text is not a digest.
        """
        if not is_digest(digest):
            raise DamagedRemoteError.at(self.name.url, f"{digest[:80]!r} is no digest of SHA-256")
        return f"blobs/{digest}"

    def has_blob(self, digest: str) -> bool:
        """Return whether the repository has the blob with this digest."""
        answer = self._request("HEAD", self._blob_path(digest))
        if answer.status == 404:
            return False
        answer.check(200, self.at(digest))
        return True

    def blob(self, digest: str, limit: int) -> bytes:
        """Return the content of a small blob.

        Raises:
            DamagedRemoteError: The repository does not have the blob, or the blob does not match
                its digest or has more than `limit` bytes.
        """
        return b"".join(self.chunks(digest, limit))

    def blob_range(self, digest: str, start: int, stop: int) -> Iterator[bytes]:
        """Iterate over the bytes of a blob from `start` to `stop` in chunks, unverified.

        They are fewer if the blob ends earlier.

        Raises:
            FileNotFoundError: There is no such blob.
            NoRangesError: The registry sends whole blobs only.
            RemoteUnreachableError: The registry does not answer, or sends more than the range.
        """
        left = stop - start
        for chunk in self._read(digest, start, stop):
            left -= len(chunk)
            if left < 0:
                what = f"a range of {stop - start} bytes was answered with more"
                raise RemoteUnreachableError.at(self.at(digest), what)
            yield chunk

    def chunks(
        self, digest: str, limit: int, held: Iterable[bytes | memoryview] = ()
    ) -> Iterator[bytes]:
        """Iterate over a blob in chunks, and compare the digest at the end.

        `held` has the first bytes of the blob, from an earlier attempt. They count in the digest,
        but are neither requested nor returned.

        Raises:
            DamagedRemoteError: The bytes do not match the digest or are more than `limit`, or there
                is no blob with this digest.
        """
        hasher, size = hashlib.sha256(), 0
        for part in held:
            hasher.update(part)
            size += len(part)
        try:
            for chunk in self._read(digest, size) if not size or size < limit else ():
                hasher.update(chunk)
                size += len(chunk)
                if size > limit:
                    raise too_large(self.at(digest), size, limit)
                yield chunk
        except FileNotFoundError:
            raise DamagedRemoteError.at(self.at(digest), "this layer is gone") from None
        if digest != f"sha256:{hasher.hexdigest()}":
            raise DamagedRemoteError.at(self.at(digest), "its bytes do not have this digest")

    def _read(self, digest: str, start: int, stop: int | None = None) -> Iterator[bytes]:
        """The bytes of a blob. Where an answer breaks off, the rest is asked for.

        Without `stop` they are all from `start` on; a registry without ranges sends those before,
        too, which are left out.
        """
        path, where = self._blob_path(digest), self.at(digest)
        for attempt in range(ATTEMPTS):
            if start == stop:
                return  # it broke off after the last byte; an empty range is no valid one
            last = "" if stop is None else stop - 1
            headers = {"Range": f"bytes={start}-{last}"} if start or stop else {}
            with self._request("GET", path, headers, stream=True) as answer:
                if answer.status == 404:
                    raise FileNotFoundError(errno.ENOENT, "no such blob", where)
                if answer.status == 416 and headers:
                    return  # it ends before, or has broken off after its last byte
                if answer.status == 200 and stop is not None:
                    raise NoRangesError.at(where, "a range was answered with all of it")
                answer.check(206 if headers and answer.status == 206 else 200, where)
                known = start if answer.status == 200 else 0
                try:
                    for chunk in answer.chunks(where):
                        new = chunk[known:]
                        known -= len(chunk) - len(new)
                        start += len(new)
                        if new:
                            yield new
                    return
                except BrokenOffError as error:
                    wait_after(attempt, error)

    def upload(self, digest: str, content: Body, mount_from: str | None = None) -> bool:
        """Upload a blob that the repository lacks; return whether its bytes were sent.

        They are not sent if the registry can take the blob from its own copy in the repository
        `mount_from`. What the registry refuses in one request is sent in chunks, and so is what
        breaks off: some refuse a large request by hanging up.
        """
        wanted = {"mount": digest} | ({"from": mount_from} if mount_from else {})
        is_small, in_parts = len(content) <= _PART_BYTES, self._takes_parts_only
        for attempt in range(ATTEMPTS):
            begun = self._request("POST", f"blobs/uploads/?{urlencode(wanted)}")
            if begun.status == 201:
                return False
            begun.check(202, self.at(digest))
            try:
                if is_small or not in_parts:
                    url = self._place(begun, digest, is_end=True)
                    done = self._request("PUT", url, _BYTES, content, attempts=1)
                else:
                    done = self._send_parts(begun, digest, content)
            except RemoteUnreachableError as error:
                if self.has_blob(digest):  # and the answer was lost
                    return True
                wait_after(attempt, error)
                in_parts = True
                continue
            if done.status == 201 or is_small or in_parts:
                done.check(201, self.at(digest))
                return True
            in_parts = self._takes_parts_only = True
        raise AssertionError

    def _send_parts(self, answer: Answer, digest: str, content: Body) -> Answer:
        """Send a blob in chunks, each to where the answer before it says."""
        size, at = _PART_BYTES, 0
        with suppress(ValueError):
            least = int(answer.headers.get("OCI-Chunk-Min-Length", ""))
            size = max(size, min(least, _MOST_PART_BYTES))
        for part in content.in_parts(size):
            headers = {**_BYTES, "Content-Range": f"{at}-{at + len(part) - 1}"}
            url = self._place(answer, digest)
            answer = self._request("PATCH", url, headers, Body.of(part))
            answer.check(202, self.at(digest))
            at += len(part)
        return self._request("PUT", self._place(answer, digest, is_end=True), _BYTES)

    def _place(self, answer: Answer, digest: str, *, is_end: bool = False) -> str:
        """The URL at which an upload goes on, or ends."""
        try:
            place = urljoin(answer.url, answer.headers.get("Location", ""))
            mark = "&" if urlsplit(place).query else "?"
        except ValueError:
            what = "it names no place for an upload that is a URL"
            raise RemoteUnreachableError.at(self.at(digest), what) from None
        return f"{place}{mark}{urlencode({'digest': digest})}" if is_end else place
