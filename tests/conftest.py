"""What every test needs before vllm or transformers is first imported."""

import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A deadline is an assertion on time: it fails on a busy machine and says nothing about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A shell without job control starts what goes to the background with this one ignored, and children
# inherit that: tests that interrupt would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# At import, not in a fixture: vllm and huggingface_hub read their environment when they are
# imported, and test modules import them before any fixture runs.
_SESSION = tempfile.TemporaryDirectory(prefix="tensor-dedup-tests-")
os.environ.update(
    # The engine runs in this process, so that a test can look at its weights.
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    # Every checkpoint is made by the tests: a network would only hide that one is missing.
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    # Threads that wait for each other spin: with tiny tensors, and several processes of tests on
    # two cores, that is most of the time. When vLLM binds threads, it starts one for each core.
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    # Hints of the person who runs the tests would make an unknown checkpoint a known one.
    TENSOR_DEDUP_HINTS=str(Path(_SESSION.name) / "hints.sqlite"),
    # Nothing a test does may reach the store of the person who runs it.
    TENSOR_DEDUP_STORE=str(Path(_SESSION.name) / "store"),
    TENSOR_DEDUP_CONFIG=os.devnull,
)


# Tests of engines that have processes of their own.
_ENGINES_APART = {
    f"tests/engines/test_{name}.py"
    for name in (
        "architectures",
        "following",
        "following_faults",
        "fresh_interpreter",
        "grown_vocabulary",
        "leaf_architectures",
        "manager",
        "parallel_engines",
        "quantised_managed",
        "serve",
    )
}


@pytest.fixture
def nothing_stays() -> Iterator[None]:
    """Of a test nothing stays resident, nor mapped."""
    from processes import process_state
    from tensor_dedup import disable

    before = process_state.remaining()
    yield
    disable()
    # A thread that was at work when a load failed holds what it works on for a moment.
    end = time.monotonic() + 10
    while (left := process_state.remaining().beyond(before)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left


@pytest.fixture(autouse=True, scope="module")
def _nothing_reloaded_stays() -> Iterator[None]:
    """vLLM keeps every model that was reloaded, and other files would find its tensors resident."""
    yield
    layerwise = sys.modules.get("vllm.model_executor.model_loader.reload.layerwise")
    if layerwise is not None and layerwise.LAYERWISE_INFO:
        layerwise.LAYERWISE_INFO.clear()
        gc.collect()


def pytest_configure(config: pytest.Config) -> None:
    # Only now: it imports the package, which reads the environment.
    from processes import process_state

    process_state.collect_surely()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a file to one process, and all files whose tests start engines in it to the same one."""
    from xdist.scheduler import LoadFileScheduling

    if config.getoption("dist") != "loadfile":
        return None

    class ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            here = file.startswith("tests/engines/") and file not in _ENGINES_APART
            return "engines" if here else file

    assert all((config.rootpath / each).is_file() for each in _ENGINES_APART)
    return ByFile(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how long each file took, in seconds, with what its fixtures took."""
    took: dict[str, float] = {}
    for report in (each for found in terminalreporter.stats.values() for each in found):
        if isinstance(report, pytest.TestReport):
            file = report.nodeid.split("::")[0]
            took[file] = took.get(file, 0.0) + report.duration
    if len(took) < 2:
        return
    terminalreporter.section("seconds by file")
    for file, seconds in sorted(took.items(), key=lambda each: -each[1]):
        terminalreporter.write_line(f"{seconds:8.1f}  {file}")
    terminalreporter.write_line(f"{sum(took.values()):8.1f}  in all")


def pytest_collection_finish(session: pytest.Session) -> None:
    from processes import process_state

    process_state.set_aside()  # what the tests have imported stays anyhow


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    # pytest and the interpreter keep the exception of a test that failed, and a fixture's for as
    # long as its scope lasts. Its frames hold that test's models, which the next would find shared.
    if call.excinfo is not None and not item.config.getoption("usepdb"):
        from processes import process_state

        process_state.clear_frames(call.excinfo.value)
    return report


def pytest_unconfigure(config: pytest.Config) -> None:
    _SESSION.cleanup()
