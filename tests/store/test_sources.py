"""Folders as they are downloaded: what of them an import takes, and what it refuses."""

import json
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from files.refusals import refused
from store_runs.stores import (
    KIB,
    assert_clean,
    content,
    handle,
    network,
    noise,
    open_store,
    safetensors,
    u8,
    write,
)
from tensor_dedup import Store
from tensor_dedup.analyze import analyze
from tensor_dedup.analyze.digests import read_digests
from tensor_dedup.digest import digest as hashed
from tensor_dedup.formats.checkpoint import open_checkpoint
from tensor_dedup.formats.errors import CheckpointFault
from tensor_dedup.loader.checkpoint_io.hints import HintIndex
from tensor_dedup.loader.checkpoint_io.stub_folder import check_out
from tensor_dedup.store.errors import (
    BadNameError,
    ContradictoryManifestError,
    DamagedFileError,
    NameTakenError,
    NotTextError,
)
from tensor_dedup.store.files import Handle, Mode, RealFiles
from tensor_dedup.store.format import manifests
from tensor_dedup.store.format.manifests import FileEntry
from tensor_dedup.store.format.names import check_name, name_of
from tensor_dedup.store.hashing import SilentListener
from tensor_dedup.store.writing import sources
from tensor_dedup.store.writing.transaction import OrderedTransaction
from tensor_dedup.training.snapshot import StepSnapshot

INDEX = "model.safetensors.index.json"
A, B = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def index(**weight_map: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": weight_map}).encode()


def weights(*names: str) -> bytes:
    """A file of tensors, each of bytes of its own."""
    return safetensors(u8(**{name: noise(ord(name), KIB) for name in names}))


SHARDED = {"w/" + A: weights("a", "b"), "w/" + B: weights("c"), "config.json": b"{}"}
WITHIN = {**SHARDED, INDEX: index(a="w/" + A, b="w/" + A, c="w/" + B)}


@pytest.mark.parametrize(
    "files",
    [
        WITHIN,
        {**WITHIN, INDEX: index(a="w/" + A, b="./w/" + A, c="w//" + B)},
        {**WITHIN, "w/" + INDEX: index(a=A, b=A, c=B)},
        {A: weights("a", "b"), B: weights("c"), INDEX: index(a=A, b="./" + A, c=B)},
        {
            A: weights("a", "b"),
            B: weights("c"),
            INDEX: index(a=A, c=B),
            "other.safetensors.index.json": index(b=A, c=B),
        },
    ],
    ids=["below", "below and twice", "two indexes above each other", "twice", "by two indexes"],
)
def test_a_file_is_taken_once_however_indexes_name_it(
    store: Store, tmp_path: Path, files: Mapping[str, bytes]
) -> None:
    result = store.import_(write(tmp_path / "m", files))
    assert (result.tensors, result.files) == (3, len(files))
    with store.checkpoint("m") as checkpoint:
        assert sorted(tensor.name for tensor in checkpoint) == ["a", "b", "c"]
    store.export("m", tmp_path / "out")
    assert content(tmp_path / "out") == dict(files)
    assert_clean(store, {"m": dict(files)})
    assert analyze([tmp_path / "m"]).checkpoints[0].nbytes == 3 * KIB


class Bomb:
    """A pickle that leaves a file behind when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def training(folder: Path, bomb: Path) -> Path:
    """A folder of a trainer: weights, states, and a pickle that must not be loaded."""
    files = {"model.safetensors": weights("a"), "config.json": b"{}", "trainer_state.json": b"{}"}
    files |= {"global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt": noise(1, 5 * KIB)}
    files |= {"pytorch_model_fsdp_0/.metadata": b"m", "pytorch_model_fsdp_0/__0_0.distcp": b"d"}
    files |= {"random_states_0.pkl": pickle.dumps(Bomb(bomb)), "optimizer.bin": noise(2, KIB)}
    write(folder, {**files, "consolidated.safetensors": weights("z"), "sampler.bin": b""})
    torch.save({"args": Bomb(bomb)}, folder / "training_args.bin")
    return folder


def test_all_files_come_back_and_engines_see_those_they_need(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(tmp_path / "cache"))
    folder = training(tmp_path / "m", tmp_path / "bomb")
    result = store.import_(folder, all_files=True)
    assert (result.tensors, result.files, result.left_out) == (1, 11, ())
    store.export("m", tmp_path / "out")
    assert content(tmp_path / "out") == content(folder)
    assert store.load("m").keys() == {"a"}
    checkout = check_out(store, "store://m")
    assert checkout.weights == ("model.safetensors",)
    seen = content(Path(checkout.folder))
    plain = store.import_(folder, "plain")
    assert {each.path for each in plain.left_out} & seen.keys() == set()
    store.export("plain", tmp_path / "plain")
    assert seen.keys() == content(tmp_path / "plain").keys()
    assert_clean(store, {"m": content(folder), "plain": content(tmp_path / "plain")})
    assert not (tmp_path / "bomb").exists()
    with pytest.raises(NameTakenError):
        store.import_(folder, "m")


def test_repair_finds_files_that_only_an_import_of_all_keeps(store: Store, tmp_path: Path) -> None:
    folder = training(tmp_path / "m", tmp_path / "bomb")
    manifest = store.import_(folder, all_files=True).manifest
    (lost,) = (store.path / "manifests").glob(f"*/{manifest}")
    lost.unlink()
    for container in (store.path / "containers").rglob("*.*"):
        container.unlink()
    assert store.repair([folder]).missing == []
    store.export("m", tmp_path / "out")
    assert content(tmp_path / "out") == content(folder)


def test_a_link_out_of_the_folder_is_no_file_of_it(store: Store, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {"model.safetensors": weights("a")})
    write(tmp_path / "secret", {"key": b"private"})
    (folder / "optimizer.pt").symlink_to(tmp_path / "secret" / "key")
    assert store.import_(folder, "plain").skipped == ("optimizer.pt",)
    with refused(CheckpointFault.LINK_OUTSIDE):
        store.import_(folder, all_files=True)
    assert store.import_(folder, all_files=True, follow_links=True).files == 2


def test_the_index_says_which_of_two_tensors_counts(store: Store, tmp_path: Path) -> None:
    """As in an overlay: a shard is as it was, and another file has a new tensor of its name."""
    old, new = noise(1, KIB), noise(2, KIB)
    files = {
        A: safetensors(u8(a=noise(3, KIB), b=noise(4, KIB), norm=old)),
        "overlay.safetensors": safetensors(u8(norm=new, b=noise(4, KIB))),
        INDEX: index(a=A, b=A, norm="overlay.safetensors"),
    }
    folder = write(tmp_path / "m", files)
    result = store.import_(folder)
    assert (result.tensors, result.files) == (3, 3)
    copies = [(each.tensor, each.file, each.differs) for each in result.not_indexed]
    assert copies == [("norm", A, True), ("b", "overlay.safetensors", False)]
    with store.checkpoint("m") as checkpoint:
        assert {tensor.name for tensor in checkpoint} == {"a", "b", "norm"}
        assert checkpoint.read("norm") == new
        assert checkpoint.not_indexed == result.not_indexed
    assert bytes(store.load("m")["norm"].numpy()) == new
    store.export("m", tmp_path / "out")
    assert content(tmp_path / "out") == files
    found = analyze([folder, "store://m"], store=store.path)
    assert [len(each.tensors) for each in found.checkpoints] == [3, 3]
    assert found.pairs[0].shared_tensors == 3
    assert {each.not_indexed for each in found.checkpoints} == {result.not_indexed}
    # Also where tensors of this size are left out of every number.
    [coarse] = analyze([folder], min_tensor_bytes=2 * KIB).checkpoints
    assert (coarse.tensors, coarse.not_indexed) == ([], result.not_indexed)
    places = {place.tensor: place.digest for place in store.find(checkpoint["norm"].digest)}
    assert places == {"norm": checkpoint["norm"].digest}
    assert store.find(hashed(old)) == []
    assert store.stats().tensors == 3
    # The same folder is the same checkpoint, and mends it.
    assert store.import_(folder).unchanged
    assert store.expected_manifest(folder, lambda path, fd: {}) == result.manifest
    (lost,) = (store.path / "manifests").glob(f"*/{result.manifest}")
    lost.unlink()
    assert store.repair([folder]).manifests == 1
    with store.checkpoint("m") as checkpoint:
        assert checkpoint.read("norm") == new


def test_the_index_says_which_of_two_tensors_of_torch_save_counts(
    store: Store, tmp_path: Path
) -> None:
    one, two = (f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2))
    folder = write(tmp_path / "m", {})
    folder.mkdir(exist_ok=True)
    head, norm = torch.arange(8.0), torch.ones(4)
    torch.save({"embed": head, "head": head, "norm": norm}, folder / one)
    torch.save({"head": head + 1, "norm": norm + 1}, folder / two)
    where = index(embed=one, head=two, norm=two)
    write(folder, {"pytorch_model.bin.index.json": where})
    assert store.import_(folder).tensors == 3
    loaded = store.load("m")
    assert torch.equal(loaded["embed"], head)
    assert torch.equal(loaded["head"], head + 1)
    assert torch.equal(loaded["norm"], norm + 1)
    # The other way round, the tied tensor counts.
    write(folder, {"pytorch_model.bin.index.json": index(embed=one, head=one, norm=two)})
    store.import_(folder, "tied")
    assert torch.equal(store.load("tied")["head"], head)
    # `head` would be a part of what does not count: that is not guessed.
    torch.save({"embed": head}, folder / two)
    write(folder, {"pytorch_model.bin.index.json": index(embed=two, head=one, norm=one)})
    with refused(CheckpointFault.REPEATED_TENSOR, match="embed"):
        store.import_(folder, "parts")


def test_one_file_that_the_index_names_by_two_folders(store: Store, tmp_path: Path) -> None:
    file, again = "w/x.safetensors", "v/x.safetensors"
    files = {file: weights("a", "b"), "config.json": b"{}", INDEX: index(a=file, b=again)}
    folder = write(tmp_path / "m", files)
    (folder / "v").symlink_to("w")
    result = store.import_(folder)
    assert (result.tensors, result.files) == (2, 4)
    store.export("m", tmp_path / "out")
    assert content(tmp_path / "out") == {**files, again: files[file]}
    assert store.import_(tmp_path / "out", "again").manifest == result.manifest


def test_repair_does_not_bring_back_a_manifest_that_nobody_can_read(
    store: Store, tmp_path: Path
) -> None:
    folder = write(tmp_path / "m", WITHIN)
    source = sources.read_source(store.handle.objects.files, folder)
    twice = [*source.files[:2], *source.files]  # what another program may take for the checkpoint
    store.import_(folder, "good")
    with store.checkpoint("good") as checkpoint:
        pieces = {file.path: list(file.pieces) for file in checkpoint.files}
    name, blobs = manifests.build(
        [FileEntry(f.stored_as, f.nbytes, len(f.segments), f.prefix) for f in twice],
        [piece for f in twice for piece in pieces[f.stored_as]],
    )
    layout = store.handle.objects.layout
    for part, blob in blobs.items():
        store.handle.objects.publish(blob, layout.manifest(part))
    store.handle.objects.set_ref("bad", name, replace=False)
    with pytest.raises(DamagedFileError, match="two of its files have one path"):
        store.checkpoint("bad")
    assert [fault.kind for fault in store.verify().faults] == ["manifest"]
    assert not store.repair([folder]).whole
    assert not layout.manifest(name).exists()
    store.delete("bad")
    assert_clean(store, {"good": dict(WITHIN)})


def test_an_import_that_nobody_could_read_is_not_committed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "m", WITHIN)
    found = sources.read_source(store.handle.objects.files, folder)
    twice = sources.ImportSource((*found.files, found.files[0]), ())
    monkeypatch.setattr("tensor_dedup.store.store.read_source", lambda *_, **__: twice)
    with pytest.raises(ContradictoryManifestError, match="one path; nothing was committed"):
        store.import_(folder)
    assert list(store.handle.objects.manifest_names()) == []
    assert_clean(store, {})


def test_a_save_that_nobody_could_read_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepSnapshot, "_check_names", lambda _: None)
    with handle(tmp_path / "store") as run:
        run.save(network(1), 1)
        with pytest.raises(ContradictoryManifestError, match="one path; nothing was committed"):
            run.save(network(2), 2, files={"a": b"1", "a/b": b"2"})
        assert run.steps() == [1]
        assert run.store.verify(full=True).fine


def test_a_merge_that_nobody_could_read_is_not_committed(store: Store, tmp_path: Path) -> None:
    store.import_(write(tmp_path / "m", {"a.safetensors": weights("a")}), "m")
    with store.checkpoint("m") as checkpoint:
        ((_, tensor),) = [file.pieces for file in checkpoint.files]
    name, blobs = manifests.build([FileEntry("x", KIB + 1, 1, "")], [tensor])
    with store.handle.locked(), OrderedTransaction(store.handle.objects) as transaction:
        for part, blob in blobs.items():
            transaction.add_object(part, blob)
        with pytest.raises(ContradictoryManifestError, match="x is not 1025 bytes"):
            transaction.commit("run@1", name)
    assert [listed.name for listed in store.list()] == ["m"]


SECRET = b"-----BEGIN KEY-----"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A file of the user's own, outside of everything that is imported."""
    return write(tmp_path / "home", {"key": SECRET, "folder/key": SECRET}) / "key"


def model(folder: Path) -> Path:
    return write(folder, {"model.safetensors": weights("a"), "config.json": b"{}"})


@pytest.mark.parametrize("link", ["extra.json", "deeper"])
@pytest.mark.parametrize("how", [{}, {"external": True}, {"compress": "auto"}])
def test_a_link_out_of_an_imported_folder_is_refused(
    store: Store, tmp_path: Path, key: Path, link: str, how: dict[str, Any]
) -> None:
    folder, target = model(tmp_path / "m"), key if link == "extra.json" else key.parent / "folder"
    (folder / link).symlink_to(target)
    with refused(CheckpointFault.LINK_OUTSIDE, match=f"{folder / link}: a link to {target}, ") as e:
        store.import_(folder, **how)
    assert (e.value.facts["link"], e.value.facts["target"]) == (str(folder / link), str(target))
    assert list(store.handle.objects.containers) == []
    store.import_(folder, follow_links=True, **how)
    store.export("m", tmp_path / "out")
    assert SECRET in content(tmp_path / "out").values()


def test_links_within_an_imported_folder_are_followed(
    store: Store, tmp_path: Path, key: Path
) -> None:
    folder = model(tmp_path / "m")
    (folder / "again.json").symlink_to(folder / "config.json")
    (folder / "gone.json").symlink_to(key.with_name("gone"))
    (folder / "loop.json").symlink_to("loop.json")
    (folder / ".hidden").symlink_to(key)
    (folder / "pytorch_model.bin").symlink_to(key)  # a second copy of the weights is left out
    store.import_(folder)
    store.export("m", tmp_path / "out")
    expected = {"model.safetensors": weights("a"), "config.json": b"{}", "again.json": b"{}"}
    assert content(tmp_path / "out") == expected


def test_a_snapshot_of_a_hub_cache_is_imported_with_its_blobs(
    store: Store, tmp_path: Path, key: Path
) -> None:
    repository = tmp_path / "models--org--name"
    write(repository / "blobs", {"1": weights("a"), "2": b"{}"})
    folder = write(repository / "snapshots" / "abc", {})
    folder.mkdir(parents=True)
    for blob, name in (("1", "model.safetensors"), ("2", "config.json")):
        (folder / name).symlink_to(f"../../blobs/{blob}")
    store.import_(folder)
    assert_clean(store, {"org/name": {"model.safetensors": weights("a"), "config.json": b"{}"}})
    (folder / "extra.json").symlink_to(key)
    with refused(CheckpointFault.LINK_OUTSIDE):
        store.import_(folder, "again")


class Exchanging(RealFiles):
    """Puts a link to another file in a file's place just before that is opened."""

    def __init__(self, target: Path, by: Path) -> None:
        self._target, self._by = target, by

    def open(self, path: Path, mode: Mode) -> Handle:
        if path == self._target and not path.is_symlink():
            path.unlink()
            path.symlink_to(self._by)
        return super().open(path, mode)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_link_that_appears_while_a_folder_is_imported_is_refused(
    tmp_path: Path, name: str
) -> None:
    folder = model(tmp_path / "m")
    twin = write(tmp_path / "home", {name: (folder / name).read_bytes()}) / name
    store = open_store(tmp_path / "store", Exchanging(folder / name, twin))
    with refused(CheckpointFault.LINK_OUTSIDE, match=str(twin)):
        store.import_(folder)
    assert (folder / name).is_symlink()
    assert_clean(store, {})


def test_a_link_that_appears_while_a_folder_is_analyzed_is_refused(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    weights_file = folder / "model.safetensors"
    links = open_checkpoint(folder).links
    weights_file.rename(tmp_path / "away")
    weights_file.symlink_to(tmp_path / "away")
    with refused(CheckpointFault.LINK_OUTSIDE):
        read_digests({weights_file: []}, "blake3", None, SilentListener(), {weights_file: links})


def test_repair_follows_links(store: Store, tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    store.import_(folder, follow_links=True)
    before = content(tmp_path / "m")
    for container in list(store.handle.objects.containers):
        store.handle.objects.layout.container(container.name, container.kind).unlink()
    assert store.repair([folder]).whole
    assert_clean(store, {"m": before})


def test_a_configuration_with_a_link_out_of_its_folder_is_refused(
    tmp_path: Path, key: Path
) -> None:
    folder = write(tmp_path / "config", {"config.json": b"{}"})
    with handle(tmp_path / "store", config=folder) as run:
        run.save(network(1), 1)
    (folder / "extra.json").symlink_to(key)
    with refused(CheckpointFault.LINK_OUTSIDE, match=str(key)):
        handle(tmp_path / "store", config=folder)


ODD = os.fsdecode(b"\xff\xfe")


@pytest.mark.parametrize(
    "files",
    [
        {"model.safetensors": weights("a"), f"{ODD}.json": b"{}"},
        {"model.safetensors": weights("a"), f"{ODD}/config.json": b"{}"},
        {f"model{ODD}.safetensors": weights("a")},
        {f"model{ODD}.safetensors.index.json": index(a="x"), "x": weights("a")},
        {f"{ODD}/model.safetensors": weights("a")},
    ],
    ids=["small file", "its folder", "weights", "index", "folder of weights"],
)
@pytest.mark.parametrize("external", [False, True])
def test_names_that_are_not_utf_8_are_refused(
    store: Store, tmp_path: Path, files: Mapping[str, bytes], external: bool
) -> None:
    folder = write(tmp_path / "m", files)
    with refused(CheckpointFault.NAME_ENCODING, match=r"\\udcff\\udcfe.*rename it") as found:
        store.import_(folder, external=external)
    str(found.value).encode()
    assert list(store.handle.objects.containers) == []


def test_names_that_are_not_utf_8_and_not_read_do_no_harm(store: Store, tmp_path: Path) -> None:
    files = {f".{ODD}": b"", f"{ODD}.bin": b"", "model.safetensors": weights("a")}
    result = store.import_(write(tmp_path / "m", files))
    assert (result.files, result.skipped) == (1, (f"{ODD}.bin",))
    twin = write(tmp_path / ODD, {"model.safetensors": weights("a")})
    assert store.import_(twin, "again").manifest == result.manifest
    store.export("again", tmp_path / f"out{ODD}")
    assert content(tmp_path / f"out{ODD}") == content(twin)
    with refused(CheckpointFault.NAME_ENCODING):  # where external weights are is written down
        store.import_(twin, "external", external=True)


def test_names_that_are_not_utf_8_are_analyzed_unless_tensors_are_called_by_them(
    tmp_path: Path,
) -> None:
    hints = HintIndex(tmp_path / "hints.sqlite")
    folder = write(tmp_path / "m", {f"model{ODD}.safetensors": weights("a")})
    for _ in range(2):
        assert analyze([folder], hints=hints).unique_bytes == KIB
    write(folder, {f"{ODD}/model.safetensors": weights("a")})
    with refused(CheckpointFault.NAME_ENCODING, match="rename it"):
        analyze([folder])


@pytest.mark.parametrize("what", ["tensor", "file", "part"])
def test_names_that_are_not_unicode_are_not_saved(tmp_path: Path, what: str) -> None:
    with handle(tmp_path / "store", weights=ODD if what == "part" else "") as run:
        model = {ODD if what == "tensor" else "t": np.zeros(3)}
        with pytest.raises(NotTextError, match=r"'\\udcff\\udcfe' is not Unicode; give it another"):
            run.save(model, 1, files={ODD if what == "file" else "f": b""})
        assert run.steps() == []
    assert_clean(open_store(tmp_path / "store"), {})


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("base", "base"),
        ("my model", "my-model"),
        ("modèle ünïcode", "modele-unicode"),
        ("mode\u0300le", "modele"),  # as some file systems keep the accent
        ("模型甲", r"checkpoint-[0-9a-f]{8}"),
        ("模型甲-7b.safetensors", r"7b-[0-9a-f]{8}"),
        ("模型甲/model.safetensors", r"checkpoint-[0-9a-f]{8}"),
        ("模" * 80, r"checkpoint-[0-9a-f]{8}"),
        ("stra\u00dfe", r"stra-e-[0-9a-f]{8}"),
        ("...", r"checkpoint-[0-9a-f]{8}"),
        (ODD, r"checkpoint-[0-9a-f]{8}"),
        ("é" * 250, "e" * 200),
        ("x/../base", "base"),
        ("x/model-00001-of-00001.safetensors", "x"),
        ("x/model-00003-of-00003.safetensors", "model-00003-of-00003"),
        ("x/pytorch_model-00001-of-00002.bin", "pytorch_model-00001-of-00002"),
        ("models--o--n/snapshots/a/model-00001-of-00002.safetensors", "model-00001-of-00002"),
        ("models--o--n/snapshots/a/model.safetensors", "o/n"),
    ],
)
def test_a_folder_in_any_script_has_a_default_name(path: str, name: str) -> None:
    found = name_of(Path("/models", path))
    assert re.fullmatch(name, found)
    assert check_name(found) == found == name_of(Path("/elsewhere", path))


def test_folders_in_another_script_have_different_names(store: Store, tmp_path: Path) -> None:
    first, second = (store.import_(model(tmp_path / each)).name for each in ("模型甲", "模型乙"))
    assert first != second
    assert store.import_(tmp_path / "模型甲").unchanged
    other = write(tmp_path / "x" / "模型甲", {"model.safetensors": weights("a")})
    with pytest.raises(NameTakenError, match=f"'{first}' is there already.*--name"):
        store.import_(other)
    with pytest.raises(BadNameError, match=r"/: no name follows from it; .* --name"):
        store.import_("/")


# As names of files: 255 bytes, and 256.
LONGEST, TOO_LONG = "a/" * 63 + "abc", "a/" * 63 + "abcd"


def test_a_name_that_no_file_can_have_is_refused_before_anything_is_stored(
    store: Store, tmp_path: Path
) -> None:
    folder = model(tmp_path / "m")
    store.import_(folder, LONGEST)
    assert_clean(store, {LONGEST: content(folder)})
    store.delete(LONGEST)
    store.gc(0)
    for name in (TOO_LONG, "a/" * 99 + "a"):
        with pytest.raises(BadNameError, match=r"256 bytes|397 bytes"):
            store.import_(folder, name)
    assert list(store.handle.objects.containers) == []


def test_a_step_whose_name_no_file_can_have_is_refused_before_anything_is_stored(
    tmp_path: Path,
) -> None:
    run = LONGEST[:-2]
    with handle(tmp_path / "store", run) as steps:
        steps.save({"t": np.zeros(100)}, 1)
        with pytest.raises(BadNameError, match="256 bytes"):
            steps.save({"t": np.ones(100)}, 10)
        with pytest.raises(BadNameError, match="260 bytes"):
            steps.keep(1)
        assert steps.steps() == [1]
        assert steps.load(1, None)["t"].tolist() == [0] * 100
        assert len(list(steps.store.handle.objects.containers)) == 1


def test_a_default_name_is_cut_to_what_a_file_can_have(store: Store, tmp_path: Path) -> None:
    repository = "models--" + "--".join("a" * 80)
    name = store.import_(model(tmp_path / repository / "snapshots" / "abc")).name
    assert name == "/".join("a" * 64)
    (snapshot,) = sources.snapshots(tmp_path)
    assert snapshot.name == "/".join("a" * 63) + "@abc"
    assert store.import_(snapshot.path, snapshot.name, external=True).name == snapshot.name
