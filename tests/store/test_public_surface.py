"""What a store and an open checkpoint offer to programs: tensors, a mapping, runs, a repr."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from store_runs.stores import network, noise, safetensors, u8, write
from tensor_dedup import Store
from tensor_dedup.store.errors import UnknownNameError, UnknownTensorError
from tensor_dedup.training import CheckpointStore

A, B = noise(1, 300_000), noise(2, 5_000)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = Store.open(tmp_path / "store")
    files = {"model.safetensors": safetensors(u8(a=A, b=B)), "config.json": b"{}"}
    found.import_(write(tmp_path / "model", files))
    return found


def test_tensors_are_loaded_by_the_name_of_their_checkpoint(store: Store) -> None:
    found = store.load("model")
    assert list(found) == ["a", "b"]
    assert bytes(found["a"].numpy()) == A
    found["b"] += 1
    assert torch.equal(store.load("model", ["b"], verify=False)["b"] + 1, found["b"])
    with pytest.raises(UnknownNameError, match="model"):
        store.load("modle")
    with pytest.raises(UnknownTensorError):
        store.load("model", ["c"])


def test_without_torch_tensors_cannot_be_loaded_and_the_error_says_what_to_do() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import tensor_dedup\n"
        "try:\n"
        "    tensor_dedup.load_tensors\n"
        "except tensor_dedup.UnsupportedError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "needs torch; in your clone of tensor-dedup, run `pip install '.[torch]'`" in done.stdout


def test_a_store_is_opened_without_torch(store: Store) -> None:
    program = (
        "import sys; from tensor_dedup import Store\n"
        f"store = Store.open({str(store.path)!r}); store.list(); store.runs()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_checkpoint_is_a_mapping_from_names_to_tensors(store: Store) -> None:
    with store.checkpoint("model") as checkpoint:
        assert len(checkpoint) == 2
        assert list(checkpoint.keys()) == ["a", "b"]
        assert list(checkpoint.values()) == list(checkpoint)
        assert dict(checkpoint.items()) == {t.name: t for t in checkpoint}
        assert dict(checkpoint) == dict(checkpoint.items())
        assert "a" in checkpoint
        assert "c" not in checkpoint
        assert None not in checkpoint
        assert bytes.fromhex(checkpoint["a"].digest) in checkpoint
        assert bytes(32) not in checkpoint


def test_runs_are_listed_with_what_is_known_of_them(store: Store) -> None:
    assert store.runs() == []
    assert store.steps("run") == []
    with CheckpointStore(store, "run") as run:
        run.save(network(1), 1)
        run.save(network(2), 2, {"loss": 0.5})
        assert store.run_stats("run").to_dict() == run.stats()
    assert store.runs() == ["run"]
    assert [(each.step, each.metrics) for each in store.steps("run")] == [
        (1, {}),
        (2, {"loss": 0.5}),
    ]
    assert store.run_stats().checkpoints == 2
    assert [each.step for each in store.run_growth("run")] == [1, 2]
    assert store.step_difference(("run", 1), ("run", 2)).metrics == {"loss": (None, 0.5)}


def test_a_name_that_is_not_there_is_refused_with_the_nearest(store: Store) -> None:
    store.check_exists("model")
    with pytest.raises(UnknownNameError, match="'model'"):
        store.check_exists("modell")


def test_what_is_open_says_where_it_is_and_how_much_it_holds(store: Store) -> None:
    assert repr(store) == f"Store({str(store.path)!r}, checkpoints=1)"
    with store.checkpoint("model") as checkpoint:
        size = len(safetensors(u8(a=A, b=B))) + 2
        known = f"'model' of {str(store.path)!r}, tensors=2, files=2, nbytes={size}"
        assert repr(checkpoint) == f"StoredCheckpoint({known})"
        digest = checkpoint["a"].digest
    assert repr(checkpoint) == f"StoredCheckpoint({known}, closed)"
    with store.open_pieces([digest]) as pieces:
        assert repr(pieces) == f"StoredPieces({str(store.path)!r}, pieces=1, containers=1)"
