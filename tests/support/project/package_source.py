"""The package's own source as data, for the tests that keep its rules."""

import ast
import os
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src"
LINKED = ("loader", "memory_manager", "patches")

# The wings, bottom first. A wing imports itself and what stands before it; two that stand side by
# side do not know each other, except among the first, which are single modules.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset(
        {
            "errors",
            "types",
            "digest",
            "dtypes",
            "config",
            "settings",
            "sqlite",
            "libc",
            "suggestions",
            "seams",
            "text_table",
        }
    ),
    frozenset({"formats"}),
    frozenset({"memory_manager", "store"}),
    frozenset({"remote"}),
    frozenset({"loader", "training"}),
    frozenset({"analyze", "publishing"}),
    frozenset({"patches"}),
    frozenset({"planning"}),
    frozenset({"integrations"}),
    frozenset({"api"}),
)
# The top may import every layer, and no layer imports the top.
TOP = frozenset({"", "__main__", "cli"})
# The parts of each wing, bottom first: a part imports itself and what stands before it.
PARTS: Mapping[str, tuple[str, ...]] = {
    "formats": (
        *(
            "errors",
            "files",
            "json",
            "left_out",
            "weight_choice",
            "hub_cache",
            "links",
            "layers",
            "safetensors",
        ),
        *("gguf", "pytorch", "serverless", "placeholders", "markers", "weights", "gguf_parts"),
        *("alternatives", "model_stores", "rank_files", "checkpoint"),
    ),
    "memory_manager": ("errors", "protocol", "cuda", "backends", "core", "client", "server"),
    "store": (
        *("errors", "buffers", "files", "direct", "gathered", "hashing", "codecs", "format"),
        *("locks", "folders", "containers", "rename_journal", "objects", "index", "init", "handle"),
        *("reading", "writing", "steps", "upkeep", "store", "interchange"),
    ),
    "remote": (
        *("errors", "environment", "layout", "buckets", "answers", "folder_bucket"),
        *("server_bucket", "urls"),
        *("lease", "results", "catalog", "conditions", "loads", "manifests", "run_steps"),
        *("pieces", "locate"),
        *("step_deltas", "push", "pull", "inventory", "sweep", "verify", "upkeep", "step_costs"),
        *("oci", "remote", "latest", "transfer", "on_demand"),
    ),
    "loader": (
        *(
            "report",
            "torch_dtypes",
            "thread_dtype",
            "process_state",
            "load_lock",
            "not_shared",
            "residents",
            "cuda",
        ),
        *("checkpoint_io", "unsharing", "takeover", "deferred", "post_load"),
    ),
    "training": (
        *("errors", "reentry", "state", "adapters", "in_flight", "values", "retention"),
        *("snapshot", "host_pool", "devices", "capture", "encoding", "piece_writer", "commit"),
        *("saver", "pending_save", "background", "options", "tiers", "run", "sharded"),
    ),
    "publishing": (
        *("errors", "subscriber", "engine_server", "follower"),
        *("weights", "slime", "lock", "publisher"),
    ),
    "analyze": (
        *("tensors", "layers", "digests", "contributions", "fusion", "changes", "stored"),
        *("marker_checks", "variants", "picture", "analysis", "difference", "verdict"),
    ),
    "patches": ("vllm", "huggingface"),
    "planning": ("substitution", "placement"),
    "integrations": (
        *("freezing", "dcp", "trainer", "lightning", "deepspeed", "datastates", "ray"),
    ),
    "cli": (
        *("tables", "page", "run_plot", "terminal", "completion", "help"),
        *("analysis_text", "analysis_tables", "analysis_page", "plan_page", "manager", "store"),
        *("serve", "contents", "remote", "follow", "runs", "diff", "analyze", "substitute", "plan"),
        *("doctor", "tensorcas"),
    ),
}
# A second name for parts of the package, which nothing in the package itself uses.
SECOND_NAME = "tensorcas"
# The module that DeepSpeed imports in place of DataStates' own: a distribution of its own, which
# nothing in the package uses.
STAND_IN = "datastates"
STAND_IN_FOLDER = ROOT / "packaging" / STAND_IN
# Which part of the package may import a framework, be it inside a function.
FRAMEWORKS: Mapping[str, tuple[str, ...]] = {
    "torch": (
        "tensor_dedup.loader",
        "tensor_dedup.patches",
        "tensor_dedup.integrations",
        "tensor_dedup.training",
        "tensor_dedup.publishing",
        "tensor_dedup.store.interchange",
        "tensor_dedup.store.reading.tensors",
        "tensor_dedup.memory_manager.client.state_dicts",
        "tensor_dedup.planning.substitution",
        "tensor_dedup.store.store",  # for type checkers: what `Store.load` returns
    ),
    "vllm": ("tensor_dedup.patches.vllm", "tensor_dedup.integrations.ray.engine"),
    "ray": ("tensor_dedup.integrations.ray",),
    "diffusers": ("tensor_dedup.patches.huggingface",),
    "transformers": (
        "tensor_dedup.patches.huggingface",
        "tensor_dedup.integrations",
        "tensor_dedup.publishing",
        "tensor_dedup.planning.substitution.samples",
    ),
}


def modules(source: Path = SOURCE) -> dict[str, Path]:
    """Every module below a source folder, links followed, by its dotted name."""
    found = {}
    for folder, _, files in os.walk(source, followlinks=True):
        for file in files:
            if file.endswith(".py"):
                path = Path(folder, file)
                parts = path.relative_to(source).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def sources() -> Mapping[str, str]:
    """The text of every module of the package, by its dotted name; read once."""
    return MappingProxyType({name: path.read_text() for name, path in modules().items()})


@cache
def imports(text: str) -> tuple[str, ...]:
    """Every name a module imports, also in a function or for type checkers only.

    `from a import b` yields `a.b`, since `b` may be a module.
    """
    return tuple(_imports(text))


def _imports(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            yield from (f"{dots}{node.module or ''}.{alias.name}" for alias in node.names)


def layer_faults(texts: Mapping[str, str]) -> list[str]:
    """Each import that goes up, sideways, or to a framework that has its home elsewhere."""
    return [
        f"{module} imports {name}: {fault}"
        for module, text in texts.items()
        for name in imports(text)
        if (fault := _fault(module, name))
    ]


def _fault(module: str, name: str) -> str | None:
    package, _, rest = name.partition(".")
    if not package:
        return "relative"
    if package in FRAMEWORKS and not _inside(module, FRAMEWORKS[package]):
        return f"{package} belongs to {' and '.join(FRAMEWORKS[package])}"
    if package == STAND_IN:
        return "that name is for DeepSpeed"
    if package == SECOND_NAME and not _inside(module, (SECOND_NAME,)):
        return "that name is for users"
    if package != "tensor_dedup" or _inside(module, (SECOND_NAME,)):
        return None
    return _direction(_part(module), _known(rest.partition(".")[0]))


def _direction(here: str, there: str) -> str | None:
    if here in TOP:
        return None
    if there in TOP:
        return "a layer does not import the top"
    if _height(there) > _height(here):
        return "upwards"
    if _height(there) == _height(here) and there != here and _height(here) > 0:
        return "two parts of one layer do not know each other"
    return None


def _height(part: str) -> int:
    return next(height for height, layer in enumerate(LAYERS) if part in layer)


def _known(part: str) -> str:
    """A public name (`from tensor_dedup import report`) is the top's."""
    return part if part in TOP or any(part in layer for layer in LAYERS) else ""


def _part(module: str) -> str:
    return module.partition(".")[2].partition(".")[0]


def _inside(module: str, homes: tuple[str, ...]) -> bool:
    return any(module == home or module.startswith(home + ".") for home in homes)


def import_graph(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Which module of the package needs which other one."""
    return {
        module: {target for name in imports(text) if (target := _module_of(name, texts))} - {module}
        for module, text in texts.items()
    }


def _module_of(name: str, texts: Mapping[str, str]) -> str | None:
    while name and name not in texts:
        name = name.rpartition(".")[0]
    return name or None


def tracked_files() -> list[Path]:
    """Every file in git, relative to the root; links are not followed."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.split("\0") if name]
