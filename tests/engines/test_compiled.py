"""Compiled models: they share as others do, and nothing moves under the compiled code.

`VLLM_CPU_CI_ENV` makes vLLM trace with Dynamo and run what it traced as it is, where it would
otherwise spend half a minute in a C++ compiler; the long form lets it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers as hf

from models import tiny_checkpoints as checkpoints
from processes import fresh
from tensor_dedup import unshare, verify
from vllm_runs import engines, plain, shared

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.vllm

COMPILED: dict[str, Any] = {"enforce_eager": False}
# Tracing takes a second for each layer.
_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_models_share_and_keep_their_addresses(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_CI_ENV", str(int(backend == "eager")))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))

    assert fresh.call_forked(compiled, tmp_path) == backend


def compiled(root: Path) -> str:
    """The life of compiled models, in a process that compiles nothing else; the backend's name."""
    base = _make(root / "base")
    other = checkpoints.same_header(base, root / "other")
    engines.warm_up(base)
    for policy in ("packed", "plain"):
        with plain.kept_as(policy):
            expected, backend = _plainly(base, other)
        _live(base, other, policy, expected)
    return backend


def _make(path: Path) -> Path:
    torch.manual_seed(0)
    kind: Any = hf.LlamaForCausalLM
    model = kind(hf.LlamaConfig(**_SIZES)).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # or what is most likely would hardly depend on the weights
    model.save_pretrained(path)
    return path


def _plainly(base: Path, other: Path) -> tuple[list[Any], str]:
    """What a plain compiled engine answers: loaded, reloaded, and back again."""
    llm = plain.engine(base, **COMPILED)
    found = [plain.outputs(llm)]
    assert _is_compiled(llm)
    for path in (other, base):
        shared.reload(llm, path)
        found.append(plain.outputs(llm))
    assert found[0] != found[1]
    plain.let_go(llm)
    return found, str(llm.llm_engine.vllm_config.compilation_config.backend)


def _is_compiled(llm: "LLM") -> bool:
    inner: Any = plain.model(llm).get_submodule("model")
    return not inner.do_not_compile and inner.compiled


def _addresses(llm: "LLM") -> dict[str, int]:
    return {name: each.data_ptr() for name, each in shared.parameters(llm).items()}


def _live(base: Path, other: Path, policy: str, expected: list[Any]) -> None:
    config = {"cpu_weights": policy}
    mine, neighbour = (plain.engine(base, tensor_dedup=config, **COMPILED) for _ in range(2))
    loaded = _addresses(mine)
    assert shared.everything(mine, neighbour)
    assert plain.outputs(mine) == plain.outputs(neighbour) == expected[0]
    assert _is_compiled(mine)
    assert _is_compiled(neighbour)
    assert shared.everything(mine, neighbour)
    assert _addresses(mine) == loaded

    # Unshared where it is: what was compiled reads the same places, and sees what is written.
    assert unshare(mine) == sum(each.nbytes for each in shared.parameters(mine).values())
    assert not shared.shared_parameters(mine, neighbour)
    assert _addresses(mine) == loaded
    assert plain.outputs(mine) == expected[0]
    _write(mine)
    assert plain.outputs(mine) != expected[0]
    assert plain.outputs(neighbour) == expected[0]

    for path, answers in zip((other, base), expected[1:], strict=True):
        shared.reload(mine, path)
        assert _addresses(mine) == loaded
        assert plain.outputs(mine) == answers
        assert plain.outputs(neighbour) == expected[0]
    # And a reload of what is still shared.
    before = _addresses(neighbour)
    shared.reload(neighbour, other)
    assert _addresses(neighbour) == before
    assert plain.outputs(neighbour) == expected[1]
    assert verify().ok
    for llm in (mine, neighbour):
        plain.let_go(llm)


def _write(llm: "LLM") -> None:
    with torch.no_grad():
        for each in shared.parameters(llm).values():
            each.mul_(1.25)
