"""`tensor-dedup follow`: new steps come, engines load them, and what fails is tried again."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from click.testing import CliRunner

from processes import commands
from remote_runs import remotes
from store_runs.stores import open_store
from tensor_dedup import Store
from tensor_dedup.cli import main
from tensor_dedup.publishing import follower as follower_module
from tensor_dedup.publishing.engine_server import EngineServer
from tensor_dedup.publishing.errors import (
    EngineError,
    EngineUnreachableError,
    EngineUrlError,
    OtherWeightsError,
)
from tensor_dedup.publishing.follower import (
    Event,
    FetchedEvent,
    Follower,
    FreedEvent,
    LoadedEvent,
    TroubleEvent,
)
from tensor_dedup.publishing.subscriber import NewStep, fetch
from tensor_dedup.remote import Remote
from tensor_dedup.remote.errors import RemoteUnreachableError, RemoteUrlError
from tensor_dedup.training import CheckpointStore

PATIENCE_S = 60.0
CHECKPOINT_DIGEST = EngineServer.checkpoint_digest


def publish(store: Store, url: str, *steps: int) -> None:
    with CheckpointStore(store, "policy") as run:
        for step in steps:
            run.save({"w": np.full(999, step), "same": np.arange(4000)}, step=step)
            store.push(url, f"policy@{step}")


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


class Engine:
    """A server with the endpoints of vLLM. It answers with `status`, and notes what it was asked.

    It runs `step`, and tells a digest of it in its list of models if `says_so`. The status of that
    is `models_status`; 0 is no answer.
    """

    def __init__(self, status: int = 200, port: int = 0) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.status = status
        self.step, self.says_so, self.times_said = -1, False, 0
        self.models_status = 200
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/json"
                engine.asked.append((self.path, json.loads(body)))
                said = {"message": "Weights updated"}
                if engine.status != 200:
                    said = {"error": {"message": "the update\nwas refused", "code": 500}}  # type: ignore[dict-item]
                else:
                    engine.step = engine.asked[-1][1]["update_info"]["step"]
                self._answer(engine.status, said)

            def do_GET(self) -> None:
                assert self.path == "/v1/models"
                card: dict[str, Any] = {"id": "policy"}
                if engine.says_so:
                    card["tensor_dedup"] = {"checkpoint_digest": f"digest of {engine.step}"}
                    engine.times_said += 1
                if engine.models_status:
                    self._answer(engine.models_status, {"object": "list", "data": [card]})

            def _answer(self, status: int, said: object) -> None:
                answer = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def steps(self) -> list[int]:
        assert all(path == "/update_weights" for path, _ in self.asked)
        return [body["update_info"]["step"] for _, body in self.asked]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def engine(status: int = 200, port: int = 0) -> Iterator[Engine]:
    made = Engine(status, port)
    try:
        yield made
    finally:
        made.close()


class Following:
    """`tensor-dedup follow` in a process of its own."""

    def __init__(self, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        self.freed = 0
        command = [sys.executable, "-m", "tensor_dedup", "follow", *arguments]
        self.process = subprocess.Popen(
            [*command, "--every", "0.1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=None if environ is None else {**os.environ, **environ},
        )

    def line(self) -> str:
        """The next line, but for what earlier steps have freed, which comes at any time."""
        assert self.process.stdout is not None
        while " freed" in (line := self.process.stdout.readline()) or '"freed"' in line:
            self.freed += 1
        return line

    def trouble(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def end(self, number: signal.Signals) -> tuple[int, str, str]:
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err


def test_one_round_pulls_the_latest_step_and_lets_engines_load_it(tmp_path: Path) -> None:
    full, url, here = open_store(tmp_path / "full"), f"file://{tmp_path}/policy", tmp_path / "here"
    publish(full, url, 1, 3)
    with engine() as one, engine() as other:
        arguments: list[str | Path] = ["follow", url, "--once", "--store", here]
        arguments += ["--engine", one.url]
        done = commands.run(*arguments, "--engine", f"{other.url}/")
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        step, *engines = done.stdout.splitlines()
        assert step.startswith("policy@3  ")
        assert " requests" in step
        assert sorted(line.split(" has it")[0] for line in engines) == sorted(
            f"policy@3  {each.url}" for each in (one, other)
        )
        assert one.steps() == other.steps() == [3]
        # Again, as a document a line; the run can be named. The engine is asked all the same.
        other.status = 500
        done = commands.run(*arguments, "--engine", other.url, "--json", "--run", "policy")
        assert done.returncode == 1
        assert f"{other.url}: it answered 500 for the step 3: the update was refused" in done.stderr
        documents = [json.loads(line) for line in done.stdout.splitlines()]
        assert documents[0].pop("seconds") >= 0
        assert documents[0] == {
            "schema": 1,
            "event": "step",
            "name": "policy@3",
            "step": 3,
            "transfer": None,
        }
        assert [each["event"] for each in documents] == ["step", "engine"]
        assert documents[1]["engine"] == one.url
        assert one.steps() == [3, 3]
    assert Store.open(here).names() == ["policy@3"]


def test_what_cannot_be_followed_ends_at_once_with_its_status(tmp_path: Path) -> None:
    publish(open_store(tmp_path / "full"), f"file://{tmp_path}/remote", 1)
    store: list[str | Path] = ["--store", tmp_path / "here"]
    for arguments, status, said in (
        ([f"file://{tmp_path}/nothing", "--once"], 3, "check the URL"),
        ([f"file://{tmp_path}/remote", "--once"], 2, "no step of a run 'remote'"),
        (["ftp://host/policy"], 2, "no remote has the scheme"),
        (["///"], 2, "name it with --run"),
        ([f"file://{tmp_path}/remote", "--run", "../policy"], 2, "cannot be the name of a run"),
        ([f"file://{tmp_path}/remote", "--engine", "localhost:8000"], 2, "http://HOST:PORT"),
        (["https://127.0.0.1:9/policy", "--every", "0"], 2, "--every"),
    ):
        done = commands.run("follow", *arguments, *store)
        assert (done.returncode, done.stdout) == (status, ""), done.stderr
        assert said in done.stderr
    with engine() as gone:
        pass
    remote = f"file://{tmp_path}/remote"
    run: list[str | Path] = ["follow", remote, "--once", "--run", "policy", *store]
    done = commands.run(*run, "--engine", gone.url)
    assert done.returncode == 3
    assert "policy@1  " in done.stdout
    assert f"{gone.url}: no answer" in done.stderr


def test_new_steps_are_loaded_as_they_appear_until_a_signal_ends_it(tmp_path: Path) -> None:
    full, url = open_store(tmp_path / "full"), f"file://{tmp_path}/policy"
    with engine() as asked:
        following = Following(url, "--store", f"{tmp_path}/here", "--engine", asked.url, "--json")
        # Nothing is published yet: that is said once.
        trouble = json.loads(following.line())
        assert (trouble["event"], trouble["kind"]) == ("trouble", "NotARemoteError")
        for step in range(4):
            publish(full, url, step)
            found = json.loads(following.line())
            if found["event"] == "trouble":  # the remote was there, and the step not yet
                assert found["kind"] == "UnknownRemoteNameError"
                found = json.loads(following.line())
            assert (found["event"], found["name"]) == ("step", f"policy@{step}")
            loaded = json.loads(following.line())
            assert (loaded["event"], loaded["step"]) == ("engine", step)
        wait_for(lambda: Store.open(tmp_path / "here").names() == ["policy@2", "policy@3"])
        # One that refuses is asked again, and told of once; a later step takes the place.
        asked.status = 500
        publish(full, url, 4)
        found, refused = json.loads(following.line()), json.loads(following.line())
        if found["event"] == "trouble":
            found, refused = refused, found
        assert (found["step"], refused["where"]) == (4, asked.url)
        wait_for(lambda: asked.steps().count(4) > 2)
        asked.status = 200
        assert json.loads(following.line())["step"] == 4
        status, left, trouble = following.end(signal.SIGTERM)
        assert (status, trouble) == (0, "")
        freed = [json.loads(line) for line in left.splitlines()]
        assert all(each["event"] == "freed" for each in freed)
        assert following.freed + len(freed) >= 2
        assert asked.steps()[:4] == [0, 1, 2, 3]


def test_a_remote_and_an_engine_that_come_back_are_followed_again(tmp_path: Path) -> None:
    full, url = open_store(tmp_path / "full"), "s3://bucket/policy"
    with remotes.s3() as proxy, engine() as asked:
        publish(full, url, 1)
        between = remotes.Proxy(proxy.port)
        following = Following(
            *(url, "--store", f"{tmp_path}/here", "--engine", asked.url),
            environ={"AWS_ENDPOINT_URL": f"http://127.0.0.1:{between.port}"},
        )
        assert following.line().startswith("policy@1  ")
        assert following.line().startswith(f"policy@1  {asked.url} has it")
        asked.close()
        publish(full, url, 2)
        assert following.line().startswith("policy@2  ")
        assert f"{asked.url}: no answer" in following.trouble()
        with engine(port=asked.port) as again:
            assert following.line().startswith(f"policy@2  {again.url} has it")
            between.close()
            assert "'policy@2', which is in" in following.trouble()
            publish(full, url, 3)
            between = remotes.Proxy(proxy.port, between.port)
            assert following.line().startswith("policy@3  ")
            assert following.line().startswith("policy@3  http")
            assert again.steps() == [2, 3]
            status, left, trouble = following.end(signal.SIGINT)
            assert (status, trouble) == (0, "")
            assert all(" freed" in line for line in left.splitlines())
        between.close()


def test_a_server_that_is_none_is_told_from_one_that_does_not_answer() -> None:
    for wrong in (
        "localhost:8000",
        "http://",
        "ftp://host",
        "http://host:port",
        "",
        "http://[h",
        "http://a..b:80",
    ):
        with pytest.raises(EngineUrlError, match="http://HOST:PORT"):
            EngineServer(wrong)
    for secret in ("http://me:hidden@host:1", "http://host:1/?token=hidden"):
        with pytest.raises(EngineUrlError, match="secret") as caught:
            EngineServer(secret)
        assert "hidden" not in str(caught.value)
    with engine(404) as old:
        with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
            EngineServer(old.url).load(1)
        assert old.steps() == [1]
    with pytest.raises(EngineUnreachableError, match="whether the server runs"):
        EngineServer(old.url).load(1)


def test_a_step_that_another_subscriber_brought_anew_is_loaded_again(tmp_path: Path) -> None:
    full, url, here = open_store(tmp_path / "full"), f"file://{tmp_path}/policy", tmp_path / "here"
    publish(full, url, 1)
    stop, told = threading.Event(), list[Event]()
    with engine() as asked:
        store = open_store(here)
        follower = Follower(store, Remote.open(url), "policy", [asked.url], told.append)
        thread = threading.Thread(target=follower.until, args=(stop, 0.05))
        # Another process of the host is always first: what this one finds is there already.
        with mock.patch.object(follower_module, "fetch", brought_by_another):
            thread.start()
            try:
                wait_for(lambda: asked.steps() == [1])
                with CheckpointStore(full, "policy") as run:
                    run.save({"w": np.full(999, 7)}, step=1)
                full.push(url, "policy@1", replace=True)
                wait_for(lambda: asked.steps() == [1, 1])
            finally:
                stop.set()
                thread.join()
    found = [each.found for each in told if isinstance(each, FetchedEvent)]
    assert [(each.name, each.transfer) for each in found] == [("policy@1", None)] * 2


def brought_by_another(store: Store, remote: Remote, run: str, **_: Any) -> NewStep:
    fetch(store, remote, run)
    return replace(fetch(store, remote, run), transfer=None)


def test_engines_load_a_step_before_earlier_ones_are_let_go_of(tmp_path: Path) -> None:
    full, url, here = open_store(tmp_path / "full"), f"file://{tmp_path}/policy", tmp_path / "here"
    told, names = list[Event](), list[list[str]]()
    with engine() as asked:
        store = open_store(here)

        def tell(event: Event) -> None:
            told.append(event)
            names.append(store.names())

        follower = Follower(store, Remote.open(url), "policy", [asked.url], tell)
        for step in (1, 2, 3):
            publish(full, url, step)
            follower.once()
    assert [type(each) for each in told[-3:]] == [FetchedEvent, LoadedEvent, FreedEvent]
    assert names[-2:] == [["policy@1", "policy@2", "policy@3"], ["policy@2", "policy@3"]]


def test_a_round_ends_with_whatever_kept_an_engine_from_being_told(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/policy"
    publish(open_store(tmp_path / "full"), url, 1)
    store = open_store(tmp_path / "here")
    follower = Follower(store, Remote.open(url), "policy", ["http://127.0.0.1:9"], lambda _: None)
    with (
        mock.patch.object(EngineServer, "load", side_effect=UnicodeError("odd")),
        pytest.raises(UnicodeError, match="odd"),
    ):
        follower.once()


@contextmanager
def followed(tmp_path: Path, asked: Engine, told: list[Event]) -> Iterator[str]:
    """A thread that follows a run with the steps 1 and 2 for an engine; the URL of the run."""
    url, stop = f"file://{tmp_path}/policy", threading.Event()
    publish(open_store(tmp_path / "full"), url, 1, 2)
    store = open_store(tmp_path / "here")
    follower = Follower(store, Remote.open(url), "policy", [asked.url], told.append)
    thread = threading.Thread(target=follower.until, args=(stop, 0.05))
    thread.start()
    try:
        yield url
    finally:
        stop.set()
        thread.join()


def loaded_steps(told: list[Event]) -> list[int]:
    return [each.step for each in told if isinstance(each, LoadedEvent)]


def troubles(told: list[Event]) -> list[type[Exception]]:
    return [type(each.error) for each in told if isinstance(each, TroubleEvent)]


@contextmanager
def counted_rounds() -> Iterator[list[NewStep]]:
    rounds = list[NewStep]()

    def counted(*args: Any, **options: Any) -> NewStep:
        rounds.append(fetch(*args, **options))
        return rounds[-1]

    with mock.patch.object(follower_module, "fetch", counted):
        yield rounds


def wait_for_loads(asked: Engine, told: list[Event], *steps: int) -> None:
    """Wait until these steps were loaded, and the engine was asked what it runs since."""
    wait_for(lambda: loaded_steps(told) == [*steps])
    before = asked.times_said
    wait_for(lambda: asked.times_said > before)


def wait_for_rounds(rounds: list[NewStep], number: int) -> None:
    before = len(rounds)
    wait_for(lambda: len(rounds) > before + number)


def test_an_engine_that_came_up_at_an_earlier_step_is_told_again(tmp_path: Path) -> None:
    told = list[Event]()
    with engine() as asked:
        asked.says_so = True
        with followed(tmp_path, asked, told) as url:
            wait_for(lambda: asked.steps() == [2] and asked.times_said > 4)
            assert asked.steps() == [2]  # it is where it is to be
            asked.step = 1  # as after a start
            wait_for_loads(asked, told, 2, 2)
            assert asked.step == 2
            asked.status, asked.step = 500, 1
            wait_for(lambda: len(asked.steps()) > 3)  # it refused, and is asked again
            asked.status = 200
            wait_for(lambda: loaded_steps(told) == [2, 2, 2])
            assert asked.step == 2
            publish(open_store(tmp_path / "full"), url, 3)
            wait_for(lambda: loaded_steps(told) == [2, 2, 2, 3])


def test_an_engine_that_is_ahead_is_not_set_back(tmp_path: Path) -> None:
    """A trainer that lets the engine load what it published is first."""
    told, asked_for, here = list[Event](), threading.Event(), threading.Event()
    away, tried = threading.Event(), list[str]()

    def fetched(*args: Any, **options: Any) -> NewStep:
        if away.is_set():
            tried.append("the remote")
            raise RemoteUnreachableError.at("the remote", "it is away")
        found = fetch(*args, **options)
        if asked_for.is_set():  # the run was listed; the next step comes meanwhile
            asked_for.clear()
            assert found.step == 2
            assert here.wait(PATIENCE_S)
        return found

    with engine() as asked, mock.patch.object(follower_module, "fetch", fetched):
        asked.says_so = True
        with followed(tmp_path, asked, told) as url:
            wait_for(lambda: asked.times_said > 2)
            asked_for.set()
            wait_for(lambda: not asked_for.is_set())
            publish(open_store(tmp_path / "full"), url, 3)
            said = asked.times_said
            EngineServer(asked.url).load(3)
            here.set()
            wait_for(lambda: loaded_steps(told) == [2, 3] and asked.times_said > said + 4)
            assert asked.steps() == [2, 3, 3]
            away.set()
            wait_for(lambda: len(tried) > 1)
            EngineServer(asked.url).load(4)
            wait_for(lambda: len(tried) > 3)
            assert asked.steps() == [2, 3, 3, 4]
    assert set(troubles(told)) == {OtherWeightsError, RemoteUnreachableError}


def test_who_updates_an_engine_that_another_one_updates_does_so_ever_more_rarely(
    tmp_path: Path,
) -> None:
    told = list[Event]()
    with engine() as asked:
        asked.says_so = True
        with followed(tmp_path, asked, told):
            wait_for_loads(asked, told, 2)
            began = time.monotonic()
            for times in (2, 3, 4, 5):
                asked.step = 1  # as another one says
                wait_for_loads(asked, told, *[2] * times)
            assert time.monotonic() - began > 0.05 + 0.1 + 0.2 + 0.4
    assert troubles(told) == [OtherWeightsError]


def test_an_engine_that_does_not_say_what_it_runs_is_told_once(tmp_path: Path) -> None:
    told = list[Event]()
    with (
        engine() as asked,
        mock.patch.object(
            EngineServer, "checkpoint_digest", autospec=True, side_effect=CHECKPOINT_DIGEST
        ) as said,
        counted_rounds() as rounds,
        followed(tmp_path, asked, told),
    ):
        wait_for(lambda: loaded_steps(told) == [2] and said.called)
        wait_for_rounds(rounds, 3)
        asked.step = 1
        wait_for_rounds(rounds, 5)
        assert (said.call_count, asked.steps()) == (1, [2])
    assert troubles(told) == []


@pytest.mark.parametrize("status", [0, 401, 503])
def test_an_engine_that_could_not_be_asked_what_it_runs_is_asked_again(
    tmp_path: Path, status: int
) -> None:
    told, refused = list[Event](), [EngineError] if status else []
    with engine() as asked, counted_rounds() as rounds:
        asked.says_so, asked.models_status = True, status
        with followed(tmp_path, asked, told) as url:
            wait_for(lambda: asked.times_said > 4)
            assert troubles(told) == refused
            assert loaded_steps(told) == asked.steps() == [2]
            publish(open_store(tmp_path / "full"), url, 3)
            wait_for_loads(asked, told, 2, 3)  # which is not delayed by that
            asked.step, asked.models_status = 1, 200  # started anew meanwhile
            wait_for(lambda: loaded_steps(told) == [2, 3, 3])
            assert asked.step == 3
            wait_for_rounds(rounds, 5)
            assert asked.steps() == [2, 3, 3]
    assert troubles(told) == [*refused, OtherWeightsError]


def test_what_an_engine_says_that_is_no_version_is_none() -> None:
    with engine() as asked:
        server = EngineServer(asked.url)
        assert server.checkpoint_digest() is None
        asked.says_so, asked.step = True, 7
        assert server.checkpoint_digest() == "digest of 7"
        for said in (b"[" * 900_000, b"no JSON", b'{"data": []}', b"null"):
            with mock.patch.object(EngineServer, "_ask", return_value=(200, said)):
                assert server.checkpoint_digest() is None
            with (
                mock.patch.object(EngineServer, "_ask", return_value=(500, said)),
                pytest.raises(EngineError, match="it answered 500 for the step 1"),
            ):
                server.load(1)
        asked.models_status = 401
        with pytest.raises(EngineError, match="with --api-key, /v1/models is guarded"):
            server.checkpoint_digest()
        asked.models_status = 500
        with pytest.raises(EngineError, match="it answered 500 when asked which weights"):
            server.checkpoint_digest()
    with pytest.raises(EngineUnreachableError):
        server.checkpoint_digest()


def test_an_engine_is_asked_on_when_events_cannot_be_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(list[Event]):
        def append(self, event: Event) -> None:
            super().append(event)
            if isinstance(event, (LoadedEvent, TroubleEvent)):
                raise OSError("the pipe is broken")

    told = Broken()
    with engine(500) as asked, followed(tmp_path, asked, told) as url:
        wait_for(lambda: len(asked.steps()) > 1)
        asked.status = 200
        wait_for(lambda: loaded_steps(told) == [2])
        publish(open_store(tmp_path / "full"), url, 3)
        wait_for(lambda: loaded_steps(told) == [2, 3])
        assert asked.steps()[-2:] == [2, 3]
    assert troubles(told) == [EngineError]
    assert "the pipe is broken" in caplog.text


def test_an_engine_is_asked_again_after_any_error(tmp_path: Path) -> None:
    told, right = list[Event](), EngineServer.load
    with (
        engine() as asked,
        mock.patch.object(EngineServer, "load", side_effect=UnicodeError("odd")) as failing,
        followed(tmp_path, asked, told),
    ):
        wait_for(lambda: failing.call_count > 2)
        failing.side_effect = lambda step: right(EngineServer(asked.url), step)
        wait_for(lambda: loaded_steps(told) == [2])
        assert asked.steps() == [2]
    assert troubles(told) == [EngineError]
    (said,) = (str(each.error) for each in told if isinstance(each, TroubleEvent))
    assert "the load of 'policy@2' failed: UnicodeError('odd')" in said


def test_engines_are_left_alone_when_the_follower_ends_with_an_error(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/policy"
    publish(open_store(tmp_path / "full"), url, 1)
    store = open_store(tmp_path / "here")
    with engine() as asked:
        asked.says_so = True

        def fetched(*args: Any, **options: Any) -> NewStep:
            if asked.times_said:
                raise RemoteUrlError.at(url, "the test says so")
            return fetch(*args, **options)

        follower = Follower(store, Remote.open(url), "policy", [asked.url], lambda _: None)
        with (
            mock.patch.object(follower_module, "fetch", fetched),
            pytest.raises(RemoteUrlError),
        ):
            follower.until(threading.Event(), 0.05)
        assert asked.steps() == [1]
        name = f"engine {asked.url}"
        wait_for(lambda: name not in [each.name for each in threading.enumerate()])


def test_the_command_fails_by_any_error(tmp_path: Path) -> None:
    """A supervisor starts it again only then."""
    command = ["follow", f"file://{tmp_path}/policy", "--store", f"{tmp_path}/here"]
    with mock.patch.object(Follower, "until", side_effect=RuntimeError("odd")):
        result = CliRunner().invoke(main, command)
    assert isinstance(result.exception, RuntimeError)
    assert result.exit_code == 1
