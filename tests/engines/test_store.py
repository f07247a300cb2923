"""Loading with a store: what it gives, what it keeps, and that it is never believed blindly."""

import gc
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from files import reads
from models import tiny_checkpoints as checkpoints
from store_runs import stores
from tensor_dedup import Store
from tensor_dedup.formats.safetensors import read_header
from tensor_dedup.loader.checkpoint_io.hints import StoreHints
from tensor_dedup.loader.report import ModelReport
from tensor_dedup.patches.vllm.loader import TensorDedupLoader
from vllm_runs import engines, plain

pytestmark = pytest.mark.vllm


@dataclass
class Load:
    """One engine that was loaded, asked and let go."""

    answers: tuple[plain.Answer, ...]
    report: ModelReport
    checkpoint: reads.Reads
    store: reads.Reads


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> checkpoints.Pair:
    made = checkpoints.make("llama", tmp_path_factory.mktemp("store"))
    engines.warm_up(made.base)
    return made


@pytest.fixture(scope="module")
def expected(pair: checkpoints.Pair) -> dict[str, tuple[plain.Answer, ...]]:
    """What plain vLLM answers."""
    found = {}
    for path in (pair.base, pair.fine_tune):
        llm = plain.engine(path)
        found[path.name] = plain.outputs(llm)
        engines.drop(llm)
    assert found[pair.base.name] != found[pair.fine_tune.name]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def load(path: Path | str, folder: Path, **config: Any) -> Load:
    """Load with the store in `folder`, counting what is read of both."""
    containers = sorted((folder / "containers").glob("*/*"))
    with reads.counted(Path(path)) as checkpoint, reads.counted(*containers) as store:
        llm = engines.sharing(path, store=str(folder), **config)
    report = engines.last_report()
    answers = plain.outputs(llm)
    engines.drop(llm)
    del llm
    gc.collect()
    return Load(answers, report, checkpoint, store)


def copy(path: Path, folder: Path) -> Path:
    """A copy that nobody has hashed yet."""
    return Path(shutil.copytree(path, folder / path.name))


def test_what_was_loaded_is_written_and_comes_back_from_the_store(
    pair: checkpoints.Pair,
    expected: dict[str, tuple[plain.Answer, ...]],
    folder: Path,
    tmp_path: Path,
) -> None:
    base = copy(pair.base, tmp_path)
    engines.leave_alone(base / checkpoints.WEIGHTS)
    first = load(base, folder, store_writes=True)
    assert first.answers == expected["base"]
    assert first.report.stored_as == "base"
    assert first.report.skipped == []
    assert first.report.bytes_from_store == 0
    stores.assert_holds(Store.open(folder), {"base": stores.content(base)})

    second = load(base, folder)
    assert second.answers == expected["base"]
    assert second.report.known
    assert second.checkpoint.data_bytes() == 0
    assert second.report.bytes_from_store == second.report.bytes_read > 0
    assert second.store.bytes() >= second.report.bytes_from_store


@pytest.fixture(scope="module")
def old(pair: checkpoints.Pair, tmp_path_factory: pytest.TempPathFactory) -> checkpoints.Pair:
    """Copies of the pair that were left alone for long enough to be remembered."""
    root = tmp_path_factory.mktemp("old")
    both = checkpoints.Pair(copy(pair.base, root), copy(pair.fine_tune, root), pair.changed)
    engines.leave_alone(both.base / checkpoints.WEIGHTS, both.fine_tune / checkpoints.WEIGHTS)
    return both


@pytest.fixture
def known(old: checkpoints.Pair, folder: Path) -> checkpoints.Pair:
    """A pair that is in the store, and remembered. Not to be changed."""
    with Store.open(folder) as store:
        for path in (old.base, old.fine_tune):
            store.import_(path, hints=StoreHints())
    return old


def test_a_fine_tune_takes_from_the_store_only_what_is_not_resident(
    known: checkpoints.Pair, expected: dict[str, tuple[plain.Answer, ...]], folder: Path
) -> None:
    first = engines.sharing(known.base, store=str(folder))
    base = engines.last_report()
    assert base.known  # an import is a hint: nothing was hashed but what was read
    assert base.bytes_from_store == base.bytes_read == checkpoints.nbytes(known.base)
    second = load(known.fine_tune, folder)
    assert second.report.shared_bytes > 0
    assert second.answers == expected["fine_tune"]
    assert second.checkpoint.data_bytes() == 0
    assert 0 < second.report.bytes_from_store < checkpoints.nbytes(known.base) / 10
    assert second.report.bytes_hashed == second.report.bytes_read
    assert plain.outputs(first) == expected["base"]
    engines.drop(first)


def test_a_changed_file_is_read_and_never_taken_for_the_one_that_is_stored(
    pair: checkpoints.Pair,
    expected: dict[str, tuple[plain.Answer, ...]],
    folder: Path,
    tmp_path: Path,
) -> None:
    path = copy(pair.base, tmp_path)
    engines.leave_alone(path / checkpoints.WEIGHTS)
    Store.open(folder).import_(path, hints=StoreHints())
    assert load(path, folder).report.known
    # The same path, name, size and inode; other bytes.
    shutil.copyfile(pair.fine_tune / checkpoints.WEIGHTS, path / checkpoints.WEIGHTS)
    changed = load(path, folder)
    assert changed.answers == expected["fine_tune"]
    assert not changed.report.known
    assert changed.report.bytes_from_store == 0
    assert changed.checkpoint.data_bytes() == checkpoints.nbytes(path)


def test_always_verifying_reads_the_checkpoint_and_not_the_store(
    known: checkpoints.Pair, expected: dict[str, tuple[plain.Answer, ...]], folder: Path
) -> None:
    found = load(known.base, folder, verify="always")
    assert found.answers == expected["base"]
    assert found.report.bytes_from_store == 0
    assert found.checkpoint.data_bytes() == checkpoints.nbytes(known.base)


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_damage_in_the_store_is_read_from_the_checkpoint_instead(
    known: checkpoints.Pair,
    expected: dict[str, tuple[plain.Answer, ...]],
    folder: Path,
    share: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (raw,) = folder.glob("containers/*/*.raw")
    head = read_header(raw).header_bytes
    flip(raw, head + int((raw.stat().st_size - head) * share))
    with caplog.at_level(logging.WARNING, "tensor_dedup"):
        found = load(known.base, folder)
    assert found.answers == expected["base"]
    assert "do not have the digest" in caplog.text
    assert "the checkpoint's own file is read instead" in caplog.text
    assert 0 < found.checkpoint.data_bytes() < checkpoints.nbytes(known.base)
    assert found.report.bytes_from_store + found.checkpoint.data_bytes() >= (
        checkpoints.nbytes(known.base)
    )
    assert not Store.open(folder).verify().fine


def test_a_store_that_is_gone_changes_nothing(
    known: checkpoints.Pair,
    expected: dict[str, tuple[plain.Answer, ...]],
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shutil.rmtree(folder)
    with caplog.at_level(logging.WARNING, "tensor_dedup"):
        found = load(known.base, folder)
    assert found.answers == expected["base"]
    assert "nothing is read from a store" in caplog.text
    assert not folder.exists()


def test_what_the_store_has_is_not_written_again(
    known: checkpoints.Pair, folder: Path, tmp_path: Path
) -> None:
    before = stores.content(folder / "containers")
    again = load(known.base, folder, store_writes=True)
    assert again.report.stored_as == "base"
    assert again.checkpoint.data_bytes() == 0  # nor read again
    # Another checkpoint in a folder of that name is another checkpoint.
    other = tmp_path / "elsewhere" / "base"
    shutil.copytree(known.fine_tune, other)
    marked = {str(load(other, folder, store_writes=True).report.stored_as) for _ in range(2)}
    assert [name.partition("@")[0] for name in marked] == ["base"]
    assert stores.content(folder / "containers") == before
    stores.assert_holds(
        Store.open(folder),
        {
            "base": stores.content(known.base),
            "fine_tune": stores.content(known.fine_tune),
            marked.pop(): stores.content(other),
        },
    )


def test_an_import_that_fails_does_not_fail_the_load(
    known: checkpoints.Pair,
    expected: dict[str, tuple[plain.Answer, ...]],
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shutil.rmtree(folder)
    folder.write_text("a file where the store should be")
    with caplog.at_level(logging.WARNING, "tensor_dedup"):
        found = load(known.base, folder, store_writes=True)
    assert found.answers == expected["base"]
    assert found.report.stored_as is None
    [(what, why)] = found.report.skipped
    assert what == "<store>"
    assert "not written to the store" in why
    assert caplog.text.count("not written to the store") == 1


def test_a_plain_load_is_kept_too(pair: checkpoints.Pair, folder: Path, tmp_path: Path) -> None:
    base = copy(pair.base, tmp_path)
    with mock.patch.object(TensorDedupLoader, "_refusal", return_value="this test wants it"):
        found = load(base, folder, store_writes=True)
    assert found.report.skipped == [("<model>", "this test wants it")]
    assert found.report.stored_as == "base"
    stores.assert_holds(Store.open(folder), {"base": stores.content(base)})


def flip(path: Path, at: int) -> None:
    """One bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
