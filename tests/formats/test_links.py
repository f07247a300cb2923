"""Links from a Hugging Face cache's repositories into the blobs that all of them share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from files.hub_caches import snapshot
from files.refusals import refused
from store_runs.stores import safetensors, u8, write
from tensor_dedup.formats.checkpoint import open_checkpoint
from tensor_dedup.formats.errors import CheckpointFault
from tensor_dedup.formats.links import LinkBoundary

WEIGHTS = safetensors(u8(w=b"weights"))
XET = "67" + "1f" * 31
SECRET = safetensors(u8(secret=b"a key"))
MARKER = ".huggingface-shared-blobs"


class Cache:
    """A cache made by hand: one repository, whose blob of weights is in the shared store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.repository = root / "models--org--name"
        self.snapshot = self.repository / "snapshots" / "abc"
        self.store = write(root / "blobs", {MARKER: b"1\n", f"67/{XET}": WEIGHTS})
        self.shared = self.store / "67" / XET
        self.blob = self.repository / "blobs" / "e7a9"
        self.snapshot.mkdir(parents=True)
        self.blob.parent.mkdir()
        self.blob.symlink_to(f"../../blobs/67/{XET}")
        (self.snapshot / "model.safetensors").symlink_to("../../blobs/e7a9")

    def lead(self, target: str | Path) -> None:
        """Let the repository's blob be a link to another place."""
        self.blob.unlink()
        self.blob.symlink_to(target)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "hub")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of weights that is the user's own, in no cache."""
    return write(tmp_path / "home", {"key": SECRET}) / "key"


def names(path: Path) -> list[str]:
    return [name for name, _, _ in open_checkpoint(path).tensors()]


def assert_refused(folder: Path, target: Path) -> None:
    link = folder / "model.safetensors"
    with refused(
        CheckpointFault.LINK_OUTSIDE, match=f"{link}: a link to .*--follow-links"
    ) as found:
        open_checkpoint(folder)
    assert found.value.facts["target"] == str(target)
    assert names_with_links(folder)  # it is there, and can be read by who trusts it


def names_with_links(folder: Path) -> list[str]:
    return [name for name, _, _ in open_checkpoint(folder, follow_links=True).tensors()]


def test_a_snapshot_that_the_library_made(tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    folder = snapshot(cache, "org/name", {"model.safetensors": WEIGHTS, "config.json": b"{}"})
    blob = (folder / "model.safetensors").resolve()
    repository = cache / "models--org--name"
    assert blob.parent.parent == cache / "blobs"
    assert not blob.is_relative_to(repository)
    assert (folder / "config.json").resolve().is_relative_to(repository)
    opened = open_checkpoint(folder)
    assert [name for name, _, _ in opened.tensors()] == ["w"]
    assert [file.path for file in opened.files] == [folder / "model.safetensors"]
    # Another repository with the same bytes has a link to the same blob.
    other = snapshot(cache, "org/copy", {"model.safetensors": WEIGHTS})
    assert (other / "model.safetensors").resolve() == blob
    assert names(other) == ["w"]


def test_a_blob_of_the_shared_store_is_followed(cache: Cache, tmp_path: Path) -> None:
    assert names(cache.snapshot) == ["w"]
    (tmp_path / "named").symlink_to(cache.root)
    assert names(tmp_path / "named" / "models--org--name" / "snapshots" / "abc") == ["w"]
    deeper = write(cache.snapshot / "unet", {"config.json": b"{}"})
    (deeper / "model.safetensors").symlink_to("../../../blobs/e7a9")
    assert names(deeper) == ["w"]
    cache.lead(cache.shared)  # by an absolute path, as on a file system without relative links
    assert names(cache.snapshot) == ["w", "unet/w"]


def _no_marker(cache: Cache, secret: Path) -> Path:
    (cache.store / MARKER).unlink()
    return cache.shared


def _marker_is_a_link(cache: Cache, secret: Path) -> Path:
    (cache.store / MARKER).rename(cache.root / "marker")
    (cache.store / MARKER).symlink_to("../marker")
    return cache.shared


def _marker_is_a_folder(cache: Cache, secret: Path) -> Path:
    (cache.store / MARKER).unlink()
    (cache.store / MARKER).mkdir()
    return cache.shared


def _marker_in_the_repository(cache: Cache, secret: Path) -> Path:
    """A hostile repository can bring a marker, but not put it beside the blobs of others."""
    (cache.store / MARKER).rename(cache.repository / "blobs" / MARKER)
    return cache.shared


def _moved(name: str) -> Callable[[Cache, Path], Path]:
    """The bytes lie in the store under a name that is no blob's."""

    def act(cache: Cache, secret: Path) -> Path:
        target, moving = cache.store / name, cache.store / "moving"
        cache.shared.rename(moving)
        target.parent.mkdir(parents=True, exist_ok=True)
        moving.rename(target)
        cache.lead(target)
        return target

    act.__name__ = name
    return act


def _blob_is_a_link_out(cache: Cache, secret: Path) -> Path:
    cache.shared.unlink()
    cache.shared.symlink_to(secret)
    return secret


def _prefix_is_a_link_out(cache: Cache, secret: Path) -> Path:
    away = cache.root.parent / "away"
    cache.shared.parent.rename(away)
    cache.shared.parent.symlink_to(away)
    return away / XET


def _store_is_a_link_out(cache: Cache, secret: Path) -> Path:
    """The user's own cache has blobs, and a hostile one calls them its own."""
    own = cache.root.parent / "own"
    own.mkdir()
    cache.store.rename(own / "blobs")
    cache.store.symlink_to(own / "blobs")
    return own / "blobs" / "67" / XET


def _store_of_another_cache(cache: Cache, secret: Path) -> Path:
    other = Cache(cache.root.parent / "other")
    cache.lead(other.shared)
    return other.shared


def _blob_of_another_repository(cache: Cache, secret: Path) -> Path:
    other = write(cache.root / "models--org--other" / "blobs", {"f00": WEIGHTS}) / "f00"
    cache.shared.unlink()
    cache.shared.symlink_to("../../models--org--other/blobs/f00")
    return other


def _file_of_the_cache(cache: Cache, secret: Path) -> Path:
    (cache.root / "token").write_bytes(SECRET)
    cache.lead("../../token")
    return cache.root / "token"


def _blobs_of_the_repository_are_elsewhere(cache: Cache, secret: Path) -> Path:
    (cache.repository / "blobs").rename(cache.root.parent / "moved")
    (cache.repository / "blobs").symlink_to(cache.root.parent / "moved")
    target = cache.root.parent / "moved" / "e7a9"
    target.unlink()
    target.write_bytes(SECRET)
    return target


@pytest.mark.parametrize(
    "attack",
    [
        *(_no_marker, _marker_is_a_link, _marker_is_a_folder, _marker_in_the_repository),
        *map(_moved, (XET, f"68/{XET}", f"67/{XET}.refs", f"67/{XET[:63]}", f"67/{XET.upper()}")),
        *map(_moved, (f"67/{XET}/{XET}", f"67/67/{XET}", f"more/67/{XET}", "67/config.json")),
        *(_blob_is_a_link_out, _prefix_is_a_link_out, _store_is_a_link_out),
        *(_store_of_another_cache, _blob_of_another_repository, _file_of_the_cache),
        _blobs_of_the_repository_are_elsewhere,
    ],
)
def test_what_is_no_blob_of_the_same_store_is_refused(
    cache: Cache, secret: Path, attack: Callable[[Cache, Path], Path]
) -> None:
    assert names(cache.snapshot) == ["w"]
    assert_refused(cache.snapshot, attack(cache, secret))


@pytest.mark.parametrize("folder", ["models--org--name", "m/snapshots/abc", "m/models--x/abc"])
def test_only_a_snapshot_has_shared_blobs(cache: Cache, folder: str) -> None:
    plain = cache.root / folder / "plain"
    plain.mkdir(parents=True)
    (plain / "model.safetensors").symlink_to(cache.shared)
    assert_refused(plain, cache.shared)


def test_a_repository_below_a_cache_is_not_in_it(cache: Cache) -> None:
    inner = cache.root / "deeper" / "models--org--name" / "snapshots" / "abc"
    inner.mkdir(parents=True)
    (inner / "model.safetensors").symlink_to(cache.shared)
    assert_refused(inner, cache.shared)


def test_a_shared_blob_that_becomes_a_link_is_refused(
    cache: Cache, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = LinkBoundary.check

    def exchanged(links: LinkBoundary, path: Path) -> None:
        check(links, path)
        if path.name == "model.safetensors" and not cache.shared.is_symlink():
            cache.shared.unlink()
            cache.shared.symlink_to(secret)

    monkeypatch.setattr(LinkBoundary, "check", exchanged)
    with refused(CheckpointFault.LINK_OUTSIDE, match=str(secret)):
        open_checkpoint(cache.snapshot)
    assert cache.shared.is_symlink()
