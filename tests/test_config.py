"""TensorDedupConfig: every field's values, every way to write one, every refusal."""

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensor_dedup.config import (
    FIELDS,
    HASH_ALGORITHMS,
    FrozenBase,
    HashAlgorithm,
    TensorDedupConfig,
)
from tensor_dedup.digest import ALGORITHMS
from tensor_dedup.errors import ConfigError

DEFAULTS = {
    "enabled": True,
    "hash_algorithm": "blake3",
    "verify_bytes": None,
    "min_tensor_bytes": 0,
    "memory_manager": None,
    "store": None,
    "store_writes": False,
    "remote": None,
    "frozen_base": None,
    "cpu_weights": None,
    "verify": "hint",
    "audit": 0.0,
    "salt_prefix_cache": True,
}

configs = st.builds(
    TensorDedupConfig,
    enabled=st.booleans(),
    hash_algorithm=st.sampled_from(HASH_ALGORITHMS),
    verify_bytes=st.none() | st.booleans(),
    min_tensor_bytes=st.integers(0, 1 << 70),
    remote=st.sampled_from([None, "s3://bucket/models", Path("/a/folder")]),
    frozen_base=st.none()
    | st.builds(FrozenBase, base=st.text(min_size=1), layers=st.text(min_size=1)),
    cpu_weights=st.sampled_from([None, "packed", "plain"]),
    verify=st.sampled_from(["hint", "always"]),
    audit=st.floats(0.0, 1.0),
)


def test_the_defaults() -> None:
    assert TensorDedupConfig().to_dict() == DEFAULTS


@given(configs)
def test_every_way_to_write_one_gives_the_same(config: TensorDedupConfig) -> None:
    values = config.to_dict()
    assert TensorDedupConfig.from_any(config) is config
    assert TensorDedupConfig.from_any(values) == config
    assert TensorDedupConfig.from_any(json.dumps(values)) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(TensorDedupConfig.from_any(values)) == hash(config)


@pytest.mark.parametrize("value", [None, True, "true", "null", {}, "{}", " {} "])
def test_nothing_said_means_the_defaults(value: object) -> None:
    assert TensorDedupConfig.from_any(value) == TensorDedupConfig()


@pytest.mark.parametrize("value", [False, "false"])
def test_false_switches_off(value: object) -> None:
    assert TensorDedupConfig.from_any(value) == TensorDedupConfig(enabled=False)


def test_a_partial_mapping_keeps_the_other_defaults() -> None:
    assert TensorDedupConfig.from_any({"audit": 1}).to_dict() == {**DEFAULTS, "audit": 1}


@pytest.mark.parametrize(
    "value", [3, 0, 1.5, b"{}", [], "[]", "3", '"blake3"', "", "{", "[" * 99999]
)
def test_what_is_no_config_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="tensor_dedup is"):
        TensorDedupConfig.from_any(value)


@pytest.mark.parametrize(
    ("field", "nearest"),
    [
        ("hash_algo", "hash_algorithm"),
        ("enable", "enabled"),
        ("min_tensor_byte", "min_tensor_bytes"),
        ("cpu_weight", "cpu_weights"),
        ("Store", "store"),
        ("store_write", "store_writes"),
    ],
)
def test_an_unknown_field_names_the_nearest(field: str, nearest: str) -> None:
    values: dict[str, Any] = {field: None}
    makers: tuple[Callable[[], TensorDedupConfig], ...] = (
        lambda: TensorDedupConfig(**values),
        lambda: TensorDedupConfig.from_any(values),
        lambda: TensorDedupConfig.from_any(json.dumps(values)),
        lambda: dataclasses.replace(TensorDedupConfig(), **values),
    )
    for make in makers:
        with pytest.raises(ConfigError, match=f"'{field}'; did you mean '{nearest}'") as caught:
            make()
        assert caught.value.facts["field"] == field


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("path", "frozen_base is 'path'; give a dict; for example"),
        ({"base": "b"}, "frozen_base lacks 'layers'; for example"),
        ({"base": "b", "layers": 7}, "layers of frozen_base is 7; give text; for example"),
        ({"base": "", "layers": "0"}, "base of frozen_base is ''; give text; for example"),
        ({"base": "b", "layer": "0"}, "frozen_base has no field 'layer'; did you mean 'layers'"),
    ],
)
def test_a_wrong_frozen_base_is_refused(value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TensorDedupConfig(frozen_base=value)
    assert str(caught.value).startswith(said)
    assert caught.value.facts["field"].startswith(("frozen_base", "layers", "base"))


def test_a_frozen_base_may_be_a_path() -> None:
    config = TensorDedupConfig(frozen_base={"base": Path("some/base"), "layers": "0-7"})
    assert config.frozen_base == FrozenBase(base="some/base", layers="0-7")
    assert config.to_dict()["frozen_base"] == {"base": "some/base", "layers": "0-7"}


@given(st.text())
def test_any_unknown_field_is_answered_with_a_real_one(name: str) -> None:
    if name in FIELDS:
        return
    with pytest.raises(ConfigError) as caught:
        TensorDedupConfig.from_any({name: None})
    assert any(f"did you mean {field!r}" in str(caught.value) for field in FIELDS)


def test_a_key_that_is_not_text_is_an_unknown_field() -> None:
    with pytest.raises(ConfigError, match="no field '3'"):
        TensorDedupConfig.from_any({3: True})


WRONG: list[tuple[str, object]] = [
    *(("enabled", value) for value in (None, 1, "yes")),
    *(("hash_algorithm", value) for value in (None, "BLAKE3", "md5", "", 3, ["blake3"])),
    *(("verify_bytes", value) for value in (0, 1, "auto")),
    *(("min_tensor_bytes", value) for value in (-1, True, 1.0, "1", None)),
    *(("cpu_weights", value) for value in ("raw", True, "")),
    *(("verify", value) for value in (None, True, "never")),
    *(("store", value) for value in (False, "", 1, b"x", ["x"])),
    *(("store_writes", value) for value in (None, 1, "yes", True)),
    *(("remote", value) for value in (True, "", 3, b"s3://bucket")),
    *(("audit", value) for value in (-0.1, 1.1, float("nan"), float("inf"), True, "1", None)),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_value_is_refused_with_what_to_write(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{field} is .*; .") as caught:
        TensorDedupConfig.from_any({field: value})
    assert caught.value.facts == {"field": field, "value": repr(value)}
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_wrong_choice_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'xxh3_128'"):
        TensorDedupConfig.from_any({"hash_algorithm": "xxh3"})
    with pytest.raises(ConfigError, match="is 'md5'; give one of "):
        TensorDedupConfig.from_any({"hash_algorithm": "md5"})


@pytest.mark.parametrize("where", ["auto", "/run/user/socket", Path("/run/user/socket")])
def test_a_memory_manager_travels_as_text(where: str | Path) -> None:
    config = TensorDedupConfig(memory_manager=where)
    again = TensorDedupConfig.from_any(json.dumps(config.to_dict()))
    assert again == config
    assert again.memory_manager == str(where)


@pytest.mark.parametrize("where", ["", True, 3, {}])
def test_what_names_no_memory_manager_is_refused(where: object) -> None:
    with pytest.raises(ConfigError, match=r'^memory_manager is .*"auto"'):
        TensorDedupConfig.from_any({"memory_manager": where})


@pytest.mark.parametrize(
    ("field", "value"), [("hash_algorithm", "xxh3_128"), ("cpu_weights", "packed")]
)
def test_what_cannot_leave_the_process_is_refused_beside_a_manager(field: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field} is"):
        TensorDedupConfig.from_any({"memory_manager": "auto", field: value})


@pytest.mark.parametrize("store", [True, "somewhere", Path("/srv/store")])
@pytest.mark.parametrize("writes", [True, False])
def test_a_store_travels_as_text(store: bool | str | Path, writes: bool) -> None:
    config = TensorDedupConfig(store=store, store_writes=writes)
    again = TensorDedupConfig.from_any(json.dumps(config.to_dict()))
    assert again == config
    assert again.store == (str(store) if isinstance(store, Path) else store)
    assert again.store_writes is writes


@pytest.mark.parametrize("algorithm", [name for name in HASH_ALGORITHMS if name != "blake3"])
def test_a_store_knows_blake3_only(algorithm: HashAlgorithm) -> None:
    with pytest.raises(ConfigError, match=f"^hash_algorithm is '{algorithm}'; a store .* blake3"):
        TensorDedupConfig(store=True, hash_algorithm=algorithm)


@pytest.mark.parametrize("algorithm", HASH_ALGORITHMS)
def test_hits_are_compared_by_default_where_the_hash_can_be_forged(
    algorithm: HashAlgorithm,
) -> None:
    forgeable = algorithm.startswith("xxh")
    assert TensorDedupConfig(hash_algorithm=algorithm).verifies_bytes is forgeable
    for asked in (True, False):
        config = TensorDedupConfig(hash_algorithm=algorithm, verify_bytes=asked)
        assert config.verifies_bytes is asked


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:hidden@bucket/x",
        "s3:/key:hidden@bucket",
        "https://host/x?token=hidden",
        "https://[hidden/x",
        "//key:hidden@host/x",
        "https://host/x;sig=hidden",
        "az://container/x%3Fsig=hidden",
    ],
)
def test_a_remote_holds_no_credential(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^remote: .*environment") as caught:
        TensorDedupConfig(remote=url)
    assert "hidden" not in str(caught.value)


def test_a_store_that_is_a_remote_is_your_own_with_that_remote_behind_it() -> None:
    url = "s3://bucket/policy"
    config = TensorDedupConfig(store=url)
    assert (config.store, config.store_folder, config.remote) == (True, None, url)
    assert config == TensorDedupConfig(store=True, remote=url)
    assert config == TensorDedupConfig(store=url, remote=url)
    assert TensorDedupConfig.from_any(config.to_dict()) == config
    assert TensorDedupConfig(store="file:///folder").remote == "file:///folder"
    for folder in ("policy", "/s3/policy", "./s3:/policy"):
        assert TensorDedupConfig(store=folder).store_folder == folder
    # Of a mistyped one nobody makes a folder; what opens the remote says what is wrong with it.
    assert TensorDedupConfig(store="s3:/bucket/policy").remote == "s3:/bucket/policy"
    with pytest.raises(ConfigError, match=r"^remote is 's3://bucket/other'; store names another"):
        TensorDedupConfig(store=url, remote="s3://bucket/other")
    for secret in ("s3://key:hidden@bucket/x", "https://host/x?token=hidden"):
        with pytest.raises(ConfigError, match=r"^store: .*environment") as caught:
            TensorDedupConfig(store=secret)
        assert "hidden" not in str(caught.value)
        with pytest.raises(ConfigError, match=r"^remote: .*environment") as caught:
            TensorDedupConfig(store=url, remote=secret)
        assert "hidden" not in str(caught.value)


def test_every_algorithm_can_be_configured_and_computed() -> None:
    assert HASH_ALGORITHMS == ALGORITHMS


def test_it_cannot_be_changed_after_it_was_checked() -> None:
    config = TensorDedupConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.audit = 0.5  # type: ignore[misc]
