"""The writer of a run on a second tier: one fast tier at a time may drain the run to it.

    writers/RUN   on the second tier: the token, which names the fast tier that is the writer

The fast tier with which the run was opened last has the token. It takes it by a conditional write,
and gets the next generation (`plan`). The writer before meets the token at its next change of a
name on the second tier, which does not take place. All objects, processes and ranks that use one
fast tier share its token: a fast tier is known by the identity of its store.
"""

import socket
from typing import Final

from tensor_dedup.store.errors import StoreBusyError
from tensor_dedup.store.format.identity import Writer, writer_in, writer_text
from tensor_dedup.store.steps.runs import StepOrder
from tensor_dedup.store.store import LocalStore
from tensor_dedup.training.tiers.plan import first_place, next_generation
from tensor_dedup.training.tiers.second_tier import SecondTier, own_identity

_ATTEMPTS: Final = 16
# What a damaged token says of its writer.
_UNKNOWN: Final = Writer(0, "", "")


class WriterToken:
    """The token of a run on its second tier, as one fast tier sees it. Safe from any thread."""

    def __init__(self, fast: LocalStore, second: SecondTier, order: StepOrder) -> None:
        """Take the token, unless the fast tier `fast` has it.

        `order` is the order of saving of the run on the fast tier.

        Raises:
            StoreBusyError: Others kept taking the token.
            StoreError: A tier cannot be read or written to.
        """
        self._second, self._run = second, order.run
        # Whether this object has taken the token, and from which writer, if there was one.
        self.was_taken = False
        self.previous: Writer | None = None
        # The writer that has the token, if that was seen to be another one.
        self.other: Writer | None = None
        self._is_missing = False
        self._holder = own_identity(fast)
        where = f"{socket.gethostname()}:{fast.path}"
        for _ in range(_ATTEMPTS):
            found = second.writer()
            writer = None if found is None else writer_in(found[0], self._run) or _UNKNOWN
            if writer is not None and writer.holder == self._holder:
                self._own = writer
                return
            there = second.content().places
            with fast.handle.locked():
                near = order.places()
            generation = next_generation(near, there, None if writer is None else writer.generation)
            self._own = Writer(generation, self._holder, where)
            self.was_taken, self.previous = True, writer
            if self._write(None if found is None else found[1]):
                return
        what = f"other fast tiers keep becoming the writer of the run {self._run!r}"
        raise StoreBusyError.at(fast.path, what)

    def _write(self, tag: str | None) -> bool:
        return self._second.put_writer(writer_text(self._run, self._own), tag)

    @property
    def start(self) -> int:
        """The place after which the steps of the present generation come."""
        return first_place(self._own.generation)

    def is_held(self) -> bool:
        """Read the token; return whether this fast tier has it still.

        Another handle of this fast tier may have taken the token back, with a new generation. A
        token that is missing is nobody else's.
        """
        found = self._second.writer()
        self._is_missing = found is None
        if found is None:
            self.other = None
            return True
        writer = writer_in(found[0], self._run) or _UNKNOWN
        if writer.holder != self._holder:
            self.other = writer
            return False
        self._own, self.other = writer, None
        return True

    def renew(self) -> None:
        """Write the token again if it was missing when it was read last."""
        if self._is_missing:
            self._write(None)
