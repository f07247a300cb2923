"""Waiting for a layer that another client builds. Every wait ends: by news, time or silence."""

from tensor_dedup.memory_manager.core.manager_state import (
    ClientState,
    ManagerState,
    Waiting,
    refusal,
)
from tensor_dedup.memory_manager.protocol.messages import Wait, Waited


def wait(state: ManagerState, now: float, connection: ClientState, message: Wait) -> None:
    """Answer at once when there is nothing to wait for; park the request otherwise."""
    if connection.builds:
        raise refusal(
            "holds_reservation",
            "publish or abandon what you have reserved before you wait: two clients that wait for "
            "each other would wait for ever",
        )
    if message.key in state.records:
        state.send(connection, Waited("ready"))
        return
    connection.waiting = Waiting(message.key, now + message.timeout_s)
    _look(state, now, connection)


def interrupt(state: ManagerState, now: float, connection: ClientState) -> None:
    """End a client's wait because of its next request: replies keep their order."""
    waiting, connection.waiting = connection.waiting, None
    if waiting is not None:
        put = state.builders.get(waiting.key)
        state.send(connection, Waited("building", put.silent(now) if put else 0.0))


def wake(state: ManagerState, key: str, outcome: str) -> None:
    """Tell all waiting clients that a layer was published ("ready") or given up ("free")."""
    for connection in state.connections.values():
        if connection.waiting is not None and connection.waiting.key == key:
            connection.waiting = None
            state.send(connection, Waited("ready" if outcome == "ready" else "free"))


def look(state: ManagerState, now: float) -> None:
    """End the waits whose deadline has passed."""
    for connection in list(state.connections.values()):
        if connection.waiting is not None:
            _look(state, now, connection)


def _look(state: ManagerState, now: float, connection: ClientState) -> None:
    waiting = connection.waiting
    if waiting is None:
        return
    put = state.builders.get(waiting.key)
    if put is None:
        reply = Waited("free")
    elif (silent := put.silent(now)) >= state.settings.build_timeout_s:
        reply = Waited("stalled", silent)
    elif now >= waiting.until:
        reply = Waited("building", silent)
    else:
        return
    connection.waiting = None
    state.send(connection, reply)


def next_deadline(state: ManagerState, now: float) -> float | None:
    """Return when the next wait ends by time, or None if there is none."""
    deadlines = [
        min(c.waiting.until, now + state.settings.build_timeout_s - put.silent(now))
        for c in state.connections.values()
        if c.waiting is not None and (put := state.builders.get(c.waiting.key)) is not None
    ]
    return min(deadlines, default=None)
