"""Servers of S3's protocol that keep all versions of an object, and whose conditions are atomic.

`memory` is one whose clock a test can put forward, `moto` and `weed` (SeaweedFS) are others'.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from remote_runs import real_servers, remotes
from remote_runs.remotes import Chunks, MemoryBucket
from remote_runs.s3_faults import MemoryS3, RealS3, Upstream

# What a key has held, oldest first: the MD5 of an object in hexadecimal, or None for a deletion.
History = dict[str, list[str | None]]


@dataclass(frozen=True)
class VersionedServer:
    """A server with a bucket `bucket`; `forward` puts its clock forward by seconds."""

    upstream: Upstream
    history: Callable[[str], History]
    forward: Callable[[float], None] | None = None


class _Kept(MemoryBucket):
    """Objects in memory, and all that has been written. Its clock goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.written: History = {}
        self._started = time.monotonic()

    @property
    def clock(self) -> float:
        return self._ahead + time.monotonic() - self._started

    @clock.setter
    def clock(self, value: float) -> None:
        self._ahead, self._started = value, time.monotonic()

    def put(self, key: str, chunks: Chunks) -> None:
        blob = b"".join(chunks)
        with self._guard:
            super().put(key, [memoryview(blob)])
            self.written.setdefault(key, []).append(hashlib.md5(blob).hexdigest())

    def delete(self, key: str) -> None:
        with self._guard:
            super().delete(key)
            self.written.setdefault(key, []).append(None)

    def history(self, prefix: str) -> History:
        with self._guard:
            return {key: [*held] for key, held in self.written.items() if key.startswith(prefix)}

    def forward(self, seconds: float) -> None:
        with self._guard:
            self.clock += seconds


@contextmanager
def memory(root: Path) -> Iterator[VersionedServer]:
    """A server in this process, whose clock can be put forward."""
    bucket = _Kept()
    yield VersionedServer(MemoryS3(bucket), bucket.history, bucket.forward)


@contextmanager
def moto(root: Path) -> Iterator[VersionedServer]:
    """Moto behind a gate that lets one write through at a time: alone it checks, then writes."""
    with remotes.s3() as server:
        yield _versioned(server.port)


@contextmanager
def weed(root: Path) -> Iterator[VersionedServer]:
    """SeaweedFS, whose conditional writes are atomic."""
    with real_servers.weed(root) as server:
        yield _versioned(server.port)


def _versioned(port: int) -> VersionedServer:
    import boto3  # type: ignore[import-untyped]  # no stubs are installed

    environment = real_servers.s3_environment(port)
    client = boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        region_name=environment["AWS_REGION"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
    )
    client.put_bucket_versioning(Bucket="bucket", VersioningConfiguration={"Status": "Enabled"})

    def history(prefix: str) -> History:
        found: History = {}
        pages = client.get_paginator("list_object_versions").paginate(
            Bucket="bucket", Prefix=prefix
        )
        for page in pages:
            assert not page.get("DeleteMarkers") or prefix != "refs/", "no reference is deleted"
            for version in page.get("Versions", ()):  # the newest of a key first
                held = found.setdefault(version["Key"], [])
                assert not (version["IsLatest"] and held), version
                held.append(version["ETag"].strip('"'))
        return {key: held[::-1] for key, held in found.items()}

    return VersionedServer(RealS3(port), history)


SERVERS = {"memory": memory, "moto": moto, "weed": weed}
