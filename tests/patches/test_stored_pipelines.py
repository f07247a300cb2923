"""`store://NAME` for Diffusers and Transformers: what is resident is not read."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from manager_runs import managers
from models import tiny_checkpoints as checkpoints
from models import tiny_pipelines
from models.tiny_pipelines import equal, image, load, nbytes, parameters, shared
from tensor_dedup import ConfigError, Store, enable, report, shares_memory, verify
from tensor_dedup.analyze import analyze
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.formats.safetensors import read_header
from tensor_dedup.store.errors import CorruptTensorError, UnknownNameError
from tensor_dedup.training import CheckpointStore

pytestmark = pytest.mark.usefixtures("others")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pipelines")
    tiny_pipelines.make(root)
    return root


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, bytes]:
    """What each pipeline draws when it is loaded plainly."""
    return {name: image(load(folder / name)) for name in ("sd", "tuned")}


@pytest.fixture
def store(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(tmp_path / "cache"))
    with Store.open(tmp_path / "store") as made:
        for name in ("sd", "tuned", "fp16"):
            made.import_(folder / name)
    return tmp_path / "store"


def stored(name: str, **options: Any) -> Any:
    url: Any = f"store://{name}"
    return load(url, **options)


def weights(path: Path) -> int:
    """The bytes of the distinct tensors in the files of a pipeline."""
    return analyze([path]).unique_bytes


def test_the_second_pipeline_reads_what_differs(
    folder: Path, alone: dict[str, bytes], store: Path
) -> None:
    with enable({"store": store}):
        first = stored("sd")
        one = report().models[-1]
        second = stored("tuned")
        two = report().models[-1]
    assert image(first) == alone["sd"] != alone["tuned"]
    assert image(second) == alone["tuned"]
    assert (one.name, one.known, two.known) == ("store://sd", True, True)
    assert one.bytes_from_store == one.bytes_read == weights(folder / "sd")
    same = equal(first, second)
    assert shared(first, second) == same
    assert 0 < len(same) < len(parameters(first))
    differs = sum(p.nbytes for name, p in parameters(second).items() if name not in same)
    assert two.private_bytes == differs
    assert two.bytes_from_store == differs < weights(folder / "tuned") / 2
    # Of equal tensors in one model each has a resident of its own, which is hashed.
    assert two.bytes_hashed <= analyze([folder / "tuned"]).shared_bytes < differs
    assert two.skipped == []
    verify()


def test_what_was_loaded_from_files_is_not_read_again(
    folder: Path, alone: dict[str, bytes], store: Path
) -> None:
    with enable({"store": store}):
        files = load(folder / "sd")
        kept = stored("sd")
    found = report().models[-1]
    assert found.bytes_from_store == 0
    assert found.shared_bytes == nbytes(kept) > 0
    assert shared(files, kept) == set(parameters(files))
    assert image(kept) == alone["sd"]


def test_a_cast_gives_the_numbers_of_a_plain_load(folder: Path, store: Path) -> None:
    plainly = load(folder / "sd", dtype=torch.float16)
    with enable({"store": store}):
        resident = stored("sd")
        cast = stored("sd", dtype=torch.float16)
    assert equal(plainly, cast) == set(parameters(cast))
    assert {p.dtype for p in parameters(cast).values()} == {torch.float16}
    assert {p.dtype for p in parameters(resident).values()} == {torch.float32}


def test_a_variant_is_loaded(folder: Path, store: Path) -> None:
    plainly = load(folder / "fp16", variant="fp16")
    with enable({"store": store}):
        found = stored("fp16", variant="fp16")
    assert equal(plainly, found) == set(parameters(found))


def test_a_writer_changes_its_own_model_only(store: Path) -> None:
    with enable({"store": store}):
        one, two = stored("sd"), stored("sd")
    name, first = next(iter(parameters(one).items()))
    other = parameters(two)[name]
    assert shares_memory(first, other)
    before = other.clone()
    with torch.no_grad():
        first.add_(1)
    assert torch.equal(other, before)
    assert not torch.equal(first, other)


@pytest.fixture
def language(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> checkpoints.Pair:
    monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(tmp_path / "cache"))
    arch = getattr(request, "param", "qwen2")
    pair = checkpoints.make(arch, tmp_path / "models")
    with Store.open(tmp_path / "store") as made:
        made.import_(pair.base, "base")
        made.import_(checkpoints.resharded(pair.fine_tune, tmp_path / "tune"), "org/tune@v1")
    return pair


def test_models_of_transformers(language: checkpoints.Pair, tmp_path: Path) -> None:
    """Of several files, by class and by Auto."""
    plainly = hf.AutoModelForCausalLM.from_pretrained(language.fine_tune)
    config = {"store": str(tmp_path / "store")}
    base = hf.Qwen2ForCausalLM.from_pretrained("store://base", tensor_dedup=config)
    one = report().models[-1]
    assert one.bytes_from_store == checkpoints.nbytes(language.base)
    with enable(config):
        tune = hf.AutoModelForCausalLM.from_pretrained("store://org/tune@v1")
        assert hf.AutoConfig.from_pretrained("store://base").model_type == "qwen2"
    two = report().models[-1]
    assert two.name == "store://org/tune@v1"
    assert 0 < two.bytes_from_store < checkpoints.nbytes(language.base) / 2
    assert equal(plainly, tune) == set(parameters(tune))
    assert shared(base, tune) == equal(base, tune) != set()


def test_the_latest_step_of_a_run_on_a_remote(
    language: checkpoints.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is pulled into the user's own store, and each load takes the step that is the latest."""
    monkeypatch.setenv("TENSOR_DEDUP_STORE", str(tmp_path / "own"))
    url, found = f"file://{tmp_path}/policy", []
    with CheckpointStore(tmp_path / "trainer", "policy", config=language.base, drain=url) as run:
        for step, path in enumerate((language.base, language.fine_tune)):
            run.save(checkpoints.tensors(path), step)
            run.drain()
            model = hf.AutoModelForCausalLM.from_pretrained(
                "store://policy@latest", tensor_dedup={"store": url}
            )
            plainly = hf.AutoModelForCausalLM.from_pretrained(path)
            assert equal(plainly, model) == set(parameters(model))
            assert report().models[-1].name == f"store://policy@{step}"
            found.append(model)
    assert 0 < len(shared(*found)) < len(parameters(found[0]))
    assert Store.open().names() == ["policy@0", "policy@1"]


@pytest.mark.parametrize("language", ["mixtral", "llama_tied", "gpt2"], indirect=True)
def test_what_is_merged_tied_or_transposed(language: checkpoints.Pair, tmp_path: Path) -> None:
    plainly = hf.AutoModelForCausalLM.from_pretrained(language.fine_tune)
    with enable({"store": str(tmp_path / "store")}):
        base = hf.AutoModelForCausalLM.from_pretrained("store://base")
        tune = hf.AutoModelForCausalLM.from_pretrained("store://org/tune@v1")
    assert equal(plainly, tune) == set(parameters(tune)) == set(parameters(plainly))
    assert shared(base, tune) == equal(base, tune) != set()


def flip(store: Path, piece: bytes) -> None:
    """Change a byte in the middle of these bytes, wherever the store has them."""
    found = 0
    for container in (store / "containers").glob("*/*"):
        data = bytearray(container.read_bytes())
        if (start := data.find(piece)) >= 0:
            data[start + len(piece) // 2] ^= 1
            container.chmod(0o600)
            container.write_bytes(data)
            found += 1
    assert found == 1


def test_damage_is_an_error_that_names_the_tensor(
    folder: Path, store: Path, language: checkpoints.Pair, tmp_path: Path
) -> None:
    file = folder / "sd" / "unet" / "diffusion_pytorch_model.safetensors"
    tensor = max(read_header(file).tensors, key=lambda each: each.nbytes)
    flip(store, file.read_bytes()[tensor.start : tensor.start + tensor.nbytes])
    before = len(report().models)
    with enable({"store": store}), pytest.raises(CorruptTensorError, match=tensor.name):
        stored("sd")

    weights = language.base / checkpoints.WEIGHTS
    header = read_header(weights)
    expert = next(each for each in header.tensors if "mlp" in each.name)
    flip(store, weights.read_bytes()[expert.start : expert.start + expert.nbytes])
    config = {"store": str(store)}
    with pytest.raises(CorruptTensorError, match=expert.name):
        hf.AutoModelForCausalLM.from_pretrained("store://base", tensor_dedup=config)
    assert len(report().models) == before


def test_resident_tensors_hide_no_damage_and_need_no_store(folder: Path, store: Path) -> None:
    with enable({"store": store}):
        first = stored("sd")
        for container in (store / "containers").glob("*/*.raw"):
            container.chmod(0o600)
        second = stored("sd")
        assert report().models[-1].bytes_from_store == 0
        assert shared(first, second) == set(parameters(first))
        found = stored("sd", tensor_dedup={"store": store, "verify": "always"})
    assert report().models[-1].bytes_from_store == analyze([folder / "sd"]).total_bytes
    assert shared(first, found) == set(parameters(first))


def test_what_a_manager_holds_is_not_read(
    language: checkpoints.Pair, folder: Path, store: Path, tmp_path: Path
) -> None:
    """Of a pipeline, and of a model that threads read; nothing of either is in this process."""
    with managers.running(tmp_path) as manager:
        config = {"store": str(store), "memory_manager": str(manager.socket)}
        for name, path in (("sd", folder / "sd"), ("base", language.base)):
            for read in (weights(path), 0):
                with enable(config):
                    found = stored("sd") if name == "sd" else model()
                assert report().models[-1].bytes_from_store == read
                assert report().models[-1].skipped == []
                del found
                gc.collect()


def model() -> Any:
    return hf.AutoModelForCausalLM.from_pretrained("store://base")


def test_loads_are_written_to_the_store(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(tmp_path / "cache"))
    where = tmp_path / "store"
    with enable({"store": where, "store_writes": True}):
        plain = load(folder / "sd")
        assert report().models[-1].stored_as == "sd"
        assert report().models[-1].skipped == []
    names = set(parameters(plain))
    del plain
    gc.collect()
    with enable({"store": where}):
        again = stored("sd")
    assert report().models[-1].bytes_from_store == weights(folder / "sd")
    assert set(parameters(again)) == names


def test_what_cannot_be_loaded_says_why(folder: Path, store: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"call enable\(\)"):
        stored("sd")
    with enable({"store": store}):
        with pytest.raises(UnknownNameError, match="sd"):
            stored("sdd")
        (tmp_path / "bin").mkdir()
        torch.save({"w": torch.ones(3)}, tmp_path / "bin" / "pytorch_model.bin")
        Store.open(store).import_(tmp_path / "bin", "bin")
        with pytest.raises(UnsupportedError, match="save it as safetensors"):
            stored("bin")
