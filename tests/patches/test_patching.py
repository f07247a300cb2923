"""The argument patches can be applied again, and step back where vLLM is another one."""

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.engine import arg_utils
from vllm.utils import argparse_utils

from tensor_dedup.errors import ConfigError, UnsupportedError
from tensor_dedup.patches.vllm import arguments, seams

# Any: what is patched into vLLM cannot be in its annotations.
EngineArgs: Any = arg_utils.EngineArgs
AsyncEngineArgs: Any = arg_utils.AsyncEngineArgs
FlexibleArgumentParser: Any = argparse_utils.FlexibleArgumentParser


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    unpatch()
    seams.usable.cache_clear()
    arguments.patch(arg_utils)


def unpatch() -> None:
    """Give vllm.engine.arg_utils its own functions back."""
    for cls in (EngineArgs, AsyncEngineArgs):
        cls.__init__ = getattr(cls.__init__, "__wrapped__", cls.__init__)
    add, make = EngineArgs.add_cli_args, EngineArgs.from_cli_args.__func__
    build = EngineArgs.create_engine_config
    EngineArgs.add_cli_args = staticmethod(getattr(add, "__wrapped__", add))
    EngineArgs.from_cli_args = classmethod(getattr(make, "__wrapped__", make))
    EngineArgs.create_engine_config = getattr(build, "__wrapped__", build)


def functions() -> list[object]:
    return [
        EngineArgs.__init__,
        AsyncEngineArgs.__init__,
        EngineArgs.add_cli_args,
        EngineArgs.from_cli_args.__func__,
    ]


def test_they_can_be_undone_and_applied_again(model: str) -> None:
    patched = functions()
    arguments.patch(arg_utils)
    assert functions() == patched

    unpatch()
    unpatch()

    assert not set(functions()) & set(patched)
    with pytest.raises(TypeError, match="tensor_dedup"):
        EngineArgs(model=model, tensor_dedup=True)
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(["--tensor-dedup"])


def test_on_another_vllm_the_argument_loads_plainly_and_the_flag_is_absent(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    model: str,
) -> None:
    plain = EngineArgs(model=model)
    assert EngineArgs(model=model, tensor_dedup=True) != plain
    unpatch()
    changed = seams.VllmSeam(
        "vllm.engine.arg_utils:EngineArgs.from_cli_args", "arguments", "a test", "(args, env)"
    )
    monkeypatch.setattr(seams, "SEAMS", (changed,))
    seams.usable.cache_clear()

    arguments.patch(arg_utils)

    assert EngineArgs(model=model) == EngineArgs(model=model, tensor_dedup=False) == plain
    assert not caplog.records  # nobody has asked for it
    for cls in (EngineArgs, AsyncEngineArgs):
        assert cls(model=model, tensor_dedup=True) == cls(model=model)
    [said] = caplog.records
    assert "from_cli_args is (args)" in said.getMessage()
    assert seams.WITHOUT["arguments"] in said.getMessage()
    with pytest.raises(ConfigError, match="hash_algorithm"):
        EngineArgs(model=model, tensor_dedup={"hash_algoritm": "blake3"})
    with pytest.raises(UnsupportedError, match=r"from_cli_args is \(args\).*install vLLM"):
        EngineArgs(model="store://tiny", tensor_dedup=True)
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(["--tensor-dedup"])
    assert "unrecognized arguments" in capsys.readouterr().err
