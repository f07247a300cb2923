"""Models whose tensors differ in part: what is equal in them is one memory, leaf by leaf.

The parts that do not change are at least 8 MiB each, or nothing would be proved.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
import transformers as hf
from torch import nn

import engines
import fleet
import fresh
import hinted
import managers
import plain
import quantised
import shared
import tiny_checkpoints as checkpoints
from process_state import slab_memory
from tensor_dedup import enable, libc, report, shared_bytes, unshare, verify
from tensor_dedup.digest import LEAF_BYTES, digest, leaf_places
from tensor_dedup.errors import AuditError
from tensor_dedup.formats.weights import read_header
from tensor_dedup.loader.checkpoint_io.hints import FileIdentity, HintIndex
from tensor_dedup.loader.post_load.mapped_files import FileRange
from tensor_dedup.loader.residents import leaves, mappings
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.residents.resident import tensor_bytes
from tensor_dedup.loader.unsharing.lookup import is_mapped
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.protocol.layout import PAGE

MIB = 1 << 20
# Attention has 32 heads of 128: q, k and v are 8 MiB each, and an embedding is 16 MiB.
_WIDE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
}
# 64 experts: 1 MiB each of gate and up, half of that of down.
_EXPERTS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
# What models of these tests have in common.
_BLOCKS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 8192,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
# Files of Phi-3 hold q, k and v as one, 8 MiB each, and gate and up, too.
_FUSED: dict[str, Any] = {
    **_BLOCKS,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "pad_token_id": 0,
}
Change = Callable[[Path, Path], Path]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide") / "base"
    make: Any = hf.LlamaForCausalLM
    return checkpoints.save(make(hf.LlamaConfig(**_WIDE)), folder)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts") / "base"
    make: Any = hf.Qwen3MoeForCausalLM
    return checkpoints.save(make(hf.Qwen3MoeConfig(**_EXPERTS)), folder)


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fused") / "base"
    make: Any = hf.Phi3ForCausalLM
    return checkpoints.save(make(hf.Phi3Config(**_FUSED)), folder)


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of 1,024 channels: what GEGLU stacks is 16 MiB."""
    kind: Any = diffusers.UNet2DConditionModel
    with torch.device("meta"):
        model = kind(
            sample_size=4,
            block_out_channels=(32, 1024),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            mid_block_type=None,
            up_block_types=("UpBlock2D", "UpBlock2D"),
            cross_attention_dim=32,
        )
    return checkpoints.save(
        model.bfloat16().to_empty(device="cpu"), tmp_path_factory.mktemp("unet") / "base"
    )


def first_third_changed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return _scaled(tensor, 0, 1) if "qkv_proj" in name else tensor


def first_and_last_third_changed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return _scaled(_scaled(tensor, 0, 1), 2, 3) if "qkv_proj" in name else tensor


def _scaled(tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Change some thirds of the rows."""
    third = len(tensor) // 3
    tensor = tensor.clone()
    tensor[start * third : end * third] *= 1.5
    return tensor


def grown(source: Path, target: Path) -> Path:
    return checkpoints.grown_vocabulary(source, target, rows=256)


def scaled(*parts: str) -> Change:
    """Change the tensors whose names have one of these parts in them."""

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 1.5 if any(part in name for part in parts) else tensor

    return lambda source, target: checkpoints.mapped(source, target, change)


def adapted(source: Path, target: Path) -> Path:
    return checkpoints.merged_lora(source, target, ("q_proj", "v_proj"), layers=(0,))


def changed_bytes(base: Path, tune: Path) -> tuple[int, int]:
    """How many bytes two checkpoints do not have in common, and in how many tensors they lie."""
    old, new = checkpoints.tensors(base), checkpoints.tensors(tune)
    names = checkpoints.different(base, tune)
    more = [new[n].nbytes - (old[n].nbytes if _begins_with(new[n], old[n]) else 0) for n in names]
    return sum(more), len(names)


def _begins_with(new: torch.Tensor, old: torch.Tensor) -> bool:
    return len(new) > len(old) and torch.equal(new[: len(old)], old)


def read(model: nn.Module) -> None:
    for each in model.parameters():
        each.view(torch.uint8).max()


def slab_pss(*models: nn.Module) -> int:
    """What the slabs of this process take, when every page of these models was read."""
    gc.collect()
    for model in models:
        read(model)
    return slab_memory()["Pss"]


@pytest.fixture(scope="module")
def warm(llama: Path) -> None:
    engines.warm_up(llama)


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    held: list[Any] = []
    yield held
    engines.drop(*held)
    held.clear()
    gc.collect()


def grown_by_ten(source: Path, target: Path) -> Path:
    """vLLM puts 54 rows of zeros behind it, which no file has."""
    return checkpoints.grown_vocabulary(source, target, rows=10)


LLAMAS: dict[str, tuple[Change, int]] = {
    "a grown vocabulary": (grown, 32 * MIB),
    "q_proj": (scaled("layers.1.self_attn.q_proj"), 16 * MIB),
    "merged LoRA on q and v": (adapted, 8 * MIB),
}


@pytest.mark.vllm
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("case", LLAMAS)
def test_vllm_keeps_what_changed(case: str, llama: Path, tmp_path: Path, opened: list[Any]) -> None:
    change, common = LLAMAS[case]
    tune = change(llama, tmp_path / "tune")
    _assert_costs_what_changed(llama, tune, common, opened)


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.parametrize("managed", [False, True], ids=["alone", "managed"])
def test_vllm_keeps_one_expert_of_a_stack(mixture: Path, managed: bool, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    tune = scaled("experts.5.")(mixture, tmp_path / "tune")
    fresh.call_forked(experts_in_vllm, mixture, tune, managed)


def experts_in_vllm(base: Path, tune: Path, managed: bool) -> None:
    """In a process of its own, because a MoE model must be its first."""
    engines.warm_up(base)
    with managers.running(tune.parent) if managed else nullcontext() as manager:
        config: dict[str, Any] = {"memory_manager": str(manager.socket)} if manager else {}
        held: list[Any] = []
        _assert_costs_what_changed(base, tune, 92 * MIB, held, **config)
        expected = plain.outputs(engines.sharing(tune, cpu_weights="plain"))
        with near_the_limit_of_mappings():
            for audited in ({}, {"audit": 1.0}, {"verify_bytes": True}):
                again = engines.sharing(tune, cpu_weights="plain", **config, **audited)
                last = engines.last_report()
                assert last.private_bytes
                assert "max_map_count" in dict(last.skipped).popitem()[1]
                assert plain.outputs(again) == expected
            assert verify().ok


@contextmanager
def near_the_limit_of_mappings() -> Iterator[None]:
    """As if this process could have no more mappings than it has."""
    with (
        mock.patch.object(libc, "max_mappings", libc.count_mappings),
        mock.patch.object(mappings.BUDGET, "_until", 0.0),
    ):
        yield


def _assert_costs_what_changed(
    base: Path, tune: Path, common: int, opened: list[Any], **config: Any
) -> None:
    with plain.kept_as("plain"):
        expected = []
        for path in (base, tune):
            opened.append(plain.engine(path))
            expected.append(plain.outputs(opened[-1]))
            engines.drop(opened.pop())
            gc.collect()
    first = engines.sharing(base, cpu_weights="plain", **config)
    opened.append(first)
    before = slab_pss(plain.model(first))
    second = engines.sharing(tune, cpu_weights="plain", **config)
    opened.append(second)
    more = slab_pss(plain.model(first), plain.model(second)) - before
    differ, tensors = changed_bytes(base, tune)
    last = engines.last_report()
    assert all(is_mapped(each) for each in plain.model(second).parameters())
    assert last.leaf_shared_bytes == common
    assert 0.95 * (last.private_bytes - common) <= more <= 1.05 * differ + tensors * LEAF_BYTES
    assert last.shared_bytes + last.private_bytes == last.total_bytes
    theirs = dict(plain.model(first).named_parameters())
    mine = dict(plain.model(second).named_parameters())
    found = sum(shared_bytes(mine[name], theirs[name]) for name in mine)
    assert found == last.shared_bytes + common
    assert [plain.outputs(first), plain.outputs(second)] == expected
    # A writer gets pages of its own, and no neighbour sees it.
    with torch.no_grad():
        for each in mine.values():
            each.zero_()
    assert plain.outputs(first) == expected[0]
    assert verify().ok


def all_of_them(source: Path, target: Path) -> Path:
    """Every change of `LLAMAS` at once."""
    for case, (change, _) in LLAMAS.items():
        source = change(source, target.with_name(f"{target.name} {case}"))
    return source


@pytest.mark.vllm
def test_vllm_in_another_process_keeps_what_changed(llama: Path, tmp_path: Path) -> None:
    tune = all_of_them(llama, tmp_path / "tune")
    common = sum(expected for _, expected in LLAMAS.values())
    _assert_kept_in_another_process(llama, tune, common, tmp_path)


@pytest.mark.vllm
@pytest.mark.long
def test_vllm_in_another_process_keeps_one_expert_of_a_stack(mixture: Path, tmp_path: Path) -> None:
    tune = scaled("experts.5.")(mixture, tmp_path / "tune")
    _assert_kept_in_another_process(mixture, tune, 92 * MIB, tmp_path)


@pytest.mark.vllm
@pytest.mark.long
def test_vllm_in_another_process_keeps_all_but_a_leaf_of_an_fp8_weight(
    llama: Path, tmp_path: Path
) -> None:
    """One block of 128 x 128 numbers differs, in one leaf of the 12 MiB of q, k and v."""
    base = quantised.make("fp8 block", llama, tmp_path / "fp8" / "base")
    tune = checkpoints.mapped(base, tmp_path / "fp8" / "tune", quantised.block_changed)
    [name] = checkpoints.different(base, tune)
    old, new = (checkpoints.tensors(path)[name].view(torch.uint8) for path in (base, tune))
    differ = int((old != new).sum())
    assert differ == 128 * 128
    _assert_kept_in_another_process(
        base, tune, 10 * MIB, tmp_path, changed=(differ, 1), kernels=True
    )


def _assert_kept_in_another_process(
    base: Path,
    tune: Path,
    common: int,
    tmp_path: Path,
    *,
    changed: tuple[int, int] | None = None,
    kernels: bool = False,
) -> None:
    """`changed` as `changed_bytes`; with `kernels` vLLM gets those that it has not on this CPU."""
    differ, tensors = changed or changed_bytes(base, tune)
    options = {"worker_extension_cls": "with_kernels.Worker"} if kernels else {}
    unpacked = "unpacked_with_kernels.Worker" if kernels else "unpacked.Worker"
    with fleet.fleet(tmp_path) as engines, fleet.manager(tmp_path) as manager:
        plain_tune = engines.start(tune, None, worker_extension_cls=unpacked)
        config = {"memory_manager": str(manager.socket)}
        first = engines.start(base, config, **options)
        of_base = first.loaded["outputs"]
        assert first.read()
        before, charged = fleet.slab_pss(first.pid), manager.charged()
        second = engines.start(tune, config, **options)
        report = second.report
        assert report["leaf_shared_bytes"] == common
        assert report["shared_bytes"] + report["private_bytes"] == report["total_bytes"]
        assert second.read()
        more = fleet.slab_pss(first.pid) + fleet.slab_pss(second.pid) - before
        assert 0.95 * (report["private_bytes"] - common) <= more
        assert more <= 1.05 * differ + tensors * LEAF_BYTES
        records = 1 << 20  # what a manager remembers is charged, too
        assert manager.charged() - charged <= 1.05 * differ + tensors * LEAF_BYTES + records
        assert second.loaded["outputs"] == plain_tune.loaded["outputs"] != of_base
        # What it consists of outlives the process that has put most of it, and the manager.
        third = engines.start(tune, config, **options)
        assert third.report["leaf_shared_bytes"] == third.report["private_bytes"] == 0
        first.end()
        manager.kill()
        assert second.outputs() == third.loaded["outputs"] == plain_tune.loaded["outputs"]


@pytest.mark.vllm
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("case", [*LLAMAS, "ten more rows"])
def test_vllm_reads_only_what_changed_of_a_known_fine_tune(
    case: str, llama: Path, tmp_path: Path, opened: list[Any]
) -> None:
    change, common = LLAMAS.get(case, (grown_by_ten, 32 * MIB))
    tune = change(llama, tmp_path / "tune")
    shared.quiet(llama, tune)
    opened.append(engines.sharing(tune, cpu_weights="plain"))
    expected = plain.outputs(opened[-1])
    engines.drop(opened.pop())
    gc.collect()
    first = engines.sharing(llama, cpu_weights="plain")
    opened.append(first)
    differ, _ = changed_leaves(llama, tune)
    for audited in ({}, {"audit": 1.0}, {"verify_bytes": True}):
        second = engines.sharing(tune, cpu_weights="plain", **audited)
        opened.append(second)
        last = engines.last_report()
        assert last.known
        assert common <= last.leaf_shared_bytes < common + len(LLAMAS) * LEAF_BYTES
        assert not last.collisions
        if audited:
            assert last.bytes_read == checkpoints.nbytes(tune) + differ
        else:
            assert 0 < last.bytes_read <= 1.05 * differ
        theirs = dict(plain.model(first).named_parameters())
        found = sum(
            shared_bytes(mine, theirs[n]) for n, mine in plain.model(second).named_parameters()
        )
        assert found == last.shared_bytes + last.leaf_shared_bytes
        assert plain.outputs(second) == expected
        assert verify().ok
        engines.drop(opened.pop())
        del second, theirs
        gc.collect()


@pytest.mark.vllm
@pytest.mark.usefixtures("warm")
def test_a_wrong_hint_of_a_leaf_is_noticed(
    llama: Path, tmp_path: Path, opened: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The leaf is not read, for the base has it; but the whole is hashed all the same."""
    tune = checkpoints.mapped(llama, tmp_path / "tune", _with_other_rows)
    shared.quiet(llama, tune)
    expected = _outputs_of(tune, opened)  # from now on its digests are known
    first = engines.sharing(llama, cpu_weights="plain")
    opened.append(first)
    [name] = checkpoints.different(llama, tune)
    _forge(tune, _leaves_of(tune, name)[1], _leaves_of(llama, name)[1])
    with caplog.at_level(logging.WARNING, "tensor_dedup"):
        opened.append(engines.sharing(tune, cpu_weights="plain"))
    assert "loading again without hints" in caplog.text
    assert engines.last_report().leaf_shared_bytes >= 8 * MIB
    assert plain.outputs(opened[-1]) == expected
    assert verify().ok


def _with_other_rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Change the embedding in its second leaf and in its fourth, of which a row is 2 KiB."""
    if "embed_tokens" in name:
        tensor = tensor.clone()
        tensor[1100] += 1
        tensor[3500] += 1
    return tensor


@pytest.mark.vllm
@pytest.mark.usefixtures("warm")
def test_an_audit_finds_that_others_do_not_have_what_they_should(
    llama: Path, tmp_path: Path, opened: list[Any]
) -> None:
    """As if two digests collided: k is said to be there, and is read by nobody."""
    change = scaled("layers.1.self_attn.k_proj", "layers.1.self_attn.v_proj")
    tune = change(llama, tmp_path / "tune")
    shared.quiet(llama, tune)
    expected = _outputs_of(tune, opened)
    first = engines.sharing(llama, cpu_weights="plain")
    opened.append(first)
    key = "model.layers.1.self_attn.k_proj.weight"
    [(fused, contents)] = [
        (resident, contents)
        for resident, contents in leaves._contents.items()
        if _whole(llama, key)[1] in {content.digest for content in contents}
    ]
    q, k, v = contents
    lie = k._replace(digest=_whole(tune, key)[1])
    leaves.note_contents(fused, [q, lie, v])
    wrong = engines.sharing(tune, cpu_weights="plain")
    opened.append(wrong)
    assert engines.last_report().leaf_shared_bytes == 16 * MIB  # q and k, and nobody can tell
    assert plain.outputs(wrong) != expected
    engines.drop(opened.pop())
    del wrong
    gc.collect()
    with pytest.raises(AuditError, match="qkv_proj"):
        engines.sharing(tune, cpu_weights="plain", audit=1.0)
    gc.collect()
    right = engines.sharing(tune, cpu_weights="plain", verify_bytes=True)
    opened.append(right)
    assert engines.last_report().collisions == 1
    assert plain.outputs(right) == expected
    assert verify().ok
    del right


Place = tuple[int, int]


def _outputs_of(path: Path, opened: list[Any]) -> Any:
    opened.append(engines.sharing(path, cpu_weights="plain"))
    found = plain.outputs(opened[-1])
    engines.drop(opened.pop())
    gc.collect()
    return found


def _whole(path: Path, name: str) -> tuple[Place, str]:
    """Where a tensor is in its file, and its digest."""
    file = path / checkpoints.WEIGHTS
    [spec] = [spec for spec in read_header(file).tensors if spec.name == name]
    content = file.read_bytes()[spec.start : spec.start + spec.nbytes]
    return (spec.start, spec.nbytes), digest(content)


def _leaves_of(path: Path, name: str) -> list[tuple[Place, str]]:
    content = (path / checkpoints.WEIGHTS).read_bytes()
    (start, nbytes), _ = _whole(path, name)
    return [
        ((at, size), digest(content[at : at + size])) for at, size in leaf_places(start, nbytes)
    ]


def _forge(path: Path, mine: tuple[Place, str], theirs: tuple[Place, str]) -> None:
    """Have a hint say that a range of a file is what another's is."""
    index, (place, true) = HintIndex(), mine
    with hinted.opened(path / checkpoints.WEIGHTS) as fd:
        before = FileIdentity.of(fd)
        assert index.lookup(fd, "blake3")[place] == true != theirs[1]
        assert index.record(fd, before, hinted.old_enough(before), "blake3", {place: theirs[1]})


def changed_leaves(base: Path, tune: Path) -> tuple[int, int]:
    """How many bytes the leaves have in which two checkpoints differ, and how many tensors do."""
    old, new = checkpoints.tensors(base), checkpoints.tensors(tune)
    names = checkpoints.different(base, tune)
    total = 0
    for name in names:
        mine, theirs = tensor_bytes(new[name]), tensor_bytes(old[name])
        for start in range(0, len(mine), LEAF_BYTES):
            leaf = mine[start : start + LEAF_BYTES]
            total += len(leaf) if leaf != theirs[start : start + LEAF_BYTES] else 0
    return total, len(names)


@pytest.mark.vllm
@pytest.mark.usefixtures("warm")
def test_vllm_goes_on_without_its_base_and_with_memory_of_its_own(
    llama: Path, tmp_path: Path, opened: list[Any]
) -> None:
    tune = scaled("layers.1.self_attn.q_proj")(llama, tmp_path / "tune")
    with plain.kept_as("plain"):
        opened.append(plain.engine(tune))
        expected = plain.outputs(opened[-1])
        engines.drop(opened.pop())
    first = engines.sharing(llama, cpu_weights="plain")
    second = engines.sharing(tune, cpu_weights="plain", audit=1.0, verify_bytes=True)
    opened += [first, second]
    assert engines.last_report().leaf_shared_bytes
    third = engines.sharing(tune, cpu_weights="plain", audit=1.0)
    opened.append(third)
    last = engines.last_report()
    assert last.tensors_shared == last.tensors_total  # the second's, with its leaves
    assert last.leaf_shared_bytes == 0
    opened.remove(first)
    engines.drop(first)
    del first
    gc.collect()
    assert plain.outputs(second) == expected
    assert unshare(plain.model(second))
    assert not any(is_mapped(each) for each in plain.model(second).parameters())
    assert plain.outputs(second) == expected
    model: Any = plain.model(second)
    model.load_weights(iter(checkpoints.tensors(llama).items()))
    assert plain.outputs(second) != expected
    assert plain.outputs(third) == expected
    del second, third


def test_transformers_keeps_what_grew(llama: Path, tmp_path: Path) -> None:
    tune = grown(llama, tmp_path / "tune")
    _assert_costs_what_changed_in_transformers(llama, tune, 32 * MIB)


def test_transformers_keeps_what_changed_of_tensors_of_8_mib(llama: Path, tmp_path: Path) -> None:
    """Each has a slab of its own: for six of them nobody would keep 64 MiB."""

    def last_row_changed(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if "self_attn" in name:
            tensor = tensor.clone()
            tensor[-1] *= 1.5
        return tensor

    tune = checkpoints.mapped(llama, tmp_path / "tune", last_row_changed)
    _assert_costs_what_changed_in_transformers(llama, tune, 8 * 6 * MIB)


@pytest.mark.long
def test_transformers_keeps_one_expert_of_a_stack(mixture: Path, tmp_path: Path) -> None:
    tune = scaled("experts.5.")(mixture, tmp_path / "tune")
    _assert_costs_what_changed_in_transformers(mixture, tune, 92 * MIB)


@pytest.mark.parametrize(
    ("change", "common"), [(first_third_changed, 16 * MIB), (first_and_last_third_changed, 8 * MIB)]
)
def test_transformers_keeps_k_and_v_of_what_files_hold_as_one(
    fused: Path, tmp_path: Path, change: Any, common: int
) -> None:
    """`q_proj` only, and q and v as a merged LoRA changes them."""
    tune = checkpoints.mapped(fused, tmp_path / "tune", change)
    _assert_costs_what_changed_in_transformers(fused, tune, common)


@pytest.mark.parametrize("case", ["grown", "fused"])
@pytest.mark.parametrize("managed", [False, True], ids=["alone", "managed"])
def test_transformers_reads_only_what_changed_of_a_known_fine_tune(
    case: str, managed: bool, llama: Path, fused: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    base = llama if case == "grown" else fused
    if case == "grown":
        tune = grown(llama, tmp_path / "tune")
    else:
        tune = checkpoints.mapped(fused, tmp_path / "tune", first_and_last_third_changed)
    shared.quiet(base, tune)
    fresh.call_forked(known_in_transformers, base, tune, managed)


def known_in_transformers(base: Path, tune: Path, managed: bool) -> None:
    """In a process that holds nothing of other tests."""
    expected = [_logits(_load(path)) for path in (base, tune)]
    differ, _ = changed_leaves(base, tune)
    with managers.running(tune.parent) if managed else nullcontext() as manager:
        config: dict[str, Any] = {"memory_manager": str(manager.socket)} if manager else {}
        with enable():
            for path in (base, tune):  # from now on their digests are known
                _load(path)
        gc.collect()
        assert not registry.residents()
        with enable(config):
            first = _load(base)
        theirs = dict(first.named_parameters())
        for audited in ({}, {"audit": 1.0}, {"verify_bytes": True}):
            with file_bytes_read() as read, enable({**config, **audited}):
                second = _load(tune)
            last = report().models[-1]
            assert last.known
            assert last.leaf_shared_bytes >= 8 * MIB - 2 * PAGE  # those at the seams are copied
            assert 0 < sum(read) <= 1.05 * differ
            assert last.collisions == 0
            found = sum(
                shared_bytes(mine, theirs[name]) for name, mine in second.named_parameters()
            )
            assert found == last.shared_bytes + last.leaf_shared_bytes
            assert torch.equal(_logits(first), expected[0])
            assert torch.equal(_logits(second), expected[1])
            assert verify().ok
            del second
            gc.collect()
            if manager:
                Admin(manager.socket).evict(str(tune))


@contextmanager
def file_bytes_read() -> Iterator[list[int]]:
    """How many bytes are read of files to be hashed and copied, read by read."""
    original, found = FileRange.read, list[int]()

    def read(self: FileRange, into: memoryview, offset: int) -> None:
        found.append(len(into))
        original(self, into, offset)

    with mock.patch.object(FileRange, "read", read):
        yield found


def test_a_wrong_hint_of_a_leaf_is_noticed_by_transformers(fused: Path, tmp_path: Path) -> None:
    """The leaf is not read, for the base has it; but the whole is hashed all the same."""
    tune = checkpoints.mapped(fused, tmp_path / "tune", first_third_changed)
    shared.quiet(fused, tune)
    expected = _logits(_load(tune))
    with enable():
        for path in (fused, tune):
            _load(path)
    gc.collect()
    [name] = checkpoints.different(fused, tune)
    _forge(tune, _leaves_of(tune, name)[1], _leaves_of(fused, name)[1])
    with enable():
        first = _load(fused)
        second = _load(tune)
    last = report().models[-1]
    assert not last.known  # it was loaded again without hints
    assert last.leaf_shared_bytes >= 8 * MIB
    assert torch.equal(_logits(second), expected)
    assert verify().ok
    assert first is not None


def test_transformers_near_the_limit_of_mappings_keeps_private_what_lies_in_parts(
    fused: Path, tmp_path: Path
) -> None:
    tune = checkpoints.mapped(fused, tmp_path / "tune", first_third_changed)
    expected = _logits(_load(tune))
    with enable():
        held = [_load(fused), _load(tune)]
    assert report().models[-1].leaf_shared_bytes  # or nothing is tested here
    with near_the_limit_of_mappings():
        for config in ({}, {"audit": 1.0}, {"verify_bytes": True}):
            with enable(config):
                again = _load(tune)
            last = report().models[-1]
            assert torch.equal(_logits(again), expected)
            assert last.collisions == 0
            reasons = dict(last.skipped)
            assert any("max_map_count" in reason for reason in reasons.values())
            assert last.shared_bytes  # what lies as one is mapped as ever
        assert verify().ok
    assert held


def test_transformers_keeps_k_and_v_through_a_manager(fused: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    tune = checkpoints.mapped(fused, tmp_path / "tune", first_third_changed)
    fresh.call_forked(managed_in_transformers, fused, tune)


def managed_in_transformers(base: Path, tune: Path) -> None:
    """In a process that holds nothing of other tests."""
    expected = [_logits(_load(path)) for path in (base, tune)]
    with managers.running(tune.parent) as manager:
        config: dict[str, Any] = {"memory_manager": str(manager.socket)}
        with enable({**config, "audit": 1.0, "verify_bytes": True}):
            first = _load(base)
            charged = manager.overview().totals.charged
            second = _load(tune)
            third = _load(tune)
        _, last, again = report().models
        assert last.leaf_shared_bytes == 16 * MIB
        assert (again.private_bytes, again.collisions) == (0, 0)
        more = manager.overview().totals.charged - charged
        assert last.private_bytes - 16 * MIB <= more <= last.private_bytes - 15 * MIB
        found = sum(
            shared_bytes(mine, theirs)
            for mine, theirs in zip(second.parameters(), first.parameters(), strict=True)
        )
        assert found == last.shared_bytes + last.leaf_shared_bytes
        with torch.no_grad():
            for each in third.parameters():
                each.zero_()
        assert torch.equal(_logits(first), expected[0])
        assert torch.equal(_logits(second), expected[1])
        assert verify().ok
        manager.kill()
        assert torch.equal(_logits(second), expected[1])


def _assert_costs_what_changed_in_transformers(base: Path, tune: Path, common: int) -> None:
    _assert_costs_what_changed_after_load(base, tune, common, _load, _logits)


def _assert_costs_what_changed_after_load(
    base: Path,
    tune: Path,
    common: int,
    load: Callable[[Path], Any],
    answer: Callable[[Any], torch.Tensor],
) -> None:
    expected = [answer(load(path)) for path in (base, tune)]
    with enable():
        first = load(base)
        before = slab_pss(first)
        second = load(tune)
    more = slab_pss(first, second) - before
    differ, tensors = changed_bytes(base, tune)
    last = report().models[-1]
    assert all(is_mapped(each) for each in second.parameters())
    # Tensors of files may begin within a page, and the pages at a seam are the fine-tune's.
    pages = 2 * tensors * PAGE
    assert common - pages <= last.leaf_shared_bytes <= common
    assert 0.95 * (last.private_bytes - common) <= more <= 1.05 * differ + tensors * LEAF_BYTES
    found = sum(
        shared_bytes(mine, theirs)
        for mine, theirs in zip(second.parameters(), first.parameters(), strict=True)
    )
    assert found == last.shared_bytes + last.leaf_shared_bytes
    assert torch.equal(answer(first), expected[0])
    assert torch.equal(answer(second), expected[1])
    assert verify().ok


def test_a_unet_keeps_the_half_of_a_stacked_matrix_of_one_block(unet: Path, tmp_path: Path) -> None:
    """GEGLU stacks the rows of the gate on those of what it gates."""
    tune = checkpoints.mapped(unet, tmp_path / "tune", gate_changed)
    _assert_costs_what_changed_after_load(unet, tune, 8 * MIB, _load_unet, _denoised)


def gate_changed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Change the gates of the first transformer block."""
    if not name.endswith("down_blocks.1.attentions.0.transformer_blocks.0.ff.net.0.proj.weight"):
        return tensor
    tensor = tensor.clone()
    tensor[: len(tensor) // 2] *= 1.5
    return tensor


def _load_unet(path: Path) -> Any:
    kind: Any = diffusers.UNet2DConditionModel
    return kind.from_pretrained(path, torch_dtype=torch.bfloat16)


def _denoised(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    noise, text = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((1, 4, 4, 4), (1, 7, 32))
    )
    with torch.no_grad():
        result: torch.Tensor = model(noise, 3, text).sample
    return result


def _load(path: Path) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.arange(8)[None]).logits
    return result
