"""What `import tensor_dedup` offers, and what it costs."""

import ast
import inspect
import pydoc
import re
import subprocess
import sys
import tomllib
from importlib import import_module

import pytest

import tensor_dedup
from project import package_source
from tensor_dedup.config import FIELDS, TensorDedupConfig

PUBLIC = {
    "AuditError",
    "CheckpointError",
    "CheckpointStore",
    "ConfigError",
    "FormatError",
    "Publisher",
    "Remote",
    "Report",
    "Store",
    "StoreError",
    "TensorDedupConfig",
    "TensorDedupError",
    "UnsupportedError",
    "disable",
    "enable",
    "load_tensors",
    "move",
    "report",
    "shared_bytes",
    "shares_memory",
    "sweep",
    "unshare",
    "verify",
}
HEAVY = ("torch", "vllm", "numpy", "transformers", "diffusers")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded_by(module: str) -> list[str]:
    """Which heavy packages a fresh interpreter has loaded after one import."""
    code = f"import sys, {module}; print(*[name for name in {HEAVY} if name in sys.modules])"
    return run(code).split()


def for_type_checkers() -> dict[str, str]:
    """Name and home of each import that only type checkers see."""
    tree = ast.parse((package_source.SOURCE / "tensor_dedup" / "__init__.py").read_text())
    guards = [node for node in tree.body if isinstance(node, ast.If)]
    seen = [node for guard in guards for node in guard.body if isinstance(node, ast.ImportFrom)]
    # Only what is imported as itself is exported, to a strict type checker.
    return {
        alias.name: str(node.module)
        for node in seen
        for alias in node.names
        if alias.name == alias.asname
    }


def test_all_is_the_public_names() -> None:
    names = vars(tensor_dedup)["__all__"]
    assert set(names) == PUBLIC | {"__version__"}
    assert len(names) == len(PUBLIC) + 1
    assert set(dir(tensor_dedup)) >= PUBLIC | {"__version__"}


def test_type_checkers_see_the_public_names() -> None:
    assert for_type_checkers().keys() == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_each_name_is_what_type_checkers_take_it_for(name: str) -> None:
    value = getattr(tensor_dedup, name)
    assert callable(value)
    assert value is getattr(import_module(for_type_checkers()[name]), name)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_each_name_is_documented(name: str) -> None:
    value = getattr(tensor_dedup, name)
    assert inspect.cleandoc(value.__doc__).partition("\n")[0].endswith((".", ":"))


@pytest.mark.parametrize(
    "module",
    [
        "tensor_dedup",
        "tensor_dedup.store",
        "tensor_dedup.training",
        "tensor_dedup.training.adapters",
        "tensor_dedup.training.state",
    ],
)
def test_help_and_signature_answer_for_each_public_class(module: str) -> None:
    found = import_module(module)
    names = getattr(found, "__all__", None) or [name for name in vars(found) if name[0] != "_"]
    classes = [value for name in names if isinstance(value := getattr(found, name), type)]
    ours = [each for each in classes if each.__module__.startswith("tensor_dedup")]
    assert ours
    for each in ours:
        inspect.signature(each)
        assert each.__name__ in pydoc.render_doc(each)


def test_the_version_is_that_of_the_distribution() -> None:
    project = tomllib.loads((package_source.ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    read = project["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert read == "tensor_dedup.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+", tensor_dedup.__version__)


@pytest.mark.parametrize("field", FIELDS)
def test_help_explains_each_field_of_the_config(field: str) -> None:
    text = inspect.cleandoc(TensorDedupConfig.__doc__ or "")
    assert re.search(rf"^    {field}: \w", text, re.MULTILINE)


def test_the_package_runs_as_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tensor_dedup", "--version"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"tensor-dedup, version {tensor_dedup.__version__}\n"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'dedupe'"):
        _ = tensor_dedup.dedupe


@pytest.mark.parametrize(
    "module",
    [
        "tensor_dedup",
        "tensor_dedup.config",
        "tensor_dedup.cli",
        "tensor_dedup.analyze",
        "tensor_dedup.digest",
        "tensor_dedup.formats.checkpoint",
        "tensor_dedup.loader.checkpoint_io.hints",
        "tensor_dedup.loader.report",
        "tensor_dedup.store",
        "tensor_dedup.patches.vllm",
        "tensor_dedup.patches.vllm.hooks",
    ],
)
def test_importing_it_loads_no_framework(module: str) -> None:
    assert loaded_by(module) == []


def test_a_framework_that_is_loaded_is_noticed() -> None:
    assert loaded_by("numpy") == ["numpy"]


def test_using_a_light_name_loads_no_framework() -> None:
    code = (
        "import sys, tensor_dedup\n"
        "tensor_dedup.TensorDedupConfig(), str(tensor_dedup.report())\n"
        f"print(*[name for name in {HEAVY} if name in sys.modules])"
    )
    assert run(code) == ""


def test_sharing_what_diffusers_and_transformers_load_imports_no_store() -> None:
    code = (
        "import sys, tensor_dedup.patches.huggingface.model_load\n"
        "print(*[name for name in sys.modules if name.startswith('tensor_dedup.store')])"
    )
    assert run(code) == ""


@pytest.mark.parametrize("installed", [True, False])
def test_frameworks_are_taught_our_argument_only_where_they_are_installed(installed: bool) -> None:
    absent = "" if installed else "for n in frameworks: sys.modules[n] = None\n"  # as if not there
    code = (
        "import sys\nframeworks = 'vllm', 'transformers', 'diffusers'\n"
        f"{absent}import tensor_dedup\n"
        "patches = 'tensor_dedup.patches'\n"
        "ours = f'{patches}.vllm.hooks', f'{patches}.huggingface.pipelines', 'wrapt'\n"
        "print(*[name in sys.modules for name in ours])"
    )
    assert run(code).split() == [str(installed)] * 3
