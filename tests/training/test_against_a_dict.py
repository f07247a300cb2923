"""A run beside a dict of copies, whatever is done to it; models that are written to meanwhile."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from store_runs.stores import Model, assert_same, copied, handle, memory_folder, noise, shares
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.store.errors import ChangedModelError
from tensor_dedup.store.files import Handle, Mode, RealFiles
from tensor_dedup.store.steps.errors import KeptStepError

# Empty, small, around what shares a container, and what is encoded.
SIZES = (0, 1, 64, 3000, 16_383, 16_384, 16_385, 40_000)
LARGE = 2 * LEAF_BYTES + 70_000
NAMES = st.sampled_from([f"t{n}" for n in range(6)])
STEPS = st.integers(0, 5)


# What lies within one tick of the clock of files has one time, and is in the order of its number.
_TICK_S = 0.011


class Training(RuleBasedStateMachine):
    """Two handles of one run, another run, and what each step should be."""

    @initialize(
        compress=st.sampled_from(["auto", None]),
        keep=st.none() | st.integers(1, 3),
        large=st.booleans(),
    )
    def begin(self, compress: str | None, keep: int | None, large: bool) -> None:
        self._memory = memory_folder()
        self.root = self._memory.__enter__()
        self.options: dict[str, Any] = {"compress": compress, "keep_last": keep}
        self.keep = keep
        self.run = handle(self.root, **self.options)
        self.model: Model = {}
        self.kept: dict[int, Model] = {}
        self.marked: set[int] = set()
        if large:
            self.put_large(0)
            self.save(0)

    def teardown(self) -> None:
        self.run.close()
        self._memory.__exit__(None, None, None)

    @rule(name=NAMES, size=st.sampled_from(SIZES), seed=st.integers(0, 3))
    def put(self, name: str, size: int, seed: int) -> None:
        self.model[name] = np.random.default_rng(seed).standard_normal(size).astype(np.float32)

    @rule(name=NAMES, amount=st.sampled_from([1e-5, 1.0]))
    def train(self, name: str, amount: float) -> None:
        if name in self.model:
            self.model[name] += np.float32(amount)

    @rule(seed=st.integers(0, 3))
    def put_large(self, seed: int) -> None:
        """What is stored by leaf, once a step has it and the next one differs in some."""
        self.model["large"] = np.random.default_rng(seed).integers(0, 256, LARGE, np.uint8)

    @rule(step=STEPS, leaf=st.integers(0, 2), seed=st.integers(4, 6), all_of_it=st.booleans())
    @precondition(lambda self: "large" in self.model)
    def save_with_another_leaf(self, step: int, leaf: int, seed: int, all_of_it: bool) -> None:
        """One leaf changes: wholly, so that it is stored as it is, or in a few numbers."""
        part = self.model["large"][leaf * LEAF_BYTES :][: LEAF_BYTES if all_of_it else 100]
        part[:] = np.random.default_rng(seed).integers(0, 256, part.size, np.uint8)
        self._save(self.run.save, step)

    @rule(name=NAMES)
    def drop(self, name: str) -> None:
        self.model.pop(name, None)

    @rule(one=NAMES, two=NAMES)
    def tie(self, one: str, two: str) -> None:
        if one in self.model:
            self.model[two] = self.model[one]

    @rule(step=STEPS)
    def save(self, step: int) -> None:
        self._save(self.run.save, step)

    @rule(step=STEPS)
    def save_elsewhere(self, step: int) -> None:
        other = handle(self.root, **self.options)
        self._save(other.save, step)
        other.close()

    def _save(self, save: Callable[[Model, int], object], step: int) -> None:
        if step in self.marked:
            with pytest.raises(KeptStepError):
                save(self.model, step)
            return
        save(self.model, step)
        self.kept.pop(step, None)
        self.kept[step] = copied(self.model)  # in the order of saving
        if self.keep is not None:
            time.sleep(_TICK_S)
            last = list(self.kept)[-self.keep :]
            stay = {*last, step, *self.marked}
            self.kept = {each: self.kept[each] for each in self.kept if each in stay}

    @rule()
    def reopen(self) -> None:
        self.run.close()
        self.run = handle(self.root, **self.options)

    @rule(data=st.data())
    @precondition(lambda self: self.kept)
    def pin_or_not(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.kept)))
        if step in self.marked:
            self.run.unkeep(step)
            self.marked.discard(step)
        else:
            self.run.keep(step)
            self.marked.add(step)

    @rule(data=st.data())
    @precondition(lambda self: set(self.kept) - self.marked)
    def delete(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(set(self.kept) - self.marked)))
        handle(self.root).delete(step)
        del self.kept[step]

    @rule()
    def collect(self) -> None:
        handle(self.root).gc(0)

    @rule()
    def forget_the_index(self) -> None:
        for path in self.root.glob("index.sqlite*"):
            path.unlink()

    @invariant()
    def every_step_is_what_was_saved(self) -> None:
        assert self.run.steps() == sorted(self.kept)
        assert self.run.kept() == self.marked
        for step, model in self.kept.items():
            assert_same(self.run.load(step), model)

    @rule()
    def verify(self) -> None:
        assert self.run.store.verify(full=True).faults == []


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=8, stateful_step_count=25, deadline=None)

TestLongTraining: Any = pytest.mark.long(type("TestLongTraining", (Training.TestCase,), {}))
TestLongTraining.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


class Meddling(RealFiles):
    """Lets somebody write to the model when the store opens a container's file in some mode."""

    def __init__(self, meddle: Callable[[], None]) -> None:
        self._meddle = meddle
        self.at: Mode | None = None

    def open(self, path: Path, mode: Mode) -> Handle:
        if mode == self.at and {"containers", "tmp"} & set(path.parts):
            self.at = None
            self._meddle()
        return super().open(path, mode)


@pytest.mark.parametrize(
    ("compress", "at"),
    [
        (None, "create"),  # when what is hashed begins to be written
        # When what it is compared with is opened: in the save itself, for `"auto"` would leave
        # a tensor of this size to the thread that encodes after saves.
        ("always", "read"),
    ],
)
def test_a_model_that_is_written_to_while_it_is_saved(
    tmp_path: Path, compress: str | None, at: Mode
) -> None:
    # Most bytes are equal, so that it is encoded where that is asked for.
    data = np.frombuffer(noise(1, 1000) + bytes(3 * LEAF_BYTES), np.uint8).copy()
    model: Model = {"large": data, "frozen": np.ones(20_000, np.float32)}

    def meddle() -> None:
        data[:] = 7

    files = Meddling(meddle)
    run = handle(tmp_path, files=files, compress=compress)
    run.save(model, 0)
    first = copied(model)
    data[5] ^= 1
    files.at = at
    with pytest.raises(ChangedModelError, match="'large'"):
        run.save(model, 1)
    assert run.steps() == [0]
    run.save(model, 1)
    assert shares(run)
    assert_same(run.load(0), first)
    assert_same(run.load(1), model)
    assert run.store.verify(full=True).faults == []
