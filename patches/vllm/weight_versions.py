"""The version of an engine's weights: what `get_weight_version` answers, and what salts its cache.

vLLM knows what a prefix cache entry was computed from by its tokens alone. So after an update of
the weights, it serves entries of the old ones. Here each block's hash covers the weights, too. The
cache of an engine outlives an update, no entry of one version is ever served to another, and where
the old weights come back, so do their entries.

An engine asks its workers which weights they have: when the model is loaded, and after each call to
its workers from outside, which may have changed them. A call of a function of the caller, or of a
method that is not one of vLLM's that are known here, counts as a write. The version is the digest
of the checkpoint where that is known. If it is not, nothing is hashed: a number that was drawn at
random tells the weights of this engine from others. Only an engine whose hashes others see (a KV
connector, or KV events) has the digest computed, since equal weights must have equal hashes there.

Imports neither vllm nor torch.
"""

from __future__ import annotations

import functools
import logging
import secrets
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from tensor_dedup.digest import digest
from tensor_dedup.patches.vllm.load_formats import KEY, split
from tensor_dedup.patches.vllm.seams import usable

if TYPE_CHECKING:
    from types import ModuleType

    from tensor_dedup.config import TensorDedupConfig

_log = logging.getLogger(__name__)
_WEIGHTS: Final = "_tensor_dedup_weights"  # of an engine core
_SALT: Final = "_tensor_dedup_salt"  # of a request: what its last blocks were hashed with
_GIVEN: Final = "_tensor_dedup_cache_salt"  # of a request: the salt that its client gave
_OWN: Final = "_tensor_dedup_own_salt"  # of a request: no other one has blocks with it
_UNNAMED: Final = "default"  # what vLLM calls a version that nobody has set
_CLASS: Final = "EngineCore"
# A function that an engine core gets: its clients call it by name, as they call its methods.
DIGESTS_CALL: Final = "tensor_dedup_digests"
OURS: Final = "tensor_dedup_"  # how the names of calls begin that this package adds
# Methods of vLLM's workers that write no weights, or are followed where they do. Whatever else a
# caller lets the workers do, a function of his own most of all, may write.
_FOLLOWED: Final = frozenset(
    {
        "add_lora",
        "annotate_profile",
        "check_health",
        "compute_weight_checksums",
        "execute_dummy_batch",
        "finish_weight_update",
        "get_compilation_match_table",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "list_loras",
        "pin_lora",
        "profile",
        "release_late_interaction_query_cache",
        "reload_weights",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "shutdown",
        "shutdown_weight_transfer_engine",
        "start_draft_weight_update",
        "start_weight_update",
        "supports_draft_weight_updates",
        "synchronize_device",
        "update_max_model_len",
        "update_weights",
    }
)
_FACTORY: Final = "get_request_block_hasher"
# What a worker answers: its token, and the digest of the checkpoint that it runs, if that is known.
_State = tuple[str, str | None]
_Hash = Callable[[Any], bytes]


def patch(core: ModuleType) -> None:
    """Wrap the methods of vLLM's engine core that load, update and name weights. Idempotent.

    `core` is the module vllm.v1.engine.core. If a name is missing there, nothing is done.
    """
    engine = getattr(core, _CLASS, None)
    factory = getattr(core, _FACTORY, None)
    if engine is None or factory is None or factory.__code__.co_filename == __file__:
        return
    wrappers = {
        "_initialize_kv_caches": _after_load,
        "add_request": _add_request,
        "collective_rpc": _collective_rpc,
        "get_weight_version": _get_weight_version,
    }
    if not all(hasattr(engine, name) for name in wrappers):
        return
    for name, wrap in wrappers.items():
        original = getattr(engine, name)
        setattr(engine, name, functools.wraps(original)(wrap(original)))

    @functools.wraps(factory)
    def get_request_block_hasher(*args: Any, **options: Any) -> BlockHasher:
        return BlockHasher(factory, *args, **options)

    setattr(core, _FACTORY, get_request_block_hasher)


def _after_load(original: Callable[..., Any]) -> Callable[..., Any]:
    def initialize_kv_caches(self: Any, vllm_config: Any, *args: Any, **options: Any) -> Any:
        done = original(self, vllm_config, *args, **options)
        config = _config_of(vllm_config)
        if config is not None and config.enabled and usable("versions"):
            weights = EngineWeights(self, vllm_config, salting=config.salt_prefix_cache)
            setattr(self, _WEIGHTS, weights)
            setattr(self, DIGESTS_CALL, weights.known)
            weights.refresh()
        return done

    return initialize_kv_caches


def _add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_request(self: Any, request: Any, *args: Any, **options: Any) -> Any:
        weights: EngineWeights | None = getattr(self, _WEIGHTS, None)
        if weights is not None:
            weights.check_hashes(request)
        return original(self, request, *args, **options)

    return add_request


def _collective_rpc(original: Callable[..., Any]) -> Callable[..., Any]:
    def collective_rpc(self: Any, method: Any, *args: Any, **options: Any) -> Any:
        weights: EngineWeights | None = getattr(self, _WEIGHTS, None)
        if weights is None or _is_ours(method):
            return original(self, method, *args, **options)
        if not isinstance(method, str) or method not in _FOLLOWED:
            weights.note_write()
        weights.doubt()
        try:
            found = original(self, method, *args, **options)
        except BaseException:
            weights.refresh_after_failure()
            raise
        weights.refresh()
        return found

    return collective_rpc


def _is_ours(method: object) -> bool:
    """Return whether `method` is one of those that this package adds, none of which writes."""
    return isinstance(method, str) and method.startswith(OURS)


def _get_weight_version(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_weight_version(self: Any) -> Any:
        weights: EngineWeights | None = getattr(self, _WEIGHTS, None)
        if weights is not None:
            weights.name_version()
        return original(self)

    return get_weight_version


def _config_of(vllm_config: Any) -> TensorDedupConfig | None:
    extra = getattr(vllm_config.load_config, "model_loader_extra_config", None)
    if not isinstance(extra, dict) or KEY not in extra:
        return None
    return split(extra[KEY])[0]


class BlockHasher:
    """vLLM's hasher of the blocks of a request, with a salt in each block's hash.

    Any thread may hash while another one changes the salt: one call uses one salt. `block` is the
    number of tokens of a block. With `marks_requests`, the salt also becomes a part of that of the
    request, for those who have hashes of their own.
    """

    def __init__(
        self,
        factory: Callable[..., Any],
        hash_block_size: int,
        caching_hash_fn: _Hash,
        *args: Any,
        **options: Any,
    ) -> None:
        """Make a hasher without a salt, by vLLM's `factory` of hashers and with its arguments."""
        self.block = hash_block_size
        self.marks_requests = False
        self._make = functools.partial(factory, hash_block_size)
        self._hash, self._options = caching_hash_fn, (args, options)
        self._current: tuple[str | None, Callable[[Any], Any]] = None, self._hasher(caching_hash_fn)

    def _hasher(self, hash_: _Hash) -> Callable[[Any], Any]:
        args, options = self._options
        made: Callable[[Any], Any] = self._make(hash_, *args, **options)
        return made

    @property
    def salt(self) -> str | None:
        """What tells blocks of these weights from others; None: nothing does."""
        return self._current[0]

    @salt.setter
    def salt(self, salt: str) -> None:
        self._current = salt, self._hasher(functools.partial(_salted, self._hash, salt))

    def __call__(self, request: Any) -> Any:
        """Return the hashes of the full blocks of `request` that have none yet."""
        salt, hasher = self._current
        own: str | None = getattr(request, _OWN, None)
        if self.marks_requests and salt is not None and (own or not request.block_hashes):
            given = vars(request).setdefault(_GIVEN, request.cache_salt)
            request.cache_salt = ":".join(filter(None, (salt, own, given)))
        setattr(request, _SALT, salt)
        if own is not None:
            hasher = self._hasher(functools.partial(_salted, self._hash, f"{salt}:{own}"))
        return hasher(request)

    def hash_again(self, request: Any) -> None:
        """Hash those blocks of `request` again whose content was not computed yet.

        A block that was computed in part gets a hash that no other request has, and so do those
        after it. Tokens of the step under way count as computed.
        """
        computed = request.num_computed_tokens
        # A block without a hash, of tokens that are only proposed yet, may be computed again.
        kept = min(computed // self.block, len(request.block_hashes))
        del request.block_hashes[kept:]
        setattr(request, _OWN, secrets.token_hex(16) if computed > kept * self.block else None)
        request.update_block_hashes()


def _salted(hash_: _Hash, salt: str, block: Sequence[Any]) -> bytes:
    # Of each block, not of the first alone: a request that is under way when the weights change has
    # earlier blocks of the old weights and later ones of the new.
    return hash_((*block, salt))


def _hash_preempted(scheduler: Any, hasher: BlockHasher) -> None:
    """Let requests that `scheduler` preempts be hashed again: all of them is computed again."""
    original = scheduler._preempt_request
    if hasattr(original, "__wrapped__"):  # by us, after an earlier change
        return

    @functools.wraps(original)
    def preempt_request(request: Any, *args: Any, **options: Any) -> Any:
        done = original(request, *args, **options)
        hasher.hash_again(request)
        return done

    scheduler._preempt_request = preempt_request


class EngineWeights:
    """The weights of an engine, as its workers tell of them. For the engine core's thread."""

    def __init__(self, core: Any, vllm_config: Any, *, salting: bool) -> None:
        """Ask nothing yet. With `salting`, the blocks of `core` are hashed with a salt."""
        self._core_ref = weakref.ref(core)
        self._salting = salting
        self._connector = getattr(vllm_config, "kv_transfer_config", None) is not None
        events = getattr(vllm_config, "kv_events_config", None)
        self._seen_by_others = self._connector or bool(getattr(events, "enable_kv_cache_events", 0))
        self._states: list[_State] | None = None
        self._named: str = _UNNAMED  # by us
        parallel = getattr(vllm_config, "parallel_config", None)
        self._replicas: int = getattr(parallel, "data_parallel_size", 1)
        self._workers: int = getattr(parallel, "world_size", 1)
        self._weights: str | None = None  # their digest, where it was computed
        self._nameless = False  # because no digest can be known
        self._salt: str | None = None
        self._doubted = False

    @property
    def _core(self) -> Any:
        return self._core_ref()

    @property
    def checkpoint(self) -> str | None:
        """The digest of the checkpoint that all workers run, if all of them know it."""
        found = {digest for _, digest in self._states or ()}
        return found.pop() if len(found) == 1 else None

    def known(self) -> dict[str, str]:
        """Return `checkpoint_digest` or else `weights_digest`, if either is known already."""
        if self.checkpoint is not None:
            return {"checkpoint_digest": self.checkpoint}
        return {} if self._weights is None else {"weights_digest": self._weights}

    def doubt(self) -> None:
        """Take note that what is known may be outdated until the next `refresh` or `forget`.

        Until then is the time of a call that may change weights. If an exception cuts it short,
        as from a signal handler, the next request asks.
        """
        self._doubted = True

    def refresh(self) -> None:
        """Ask the workers which weights they have, and take note of a change."""
        self._refresh()
        self._doubted = False

    def _refresh(self) -> None:
        try:
            states = self._ask(_state)
        except Exception as error:  # noqa: BLE001 (whatever it was, nothing is known then)
            _log.warning("the workers do not say which weights they have: %s", str(error))
            self.forget()
            return
        if None in states:  # loaded by somebody else
            if self._states is not None or self._salt is not None:  # in place of what was known
                self.forget()
            return
        if not all(isinstance(each, tuple) and len(each) == 2 for each in states):
            self.forget()  # after a failure, the answers of an earlier call may still be under way
            return
        before = None if self._states is None else [token for token, _ in self._states]
        self._states = states
        if [token for token, _ in states] != before:
            self._change()

    def note_write(self) -> None:
        """Let the workers know of a call that may write weights. `refresh` is for after it."""
        try:
            self._ask(_note_write)
        except Exception as error:  # noqa: BLE001 (as in `refresh`)
            _log.warning("the workers do not know that weights may be written: %s", str(error))

    def refresh_after_failure(self) -> None:
        """Ask the workers after a call that failed, and may have changed the weights in part."""
        # Of several workers some may still be at work, or have answers that nobody has taken.
        if self._workers == 1:
            self.refresh()
        else:
            self.forget()

    def forget(self) -> None:
        """Take note that nothing is known of the weights, until the workers are asked again."""
        self._states = None
        self._change()
        self._doubted = False

    def _settle(self) -> None:
        """Ask the workers if a call was cut short, perhaps while its change was taken note of."""
        if self._doubted:
            self._states = None
            self.refresh_after_failure()

    def name_version(self) -> None:
        """Let the engine answer with the version of its weights, unless the user has named one.

        The digest of the checkpoint, or else that of the weights, is computed if need be.
        """
        self._settle()
        if self._core._weight_version != self._named or self._named != _UNNAMED:
            return
        if self._nameless:
            return
        if self._states is None:
            self.refresh()
        identity = self._identity() if self._states is not None else None
        if self._weights is not None and self._replicas > 1:
            identity = None  # vLLM wants one answer of all, and each may have other experts
        self._nameless = identity is None
        self._name(identity)

    def check_hashes(self, request: Any) -> None:
        """Hash a new request again if its blocks were hashed before the weights changed."""
        self._settle()
        hasher = self._hasher
        if hasher is None or self._salt is None:
            return
        if hasher.salt is None:  # the first request of this engine
            self._put_salt(hasher)
        if getattr(request, _SALT, None) != hasher.salt:
            hasher.hash_again(request)

    @property
    def _hasher(self) -> BlockHasher | None:
        found = getattr(self._core, "request_block_hasher", None)
        return found if isinstance(found, BlockHasher) else None

    def _ask(self, what: Callable[..., Any], *args: Any) -> list[Any]:
        found: list[Any] = self._core.model_executor.collective_rpc(what, args=args)
        return found

    def _change(self) -> None:
        self._nameless, self._weights = False, None
        self._drop_encoder_outputs()
        if self._core._weight_version == self._named:  # and not by the user
            self._name(self.checkpoint)
        if not self._salting:
            return
        identity = self.checkpoint
        if identity is None and self._seen_by_others and self._states is not None:
            identity = self._identity()
        self._salt = identity or secrets.token_hex(32)
        hasher = self._hasher
        if hasher is None:
            return
        self._put_salt(hasher)
        requests = list(self._core.scheduler.requests.values())
        if requests:
            _hash_preempted(self._core.scheduler, hasher)
        for request in requests:
            hasher.hash_again(request)

    def _drop_encoder_outputs(self) -> None:
        """Let no output of an encoder, as of an image, be used with other weights than its own.

        The scheduler has those encoded again that a request under way still needs.
        """
        scheduler = getattr(self._core, "scheduler", None)
        if scheduler is None:  # the model has just been loaded
            return
        # One without `cached` never gives an output to a second request.
        if not getattr(scheduler.encoder_cache_manager, "cached", None):
            return
        scheduler.reset_encoder_cache()
        if self._states is None:  # the workers may not answer; they are asked for none of those
            return
        try:
            self._core.model_executor.reset_encoder_cache()
        except Exception as error:  # noqa: BLE001 (as in `refresh`)
            _log.warning("the workers keep outputs of encoders for now: %s", str(error))

    def _put_salt(self, hasher: BlockHasher) -> None:
        assert self._salt is not None
        hasher.marks_requests = self._connector
        hasher.salt = self._salt

    def _name(self, identity: str | None) -> None:
        self._named = _UNNAMED if identity is None else _short(identity)
        self._core._weight_version = self._named

    def _identity(self) -> str | None:
        """Return the checkpoint's digest, or else that of the weights; compute what is missing."""
        if self.checkpoint is None:
            try:
                # One of them hashes; what it remembers, the others need not hash.
                self._ask(_hash_checkpoint, 0)
                self._states = self._ask(_hash_checkpoint, None)
            except Exception as error:  # noqa: BLE001 (as in `refresh`)
                _log.warning("the digest of a checkpoint is not known: %s", str(error))
        if self.checkpoint is not None:
            return self.checkpoint
        try:
            weights = self._ask(_weights)
        except Exception as error:  # noqa: BLE001 (as in `refresh`)
            _log.warning("the digest of the weights is not known: %s", str(error))
            return None
        if None in weights:
            return None
        one = len(weights) == 1
        self._weights = weights[0] if one else digest("\n".join(weights).encode())
        return _OF_WEIGHTS + self._weights


_OF_WEIGHTS: Final = "weights:"


def _short(identity: str) -> str:
    from tensor_dedup.loader.unsharing.model_digests import short_version

    kind, found = "", identity
    if identity.startswith(_OF_WEIGHTS):
        kind, found = _OF_WEIGHTS, identity.removeprefix(_OF_WEIGHTS)
    return kind + short_version(found)


# --- in the workers


def _state(worker: Any) -> _State | None:
    """Return what a worker knows without hashing anything, or None if we did not load its model."""
    from tensor_dedup.loader.unsharing.model_digests import digests_of

    found = digests_of(worker.get_model())
    if found is None:
        return None
    return found.token, found.known_checkpoint if found.as_loaded else None


def _note_write(worker: Any) -> None:
    from tensor_dedup.loader.unsharing.model_digests import note_write

    note_write(worker.get_model())


def _hash_checkpoint(worker: Any, rank: int | None) -> _State | None:
    """Let the worker of this rank, or all if it is None, hash what is not known yet."""
    from tensor_dedup.loader.unsharing.model_digests import digests_of

    found = digests_of(worker.get_model())
    if found is not None and found.as_loaded and rank in (None, worker.rank):
        found.checkpoint()
    return _state(worker)


def _weights(worker: Any) -> str | None:
    from tensor_dedup.loader.unsharing.model_digests import digests_of

    found = digests_of(worker.get_model())
    return None if found is None else found.weights()
