"""`store://NAME` on a machine with an empty store and a remote: pulled, then loaded."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine import arg_utils

from models import tiny_checkpoints as checkpoints
from remote_runs import remotes
from remote_runs.remotes import Proxy
from tensor_dedup import Store
from tensor_dedup.loader.report import ModelReport
from tensor_dedup.remote import Remote
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    RemoteUnreachableError,
    UnknownRemoteNameError,
)
from tensor_dedup.store.errors import UnknownNameError
from vllm_runs import engines, fleet, plain

pytestmark = pytest.mark.vllm

# Any: what is patched into vLLM cannot be in its annotations.
EngineArgs: Any = arg_utils.EngineArgs
KIB = 1024
BASE, FINE_TUNE = "org/base@v1", "fine_tune"
URL = "s3://bucket/models"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> checkpoints.Pair:
    made = checkpoints.make("llama_tied", tmp_path_factory.mktemp("remotes"))
    engines.warm_up(made.base)
    return made


@pytest.fixture
def proxy(pair: checkpoints.Pair, tmp_path: Path) -> Iterator[Proxy]:
    """A server with the pair."""
    with remotes.s3() as found:
        full = Store.open(tmp_path / "full")
        for name, path in ((BASE, pair.base), (FINE_TUNE, pair.fine_tune)):
            full.import_(path, name)
            full.push(URL, name)
        found.reset()
        yield found


def answers_and_report(
    name: str, folder: Path, **config: Any
) -> tuple[tuple[plain.Answer, ...], ModelReport]:
    """Load, ask, let go."""
    llm = engines.sharing(f"store://{name}", store=str(folder), **config)
    report = engines.last_report()
    answers = plain.outputs(llm)
    engines.drop(llm)
    del llm
    gc.collect()
    return answers, report


def test_an_empty_store_starts_as_plain_vllm_and_then_without_the_remote(
    pair: checkpoints.Pair, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(tmp_path / "cache"))
    expected = {}
    for name, path in ((BASE, pair.base), (FINE_TUNE, pair.fine_tune)):
        llm = plain.engine(path)
        expected[name] = plain.outputs(llm)
        engines.drop(llm)
    del llm
    assert expected[BASE] != expected[FINE_TUNE]
    folder = tmp_path / "here"

    # By the field of the config, into a store that is not there yet: each byte once.
    answers, report = answers_and_report(BASE, folder, remote=URL)
    assert answers == expected[BASE]
    size = checkpoints.nbytes(pair.base)
    assert size <= proxy.received <= 1.02 * size + 64 * KIB
    assert report.known
    assert report.bytes_from_store == size

    # By the environment: only what the fine-tune does not have in common with the base.
    proxy.reset()
    monkeypatch.setenv("TENSOR_DEDUP_REMOTE", URL)
    answers, _ = answers_and_report(FINE_TUNE, folder)
    assert answers == expected[FINE_TUNE]
    theirs = checkpoints.tensors(pair.base)
    changed = sum(
        tensor.nbytes
        for name, tensor in checkpoints.tensors(pair.fine_tune).items()
        if name not in theirs or not torch.equal(tensor, theirs[name])
    )
    assert 0 < changed < size / 2
    assert changed <= proxy.received <= 1.02 * changed + 64 * KIB

    # What is here starts without a question, and so with the remote gone.
    proxy.reset()
    answers, _ = answers_and_report(BASE, folder)
    assert answers == expected[BASE]
    assert proxy.requests == 0

    # What cannot be had is said where the engine is configured, and nothing is left of it.
    wanted = {"store": str(folder)}
    with pytest.raises(UnknownRemoteNameError, match=r"no checkpoint 'nobody'.*remote list"):
        EngineArgs(model="store://nobody", tensor_dedup=wanted)
    remote = Remote.open(URL)
    key = f"manifests/{(manifest := remote.read(BASE).manifest)[:2]}/{manifest}"
    remote.bucket.put(key, [memoryview(b"something else")])
    empty = {"store": str(tmp_path / "empty"), "remote": URL}
    with pytest.raises(DamagedRemoteError, match=r"manifests/.*remote verify"):
        EngineArgs(model=f"store://{BASE}", tensor_dedup=empty)
    proxy.close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(RemoteUnreachableError, match="check the URL"):
        EngineArgs(model=f"store://{FINE_TUNE}", tensor_dedup=empty)
    assert Store.open(tmp_path / "empty").names() == []
    monkeypatch.delenv("TENSOR_DEDUP_REMOTE")
    with pytest.raises(UnknownNameError, match="no checkpoint 'nobody'"):
        EngineArgs(model="store://nobody", tensor_dedup=wanted)
    answers, _ = answers_and_report(FINE_TUNE, folder, remote=URL)
    assert answers == expected[FINE_TUNE]


def test_engines_in_processes_of_their_own_load_what_one_of_them_pulled(
    pair: checkpoints.Pair, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is imported or set for them: the pull is found from `store://` alone."""
    monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(tmp_path / "cache"))
    below = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    config = {"store": str(tmp_path / "here"), "remote": URL}
    with fleet.fleet(tmp_path) as started:
        alone = started.start(pair.base, None)
        two = [started.start(f"store://{BASE}", config, below) for _ in range(2)]
        for each in two:
            assert each.loaded["outputs"] == alone.loaded["outputs"]
            assert each.report["pid"] != each.pid, "it loaded in the process that configured it"
    assert Store.open(tmp_path / "here").names() == [BASE]
    size = checkpoints.nbytes(pair.base)
    assert size <= proxy.received <= 1.02 * size + 64 * KIB
