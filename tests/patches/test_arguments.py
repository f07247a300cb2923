"""`tensor_dedup=` on vLLM's real argument classes, in this process."""

import dataclasses
import json
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm.engine import arg_utils
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum

from tensor_dedup.config import TensorDedupConfig
from tensor_dedup.errors import ConfigError
from tensor_dedup.loader.report import REPORT_DIR_VARIABLE
from tensor_dedup.patches.vllm import arguments
from tensor_dedup.patches.vllm.load_formats import KEY, LOAD_FORMAT, SHARED

BLAKE2 = {"hash_algorithm": "blake2b"}
# Any: what is patched into vLLM cannot be in its annotations.
EngineArgs: Any = arg_utils.EngineArgs
AsyncEngineArgs: Any = arg_utils.AsyncEngineArgs
CLASSES = (EngineArgs, AsyncEngineArgs)
Args = Callable[..., arg_utils.EngineArgs]


def mine(args: arg_utils.EngineArgs) -> dict[str, Any]:
    """Our entry of the loader's config."""
    extra = args.model_loader_extra_config
    assert isinstance(extra, dict)
    entry: dict[str, Any] = extra[KEY]
    return entry


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "value",
    [BLAKE2, json.dumps(BLAKE2), TensorDedupConfig(hash_algorithm="blake2b")],
    ids=["dict", "text", "config"],
)
def test_every_form_of_a_config_becomes_a_load_format_and_a_plain_dict(
    cls: Args, value: object, model: str
) -> None:
    args = cls(model=model, tensor_dedup=value)

    assert args.load_format == LOAD_FORMAT
    assert mine(args) == {**TensorDedupConfig(hash_algorithm="blake2b").to_dict(), "inner": "auto"}
    assert json.loads(json.dumps(mine(args))) == mine(args)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("value", [True, {}, "true", "{}"])
def test_true_and_nothing_set_are_the_defaults(cls: Args, value: object, model: str) -> None:
    args = cls(model=model, tensor_dedup=value)

    assert mine(args) == {**TensorDedupConfig().to_dict(), "inner": "auto"}


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "value", [None, False, "false", {"enabled": False}, TensorDedupConfig(enabled=False)]
)
@pytest.mark.parametrize(
    "rest",
    [{}, {"load_format": "dummy", "enable_sleep_mode": True}, {"cpu_offload_gb": 1.0}],
    ids=["plain", "dummy", "offload"],
)
def test_switched_off_is_plain_vllm_to_the_last_field(
    cls: Args, value: object, rest: dict[str, Any], model: str
) -> None:
    assert cls(model=model, tensor_dedup=value, **rest) == cls(model=model, **rest)


def test_the_config_reaches_the_engine_config_that_workers_are_sent(model: str) -> None:
    args = EngineArgs(
        model=model,
        tensor_dedup=BLAKE2,
        load_format="safetensors",
        model_loader_extra_config={"enable_multithread_load": True, "num_threads": 2},
        enforce_eager=True,
        max_model_len=256,
        skip_tokenizer_init=True,
    )

    load_config = pickle.loads(pickle.dumps(args.create_engine_config())).load_config

    assert load_config.load_format == LOAD_FORMAT
    extra = load_config.model_loader_extra_config
    assert extra.pop(KEY) == {
        **TensorDedupConfig(hash_algorithm="blake2b").to_dict(),
        "inner": "safetensors",
    }
    assert extra == {"enable_multithread_load": True, "num_threads": 2}


def test_the_callers_own_dict_is_not_changed(model: str) -> None:
    extra = {"num_threads": 2}

    EngineArgs(model=model, tensor_dedup=True, model_loader_extra_config=extra)

    assert extra == {"num_threads": 2}


@pytest.mark.parametrize("inner", [*SHARED, "SafeTensors"])
def test_the_load_format_asked_for_is_kept_inside(inner: str, model: str) -> None:
    args = EngineArgs(model=model, tensor_dedup=True, load_format=inner)
    assert args.load_format == LOAD_FORMAT
    assert mine(args)["inner"] == inner.lower()


def test_every_load_format_that_auto_could_stand_for_is_shared() -> None:
    """vLLM's own names: another one is of files that its default loader does not read."""
    loaders = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    by_default = {name for name, loader in loaders.items() if loader is DefaultModelLoader}

    assert {"auto", "mistral", "pt", "npcache"} <= by_default
    assert by_default <= set(SHARED)


@pytest.mark.parametrize("other", ["dummy", "Tensorizer", "ipc_cache", "anything_else"])
@pytest.mark.parametrize("cls", CLASSES)
def test_with_another_load_format_vllm_loads_by_itself_and_is_told_of_us(
    cls: Args, other: str, model: str
) -> None:
    args = cls(model=model, tensor_dedup=BLAKE2, load_format=other, enable_sleep_mode=True)

    assert args.load_format == other
    assert mine(args)["hash_algorithm"] == "blake2b"
    again = dataclasses.replace(args, seed=7)
    assert (again.load_format, mine(again)) == (other, mine(args))


@pytest.mark.parametrize("url", ["https://host/model.gguf", "hf://org/name"])
def test_a_url_from_which_vllm_does_not_stream_is_left_to_the_default_loader(url: str) -> None:
    """vLLM keeps the format "auto", whose loader refuses settings that it does not know."""
    load_format, _ = arguments.translate(True, "auto", None, url)
    assert load_format == LOAD_FORMAT
    for streamed in ("s3://bucket/model", "GS://bucket/model"):
        load_format, _ = arguments.translate(True, "auto", None, streamed)
        assert load_format == "auto"


def test_what_needs_our_loader_is_refused_with_another_load_format(model: str) -> None:
    frozen = {"frozen_base": {"base": model, "layers": "0"}}
    for given in ({"load_format": "dummy"}, {"load_format": "sharded_state"}, {}):
        where = model if given else "s3://bucket/model"
        with pytest.raises(ConfigError, match="frozen_base does not combine with load_format="):
            EngineArgs(model=where, tensor_dedup=frozen, **given)
    with pytest.raises(ConfigError, match=r"store://tiny.*load_format='dummy' does not read"):
        EngineArgs(model="store://tiny", tensor_dedup=True, load_format="dummy")


def test_tensorizers_own_config_is_taken(model: str) -> None:
    from vllm.model_executor.model_loader.tensorizer import TensorizerConfig

    extra = TensorizerConfig(tensorizer_uri="file:///x", num_readers=3)
    args = EngineArgs(
        model=model, tensor_dedup=True, load_format="tensorizer", model_loader_extra_config=extra
    )

    given = args.create_load_config().model_loader_extra_config
    assert given.pop(KEY)["inner"] == "tensorizer"
    plainly = EngineArgs(model=model, load_format="tensorizer", model_loader_extra_config=extra)
    assert given == plainly.create_load_config().model_loader_extra_config


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "setting",
    [
        {"enable_sleep_mode": True},
        {"enable_elastic_ep": True},
        {"cpu_offload_gb": 0.5},
        {"offload_group_size": 4},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_what_writes_or_moves_weights_later_is_refused(
    cls: Args, setting: dict[str, Any], model: str
) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=rf"tensor_dedup does not combine with {name}=.*drop"):
        cls(model=model, tensor_dedup=True, **setting)
    with pytest.raises(ConfigError, match=name):
        cls(model=model, load_format=LOAD_FORMAT, **setting)


def test_a_sleep_mode_backend_of_its_own_is_refused(model: str) -> None:
    """An engine argument since vLLM 0.33, where 'cumem' is the default."""
    for given in (None, "cumem"):
        arguments.refuse_moving_weights(SimpleNamespace(sleep_mode_backend=given))
    with pytest.raises(ConfigError, match=r"combine with sleep_mode_backend='criu'.*drop"):
        arguments.refuse_moving_weights(SimpleNamespace(sleep_mode_backend="criu"))
    if "sleep_mode_backend" in {field.name for field in dataclasses.fields(EngineArgs)}:
        assert EngineArgs(model=model, tensor_dedup=True).load_format == LOAD_FORMAT
        with pytest.raises(ConfigError, match="sleep_mode_backend"):
            EngineArgs(model=model, tensor_dedup=True, sleep_mode_backend="criu")


@pytest.mark.parametrize("cls", CLASSES)
def test_engines_on_a_device_sleep_where_a_memory_manager_keeps_the_weights(
    cls: Args, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(current_platform), "_enum", PlatformEnum.CUDA)
    given = cls(model=model, tensor_dedup={"memory_manager": "auto"}, enable_sleep_mode=True)
    assert given.load_format == LOAD_FORMAT
    with pytest.raises(ConfigError, match="memory_manager='auto'"):
        cls(model=model, tensor_dedup=True, enable_sleep_mode=True)
    monkeypatch.setattr(arguments, "usable", lambda part: part != "sleep")
    with pytest.raises(ConfigError, match=r"does not combine with enable_sleep_mode.*drop"):
        cls(model=model, tensor_dedup={"memory_manager": "auto"}, enable_sleep_mode=True)


@pytest.mark.parametrize("cls", CLASSES)
def test_weight_updates_are_refused_where_a_write_would_reach_others(
    cls: Args, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the machine's memory a writer gets pages of its own; on a device it would not."""
    transfer = {"weight_transfer_config": {"backend": "nccl"}}
    assert cls(model=model, tensor_dedup=True, **transfer).load_format == LOAD_FORMAT

    monkeypatch.setattr(type(current_platform), "_enum", PlatformEnum.CUDA)
    with pytest.raises(ConfigError, match=r"combine with weight_transfer_config=.*drop"):
        cls(model=model, tensor_dedup=True, **transfer)


@pytest.mark.parametrize("cls", CLASSES)
def test_engines_on_a_device_follow_steps_by_our_own_backend(
    cls: Args, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = {"weight_transfer_config": {"backend": "tensor_dedup"}}
    monkeypatch.setattr(type(current_platform), "_enum", PlatformEnum.CUDA)
    assert cls(model=model, tensor_dedup=True, **follow).load_format == LOAD_FORMAT
    for name, value in (("usable", lambda part: part != "steps"), ("usable", lambda _: True)):
        monkeypatch.setattr(arguments, name, value)
        with pytest.raises(ConfigError, match=r"combine with weight_transfer_config=.*drop"):
            cls(model=model, tensor_dedup=True, **follow)
        monkeypatch.setattr(type(current_platform), "_enum", PlatformEnum.ROCM)


@pytest.mark.parametrize("cls", CLASSES)
def test_balanced_experts_are_no_reason_to_refuse(cls: Args, model: str) -> None:
    """They stay private, see test_parallel."""
    assert cls(model=model, tensor_dedup=True, enable_eplb=True).load_format == LOAD_FORMAT


def test_settings_that_cannot_be_are_named_at_once(model: str) -> None:
    with pytest.raises(ConfigError, match="did you mean 'hash_algorithm'"):
        EngineArgs(model=model, tensor_dedup={"hash_algoritm": "blake3"})
    with pytest.raises(ConfigError, match="model_loader_extra_config is a list"):
        EngineArgs(model=model, tensor_dedup=True, model_loader_extra_config=[1])


class TestByLoadFormat:
    """`load_format="tensor_dedup"`, with or without our entry in the loader's config."""

    @pytest.mark.parametrize("extra", [{}, {KEY: {}}, {KEY: True}])
    def test_the_defaults_are_filled_in(self, extra: dict[str, Any], model: str) -> None:
        args = EngineArgs(
            model=model, load_format="Tensor_Dedup", model_loader_extra_config={**extra}
        )

        assert args.load_format == LOAD_FORMAT
        assert mine(args) == {**TensorDedupConfig().to_dict(), "inner": "auto"}

    def test_inner_and_fields_are_read_and_checked_in_the_parent(self, model: str) -> None:
        def make(**entry: object) -> Any:
            extra = {KEY: entry, "num_threads": 3}
            return EngineArgs(model=model, load_format=LOAD_FORMAT, model_loader_extra_config=extra)

        args = make(verify="always", inner="hf")
        assert mine(args) == {**TensorDedupConfig(verify="always").to_dict(), "inner": "hf"}
        with pytest.raises(ConfigError, match="did you mean 'verify'"):
            make(verifi="always")
        assert make(inner="dummy").load_format == "dummy"

    def test_switched_off_reads_with_the_inner_format(self, model: str) -> None:
        extra = {KEY: {"enabled": False, "inner": "hf"}, "num_threads": 3}
        args = EngineArgs(model=model, load_format=LOAD_FORMAT, model_loader_extra_config=extra)

        assert args.load_format == "hf"
        assert args.model_loader_extra_config == {"num_threads": 3}

    def test_given_twice_it_must_be_the_same(self, model: str) -> None:
        first = EngineArgs(model=model, tensor_dedup=BLAKE2)
        again: dict[str, Any] = {
            "model": model,
            "load_format": first.load_format,
            "model_loader_extra_config": first.model_loader_extra_config,
        }

        assert EngineArgs(**again, tensor_dedup=BLAKE2) == first
        assert EngineArgs(**again) == first
        with pytest.raises(ConfigError, match="given twice"):
            EngineArgs(**again, tensor_dedup=True)


def test_arguments_may_be_copied_and_given_by_position(model: str) -> None:
    names = [field.name for field in dataclasses.fields(EngineArgs)]
    plain = EngineArgs(model=model)
    before = [getattr(plain, name) for name in names[: names.index("load_format")]]

    args = EngineArgs(*before, "safetensors", tensor_dedup=True)

    assert mine(args)["inner"] == "safetensors"
    assert dataclasses.replace(args, seed=7).model_loader_extra_config == {KEY: mine(args)}


def test_a_wrong_argument_is_vllms_own_error() -> None:
    with pytest.raises(TypeError, match=r"EngineArgs\.__init__\(\) got an unexpected .* 'modle'"):
        EngineArgs(modle="x", tensor_dedup=True)


def test_the_module_stays_a_module() -> None:
    """What waits for vLLM's import of it is gone when it is there."""
    assert type(arg_utils) is ModuleType


def test_children_are_told_where_to_leave_their_reports(model: str) -> None:
    EngineArgs(model=model, tensor_dedup=True)

    folder = Path(os.environ[REPORT_DIR_VARIABLE])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
