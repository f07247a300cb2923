"""The argument patches can be applied again, and step back where vLLM is another one."""

from collections.abc import Iterator
from typing import Any

import pytest
from vllm import envs
from vllm.engine import arg_utils
from vllm.plugins import DEFAULT_PLUGINS_GROUP, PLATFORM_PLUGINS_GROUP, load_plugins_by_group
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


@pytest.mark.parametrize(("named", "found"), [(None, True), ("", False), ("tensor_dedup", True)])
def test_vllm_calls_the_plug_ins_unless_others_are_named(
    named: str | None, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs.disable_envs_cache()  # of an engine in this process
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if named is not None:
        monkeypatch.setenv("VLLM_PLUGINS", named)
    for group in (DEFAULT_PLUGINS_GROUP, PLATFORM_PLUGINS_GROUP):
        assert ("tensor_dedup" in load_plugins_by_group(group)) == found


def test_arguments_that_do_not_ask_stay_as_they_are(model: str) -> None:
    plain = EngineArgs.__init__.__wrapped__
    ours, theirs = EngineArgs(model=model), EngineArgs.__new__(EngineArgs)
    plain(theirs, model=model)
    assert vars(ours) == vars(theirs)
    assert ours.load_format == "auto"
