"""Publisher: publishes the steps of a training to a remote or a store."""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from tensor_dedup.errors import StoreError
from tensor_dedup.publishing.lock import PublishingLock
from tensor_dedup.publishing.slime import SlimeFolder
from tensor_dedup.publishing.weights import checkpoint_weights, config_files
from tensor_dedup.remote import transfer
from tensor_dedup.remote.remote import Remote
from tensor_dedup.remote.urls import last_component
from tensor_dedup.settings import cache_folder
from tensor_dedup.store.steps.errors import BadOption, BadOptionError
from tensor_dedup.store.steps.runs import step_name
from tensor_dedup.store.store import LocalStore
from tensor_dedup.training.commit import Saved
from tensor_dedup.training.run import CheckpointStore
from tensor_dedup.types import is_url

if TYPE_CHECKING:
    import torch

    from tensor_dedup.training.background import Hook
    from tensor_dedup.types import StrPath

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Published:
    """The result of a publish. Sizes are in bytes.

    * `name` is the name of the step, RUN@STEP.
    * `tensors` is the number of tensors of the step, with what describes its structure, and
      `nbytes` their size with the small files.
    * `new_tensors` is the number of tensors and small files that no checkpoint there had before,
      and `new_bytes` their size.
    * `stored_bytes` is the number of bytes that were written for these, encoded.
    * `sent_bytes` went to the remote, in `requests` requests. Both are 0 for a store's folder. What
      other threads have sent for this run at the same time is counted too.
    * `seconds` is the time until the step was visible.
    * `version` is the number of the version in slime's format, or 0 if none was written.
    """

    name: str
    step: int
    tensors: int
    nbytes: int
    new_tensors: int
    new_bytes: int
    stored_bytes: int
    sent_bytes: int
    requests: int
    seconds: float
    version: int = 0

    def to_dict(self) -> dict[str, object]:
        """Return the result as a dict that can be written as JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Began:
    """When a publish began, and what the run had sent by then, in so many requests."""

    at: float
    sent: int
    requests: int


class PendingPublish:
    """A step that is being published while the training continues. Safe from any thread."""

    def __init__(self, name: str, step: int, work: "Future[Published]") -> None:
        self.name, self.step = name, step
        self._work = work
        self.was_reported = False
        """Whether `wait` was called, and so has returned the result or raised the error."""

    def __repr__(self) -> str:
        return f"PendingPublish({self.name!r}{'' if self.done() else ', pending'})"

    def done(self) -> bool:
        """Return whether the publish has ended, successfully or not."""
        return self._work.done()

    def wait(self) -> Published:
        """Wait until the step is visible, and return what the publish cost.

        The errors are those of `Publisher.publish`.
        """
        self.was_reported = True
        return self._work.result()


class Publisher:
    """Publishes the steps of one training as a run, so that engines can load and follow them.

        with Publisher("s3://bucket/policy", config="path/to/model") as policy:
            for step in range(1000):
                train_one_step(model, optimizer)
                policy.publish(model, step)

    An engine loads a step as the model `store://policy@STEP`. A step is stored as differences from
    an anchor, a step that is stored by itself. So a load of a step reads the anchor and one set of
    differences, however many steps there are.

    What changed is found by comparing bytes, never by hooks or gradients. A tensor that did not
    change costs nothing, and one that any checkpoint of the store or remote has is not sent.

    A run has one writer. If another trainer opens the same run on a remote, from another `work`
    folder, it becomes the writer, and continues with what is there. Of processes that share a
    `work` folder, or publish to one folder of a store, the first that publishes is the writer until
    it ends or calls `close`. Every process of a job may make the object, if one of them publishes.
    Safe from any thread; publishes take turns.
    """

    def __init__(
        self,
        where: "StrPath | LocalStore | Remote",
        *,
        run: str | None = None,
        config: "StrPath | Mapping[str, str | bytes] | None" = None,
        base: str | None = None,
        also: Literal["slime"] | None = None,
        work: "StrPath | LocalStore | None" = None,
        keep_last: int | None = 8,
        keep_every: int | None = None,
    ) -> None:
        """Open the run `run` at `where`, which continues if it has steps already.

        `where` is the URL of a remote (`s3://`, `gs://`, `az://`, `file://`) or the folder of a
        store, which is made if needed. By default, the run is called as the last component of
        `where`: the steps at `s3://bucket/policy` are `policy@0`, `policy@1` and so on.

        * `config`: the folder with the model's `config.json` and tokenizer, or a mapping from paths
          to texts. Weights in the folder are left out. By default, a model of Transformers gets its
          own config, without a tokenizer.
        * `base`: the name of a checkpoint at `where`, from which the first step is stored as
          differences. Several runs from one base share its tensors.
        * `also`: "slime" publishes each step a second time, in the format of slime, at
          `WHERE/slime`. SGLang's endpoint `/pull_weights` reads it where that is a folder for it:
          `source_dir` is that folder, and `target_version` is `Published.version`. The first
          version of a training is whole, and so is one after an attempt that did not end, whose
          number is left out. Others are what changed since the version before. Versions are not
          deleted.
        * `work`: for a URL, the folder of a store on a local disk that has the last steps, by
          default one for each URL in the user's folder of caches. It takes the space of about two
          models. If it is lost, the next publish restores it from the remote.
        * `keep_last` and `keep_every` are the rules by which steps are deleted, as those of
          `CheckpointStore`. By default, the last 8 steps are kept. The space of deleted steps is
          freed by `Store.gc` or `Remote.gc`.

        Raises:
            BadNameError: The name of the run is invalid.
            BadOptionError: An option is invalid, or `work` is given for a folder; `kind` says
                which.
            UnknownNameError, UnknownRemoteNameError: There is no checkpoint `base`.
            NotAStoreError: The folder holds something else than a store.
            RemoteUrlError: The URL does not name a remote.
            RemoteUnreachableError, RemoteAccessError, ReadOnlyRemoteError: The remote does not
                answer, refuses the credentials, or cannot be written to.
            NotARemoteError, NoConditionsError: The place cannot be a remote.
            OtherTierError: `work` was used for this run with another remote.
            OtherVersionsError: With `also`, another run has its versions at `where`.
        """
        if also not in (None, "slime"):
            raise BadOptionError.of(BadOption.ALSO, f"where={str(where)!r}", f"also={also!r}")
        remote = _remote(where)
        self._traffic = None if remote is None else remote.bucket.traffic
        self.where = str(where) if remote is None else remote.url
        name = _last_part(self.where) if run is None else run
        if remote is None:
            if work is not None:
                what = f"work={str(work)!r}"
                raise BadOptionError.of(BadOption.WORK, f"where={self.where!r}", what)
            assert not isinstance(where, Remote)
            store = where if isinstance(where, LocalStore) else LocalStore.open(where)
        elif isinstance(work, LocalStore):
            store = work
        else:
            store = LocalStore.open(work or _work_folder(remote.url))
        if base is not None and remote is not None:
            transfer.pull(store, remote, base, from_anchor=True)
        self._config = config
        self.run = CheckpointStore(
            store,
            name,
            keep_last=keep_last,
            keep_every=keep_every,
            # Nothing is sent before it is encoded; and `publish_async` encodes in the background.
            compress="always",
            base=base,
            config=config,
            drain=remote,
            direct=remote is not None,
        )
        self._slime: SlimeFolder | None = None
        try:
            if remote is not None:
                _restore(self.run, remote)
            if also is not None:
                place = Remote.open(store.path) if remote is None else remote
                self._slime = SlimeFolder(place.bucket, store, name)
                if (latest := self.run.latest()) is not None:
                    self._slime.resume(step_name(name, latest))
        except BaseException:
            with suppress(StoreError):
                self.run.close()
            raise
        # What follows a save, in the order of the saves.
        self._after = ThreadPoolExecutor(1, "tensor-dedup-publish")
        # Held by a publish. A signal handler that publishes must get as far as the run's error.
        self._turn = threading.RLock()
        self._pending: list[PendingPublish] = []
        # Taken by the first publish: every process of a job makes such an object, and one writes.
        self._lock: PublishingLock | None = None

    def __repr__(self) -> str:
        return f"Publisher({self.where!r}, run={self.run.run_id!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, raised: BaseException | None, *_: object) -> None:
        try:
            self.close()
        except StoreError as error:
            if raised is None:
                raise
            raised.add_note(f"and a step was not published: {error}")  # that comes first

    def close(self) -> None:
        """Wait until all steps are published, and free memory and files held between publishes.

        The object can be used again afterwards.

        Raises:
            StoreError: A step could not be published; the exception is the error of its publish.
        """
        with self._turn:
            try:
                self._settle()
                self._report()
            finally:
                try:
                    if self._slime is not None:
                        self._slime.close()
                    self.run.close()
                finally:
                    self._lock = None

    def publish(
        self,
        model: "torch.nn.Module | Mapping[str, torch.Tensor]",
        step: int,
        metrics: Mapping[str, Any] | None = None,
        *,
        files: "Mapping[str, str | bytes] | None" = None,
    ) -> Published:
        """Publish `model` as the step `step`, and return what that cost.

        When the method returns, the step is visible at `where` and durable: an engine that loads it
        gets exactly these weights. An encoded tensor was decoded and compared before it was stored.
        After an error, all steps that are visible are whole.

        `model` is a torch module, or a mapping from the names in the checkpoint to tensors. A model
        of Transformers is published under the names that its `save_pretrained` writes. It must not
        change during the call. A step that exists is replaced. `metrics` maps names to numbers, and
        `files` maps paths to small files that are published beside those of `config`.

        Raises:
            UnsupportedError: The model has adapters, or is no model.
            StateError: The model has tensors that cannot be stored, such as sharded ones.
            DrainError: The remote did not take the step. It is kept in `work`, and the next publish
                sends it first.
            RunTakenError: Another trainer has become the writer of the run.
            RunInUseError: Another process publishes the run from the same `work` folder, or to the
                same folder of a store. Nothing was published.
            OtherVersionsError, StoreBusyError: With `also`, another run has its versions there, or
                another program has written to the folder of this version. The step is visible.
            NoSpaceError, StoreIOError: The disk failed.
            ChangedModelError: A write to the model was noticed.
        """
        with self._turn:
            self._prepare()
            began = self._begin()
            weights, small = self._parts(model, files)
            saved = self.run.save(weights, step, metrics, files=small)
            return self._after.submit(self._finish, lambda: saved, began).result()

    def publish_async(
        self,
        model: "torch.nn.Module | Mapping[str, torch.Tensor]",
        step: int,
        metrics: Mapping[str, Any] | None = None,
        *,
        files: "Mapping[str, str | bytes] | None" = None,
    ) -> PendingPublish:
        """Start to publish `model`, and return while that goes on. Call `wait` on the result.

        The model may be changed as soon as the method returns, because changed tensors have then
        been copied. If the optimizer is hooked (`hook`), the method returns earlier, and the
        optimizer's next step waits for the copies instead. If a publish is being encoded, the
        method first waits until that has ended; with `also`, until the step is visible.

        The error of a publish is raised by `wait` of its result, or else by the next call of this
        method, `publish` or `close`. The errors are those of `publish`.
        """
        with self._turn:
            self._prepare()
            began = self._begin()
            weights, small = self._parts(model, files)
            saving = self.run.save_async(weights, step, metrics, files=small)
            work = self._after.submit(self._finish, saving.wait, began)
            pending = PendingPublish(saving.name, step, work)
            self._pending.append(pending)
            return pending

    def hook(self, optimizer: "torch.optim.Optimizer") -> "Hook":
        """Make `optimizer` wait, before each step, for the copies that `publish_async` makes.

        The method `remove` of the result undoes that.
        """
        return self.run.hook(optimizer)

    def _prepare(self) -> None:
        self._report()
        if self._lock is None or not self._lock.is_held:
            self._lock = PublishingLock.of(self.run.store, self.run.run_id)
            # The process that had it may have been killed with steps that it had not sent.
            self.run.drain(wait=False)
        if self._slime is not None:
            self._settle()  # it reads steps that the run might delete meanwhile

    def _settle(self) -> None:
        """Wait until what was begun in the background has ended, successfully or not."""
        for each in self._pending:
            with suppress(StoreError):
                each._work.result()

    def _report(self) -> None:
        """Raise what an earlier publish in the background has failed with."""
        ended = [each for each in self._pending if each.done()]
        self._pending = [each for each in self._pending if each not in ended]
        for each in ended:
            if not each.was_reported:
                each.wait()

    def _parts(
        self, model: Any, files: "Mapping[str, str | bytes] | None"
    ) -> tuple[dict[str, Any], dict[str, str | bytes]]:
        """What is saved of a model: its weights, and its own config unless one was given."""
        own = config_files(model) if self._config is None else {}
        return checkpoint_weights(model), {**own, **(files or {})}

    def _begin(self) -> _Began:
        traffic = self._traffic
        if traffic is None:
            return _Began(time.monotonic(), 0, 0)
        return _Began(time.monotonic(), traffic.sent, traffic.calls)

    def _finish(self, wait: Callable[[], Saved], began: _Began) -> Published:
        """Wait until a step is saved and visible, and say what it cost."""
        saved = wait()
        self.run.drain(step=saved.step)
        version = 0 if self._slime is None else self._slime.write(saved.name)
        now = self._begin()
        return Published(
            name=saved.name,
            step=saved.step,
            tensors=saved.tensors,
            nbytes=saved.nbytes,
            new_tensors=saved.new_tensors,
            new_bytes=saved.new_bytes,
            stored_bytes=saved.stored_bytes,
            sent_bytes=now.sent - began.sent,
            requests=now.requests - began.requests,
            seconds=now.at - began.at,
            version=version,
        )


def _remote(where: "StrPath | LocalStore | Remote") -> Remote | None:
    """The remote that is meant by `where`, or None for a store."""
    if isinstance(where, Remote):
        return where
    if isinstance(where, PathLike | LocalStore) or not is_url(where):
        return None
    return Remote.open(where)


def _last_part(where: str) -> str:
    """The last component of a URL or a path, after which a run is called by default."""
    if is_url(where):
        return last_component(where)
    return Path(where).absolute().name


def _work_folder(url: str) -> Path:
    mark = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    return cache_folder() / "publish" / f"{_last_part(url)}-{mark}"


def _restore(run: CheckpointStore, remote: Remote) -> None:
    """See that the local store has the step against which the next one is encoded.

    It may lack it on another host, or after it was lost. Then all of the next step would be sent.
    """
    latest = run.latest()
    if latest is None:
        return
    name = step_name(run.run_id, latest)
    if name in run.store.names():
        return
    try:
        transfer.pull(run.store, remote, name, from_anchor=True)
    except StoreError as error:
        _log.warning("%s: the next publish sends all of its weights: %s", remote.url, str(error))
