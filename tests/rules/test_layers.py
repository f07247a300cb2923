"""Who may import whom."""

import re
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

import pytest

import package_source

GOOD = {
    "tensor_dedup.loader.plan": "from tensor_dedup.store.refs import name",
    "tensor_dedup.loader.deep": "def f():\n    import torch",
    "tensor_dedup.store.a": "from tensor_dedup.store.b import c",
    "tensor_dedup.digest": "from tensor_dedup.errors import ConfigError",
    "tensor_dedup.patches.vllm.loader": "import vllm, torch\nimport tensor_dedup.loader.report",
    "tensor_dedup": "from tensor_dedup.patches.vllm import hooks",
    "tensor_dedup.cli.analyze": "from tensor_dedup.analyze import analyze",
    "tensorcas.store": "from tensor_dedup.training import TensorCasStore",
}
BAD = [
    ("tensor_dedup.types", "import tensor_dedup.loader"),
    ("tensor_dedup.formats.safetensors", "from tensor_dedup.store.blobs import Blob"),
    ("tensor_dedup.store.blobs", "from tensor_dedup import loader"),
    ("tensor_dedup.loader.report", "from tensor_dedup.patches.vllm import hooks"),
    ("tensor_dedup.loader.report", "def f():\n    from tensor_dedup.patches import vllm"),
    ("tensor_dedup.store.gc", "from tensor_dedup.memory_manager.server import Server"),
    ("tensor_dedup.memory_manager.server", "import tensor_dedup.store"),
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


def test_what_a_store_has_for_its_own_modules_is_used_by_those_only() -> None:
    inner = re.compile(r"(?<!self)\._(?:objects|locked|translated)\b")
    users = {name for name, text in package_source.sources().items() if inner.search(text)}
    assert any(name.startswith("tensor_dedup.training.") for name in users)
    assert not [name for name in users if not name.startswith("tensor_dedup.store.")]


@pytest.mark.parametrize("part", package_source.LINKED)
def test_each_folder_of_the_root_is_linked_into_the_package(part: str) -> None:
    # A checkout that lost its links builds a wheel with the root package only, without a warning.
    link = package_source.SOURCE / "tensor_dedup" / part
    assert link.is_symlink()
    assert str(link.readlink()) == f"../../{part}"
    assert link.resolve() == package_source.ROOT / part


@pytest.mark.parametrize("name", [name for name in package_source.modules() if name])
def test_every_folder_with_code_is_a_package(name: str) -> None:
    parent = name.rpartition(".")[0]
    assert not parent or parent in package_source.modules()


# The rooms of the loader, bottom first; a room imports itself and what stands before it.
ROOMS = (
    "report",
    "torch_dtypes",
    "process_state",
    "load_lock",
    "ledger",
    "residents",
    "cuda",
    "checkpoint_io",
    "unsharing",
    "deferred",
    "post_load",
)


def upward(texts: Mapping[str, str]) -> list[str]:
    """Each import from a room of the loader into one above it, for type checkers only too."""
    return [
        f"{module} imports {name}"
        for module, text in texts.items()
        for name in package_source.imports(text)
        if (here := _room(module)) is not None and (there := _room(name)) is not None
        if ROOMS.index(there) > ROOMS.index(here)
    ]


def _room(name: str) -> str | None:
    parts = name.split(".")
    return parts[2] if parts[:2] == ["tensor_dedup", "loader"] and len(parts) > 2 else None


def test_every_part_of_the_loader_is_a_room() -> None:
    assert {_room(name) for name in package_source.modules()} - {None} == set(ROOMS)


def test_no_room_of_the_loader_imports_one_above_it() -> None:
    assert upward(package_source.sources()) == []


def test_an_import_of_a_room_above_is_found() -> None:
    text = "def f():\n    from tensor_dedup.loader.cuda.gpu import Gpu"
    assert len(upward({"tensor_dedup.loader.residents.slab": text})) == 1
    assert upward({"tensor_dedup.loader.post_load.dedup": text}) == []
