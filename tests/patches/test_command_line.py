"""`--tensor-dedup` on the parser that `vllm serve` builds, in this process."""

import json
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from vllm.engine import arg_utils
from vllm.utils import argparse_utils

from tensor_dedup.config import TensorDedupConfig
from tensor_dedup.patches.vllm.load_formats import KEY, LOAD_FORMAT
from tensor_dedup.patches.vllm.server_names import PORT_VARIABLE, server_name

# Any: what is patched into vLLM cannot be in its annotations.
AsyncEngineArgs: Any = arg_utils.AsyncEngineArgs
FlexibleArgumentParser: Any = argparse_utils.FlexibleArgumentParser
Parser = argparse_utils.FlexibleArgumentParser


def mine(args: arg_utils.EngineArgs) -> dict[str, Any]:
    """Our entry of the loader's config."""
    extra = args.model_loader_extra_config
    assert isinstance(extra, dict)
    entry: dict[str, Any] = extra[KEY]
    return entry


@pytest.fixture
def parser() -> Parser:
    parser: Parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="serve"))
    return parser


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        (["--tensor-dedup"], {}),
        (["--tensor_dedup", "{}"], {}),
        (["--tensor-dedup", "true"], {}),
        (["--tensor-dedup", '{"min_tensor_bytes": 4194304}'], {"min_tensor_bytes": 4 << 20}),
        (["--tensor-dedup={}"], {}),
        (["--tensor-dedup.cpu_weights", "plain"], {"cpu_weights": "plain"}),
    ],
)
@pytest.mark.parametrize("cls", [arg_utils.EngineArgs, AsyncEngineArgs])
def test_the_flag_reaches_the_engine_arguments(
    cls: type[arg_utils.EngineArgs],
    parser: Parser,
    flags: list[str],
    fields: dict[str, Any],
    model: str,
) -> None:
    namespace = parser.parse_args(["--model", model, "--load-format", "hf", *flags])

    # Twice: an API server and the engine it starts read one namespace.
    first, second = (cls.from_cli_args(namespace) for _ in range(2))

    assert first == second
    assert type(first) is cls
    assert mine(first) == {**TensorDedupConfig(**fields).to_dict(), "inner": "hf"}


@pytest.mark.parametrize("flags", [[], ["--tensor-dedup", "false"]])
def test_without_it_or_switched_off_nothing_changes(
    parser: Parser, flags: list[str], model: str
) -> None:
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", model, *flags]))

    assert args.load_format == "auto"
    assert args.model_loader_extra_config == {}


@pytest.mark.parametrize(
    ("flags", "port"),
    [
        (["--tensor-dedup"], "8123"),
        (["--load-format", LOAD_FORMAT], "8123"),
        ([], None),
        # The server is not at the port that it was given, or there is none in this process.
        (["--tensor-dedup", "--port", "0"], None),
        (["--tensor-dedup", "--uds", "/run/vllm.sock"], None),
        (["--tensor-dedup", "--headless"], None),
    ],
)
def test_the_engine_of_a_server_that_shares_knows_its_port(
    parser: Any, flags: list[str], port: str | None, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PORT_VARIABLE, "of another server")
    monkeypatch.delenv(PORT_VARIABLE)
    parser.add_argument("--port", type=int, default=8000)  # as the server's own parser has
    parser.add_argument("--uds")
    parser.add_argument("--headless", action="store_true")

    AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", model, "--port", "8123", *flags]))

    assert os.environ.get(PORT_VARIABLE) == port


class Parallel(NamedTuple):
    world_size: int
    rank: int
    data_parallel_index: int = 0


@pytest.mark.parametrize(
    ("port", "parallel", "name"),
    [
        ("8000", Parallel(1, 0), "tiny (port 8000)"),
        ("8000", Parallel(2, 1), "tiny (port 8000, rank 1)"),
        ("8000", Parallel(2, 1, 3), "tiny (port 8000, replica 3, rank 1)"),
        (None, Parallel(2, 0), "tiny (rank 0)"),
        (None, Parallel(1, 0), "tiny"),
    ],
)
def test_a_manager_calls_an_engine_by_its_model_and_port(
    port: str | None, parallel: Parallel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PORT_VARIABLE, port or "")
    model = SimpleNamespace(served_model_name="tiny", model="/models/llama")
    config: Any = SimpleNamespace(model_config=model, parallel_config=parallel)
    assert server_name(config) is None  # here several models may be loaded
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    assert server_name(config) == name


def test_the_load_format_works_as_well(parser: Parser, model: str) -> None:
    extra = json.dumps({KEY: {"hash_algorithm": "blake2b"}, "num_threads": 2})
    namespace = parser.parse_args(
        ["--model", model, "--load-format", LOAD_FORMAT, "--model-loader-extra-config", extra]
    )

    assert mine(AsyncEngineArgs.from_cli_args(namespace))["hash_algorithm"] == "blake2b"


@pytest.mark.parametrize("value", ["{}", "true"])
def test_a_yaml_file_may_hold_it(parser: Parser, value: str, model: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: {model}\ntensor-dedup: {value}\n")

    args = AsyncEngineArgs.from_cli_args(parser.parse_args(["--config", str(file)]))

    assert mine(args)["enabled"] is True


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"hash_algoritm": "blake3"}', "did you mean 'hash_algorithm'"),
        ('{"verify": "sometimes"}', "verify is 'sometimes'"),
        ("{", "not JSON"),
        ("[1]", "give True, False, a dict"),
    ],
)
def test_a_wrong_value_ends_as_argparse_ends(
    parser: Parser,
    text: str,
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--tensor-dedup", text])

    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "argument --tensor-dedup" in error
    assert says in error


def test_help_shows_it(parser: Parser) -> None:
    parser._search_keyword = "tensor-dedup"

    shown: str = parser.format_help()  # type: ignore[no-untyped-call]
    assert "--tensor-dedup [JSON]" in shown
