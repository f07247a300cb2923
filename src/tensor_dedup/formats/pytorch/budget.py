"""A limit on the memory and work that a pickle may take, in proportion to its size.

A pickle can name the same value again and again, so that a few bytes stand for a tree of any size,
and one byte can make an object of a hundred bytes. Limits on counts alone do not bound the memory:
a limit that allows a checkpoint of 10 GB would let a file of 10 KB take a gigabyte.
"""

from tensor_dedup.formats.errors import PytorchError, PytorchFault

# torch.save writes some 150 bytes for a tensor, whose values, name and places take 4 KB at most.
_FACTOR = 56
_BASE = 32 << 20


class Budget:
    """The memory, in bytes, that evaluating a pickle and naming its tensors may still take."""

    def __init__(self, nbytes: int, path: str) -> None:
        """Begin with what a pickle of `nbytes`, its archive's headers included, may take."""
        self.path = path
        self.limit = self.left = _BASE + _FACTOR * nbytes

    def charge(self, nbytes: int) -> None:
        """Deduct `nbytes` from the budget, for memory or for an equivalent amount of work.

        Raises:
            PytorchError: The budget is used up.
        """
        self.left -= nbytes
        if self.left < 0:
            raise PytorchError.at(
                PytorchFault.PICKLE_BOMB,
                self.path,
                f"its pickle takes more than {self.limit} bytes of memory",
                limit=self.limit,
            )
