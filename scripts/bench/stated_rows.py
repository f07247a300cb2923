"""Which rows README.md and docs/results.md state, what measures each, and its aim."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from bench.results import Sides
from bench.stats import Estimate

SCRIPTS: Final = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Part:
    """What one process measures: a script, its arguments, and its option for repeats.

    `times`: how many repeats there are for each pair, as what takes milliseconds can have more.
    """

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    repeats: str = ""
    times: int = 1

    def command(self, pairs: int, work: Path, target: Path, *, quick: bool) -> list[str]:
        """What to run; the figures go to `target`."""
        script = str(SCRIPTS / self.script)
        command = [sys.executable, script, *self.arguments, "--work", str(work)]
        if self.repeats:
            command += ["--quick"] if quick else [self.repeats, str(self.times * pairs)]
        return [*command, "--json", str(target)]


DEMO: Final = Part("demo", "demonstration")
UNKNOWN, AGAIN, PLANNING, KNOWN, RESIDENCY, DECODE = (
    Part(f"load {name}", "bench/load.py", ("--only", name), "--pairs")
    for name in ("unknown", "again", "planning", "known", "residency", "decode")
)
SAVES: Final = Part("checkpoints", "bench/checkpoints.py", ("--stated",), "--rounds", 3)
GPT2: Final = Part(
    "checkpoints gpt2", "bench/checkpoints.py", ("--stated", "--only", "gpt2"), "--rounds"
)

STEPS: Final = Part(
    "checkpoints steps", "bench/checkpoints.py", ("--stated", "--only", "steps"), "--rounds"
)

PIPELINES: Final = Part("pipelines", "bench/pipelines.py", repeats="--pairs")
RANKS: Final = Part("ranks", "bench/ranks.py")
FINE_TUNE: Final = Part("stored fine-tune", "bench/stored_fine_tune.py", repeats="--pairs")
DIGESTS: Final = Part("digests", "bench/digests.py", repeats="--repeats", times=3)
WIRE: Final = Part("remote wire", "bench/remote.py", ("--only", "wire"))
_PUBLISHED: Final = ("lr 1e-6, fp32 masters", "lr 3e-6, fp32 masters")
PUBLISH: Final = Part(
    "publish",
    "bench/publish.py",
    ("--steps", "5", "--warm-up", "3", *(part for each in _PUBLISHED for part in ("--only", each))),
)
FOLLOW: Final = Part("follow", "bench/follow.py", repeats="--steps")

FOLLOWING: Final = (("one", "one engine"), ("two", "two engines and a manager"))


@dataclass(frozen=True)
class StatedRow:
    """A row: where it is stated, what measures it, and what is held to which aim.

    `results` and `readme` are the first cells of its rows in the two documents. A *ratio* is ours
    to the other side, *more* is what ours has beyond that; either is taken pair by pair. What is
    *counted* is the same in every run, so that one shows it.
    """

    name: str
    results: str
    part: Part
    figure: str
    compared: Literal["ratio", "more", "ours"] = "ratio"
    most: float = 1.0  # no slower, and no larger
    least: float = -math.inf
    unit: str = "s"
    scale: float = 1.0
    counted: bool = False
    readme: str = ""

    def values(self, sides: Sides) -> list[float]:
        """What is held to the aim, of every pair."""
        plain, ours = sides
        match self.compared:
            case "ratio":
                return [b / a for a, b in zip(plain, ours, strict=True)]
            case "more":
                return [(b - a) / self.scale for a, b in zip(plain, ours, strict=True)]
            case "ours":
                return [value / self.scale for value in ours]

    @property
    def measure(self) -> str:
        """The unit of the aim."""
        return {"ratio": "x", "more": f"{self.unit} more", "ours": self.unit}[self.compared]

    @property
    def aim(self) -> str:
        """As it is printed."""
        most = f"{self.most:g} {self.measure}"
        return f"≤ {most}" if self.least == -math.inf else f"{self.least:g} to {most}"

    def text(self, found: Estimate, unit: str) -> str:
        """A figure with its interval; what is counted has none."""
        if self.counted:
            return f"{found.median:,.3f} {unit}"
        return f"{found.text()} {unit}"


def counted(
    name: str,
    results: str,
    part: Part,
    figure: str,
    stated: tuple[float, str, float],
    readme: str = "",
) -> StatedRow:
    """Return a row of memory or bytes, of which one run shows what there is.

    They may be 3 % more than is stated (number, unit, scale), as that is rounded.
    """
    number, unit, scale = stated
    return StatedRow(
        name,
        results,
        part,
        figure,
        compared="ours",
        most=round(1.03 * number, 3),
        unit=unit,
        scale=scale,
        counted=True,
        readme=readme,
    )


# Where docs/results.md states no aim, times are to be no longer than without.
ROWS: Final = (
    counted(
        "four-models",
        "memory of four models (a base, three fine-tunes; `scripts/demo`, PSS with KV caches of "
        "64 MiB each)",
        DEMO,
        "memory",
        (3.1, "GiB", 1 << 30),
    ),
    StatedRow(
        "one-layer-memory",
        "a known fine-tune with one changed layer: memory it adds (PSS), less the 28.44 MiB that "
        "differ",
        KNOWN,
        "known, one layer changed, PSS growth less what differs",
        compared="ours",
        most=32,
        least=-32,
        unit="MiB",
        scale=1 << 20,
    ),
    counted(
        "new-byte",
        "one to eight such models: memory for a byte that is new",
        RESIDENCY,
        "PSS of 1 to 8 fine-tunes, slope over unique bytes",
        (1.017, "bytes", 1),
    ),
    StatedRow(
        "again",
        "the same model again: its weights",
        AGAIN,
        "same model again, weight phase",
        most=0.05,
    ),
    StatedRow(
        "planning",
        "45,312 expert tensors that are known, nothing resident: processor time before the first "
        "is read",
        PLANNING,
        "planning 45,312 expert tensors, nothing resident",
        compared="ours",
        most=5,
    ),
    StatedRow(
        "planned",
        "the same with all of them resident",
        PLANNING,
        "planning 45,312 expert tensors, all resident",
        compared="ours",
        most=1,
    ),
    StatedRow(
        "one-layer",
        "a known fine-tune with one changed layer: whole load",
        KNOWN,
        "known, one layer changed, whole load",
    ),
    StatedRow(
        "half-layers",
        "a known fine-tune with half the layers changed: whole load",
        KNOWN,
        "known, half the layers changed, whole load",
    ),
    StatedRow(
        "first-cached",
        "a checkpoint never seen, file cached",
        UNKNOWN,
        "unknown checkpoint, file cached",
        compared="more",
        most=0.124,
        readme="first load, file in the page cache",
    ),
    StatedRow(
        "first-cold",
        "a checkpoint never seen, file cold",
        UNKNOWN,
        "unknown checkpoint, file cold",
        most=1.02,
    ),
    StatedRow(
        "first-cached-as-seen",
        "cached, with vLLM's two garbage collections, as users see it",
        UNKNOWN,
        "unknown checkpoint, file cached, with collections",
    ),
    StatedRow(
        "first-cold-as-seen",
        "cold, with vLLM's two garbage collections, as users see it",
        UNKNOWN,
        "unknown checkpoint, file cold, with collections",
    ),
    *(
        StatedRow(
            f"ranks-{verb}",
            f"a checkpoint never seen, two tensor-parallel ranks: bytes that both {verb}",
            RANKS,
            f"unknown checkpoint, two ranks: bytes {done}",
            most=1.05,
            unit="MB",
            scale=1e6,
            counted=True,
        )
        for verb, done in (("read", "read"), ("hash", "hashed"))
    ),
    *(
        StatedRow(
            f"decode-{size}",
            f"decoding, 98 % shared, batch {size}",
            DECODE,
            f"decode, batch {size}",
            most=1.02,
            least=0.98,
            unit="tokens/s",
        )
        for size in (1, 4)
    ),
    *(
        StatedRow(
            f"pipeline-{name}",
            f"a {which} pipeline, {seen}, files {files}",
            PIPELINES,
            f"{which} pipeline, {files}, {state}: until all was read",
            most=most,
        )
        for name, which, seen, files, state, most in (
            ("cached", "first", "never seen", "cached", "unknown", 1.5),
            ("cold", "first", "never seen", "cold", "unknown", 1.02),
            ("second", "second", "known", "cached", "known", 1.2),
        )
    ),
    counted(
        "frozen-bytes",
        "20 checkpoints of ResNet-18 with a frozen backbone",
        SAVES,
        "bytes: ResNet-18, frozen",
        (38, "MB", 1e6),
        "20 checkpoints of a frozen ResNet-18",
    ),
    counted(
        "last-block-bytes",
        "9 checkpoints of GPT-2's size, the last block trained",
        GPT2,
        "bytes: GPT-2's size, the last block",
        (560, "MB", 1e6),
        "9 checkpoints of GPT-2's size, last block trained",
    ),
    counted(
        "all-weights-bytes",
        "9 checkpoints of GPT-2's size, all weights trained",
        GPT2,
        "bytes: GPT-2's size, all weights",
        (2900, "MB", 1e6),
    ),
    StatedRow(
        "frozen-save",
        "save, ResNet-18 with a frozen backbone",
        SAVES,
        "save: ResNet-18, frozen, torch.save",
        unit="ms",
        scale=1e-3,
    ),
    StatedRow(
        "full-save",
        "save, all of ResNet-18 changed",
        SAVES,
        "save: ResNet-18, all changes, torch.save + fsync",
        unit="ms",
        scale=1e-3,
        readme="saving ResNet-18 all of it changed (`torch.save` with fsync)",
    ),
    *(
        StatedRow(
            f"steps-{size}",
            f"every step of a training saved, {size} MB that all changed: a step is blocked",
            STEPS,
            f"steps: {size} MB, blocked",
            most=0.35,
            unit="ms",
            scale=1e-3,
        )
        for size in (105, 420)
    ),
    *(
        StatedRow(
            f"digest-{name}",
            f"the digest of the {what} of a resident model{when}",
            DIGESTS,
            f"digest of the {what} of a resident model{when}",
            compared="ours",
            most=1,
            unit="ms",
            scale=1e-3,
        )
        for name, what, when in (
            ("checkpoint", "checkpoint", ""),
            ("weights", "weights", ""),
            ("used-weights", "weights", ", in use"),
        )
    ),
    StatedRow(
        "stored-paced",
        "a full fine-tune from a store, at 200 MB/s",
        FINE_TUNE,
        "a full fine-tune at 200 MB/s",
    ),
    StatedRow(
        "stored-cold",
        "a full fine-tune from a store, on the disk as it is",
        FINE_TUNE,
        "a full fine-tune, file cold",
    ),
    *(
        StatedRow(
            f"decoding-{name}",
            f"processor time for a GB, decoded and verified: {kind}",
            FINE_TUNE,
            f"decoding a GB: {kind}",
            compared="ours",
            most=0.5,
        )
        for name, kind in (
            ("bf16", "a fine-tune in bfloat16"),
            ("f16", "a fine-tune in float16"),
            ("f32", "a fine-tune in float32"),
            ("few", "1 % moved, in bfloat16"),
            ("alone-bf16", "no base, in bfloat16"),
            ("alone-f32", "no base, in float32"),
        )
    ),
    *(
        StatedRow(
            f"{verb}-{what}",
            f"{verb} of a fine-tune with one new layer, beside 10,000 checkpoints: {what}",
            WIRE,
            f"{verb} of one layer, 10,000: {what}",
            unit="MB" if what == "bytes" else "requests",
            scale=1e6 if what == "bytes" else 1,
            counted=True,
        )
        for verb in ("push", "pull")
        for what in ("bytes", "requests")
    ),
    *(
        StatedRow(
            f"publish-{rate}",
            f"a step of a real training, AdamW at {rate} with fp32 masters: bytes that who follows "
            "pulls",
            PUBLISH,
            f"lr {rate}, fp32 masters: bytes that a follower fetches",
            unit="MB",
            scale=1e6,
            counted=True,
        )
        for rate in ("1e-6", "3e-6")
    ),
    *(
        StatedRow(
            f"follow-pause-{name}",
            f"{kind}, changing to the next step while answering: longest time without a token, for "
            "each GB of the model",
            FOLLOW,
            f"{kind}: longest time without a token, for each GB",
            compared="ours",
            most=0.3,
            unit="s/GB",
        )
        for name, kind in FOLLOWING
    ),
    *(
        StatedRow(
            f"follow-memory-{name}-{state}",
            f"{kind}, {during}: memory beyond what it was, in versions of the model",
            FOLLOW,
            f"{kind}: {figure}",
            compared="ours",
            most=most,
            unit="versions",
        )
        for name, kind in FOLLOWING
        for state, during, figure, most in (
            ("during", "while changing", "most memory during an update", 1.05),
            ("after", "after the change", "memory after an update", 0.05),
        )
    ),
)
