"""What older versions of vLLM do otherwise, shown with what the installed one has."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from models import tiny_checkpoints as checkpoints
from processes import fresh
from tensor_dedup.patches.vllm import run, seams, versions
from tensor_dedup.patches.vllm.kernels import packed_linear
from vllm_runs import engines, plain

Linear = Callable[..., torch.Tensor]


def with_a_copy_of_the_bias(packed_weight: torch.Tensor, bias_f32: torch.Tensor | None) -> Linear:
    """As vLLM 0.28 packs for AMX."""
    return lambda x, _, bias: torch.nn.functional.linear(
        x, packed_weight, bias_f32 if bias is not None else None
    )


def without(packed_weight: torch.Tensor, N: int) -> Linear:
    """As vLLM 0.32 packs for AMX."""
    return lambda x, _, bias: torch.nn.functional.linear(x, packed_weight[:N], bias)


def test_a_packed_function_that_holds_a_bias_belongs_to_its_layer_alone() -> None:
    weight, layer = torch.ones(4, 4), nn.Module()
    linear: Any = without(weight, 4)
    layer.cpu_linear = linear
    assert packed_linear(layer) is linear
    for bias in (torch.ones(4), None):
        linear = with_a_copy_of_the_bias(weight, bias)
        layer.cpu_linear = linear
        assert packed_linear(layer) is None


def test_a_weight_that_is_to_stay_plain_is_not_packed() -> None:
    """As a reload asks for it in vLLM 0.28, whose own function does not know the switch."""
    packed: list[nn.Module] = []
    dispatch = versions.unless_kept_plain(lambda layer, remove_weight: packed.append(layer))
    plainly, other = nn.Module(), nn.Module()
    setattr(plainly, versions.KEEP_PLAIN, True)
    dispatch(plainly, remove_weight=True)
    dispatch(other, remove_weight=True)
    assert packed == [other]
    assert plainly.cpu_linear is torch.nn.functional.linear


def test_what_older_versions_lack_is_in_the_table_as_such() -> None:
    optional = {each.target.rpartition(":")[2] for each in seams.SEAMS if each.optional}
    assert {"weights_already_processed", "_get_untied_lm_head"} <= optional
    for each in seams.SEAMS:
        gone = dataclasses.replace(each, target="vllm.no_such_module:nothing")
        assert (seams.compare(gone) is None) == each.optional


def test_a_vllm_that_asks_for_no_number_plans_for_a_gpu_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As 0.26 and 0.28, which count free memory only: no warning with every load."""
    from vllm.v1.worker import utils

    def request_memory(init_snapshot: Any, cache_config: Any) -> int:
        return 0

    def moved(init_snapshot: Any, cache_config: Any, *, moved: int) -> int:
        return 0

    monkeypatch.setattr(utils, "request_memory", request_memory)
    assert seams.check("profile") == ()
    monkeypatch.setattr(utils, "request_memory", moved)
    assert len(seams.check("profile")) == 1


@pytest.mark.vllm
def test_models_are_shared_without_what_older_versions_lack(tmp_path: Path) -> None:
    fresh.call_forked(share_as_in_an_older_version, tmp_path)


def share_as_in_an_older_version(root: Path) -> None:
    """In a process of its own, mixtures of experts first: vLLM makes their groups only then.

    Layers of experts are processed again and shared by content, so they are read again too.
    """
    engines.warm_up(checkpoints.make("qwen2_moe", root).base)
    with (
        mock.patch.object(versions, "weights_already_processed", None),
        mock.patch.object(run, "untied_lm_head", None),
    ):
        for name in ("qwen2_moe", "llama_tied"):
            pair = checkpoints.make(name, root)
            llm = plain.engine(pair.fine_tune)
            expected = plain.outputs(llm)
            engines.drop(llm)
            first, second = engines.sharing(pair.base), engines.sharing(pair.base)
            alone = engines.last_report()
            third = engines.sharing(pair.fine_tune)
            report = engines.last_report()

            assert alone.skipped == []
            assert alone.shared_bytes == alone.total_bytes > 0
            assert 0 < report.shared_bytes < report.total_bytes
            assert plain.outputs(third) == expected
            engines.drop(first, second, third)
