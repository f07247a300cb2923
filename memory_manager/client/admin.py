"""The administrative client of the command line: status, pin, evict and stop."""

import os
from typing import Any, Final, Literal, Self, TypeAlias

import msgspec

from tensor_dedup.memory_manager.client.connection import Connection
from tensor_dedup.memory_manager.protocol import paths
from tensor_dedup.memory_manager.protocol.limits import COMMAND
from tensor_dedup.memory_manager.protocol.messages import Done, Evict, Pin, Rows, Status, Stop
from tensor_dedup.memory_manager.protocol.tables import (
    BuildRow,
    CheckpointRow,
    ClientRow,
    Page,
    ResidentRow,
    Totals,
    saved_bytes,
)

Table: TypeAlias = Literal["clients", "checkpoints", "residents", "builds"]


class Overview(msgspec.Struct, frozen=True):
    """The totals and tables of a manager, queried at about the same time. Sizes are in bytes."""

    totals: Totals
    clients: list[ClientRow]
    checkpoints: list[CheckpointRow]
    builds: list[BuildRow]
    residents: list[ResidentRow]

    @property
    def saved_bytes(self) -> int:
        """A lower bound of the bytes of memory that sharing saves."""
        return saved_bytes(self.clients, self.totals.leased_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return the totals, `saved_bytes` and the tables as a dict that can be encoded as JSON."""
        tables = ("clients", "checkpoints", "builds", "residents")
        rows = {name: [msgspec.structs.asdict(r) for r in getattr(self, name)] for name in tables}
        totals = msgspec.structs.asdict(self.totals)
        return {"totals": totals, "saved_bytes": self.saved_bytes, **rows}


class Admin:
    """An administrative connection to a manager. Only one thread at a time may use it.

    Every method raises ManagerGoneError if the manager does not answer.
    """

    def __init__(self, where: str | os.PathLike[str] | None = None, *, device: str = "") -> None:
        """Connect to the manager at the socket `where`.

        `device` is the GPU that the socket is of, for the advice in errors.
        """
        self.path: Final = paths.socket_path(where)
        self._connection = Connection(self.path, COMMAND, device=device)

    def totals(self) -> Totals:
        """Return the manager's totals."""
        return self._connection.ask(Status(), Totals)[0]

    @property
    def device(self) -> str:
        """The UUID of the GPU whose memory this manager lends, or "" for host memory."""
        return self._connection.welcome.device

    def overview(self, *, residents: bool = True) -> Overview:
        """Return the totals and all tables.

        The table of clients leaves out administrative connections such as this one. With
        `residents=False` the table of resident tensors is empty.
        """
        clients = [row for page in self._pages("clients") for row in page.clients]
        return Overview(
            self.totals(),
            [row for row in clients if row.name != COMMAND],
            [row for page in self._pages("checkpoints") for row in page.checkpoints],
            [row for page in self._pages("builds") for row in page.builds],
            [row for page in self._pages("residents") for row in page.residents]
            if residents
            else [],
        )

    def _pages(self, table: Table) -> list[Page]:
        pages: list[Page] = []
        start = 0
        while True:
            page = self._connection.ask(Rows(table, start), Page)[0]
            rows = len(getattr(page, table))
            pages.append(page)
            start += rows
            if not rows or start >= page.total:
                return pages

    def pin(self, name: str, *, pinned: bool = True) -> Done:
        """Protect the tensors of a checkpoint from eviction.

        `name` is the name of a checkpoint or the digest of one tensor. Tensors that are added under
        the name later are protected, too. With `pinned=False`, this protection ends. Return the
        number of tensors that have the name now, and their bytes.
        """
        return self._connection.ask(Pin(name, pinned), Done)[0]

    def evict(self, name: str) -> Done:
        """Free the slabs (blocks of memory) with the tensors of a checkpoint.

        `name` is the name of a checkpoint or the digest of one tensor. A slab is kept if any tensor
        in it is in use or pinned and, unless `name` is a digest, if another checkpoint has a tensor
        in it. Return the number of tensors freed, and the bytes of the freed slabs. Both are 0 if
        nothing was freed.
        """
        return self._connection.ask(Evict(name), Done)[0]

    def stop(self) -> None:
        """Stop the manager, and wait until it has closed this connection."""
        self._connection.ask(Stop(), Done)
        self._connection.wait_for_end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
