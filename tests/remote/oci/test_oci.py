"""Artifacts in a real registry: what others pull from it, and what we pull of it and of theirs.

`data/modelpack-config-schema.json` is that of github.com/modelpack/model-spec, commit d78bf32
(Apache License 2.0).
"""

import hashlib
import io
import json
import logging
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
import zstandard

from remote_runs import registries
from remote_runs.remotes import Proxy
from remote_runs.s3_faults import FAULTS, FaultyProxy, RealS3, Request, Response, possible
from store_runs.stores import (
    KIB,
    content,
    noise,
    open_store,
    safetensors,
    size_on_disk,
    stored,
    tuned,
    weights,
    write,
)
from tensor_dedup import Store
from tensor_dedup.errors import StoreError, UnsupportedError
from tensor_dedup.remote import Remote
from tensor_dedup.remote.errors import (
    CorruptRemoteTensorError,
    DamagedRemoteError,
    MissingRemoteError,
    NotARemoteError,
    RemoteNameTakenError,
    RemoteUnreachableError,
    RemoteUrlError,
)
from tensor_dedup.remote.oci import modelpack as artifacts
from tensor_dedup.remote.oci.registry import MANIFEST_BYTES, ArtifactName
from tensor_dedup.store.errors import NameTakenError, UnknownNameError
from tensor_dedup.store.format.manifests import Piece
from tensor_dedup.store.format.tables import Table
from tensor_dedup.store.reading.checkpoint import StoredFile
from tensor_dedup.training import CheckpointStore

pytest.importorskip("requests")

SCHEMA = Path(__file__).with_name("data") / "modelpack-config-schema.json"
MODEL = "application/vnd.cncf.model"
CHUNK = 100 * KIB


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("registry")


@pytest.fixture(scope="module")
def proxy(root: Path) -> Iterator[Proxy]:
    with registries.registry(root) as found:
        yield found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "cache"


@pytest.fixture
def team(proxy: Proxy, tmp_path: Path) -> str:
    """Where this test has its repositories."""
    proxy.reset()
    name = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]
    return f"oci://{registries.host(proxy)}/{name}"


def repository(url: str) -> str:
    return ArtifactName.parse(url).repository


def model(folder: Path, layers: list[bytes]) -> Path:
    tensors = {f"layers.{n}.weight": ("BF16", (len(d) // 2,), d) for n, d in enumerate(layers)}
    files = {
        "model.safetensors": safetensors(tensors),
        "config.json": b'{"model_type": "llama"}',
        "README.md": b"# A model",
        "code/model.py": b"pass",
    }
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def blob_path(root: Path, digest: str) -> Path:
    """Where the registry keeps a blob."""
    name = digest.removeprefix("sha256:")
    return root / f"data/docker/registry/v2/blobs/sha256/{name[:2]}/{name}/data"


def fetched(url: str, folder: Path) -> dict[str, bytes]:
    """The files of an artifact as skopeo gets them, by what ModelPack says is their path."""
    place = url.removeprefix("oci://")
    registries.skopeo("copy", "--src-tls-verify=false", f"docker://{place}", f"dir:{folder}")
    found: dict[str, bytes] = {}
    for layer in json.loads((folder / "manifest.json").read_text())["layers"]:
        data = (folder / layer["digest"].removeprefix("sha256:")).read_bytes()
        if layer["mediaType"].endswith(".tar"):
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                for entry in archive:
                    held = archive.extractfile(entry)
                    assert held is not None
                    found[entry.name] = held.read()
        else:
            found[layer["annotations"]["org.cncf.model.filepath"]] = data
    return found


@pytest.mark.parametrize("packed", [False, True])
def test_an_artifact_is_a_modelpack_that_others_pull_byte_for_byte(
    tmp_path: Path,
    proxy: Proxy,
    team: str,
    packed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if packed:  # of four files, no kind may have more than one layer
        monkeypatch.setattr(artifacts.layers_of, "__defaults__", (3,))
    path = model(tmp_path / "model", [weights(n, 64 * KIB) for n in range(3)])
    if packed:
        (path / "tokenizer.json").write_bytes(noise(1, 700))
        (path / "vocab.txt").write_bytes(noise(2, 1100))
    store = open_store(tmp_path / "store")
    store.import_(path, "base")
    store.push(f"{team}/base:v1", "base")
    manifest = registries.manifest(proxy, repository(f"{team}/base"), "v1")
    assert manifest["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert manifest["artifactType"] == f"{MODEL}.manifest.v1+json"
    assert manifest["config"]["mediaType"] == f"{MODEL}.config.v1+json"
    types = {each["mediaType"] for each in manifest["layers"]}
    assert types >= {f"{MODEL}.{kind}.v1.raw" for kind in ("weight", "doc", "code")}
    assert f"{MODEL}.weight.config.v1.{'tar' if packed else 'raw'}" in types
    assert fetched(f"{team}/base:v1", tmp_path / "fetched") == content(path)
    config = json.loads(
        (tmp_path / "fetched" / manifest["config"]["digest"].removeprefix("sha256:")).read_text()
    )
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator(schema).validate(config)
    with pytest.raises(jsonschema.ValidationError):  # it says something
        jsonschema.Draft202012Validator(schema).validate({**config, "modelfs": {}})
    assert config["modelfs"]["diffIds"] == [each["digest"] for each in manifest["layers"]]
    other = open_store(tmp_path / "other")
    other.pull(f"{team}/base:v1", "base")
    assert stored(other, "base") == content(path)
    assert other.manifest("base") == store.manifest("base")
    assert other.verify(full=True).fine


@pytest.mark.parametrize("shards", [1, 5000])
def test_many_files_are_a_manifest_that_registries_take(shards: int) -> None:
    def file(path: str) -> StoredFile:
        return StoredFile(path, 7, (Piece(noise(1, 32), 7),))

    paths = [f"model-{n:05}-of-05000.safetensors" for n in range(shards)]
    paths += [f"assets/{n:05}/a-name-of-some-length.json" for n in range(5000)]
    layers = artifacts.layers_of([file(path) for path in paths])
    assert len(layers) <= 500
    held = [part for layer in layers for part in layer.parts if isinstance(part, Piece)]
    assert len(held) == len(paths)
    assert artifacts.layers_of([file(path) for path in reversed(paths)]) == layers
    described = [
        artifacts.Descriptor(
            each.media_type, f"sha256:{n:064}", each.nbytes, {"a": each.path or ""}
        )
        for n, each in enumerate(layers)
    ]
    blob = artifacts.manifest_blob(artifacts.MODEL, described[0], described)
    assert len(blob) < MANIFEST_BYTES


def test_a_checkpoint_of_many_files_fits_a_registry_that_takes_few_layers(
    tmp_path: Path, proxy: Proxy
) -> None:
    files = {
        f"{n}.safetensors": safetensors({f"w{n}": ("U8", (9,), noise(n, 9))}) for n in range(9)
    }
    files |= {f"assets/{n:03}.json": json.dumps(n).encode() for n in range(500)}
    store, other = open_store(tmp_path / "store"), open_store(tmp_path / "other")
    store.import_(write(tmp_path / "many", files), "many")
    with store.checkpoint("many") as held:
        assert len(held.files) > 500
    with registries.hosted(proxy, says=413) as (host, _):
        url = f"oci://{host}/many-files/many:v1"
        store.push(url, "many")
        assert 100 < len(registries.manifest(proxy, "many-files/many", "v1")["layers"]) <= 500
        other.pull(url, "many")
    assert stored(other, "many") == files


@pytest.mark.parametrize(
    ("says", "least", "chunks"),
    [
        (413, 0, [4, 4, 1, 4, 1]),
        (416, 0, [4, 4, 1, 4, 1]),
        (None, 0, [4, 4, 1, 4, 1]),
        (413, 5 << 20, [5, 4, 5]),
    ],
    ids=["too large", "no such range", "hung up", "large chunks"],
)
def test_a_layer_that_is_refused_in_one_request_is_sent_in_chunks(
    tmp_path: Path,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    says: int | None,
    least: int,
    chunks: list[int],
) -> None:
    monkeypatch.setattr("tensor_dedup.remote.oci.push._AT_ONCE", 1)
    monkeypatch.setattr("tensor_dedup.remote.oci.connection._PAUSE_S", 0.0)
    mib, case = 1 << 20, f"case-{says or 0}-{least}"
    files = {
        f"{n}.safetensors": safetensors({f"w{n}": ("U8", (size,), noise(size + least, size))})
        for n, size in enumerate((9 * mib - 200, 5 * mib - 200, 2 * mib))
    }
    store, other = open_store(tmp_path / "store"), open_store(tmp_path / "other")
    store.import_(write(tmp_path / "large", files), "large")
    with registries.hosted(proxy, says=says, least=least) as (host, seen):
        url = f"oci://{host}/{case}/large:v1"
        store.push(url, "large")
        refused = [entry for entry in seen if entry[2] not in (201, 202)]
        # A registry that says so is not asked again for the next layer.
        assert len(refused) == (2 if says is None else 1)
        assert {(verb, status) for verb, _, status in refused} == {("PUT", says or 0)}
        sizes = [size for verb, size, status in seen if verb == "PATCH" and status == 202]
        assert [-(-size // mib) for size in sizes] == chunks
        assert max(sizes) == max(4 * mib, least)
        other.pull(url, "large")
    assert stored(other, "large") == files
    assert fetched(f"oci://{registries.host(proxy)}/{case}/large:v1", tmp_path / "f") == files


def test_a_layer_that_a_registry_takes_in_one_request_is_not_cut(
    tmp_path: Path, proxy: Proxy
) -> None:
    files = {"model.safetensors": safetensors({"w": ("U8", (9 << 20,), noise(3, 9 << 20))})}
    store = open_store(tmp_path / "store")
    store.import_(write(tmp_path / "large", files), "large")
    with registries.hosted(proxy, says=413, least=10 << 20) as (host, seen):
        store.push(f"oci://{host}/whole/large:v1", "large")
    assert max(size for _, size, _ in seen) > 9 << 20
    assert {verb for verb, _, _ in seen} == {"PUT"}


def test_what_a_pull_leaves_when_it_is_killed_is_garbage(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    write(store.path / "tmp" / "1-left", {"model.safetensors": noise(1, 5000)})
    write(store.path / "tmp" / "1-left" / "code", {"model.py": b"pass"})
    plan = store.gc(dry_run=True)
    assert sum(item.nbytes for item in plan.unfinished) == 5004
    store.gc()
    assert [*(store.path / "tmp").iterdir()] == []


def test_what_refers_to_it_has_our_tables(proxy: Proxy, team: str, full: Store) -> None:
    full.push(f"{team}/base:v1", "base")
    full.push(f"{team}/base:v2", "base")  # the same artifact: one entry
    where = repository(f"{team}/base")
    model = registries.manifest(proxy, where, "v1")
    digest = hashlib.sha256(json.dumps(model, separators=(",", ":")).encode()).hexdigest()
    listed = registries.manifest(proxy, where, f"sha256-{digest}")["manifests"]
    assert [each["artifactType"] for each in listed] == [artifacts.TABLES]
    tables = registries.manifest(proxy, where, listed[0]["digest"])
    assert tables["subject"]["digest"] == f"sha256:{digest}"
    assert [each["mediaType"] for each in tables["layers"]] == [artifacts.TABLES]
    assert tables["layers"][0]["digest"] == model["annotations"][artifacts.OUR_TABLES]


@pytest.mark.parametrize("kind", ["one layer", "all of it"])
def test_a_second_fine_tune_moves_its_missing_tensors(
    tmp_path: Path, proxy: Proxy, team: str, kind: str
) -> None:
    base = [weights(n, 256 * KIB) for n in range(12)]
    tune = [base[0], *(tuned(d, n) for n, d in enumerate(base[1:]))]
    if kind == "one layer":
        tune = [noise(1, 256 * KIB), *base[1:]]
    store = open_store(tmp_path / "store")
    for name, layers in (("base", base), ("tune", tune)):
        store.import_(model(tmp_path / name, layers), name, compress="auto")
        store.push(f"{team}/{name}:v1", name)
    other = open_store(tmp_path / "other")
    proxy.reset()
    other.pull(f"{team}/base:v1", "base")
    assert proxy.received <= 1.02 * sum(map(len, base)) + 64 * KIB
    proxy.reset()
    pulled = other.pull(f"{team}/tune:v1", "tune")
    changed = sum(len(d) for d, old in zip(tune, base, strict=True) if d != old)
    assert changed <= pulled.moved_bytes <= changed + 8 * KIB  # a header, too
    assert proxy.nbytes <= 1.02 * pulled.moved_bytes + 64 * KIB
    assert proxy.requests <= 12
    assert stored(other, "tune") == content(tmp_path / "tune")
    proxy.reset()
    assert other.pull(f"{team}/tune:v1", "tune").unchanged
    assert proxy.received < 64 * KIB


def test_layers_that_are_there_are_not_sent(
    tmp_path: Path, proxy: Proxy, team: str, cache: Path
) -> None:
    shards = {
        f"{n}.safetensors": safetensors({f"w{n}": ("U8", (600_000,), noise(n, 600_000))})
        for n in range(3)
    }
    store = open_store(tmp_path / "store")
    for name in ("base", "tune"):
        if name == "tune":
            changed = safetensors({"w2": ("U8", (600_000,), noise(9, 600_000))})
            shards["2.safetensors"] = changed
        store.import_(write(tmp_path / name, {**shards, "config.json": b"{}"}), name)
    store.push(f"{team}/one:base", "base")
    proxy.reset()
    assert store.push(f"{team}/one:base", "base").unchanged
    assert proxy.requests == 2  # the model's manifest, and whether the tables are there
    # In the same repository it exists; from another one it is mounted.
    for place in ("one:tune", "two:tune"):
        proxy.reset()
        pushed = store.push(f"{team}/{place}", "tune")
        assert proxy.sent < 700_000
        # What was sent is a layer: a tensor, and the header of its file.
        assert pushed.moved_pieces == (2 if place == "one:tune" else 0)
    # Who does not remember where it is sends it.
    for path in cache.rglob("*.json"):
        path.unlink()
    proxy.reset()
    pushed = store.push(f"{team}/three:tune", "tune")
    assert pushed.moved_pieces == pushed.pieces == 7
    assert proxy.sent > 1_800_000
    other = open_store(tmp_path / "other")
    pulled = other.pull(f"{team}/two:tune", "tune")
    assert pulled.moved_pieces == pulled.pieces == pushed.pieces
    assert stored(other, "tune") == content(tmp_path / "tune")


def test_a_step_of_a_run_is_an_artifact_too(tmp_path: Path, team: str) -> None:
    store = open_store(tmp_path / "full")
    with CheckpointStore(store, "run", config={"config.json": "{}"}) as run:
        for step in range(2):
            run.save({"w": np.full(9000, step), "frozen": np.arange(9000)}, step=step, metrics={})
    with pytest.raises(UnknownNameError, match="name a step, as in 'run@1'"):
        store.push(f"{team}/run:1", "run")
    store.push(f"{team}/run:1", "run@1")
    store.export("run@1", tmp_path / "out")
    assert fetched(f"{team}/run:1", tmp_path / "fetched") == content(tmp_path / "out")
    other = open_store(tmp_path / "other")
    other.pull(f"{team}/run:1", "run@1")
    with CheckpointStore(other, "run") as run:
        assert int(run.load(1)["w"][0]) == 1


class TestArtifactsOfOthers:
    """Made by hand as an OCI layout, and brought to the registry by skopeo."""

    def brought(self, folder: Path, url: str, layers: list[tuple[str, bytes, str | None]]) -> None:
        registries.bring(folder, url, layers)

    def tar(self, files: dict[str, bytes], mode: str) -> bytes:
        out = io.BytesIO()
        writing: Any = mode
        with tarfile.open(fileobj=out, mode=writing) as archive:
            for name, data in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        return out.getvalue()

    @pytest.mark.parametrize("packing", ["raw", "tar", "tar+gzip", "tar+zstd"])
    def test_it_is_pulled_as_a_whole_and_stored_once(
        self, tmp_path: Path, team: str, packing: str
    ) -> None:
        path = model(tmp_path / "model", [weights(n, 64 * KIB) for n in range(3)])
        files = content(path)
        layers: list[tuple[str, bytes, str | None]]
        if packing == "raw":
            layers = [(f"{MODEL}.weight.v1.raw", data, name) for name, data in files.items()]
        else:
            data = self.tar(files, "w:gz" if packing == "tar+gzip" else "w")
            if packing == "tar+zstd":
                data = zstandard.compress(data)
            layers = [(f"{MODEL}.weight.v1.{packing}", data, "model")]
        self.brought(tmp_path / "layout", f"{team}/theirs:v1", layers)
        store = open_store(tmp_path / "store")
        first = store.pull(f"{team}/theirs:v1", "theirs")
        assert first.wire_bytes >= sum(len(data) for _, data, _ in layers)
        assert stored(store, "theirs") == files
        assert store.pull(f"{team}/theirs:v1", "theirs").unchanged
        before = size_on_disk(store.path / "containers")
        again = store.pull(f"{team}/theirs:v1", "again")
        assert again.moved_pieces == 0
        assert size_on_disk(store.path / "containers") == before > 0
        assert [*(store.path / "tmp").iterdir()] == []
        assert store.verify(full=True).fine

    @pytest.mark.parametrize("name", ["../escaped", "/escaped", "a/../../escaped"])
    def test_a_name_that_leads_elsewhere_is_refused(
        self, tmp_path: Path, team: str, name: str
    ) -> None:
        tar = self.tar({name: b"x"}, "w")
        cases: dict[str, tuple[str, bytes, str | None]] = {
            "raw": (f"{MODEL}.doc.v1.raw", b"x", name),
            "tar": (f"{MODEL}.doc.v1.tar", tar, None),
        }
        store = open_store(tmp_path / "store")
        for number, layer in cases.items():
            self.brought(tmp_path / number, f"{team}/bad:{number}", [layer])
            with pytest.raises(DamagedRemoteError, match="escaped"):
                store.pull(f"{team}/bad:{number}", "bad")
        assert not [*tmp_path.rglob("escaped")]
        assert not Path("/escaped").exists()
        assert [*(store.path / "tmp").iterdir()] == []
        assert store.names() == []

    def test_what_docker_pushes_is_pulled(self, tmp_path: Path, proxy: Proxy, team: str) -> None:
        files = content(model(tmp_path / "model", [weights(0, 64 * KIB)]))
        layer = f"{MODEL}.weight.v1.tar+gzip", self.tar(files, "w:gz"), None
        self.brought(tmp_path / "layout", f"{team}/docker:v1", [layer])
        where, docker = repository(f"{team}/docker"), "application/vnd.docker"
        made = registries.manifest(proxy, where, "v1")
        del made["artifactType"]
        made["mediaType"] = f"{docker}.distribution.manifest.v2+json"
        made["config"]["mediaType"] = f"{docker}.container.image.v1+json"
        made["layers"][0]["mediaType"] = f"{docker}.image.rootfs.diff.tar.gzip"
        registries.put_manifest(proxy, where, "v2", made)
        store = open_store(tmp_path / "store")
        store.pull(f"{team}/docker:v2", "docker")
        assert stored(store, "docker") == files
        # By an archive alone nobody knows; the error is still that of a pull.
        store.import_(write(tmp_path / "two", {**files, "more.json": b"{}"}), "two")
        with pytest.raises(NameTakenError, match=r"or replace it with --replace"):
            store.pull(f"{team}/docker:v2", "two")

    def test_what_is_no_model_is_refused(self, tmp_path: Path, team: str) -> None:
        store = open_store(tmp_path / "store")
        self.brought(tmp_path / "a", f"{team}/bad:a", [("application/x-unknown", b"x", None)])
        with pytest.raises(UnsupportedError, match="its own client"):
            store.pull(f"{team}/bad:a", "bad")
        no_tar = f"{MODEL}.weight.v1.tar", b"x" * 9000, None
        self.brought(tmp_path / "b", f"{team}/bad:b", [no_tar])
        with pytest.raises(DamagedRemoteError, match="no archive"):
            store.pull(f"{team}/bad:b", "bad")
        assert store.names() == []


class TestFaults:
    def test_without_ranges_whole_layers_are_pulled(
        self, tmp_path: Path, proxy: Proxy, team: str, full: Store
    ) -> None:
        full.push(f"{team}/base:v1", "base")
        other = open_store(tmp_path / "other")
        proxy.blind = True
        try:
            other.pull(f"{team}/base:v1", "base")
        finally:
            proxy.blind = False
        assert stored(other, "base") == content(tmp_path / "base")

    def test_without_ranges_all_files_are_pulled(
        self, tmp_path: Path, proxy: Proxy, team: str
    ) -> None:
        folder = model(tmp_path / "whole", [weights(1, 64 * KIB)])
        write(folder, {"optimizer.pt": noise(1, KIB), ".hidden/x": b"x"})
        store, other = open_store(tmp_path / "store"), open_store(tmp_path / "other")
        manifest = store.import_(folder, all_files=True).manifest
        store.push(f"{team}/whole:v1", "whole")
        proxy.blind = True
        try:
            other.pull(f"{team}/whole:v1", "whole")
        finally:
            proxy.blind = False
        assert stored(other, "whole") == content(folder)
        assert other.manifest("whole") == manifest

    @pytest.mark.parametrize("damage", ["gone", "flipped"])
    def test_without_good_tables_whole_layers_are_pulled(
        self,
        tmp_path: Path,
        root: Path,
        proxy: Proxy,
        team: str,
        full: Store,
        damage: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        full.push(f"{team}/base:v1", "base")
        manifest = registries.manifest(proxy, repository(f"{team}/base"), "v1")
        path = blob_path(root, manifest["annotations"][artifacts.OUR_TABLES])
        held = path.read_bytes()
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(held[:40] + bytes([held[40] ^ 1]) + held[41:])
        other = open_store(tmp_path / "other")
        try:
            with caplog.at_level(logging.WARNING):
                other.pull(f"{team}/base:v1", "base")
        finally:
            path.write_bytes(held)
        assert "whole layers are pulled" in caplog.text
        assert stored(other, "base") == content(tmp_path / "base")

    @pytest.mark.parametrize("kind", ["pack", "slab", "mixed"])
    def test_tables_of_what_is_no_layer_are_no_good_tables(
        self,
        tmp_path: Path,
        team: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        kind: str,
    ) -> None:
        table_of = artifacts.table_of

        def of_kind(layer: artifacts.ArtifactLayer, leaves_of: Callable[[Piece], bytes]) -> Table:
            return msgspec.structs.replace(table_of(layer, leaves_of), kind=kind)

        header = b'{"w": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}'.ljust(4088)
        # With both of its pieces where a container of any kind may have one.
        files = {"model.safetensors": len(header).to_bytes(8, "little") + header + noise(1, 9)}
        store, other = open_store(tmp_path / "store"), open_store(tmp_path / "other")
        store.import_(write(tmp_path / "small", files), "small")
        with monkeypatch.context() as patch:
            patch.setattr(artifacts, "table_of", of_kind)
            store.push(f"{team}/small:v1", "small")
        with caplog.at_level(logging.WARNING):
            other.pull(f"{team}/small:v1", "small")
        assert f"no layer is of the kind '{kind}'" in caplog.text
        assert stored(other, "small") == files

    def test_tables_of_other_layers_are_no_good_tables(
        self, tmp_path: Path, proxy: Proxy, team: str, full: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What others pull of an artifact is what we pull of it."""
        where = repository(f"{team}/base")
        for name in ("base", "tune"):
            full.push(f"{team}/base:{name}", name)
        base, tune = (registries.manifest(proxy, where, name) for name in ("base", "tune"))
        lie = {**base, "annotations": tune["annotations"]}
        registries.put_manifest(proxy, where, "v1", lie)
        other = open_store(tmp_path / "other")
        with caplog.at_level(logging.WARNING):
            other.pull(f"{team}/base:v1", "base")
        assert "its tables are those of other layers" in caplog.text
        assert stored(other, "base") == content(tmp_path / "base")

    @pytest.mark.parametrize("tabled", [True, False])
    def test_a_damaged_layer_is_an_error_and_nothing_is_kept(
        self, tmp_path: Path, root: Path, proxy: Proxy, team: str, full: Store, tabled: bool
    ) -> None:
        full.push(f"{team}/base:v1", "base")
        manifest = registries.manifest(proxy, repository(f"{team}/base"), "v1")
        largest = max(manifest["layers"], key=lambda layer: int(layer["size"]))
        path = blob_path(root, largest["digest"])
        held = path.read_bytes()
        path.write_bytes(held[:-9] + bytes([held[-9] ^ 1]) + held[-8:])
        other = open_store(tmp_path / "other")
        expected = CorruptRemoteTensorError if tabled else DamagedRemoteError
        proxy.blind = not tabled
        try:
            with pytest.raises(expected, match=largest["digest"]):
                other.pull(f"{team}/base:v1", "base")
            path.unlink()
            proxy.blind = False
            with pytest.raises(MissingRemoteError, match="gone"):
                other.pull(f"{team}/base:v1", "base")
        finally:
            proxy.blind = False
            path.write_bytes(held)
        assert other.names() == []
        assert other.verify(full=True).fine

    def test_to_replace_an_artifact_by_itself_sends_what_was_lost(
        self, tmp_path: Path, root: Path, proxy: Proxy, team: str
    ) -> None:
        store, other = open_store(tmp_path / "full"), open_store(tmp_path / "other")
        store.import_(model(tmp_path / "own", [noise(n, 64 * KIB) for n in (71, 72)]), "own")
        url = f"{team}/own:v1"
        sent = store.push(url, "own").moved_bytes
        before = registries.manifest(proxy, repository(url), "v1")
        largest = max(before["layers"], key=lambda layer: int(layer["size"]))
        blob_path(root, largest["digest"]).unlink()
        with pytest.raises(MissingRemoteError, match=r"push NAME URL --replace") as caught:
            other.pull(url, "own")
        assert "remote verify" not in str(caught.value)
        assert store.push(url, "own").unchanged
        mended = store.push(url, "own", replace=True)
        assert (mended.moved_bytes, mended.unchanged) == (largest["size"], False)
        assert largest["size"] < sent
        assert registries.manifest(proxy, repository(url), "v1") == before
        other.pull(url, "own")
        assert stored(other, "own") == content(tmp_path / "own")
        assert store.push(url, "own", replace=True).moved_bytes == 0

    def test_a_push_brings_the_tables_that_a_copy_has_left_behind(
        self, tmp_path: Path, team: str, full: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        full.push(f"{team}/base:v1", "base")
        place, copy = f"{team}/base:v1".removeprefix("oci://"), f"{team}/copy:v1"
        insecure = "--src-tls-verify=false", "--dest-tls-verify=false"
        target = f"docker://{copy.removeprefix('oci://')}"
        registries.skopeo("copy", *insecure, f"docker://{place}", target)
        pushed = full.push(copy, "base")
        assert (pushed.moved_bytes, pushed.unchanged) == (0, False)
        assert full.push(copy, "base").unchanged
        other = open_store(tmp_path / "other")
        with caplog.at_level(logging.WARNING):
            other.pull(copy, "base")
        assert "whole layers" not in caplog.text
        assert stored(other, "base") == content(tmp_path / "base")

    def test_what_is_too_large_is_not_read_to_its_end(
        self, tmp_path: Path, proxy: Proxy, team: str, full: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full.push(f"{team}/base:v1", "base")
        other = open_store(tmp_path / "other")
        monkeypatch.setattr("tensor_dedup.remote.oci.registry.MANIFEST_BYTES", 64)
        with pytest.raises(DamagedRemoteError, match="the limit is 256"):
            other.pull(f"{team}/base:v1", "base")
        assert other.names() == []

    def test_a_push_that_was_cut_short_goes_on(
        self, tmp_path: Path, proxy: Proxy, team: str, full: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tensor_dedup.remote.oci.registry import RegistryRepository

        def cut(*_: object) -> bool:
            raise RemoteUnreachableError.at("here", "the connection was cut")

        monkeypatch.setattr(RegistryRepository, "put_manifest", cut)
        with pytest.raises(RemoteUnreachableError):
            full.push(f"{team}/base:v1", "base")
        monkeypatch.undo()
        with pytest.raises(NotARemoteError, match="no such artifact"):
            open_store(tmp_path / "other").pull(f"{team}/base:v1", "base")
        proxy.reset()
        full.push(f"{team}/base:v1", "base")
        assert proxy.sent < 64 * KIB


def test_names_that_are_taken(tmp_path: Path, team: str, full: Store) -> None:
    full.push(f"{team}/base:v1", "base")
    with pytest.raises(RemoteNameTakenError, match="the tag 'v1' stands for another"):
        full.push(f"{team}/base:v1", "tune")
    full.push(f"{team}/base:v1", "tune", replace=True)
    other = open_store(tmp_path / "other")
    other.import_(tmp_path / "base", "tune")
    with pytest.raises(NameTakenError):
        other.pull(f"{team}/base:v1", "tune")
    other.pull(f"{team}/base:v1", "tune", replace=True)
    assert stored(other, "tune") == content(tmp_path / "tune")


def test_a_digest_pins_it(tmp_path: Path, proxy: Proxy, team: str, full: Store) -> None:
    full.push(f"{team}/base:v1", "base")
    model = registries.manifest(proxy, repository(f"{team}/base"), "v1")
    digest = hashlib.sha256(json.dumps(model, separators=(",", ":")).encode()).hexdigest()
    full.push(f"{team}/base:v1", "tune", replace=True)
    other = open_store(tmp_path / "other")
    other.pull(f"{team}/base@sha256:{digest}", "base")
    assert stored(other, "base") == content(tmp_path / "base")
    with pytest.raises(RemoteUrlError, match="a push needs a tag"):
        full.push(f"{team}/base@sha256:{digest}", "base")
    with pytest.raises(NotARemoteError, match="no such artifact"):
        other.pull(f"{team}/base@sha256:{'0' * 64}", "none")


@pytest.mark.parametrize(
    "url",
    [
        "oci://host",
        "oci:///repository:tag",
        "oci://host/Upper:tag",
        "oci://host/a/../b:tag",
        "oci://host/a:t:u",
        "oci://host/a@sha256:12",
        "oci://user:hidden@host/a:tag",
        "oci://host/a?key=hidden",
        "oci://host/u:hidden@x/a:tag",
        "oci://host/a:hidden@sha256:12",
        "oci://host:hidden/a:tag",
    ],
)
def test_bad_urls(tmp_path: Path, url: str, full: Store) -> None:
    for work in (full.push, full.pull):
        with pytest.raises(RemoteUrlError) as caught:
            work(url, "base")
        assert "hidden" not in str(caught.value) + repr(caught.value.facts)
    with pytest.raises(RemoteUrlError, match="push and pull also take"):
        Remote.open("oci://host/a:tag")


def test_nobody_answers(full: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensor_dedup.remote.oci.connection._PAUSE_S", 0.001)
    with pytest.raises(RemoteUnreachableError, match=r"127\.0\.0\.1:9/a:b: .*refused; check"):
        full.push("oci://127.0.0.1:9/a:b", "base")


@pytest.mark.parametrize("media", [None, "application/vnd.oci.image.layer.v1.tar"])
def test_what_oras_pushes_is_pulled(
    tmp_path: Path, proxy: Proxy, team: str, monkeypatch: pytest.MonkeyPatch, media: str | None
) -> None:
    """Files with titles, and a folder that it packs itself. The type that its command line gives
    to a file says that it is an archive, which it is not."""
    client = pytest.importorskip("oras.client")
    path = model(tmp_path / "model", [weights(n, 64 * KIB) for n in range(3)])
    monkeypatch.chdir(path)
    target = f"{team}/oras:v1".removeprefix("oci://")
    ending = f":{media}" if media else ""
    files = [f"{name}{ending}" for name in ("model.safetensors", "config.json", "README.md")]
    client.OrasClient(hostname=registries.host(proxy), insecure=True).push(
        target=target, files=[*files, "code"], disable_path_validation=True
    )
    store = open_store(tmp_path / "store")
    first = store.pull(f"{team}/oras:v1", "oras")
    assert stored(store, "oras") == content(path)
    assert store.pull(f"{team}/oras:v1", "oras").unchanged
    store.import_(path, "here")
    assert store.manifest("here") == store.manifest("oras")
    assert first.moved_bytes > 0


class Nothing:
    """A registry that has not heard of what was pushed."""

    def answer(self, request: Request) -> Response:
        return Response(404, {}, b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}')


class Limited(RealS3):
    """A registry that takes so many bytes in a request at most."""

    def answer(self, request: Request) -> Response:
        if len(request.body) > CHUNK:
            return Response(413, {}, b"{}")
        return super().answer(request)


@pytest.mark.parametrize("verb", ["push", "push in chunks", "pull"])
@pytest.mark.parametrize("step", [61, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])
def test_whatever_befalls_a_request_nothing_is_lost(
    tmp_path: Path, proxy: Proxy, full: Store, verb: str, step: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr("tensor_dedup.remote.oci.connection._PAUSE_S", 0.001)
    monkeypatch.setattr("tensor_dedup.remote.oci.push._AT_ONCE", 1)
    monkeypatch.setattr("tensor_dedup.remote.pieces._AHEAD", 1)
    monkeypatch.setattr("tensor_dedup.remote.oci.registry._PART_BYTES", CHUNK)
    upstream = (Limited if verb == "push in chunks" else RealS3)(proxy.port)
    gate, numbers = FaultyProxy(upstream), iter(range(10**6))
    clean, spoilt = registries.host(proxy), f"127.0.0.1:{gate.port}"

    def start() -> tuple[str, Store]:
        number = next(numbers)
        path = f"{tmp_path.name[-8:].strip('_').lower()}-{number}/base:v1"
        if verb == "pull":
            full.push(f"oci://{clean}/{path}", "base")
        # Nothing is remembered that could be mounted.
        monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(tmp_path / f"cache-{number}"))
        return path, open_store(tmp_path / f"here-{number}")

    def work(path: str, here: Store) -> None:
        url = f"oci://{spoilt}/{path}"
        here.pull(url, "base") if verb == "pull" else full.push(url, "base")

    gate.arm()
    work(*start())
    names = list(gate.requests)
    assert len(names) > 3
    assert (sum(name.startswith("PATCH") for name in names) > 1) == (verb == "push in chunks")
    every = [(n, f) for n, name in enumerate(names) for f in FAULTS if possible(name, f)]
    for number, fault in every[::step]:
        case = (number, names[number], fault)
        path, here = start()
        gate.arm(number, fault, stale=Nothing())
        with suppress(StoreError):
            work(path, here)
        assert gate.struck, case
        assert here.names() in ([], ["base"]), case
        assert here.verify(full=True).fine, case
        gate.deliver()
        other = open_store(tmp_path / f"other-{next(numbers)}")
        with suppress(NotARemoteError):  # the tag is there with all that it needs, or it is not
            other.pull(f"oci://{clean}/{path}", "base")
            assert stored(other, "base") == content(tmp_path / "base"), case
        gate.arm()
        work(path, here)
        other.pull(f"oci://{clean}/{path}", "base")
        assert stored(other, "base") == content(tmp_path / "base"), case
        assert verb != "pull" or stored(here, "base") == content(tmp_path / "base"), case
    gate.close()
