"""The states of a put, and the events that change them, in one table.

    RESERVED -> ALLOCATING -> WRITING -> SEALING -> SEALED -> CLOSED

A put is the right of a client to build some layers. An event that the table does not list for a
state is refused (`wrong_state`) and changes nothing.
"""

from enum import Enum
from typing import Final

from tensor_dedup.memory_manager.errors import ProtocolError


class State(Enum):
    """The state of a put, which is the right of a client to build some layers."""

    RESERVED = "reserved"  # keys are granted, there is no memory
    ALLOCATING = "allocating"  # the backend is at it
    WRITING = "writing"  # the client has a writable slab
    SEALING = "sealing"  # the backend seals and hashes
    SEALED = "sealed"  # the bytes are resident, records may be published
    REVOKED = "revoked"  # taken over; its memory is charged until the client lets it go
    CLOSED = "closed"


class Event(Enum):
    """An event that changes the state of a put."""

    ALLOCATE = "allocate"
    ALLOCATED = "allocated"
    NO_MEMORY = "no memory"
    SEAL = "seal"
    STILL_WRITABLE = "still writable"
    HASHED = "hashed"
    MISMATCH = "mismatch"
    PUBLISH = "publish"
    FINISH = "finish"  # the last of its layers is published
    ABANDON = "abandon"
    GONE = "gone"  # the client's connection is closed
    TAKE_OVER = "take over"  # silent for too long, and somebody else asks


NEXT: Final[dict[tuple[State, Event], State]] = {
    (State.RESERVED, Event.ALLOCATE): State.ALLOCATING,
    (State.RESERVED, Event.PUBLISH): State.RESERVED,  # all its tensors were resident
    (State.RESERVED, Event.FINISH): State.CLOSED,
    (State.RESERVED, Event.ABANDON): State.CLOSED,
    (State.RESERVED, Event.GONE): State.CLOSED,
    (State.RESERVED, Event.TAKE_OVER): State.REVOKED,
    (State.ALLOCATING, Event.ALLOCATED): State.WRITING,
    (State.ALLOCATING, Event.NO_MEMORY): State.RESERVED,
    (State.ALLOCATING, Event.ABANDON): State.CLOSED,
    (State.ALLOCATING, Event.GONE): State.CLOSED,
    (State.WRITING, Event.SEAL): State.SEALING,
    (State.WRITING, Event.ABANDON): State.CLOSED,
    (State.WRITING, Event.GONE): State.CLOSED,
    (State.WRITING, Event.TAKE_OVER): State.REVOKED,
    (State.SEALING, Event.STILL_WRITABLE): State.WRITING,
    (State.SEALING, Event.HASHED): State.SEALED,
    (State.SEALING, Event.MISMATCH): State.CLOSED,
    (State.SEALING, Event.ABANDON): State.CLOSED,
    (State.SEALING, Event.GONE): State.CLOSED,
    (State.SEALED, Event.PUBLISH): State.SEALED,
    (State.SEALED, Event.FINISH): State.CLOSED,
    (State.SEALED, Event.ABANDON): State.CLOSED,
    (State.SEALED, Event.GONE): State.CLOSED,
    (State.SEALED, Event.TAKE_OVER): State.REVOKED,
    (State.REVOKED, Event.ABANDON): State.CLOSED,
    (State.REVOKED, Event.GONE): State.CLOSED,
}

ACTIVE: Final = frozenset(State) - {State.REVOKED, State.CLOSED}


class BadTransition(ProtocolError):
    """An event that is not allowed in the present state of a put."""


def advance(state: State, event: Event) -> State:
    """Return the state of a put after an event.

    Raises:
        BadTransition: The event is not allowed in that state.
    """
    try:
        return NEXT[state, event]
    except KeyError:
        raise BadTransition(
            f"{event.value} has no place in a put that is {state.value}",
            state=state.value,
            event=event.value,
        ) from None
