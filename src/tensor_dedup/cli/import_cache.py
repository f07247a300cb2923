"""`tensor-dedup import --hub-cache`: every snapshot of a Hugging Face cache, where it is."""

import click

from tensor_dedup.cli.errors import BadData, WrongUse
from tensor_dedup.cli.names import counted
from tensor_dedup.cli.store_verbs import ByteBar, say
from tensor_dedup.errors import CheckpointNotFoundError, TensorDedupError, UnsupportedError
from tensor_dedup.loader.checkpoint_io.hints import StoreHints
from tensor_dedup.store import ImportResult, Store
from tensor_dedup.store.errors import NameTakenError
from tensor_dedup.store.writing.sources import HubSnapshot, cache_path, snapshots
from tensor_dedup.text_table import human


def import_cache(store: str | None, replace: bool, as_json: bool) -> None:
    """Index all snapshots in the store of this path; say which could not be, and go on.

    WrongUse: there are none. BadData, after all others were done: something is wrong with one.
    """
    found = list(snapshots(cache_path()))
    if not found:
        raise WrongUse(f"{cache_path()} holds no models; set HF_HUB_CACHE to your cache")
    work = _Work(Store.open(store), replace)
    for snapshot in found:
        work.take(snapshot)
    document = {
        "cache": str(cache_path()),
        "imported": [result.to_dict() for result in work.done],
        "left_out": work.left_out,
        "failed": work.failed,
    }
    say(document, as_json, *work.lines())
    if work.failed:
        raise BadData(f"{len(work.failed)} of {len(found)} snapshots could not be imported")


class _Work:
    def __init__(self, store: Store, replace: bool) -> None:
        self._store, self._replace = store, replace
        self.done: list[ImportResult] = []
        self.left_out: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def take(self, snapshot: HubSnapshot) -> None:
        """Index one; what is no checkpoint of ours, or there already, is left out."""
        try:
            with ByteBar(snapshot.name) as progress:
                result = self._store.import_(
                    snapshot.path,
                    snapshot.name,
                    self._replace,
                    progress=progress,
                    hints=StoreHints(),
                    external=True,
                )
        except NameTakenError:
            self.left_out[snapshot.name] = "it is in the store already"
        except (CheckpointNotFoundError, UnsupportedError) as error:
            self.left_out[snapshot.name] = str(error)
        except TensorDedupError as error:
            self.failed[snapshot.name] = str(error)
            click.echo(f"{snapshot.name}: {error}", err=True)
        else:
            self.done.append(result)

    def lines(self) -> list[str]:
        """For people."""
        indexed = sum(result.external_bytes for result in self.done)
        lines = [
            f"{result.name}: {counted(result.tensors, 'tensor')}, "
            f"{human(result.external_bytes)} in place"
            for result in self.done
        ]
        lines += [f"{name}: left out: {why}" for name, why in self.left_out.items()]
        return [*lines, f"{counted(len(self.done), 'snapshot')}, {human(indexed)} indexed in place"]
