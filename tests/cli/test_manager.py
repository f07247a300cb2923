"""The verbs of the memory manager, against one that runs."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from manager_runs import managers
from tensor_dedup.cli import main
from tensor_dedup.memory_manager.client import connect
from tensor_dedup.memory_manager.client.names import checkpoint_name

SIZE = 1 << 20


def run(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == status, done.output
    return done.output if status else done.stdout


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[managers.Manager]:
    tmp_path.chmod(0o700)
    with managers.running(tmp_path, "--metrics", "0") as running:
        monkeypatch.setenv("TENSOR_DEDUP_SOCKET", str(running.socket))
        yield running


def test_status_says_what_is_there_and_who_uses_it(manager: managers.Manager) -> None:
    with manager.client("an engine") as client:
        [lease] = managers.build(client, "layer", bytes(SIZE), checkpoint="base")
        client.get(["layer", "none"], "tuned")
        document = json.loads(run("status", "--json"))
        text = run("status")
    totals = document["totals"]
    assert (totals["hits"], totals["misses"], totals["published"]) == (1, 1, 1)
    assert [row["name"] for row in document["checkpoints"]] == ["base", "tuned"]
    assert [row["nbytes"] for row in document["checkpoints"]] == [SIZE, SIZE]
    [row] = document["clients"]
    assert (row["name"], row["leases"], row["leased_bytes"]) == ("an engine", 1, SIZE)
    [tensor] = document["residents"]
    assert (tensor["digest"], tensor["nbytes"]) == (lease.digest, SIZE)
    assert "an engine" in text
    assert "1.0 MiB of 256.0 MiB in use" in text
    assert json.loads(run("top", "--json"))["totals"]["residents"] == 1


def test_pin_unpin_and_evict(manager: managers.Manager) -> None:
    with manager.client() as client:
        managers.build(client, "layer", bytes(SIZE), checkpoint="base")
    managers.until(lambda: manager.overview().totals.leases == 0)
    assert json.loads(run("pin", "base", "--json")) == {
        "name": "base",
        "pinned": True,
        "tensors": 1,
        "bytes": SIZE,
    }
    assert "in use, or pinned" in run("evict", "base", status=1)
    run("unpin", "base")
    assert json.loads(run("evict", "base", "--json"))["bytes"] == SIZE
    assert manager.overview().totals.residents == 0


def test_what_sharing_saves_is_said(manager: managers.Manager) -> None:
    code = (
        "import sys\n"
        "from tensor_dedup.memory_manager.client import connect\n"
        "with connect(sys.argv[1], name='other', keep_connected=False) as client:\n"
        "    kept = client.get(['layer'], 'base')\n"
        "    print('here', flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    assert "no two processes" in run("status")
    with manager.client("an engine") as client:
        kept = managers.build(client, "layer", bytes(SIZE), checkpoint="base")
        assert json.loads(run("status", "--json"))["saved_bytes"] == 0
        command = [sys.executable, "-c", code, str(manager.socket)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "here\n"
            document, text = json.loads(run("status", "--json")), run("status")
            other.communicate("\n")
        del kept
    assert len({row["pid"] for row in document["clients"]}) == 2
    assert document["saved_bytes"] == SIZE
    assert "1.0 MiB of 2.0 MiB by sharing (50 %)" in text


@pytest.mark.parametrize("width", [60, 80, 140])
def test_status_fits_and_breaks_no_word(
    manager: managers.Manager, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    narrow = Console(width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr("tensor_dedup.cli.manager.console", lambda: narrow)
    name = "/models/meta-llama/Llama-3.2-1B-Instruct-sql-lora-merged"
    with manager.client("an engine") as client:
        kept = managers.build(client, "layer", bytes(SIZE), checkpoint=name)
        shown = run("status")
        del kept
    assert max(map(len, shown.splitlines())) <= width, shown
    table = shown[shown.index(" checkpoint ") :]
    cells = [row.split("│")[1].strip() for row in table.splitlines() if row.startswith("│")]
    assert "".join(cells) == name
    assert all(cell[-1] in "./-" for cell in cells[:-1])
    assert re.search(r"│ +1\.0 MiB │", shown)


def test_what_is_in_use_is_not_logged_as_evicted(manager: managers.Manager) -> None:
    with manager.client() as client:
        kept = managers.build(client, "layer", bytes(SIZE), checkpoint="base")
        run("evict", "base", status=1)
        del kept
    assert manager.lines("evicted") == []
    [line] = manager.lines("not evicted:")
    assert "in use or pinned" in line


def test_a_budget_that_nobody_has_is_warned_of(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with managers.running(tmp_path, "--budget", str(1 << 50)) as running:
        managers.until(lambda: running.lines("serving"))
        assert f"budget={1 << 50} (1048576.0 GiB) is more than the" in running.log.read_text()
    (tmp_path / "small").mkdir(mode=0o700)
    with managers.running(tmp_path / "small") as running:
        managers.until(lambda: running.lines("serving"))
        assert "is more than" not in running.log.read_text()


def test_top_ends_with_q(manager: managers.Manager) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tensor_dedup", "top", "--every", "60"]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.DEVNULL) as process:
        before = termios.tcgetattr(theirs)
        managers.until(lambda: not termios.tcgetattr(theirs)[3] & termios.ICANON)
        os.write(ours, b"xq")
        assert process.wait(managers.PATIENCE_S) == 0
        assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


def test_stop_ends_it(manager: managers.Manager) -> None:
    assert json.loads(run("stop", "--json"))["pid"] == manager.pid
    assert manager.wait() == 0
    assert "tensor-dedup serve" in run("status", status=3)


def test_metrics_are_the_totals(manager: managers.Manager) -> None:
    with manager.client() as client:
        managers.build(client, "layer", bytes(SIZE), checkpoint="base")
        managers.until(lambda: "metrics=" in manager.log.read_text())
        address = re.search(r"metrics=(\S+)", manager.log.read_text())
        assert address is not None
        assert address[1].startswith("http://127.0.0.1:")

        host = '{device="host"}'

        def numbers() -> dict[str, str]:
            text = urllib.request.urlopen(address[1]).read().decode()
            lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
            return dict(lines)

        managers.until(lambda: float(numbers()[f"tensor_dedup_resident_bytes{host}"]) == SIZE)
        assert float(numbers()[f"tensor_dedup_layers_published_total{host}"]) == 1


def test_top_draws_until_it_is_interrupted(manager: managers.Manager) -> None:
    code = "from tensor_dedup.cli import main; main(['top', '--every', '0.1'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    managers.until(lambda: manager.overview().totals.clients > 1)  # it, and who asks
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=managers.PATIENCE_S)
    assert process.returncode == 0
    assert not output or "budget" in output  # not a terminal: nothing, or the last picture


def test_serve_says_when_it_is_ready_and_refuses_a_second(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    socket = tmp_path / "m.sock"
    code = "from tensor_dedup.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "--budget", "1M", "--json", "--socket"]
    process = subprocess.Popen(
        [*command, str(socket)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"socket": str(socket), "pid": process.pid}
    second = subprocess.run([*command, str(socket)], capture_output=True, text=True, check=False)
    assert second.returncode == 2
    assert "owns" in second.stderr
    assert second.stdout == ""
    process.terminate()
    output, log = process.communicate(timeout=managers.PATIENCE_S)
    assert process.returncode == 0
    assert output == ""
    assert "budget=1048576" in log


@pytest.mark.parametrize("budget", ["much", "-1", "1K", "12X"])
def test_a_wrong_budget_is_wrong_use(budget: str) -> None:
    run("serve", "--budget", budget, status=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--metrics", "0", "--metrics-address", ""), "'' is not an address"),  # $UNSET: to all
        (("--metrics", "0", "--metrics-address", "here"), "'here' is not an address"),
        (("--metrics-address", "0.0.0.0"), "give one of them"),
    ],
)
def test_metrics_are_served_where_they_were_meant_or_not_at_all(
    tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    tmp_path.chmod(0o700)
    socket = str(tmp_path / "m.sock")
    found = run("serve", *options, "--idle-exit", "0", "--socket", socket, status=2)
    assert said in found
    assert not (tmp_path / "m.sock").exists()


@pytest.mark.parametrize(
    "module",
    [
        "tensor_dedup.memory_manager.client",
        "tensor_dedup.memory_manager.server.main",
        "tensor_dedup.cli.serve",
        "tensor_dedup.cli.manager",
    ],
)
def test_the_manager_and_its_clients_need_no_framework(module: str) -> None:
    absent = "; ".join(f"sys.modules[{name!r}] = None" for name in ("torch", "vllm", "numpy"))
    command = [sys.executable, "-c", f"import sys; {absent}; import {module}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_name_that_is_not_there_is_wrong_use_and_near_ones_are_said(
    manager: managers.Manager,
) -> None:
    for verb in ("pin", "unpin", "evict"):
        said = run(verb, "base", status=2)
        assert "nothing of 'base' is in the memory manager" in said
        assert "no checkpoint yet" in said
    with manager.client() as client:
        kept = managers.build(client, "layer", bytes(SIZE), checkpoint="/models/a-base")
        managers.build(client, "other", managers.pattern(1, SIZE), checkpoint="/models/tuned")
        digest = kept[0].digest
        for verb in ("pin", "unpin", "evict"):
            assert "did you mean '/models/tuned'?" in run(verb, "tuned", status=2)
            assert "did you mean '/models/a-base'?" in run(verb, "a-bose", status=2)
            assert "lists '/models/a-base', '/models/tuned'" in run(verb, "0" * 64, status=2)
        assert manager.overview().totals.pins == []
        assert "1.0 MiB" in run("pin", digest)
        assert "is not pinned any more" in run("unpin", digest)
        assert "was not pinned" in run("unpin", digest)
        assert "in use" in run("evict", digest, status=1)


def test_what_comes_later_can_be_pinned_before(manager: managers.Manager) -> None:
    assert "nothing yet" in run("pin", "base", "--ahead")
    with manager.client() as client:
        managers.build(client, "layer", bytes(SIZE), checkpoint="base")
    assert manager.overview().totals.pinned_bytes == SIZE
    assert "is not pinned any more" in run("unpin", "base")
    run("pin", "late", "--ahead")
    assert "is not pinned any more" in run("unpin", "late")  # it is known, though nothing is here


def test_a_path_from_here_is_the_whole_path(
    manager: managers.Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    with manager.client() as client:
        whole = checkpoint_name("base")
        assert whole == str(tmp_path / "base")[-128:]
        managers.build(client, "layer", bytes(SIZE), checkpoint=whole)
        managers.build(client, "other", managers.pattern(1, SIZE), checkpoint="hub/name")
        assert whole in run("pin", "./base")
        assert whole in run("unpin", "base")
        managers.build(client, "third", managers.pattern(2, SIZE), checkpoint="base")
        assert run("pin", "base").startswith("base is pinned")  # that of this very name
        assert whole in run("pin", "./base")
    assert "hub/name: 1 tensor dropped" in run("evict", "hub/name")


def test_a_long_path_is_known_by_its_end(manager: managers.Manager) -> None:
    path = f"/models/{'deep/' * 40}base"
    with manager.client() as client:
        managers.build(client, "layer", bytes(SIZE), checkpoint=checkpoint_name(path))
    for verb in ("pin", "unpin", "evict"):
        run(verb, path)
    assert manager.overview().totals.residents == 0


def test_who_only_looks_is_not_in_the_log(manager: managers.Manager) -> None:
    with manager.client("an engine"):
        run("status")
    managers.until(lambda: manager.lines("disconnected"))
    told = [*manager.lines("connected"), *manager.lines("disconnected")]
    assert ["'an engine'" in line for line in told] == [True, True]


def test_a_process_stands_once_in_the_table_of_clients(manager: managers.Manager) -> None:
    with manager.client("serve.py") as one, manager.client("serve.py") as two:
        kept = managers.build(one, "layer", bytes(SIZE), checkpoint="[red]base")
        kept += managers.build(two, "other", managers.pattern(1, SIZE), checkpoint="[red]base")
        run("pin", "[red]base")
        text, document = run("status"), json.loads(run("status", "--json"))
        del kept
    assert [row["pid"] for row in document["clients"]] == [os.getpid()] * 2
    assert re.findall(rf".*\b{os.getpid()}\b.*", text)[0].count("serve.py (2 connections)") == 1
    assert len(re.findall(rf"\b{os.getpid()}\b", text)) == 1
    assert "2 leases of 1 process\n" in re.sub(" +\n", "\n", text)
    assert f"at {manager.socket}, up" in text  # piped: nothing is cut or folded
    assert text.count("[red]base") == 2  # as it is, not as a colour: pinned, and in the table


def test_nothing_to_stop_is_said_as_that(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    socket = tmp_path / "m.sock"
    said = run("stop", "--socket", str(socket), status=3)
    assert f"no memory manager runs at {socket}" in said
    assert "serve" not in said


def test_the_log_has_a_line_a_checkpoint_and_all_of_it_when_asked_for(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    code = "from tensor_dedup.cli import main; main()"
    for options, more in (((), 0), (("--verbose",), 6)):
        socket = tmp_path / f"{more}.sock"
        command = [sys.executable, "-c", code, "serve", "--budget", "9M", "--json", *options]
        command = [*command, "--socket", str(socket)]
        with contextlib.ExitStack() as undo:
            process = undo.enter_context(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
            undo.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline()
            client = undo.enter_context(connect(socket, name="an engine", keep_connected=False))
            for number in range(3):
                managers.build(client, f"layer-{number}", managers.pattern(number, SIZE))
            process.terminate()
            _, log = process.communicate(timeout=managers.PATIENCE_S)
        details = re.findall(r" D (?:sealed|published) ", log)
        assert len(details) == more, log
        built = [line for line in log.splitlines() if " I built " in line]
        assert all(f"pid={os.getpid()} by='an engine'" in line for line in built)
        # More than one only where this machine stood still for as long as a load pauses.
        sizes = [re.findall(r"checkpoint='base' tensors=(\d) MiB=(\d)\.0", each) for each in built]
        assert [sum(map(int, column)) for column in zip(*(s[0] for s in sizes), strict=True)] == [
            3
        ] * 2
