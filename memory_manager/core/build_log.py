"""Log lines about the tensors that clients have built: one line for each client and checkpoint.

One load makes hundreds of puts, too many for a line each. So the puts are summed up, and the sum is
logged when the client has built nothing of the checkpoint for a few seconds.
"""

from typing import Final

from tensor_dedup.memory_manager.core.budget import SlabState
from tensor_dedup.memory_manager.core.manager_state import (
    ClientState,
    ManagerState,
    PutState,
    Tally,
)

# Longer than the pauses inside of most loads; a load that pauses for longer has several lines.
QUIET_S: Final = 3.0
_MAX_TALLIES: Final = 64  # of one client, which may name as many checkpoints as it likes


def count(
    state: ManagerState, connection: ClientState, put: PutState, now: float, slab: SlabState
) -> None:
    """Add the tensors that `put` has made resident in `slab` to the sum for its checkpoint."""
    if put.checkpoint not in connection.tallies and len(connection.tallies) >= _MAX_TALLIES:
        name = next(iter(connection.tallies))
        _say(state, connection, name, connection.tallies.pop(name))
    tally = connection.tallies.setdefault(put.checkpoint, Tally(put.opened, now))
    tally.tensors += len(slab.residents)
    tally.nbytes += slab.nbytes
    tally.until = now


def look(state: ManagerState, now: float) -> None:
    """Log the sums to which nothing was added for a few seconds.

    There is a sum for each client and checkpoint. It is not logged while the client has an
    unfinished put for the checkpoint.
    """
    for connection in state.connections.values():
        busy = {put.checkpoint for put in connection.puts.values() if put.active}
        for name, tally in list(connection.tallies.items()):
            if name not in busy and now - tally.until >= QUIET_S:
                del connection.tallies[name]
                _say(state, connection, name, tally)


def say_all(state: ManagerState, connection: ClientState) -> None:
    """Log at once what a client has built since the last log line about it.

    Call it when the connection or the manager ends.
    """
    for name, tally in connection.tallies.items():
        _say(state, connection, name, tally)
    connection.tallies.clear()


def _say(state: ManagerState, connection: ClientState, name: str, tally: Tally) -> None:
    state.note(
        "built",
        checkpoint=repr(name),
        tensors=tally.tensors,
        MiB=f"{tally.nbytes / (1 << 20):.1f}",
        seconds=f"{tally.until - tally.since:.1f}",
        pid=connection.pid,
        by=repr(connection.name),
    )
