"""`store://NAME` as a model: tensors from the store, everything else from a folder made of it."""

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors
from vllm import LLM
from vllm.engine import arg_utils

from files import reads
from models import tiny_checkpoints as checkpoints
from store_runs import stores
from tensor_dedup import Store
from tensor_dedup.errors import ChangedFileError, ConfigError, UnsupportedError
from tensor_dedup.formats.safetensors import read_header
from tensor_dedup.loader.report import ModelReport
from tensor_dedup.patches.vllm.load_formats import KEY, LOAD_FORMAT
from tensor_dedup.patches.vllm.loader import TensorDedupLoader
from tensor_dedup.store.errors import (
    ChangedExternalError,
    CorruptTensorError,
    NotAStoreError,
    UnknownNameError,
)
from vllm_runs import engines, plain

pytestmark = pytest.mark.vllm

# Any: what is patched into vLLM cannot be in its annotations.
EngineArgs: Any = arg_utils.EngineArgs
AsyncEngineArgs: Any = arg_utils.AsyncEngineArgs
BASE, FINE_TUNE = "store://org/base@v1", "store://fine_tune"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> checkpoints.Pair:
    made = checkpoints.make("llama_tied", tmp_path_factory.mktemp("urls"))
    engines.warm_up(made.base)
    return made


@pytest.fixture(scope="module")
def expected(pair: checkpoints.Pair) -> dict[str, tuple[plain.Answer, ...]]:
    """What plain vLLM answers."""
    found = {}
    for url, path in ((BASE, pair.base), (FINE_TUNE, pair.fine_tune)):
        llm = plain.engine(path)
        found[url] = plain.outputs(llm)
        engines.drop(llm)
    assert found[BASE] != found[FINE_TUNE]
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where checkouts go."""
    monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(pair: checkpoints.Pair, tmp_path: Path) -> Path:
    """A store that holds the pair."""
    with Store.open(tmp_path / "store") as store:
        store.import_(pair.base, BASE.removeprefix("store://"))
        store.import_(pair.fine_tune, FINE_TUNE.removeprefix("store://"))
    return tmp_path / "store"


def answers_and_report(
    url: str, folder: Path, **config: Any
) -> tuple[tuple[plain.Answer, ...], ModelReport]:
    """Load, ask, let go."""
    llm = engines.sharing(url, store=str(folder), **config)
    report = engines.last_report()
    answers = plain.outputs(llm)
    engines.drop(llm)
    del llm
    gc.collect()
    return answers, report


def test_a_stored_checkpoint_loads_as_its_files_would(
    folder: Path,
    pair: checkpoints.Pair,
    expected: dict[str, tuple[plain.Answer, ...]],
) -> None:
    with reads.counted(pair.base, pair.fine_tune) as seen:
        answers, report = answers_and_report(BASE, folder)
    assert answers == expected[BASE]
    assert (report.name, report.known, report.skipped) == (BASE, True, [])
    assert report.bytes_from_store == report.bytes_read == checkpoints.nbytes(pair.base)
    assert report.checkpoint_bytes == checkpoints.nbytes(pair.base)
    assert report.header_bytes > 0
    assert seen.bytes() == 0  # the folder that was imported is not needed


def test_a_fine_tune_reads_only_what_differs(
    folder: Path, expected: dict[str, tuple[plain.Answer, ...]]
) -> None:
    first = engines.sharing(BASE, store=str(folder))
    second = engines.sharing(FINE_TUNE, store=str(folder))
    report = engines.last_report()
    forms = engines.forms(plain.model(second), plain.model(first))
    assert sum(forms.values()) > len(forms) / 2
    assert report.known
    assert 0 < report.bytes_read < report.checkpoint_bytes / 10
    assert report.bytes_from_store == report.bytes_read == report.bytes_hashed
    assert (plain.outputs(first), plain.outputs(second)) == (expected[BASE], expected[FINE_TUNE])
    engines.drop(first, second)


def test_it_shares_with_the_same_model_loaded_from_its_folder(
    folder: Path, pair: checkpoints.Pair, expected: dict[str, tuple[plain.Answer, ...]]
) -> None:
    first = engines.sharing(pair.base)
    answers, report = answers_and_report(BASE, folder)
    assert report.shared_bytes == report.total_bytes > 0
    assert report.bytes_read == report.bytes_hashed == 0
    assert answers == expected[BASE]
    engines.drop(first)


def test_always_verifying_reads_all_of_it(
    folder: Path, pair: checkpoints.Pair, expected: dict[str, tuple[plain.Answer, ...]]
) -> None:
    first = engines.sharing(pair.base)
    answers, report = answers_and_report(BASE, folder, verify="always")
    assert report.shared_bytes == report.total_bytes > 0
    assert not report.known
    assert report.bytes_from_store == checkpoints.nbytes(pair.base)
    # Fused weights that are not packed are found by the digest of the result.
    again = (
        0
        if plain.packs()
        else sum(
            each.nbytes
            for name, each in checkpoints.tensors(pair.base).items()
            if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        )
    )
    assert report.bytes_hashed == report.bytes_from_store + again
    assert answers == expected[BASE]
    engines.drop(first)


def test_comparing_bytes_shares_all_the_same(
    folder: Path, expected: dict[str, tuple[plain.Answer, ...]]
) -> None:
    # What an earlier test has left resident came from its own store, which is gone by now: there
    # is nothing to compare it with.
    gc.collect()
    first = engines.sharing(BASE, store=str(folder), verify_bytes=True)
    answers, report = answers_and_report(BASE, folder, verify_bytes=True)
    assert report.collisions == 0
    assert report.shared_bytes == report.total_bytes > 0
    assert report.bytes_read > 0
    assert answers == expected[BASE]
    engines.drop(first)


def test_it_loads_plainly_where_it_cannot_be_shared(
    folder: Path,
    expected: dict[str, tuple[plain.Answer, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TensorDedupLoader, "_refusal", lambda *_: "this test wants it")
    answers, report = answers_and_report(FINE_TUNE, folder)
    assert answers == expected[FINE_TUNE]
    assert report.skipped == [("<model>", "this test wants it")]
    assert report.name == FINE_TUNE


def test_stored_encoded_it_is_the_same_model(
    pair: checkpoints.Pair, expected: dict[str, tuple[plain.Answer, ...]], tmp_path: Path
) -> None:
    with Store.open(tmp_path / "store") as store:
        store.import_(pair.base, BASE.removeprefix("store://"))
        url = FINE_TUNE.removeprefix("store://")
        result = store.import_(pair.fine_tune, url, compress="auto")
        assert result.encoded_tensors > 0
    answers, report = answers_and_report(FINE_TUNE, tmp_path / "store")
    assert report.bytes_from_store == checkpoints.nbytes(pair.fine_tune)
    assert answers == expected[FINE_TUNE]


def test_indexed_in_place_it_is_the_same_model_until_its_file_changes(
    pair: checkpoints.Pair, expected: dict[str, tuple[plain.Answer, ...]], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(pair.fine_tune, tmp_path / "fine_tune"))
    Store.open(tmp_path / "store").import_(path, external=True)
    with reads.counted(path) as seen:
        answers, report = answers_and_report(FINE_TUNE, tmp_path / "store")
    assert answers == expected[FINE_TUNE]
    assert report.known
    assert seen.data_bytes() == report.bytes_from_store == checkpoints.nbytes(path)
    # Of the same size, and with a header of the same form.
    shutil.copyfile(pair.base / checkpoints.WEIGHTS, path / checkpoints.WEIGHTS)
    with pytest.raises(ChangedExternalError, match=str(path / checkpoints.WEIGHTS)):
        engines.sharing(FINE_TUNE, store=str(tmp_path / "store"))


def test_a_reload_reads_the_store_again(
    folder: Path, expected: dict[str, tuple[plain.Answer, ...]]
) -> None:
    llm = engines.sharing(BASE, store=str(folder))
    llm.collective_rpc("reload_weights")
    assert plain.outputs(llm) == expected[BASE]
    engines.drop(llm)


@pytest.mark.parametrize("shared", [True, False])
def test_damage_is_an_error_and_never_weights(
    folder: Path, pair: checkpoints.Pair, *, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shared:
        monkeypatch.setattr(TensorDedupLoader, "_refusal", lambda *_: "this test wants it")
    tensor = max(read_header(pair.base / checkpoints.WEIGHTS).tensors, key=lambda t: t.nbytes)
    file = (pair.base / checkpoints.WEIGHTS).read_bytes()
    damage(folder, file[tensor.start : tensor.start + tensor.nbytes])
    with pytest.raises(CorruptTensorError, match=f"{tensor.name}.*repair --from PATH"):
        engines.sharing(BASE, store=str(folder))
    store = Store.open(folder)
    assert not store.verify().fine
    assert store.repair([pair.base]).whole


def damage(folder: Path, piece: bytes) -> None:
    """Flip the last bit of a piece, wherever it is in a store."""
    found = 0
    for path in folder.glob("containers/*/*"):
        at = path.read_bytes().find(piece)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + len(piece) - 1)
                file.write(bytes([piece[-1] ^ 1]))
            found += 1
    assert found


def test_a_name_that_is_replaced_meanwhile_is_refused(folder: Path, pair: checkpoints.Pair) -> None:
    args = EngineArgs(model=BASE, tensor_dedup={"store": str(folder)}, max_model_len=256)
    args.skip_tokenizer_init = True
    config = args.create_engine_config()
    Store.open(folder).import_(pair.fine_tune, BASE.removeprefix("store://"), replace=True)
    loader = TensorDedupLoader(config.load_config)
    with pytest.raises(ChangedFileError, match="replaced since this engine was configured"):
        next(loader.get_all_weights(config.model_config, plain_module()))


def plain_module() -> Any:
    """A model that wants nothing special of a loader."""
    import torch

    return torch.nn.Module()


class TestArguments:
    """What becomes of the arguments, without an engine."""

    @pytest.mark.parametrize("cls", [EngineArgs, AsyncEngineArgs])
    def test_the_model_becomes_a_folder_with_everything_but_the_weights(
        self, cls: Any, folder: Path, pair: checkpoints.Pair, cache: Path
    ) -> None:
        args = cls(model=BASE, tokenizer=BASE, tensor_dedup={"store": str(folder)})
        path = Path(args.model)
        assert path.is_relative_to(cache)
        assert path.name == "base@v1"
        assert args.tokenizer == args.model
        assert args.served_model_name == BASE
        assert args.load_format == LOAD_FORMAT
        entry = args.model_loader_extra_config[KEY]
        assert json.loads(json.dumps(entry)) == entry
        small = {n: d for n, d in stores.content(pair.base).items() if n != checkpoints.WEIGHTS}
        shown = stores.content(path)
        header = shown.pop(checkpoints.WEIGHTS)
        assert shown == small
        assert (pair.base / checkpoints.WEIGHTS).read_bytes().startswith(header)
        # Who reads weights past us gets none.
        with pytest.raises(safetensors.SafetensorError):
            safetensors.safe_open(path / checkpoints.WEIGHTS, "pt")

    def test_a_tampered_folder_is_made_good(self, folder: Path) -> None:
        def make() -> Path:
            return Path(EngineArgs(model=BASE, tensor_dedup={"store": str(folder)}).model)

        before = stores.content(make())
        config = make() / "config.json"
        config.write_text("{}")
        (make() / checkpoints.WEIGHTS).unlink()
        assert stores.content(make()) == before
        config.unlink()
        config.symlink_to("/dev/null")
        assert stores.content(make()) == before
        assert not config.is_symlink()
        shutil.rmtree(make())
        assert stores.content(make()) == before

    def test_copies_of_the_arguments_load_the_same(self, folder: Path) -> None:
        import dataclasses

        args = EngineArgs(model=BASE, tensor_dedup={"store": str(folder)})
        again = dataclasses.replace(args, seed=7)
        assert again.model_loader_extra_config == args.model_loader_extra_config
        assert again.model == args.model

    @pytest.mark.parametrize("value", [True, {}, {"store": True}])
    def test_the_name_alone_means_the_users_own_store(
        self, value: object, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TENSOR_DEDUP_STORE", str(folder))
        entry = EngineArgs(model=BASE, tensor_dedup=value).model_loader_extra_config[KEY]
        assert entry["store"] is True
        assert entry["stored"]["store"] == str(folder)

    @pytest.mark.parametrize("value", [None, False, {"enabled": False}])
    def test_without_us_it_is_refused_in_our_words(self, value: object) -> None:
        args = EngineArgs(model=BASE, tensor_dedup=value)
        assert args.model == BASE
        with pytest.raises(ConfigError, match=r"store://org/base@v1.*add tensor_dedup="):
            args.create_engine_config()
        with pytest.raises(ConfigError, match="--tensor-dedup"):
            LLM(model=BASE)

    def test_what_is_not_there_is_said_at_once(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(UnknownNameError, match="no checkpoint 'nobody'"):
            EngineArgs(model="store://nobody", tensor_dedup={"store": str(folder)})
        with pytest.raises(NotAStoreError):
            EngineArgs(model=BASE, tensor_dedup={"store": str(tmp_path / "none")})
        assert not (tmp_path / "none").exists()

    def test_a_lone_weights_file_is_no_model(self, folder: Path, pair: checkpoints.Pair) -> None:
        Store.open(folder).import_(pair.base / checkpoints.WEIGHTS, "lone")
        with pytest.raises(UnsupportedError, match=r"no config\.json.*import the folder"):
            EngineArgs(model="store://lone", tensor_dedup={"store": str(folder)})
