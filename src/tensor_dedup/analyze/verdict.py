"""What to do about it: the sentence an analysis ends in, and the command to go on with."""

import shlex
from dataclasses import dataclass

from tensor_dedup.analyze.analysis import Analysis
from tensor_dedup.analyze.changes import name_shown
from tensor_dedup.analyze.picture import percent
from tensor_dedup.analyze.stored import looks_like_step
from tensor_dedup.text_table import human

# Less than this of all bytes is not worth a memory manager.
_LITTLE = 0.01


@dataclass(frozen=True, slots=True)
class Advice:
    """A sentence, and the command it recommends ("" where there is none)."""

    sentence: str
    command: str = ""


def headline(analysis: Analysis) -> str:
    """Return what loading all of them together costs and saves."""
    if len(analysis.checkpoints) == 1:
        return f"{human(analysis.unique_bytes)}: one checkpoint, nothing to compare it with"
    saved = percent(analysis.shared_bytes, analysis.total_bytes)
    return (
        f"{human(analysis.unique_bytes)} instead of {human(analysis.total_bytes)}: {saved} % saved"
    )


def advice(analysis: Analysis) -> list[Advice]:
    """Return what to do about these checkpoints, the most useful first."""
    first = analysis.checkpoints[0].path
    if len(analysis.checkpoints) == 1:
        again = f"tensor-dedup analyze {shlex.quote(first)} OTHER"
        return [Advice("Name a second checkpoint to see what the two share.", again)]
    found = []
    if analysis.saving >= _LITTLE:
        found.append(_together(analysis, first))
    full = [
        checkpoint.path
        for checkpoint, why in zip(analysis.checkpoints, analysis.reasons, strict=True)
        if why.full
    ]
    if full:
        who = name_shown(full[0]) if len(full) == 1 else f"{len(full)} full fine-tunes"
        verb = "shares" if len(full) == 1 else "share"
        found.append(
            Advice(
                f"{who} {verb} no memory with the others; a store keeps the differences only:",
                f"tensor-dedup import {shlex.quote(full[0])} --compress auto",
            )
        )
    return found or [Advice("They have too little in common: load each of them as you do now.")]


def _together(analysis: Analysis, first: str) -> Advice:
    saved = human(analysis.shared_bytes)
    names = {tensor.name for checkpoint in analysis.checkpoints for tensor in checkpoint.tensors}
    if all(looks_like_step(checkpoint.path) for checkpoint in analysis.checkpoints):
        two = " ".join(shlex.quote(each.path) for each in analysis.checkpoints[:2])
        return Advice(
            f"A store keeps these steps in {saved} less than plain files would take.",
            f"tensor-dedup diff {two}",
        )
    if analysis.vllm.groups and not any("/" in name for name in names):
        less = analysis.shared_bytes - analysis.vllm.shared_bytes
        left = f", {human(less)} less in vLLM, which fuses layers" if less > 0 else ""
        return Advice(
            f"Load them together: that saves {saved}{left}. Start each like this:",
            f"""vllm serve {shlex.quote(first)} --tensor-dedup '{{"memory_manager": "auto"}}'""",
        )
    return Advice(
        f"Keep them in a store, {saved} smaller; in Python enable() shares as much memory.",
        f"tensor-dedup import {shlex.quote(first)}",
    )
