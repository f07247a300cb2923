"""Pull all steps of a run, continuing after steps that are damaged on the remote."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager

from tensor_dedup.errors import StoreError
from tensor_dedup.remote.buckets import Bucket, ObjectStatus
from tensor_dedup.remote.errors import LostRemotelyError, UnknownRemoteNameError
from tensor_dedup.remote.pieces import LostPieces
from tensor_dedup.remote.pull import pull
from tensor_dedup.remote.results import TransferListener, TransferResult
from tensor_dedup.store.errors import AdvisedError
from tensor_dedup.store.format.names import marked_by
from tensor_dedup.store.hashing import Hasher
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects


def pull_each(
    bucket: Bucket,
    refs: Mapping[str, ObjectStatus | None],
    objects: Objects,
    session: Callable[[], AbstractContextManager[tuple[StoreIndex, Hasher]]],
    progress: TransferListener,
    *,
    replace: bool = False,
    dry_run: bool = False,
) -> list[TransferResult]:
    """Pull the checkpoints in `refs`: a single checkpoint, or the steps and marks of a run.

    `refs` maps names to the statuses of references, or to None. Each checkpoint is pulled in its
    own `session` of the store. If data of a step is lost or damaged, the step, its mark and the
    steps that need the same data are skipped, and the others are still pulled. Steps that were
    deleted on the remote meanwhile are skipped, too. Any other error ends the pull at once.

    Raises:
        UnknownRemoteNameError: All of the names were deleted on the remote meanwhile.
        StoreError: A checkpoint could not be pulled. For a run, the message lists the steps that
            were not pulled.
    """
    results, seen, lost = list[TransferResult](), set[bytes](), LostPieces()
    failed: dict[str, StoreError] = {}
    deleted: dict[str, UnknownRemoteNameError] = {}
    for name, listed in refs.items():
        # A mark alone would keep its step from being saved by a training that goes on.
        if marked_by(name) in {*failed, *deleted}:
            continue
        with session() as (index, hasher):
            here = objects, index, hasher
            try:
                done = pull(
                    *(bucket, name, here, progress),
                    replace=replace,
                    listed=listed,
                    seen=seen,
                    lost=lost,
                    dry_run=dry_run,
                )
                results.append(done)
            except UnknownRemoteNameError as error:
                deleted[name] = error
            except LostRemotelyError as error:
                failed[name] = error
            except StoreError as error:
                failed[name] = error
                break
    if failed:
        raise _of_all(refs, failed, results)
    if not results:
        raise [*deleted.values()][-1]
    return results


def _of_all(
    refs: Collection[str], failed: Mapping[str, StoreError], results: Sequence[TransferResult]
) -> StoreError:
    """What the pull of a run ends with: the first error, with what it says of all.

    Where one of another kind has ended it, that one: it tells the caller what to do.
    """
    errors = [*failed.values()]
    is_damage = isinstance(errors[-1], LostRemotelyError)
    error = errors[0] if is_damage else errors[-1]
    if len(refs) == 1 or (len(errors) == 1 and not is_damage):
        return error
    came = {name for each in results for name in each.names}
    count = sum(marked_by(name) is None for name in came)
    advice = f"; {error.advice}" if isinstance(error, AdvisedError) else ""
    what = f"not pulled: {', '.join(failed)}; steps pulled: {count}"
    error.message = f"{error.message.removesuffix(advice)}; {what}{advice}"
    error.args = (error.message,)
    error.facts |= {"not_pulled": (*failed,)}
    return error
