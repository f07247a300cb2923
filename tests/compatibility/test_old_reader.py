"""What the working tree's code writes, serves and hands over, code of commit ead6e99 takes.

And the other way round, for what is between processes: old and new ones run side by side.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import compatible
import managers
import old_code
import tiny_checkpoints
from compatible import Code
from engines import leave_alone
from tensor_dedup.memory_manager.client import connect
from tensor_dedup.memory_manager.client.admin import Admin

pytestmark = pytest.mark.long

NEW = Code()
STEPS = "import json, sys, pathlib, compatible\nroot = pathlib.Path(sys.argv[1])\n"
STEPS += "print(json.dumps(compatible.steps_of(root)))"
# Names only that users use: it is run by old code and by new.
ENGINE = """
import json, sys
import tensor_dedup
from vllm import LLM, SamplingParams

path, socket = sys.argv[1:]
llm = LLM(
    path,
    skip_tokenizer_init=True,
    max_model_len=256,
    max_num_seqs=4,
    enforce_eager=True,
    disable_log_stats=True,
    kv_cache_memory_bytes=64 << 20,
    seed=0,
    tensor_dedup={"memory_manager": socket},
)
sampling = SamplingParams(max_tokens=16, temperature=0, detokenize=False, ignore_eos=True)
[answer] = llm.generate([{"prompt_token_ids": [1, 2, 3, 50]}], sampling, use_tqdm=False)
[report] = [model.to_dict() for model in tensor_dedup.report().models]
print(json.dumps([report, list(answer.outputs[0].token_ids)]))
"""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Code:
    return old_code.checkout(tmp_path_factory.mktemp("old"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that only this user can enter, as a socket needs."""
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return compatible.write_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def store(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the new code wrote, runs and garbage with it."""
    root = tmp_path_factory.mktemp("new") / "store"
    compatible.import_all(NEW, root, checkpoints)
    compatible.save_runs(root, checkpoints["org/base"])
    compatible.settle_times(root)
    return root


def test_old_code_reads_a_new_store(
    old: Code, store: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    found = compatible.documents(old, store)
    assert found["verify --full"]["faults"] == []
    assert set(found["stats"]["containers"]) == {"raw", "slab", "pack", "delta"}
    new = compatible.documents(NEW, store)
    for verb, document in found.items():
        assert new[verb] | document == new[verb], verb
    kept = [name for name in checkpoints if name != compatible.GONE]
    old.verbs([["export", name, tmp_path / name, "--store", store] for name in kept])
    for name in kept:
        assert compatible.hashes(tmp_path / name) == compatible.hashes(checkpoints[name])


def test_old_code_loads_a_new_run(old: Code, store: Path) -> None:
    assert old.call(STEPS, store) == compatible.steps_of(store)


def test_old_code_believes_new_hints(
    old: Code, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folders = [checkpoints["org/base"], checkpoints["tune"]]
    leave_alone(*(file for each in folders for file in each.glob("*.safetensors")))
    hints = {"TENSOR_DEDUP_HINTS": str(tmp_path / "hints.sqlite")}
    new = NEW.verb("analyze", *folders, **hints)
    assert new["bytes_read"] > 0
    found = old.verb("analyze", *folders, **hints)
    assert found == new | {"bytes_read": 0, "bytes_hashed": 0}


# --- between processes


@pytest.fixture(params=["old manager", "new manager"])
def pair(request: pytest.FixtureRequest, old: Code) -> tuple[Code, Code]:
    """The one whose manager is there first, and the other one."""
    return (old, NEW) if request.param == "old manager" else (NEW, old)


@pytest.mark.vllm
def test_engines_of_both_share_what_one_has_built(pair: tuple[Code, Code], folder: Path) -> None:
    """The manager is of one version, and so is the engine that comes second."""
    serves, builds = pair
    path, checkpoint = folder / "m.sock", tiny_checkpoints.make("llama", folder).base
    leave_alone(*checkpoint.glob("*.safetensors"))
    hints = {"TENSOR_DEDUP_HINTS": str(folder / "hints.sqlite")}

    def load(code: Code) -> Any:
        return code.call(ENGINE, checkpoint, path, **hints)

    with old_code.serving(serves, path):
        first, tokens = load(builds)
        assert first["shared_bytes"] == 0
        assert first["bytes_read"] > 0
        second, again = load(serves)
        assert second["shared_bytes"] == second["total_bytes"] == first["total_bytes"] > 0
        assert (second["bytes_read"], second["bytes_materialised"]) == (0, 0)
        assert second["known"]
        assert again == tokens


@pytest.fixture
def systemd(folder: Path) -> Iterator[old_code.Systemd]:
    played = old_code.Systemd(folder)
    yield played
    played.close()


def test_a_manager_of_one_takes_over_what_one_of_the_other_leaves(
    pair: tuple[Code, Code], systemd: old_code.Systemd
) -> None:
    before, after = pair
    data = [managers.pattern(seed, 1 << 20) for seed in (1, 2)]
    systemd.start(before)
    with connect(systemd.path, keep_connected=False) as client, Admin(systemd.path) as admin:
        managers.build(client, "a", data[0], checkpoint="base")
        managers.build(client, "b", *data, checkpoint="tuned")
        admin.pin("tuned")
    systemd.stop()
    assert len(systemd.store) == 3  # two slabs and an index
    systemd.start(after)
    assert systemd.store == []
    with connect(systemd.path, keep_connected=False) as client:
        managers.until(lambda: None not in client.get(["a", "b"]))
        found = client.get(["a", "b"])
        held = [[managers.bytes_of(each) for each in layer.leases] for layer in found if layer]
        assert held == [data[:1], data]
    with Admin(systemd.path) as admin:
        assert admin.overview().totals.pins == ["tuned"]
