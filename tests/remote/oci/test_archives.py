"""Archives among the layers of artifacts of others: every file of one comes, or the pull fails."""

import gzip
import hashlib
import io
import tarfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from remote_runs import registries
from remote_runs.registries import MODEL
from remote_runs.remotes import Proxy
from store_runs.stores import KIB, noise, open_store, safetensors, stored, u8
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.remote.errors import DamagedRemoteError
from tensor_dedup.remote.oci import archives
from tensor_dedup.remote.oci.archives import ChunkStream, unpack
from tensor_dedup.store.files import RealFiles

pytest.importorskip("requests")


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with registries.registry(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture
def team(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where this test has its repositories."""
    monkeypatch.setenv("HOME", str(tmp_path))
    name = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]
    return f"oci://{registries.host(proxy)}/{name}"


@pytest.mark.parametrize("media", ["raw", "tar+gzip"])
def test_a_file_that_is_as_small_as_nothing_is_pulled(
    tmp_path: Path, team: str, media: str
) -> None:
    """OCI's empty blob is `{}`, and so is many a configuration."""
    files = {
        "model.safetensors": safetensors(u8(a=noise(1, 9 * KIB))),
        "config.json": b'{"model_type": "llama"}',
        "added.json": b"{}",
    }
    layers: list[tuple[str, bytes, str | None]]
    layers = [(f"{MODEL}.weight.v1.raw", data, name) for name, data in files.items()]
    if media == "tar+gzip":
        # A member for each file, as what fetches single files of an image makes them.
        whole = linking(*[(name, "file", data) for name, data in files.items()])
        parts = [whole[at : at + 2048] for at in range(0, len(whole), 2048)]
        layers = [(f"{MODEL}.weight.v1.{media}", b"".join(map(gzip.compress, parts)), None)]
    layers.append(("application/vnd.oci.empty.v1+json", b"{}", None))
    registries.bring(tmp_path / "layout", f"{team}/theirs:v1", layers)
    store = open_store(tmp_path / "store")
    store.pull(f"{team}/theirs:v1", "theirs")
    assert stored(store, "theirs") == files


def linking(*entries: tuple[str, str, bytes | str], packing: str = "w") -> bytes:
    """An archive of files, of links (`hard`, `soft`) and of what is neither (`fifo`)."""
    kinds = {"hard": tarfile.LNKTYPE, "soft": tarfile.SYMTYPE, "fifo": tarfile.FIFOTYPE}
    out, mode = io.BytesIO(), packing
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for name, kind, data in entries:
            entry = tarfile.TarInfo(name)
            entry.type = kinds.get(kind, tarfile.REGTYPE)
            if isinstance(data, bytes):
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
            else:
                entry.linkname = data
                archive.addfile(entry)
    return out.getvalue()


def test_links_of_an_archive_are_the_files_they_lead_to(tmp_path: Path, team: str) -> None:
    weights_ = safetensors(u8(a=noise(1, 9 * KIB)))
    tar = linking(
        ("snapshot/model.safetensors", "soft", "../blobs/abc"),
        ("snapshot/again.json", "soft", "config.json"),
        ("./blobs/abc", "file", weights_),
        ("./snapshot/config.json", "file", b"{}"),
        ("snapshot/copy.json", "hard", "snapshot/config.json"),
    )
    registries.bring(tmp_path / "l", f"{team}/links:v1", [(f"{MODEL}.weight.v1.tar", tar, None)])
    store = open_store(tmp_path / "store")
    store.pull(f"{team}/links:v1", "links")
    found = stored(store, "links")
    assert found.pop("blobs/abc") == found.pop("snapshot/model.safetensors") == weights_
    assert found == {f"snapshot/{name}.json": b"{}" for name in ("again", "config", "copy")}


@pytest.mark.parametrize("again", ["file", "soft", "hard"])
def test_what_is_twice_in_an_archive_is_refused(tmp_path: Path, team: str, again: str) -> None:
    """What a hard link between the two is would depend on their order."""
    tar = linking(
        ("model.safetensors", "file", safetensors(u8(a=noise(1, 9 * KIB)))),
        ("a.json", "file", b"[1]"),
        ("./a.json", again, b"[2]" if again == "file" else "model.safetensors"),
    )
    registries.bring(tmp_path / "l", f"{team}/twice:v1", [(f"{MODEL}.weight.v1.tar", tar, None)])
    store = open_store(tmp_path / "store")
    with pytest.raises(DamagedRemoteError, match=r"'a\.json' is there twice"):
        store.pull(f"{team}/twice:v1", "twice")
    assert store.names() == []


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([("x.json", "soft", "../../../etc/passwd")], "x.json' is a link"),
        ([("x.json", "hard", "nothing")], "x.json' is a link"),
        ([("x.json", "soft", "y.json"), ("y.json", "soft", "x.json")], "json' is a link"),
        ([("x.json", "fifo", b"")], "neither a file nor a link"),
    ],
)
def test_what_leads_to_no_file_is_named(
    tmp_path: Path, team: str, entries: list[tuple[str, str, bytes | str]], says: str
) -> None:
    tar = linking(("a.json", "file", b"{}"), *entries)
    registries.bring(tmp_path / "l", f"{team}/links:v1", [(f"{MODEL}.weight.v1.tar", tar, None)])
    store = open_store(tmp_path / "store")
    with pytest.raises(UnsupportedError, match=says):
        store.pull(f"{team}/links:v1", "links")
    assert store.names() == []


@pytest.mark.parametrize(("most", "fits"), [(4, True), (3, False)])
def test_an_archive_has_so_many_links_at_most(
    tmp_path: Path, team: str, monkeypatch: pytest.MonkeyPatch, most: int, fits: bool
) -> None:
    """What leads to no file yet is in memory, and what leads to one is another copy of it."""
    monkeypatch.setattr(archives, "_MOST_LINKS", most)
    tar = linking(
        ("model.safetensors", "file", safetensors(u8(a=noise(1, 9 * KIB)))),
        *((f"{n}.json", "soft", "a.json") for n in (1, 2, 3)),
        ("a.json", "file", b"{}"),
        ("4.json", "hard", "a.json"),
    )
    registries.bring(tmp_path / "l", f"{team}/links:v1", [(f"{MODEL}.weight.v1.tar", tar, None)])
    store = open_store(tmp_path / "store")
    if fits:
        store.pull(f"{team}/links:v1", "links")
        assert len(stored(store, "links")) == 2 + 4
    else:
        with pytest.raises(UnsupportedError, match="more than 3 links"):
            store.pull(f"{team}/links:v1", "links")
        assert store.names() == []


@pytest.mark.parametrize("what", ["no end", "a damaged header", "no number", "half a file"])
@pytest.mark.parametrize("packing", ["tar", "tar+gzip", "tar+zstd"])
def test_an_archive_that_stops_is_damaged(
    tmp_path: Path, team: str, what: str, packing: str
) -> None:
    first, both = (
        linking(*[(f"{n}.json", "file", b"{}") for n in range(count)]) for count in (1, 2)
    )
    tar = {
        "no end": first[:1024],
        "a damaged header": both[:1024] + b"\xff" + both[1025:],
        "half a file": both[:1700],
        "no number": facts({"GNU.sparse.realsize": "zz"}),
    }[what]
    packed = {"tar": tar, "tar+gzip": gzip.compress(tar), "tar+zstd": zstandard.compress(tar)}
    layer = (f"{MODEL}.weight.v1.{packing}", packed[packing], None)
    registries.bring(tmp_path / "l", f"{team}/cut:v1", [layer])
    store = open_store(tmp_path / "store")
    with pytest.raises(DamagedRemoteError, match="archive"):
        store.pull(f"{team}/cut:v1", "cut")
    assert store.names() == []


LARGE = 32 << 20


def facts(pairs: dict[str, str], data: bytes = b"") -> bytes:
    """An archive with a file before which such facts about it stand."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        entry = tarfile.TarInfo("x")
        entry.pax_headers, entry.size = pairs, len(data)
        archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def headed(kind: bytes, size: int, *rest: bytes) -> bytes:
    """A header of some kind that says that so much follows it, and what does."""
    entry = tarfile.TarInfo("x")
    entry.type, entry.size = kind, size
    head = bytearray(entry.tobuf(tarfile.GNU_FORMAT))
    if kind == tarfile.GNUTYPE_SPARSE:  # its size on the disk, and that its map goes on
        head[482:495] = bytes([True]) + b"%011o\0" % LARGE
        head[148:156] = b" " * 8
        head[148:156] = b"%06o\0 " % sum(head)
    return b"".join([head, *rest])


GNU = {"GNU.sparse.name": "x", "GNU.sparse.realsize": str(LARGE)}


def sparse(form: str) -> bytes:
    """An archive with a file that is large on the disk, or with a map that is large itself."""
    if form.startswith("of GNU"):
        block = b"00000000001\0" * 42 + bytes([True]) * 8
        return headed(tarfile.GNUTYPE_SPARSE, 0, block * (LARGE // 512 if "map" in form else 0))
    if form == "in pairs":
        return facts({"GNU.sparse.size": str(LARGE), "GNU.sparse.numblocks": "0"})
    if form == "in one pair":
        return facts({**GNU, "GNU.sparse.map": "0,1"})
    version = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    return facts({**GNU, **version}, b"99999999\n" + b"1\n" * (LARGE // 32))


@pytest.mark.parametrize(
    "form", ["of GNU", "of GNU with a map", "in pairs", "in one pair", "in pairs and a map"]
)
@pytest.mark.parametrize("packing", ["", "zst"])
def test_a_sparse_file_is_refused_before_its_map_is_read(
    tmp_path: Path, form: str, packing: str
) -> None:
    with pytest.raises(UnsupportedError, match=r"sparse file; pull it with its own client"):
        unpack_in_little_memory(tmp_path, sparse(form), packing)
    assert [*tmp_path.iterdir()] == []


def unpack_in_little_memory(folder: Path, tar: bytes, packing: str) -> None:
    data = zstandard.compress(tar) if packing else tar
    chunks = (data[at : at + 65_536] for at in range(0, len(data), 65_536))
    tracemalloc.start()
    try:
        unpack(folder, ChunkStream(chunks), packing, RealFiles(), "oci://h/a:b, layer c")
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < LARGE / 4


@pytest.mark.parametrize(
    "kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME]
)
def test_what_goes_before_a_member_is_no_longer_than_it_may_be(tmp_path: Path, kind: bytes) -> None:
    with pytest.raises(DamagedRemoteError, match="bytes go before a member"):
        unpack_in_little_memory(tmp_path, headed(kind, LARGE, bytes(LARGE)), "zst")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_few_headers_go_before_a_member(tmp_path: Path, kind: bytes) -> None:
    body = (b"abc\0" if kind == tarfile.GNUTYPE_LONGNAME else b"6 a=b\n").ljust(512, b"\0")
    before, rest = headed(kind, body.index(b"\0"), body), linking(("a.json", "file", b"{}"))
    unpack_in_little_memory(tmp_path, before * 8 + rest, "")
    with pytest.raises(DamagedRemoteError, match="it is no archive"):
        unpack_in_little_memory(tmp_path / "other", before * 3000 + rest, "")


@pytest.mark.parametrize("kind", ["file", "soft", "hard"])
def test_a_name_that_no_file_can_have_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    long = "a" * 60_000
    links = [(f"{n}", kind, long) for n in range(64)]
    tar = linking(*([(long, "file", b"{}")] if kind == "file" else links))
    with pytest.raises(UnsupportedError, match="too long") as caught:
        unpack_in_little_memory(tmp_path, tar, "zst")
    assert len(str(caught.value)) < 400


def test_an_archive_of_many_folders_takes_little_memory(tmp_path: Path) -> None:
    folders = b"".join(headed(tarfile.DIRTYPE, 0) for _ in range(20_000))
    unpack_in_little_memory(tmp_path, folders + linking(("a.json", "file", b"{}")), "zst")
    assert (tmp_path / "a.json").read_bytes() == b"{}"


@pytest.mark.parametrize("other", ["a", "a/b"])
def test_two_layers_of_one_path_are_refused(tmp_path: Path, team: str, other: str) -> None:
    media = f"{MODEL}.doc.v1.raw"
    registries.bring(
        tmp_path / "l", f"{team}/two:v1", [(media, b"one", "a"), (media, b"two", other)]
    )
    store = open_store(tmp_path / "store")
    with pytest.raises(DamagedRemoteError, match="there twice"):
        store.pull(f"{team}/two:v1", "two")


@pytest.mark.parametrize(
    "path",
    [
        "a" * 256,
        f"folder/{'a' * 300}/x.json",
        "b/" * 2100 + "x.json",
        "模" * 200,  # of a length that some file systems take
        "a\0b",
        "../x.json",
        "/x.json",
    ],
    ids=["name", "folder", "whole", "other letters", "nul", "out", "absolute"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["a layer", "in an archive"])
def test_a_path_that_no_file_here_can_have_is_refused_with_its_layer(
    tmp_path: Path, team: str, path: str, packed: bool
) -> None:
    whole = (f"{MODEL}.weight.v1.raw", safetensors(u8(a=noise(1, 9 * KIB))), "model.safetensors")
    odd: tuple[str, bytes, str | None] = (f"{MODEL}.doc.v1.raw", b"odd", path)
    if packed:
        if "\0" in path:
            pytest.skip("a tar's names end there")
        odd = (f"{MODEL}.doc.v1.tar", linking((path, "file", b"odd")), None)
    registries.bring(tmp_path / "layout", f"{team}/odd:v1", [whole, odd])
    layer = f"{team}/odd:v1, layer sha256:{hashlib.sha256(odd[1]).hexdigest()}"
    store = open_store(tmp_path / "store")
    with pytest.raises((DamagedRemoteError, UnsupportedError)) as caught:
        store.pull(f"{team}/odd:v1", "odd")
    assert str(caught.value).startswith(f"{layer}: ")
    assert len(str(caught.value)) < 600
    assert store.names() == []
    assert [each for each in (store.path / "tmp").rglob("*") if each.is_file()] == []
    # Nothing of it is in the way of another one.
    registries.bring(tmp_path / "other", f"{team}/right:v1", [whole])
    assert store.pull(f"{team}/right:v1", "odd").names == ("odd",)
