"""What an import leaves in the hints, and that it takes nothing from them."""

from pathlib import Path

import pytest

from files import hinted
from store_runs import stores
from tensor_dedup import Store
from tensor_dedup.digest import digest
from tensor_dedup.formats.safetensors import read_header
from tensor_dedup.loader.checkpoint_io.hints import QUIET_NS, FileIdentity, HintIndex, StoreHints
from tensor_dedup.loader.checkpoint_io.write_back import keep
from tensor_dedup.loader.report import ModelReport
from tensor_dedup.store.files import FileStatus

FILE = "model.safetensors"
A, B = stores.noise(1, 90_000), stores.noise(2, 50)


class Later(StoreHints):
    """As if every import began 2 s after the file's last change."""

    def imported(self, fd: int, before: FileStatus, began_ns: int, digests: object) -> None:
        quiet = max(before.mtime_ns, before.ctime_ns) + QUIET_NS
        super().imported(fd, before, max(began_ns, quiet), digests)  # type: ignore[arg-type]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = stores.safetensors(stores.u8(a=A, b=B))
    return stores.write(tmp_path / "model", {FILE: file, "config.json": b"{}"})


@pytest.fixture
def index(tmp_path: Path) -> HintIndex:
    return HintIndex(tmp_path / "hints.sqlite")


def true_digests(path: Path) -> dict[tuple[int, int], str]:
    data = path.read_bytes()
    return {
        (spec.start, spec.nbytes): digest(data[spec.start : spec.start + spec.nbytes])
        for spec in read_header(path).tensors
    }


def test_an_imported_file_is_remembered(model: Path, index: HintIndex, tmp_path: Path) -> None:
    Store.open(tmp_path / "store").import_(model, hints=Later(index))
    assert hinted.known(index, model / FILE) == true_digests(model / FILE)


def test_a_file_written_just_now_is_not(model: Path, index: HintIndex, tmp_path: Path) -> None:
    Store.open(tmp_path / "store").import_(model, hints=StoreHints(index))
    assert hinted.known(index, model / FILE) == {}


def test_an_import_believes_no_hint(model: Path, index: HintIndex, tmp_path: Path) -> None:
    lies = dict.fromkeys(true_digests(model / FILE), digest(b"something else"))
    with hinted.opened(model / FILE) as fd:
        identity = FileIdentity.of(fd)
        assert index.record(fd, identity, hinted.old_enough(identity), "blake3", lies)
    store = Store.open(tmp_path / "store")
    store.import_(model, hints=Later(index))
    stores.assert_clean(store, {"model": stores.content(model)})
    assert hinted.known(index, model / FILE) == true_digests(model / FILE)


def test_known_digests_tell_the_manifest_without_reading(
    model: Path, index: HintIndex, tmp_path: Path
) -> None:
    store = Store.open(tmp_path / "store")
    imported = store.import_(model)
    known = true_digests(model / FILE)
    assert store.expected_manifest(model, lambda _path, _fd: known) == imported.manifest
    assert store.expected_manifest(model, lambda _path, _fd: {}) == imported.manifest
    lies = dict.fromkeys(known, digest(b"something else"))
    assert store.expected_manifest(model, lambda _path, _fd: lies) != imported.manifest
    assert store.manifest("model") == imported.manifest
    assert store.manifest("nobody") is None


def test_what_an_import_of_all_files_holds_is_kept_already(model: Path, tmp_path: Path) -> None:
    (model / "optimizer.pt").write_bytes(b"state")
    with Store.open(tmp_path / "store") as store:
        assert store.import_(model, all_files=True).left_out == ()
        report = ModelReport()
        keep(str(tmp_path / "store"), model, report, trust=False)
        assert (report.stored_as, report.skipped) == ("model", [])
        assert store.names() == ["model"]


def test_keeping_never_replaces_what_another_folder_put_there(model: Path, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    file = stores.safetensors(stores.u8(a=B, b=A))
    other = stores.write(tmp_path / "other" / "model", {FILE: file})
    names = []
    for folder in (model, other, model, other):
        report = ModelReport()
        keep(str(store.path), folder, report, trust=True)
        assert report.skipped == []
        names.append(report.stored_as)
    assert names[0] == names[2] == "model"
    assert names[1] == names[3] != "model"
    stores.assert_holds(
        store, {"model": stores.content(model), str(names[1]): stores.content(other)}
    )
