"""`vllm serve DIR --tensor-dedup '{...}'`, a real server on the loopback interface."""

import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from models import tiny_checkpoints as checkpoints
from processes import forked
from remote_runs import remotes
from tensor_dedup import Publisher, Store
from tensor_dedup.loader.report import REPORT_DIR_VARIABLE
from tensor_dedup.publishing.engine_server import EngineServer
from vllm_runs import fleet, plain

COMMAND = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
SMALL = (
    *("--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", "256"),
    *("--enforce-eager", "--skip-tokenizer-init", "--served-model-name", "tiny"),
)
PATIENCE = 300.0  # seconds until a server that neither answers nor ends is given up
PROMPT = [1, 2, 3, 50]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A user's environment, in which the distribution `vllm` exists and reports are kept."""
    ours = ("VLLM_ENABLE_V1", "VLLM_CPU_OMP", "OMP_")
    kept = {name: each for name, each in os.environ.items() if not name.startswith(ours)}
    reports = tmp_path / "reports"
    reports.mkdir()
    # The command asks for the distribution `vllm`; the CPU build is installed as `vllm-cpu`.
    metadata = tmp_path / "site" / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    version = importlib.metadata.version("vllm-cpu").partition("+")[0]
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    path = os.pathsep.join(filter(None, [str(metadata.parents[1]), kept.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, REPORT_DIR_VARIABLE: str(reports)}


@contextmanager
def server(arguments: list[str], environment: dict[str, str], log: Path) -> Iterator[str]:
    """Serve until the block ends, whatever happens in it; yields the address when it answers."""
    with started(arguments, environment, log) as (address, process):
        wait_until(lambda: healthy(address), process, log)
        yield address


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@contextmanager
def started(
    arguments: list[str], environment: dict[str, str], log: Path
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A server that does not answer yet: several may start at once."""
    port = free_port()
    with log.open("w") as output:
        process = subprocess.Popen(
            [*COMMAND, *arguments, *SMALL, "--host", "127.0.0.1", "--port", port],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        stop(process)


@contextmanager
def started_sooner(
    arguments: list[str], environment: dict[str, str], log: Path
) -> Iterator[tuple[str, "Sooner"]]:
    """As `started`, in a process that finds vLLM imported."""
    port = free_port()
    command = ["vllm", "serve", *arguments, *SMALL, "--host", "127.0.0.1", "--port", port]
    log.touch()
    process = Sooner(forked.start(serve, command, environ=environment, log=log))
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        stop(process)


def serve(command: list[str]) -> None:
    """What the command `vllm` does."""
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.argv = command
    from vllm.entrypoints.cli import main

    command_line: Any = main  # untyped
    command_line.main()


class Sooner:
    """A forked process, with as much of Popen as is needed here."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid = process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("vllm serve", timeout or 0)
        return self.returncode


def stop(process: "subprocess.Popen[bytes] | Sooner") -> None:
    """End the server and everything it started: its group is its own."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until(
    done: Callable[[], bool], process: "subprocess.Popen[bytes] | Sooner", log: Path
) -> None:
    until = time.monotonic() + PATIENCE
    while not done():
        if process.poll() is not None or time.monotonic() > until:
            pytest.fail(f"no server ({process.returncode}): {log.read_text()[-4000:]}")
        time.sleep(0.5)


def healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def complete(address: str) -> list[int]:
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        tokens: list[int] = json.load(response)["choices"][0]["token_ids"]
    return tokens


def cards(address: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{address}/v1/models", timeout=60) as response:
        found: list[dict[str, Any]] = json.load(response)["data"]
    return found


def served_models(address: str) -> list[str]:
    return [model["id"] for model in cards(address)]


def weights_metric(address: str) -> dict[str, float]:
    """The metric of the weights that the model `tiny` has, by the digest of its checkpoint."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as response:
        text = response.read().decode()
    label = re.escape('tensor_dedup_model_info{checkpoint_digest="') + r'(\w+)",model_name="tiny"'
    return {digest: float(value) for digest, value in re.findall(label + r"\} (\S+)", text)}


def status(environment: dict[str, str]) -> dict[str, Any]:
    """What `tensor-dedup status --json` prints."""
    command = [str(Path(sys.executable).with_name("tensor-dedup")), "status", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=120)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def held_elsewhere(path: Path, manager: str) -> int:
    """What vLLM's plan of a device's memory is told about this model before it is loaded."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader

    arguments: Any = EngineArgs
    config = arguments(
        model=str(path),
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
        tensor_dedup={"memory_manager": manager},
    ).create_engine_config()
    return get_model_loader(config.load_config).get_external_weight_memory(config)


def reported(environment: dict[str, str]) -> list[dict[str, Any]]:
    folder = Path(environment[REPORT_DIR_VARIABLE])
    return [json.loads(file.read_text())["model"] for file in sorted(folder.rglob("*.json"))]


def expected(model: str) -> list[int]:
    """What plain vLLM answers, in this process."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    llm = plain.engine(model)
    prompts: Any = [{"prompt_token_ids": PROMPT}]
    (request,) = llm.generate(prompts, greedy, use_tqdm=False)
    answer = list(request.outputs[0].token_ids)
    plain.let_go(llm)
    return answer


BY_FLAG = ("--tensor-dedup", '{"hash_algorithm": "blake3"}')
BY_LOAD_FORMAT = (
    *("--load-format", "tensor_dedup"),
    *("--model-loader-extra-config", '{"tensor_dedup": {"verify": "always"}}'),
)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "arguments",
    [
        # One server is also among the two on a manager below.
        pytest.param(BY_FLAG, id="flag", marks=pytest.mark.long),
        pytest.param(BY_LOAD_FORMAT, id="load_format", marks=pytest.mark.long),
    ],
)
def test_a_server_answers_as_plain_vllm_does(
    arguments: tuple[str, ...], model: str, environment: dict[str, str], tmp_path: Path
) -> None:
    with server([model, *arguments], environment, tmp_path / "log") as address:
        answer = complete(address)

    assert answer == expected(model)
    (load,) = reported(environment)
    assert load["total_bytes"] > 0


@pytest.fixture
def runtime(environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """A user's environment with a runtime folder of its own; its manager is ended in the end."""
    home = tempfile.mkdtemp(prefix="td-")  # the path of a socket is short
    environment = {**environment, "XDG_RUNTIME_DIR": home}
    try:
        yield environment
    finally:
        command = [str(Path(sys.executable).with_name("tensor-dedup")), "stop"]
        subprocess.run(command, env=environment, capture_output=True, check=False, timeout=120)
        shutil.rmtree(home)


@pytest.mark.vllm
def test_two_servers_share_what_they_have_in_common_through_a_manager(
    runtime: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is set up and nothing imported: the first of them starts the manager."""
    pair = checkpoints.make("llama", tmp_path)
    config = ("--tensor-dedup", '{"memory_manager": "auto"}')
    with ExitStack() as stack:
        both = {
            path: stack.enter_context(
                started_sooner([str(path), *config], runtime, tmp_path / f"{path.name}.log")
            )
            for path in (pair.base, pair.fine_tune)
        }
        for path, (address, process) in both.items():
            log = tmp_path / f"{path.name}.log"
            wait_until(lambda address=address: healthy(address), process, log)  # type: ignore[misc]
        answers = {path: complete(address) for path, (address, _) in both.items()}
        found = status(runtime)
        # After the answers: a page that nobody has read yet is in nobody's share.
        mapped = [fleet.slab_pss(client["pid"]) for client in found["clients"]]
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime["XDG_RUNTIME_DIR"])
        external = {str(path): held_elsewhere(path, "auto") for path in both}
        names = [served_models(address) for address, _ in both.values()]
        told = {str(path): cards(address)[0]["tensor_dedup"] for path, (address, _) in both.items()}
        metrics = {str(path): weights_metric(address) for path, (address, _) in both.items()}

    loads = {load["name"]: load for load in reported(runtime)}
    assert set(loads) == {str(pair.base), str(pair.fine_tune)}
    total = sum(load["total_bytes"] for load in loads.values())
    shared = sum(load["shared_bytes"] for load in loads.values())
    assert 0 < shared < total / 2
    assert {client["leased_bytes"] > 0 for client in found["clients"]} == {True}
    ports = [address.rpartition(":")[2] for address, _ in both.values()]
    assert {each["name"] for each in found["clients"]} == {f"tiny (port {port})" for port in ports}
    leased = sum(client["leased_bytes"] for client in found["clients"])
    assert found["totals"]["resident_bytes"] <= total - shared
    assert leased > found["totals"]["resident_bytes"]  # some of it twice
    # A page that two of them map is half of each one's share: together they hold it once.
    assert len(mapped) == 2
    assert 0 < sum(mapped) <= found["totals"]["charged"]
    assert not {process.pid for _, process in both.values()} & {c["pid"] for c in found["clients"]}
    # What is there already is no part of an engine's own memory; a page is counted once.
    assert external == {row["name"]: row["nbytes"] for row in found["checkpoints"]}
    assert all(0 < external[name] <= load["total_bytes"] for name, load in loads.items())
    assert held_elsewhere(pair.base, str(tmp_path / "nobody.sock")) == 0
    assert names == [["tiny"], ["tiny"]]
    digests = {name: load["known_checkpoint_digest"] for name, load in loads.items()}
    assert len({*digests.values()} - {None}) == 2
    assert told == {name: {"checkpoint_digest": each} for name, each in digests.items()}
    assert metrics == {name: {each: 1.0} for name, each in digests.items()}
    assert answers == {path: expected(str(path)) for path in both}


@pytest.mark.vllm
@pytest.mark.long
def test_a_stored_checkpoint_is_served(
    model: str, environment: dict[str, str], tmp_path: Path
) -> None:
    Store.open(tmp_path / "store").import_(model, "org/tiny@v1")
    environment["TENSOR_DEDUP_CACHE"] = str(tmp_path / "cache")
    config = json.dumps({"store": str(tmp_path / "store")})
    arguments = ["store://org/tiny@v1", "--tensor-dedup", config]
    with server(arguments, environment, tmp_path / "log") as address:
        answer = complete(address)

    assert answer == expected(model)
    (load,) = reported(environment)
    assert load["name"] == "store://org/tiny@v1"
    assert load["bytes_from_store"] == load["bytes_read"] == load["checkpoint_bytes"] > 0


def ask_to_change(address: str, step: int) -> int:
    """The status of a server's answer when it is asked to change to a step."""
    body = json.dumps({"update_info": {"step": step}}).encode()
    kind = {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(f"{address}/update_weights", body, kind)
        with urllib.request.urlopen(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.vllm
def test_a_server_follows_a_run(tmp_path: Path, environment: dict[str, str]) -> None:
    base = checkpoints.make("llama", tmp_path / "checkpoints").base
    other = checkpoints.same_header(base, tmp_path / "other")
    url, host = f"file://{tmp_path}/policy", str(tmp_path / "host")
    with Publisher(url, config=base, work=tmp_path / "work") as policy:
        for step, folder in enumerate((base, other)):
            policy.publish(checkpoints.tensors(folder), step)
    at_0, at_1 = expected(str(base)), expected(str(other))
    assert at_0 != at_1
    environment |= {"TENSOR_DEDUP_CACHE": str(tmp_path / "cache"), "VLLM_SERVER_DEV_MODE": "1"}
    config = json.dumps({"store": host, "remote": url})
    arguments = ["store://policy@0", "--tensor-dedup", config]
    arguments += ["--weight-transfer-config", '{"backend": "tensor_dedup"}']
    log = tmp_path / "log"
    with started_sooner(arguments, environment, log) as (address, process):
        wait_until(lambda: healthy(address), process, log)
        found, asked = [complete(address)], EngineServer(address)
        digests = [asked.checkpoint_digest()]
        follow = [sys.executable, "-m", "tensor_dedup", "follow", url, "--once"]
        follow += ["--engine", address, "--store", host]
        subprocess.run(follow, env=environment, check=True, timeout=PATIENCE)
        found.append(complete(address))
        digests.append(asked.checkpoint_digest())
        missing = ask_to_change(address, 7)
        found.append(complete(address))
        known = ask_to_change(address, 0)
        found.append(complete(address))
        digests.append(asked.checkpoint_digest())
    assert found == [at_0, at_1, at_1, at_0]
    # By these, `follow` knows that a server is not at the step that it was asked to load.
    assert None not in digests
    assert digests[0] == digests[2] != digests[1]
    assert (missing >= 400, known) == (True, 200)


@pytest.mark.vllm
@pytest.mark.long
def test_a_stored_checkpoint_is_pulled_and_served_and_then_without_the_remote(
    model: str, environment: dict[str, str], tmp_path: Path
) -> None:
    size = checkpoints.nbytes(Path(model))
    answers = []
    with remotes.s3() as proxy:
        full = Store.open(tmp_path / "full")
        full.import_(model, "base")
        full.push("s3://bucket/models", "base")
        environment |= {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
        environment["TENSOR_DEDUP_CACHE"] = str(tmp_path / "cache")
        environment["TENSOR_DEDUP_STORE"] = str(tmp_path / "here")
        environment["TENSOR_DEDUP_REMOTE"] = "s3://bucket/models"
        shutil.rmtree(full.path)
        proxy.reset()
        with server(["store://base", "--tensor-dedup"], environment, tmp_path / "log") as address:
            answers.append(complete(address))
        assert size <= proxy.received <= 1.02 * size + 64 * 1024
    # The server is gone, and so is whoever could answer for it.
    with server(["store://base", "--tensor-dedup"], environment, tmp_path / "log2") as address:
        answers.append(complete(address))
    assert answers == [expected(model)] * 2
    first, second = reported(environment)
    assert first["bytes_from_store"] == second["bytes_from_store"] == size
    assert "on the wire" in (tmp_path / "log").read_text()
    assert "on the wire" not in (tmp_path / "log2").read_text()


@pytest.mark.vllm
@pytest.mark.long
def test_a_server_says_what_a_model_takes_from_its_base(
    model: str, environment: dict[str, str], tmp_path: Path
) -> None:
    base = Path(shutil.copytree(model, tmp_path / "base"))
    held = checkpoints.tensors(base)
    held["lm_head.weight"] = held["lm_head.weight"].flip(0)  # other tokens are the likely ones
    safetensors.torch.save_file(held, base / checkpoints.WEIGHTS, {"format": "pt"})
    frozen = {"frozen_base": {"base": str(base), "layers": "*"}}
    arguments = [model, "--tensor-dedup", json.dumps(frozen)]
    with server(arguments, environment, tmp_path / "log") as address:
        answer = complete(address)
        (card,) = cards(address)
    assert answer == expected(str(base)) != expected(model)
    assert card["tensor_dedup"] == frozen
    (load,) = reported(environment)
    assert load["frozen_base"]["layers"] == "*"


@pytest.mark.vllm
@pytest.mark.long
def test_a_stored_checkpoint_without_us_ends_with_our_words(
    environment: dict[str, str],
) -> None:
    done = subprocess.run(
        [*COMMAND, "store://tiny"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode != 0
    assert "--tensor-dedup" in done.stderr + done.stdout


@pytest.mark.long  # on the parser alone: tests/patches/test_command_line.py
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"hash_algoritm": "blake3"}', "hash_algorithm"),
        ("{", "not JSON"),
    ],
)
def test_a_wrong_flag_ends_with_status_2_and_says_what_is_right(
    text: str, says: str, model: str, environment: dict[str, str]
) -> None:
    done = subprocess.run(
        [*COMMAND, model, "--tensor-dedup", text],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )

    assert done.returncode == 2, done.stderr[-4000:]
    assert "argument --tensor-dedup" in done.stderr
    assert says in done.stderr
