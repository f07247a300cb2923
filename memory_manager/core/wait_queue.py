"""Clients that wait for a layer that another client builds.

A wait ends when the layer is published or given up, when the time of the wait is up, or when the
builder has been silent for too long.
"""

from tensor_dedup.memory_manager.core.manager_state import (
    ClientState,
    ManagerState,
    Waiting,
    refusal,
)
from tensor_dedup.memory_manager.protocol.messages import Wait, Waited


def wait(state: ManagerState, now: float, connection: ClientState, message: Wait) -> None:
    """Handle Wait: answer at once if there is nothing to wait for, otherwise later."""
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
    """Answer a client's open Wait with "building", because the client has sent another request.

    Call it before that request is handled, because replies keep the order of the requests.
    """
    waiting, connection.waiting = connection.waiting, None
    if waiting is not None:
        put = state.builders.get(waiting.key)
        state.send(connection, Waited("building", put.silent(now) if put else 0.0))


def wake(state: ManagerState, key: str, outcome: str) -> None:
    """Answer all clients that wait for a layer.

    `outcome` is "ready" if the layer was published, or "free" if its builder gave up.
    """
    for connection in state.connections.values():
        if connection.waiting is not None and connection.waiting.key == key:
            connection.waiting = None
            state.send(connection, Waited("ready" if outcome == "ready" else "free"))


def look(state: ManagerState, now: float) -> None:
    """Look for waits that are over, and answer them.

    A wait is over if its deadline has passed, if the layer has no builder any more, or if the
    builder is silent for too long.
    """
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
    """Return the time at which `look` must be called next, or None if no client waits."""
    deadlines = [
        min(c.waiting.until, now + state.settings.build_timeout_s - put.silent(now))
        for c in state.connections.values()
        if c.waiting is not None and (put := state.builders.get(c.waiting.key)) is not None
    ]
    return min(deadlines, default=None)
