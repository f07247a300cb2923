"""An engine knows which weights it has, and its prefix cache never mixes two versions of them."""

import gc
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from models import tiny_checkpoints as checkpoints
from tensor_dedup import report
from tensor_dedup.errors import TensorDedupError, UnsupportedError
from tensor_dedup.loader.unsharing.model_digests import ModelDigests, weight_version
from tensor_dedup.patches.vllm.weight_versions import BlockHasher, EngineWeights
from tensor_dedup.training import CheckpointStore
from vllm_runs import connectors, plain, shared
from vllm_runs import engines as engine_tools

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.vllm

BLOCK = 32
# Three full blocks, of which vLLM looks two up: of the last one it computes at least one token.
PROMPT = [7 * n % 200 + 3 for n in range(3 * BLOCK)]
CACHED = 2 * BLOCK
Open = Callable[..., "LLM"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = checkpoints.make("llama", tmp_path_factory.mktemp("versions")).base
    engine_tools.warm_up(made)
    return made


@pytest.fixture(scope="module")
def other(base: Path) -> Path:
    return checkpoints.same_header(base, base.parent / "another")


@pytest.fixture
def engines() -> Iterator[Open]:
    """Opens engines with a prefix cache, and ends them all."""
    opened: list[LLM] = []

    def engine(path: Path | str, **options: Any) -> "LLM":
        caching: dict[str, Any] = {"enable_prefix_caching": True, "block_size": BLOCK}
        opened.append(plain.engine(path, **caching, **options))
        return opened[-1]

    yield engine
    for llm in opened:
        plain.let_go(llm)
    opened.clear()
    gc.collect()


def ask(llm: "LLM", prompt: list[int] = PROMPT) -> tuple[int, plain.Answer]:
    """How many tokens of the prompt the cache had, and the answer with its logprobs."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8, logprobs=plain.TOP, detokenize=False)
    (found,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    (answer,) = found.outputs
    assert answer.logprobs is not None
    probabilities = tuple(
        tuple(sorted((token, entry.logprob) for token, entry in each.items()))
        for each in answer.logprobs
    )
    return found.num_cached_tokens or 0, (tuple(answer.token_ids), probabilities)


def fresh_answer(path: Path | str, engines: Open, **options: Any) -> plain.Answer:
    cached, answer = ask(engines(path, **options))
    assert not cached
    return answer


def block_hashes(llm: "LLM") -> list[bytes]:
    """The hashes of the prompt's blocks in this engine."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    core: Any = llm.llm_engine.engine_core
    hasher = core.engine_core.request_block_hasher
    request = Request("one", PROMPT, SamplingParams(), None, block_hasher=hasher)
    return list(request.block_hashes)


PLAIN: dict[str, Any] = {"cpu_weights": "plain"}


def test_plain_vllm_answers_from_entries_of_weights_that_are_gone(
    base: Path, other: Path, engines: Open
) -> None:
    with plain.kept_as("plain"):
        wanted = fresh_answer(other, engines)
        llm = engines(base)
        ask(llm)
        shared.reload(llm, other)
        cached, answer = ask(llm)
    assert cached == CACHED, "vLLM drops its cache by itself now"
    assert answer != wanted, "the entries do not matter, and no test here shows anything"


def test_no_entry_of_the_old_weights_is_used_with_new_ones(
    base: Path, other: Path, engines: Open
) -> None:
    wanted = fresh_answer(other, engines, tensor_dedup=PLAIN)
    llm = engines(base, tensor_dedup=PLAIN)
    first = ask(llm)
    assert first[0] == 0
    assert ask(llm) == (CACHED, first[1]), "entries of one version are used as ever"
    shared.reload(llm, other)
    assert ask(llm) == (0, wanted)
    assert ask(llm) == (CACHED, wanted)


def test_without_the_salt_entries_are_used_as_in_plain_vllm(
    base: Path, other: Path, engines: Open
) -> None:
    llm = engines(base, tensor_dedup={**PLAIN, "salt_prefix_cache": False})
    ask(llm)
    shared.reload(llm, other)
    assert ask(llm)[0] == CACHED


def test_calls_that_write_nothing_keep_the_cache(base: Path, engines: Open) -> None:
    llm = engines(base, tensor_dedup=PLAIN)
    ask(llm)
    version = llm.get_weight_version()
    for method in ("get_model_inspection", "get_supported_tasks", "check_health"):
        llm.collective_rpc(method)
    assert ask(llm)[0] == CACHED
    assert llm.get_weight_version() == version


def test_a_call_that_fails_keeps_the_cache_unless_it_was_to_write(
    base: Path, tmp_path: Path, engines: Open
) -> None:
    llm = engines(base, tensor_dedup=PLAIN)
    version = llm.get_weight_version()
    ask(llm)

    with pytest.raises(TypeError, match="lora_id"):
        llm.collective_rpc("pin_lora")
    assert ask(llm)[0] == CACHED
    assert llm.get_weight_version() == version
    salt = core_of(llm).request_block_hasher.salt
    with pytest.raises(Exception, match="nowhere"):
        shared.reload(llm, tmp_path / "nowhere")
    # Some weights may be others by now; vLLM leaves this model without any.
    assert core_of(llm).request_block_hasher.salt not in (None, salt)
    assert llm.get_weight_version() == "default"


def test_of_several_workers_that_failed_nothing_is_believed(base: Path, engines: Open) -> None:
    llm = engines(base, tensor_dedup=PLAIN)
    weights: EngineWeights = vars(core_of(llm))["_tensor_dedup_weights"]
    ask(llm)
    hashes = block_hashes(llm)
    with mock.patch.object(weights, "_workers", 2):
        weights.refresh_after_failure()
    assert ask(llm)[0] == 0
    assert llm.get_weight_version() == weight_version(report().models[-1])
    weights.refresh()
    assert block_hashes(llm) == hashes
    with mock.patch.object(weights, "_ask", return_value=["an answer to another call"]):
        weights.refresh()
    assert block_hashes(llm) != hashes


def test_a_request_that_waits_is_hashed_for_the_weights_that_compute_it(
    base: Path, other: Path, engines: Open
) -> None:
    from vllm import SamplingParams

    wanted = fresh_answer(base, engines, tensor_dedup=PLAIN)
    llm = engines(base, tensor_dedup=PLAIN)
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    llm.llm_engine.add_request("waits", {"prompt_token_ids": PROMPT}, params)
    shared.reload(llm, other)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert ask(llm)[0] == CACHED, "it left no entries at all"
    # Back to the first weights, of which there are no entries: none of that request is used.
    shared.reload(llm, base)
    assert ask(llm) == (0, wanted)


def test_a_request_under_way_leaves_no_entry_that_looks_like_one_of_a_single_version(
    base: Path, other: Path, engines: Open
) -> None:
    from vllm import SamplingParams

    llm = engines(base, tensor_dedup=PLAIN)
    params = SamplingParams(temperature=0, max_tokens=3 * BLOCK, ignore_eos=True, detokenize=False)
    llm.llm_engine.add_request("runs", {"prompt_token_ids": PROMPT}, params)
    before = block_hashes(llm)
    for _ in range(BLOCK // 2):
        llm.llm_engine.step()
    (request,) = core_of(llm).scheduler.requests.values()
    assert request.block_hashes[:3] == before
    shared.reload(llm, other)
    assert request.block_hashes[:3] == before, "they were computed with the old weights"
    tokens: list[int] = []
    while llm.llm_engine.has_unfinished_requests():
        tokens = list(request.all_token_ids)
        llm.llm_engine.step()
    assert len(request.block_hashes) >= 5
    later = ask(llm, tokens[: 5 * BLOCK])
    assert later[0] == 0, "an entry of either kind of blocks was used"


def core_of(llm: "LLM") -> Any:
    client: Any = llm.llm_engine.engine_core
    return client.engine_core


def test_engines_with_equal_weights_have_equal_hashes(
    base: Path, other: Path, engines: Open, tmp_path: Path
) -> None:
    copy = shutil.copytree(base, tmp_path / "copy")
    one, two, three = (engines(path, tensor_dedup=PLAIN) for path in (base, copy, other))
    for llm in (one, two, three):
        ask(llm)
    assert isinstance(core_of(one).request_block_hasher, BlockHasher)
    assert block_hashes(one) == block_hashes(two)
    assert not {*block_hashes(one)} & {*block_hashes(three)}


def test_where_weights_come_back_their_entries_do(
    base: Path, other: Path, engines: Open, tmp_path: Path
) -> None:
    with CheckpointStore(tmp_path / "store", "policy", config=base) as run:
        for number, folder in enumerate((base, other)):
            run.save(checkpoints.tensors(folder), number)
    config = {**PLAIN, "store": str(tmp_path / "store")}
    wanted = fresh_answer("store://policy@1", engines, tensor_dedup=config)
    second = report().models[-1].checkpoint_digest
    llm = engines(
        "store://policy@0", tensor_dedup=config, weight_transfer_config={"backend": "tensor_dedup"}
    )
    digests = [report().models[-1].checkpoint_digest, second]
    versions = [(each or "")[:16] for each in digests]
    first = ask(llm)
    hashes = block_hashes(llm)
    assert llm.get_weight_version() == versions[0] != versions[1]
    llm.update_weights({"step": 1})
    assert ask(llm) == (0, wanted)
    assert llm.get_weight_version() == versions[1]
    mine = report().models[-1]
    assert (mine.name, mine.checkpoint_digest) == ("store://policy@1", second)
    assert mine.weights_digest is not None
    llm.update_weights({"step": 0})
    assert (llm.get_weight_version(), block_hashes(llm)) == (versions[0], hashes)
    assert ask(llm) == (CACHED, first[1])
    with pytest.raises(TensorDedupError):
        llm.update_weights({"step": 7})
    assert ask(llm) == (CACHED, first[1]), "it is where it was"
    llm.update_weights({"step": 1})
    assert ask(llm) == (CACHED, wanted)


def test_blocks_of_a_request_that_outlives_its_weights_are_of_no_single_version() -> None:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    kv_cache_utils.init_none_hash(sha256)

    def hasher(salt: str) -> BlockHasher:
        made = BlockHasher(kv_cache_utils.get_request_block_hasher, BLOCK, sha256)
        made.salt = salt
        return made

    def request(with_: BlockHasher) -> Request:
        return Request("one", PROMPT, SamplingParams(), None, block_hasher=with_)

    a, b = (list(request(hasher(salt)).block_hashes) for salt in "ab")
    assert len(a) == len(b) == 3
    changing = hasher("a")
    mixed = request(changing)
    mixed.num_computed_tokens = BLOCK + 1  # of the second block a part
    changing.salt = "b"
    changing.hash_again(mixed)
    assert mixed.block_hashes[0] == a[0]
    assert len(mixed.block_hashes) == 3
    assert not {*mixed.block_hashes[1:]} & {*a, *b}


def test_a_block_of_two_versions_has_a_hash_that_no_other_request_has(
    base: Path, other: Path, engines: Open
) -> None:
    """Also where it is the first block, and so no earlier one tells the versions apart."""
    from vllm import SamplingParams

    llm = engines(base, tensor_dedup=PLAIN)
    params = SamplingParams(temperature=0, max_tokens=BLOCK, ignore_eos=True, detokenize=False)
    prompt = PROMPT[: BLOCK // 2]
    llm.llm_engine.add_request("runs", {"prompt_token_ids": prompt}, params)
    for _ in range(4):
        llm.llm_engine.step()
    (request,) = core_of(llm).scheduler.requests.values()
    assert 0 < request.num_computed_tokens < BLOCK
    shared.reload(llm, other)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert len(request.block_hashes) == 1
    assert ask(llm, [*request.all_token_ids, 5, 6])[0] == 0


def test_a_block_that_is_computed_again_with_new_weights_is_of_two_versions() -> None:
    """Its tokens were only proposed when the weights changed, so it had no hash."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    kv_cache_utils.init_none_hash(sha256)
    hasher = BlockHasher(kv_cache_utils.get_request_block_hasher, BLOCK, sha256)
    hasher.salt = "a"

    def request(tokens: list[int]) -> Request:
        return Request("one", tokens, SamplingParams(), None, block_hasher=hasher)

    short = request(PROMPT[: BLOCK - 1])
    short.num_computed_tokens = BLOCK + 2  # with what was proposed
    hasher.salt = "b"
    hasher.hash_again(short)
    short.append_output_token_ids(PROMPT[BLOCK - 1])
    assert len(short.block_hashes) == 1
    assert short.block_hashes[0] != request(PROMPT[:BLOCK]).block_hashes[0]


def test_a_request_that_begins_again_has_no_hash_of_the_old_weights(
    base: Path, other: Path, engines: Open
) -> None:
    from vllm import SamplingParams

    llm = engines(base, tensor_dedup=PLAIN)
    params = SamplingParams(temperature=0, max_tokens=BLOCK, ignore_eos=True, detokenize=False)
    llm.llm_engine.add_request("runs", {"prompt_token_ids": PROMPT}, params)
    for _ in range(4):
        llm.llm_engine.step()
    scheduler = core_of(llm).scheduler
    (request,) = scheduler.requests.values()
    old = {*request.block_hashes}
    shared.reload(llm, other)
    assert {*request.block_hashes} == old, "these blocks are computed"
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.num_computed_tokens == 0
    assert len(request.block_hashes) == len(old) == 3
    assert not {*request.block_hashes} & old
    assert request.block_hashes == block_hashes(llm)
    llm.llm_engine.abort_request(["runs"])


def test_what_code_of_the_caller_does_counts_as_a_write(base: Path, engines: Open) -> None:
    llm = engines(base, tensor_dedup=PLAIN)
    ask(llm)
    first = llm.get_weight_version()

    def halve(worker: Any) -> None:
        for parameter in worker.get_model().parameters():
            parameter.data.mul_(-0.5)

    llm.collective_rpc(halve)
    assert ask(llm)[0] == 0
    second = llm.get_weight_version()
    assert second.startswith("weights:")
    llm.collective_rpc("reset_weights")
    assert ask(llm)[0] == 0
    assert llm.get_weight_version() not in (first, second)


def test_no_output_of_an_encoder_outlives_the_weights(
    base: Path, other: Path, engines: Open
) -> None:
    llm = engines(base, tensor_dedup=PLAIN)
    ask(llm)
    core = core_of(llm)
    manager = core.scheduler.encoder_cache_manager
    outputs = core.model_executor.driver_worker.worker.model_runner.encoder_cache
    manager.cached["image"], outputs["image"] = set(), object()
    llm.collective_rpc("get_model_inspection")
    assert "image" in manager.cached
    assert "image" in outputs
    shared.reload(llm, other)
    assert "image" not in manager.cached
    assert "image" not in outputs


def test_of_weights_that_somebody_else_has_loaded_nothing_is_known(
    base: Path, engines: Open
) -> None:
    llm = engines(base, tensor_dedup=PLAIN)
    ask(llm)
    weights: EngineWeights = vars(core_of(llm))["_tensor_dedup_weights"]
    salt = core_of(llm).request_block_hasher.salt
    assert llm.get_weight_version() != "default"
    with mock.patch.object(weights, "_ask", return_value=[None]):
        weights.refresh()
        assert llm.get_weight_version() == "default"
    assert core_of(llm).request_block_hasher.salt not in (None, salt)


@pytest.mark.parametrize("connector", [connectors.BY_TOKENS, connectors.BY_HASHES])
def test_a_connector_of_plain_vllm_brings_what_weights_that_are_gone_have_computed(
    base: Path, other: Path, engines: Open, connector: str, tmp_path: Path
) -> None:
    with plain.kept_as("plain"):
        wanted = fresh_answer(other, engines)
        llm = engines(base, **connectors.settings(connector, str(tmp_path)))
        first = ask(llm)
        llm.llm_engine.reset_prefix_cache()
        assert ask(llm) == (CACHED, first[1]), "nothing came from the connector"
        shared.reload(llm, other)
        llm.llm_engine.reset_prefix_cache()
        cached, answer = ask(llm)
    assert cached == CACHED, "no test here shows anything"
    assert answer != wanted


def test_a_connector_that_goes_by_hashes_brings_nothing_of_other_weights(
    base: Path, other: Path, engines: Open, tmp_path: Path
) -> None:
    wanted = fresh_answer(other, engines, tensor_dedup=PLAIN)
    files = connectors.settings(connectors.BY_HASHES, str(tmp_path))
    llm = engines(base, tensor_dedup=PLAIN, **files)
    first = ask(llm)
    assert not first[0]
    llm.llm_engine.reset_prefix_cache()
    assert ask(llm) == (CACHED, first[1]), "nothing came from the connector"
    shared.reload(llm, other)
    llm.llm_engine.reset_prefix_cache()
    assert ask(llm) == (0, wanted)
    llm.llm_engine.reset_prefix_cache()
    assert ask(llm) == (CACHED, wanted)


def test_an_engine_that_follows_steps_refuses_connectors(
    base: Path, engines: Open, tmp_path: Path
) -> None:
    from vllm.config import ECTransferConfig

    with CheckpointStore(tmp_path / "store", "policy", config=base) as run:
        run.save(checkpoints.tensors(base), 0)
    config = {**PLAIN, "store": str(tmp_path / "store")}
    backend = {"backend": "tensor_dedup"}
    encoders: dict[str, Any] = {"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}
    for refused, setting in (
        ("kv_transfer_config", connectors.settings(connectors.BY_HASHES, str(tmp_path))),
        ("kv_transfer_config", {"kv_offloading_size": 0.1, "kv_offloading_backend": "native"}),
        ("ec_transfer_config", {"ec_transfer_config": ECTransferConfig(**encoders)}),
    ):
        with pytest.raises(UnsupportedError, match=f"does not combine with {refused}"):
            engines(
                "store://policy@0", tensor_dedup=config, weight_transfer_config=backend, **setting
            )


def test_a_connector_with_names_of_its_own_gets_the_salt_with_the_request() -> None:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    kv_cache_utils.init_none_hash(sha256)
    hasher = BlockHasher(kv_cache_utils.get_request_block_hasher, BLOCK, sha256)
    hasher.salt, hasher.marks_requests = "a", True

    def request(salt: str | None) -> Request:
        params = SamplingParams()
        return Request("one", PROMPT, params, None, cache_salt=salt, block_hasher=hasher)

    mine, anybody = request("mine"), request(None)
    assert (mine.cache_salt, anybody.cache_salt) == ("a:mine", "a")
    hasher.salt = "b"
    hasher.hash_again(mine)
    assert mine.cache_salt == "b:mine"
    assert mine.block_hashes == request("mine").block_hashes != request(None).block_hashes


def test_an_engine_whose_hashes_others_see_hashes_what_it_needs_for_them(
    base: Path, engines: Open
) -> None:
    """Equal weights must have equal hashes there, known or not."""
    from vllm.config import KVEventsConfig

    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    known = engines(base, tensor_dedup=PLAIN)
    unknown = mock.patch.object(ModelDigests, "known_checkpoint", None)
    with unknown, mock.patch.object(EngineWeights, "_identity", return_value="of the weights"):
        alone = engines(base, tensor_dedup=PLAIN)
        seen = engines(base, tensor_dedup=PLAIN, kv_events_config=events)
    for llm in (known, alone, seen):
        ask(llm)
    salts = [core_of(llm).request_block_hasher.salt for llm in (known, alone, seen)]
    assert salts[0] == report().models[-3].checkpoint_digest
    assert salts[1] not in (None, "of the weights", salts[0]), "drawn at random"
    assert salts[2] == "of the weights"


def test_an_engine_answers_with_the_digest_of_its_checkpoint(
    base: Path, other: Path, engines: Open
) -> None:
    assert engines(base).get_weight_version() == "default"
    llm = engines(base, tensor_dedup=PLAIN)
    mine = report().models[-1]
    assert mine.checkpoint_digest is not None
    assert llm.get_weight_version() == mine.checkpoint_digest[:16] == weight_version(mine)
    assert engines(other, tensor_dedup=PLAIN).get_weight_version() != llm.get_weight_version()
    llm.update_weight_version("mine")
    assert llm.get_weight_version() == "mine"
    shared.reload(llm, other)
    assert llm.get_weight_version() == "mine"


def test_after_an_update_the_version_is_that_of_the_weights(
    base: Path, other: Path, engines: Open
) -> None:
    llm = engines(base, tensor_dedup=PLAIN)
    first = llm.get_weight_version()
    shared.reload(llm, other)
    second = llm.get_weight_version()
    assert second.startswith("weights:")
    assert second == f"weights:{(report().models[-1].weights_digest or '')[:16]}"
    shared.reload(llm, base)
    third = llm.get_weight_version()
    assert third.startswith("weights:")
    assert third != second
    shared.reload(llm, other)
    assert llm.get_weight_version() == second != first


def test_a_version_that_cannot_be_known_is_not_claimed(
    base: Path, other: Path, engines: Open
) -> None:
    """Weights that vLLM has packed anew can be read nowhere."""
    llm = engines(base, tensor_dedup=True)
    first = llm.get_weight_version()
    if not shared.handlers(llm):
        pytest.skip("nothing is packed on this CPU")
    assert len(first) == 16
    shared.reload(llm, other)
    assert llm.get_weight_version() == "default"
    assert report().models[-1].weights_digest is None
