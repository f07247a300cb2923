"""How much memory and work a pickle may ask for, in proportion to its size.

A pickle can name the same value again and again, so that a few bytes stand for a tree of any size,
and one byte can make an object of a hundred. Limits on counts alone do not bound that: what is
right for a checkpoint of 10 GB lets a file of 10 KB take a gigabyte.
"""

from tensor_dedup.formats.errors import PytorchError, PytorchFault

# torch.save writes some 150 bytes for a tensor, whose values, name and places take 4 KB at most.
_FACTOR = 56
_BASE = 32 << 20


class Budget:
    """What is left of the memory, in bytes, that evaluating and naming a pickle may take."""

    def __init__(self, nbytes: int, path: str) -> None:
        """Begin with what a pickle of `nbytes`, its archive's headers included, may take."""
        self.path = path
        self.limit = self.left = _BASE + _FACTOR * nbytes

    def charge(self, nbytes: int) -> None:
        """Take `nbytes` off: memory that is needed, or work that is as much.

        Raises:
            PytorchError: Nothing is left.
        """
        self.left -= nbytes
        if self.left < 0:
            raise PytorchError.at(
                PytorchFault.PICKLE_BOMB,
                self.path,
                f"its pickle takes more than {self.limit} bytes of memory",
                limit=self.limit,
            )
