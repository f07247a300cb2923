"""Transformers and Diffusers: what is equal in tensors that differ in part is one memory."""

import gc
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
import transformers as hf

from manager_runs import managers
from models import tiny_checkpoints as checkpoints
from models.leaf_tunes import (
    FUSED,
    MIB,
    changed_leaves,
    first_and_last_third_changed,
    first_third_changed,
    forge,
    grown,
    leaves_of,
    near_the_limit_of_mappings,
    save_llama,
    save_mixture,
    scaled,
    slab_pss,
)
from processes import fresh, process_state
from tensor_dedup import Store, enable, report, shared_bytes, verify
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.loader.post_load.mapped_files import FileRange
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.unsharing.lookup import is_mapped
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.protocol.layout import PAGE
from vllm_runs import shared


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("wide") / "base")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixture(tmp_path_factory.mktemp("experts") / "base")


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fused") / "base"
    make: Any = hf.Phi3ForCausalLM
    return checkpoints.save(make(hf.Phi3Config(**FUSED)), folder)


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


def test_tensors_of_8_mib_have_slabs_together_where_descriptors_are_few(llama: Path) -> None:
    """As in a model of tens of thousands of experts: each slab is a descriptor."""
    now, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    slabs = []
    for limit in (now, 4 * len(process_state.descriptors())):  # a quarter is in use
        with process_state.descriptor_limit(limit), enable():
            model = _load(llama)
        assert all(is_mapped(each) for each in model.parameters())
        slabs.append(process_state.open_slabs().total())
        del model
        gc.collect()
    plenty, few = slabs
    assert 1 <= few < plenty


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


@pytest.mark.parametrize(
    ("managed", "case"),
    [
        pytest.param(False, "fused", id="alone-fused"),
        pytest.param(True, "grown", id="managed-grown"),
        pytest.param(False, "grown", id="alone-grown", marks=pytest.mark.long),
        pytest.param(True, "fused", id="managed-fused", marks=pytest.mark.long),
    ],
)
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


@pytest.mark.parametrize(
    "managed",
    [pytest.param(False, id="alone", marks=pytest.mark.long), pytest.param(True, id="managed")],
)
def test_transformers_reads_only_what_changed_of_a_stored_fine_tune(
    managed: bool, llama: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    fresh.call_forked(stored_in_transformers, llama, grown(llama, tmp_path / "tune"), managed)


def stored_in_transformers(base: Path, tune: Path, managed: bool) -> None:
    """In a process that holds nothing of other tests."""
    expected = [_logits(_load(path)) for path in (base, tune)]
    differ, _ = changed_leaves(base, tune)
    config: dict[str, Any] = {"store": str(tune.parent / "store")}
    with Store.open(config["store"]) as store:
        store.import_(base, "base")
        store.import_(tune, "tune")
    with managers.running(tune.parent) if managed else nullcontext() as manager:
        if manager:
            config["memory_manager"] = str(manager.socket)
        with enable(config):
            first = _load("store://base")
        theirs = dict(first.named_parameters())
        for audited in ({}, {"audit": 1.0}, {"verify_bytes": True}):
            with enable({**config, **audited}):
                second = _load("store://tune")
            last = report().models[-1]
            assert last.known
            assert last.leaf_shared_bytes >= 32 * MIB - 2 * PAGE
            assert last.bytes_materialised == last.private_bytes - last.leaf_shared_bytes
            assert last.collisions == 0
            if audited:
                assert last.bytes_read == checkpoints.nbytes(tune) + differ
            else:
                assert 0 < last.bytes_read <= 1.05 * differ
            found = sum(
                shared_bytes(mine, theirs[name]) for name, mine in second.named_parameters()
            )
            assert found == last.shared_bytes + last.leaf_shared_bytes
            assert torch.equal(_logits(first), expected[0])
            assert torch.equal(_logits(second), expected[1])
            assert verify().ok
            with near_the_limit_of_mappings(), enable({**config, **audited}):
                third = _load("store://tune")
            assert torch.equal(_logits(third), expected[1])
            del second, third
            gc.collect()
            if manager:
                Admin(manager.socket).evict("store://tune")


def test_near_the_limit_of_mappings_a_cast_of_parts_is_the_model_s_own(
    llama: Path, tmp_path: Path
) -> None:
    tune = grown(llama, tmp_path / "tune")
    with enable():
        base, first, second = _load(llama), _load(tune), _load(tune)
        base.float()
        first.float()
        mine = dict(first.named_parameters())
        shared = sum(shared_bytes(mine[n], each) for n, each in base.named_parameters())
        assert shared > checkpoints.nbytes(llama)  # the embedding lies in parts
        with near_the_limit_of_mappings():
            second.float()
    assert torch.equal(_logits(second), _logits(first))
    assert verify().ok


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
    forge(tune, leaves_of(tune, name)[1], leaves_of(fused, name)[1])
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
    differ, tensors = changed_leaves(base, tune)
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


def _load(path: Path | str) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.arange(8)[None]).logits
    return result
