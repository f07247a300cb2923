"""The administrative requests of the command line: totals, tables, pin, evict, stop."""

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
    """The totals and tables of a manager, taken at about the same time. Sizes in bytes."""

    totals: Totals
    clients: list[ClientRow]
    checkpoints: list[CheckpointRow]
    builds: list[BuildRow]
    residents: list[ResidentRow]

    @property
    def saved_bytes(self) -> int:
        """The bytes that sharing saves."""
        return saved_bytes(self.clients, self.totals.leased_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return the overview as a JSON object."""
        tables = ("clients", "checkpoints", "builds", "residents")
        rows = {name: [msgspec.structs.asdict(r) for r in getattr(self, name)] for name in tables}
        totals = msgspec.structs.asdict(self.totals)
        return {"totals": totals, "saved_bytes": self.saved_bytes, **rows}


class Admin:
    """An administrative connection to a manager. One thread at a time.

    Every method raises ManagerGoneError when the manager does not answer.
    """

    def __init__(self, where: str | os.PathLike[str] | None = None) -> None:
        self.path: Final = paths.socket_path(where)
        self._connection = Connection(self.path, COMMAND)

    def totals(self) -> Totals:
        """Return the manager's totals."""
        return self._connection.ask(Status(), Totals)[0]

    @property
    def device(self) -> str:
        """The UUID of the GPU whose memory this manager serves; "" for the machine's memory."""
        return self._connection.welcome.device

    def overview(self, *, residents: bool = True) -> Overview:
        """Return the totals and the tables, with administrative clients left out."""
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
        """Pin or unpin a checkpoint or a digest; return the number and bytes of its residents."""
        return self._connection.ask(Pin(name, pinned), Done)[0]

    def evict(self, name: str) -> Done:
        """Evict the unused residents of a checkpoint or a digest; return how many were evicted."""
        return self._connection.ask(Evict(name), Done)[0]

    def stop(self) -> None:
        """Stop the manager; return when it has closed its connections."""
        self._connection.ask(Stop(), Done)
        self._connection.wait_for_end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
