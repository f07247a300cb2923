"""A subscriber that fetches a step and then lets go of earlier ones, as `tensor-dedup follow`."""

from dataclasses import dataclass

from tensor_dedup import Store
from tensor_dedup.publishing import subscriber
from tensor_dedup.remote import Remote
from tensor_dedup.remote.results import TransferResult


@dataclass(frozen=True, slots=True)
class Fetched:
    """A step that was fetched, and how many bytes of earlier ones were deleted."""

    name: str
    step: int
    transfer: TransferResult | None
    freed_bytes: int


def fetch(store: Store, remote: Remote | str, run: str, step: int | None = None) -> Fetched:
    """Fetch a step, or the latest one, and let go of earlier ones."""
    found = subscriber.fetch(store, remote, run, step)
    freed_bytes = subscriber.let_go(store, run)
    return Fetched(found.name, found.step, found.transfer, freed_bytes)
