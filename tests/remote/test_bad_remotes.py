"""Remotes that are damaged, hostile or something else: a typed error, and the store stays whole."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import msgspec
import pytest

from remote_runs import remotes
from remote_runs.remotes import MemoryBucket, Proxy
from remote_runs.s3_faults import FaultyProxy, MemoryS3, Request, Response, client
from store_runs.stores import content, noise, open_store, safetensors, stored, three, u8, write
from tensor_dedup import Store
from tensor_dedup.digest import digest
from tensor_dedup.errors import NOBODY_THERE, WRONG_USE, StoreError, TensorDedupError
from tensor_dedup.remote import Remote, environment, layout
from tensor_dedup.remote.buckets import ObjectStatus
from tensor_dedup.remote.catalog import (
    PREFIX_BYTES,
    CatalogChange,
    catalog_of,
    commit,
    read_catalog,
)
from tensor_dedup.remote.environment import scrubbed
from tensor_dedup.remote.errors import (
    CorruptRemoteTensorError,
    DamagedRemoteError,
    MissingRemoteError,
    NoRangesError,
    NotARemoteError,
    ReadOnlyRemoteError,
    RemoteAccessError,
    RemoteUnreachableError,
    RemoteUrlError,
    UnlistedRemoteError,
)
from tensor_dedup.store.errors import EscapingPathError, NewerFormatError, NoSpaceError
from tensor_dedup.store.files import Handle, RealFiles
from tensor_dedup.store.format import frames, manifests
from tensor_dedup.store.format.manifests import FileEntry, Manifest, Piece, encode_manifest


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    return three(tmp_path)


@pytest.fixture
def bucket(tmp_path: Path, paths: dict[str, Path]) -> MemoryBucket:
    """A remote with three checkpoints, of which one has a delta."""
    found = MemoryBucket()
    store = open_store(tmp_path / "full")
    for name, path in paths.items():
        store.import_(path, name, compress="auto")
        store.push(Remote(found), name)
    return found


@pytest.fixture
def store(tmp_path: Path, paths: dict[str, Path]) -> Store:
    """Another store, with a checkpoint of its own."""
    found = open_store(tmp_path / "here")
    found.import_(paths["tiny"], "mine")
    return found


def lie(bucket: MemoryBucket, digests: Sequence[bytes]) -> str:
    """Make the catalog say that a container holds these pieces; its URL."""
    catalog = catalog_of(bucket)
    liar, *others = sorted(catalog.containers.values(), key=lambda entry: -len(entry.alone))
    more = b"".join(digest[:PREFIX_BYTES] for digest in digests)
    false = [msgspec.structs.replace(liar, alone=liar.alone + more), *others]
    commit(bucket, catalog, lambda now: CatalogChange((), false, now.trash, now.damaged))
    return bucket.at(f"containers/{liar.name.hex()[:2]}/{liar.name.hex()}.{liar.kind}")


def spoil(bucket: MemoryBucket, key: str, change: Callable[[bytes], bytes]) -> None:
    blob, tag, when = bucket.objects[key]
    assert change(blob) != blob
    bucket.objects[key] = (change(blob), tag, when)


def flipped(blob: bytes) -> bytes:
    middle = len(blob) // 3
    return blob[:middle] + bytes([blob[middle] ^ 4]) + blob[middle + 1 :]


SPOILS: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": flipped,
    "half of it": lambda blob: blob[: len(blob) // 2],
    "nothing": lambda _: b"",
    "something else": lambda blob: noise(7, len(blob)),
    "more": lambda blob: blob + b"\n",
}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("spoilt", SPOILS)
def test_no_spoilt_object_puts_a_wrong_byte_into_a_store(
    tmp_path: Path, bucket: MemoryBucket, spoilt: str, every: bool
) -> None:
    """Short runs spoil some objects in every way, and of the others each in every other way."""
    originals, refused = dict(bucket.objects), 0
    some = sorted(originals)[:: 1 if every else 2]
    if not every and [*SPOILS].index(spoilt) % 2:
        some = sorted(originals)[1::2]
    some = sorted({*some, "FORMAT", "catalog/HEAD", "refs/base"})
    assert {*some} <= originals.keys()
    for number, key in enumerate(some):
        bucket.objects = dict(originals)
        spoil(bucket, key, SPOILS[spoilt])
        other = open_store(tmp_path / f"other-{number}")
        for name in ("base", "tune", "tiny"):
            try:
                other.pull(Remote(bucket), name)
            except StoreError as error:
                refused += "memory://test" in str(error)
                assert name not in other.names()
        for name in other.names():
            assert stored(other, name) == content(tmp_path / name)
        assert other.verify(full=True).faults == []
    assert refused >= len([key for key in some if key.startswith(("refs/", "manifests/"))])


def test_a_wrong_byte_is_named_with_its_tensor(bucket: MemoryBucket, store: Store) -> None:
    largest = max(
        (key for key in bucket.objects if key.startswith("containers/")),
        key=lambda key: len(bucket.objects[key][0]),
    )
    spoil(bucket, largest, flipped)
    with pytest.raises(CorruptRemoteTensorError, match="remote verify URL --full") as caught:
        store.pull(Remote(bucket), "base")
    assert caught.value.facts["tensors"] == ["a"]
    assert bucket.at(largest) in str(caught.value)
    assert store.names() == ["mine"]
    assert store.verify(full=True).faults == []


def test_a_container_that_is_gone_is_named(bucket: MemoryBucket, store: Store) -> None:
    for key in [k for k in bucket.objects if k.startswith("containers/")]:
        del bucket.objects[key]
    with pytest.raises(MissingRemoteError, match="this container is gone, with"):
        store.pull(Remote(bucket), "base")
    assert store.names() == ["mine"]


def test_a_catalog_that_lies_is_found_out_and_put_right(
    tmp_path: Path, paths: dict[str, Path]
) -> None:
    """A pull goes by tables in the end; what a push has left out, since it was said to be there,
    a pull names, verify finds, and a push that replaces sends."""
    bucket, full, other = MemoryBucket(), open_store(tmp_path / "full"), open_store(tmp_path / "o")
    for name in ("base", "tune"):
        full.import_(paths[name], name)
    full.push(Remote(bucket), "base")
    with full.checkpoint("tune") as checkpoint:
        where = lie(bucket, [bytes.fromhex(tensor.digest) for tensor in checkpoint])
    other.pull(Remote(bucket), "base")
    full.push(Remote(bucket), "tune")
    with pytest.raises(MissingRemoteError, match=r"no container there holds.*--replace"):
        other.pull(Remote(bucket), "tune")
    assert other.names() == ["base"]
    assert other.verify(full=True).fine
    found = Remote(bucket).verify()
    assert where in [fault.url for fault in found.faults if "its table does not" in fault.what]
    assert {name for fault in found.faults for name in fault.affected} == {"tune"}
    full.push(Remote(bucket), "tune", replace=True)
    assert Remote(bucket).verify(full=True).fine
    other.pull(Remote(bucket), "tune")
    assert stored(other, "tune") == content(paths["tune"])


def put_manifest(
    bucket: MemoryBucket, name: str, files: list[FileEntry], pieces: list[Piece]
) -> None:
    manifest, blobs = manifests.build(files, pieces)
    for part, blob in blobs.items():
        bucket.put(layout.manifest_key(part), [memoryview(blob)])
    bucket.put(layout.ref_key(name), [memoryview(layout.reference(name, manifest))])


@pytest.mark.parametrize("path", ["../outside", "/etc/x", "a/../../b", ""])
def test_a_path_that_leads_out_is_refused(bucket: MemoryBucket, store: Store, path: str) -> None:
    piece = Piece(bytes.fromhex(digest(b"")), 0)
    put_manifest(bucket, "evil", [FileEntry(path, 0, 1, "")], [piece])
    with pytest.raises((DamagedRemoteError, EscapingPathError)):
        store.pull(Remote(bucket), "evil")
    assert store.names() == ["mine"]


def test_a_piece_that_says_it_is_larger_is_refused(bucket: MemoryBucket, store: Store) -> None:
    found = Remote(bucket).read("base")
    tensor = next(piece for piece in found.pieces if piece.name == "a")
    wrong = Piece(tensor.digest, 1 << 60, "a", "U8", (1 << 60,))
    put_manifest(bucket, "evil", [FileEntry("m.safetensors", 1 << 60, 1, "")], [wrong])
    with pytest.raises(DamagedRemoteError, match="expected"):
        store.pull(Remote(bucket), "evil")
    assert store.names() == ["mine"]


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("larger", "[45]000 bytes of .* [54]000 expected"),
        ("smaller", "[43]000 bytes of .* [34]000 expected"),
        ("empty", "is no digest of 0 bytes"),
        ("twice", "4000 bytes of .* 3000 expected"),
        ("nothing", "5 bytes of .* 0 expected"),
    ],
)
def test_a_piece_of_another_size_than_its_digest_s_is_refused(
    tmp_path: Path, bucket: MemoryBucket, store: Store, wrong: str, says: str, is_here: bool
) -> None:
    """Be the piece here, and nothing asked of the tables there, or not."""
    data = {"model.safetensors": safetensors(u8(w=noise(3, 4000))), "empty": b""}
    full = open_store(tmp_path / "another")
    full.import_(write(tmp_path / "w", data), "w")
    full.push(Remote(bucket), "w")
    if is_here:
        store.pull(Remote(bucket), "w")
    names = store.names()
    pieces = list(Remote(bucket).read("w").pieces)
    at = next(n for n, piece in enumerate(pieces) if piece.name == "w")
    right = pieces[at]
    sizes = {"larger": 5000, "smaller": 3000, "empty": 0, "twice": 3000, "nothing": 5}
    false = msgspec.structs.replace(right, nbytes=sizes[wrong])
    if wrong == "nothing":
        false = Piece(bytes.fromhex(digest(b"")), 5, "w", "U8", (5,))
    pieces = [false, right] if wrong == "twice" else [false]
    nbytes = sum(piece.nbytes for piece in pieces)
    put_manifest(bucket, "evil", [FileEntry("m.bin", nbytes, len(pieces), "")], pieces)
    with pytest.raises(DamagedRemoteError, match=rf"/.*{says}.*remote verify") as caught:
        store.pull(Remote(bucket), "evil")
    assert caught.value.facts["tensors"] == ["w"]
    assert store.names() == names
    assert store.verify(full=True).fine


def test_a_reference_of_another_name_is_refused(bucket: MemoryBucket, store: Store) -> None:
    bucket.objects["refs/mine"] = bucket.objects["refs/base"]
    with pytest.raises(DamagedRemoteError, match="no reference of 'mine'"):
        store.pull(Remote(bucket), "mine", replace=True)


def test_objects_that_are_too_large_are_not_taken(bucket: MemoryBucket, store: Store) -> None:
    bucket.put("refs/base", [memoryview(bytes(1 << 20))])
    with pytest.raises(DamagedRemoteError, match="limit"):
        store.pull(Remote(bucket), "base")


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (frames.encode(b"rhdr", [bytes(8), [bytes(32)] * 4097, None, []]), "4097 segments"),
        (bytes(1 << 20), "catalog/HEAD"),
    ],
)
def test_a_catalog_that_is_too_large_is_not_taken_and_written_anew(
    bucket: MemoryBucket, store: Store, head: bytes, says: str
) -> None:
    bucket.put(layout.HEAD, [memoryview(head)])
    with pytest.raises(DamagedRemoteError, match=says):
        read_catalog(bucket)
    store.import_(store.path.parent / "tiny", "again")
    assert store.push(Remote(bucket), "again").moved_pieces == 0
    assert Remote(bucket).verify(full=True).fine


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (frames.encode_text(["tensor-dedup remote", "version 2"]), NewerFormatError),
        (frames.encode_text(["something else"]), NotARemoteError),
        (b"no text of ours", DamagedRemoteError),
    ],
)
def test_another_kind_of_remote(
    tmp_path: Path, store: Store, text: bytes, error: type[TensorDedupError]
) -> None:
    bucket = MemoryBucket()
    bucket.put("FORMAT", [memoryview(text)])
    with pytest.raises(error):
        store.push(Remote(bucket), "mine")
    with pytest.raises(error):
        store.pull(Remote(bucket), "base")
    assert [*bucket.objects] == ["FORMAT"]


def test_names_without_a_marker_are_somebody_else_s(store: Store, bucket: MemoryBucket) -> None:
    del bucket.objects["FORMAT"]
    with pytest.raises(NotARemoteError, match="no FORMAT"):
        store.push(Remote(bucket), "mine")


def test_a_folder_of_something_else_does_not_become_a_remote(tmp_path: Path, store: Store) -> None:
    """As with an unset variable in a URL, which leaves the folder above or the working one."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(NotARemoteError, match=r"it holds 'model\.safetensors' and no remote"):
        store.push(Remote.open(str(folder)), "mine")
    assert [each.name for each in folder.iterdir()] == ["model.safetensors"]
    (tmp_path / "new").mkdir()
    assert store.push(Remote.open(str(tmp_path / "new")), "mine").pieces > 0


class _Full(RealFiles):
    def free_bytes(self, path: Path) -> int:
        return 1000


def test_a_full_disk_is_said_before_anything_travels(tmp_path: Path, bucket: MemoryBucket) -> None:
    store = open_store(tmp_path / "small", _Full())
    with pytest.raises(NoSpaceError, match="1000 free"):
        store.pull(Remote(bucket), "base")
    assert store.names() == []
    assert [*(store.path / "containers").rglob("*.*")] == []


def test_a_disk_that_fills_up_at_any_moment_of_a_pull(
    tmp_path: Path, bucket: MemoryBucket, paths: dict[str, Path]
) -> None:
    """And its room comes back: then the same pull goes on."""

    class Filling(RealFiles):
        """A disk that is full from its n-th write on."""

        def __init__(self) -> None:
            super().__init__()
            self.left = 10**9

        def pwrite(self, handle: Handle, data: bytes | memoryview, offset: int) -> None:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(handle.path))
            super().pwrite(handle, data, offset)

    probe = open_store(tmp_path / "probe", files := Filling())
    probe.import_(paths["tiny"], "mine")
    files.left = 10**9
    probe.pull(Remote(bucket), "tune")
    writes = 10**9 - files.left
    assert writes > 5
    for number in range(writes):
        store = open_store(tmp_path / f"here-{number}", files := Filling())
        store.import_(paths["tiny"], "mine")
        files.left = number
        with pytest.raises(StoreError, match=r"(?i)space") as caught:
            store.pull(Remote(bucket), "tune")
        assert str(tmp_path) in str(caught.value)
        files.left = 10**9
        assert store.names() == ["mine"]
        assert store.verify(full=True).fine
        store.pull(Remote(bucket), "tune")
        assert stored(store, "tune") == content(paths["tune"])


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:hidden-word@bucket/x",
        "https://user:hidden-word@host/x",
        "az://container/x?sig=hidden-word",
        "s3://bucket/x#hidden-word",
        "s3:/key:hidden-word@bucket/x",
        "S3:key:hidden-word@bucket/x",
        "s3://key%3Ahidden-word%40bucket/x",
        "s3://bucket\\@hidden-word/x",
        "s3://key:hidden/word@hidden-word/x",
        "oci:/user:hidden-word@host/x",
        "https://user:12/hidden-word@host/x",
        "http://user:12/3@hidden-word",
        "s3://key:12/hidden-word@bucket/x",
        "gs://key:12/hidden-word",
        "az://key:12/hidden-word@container/x",
        "ftp://user:12/hidden-word@host/x",
        "file://user:12/hidden-word@host/x",
        "ftp://host/x",
        "s3://",
        "file://host/x",
        "http://host:port/x",
        "s3://bucket/back\\slash",
        "gs://bucket/a/../b",
        "s3://bucket/..",
        "az://container/./x",
        "https://host/a/%2e%2E/b",
        "//user:hidden-word@host/x",
        "https://host/x;sig=hidden-word",
        "az://container/x;SharedAccessSignature=hidden-word",
        "https://host/x%3Fsig=hidden-word",
        "https://host/x%23hidden-word",
        "s3:///key:hidden-word@bucket/x",
        "S3://bucket/x;hidden-word",
        "docker://user%3Ahidden-word%40host/x",
        "file://host/x;hidden-word",
        "docker:/user:hidden-word@host/x",
        "user:hidden-word@host/x",
    ],
)
def test_urls_that_name_no_remote(url: str) -> None:
    with pytest.raises(RemoteUrlError) as caught:
        Remote.open(url)
    assert "hidden-word" not in str(caught.value) + repr(caught.value.facts)


@pytest.mark.parametrize(
    ("url", "name", "value"),
    [
        ("s3://bucket/x", "AWS_ENDPOINT_URL", ""),
        ("s3://bucket/x", "AWS_ENDPOINT_URL", "not a url"),
        ("s3://bucket/x", "AWS_ENDPOINT_URL_S3", "localhost:9000"),
        ("s3://bucket/x", "AWS_ACCESS_KEY_ID", "hidden-word\n"),
        ("s3://bucket/x", "AWS_SECRET_ACCESS_KEY", "hidden-word\r\n"),
        ("s3://bucket/x", "AWS_SESSION_TOKEN", "hidden-word\n"),
        ("s3://bucket/x", "AWS_REGION", "eu-central-1\n"),
        ("az://container/x", "AZURE_STORAGE_ACCOUNT_KEY", "hidden-word\n"),
        ("az://container/x", "AZURE_STORAGE_ENDPOINT", "[::1"),
    ],
)
def test_a_variable_that_obstore_would_panic_about_is_named(
    monkeypatch: pytest.MonkeyPatch, url: str, name: str, value: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    Remote.open(url)
    monkeypatch.setenv(name, value)
    with pytest.raises((RemoteAccessError, RemoteUnreachableError), match=name) as caught:
        Remote.open(url)
    assert "hidden-word" not in str(caught.value) + repr(caught.value.facts)
    Remote.open("https://host/x")


@pytest.mark.parametrize(
    ("url", "name", "value"),
    [
        ("s3://bucket/x", "AWS_CLOUDFRONT_PRIVATE_KEY", "-----BEGIN\nhidden\n"),
        ("gs://bucket/x", "GOOGLE_PRIVATE_KEY", "-----BEGIN\nhidden\n"),
        ("az://container/x", "AZURE_CLIENT_CERTIFICATE_KEY", "-----BEGIN\nhidden\n"),
        ("s3://bucket/x", "AWS_ENDPOINT", ""),
    ],
)
def test_a_variable_that_obstore_does_not_use_may_say_anything(
    monkeypatch: pytest.MonkeyPatch, url: str, name: str, value: str
) -> None:
    """Of two that say the same it uses the last one in the environment."""
    for each in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    Remote.open(url)


def test_of_two_endpoints_the_one_that_obstore_uses_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for each in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT", "")
    with pytest.raises(RemoteUnreachableError, match="AWS_ENDPOINT is set and empty"):
        Remote.open("s3://bucket/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    Remote.open("s3://bucket/x")


def test_the_variables_that_are_looked_at_are_some_that_obstore_reads() -> None:
    from obstore.exceptions import GenericError, UnknownConfigurationKeyError
    from obstore.store import from_url

    def take(scheme: str, name: str) -> None:
        more = {"azure_storage_account_name": "account"} if scheme == "az" else {}
        config: Any = {name.lower(): "x", **more}
        with suppress(GenericError):
            from_url(f"{scheme}://bucket", config=config)

    for scheme, names in environment._ONE_LINE.items():
        for name in names:
            take(scheme, name)
        with pytest.raises(UnknownConfigurationKeyError):
            take(scheme, f"{names[0]}_OF_OTHERS")


def test_a_panic_of_obstore_is_an_answer_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its class is no exception, and nobody can import it."""

    class PanicException(BaseException):
        pass

    def panic(*_: object, **__: object) -> None:
        raise PanicException("called `Result::unwrap()` on an `Err` value")

    remote = Remote.open("https://127.0.0.1:9/x")
    monkeypatch.setattr("obstore.get", panic)
    with pytest.raises(RemoteUnreachableError, match="/x/FORMAT: obstore cannot go on"):
        remote.names()
    monkeypatch.setattr("tensor_dedup.remote.server_bucket.from_url", panic)
    with pytest.raises(RemoteUnreachableError, match="obstore cannot go on"):
        Remote.open("https://127.0.0.1:9/x")


def test_nothing_of_a_server_s_message_tells_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-word")
    text = "PUT https://me:hidden@host/x?X-Amz-Signature=abc hidden-word Debug source: hidden"
    assert scrubbed(text) == "PUT https://host/x ***"
    assert "den-word" not in scrubbed("GET http://user:hid@den-word@127.0.0.1:9/x failed")


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with remotes.s3() as found:
        yield found


MANY = 10**6


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        (Manifest([FileEntry("f", 0, 0, "")] * MANY, [], 0, 0, {}), DamagedRemoteError, "one path"),
        (Manifest([], [bytes(32)] * MANY, 256 * MANY, 0, {}), MissingRemoteError, "is gone"),
        (Manifest([], [], MANY, 0, {}), DamagedRemoteError, "0 pages, 3907 expected"),
        (Manifest([FileEntry("f", 0, -1, "")], [], 0, 0, {}), DamagedRemoteError, "than none"),
    ],
)
def test_a_manifest_of_a_million_entries(
    tmp_path: Path, content: Manifest, error: type[StoreError], says: str
) -> None:
    """Whatever it claims: an error that names the object, and a store that is whole."""
    bucket = MemoryBucket()
    store = open_store(tmp_path / "store")
    files = {"model.safetensors": safetensors({"w": ("U8", (9,), noise(1, 9))})}
    store.import_(write(tmp_path / "m", files), "mine")
    store.push(Remote(bucket), "mine")
    name, blob = encode_manifest(content)
    bucket.put(layout.manifest_key(name), [memoryview(blob)])
    bucket.put(layout.ref_key("large"), [memoryview(layout.reference("large", name))])
    with pytest.raises(error, match=f"manifests/.*{says}.*remote verify"):
        store.pull(Remote(bucket), "large")
    assert store.names() == ["mine"]
    assert store.verify(full=True).fine


@pytest.mark.parametrize(
    "url",
    [None, 3, b"file:///x", "", " ", "~", "~/x", Path("~/x"), Path(), "a\0b", "file:///a%00b"],
)
def test_what_names_no_remote(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, url: Any
) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    for work in (Remote.open, lambda url: store.push(url, "mine")):
        with pytest.raises(RemoteUrlError, match="write s3://"):
            work(url)
    assert not [*(tmp_path / "cwd").iterdir()]


@pytest.mark.parametrize("inside", ["refs/x", "deep/in/it", "tmp"])
@pytest.mark.parametrize("outer", ["store", "remote"])
def test_no_remote_is_made_inside_another_or_a_store(
    tmp_path: Path, store: Store, outer: str, inside: str
) -> None:
    store.push(f"file://{tmp_path}/remote", "mine")
    folder = store.path if outer == "store" else tmp_path / "remote"
    (tmp_path / "link").symlink_to(folder)
    for place in (folder, tmp_path / "link"):
        with pytest.raises(NotARemoteError, match=f"inside {place}, .* outside it"):
            store.push(f"file://{place}/{inside}", "mine")
    (tmp_path / "deep").symlink_to(folder / "deep")
    with pytest.raises(NotARemoteError, match=f"inside {folder}, .* outside it"):
        store.push(f"file://{tmp_path}/deep/in/it", "mine")
    assert not (folder / inside / "FORMAT").exists()
    assert not (folder / "deep").exists()
    assert store.verify(full=True).fine
    Remote.open(tmp_path / "remote").gc(0)


@pytest.mark.usefixtures("proxy")
def test_no_remote_is_made_where_another_has_its_objects(store: Store) -> None:
    """In a bucket; elsewhere below another one it is in nobody's way, and to look costs nothing."""
    outer = Remote.open("s3://bucket/outer")
    first = store.push(outer, "mine").requests
    for inside in ("refs/x", "containers/ab/x"):
        with pytest.raises(NotARemoteError, match=r"inside s3://bucket/outer, .* outside it"):
            store.push(f"s3://bucket/outer/{inside}", "mine")
    for inside, more in (("in/it", 0), ("deep/tmp", 1)):
        inner = Remote.open(f"s3://bucket/outer/{inside}")
        assert store.push(inner, "mine").requests == first + more
        inner.gc(0)
        outer.gc(0)
        assert inner.verify(full=True).fine
    assert outer.verify(full=True).fine


@pytest.mark.usefixtures("proxy")
def test_a_bucket_that_is_not_there(store: Store) -> None:
    for work in (store.push, store.pull):
        with pytest.raises(NotARemoteError, match=r"no such bucket.*create the bucket") as caught:
            work("s3://no-bucket-of-this-name/x", "mine")
        assert caught.value.exit_status == NOBODY_THERE
        assert "push" not in str(caught.value)


def test_azure_without_an_account(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(RemoteAccessError, match="set AZURE_STORAGE_ACCOUNT_NAME") as caught:
        store.push("az://container/x", "mine")
    assert "write s3://" not in str(caught.value)


def test_without_credentials(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the machine's own are asked for, where a cloud has them."""

    class NoneHere(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.send_response(403)
            self.end_headers()

        def log_message(self, format: str, *_: object) -> None:
            """Say nothing."""

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with remotes.answered(NoneHere) as host:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://{host}")
        with pytest.raises(RemoteAccessError) as caught:
            store.push("s3://bucket/x", "mine")
    said = str(caught.value)
    assert said.startswith("s3://bucket/x: there are no credentials in the environment; set AWS_")
    assert len(said) < 200


def test_nobody_answers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in remotes._VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(RemoteUnreachableError, match="goes on from there") as caught:
        store.push("s3://bucket/x", "mine")
    assert caught.value.exit_status == NOBODY_THERE
    assert "testing-secret-key" not in str(caught.value)


@pytest.mark.parametrize("status", [409, 412])
def test_a_condition_that_nobody_made_is_an_answer_that_cannot_be_used(
    store: Store, bucket: MemoryBucket, status: int
) -> None:
    """To reads and writes without one; to those with one it says that somebody was first."""

    class Odd(MemoryS3):
        def answer(self, request: Request) -> Response:
            odd = request.key.startswith(("refs/base", "containers/"))
            return Response(status, {}, b"<Error/>") if odd else super().answer(request)

    proxy = FaultyProxy(Odd(bucket))
    remote = Remote(client(proxy.port))
    before = dict(bucket.objects)
    with pytest.raises(RemoteUnreachableError, match=r"refs/base: .*goes on from there"):
        store.pull(remote, "base")
    store.import_(
        write(store.path.parent / "new", {"m.safetensors": safetensors(u8(w=noise(8, 99)))}), "new"
    )
    with pytest.raises(RemoteUnreachableError, match=r"containers/.*goes on from there"):
        store.push(remote, "new")
    assert any(name.startswith("PUT containers/") for name in proxy.requests)
    assert "refs/new" not in bucket.objects
    assert before.items() <= bucket.objects.items()
    assert not remote.bucket.put_if("refs/base", b"x", None)
    proxy.close()


def test_refused_credentials(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers 403 to everybody."""
    import threading
    from http.server import ThreadingHTTPServer

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"<Error><Code>ExpiredToken</Code></Error>"
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_GET

        def log_message(self, format: str, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    for name, value in remotes._VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    try:
        with pytest.raises(RemoteAccessError, match="AWS_SESSION_TOKEN") as caught:
            store.push("s3://bucket/x", "mine")
        assert "AZURE" not in str(caught.value)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_plain_web_server_can_be_pulled_from(tmp_path: Path, store: Store, ranges: bool) -> None:
    """What a push to a folder has left, behind a server of files, which may know ranges."""
    store.push(f"file://{tmp_path}/served", "mine")
    with remotes.web(tmp_path / "served", ranges=ranges) as url:
        other = open_store(tmp_path / "other")
        other.pull(url, "mine")
        assert stored(other, "mine") == content(tmp_path / "tiny")
        store.import_(tmp_path / "base", "base")
        for dry_run in (True, False):
            with pytest.raises(ReadOnlyRemoteError):
                store.push(url, "base", dry_run=dry_run)


def test_a_server_without_ranges_sends_each_container_once(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensor_dedup.remote.pieces._RANGE_BYTES", 64 << 10)
    monkeypatch.setattr(layout, "CONTAINER_BYTES", 400_000)
    store.import_(tmp_path / "base", "base")
    store.push(f"file://{tmp_path}/served", "base")
    sizes = [path.stat().st_size for path in (tmp_path / "served" / "containers").rglob("*.*")]
    assert len(sizes) > 2
    assert sum(sizes) > 4 * len(sizes) * (64 << 10)
    with remotes.web(tmp_path / "served", ranges=False) as url:
        other = open_store(tmp_path / "other")
        pulled = other.pull(url, "base")
    assert sum(sizes) < pulled.wire_bytes < sum(sizes) + (64 << 10)
    assert stored(other, "base") == content(tmp_path / "base")


def test_a_tensor_that_is_too_large_to_come_without_ranges_is_no_damage(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensor_dedup.remote.server_bucket._WHOLE_BYTES", 100_000)
    store.import_(tmp_path / "base", "base")
    store.push(f"file://{tmp_path}/served", "base")
    with (
        remotes.web(tmp_path / "served", ranges=False) as url,
        pytest.raises(NoRangesError, match=r"containers/.*; pull from a server that knows ranges"),
    ):
        open_store(tmp_path / "other").pull(url, "base")
    with remotes.web(tmp_path / "served") as url:
        open_store(tmp_path / "another").pull(url, "base")


def test_a_range_that_was_ignored_once_is_asked_for_again(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a proxy did in passing costs whole objects for a minute, and not for good."""
    monkeypatch.setattr("tensor_dedup.remote.server_bucket._ASK_AGAIN_S", 0.0)
    sizes = {"once": 300_000, "later": 3_000_000}
    full = open_store(tmp_path / "full")
    for name, nbytes in sizes.items():
        tensors = {f"{name}{n}": noise(n, nbytes) for n in range(2)}
        for kind, held in (("half", [f"{name}0"]), ("whole", [*tensors])):
            file = safetensors(u8(**{each: tensors[each] for each in held}))
            write(tmp_path / f"{name}-{kind}", {"model.safetensors": file})
        full.import_(tmp_path / f"{name}-whole", name)
        full.push(f"file://{tmp_path}/served", name)
        store.import_(tmp_path / f"{name}-half", f"{name}-half")
    with remotes.web(tmp_path / "served") as url:
        proxy = Proxy(int(url.rpartition(":")[2]))
        remote = Remote.open(f"http://127.0.0.1:{proxy.port}")
        proxy.blind = True
        assert store.pull(remote, "once").wire_bytes > 2 * sizes["once"]
        proxy.blind = False
        assert store.pull(remote, "later").wire_bytes < sizes["later"] + (64 << 10)
        proxy.close()
    for name in sizes:
        assert stored(store, name) == content(tmp_path / f"{name}-whole")


def test_a_list_that_cannot_be_read_is_no_empty_one(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each later try of a request waits twice as long.
    monkeypatch.setattr("tensor_dedup.remote.server_bucket._RETRIES", 1)
    store.push(f"file://{tmp_path}/served", "mine")
    with remotes.web(tmp_path / "served") as url:  # which has none to read
        remote = Remote.open(url)
        assert remote.steps("run-001") == []
        for look in (remote.names, remote.usage, remote.verify, remote.gc):
            with pytest.raises(UnlistedRemoteError, match=r"cannot be listed; name the") as caught:
                look()
            assert caught.value.exit_status == WRONG_USE
        with pytest.raises(UnlistedRemoteError, match="no checkpoint 'nope', and a run"):
            store.pull(url, "nope")

    class Silent(MemoryBucket):
        def list(self, prefix: str) -> Iterator[ObjectStatus]:
            raise RemoteUnreachableError.at(self.at(prefix), "timed out")

    bucket = Silent()
    bucket.objects = {"FORMAT": (frames.encode_text(layout.MARKER_LINES), "tag", 0.0)}
    with pytest.raises(RemoteUnreachableError, match="timed out"):
        Remote(bucket).steps("run-001")
