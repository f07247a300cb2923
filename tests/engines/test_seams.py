"""The table of seams against the installed vLLM, and against one that changed."""

import ast
import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensor_dedup.patches import vllm as patches
from tensor_dedup.patches.vllm import load_formats, plain_loads, seams
from vllm_runs import engines, plain, seam_walk

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "scripts/vllm_sources"
NOT_FETCHED = 3  # its exit status, if pip cannot reach what it needs
EVERY_TARGET = [each.target for each in seams.SEAMS]
# Names that say only what a class or a module is called; what we use of it has entries of its own.
HOLDERS = {
    "vllm:LLM",
    "vllm:_custom_ops",
    "vllm.model_executor:model_loader",
    "vllm.model_executor.layers:utils",
    "vllm.model_executor.model_loader:default_loader",
    "vllm.model_executor.model_loader:utils",
    "vllm.model_executor.model_loader:weight_utils",
    "vllm.model_executor.models:utils",
}


@pytest.fixture
def _forget() -> Iterator[None]:
    """What was found out about the installed vLLM; later tests find it out anew."""
    for found in (seams.usable, seams.why_not):
        found.cache_clear()
    yield
    for found in (seams.usable, seams.why_not):
        found.cache_clear()


@pytest.mark.parametrize("seam", seams.SEAMS, ids=EVERY_TARGET)
def test_the_installed_vllm_is_as_recorded(seam: seams.VllmSeam) -> None:
    assert seams.compare(seam) is None


def test_every_seam_of_the_recorded_version_is_there() -> None:
    """What may be missing in older versions is in this one, or the row would say nothing."""
    import vllm

    if not vllm.__version__.startswith(seams.RECORDED_VERSION):
        pytest.skip(f"vLLM {vllm.__version__} is not {seams.RECORDED_VERSION}")
    assert seam_walk.moved(seams.RECORDED_VERSION) == []


@pytest.fixture(scope="module")
def sources() -> str:
    """A folder with the Python files of the newest vLLM over the installed compiled parts."""
    done = subprocess.run(
        [sys.executable, str(SOURCES)], capture_output=True, text=True, check=False
    )
    if done.returncode == NOT_FETCHED:
        last = done.stderr.strip().splitlines()[-1:]
        pytest.skip(f"scripts/vllm_sources cannot fetch vLLM {seams.NEWEST_VERSION}: {last}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_sources_that_are_kept_get_the_compiled_parts_of_this_environment(tmp_path: Path) -> None:
    import vllm

    (tmp_path / "scripts").mkdir()
    script = shutil.copy(SOURCES, tmp_path / "scripts")
    package = tmp_path / ".cache/vllm-0.0.1/vllm"
    package.mkdir(parents=True)
    compiled = next(Path(vllm.__file__).parent.glob("*.so"))
    (package / compiled.name).symlink_to(tmp_path / "another environment" / compiled.name)

    for _ in range(2):
        done = subprocess.run([sys.executable, script, "0.0.1"], capture_output=True, check=True)
        assert Path(done.stdout.decode().strip()) == package.parent
        assert (package / compiled.name).readlink() == compiled

    offline = {**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    asked = [sys.executable, script, "0.0.2"]
    (tmp_path / ".cache/vllm.part").mkdir()  # as one that was killed leaves it
    done = subprocess.run(asked, capture_output=True, check=False, env=offline)
    assert done.returncode == NOT_FETCHED
    assert {path.name for path in (tmp_path / ".cache").iterdir()} == {"vllm-0.0.1", "vllm.lock"}


def test_no_seam_has_moved_in_the_newest_version(sources: str) -> None:
    """Its Python files alone: one that was moved there would be found out by no other test."""
    path = [sources, str(ROOT / "src"), str(ROOT / "tests/support")]
    environment = {"PYTHONPATH": os.pathsep.join(path), "VLLM_TARGET_DEVICE": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", "from vllm_runs import seam_walk; seam_walk.main()"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )

    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("version").startswith(f"{seams.NEWEST_VERSION}.")
    assert found == {"moved": [], "unrecorded": []}


def test_every_seam_is_listed_once_and_says_why_and_what() -> None:
    assert len(set(EVERY_TARGET)) == len(EVERY_TARGET)
    for each in seams.SEAMS:
        assert each.reason
        assert each.part in seams.WITHOUT
        assert sum(map(bool, (each.signature, each.needs, each.has))) <= 1
        assert not each.earlier or each.signature
        assert set(each.versions) <= set(seams.EVERY)
        assert each.versions
        assert each.optional or each.versions == seams.EVERY, each.target


def test_every_name_we_import_from_vllm_is_listed() -> None:
    imported = {
        f"{node.module}:{alias.name}"
        for file in Path(seams.__file__).parent.glob("*.py")
        for node in run_time(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }
    # A class is there when one of its functions is.
    listed = {":".join((m, n.split(".")[0])) for m, n in (t.split(":") for t in EVERY_TARGET)}

    assert imported
    assert imported - HOLDERS <= listed


def run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from run_time(node)


def test_every_method_and_function_we_replace_is_listed_with_its_signature() -> None:
    """Whatever class or module it is of; the walk finds the best known of each kind."""
    seam_walk.install()
    loader = "vllm.model_executor.model_loader"
    assert f"{loader}.base_loader:BaseModelLoader.load_model" in seam_walk.overridden()
    assert f"{loader}.sharded_state_loader:ShardedStateLoader._filter_subtensors" in (
        seam_walk.overridden()
    )
    assert {
        f"{loader}.default_loader:pt_weights_iterator",
        "vllm.engine.arg_utils:EngineArgs.from_cli_args",
        "vllm.v1.worker.gpu_worker:Worker.sleep",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.reload_weights",
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels.show_available_models",
        "vllm._custom_ops:create_onednn_scaled_mm",
    } <= seam_walk.replaced().keys()

    assert seam_walk.unrecorded() == []


def test_what_is_replaced_without_a_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seam_walk.install()
    rows = {s.target.rpartition(":")[2]: s for s in seams.SEAMS}
    gone = ("Worker.wake_up", "DefaultModelLoader._prepare_weights", "get_model_loader")
    kept = tuple(s for s in seams.SEAMS if s not in [rows[name] for name in gone])
    bare = dataclasses.replace(rows["pt_weights_iterator"], signature="", needs=("a",))
    kept = tuple(bare if s is rows["pt_weights_iterator"] else s for s in kept)
    monkeypatch.setattr(seams, "SEAMS", kept)
    without_wraps = "_prev_minor_version"
    monkeypatch.setattr(f"vllm.version.{without_wraps}", load_formats.split)

    names = {each.rpartition(":")[2] for each in seam_walk.unrecorded()}
    assert names == {*gone, "pt_weights_iterator", without_wraps}


@pytest.mark.parametrize(
    ("target", "signature", "needs", "found"),
    [
        ("vllm.no_such_module:function", "()", (), "missing"),
        ("vllm.version:no_such_name", "()", (), "missing"),
        ("vllm.plugins:load_plugins_by_group", "(group, strict)", (), "is (group)"),
        ("vllm.plugins:load_plugins_by_group", "(group=None)", (), "is (group)"),
        ("vllm.plugins:load_plugins_by_group", "", ("group", "strict"), "without strict"),
        ("vllm.version:__version__", "()", (), "without a signature"),
    ],
)
def test_a_change_is_a_mismatch_that_says_what_is_there(
    target: str, signature: str, needs: tuple[str, ...], found: str
) -> None:
    seam = seams.VllmSeam(target, "loader", "a test", signature, needs)

    mismatch = seams.compare(seam)

    assert mismatch is not None
    assert found in str(mismatch)
    assert target in str(mismatch)


@pytest.mark.usefixtures("_forget")
def test_a_mismatch_is_logged_once_and_only_its_part_is_unusable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = seams.VllmSeam("vllm.version:no_such_name", "reload", "a test", "()")
    monkeypatch.setattr(seams, "SEAMS", (gone,))

    with caplog.at_level(logging.WARNING):
        answers = [seams.usable("reload"), seams.usable("reload"), seams.usable("loader")]

    assert answers == [False, False, True]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no_such_name" in caplog.text
    assert seams.WITHOUT["reload"] in caplog.text


def moved(part: seams.Part) -> seams.VllmSeam:
    """A function that every vLLM has, with a signature that none has."""
    return seams.VllmSeam("vllm.plugins:load_plugins_by_group", part, "a test", "(group, *, moved)")


def answers_shared_with_itself(model: str) -> tuple[plain.Answer, ...]:
    """Load twice and see that the second shares; what it answers."""
    both = [engines.sharing(model), engines.sharing(model)]
    assert engines.last_report().shared_bytes > 0
    answers = plain.outputs(both[1])
    engines.drop(*both)
    return answers


def ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What this package said."""
    return [r.getMessage() for r in caplog.records if r.name.startswith("tensor_dedup")]


@pytest.mark.vllm
@pytest.mark.usefixtures("_forget")
@pytest.mark.parametrize("part", ["loader", "reload"])
def test_where_a_seam_has_moved_a_model_loads_plainly_with_one_warning(
    part: seams.Part, model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = answers_shared_with_itself(model)
    monkeypatch.setattr(seams, "SEAMS", (*seams.SEAMS, moved(part)))
    seams.why_not.cache_clear()

    with caplog.at_level(logging.WARNING):
        llm = engines.sharing(model)

    report = engines.last_report()
    [(what, why)] = report.skipped
    assert what == "<model>"
    assert "(group, *, moved)" in why
    assert seams.WITHOUT[part] in why
    [said] = ours(caplog)
    assert why in said
    assert (report.shared_bytes, report.private_bytes) == (0, report.total_bytes)
    assert report.total_bytes > 0
    if part == "loader":  # such a vLLM may pack in a way of its own: nothing packed is looked into
        counted = sum(each.nbytes for each in plain.model(llm).parameters())
        assert report.total_bytes == counted
    assert plain.outputs(llm) == expected
    engines.drop(llm)


@pytest.mark.vllm
def test_where_a_name_we_import_is_gone_a_model_loads_plainly_with_one_warning(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.model_executor import model_loader
    from vllm.model_executor.model_loader import ep_weight_filter

    expected = answers_shared_with_itself(model)
    # vLLM itself has it by then; our module, imported once more, finds it missing.
    monkeypatch.delitem(sys.modules, "tensor_dedup.patches.vllm.loader")
    monkeypatch.delattr(ep_weight_filter, "should_skip_weight")
    registered = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    monkeypatch.setitem(registered, load_formats.LOAD_FORMAT, patches._loader_class())

    with caplog.at_level(logging.WARNING):
        llm = engines.sharing(model)

    assert registered[load_formats.LOAD_FORMAT].__module__ == plain_loads.__name__
    [said] = ours(caplog)
    assert "loading without sharing" in said
    assert engines.last_report().shared_bytes == 0
    assert plain.outputs(llm) == expected
    engines.drop(llm)


@pytest.mark.vllm
@pytest.mark.usefixtures("_forget")
def test_where_loading_takes_another_argument_a_model_loads_plainly(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    expected = answers_shared_with_itself(model)
    load = BaseModelLoader.load_model

    def load_model(self: Any, *, vllm_config: Any, model_config: Any, **more: Any) -> Any:
        return load(self, vllm_config, model_config, **more)

    monkeypatch.setattr(BaseModelLoader, "load_model", load_model)
    seams.why_not.cache_clear()
    llm = engines.sharing(model)
    report = engines.last_report()
    [(_, why)] = report.skipped
    assert "BaseModelLoader.load_model" in why
    assert (report.name, report.shared_bytes) == (model, 0)
    assert plain.outputs(llm) == expected
    engines.drop(llm)


def test_a_vllm_without_its_own_loader_ends_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Plug-ins are called in every process of every engine, who asked for us or not."""
    from vllm.model_executor.model_loader import default_loader

    monkeypatch.delattr(default_loader, "DefaultModelLoader")
    for name in ("loader", "plain_loads"):
        monkeypatch.delitem(sys.modules, f"tensor_dedup.patches.vllm.{name}", raising=False)
    with caplog.at_level(logging.WARNING):
        patches._register_loader.__wrapped__()
    [said] = ours(caplog)
    assert "DefaultModelLoader" in said
