"""Scratch memory: never lent twice at a time, never more kept than was lent at one time."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensor_dedup.loader.deferred.evaluate import Scratch

SIZES = st.integers(0, 5000)


class Lending(RuleBasedStateMachine):
    """Blocks are filled with a number of their own, which must be there when they come back."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = Scratch()
        self.lent: list[tuple[torch.Tensor, int]] = []
        self.counter = 0
        self.most = 0

    @rule(size=SIZES)
    def take(self, size: int) -> None:
        block = self.scratch.take(size)
        assert block.numel() >= size
        self.counter = (self.counter + 1) % 251
        block.fill_(self.counter)
        self.lent.append((block, self.counter))
        self.most = max(self.most, sum(b.numel() for b, _ in self.lent))

    def pop(self, which: int) -> torch.Tensor:
        block, number = self.lent.pop(which % len(self.lent))
        assert (block == number).all()
        return block

    @precondition(lambda self: self.lent)
    @rule(which=st.integers(0, 99))
    def give_back(self, which: int) -> None:
        self.scratch.give_back(self.pop(which))

    @precondition(lambda self: self.lent)
    @rule(which=st.integers(0, 99))
    def forget(self, which: int) -> None:
        """Somebody keeps the block for good: it must never be lent again."""
        block = self.pop(which)
        self.scratch.forget(block)
        assert all(kept is not block for kept in self.scratch._free)

    @invariant()
    def keeps_no_more_than_was_lent(self) -> None:
        kept = sum(block.numel() for block in self.scratch._free)
        lent = sum(block.numel() for block, _ in self.lent)
        assert self.scratch.peak == self.most
        assert kept + lent <= self.most

    def teardown(self) -> None:
        for block, number in self.lent:
            assert (block == number).all()
        self.scratch.close()
        assert not self.scratch._free


TestLending = Lending.TestCase


@given(SIZES)
def test_a_block_given_back_is_lent_again(size: int) -> None:
    scratch = Scratch()
    block = scratch.take(size)
    scratch.give_back(block)
    assert scratch.take(size) is block
