"""Loads, drops, reloads, edited files and switches in any order: always what plain loading gives.

Every shared model has a plain twin, which vLLM's own loader made of the same files at the same
moment and which is reloaded when it is. After every step each living model is compared with its
twin: every parameter byte by byte, every packed weight by what it makes of the same input.
"""

import gc
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.model_executor.model_loader.reload import layerwise

from models import tiny_checkpoints as checkpoints
from processes import process_state
from tensor_dedup import report, verify
from vllm_runs import engines, loads

pytestmark = pytest.mark.vllm

# It is part of the key whether or not this machine's kernels look at it.
SWITCH = "VLLM_ZENTORCH_WEIGHT_PREPACK"
ALIVE = 4
CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"cpu_weights": "plain"},
    {"verify_bytes": True},
    {"audit": 1.0},
    {"hash_algorithm": "xxh3_128"},
    {"verify": "always"},
)


@dataclass
class Pair:
    """A shared model, and what it must be."""

    shared: loads.Model
    twin: loads.Model
    assembled: dict[str, str]  # the plain form of every weight, packed or not
    packed: bool
    switch: str | None

    def check(self) -> None:
        if self.packed:
            assert self.shared.parameters() == self.twin.parameters()
            assert self.shared.functions() == self.twin.functions()
        else:
            assert self.shared.parameters() == self.assembled
            # vLLM has no switch against packing an embedding again after a reload.
            assert self.shared.functions().items() <= self.twin.functions().items()


class Life(RuleBasedStateMachine):
    """One process in which models come and go."""

    root: ClassVar[Path]
    fixed: ClassVar[tuple[Path, ...]]
    seen: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[Pair] = []
        self.others = process_state.remaining()
        self.edited = self.root / "edited"
        shutil.rmtree(self.edited, ignore_errors=True)
        checkpoints.same(self.fixed[0], self.edited)
        self.edits = self.rests = 0
        self.before = os.environ.pop(SWITCH, None)

    def path(self, which: int) -> Path:
        return (*self.fixed, self.edited)[which % (len(self.fixed) + 1)]

    @precondition(lambda self: len(self.alive) < ALIVE)
    @rule(which=st.integers(0, 4), config=st.sampled_from(CONFIGS))
    def load(self, which: int, config: dict[str, Any]) -> None:
        path = self.path(which)
        with engines.assembled() as assembled:
            twin = loads.load(path)
        shared = loads.load(path, tensor_dedup=config)
        packed = config.get("cpu_weights") != "plain"
        switch = os.environ.get(SWITCH)
        self.alive.append(Pair(shared, twin, assembled, packed, switch))
        self.count(report().models[-1])

    def count(self, model: Any) -> None:
        self.seen["loads"] += 1
        self.seen["unshared"] += bool(model.skipped)
        self.seen["sharing"] += model.shared_bytes > 0
        self.seen["partly"] += 0 < model.shared_bytes < model.total_bytes
        self.seen["known"] += model.known
        self.seen["nothing read"] += model.bytes_read == 0

    @precondition(lambda self: self.alive)
    @rule(index=st.integers(0, ALIVE - 1))
    def drop(self, index: int) -> None:
        self.alive.pop(index % len(self.alive))
        gc.collect()

    @precondition(lambda self: self.alive)
    @rule(index=st.integers(0, ALIVE - 1), which=st.integers(0, 4))
    def reload(self, index: int, which: int) -> None:
        pair, path = self.alive[index % len(self.alive)], self.path(which)
        with engines.assembled() as pair.assembled:
            loads.load(path)
        pair.twin.reload(path)
        pair.shared.reload(path)
        pair.switch = os.environ.get(SWITCH)
        self.seen["reloads"] += 1

    @rule(number=st.integers(0, 99), restore=st.booleans())
    def edit(self, number: int, restore: bool) -> None:
        """Change one tensor of a file in place; its size stays, sometimes its time too."""
        [file] = self.edited.glob("*.safetensors")
        before = file.stat()
        with file.open("r+b") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
            specs = [spec for name, spec in sorted(header.items()) if name != "__metadata__"]
            start, end = specs[number % len(specs)]["data_offsets"]
            opened.seek(8 + size + start)
            content = bytearray(opened.read(end - start))
            content[::2] = bytes(byte ^ 1 for byte in content[::2])
            opened.seek(8 + size + start)
            opened.write(content)
        if restore:
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        self.edits += 1

    @precondition(lambda self: self.edits > 1 and not self.rests)
    @rule(number=st.integers(0, 99))
    def edit_what_is_known(self, number: int) -> None:
        """Let the file grow old enough for hints of it to be kept, and only then change it."""
        engines.leave_alone(*self.edited.glob("*.safetensors"))
        self.rests += 1
        del self.alive[ALIVE - 2 :]
        which = len(self.fixed)
        self.load(which, {})
        self.every_model_is_what_plain_loading_gives()
        self.edit(number, restore=True)
        self.load(which, {})
        self.seen["edits of what was known"] += 1

    @rule()
    def toggle(self) -> None:
        if os.environ.pop(SWITCH, None) is None:
            os.environ[SWITCH] = "0"

    @invariant()
    def every_model_is_what_plain_loading_gives(self) -> None:
        for pair in self.alive:
            pair.check()

    @invariant()
    def packed_weights_meet_only_under_one_switch(self) -> None:
        for pair in self.alive:
            for other in self.alive:
                if pair.switch != other.switch:
                    assert not self.same_handlers(pair, other)

    def same_handlers(self, pair: Pair, other: Pair) -> list[str]:
        forms = engines.forms(pair.shared.module, other.shared.module)
        return [name for name, same in forms.items() if same and name.endswith(engines.PACKED)]

    def teardown(self) -> None:
        assert verify().ok
        self.alive.clear()
        # vLLM keeps the layers of every model that was ever reloaded here, by a circle of its own.
        layerwise.LAYERWISE_INFO.clear()
        assert not process_state.remaining().beyond(self.others)
        os.environ.pop(SWITCH, None)
        if self.before is not None:
            os.environ[SWITCH] = self.before


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[Life]]:
    root = tmp_path_factory.mktemp("stateful")
    pair = checkpoints.make("llama", root)
    Life.root = root
    Life.fixed = (
        pair.base,
        pair.fine_tune,
        checkpoints.same_header(pair.base, root / "twin"),
        checkpoints.resharded(pair.base, root / "resharded"),
    )
    Life.seen = Counter()
    engines.leave_alone(*root.rglob("*.safetensors"))
    engines.warm_up(pair.base)
    with loads.prepared(pair.base):
        yield Life


def run(life: type[Life], **options: Any) -> None:
    life.seen.clear()
    # Examples share the process, as loads do; what one leaves behind is what this is about.
    health = (HealthCheck.too_slow, HealthCheck.data_too_large)
    with mock.patch.dict(os.environ):
        run_state_machine_as_test(
            life, settings=settings(deadline=None, suppress_health_check=health, **options)
        )
    wanted = ("sharing", "partly", "known", "nothing read", "reloads", "edits of what was known")
    for what in wanted:
        assert life.seen[what], f"no step of any example was about this: {what}"


def test_any_order_gives_what_plain_loading_gives(life: type[Life]) -> None:
    run(life, max_examples=40, stateful_step_count=9, derandomize=True)


@pytest.mark.long
@pytest.mark.parametrize("part", range(6))
def test_any_order_gives_what_plain_loading_gives_for_long(life: type[Life], part: int) -> None:
    """In parts that take a minute or two each; every one draws other examples."""
    run(life, max_examples=40, stateful_step_count=30, database=None)
