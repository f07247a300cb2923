"""Models whose tensors differ in part: what is equal in them is one memory, leaf by leaf.

The parts that do not change are at least 8 MiB each, or nothing would be proved.
"""

import gc
import logging
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from manager_runs import managers
from models import quantised
from models import tiny_checkpoints as checkpoints
from models.leaf_tunes import (
    MIB,
    Change,
    adapted,
    changed_bytes,
    changed_leaves,
    forge,
    grown,
    grown_by_ten,
    leaves_of,
    near_the_limit_of_mappings,
    save_llama,
    save_mixture,
    scaled,
    slab_pss,
    whole,
)
from processes import fresh
from tensor_dedup import Store, shared_bytes, unshare, verify
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.errors import AuditError
from tensor_dedup.loader.residents import leaves
from tensor_dedup.loader.unsharing.lookup import is_mapped
from vllm_runs import engines, fleet, plain, shared


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("wide") / "base")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixture(tmp_path_factory.mktemp("experts") / "base")


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


LLAMAS: dict[str, tuple[Change, int]] = {
    "a grown vocabulary": (grown, 32 * MIB),
    "q_proj": (scaled("layers.1.self_attn.q_proj"), 16 * MIB),
    "merged LoRA on q and v": (adapted, 8 * MIB),
}


AUDITS: tuple[dict[str, Any], ...] = ({"audit": 1.0}, {"verify_bytes": True})


def some(cases: Iterable[str], *short: str) -> list[Any]:
    """All of them in long runs, these in any."""
    marks = {True: [], False: [pytest.mark.long]}
    return [pytest.param(case, marks=marks[case in short]) for case in cases]


@pytest.mark.vllm
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("case", some(LLAMAS, "merged LoRA on q and v"))
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
        third = engines.sharing(tune, cpu_weights="plain", **config)
        expected = plain.outputs(third)
        engines.drop(third)
        with near_the_limit_of_mappings():
            for audited in ({}, {"audit": 1.0}, {"verify_bytes": True}):
                again = engines.sharing(tune, cpu_weights="plain", **config, **audited)
                last = engines.last_report()
                assert last.private_bytes
                assert "max_map_count" in dict(last.skipped).popitem()[1]
                assert plain.outputs(again) == expected
                engines.drop(again)
            assert verify().ok


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
    options: dict[str, Any] = (
        {"worker_extension_cls": "vllm_runs.with_kernels.Worker"} if kernels else {}
    )
    unpacked = "vllm_runs.unpacked_with_kernels.Worker" if kernels else "vllm_runs.unpacked.Worker"
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
@pytest.mark.parametrize(
    ("case", "audits"),
    [
        ("merged LoRA on q and v", AUDITS),
        ("ten more rows", ()),
        *(
            pytest.param(case, AUDITS, marks=pytest.mark.long)
            for case in (*LLAMAS, "ten more rows")
            if case != "merged LoRA on q and v"
        ),
    ],
)
def test_vllm_reads_only_what_changed_of_a_known_fine_tune(
    case: str, audits: tuple[dict[str, Any], ...], llama: Path, tmp_path: Path, opened: list[Any]
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
    for audited in ({}, *audits):
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
def test_vllm_reads_only_what_changed_of_a_stored_fine_tune(
    llama: Path, tmp_path: Path, opened: list[Any]
) -> None:
    tune = grown(llama, tmp_path / "tune")
    expected = _outputs_of(tune, opened)
    config: dict[str, Any] = {"store": str(tmp_path / "store"), "cpu_weights": "plain"}
    with Store.open(config["store"]) as store:
        store.import_(llama, "base")
        store.import_(tune, "tune")
    opened.append(engines.sharing("store://base", **config))
    opened.append(engines.sharing("store://tune", **config))
    last = engines.last_report()
    assert last.known
    assert last.leaf_shared_bytes == 32 * MIB
    assert 0 < last.bytes_read <= 1.05 * changed_leaves(llama, tune)[0]
    assert plain.outputs(opened[-1]) == expected
    assert verify().ok


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
    forge(tune, leaves_of(tune, name)[1], leaves_of(llama, name)[1])
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
        if whole(llama, key)[1] in {content.digest for content in contents}
    ]
    q, k, v = contents
    lie = k._replace(digest=whole(tune, key)[1])
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


def _outputs_of(path: Path, opened: list[Any]) -> Any:
    opened.append(engines.sharing(path, cpu_weights="plain"))
    found = plain.outputs(opened[-1])
    engines.drop(opened.pop())
    gc.collect()
    return found


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
