"""Who may import whom."""

import re
import subprocess
import sys
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

import pytest

from project import package_source

GOOD = {
    "tensor_dedup.loader.plan": "from tensor_dedup.store.refs import name",
    "tensor_dedup.loader.deep": "def f():\n    import torch",
    "tensor_dedup.store.a": "from tensor_dedup.store.b import c",
    "tensor_dedup.digest": "from tensor_dedup.errors import ConfigError",
    "tensor_dedup.patches.vllm.loader": "import vllm, torch\nimport tensor_dedup.loader.report",
    "tensor_dedup": "from tensor_dedup.patches.vllm import hooks",
    "tensor_dedup.cli.analyze": "from tensor_dedup.analyze import analyze",
    "tensorcas.store": "from tensor_dedup.training import TensorCasStore",
    "tensor_dedup.remote.push": "from tensor_dedup.store.objects import Objects",
    "tensor_dedup.training.commit": "from tensor_dedup.remote.remote import Remote",
    "tensor_dedup.planning.plan": "from tensor_dedup.analyze import analyze",
    "tensor_dedup.api": "from tensor_dedup.remote import transfer",
}
BAD = [
    ("tensor_dedup.types", "import tensor_dedup.loader"),
    ("tensor_dedup.formats.safetensors", "from tensor_dedup.store.blobs import Blob"),
    ("tensor_dedup.store.blobs", "from tensor_dedup import loader"),
    ("tensor_dedup.loader.report", "from tensor_dedup.patches.vllm import hooks"),
    ("tensor_dedup.loader.report", "def f():\n    from tensor_dedup.patches import vllm"),
    ("tensor_dedup.store.gc", "from tensor_dedup.memory_manager.server import Server"),
    ("tensor_dedup.memory_manager.server", "import tensor_dedup.store"),
    ("tensor_dedup.store.store", "def f():\n    from tensor_dedup.remote.pull import pull"),
    ("tensor_dedup.store.upkeep.gc", "from tensor_dedup.training.commit import Saved"),
    ("tensor_dedup.remote.tier", "from tensor_dedup.training.tiers import drain"),
    ("tensor_dedup.training.commit", "from tensor_dedup.loader.report import report"),
    ("tensor_dedup.loader.plan", "from tensor_dedup.training import CheckpointStore"),
    ("tensor_dedup.patches.vllm.loader", "from tensor_dedup.planning import placement"),
    ("tensor_dedup.analyze.stored", "from tensor_dedup.api import Store"),
    ("tensor_dedup.loader.plan", "from tensor_dedup import report"),
    ("tensor_dedup.loader.plan", "import tensor_dedup"),
    ("tensor_dedup.patches.vllm.hooks", "import tensor_dedup.cli"),
    ("tensor_dedup.loader.plan", "import vllm.config"),
    ("tensor_dedup.patches.diffusers", "from vllm import LLM"),
    ("tensor_dedup.patches.vllm_like", "from vllm import LLM"),
    ("tensor_dedup.patches.vllm.loader", "import diffusers"),
    ("tensor_dedup.digest", "import torch"),
    ("tensor_dedup.cli.analyze", "def f():\n    import torch.nn"),
    ("tensor_dedup", "if TYPE_CHECKING:\n    from torch import Tensor"),
    ("tensor_dedup.loader.plan", "from . import registry"),
    ("tensor_dedup.loader.plan", "from .registry import Registry"),
    ("tensor_dedup.cli.tensorcas", "from tensorcas.store import TensorCasStore"),
    ("tensorcas.adapters.pytorch", "import torch"),
    ("tensor_dedup.integrations.deepspeed", "import datastates"),
]


def test_the_package_keeps_its_layers() -> None:
    assert package_source.layer_faults(package_source.sources()) == []


def test_what_is_allowed_is_not_reported() -> None:
    assert package_source.layer_faults(GOOD) == []


@pytest.mark.parametrize(("module", "text"), BAD)
def test_what_is_forbidden_is_reported(module: str, text: str) -> None:
    assert len(package_source.layer_faults({module: text})) == 1


def test_every_part_of_the_package_has_a_layer() -> None:
    names = (name.split(".") for name in package_source.modules())
    parts = {name[1] for name in names if name[0] == "tensor_dedup" and len(name) > 1}
    assert parts - package_source.TOP <= frozenset().union(*package_source.LAYERS)


def test_no_import_goes_in_a_circle() -> None:
    tuple(TopologicalSorter(package_source.import_graph(package_source.sources())).static_order())


def test_a_circle_is_found() -> None:
    circle = {
        "tensor_dedup.loader.a": "from tensor_dedup.loader import b",
        "tensor_dedup.loader.b": "from tensor_dedup.loader.c import name",
        "tensor_dedup.loader.c": "def f():\n    import tensor_dedup.loader.a",
    }
    with pytest.raises(CycleError):
        tuple(TopologicalSorter(package_source.import_graph(circle)).static_order())


def test_the_handle_of_a_store_is_for_the_wings_that_are_made_of_it() -> None:
    inner = re.compile(r"\.handle\b")
    users = {name for name, text in package_source.sources().items() if inner.search(text)}
    assert any(name.startswith("tensor_dedup.training.") for name in users)
    wings = ["tensor_dedup.store.", "tensor_dedup.remote.", "tensor_dedup.training."]
    wings.append("tensor_dedup.publishing.")
    wings.append("tensor_dedup.memory_manager.")  # it knows no store; its handles are others
    assert not [name for name in users if not name.startswith(tuple(wings))]


def test_below_the_public_interface_a_store_is_local() -> None:
    users = {
        module
        for module, text in package_source.sources().items()
        for name in package_source.imports(text)
        if name in ("tensor_dedup.Store", "tensor_dedup.api.Store")
    }
    assert "tensor_dedup.cli.store" in users
    assert not [n for n in users if n != "tensor_dedup" and not n.startswith("tensor_dedup.cli.")]


def test_only_a_pull_of_what_is_missing_leads_from_a_load_to_remotes() -> None:
    users = {
        module
        for module, text in package_source.sources().items()
        for name in package_source.imports(text)
        if module.startswith(("tensor_dedup.loader.", "tensor_dedup.patches."))
        if name.startswith(("tensor_dedup.remote", "tensor_dedup.training"))
    }
    assert users == {"tensor_dedup.loader.checkpoint_io.stub_folder"}


def test_only_remotes_talk_to_other_machines() -> None:
    """The manager's socket is one of the file system; its metrics listen where that is asked."""
    clients = re.compile(
        r"^\s*(?:import|from) (obstore|oras|requests|urllib3|urllib\.request|http\.client|httpx"
        r"|aiohttp|smtplib|ftplib|huggingface_hub)\b|AF_INET|create_connection|getaddrinfo",
        re.MULTILINE,
    )
    users = {name for name, text in package_source.sources().items() if clients.search(text)}
    assert users
    elsewhere = {name for name in users if not name.startswith("tensor_dedup.remote.")}
    assert elsewhere == {
        "tensor_dedup.memory_manager.server.metrics",
        "tensor_dedup.publishing.engine_server",  # where `follow --engine` says
    }


LOADER = """
import sys
import tensor_dedup.patches.vllm.loader
print(*(name for name in sys.modules if name.startswith("tensor_dedup.")))
"""


# A load for real: tests/engines/test_fresh_interpreter.py.
@pytest.mark.long
def test_loading_a_model_imports_nothing_of_remotes_and_training() -> None:
    command = [sys.executable, "-W", "ignore", "-c", LOADER]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = done.stdout.splitlines()[-1].split()
    assert "tensor_dedup.patches.vllm.run" in names
    assert "tensor_dedup.store.reading.reader" in names
    wings = ("tensor_dedup.remote", "tensor_dedup.training", "tensor_dedup.api")
    assert [name for name in names if name.startswith(wings)] == []


@pytest.mark.parametrize("part", package_source.LINKED)
def test_each_folder_of_the_root_is_linked_into_the_package(part: str) -> None:
    # A checkout that lost its links builds a wheel with the root package only, without a warning.
    link = package_source.SOURCE / "tensor_dedup" / part
    assert link.is_symlink()
    assert str(link.readlink()) == f"../../{part}"
    assert link.resolve() == package_source.ROOT / part


@pytest.mark.parametrize("name", [name for name in package_source.sources() if name])
def test_every_folder_with_code_is_a_package(name: str) -> None:
    parent = name.rpartition(".")[0]
    assert not parent or parent in package_source.sources()


def upward(texts: Mapping[str, str]) -> list[str]:
    """Each import, within a wing, of a part that stands above, for type checkers only too."""
    return [
        f"{module} imports {name}"
        for module, text in texts.items()
        for name in package_source.imports(text)
        if (here := _part(module)) is not None and (there := _part(name)) is not None
        if here[0] == there[0] and _height(*there) > _height(*here)
    ]


def _height(wing: str, part: str) -> int:
    return package_source.PARTS[wing].index(part)


def _part(name: str) -> tuple[str, str] | None:
    """The wing and the part of it that a module is in; None of a name that is in no part."""
    parts = name.split(".")
    known = len(parts) > 2 and parts[0] == "tensor_dedup" and parts[1] in package_source.PARTS
    # Names that the wing itself has, as of `from tensor_dedup.store import LocalStore`.
    return (parts[1], parts[2]) if known and parts[2] in package_source.PARTS[parts[1]] else None


def test_every_folder_of_the_package_is_a_wing_with_an_order() -> None:
    folders = {p.name for p in (package_source.SOURCE / "tensor_dedup").iterdir() if p.is_dir()}
    assert folders - {"__pycache__"} == package_source.PARTS.keys()


@pytest.mark.parametrize("wing", package_source.PARTS)
def test_every_part_of_a_wing_has_its_place(wing: str) -> None:
    names = (name.split(".") for name in package_source.modules())
    parts = [name[2] for name in names if name[:2] == ["tensor_dedup", wing] and len(name) > 2]
    order = package_source.PARTS[wing]
    assert {*parts} == {*order}
    assert len(order) == len({*order})


def test_no_part_of_a_wing_imports_one_above_it() -> None:
    assert upward(package_source.sources()) == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("loader.residents.slab", "def f():\n    from tensor_dedup.loader.cuda.gpu import Gpu"),
        ("store.files", "from tensor_dedup.store import objects"),
        ("store.upkeep.gc", "from tensor_dedup.store.store import LocalStore"),
        ("remote.pull", "from tensor_dedup.remote.transfer import pull"),
        ("cli.terminal", "from tensor_dedup.cli.store import StoreCommand"),
        ("training.commit", "from tensor_dedup.training import run"),
    ],
)
def test_an_import_of_a_part_above_is_found(module: str, text: str) -> None:
    assert len(upward({f"tensor_dedup.{module}": text})) == 1


def test_an_import_of_a_part_below_is_none() -> None:
    text = "def f():\n    from tensor_dedup.loader.cuda.gpu import Gpu"
    assert upward({"tensor_dedup.loader.post_load.dedup": text}) == []
