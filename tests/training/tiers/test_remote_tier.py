"""A remote behind a fast tier: what is saved reaches it, and comes back from it."""

import logging
import multiprocessing
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_runs.remotes import Chunks, MemoryBucket, s3, web
from store_runs.damage import damage_piece
from store_runs.stores import (
    Model,
    assert_same,
    handle,
    network,
    open_store,
    safetensors,
    train,
    u8,
    write,
)
from tensor_dedup.cli import main
from tensor_dedup.remote import Remote, transfer
from tensor_dedup.remote.errors import (
    NoConditionsError,
    NotARemoteError,
    ReadOnlyRemoteError,
    RemoteAccessError,
    RemoteError,
    RemoteUnreachableError,
    RemoteUrlError,
)
from tensor_dedup.store.errors import BadNameError
from tensor_dedup.store.format.names import file_of
from tensor_dedup.store.steps.errors import KeptStepError, NotATrainingError, UnknownStepError
from tensor_dedup.store.steps.runs import in_save_order
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.errors import DrainError
from training_runs.drains import model_of, pulled


class Server(MemoryBucket):
    """A server that can be slow (while `open_` is not set), or refuse everything (`refuses`)."""

    def __init__(self, *, conditions: bool = True) -> None:
        super().__init__(conditions=conditions)
        self.open_, self.reached = threading.Event(), threading.Event()
        self.open_.set()
        self.refuses: type[RemoteError] | None = None

    def _ask(self) -> None:
        if self.refuses is not None:
            raise self.refuses.at(self.url, "the test says so")
        if threading.current_thread().name == "tensor-dedup-drain":
            self.reached.set()
            assert self.open_.wait(60)

    def get(self, key: str, limit: int) -> tuple[bytes, str] | None:
        self._ask()
        return super().get(key, limit)

    def put(self, key: str, chunks: Chunks) -> None:
        self._ask()
        super().put(key, chunks)

    def list(self, prefix: str) -> Iterator[Any]:
        self._ask()
        yield from super().list(prefix)


@pytest.fixture
def server() -> Server:
    return Server()


def tiers(root: Path, remote: Any, **more: Any) -> CheckpointStore:
    return handle(
        root / "fast", drain=Remote(remote) if isinstance(remote, MemoryBucket) else remote, **more
    )


def elsewhere(root: Path, remote: Any) -> CheckpointStore:
    """What a machine that has nothing but the remote reads there."""
    return pulled(root / "elsewhere", remote)


def restarted(root: Path, remote: Any, **more: Any) -> CheckpointStore:
    """The run on another machine, which has nothing but the remote and goes on from there."""
    shutil.rmtree(root / "restarted", ignore_errors=True)
    return tiers(root / "restarted", remote, **more)


def near(root: Path) -> CheckpointStore:
    """The fast tier alone."""
    return handle(root / "fast")


def save(run: CheckpointStore, *steps: int) -> None:
    for step in steps:
        run.save(model_of(step), step, {"loss": 1.0 / (step + 1)})


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield (tmp_path / "remote").as_uri()
        return
    with s3():
        yield "s3://bucket/runs/x"


def test_a_restart_finds_the_newest_step_on_the_remote(tmp_path: Path, url: str) -> None:
    with tiers(tmp_path, url, config={"config.json": "{}"}) as run:
        save(run, 0, 1, 2)
        run.keep(1)
        save(run, 3)
    assert run.undrained() == []
    assert near(tmp_path).steps() == [3]
    remote = Remote.open(url)
    assert remote.names() == ["run@0", "run@1", "run@2", "run@3"]
    assert remote.read("run@3").manifest == near(tmp_path).manifest(3)
    assert remote.verify(full=True).fine
    shutil.rmtree(tmp_path / "fast")
    with tiers(tmp_path, url) as run:
        assert (run.steps(), run.latest(), run.best("loss")) == ([0, 1, 2, 3], 3, 3)
        assert run.kept() == {1}
        assert run.metrics() == {step: {"loss": 1.0 / (step + 1)} for step in range(4)}
        for step in range(4):
            assert run.manifest(step) == remote.read(f"run@{step}").manifest
            assert_same(run.load(step), model_of(step))
        assert near(tmp_path).steps() == []  # a load gives nothing a name
        assert run.append(model_of(4)).step == 4
        with pytest.raises(UnknownStepError, match="5 steps on both tiers"):
            run.load(7)
    order = elsewhere(tmp_path, url)
    assert in_save_order(order._places()) == [0, 1, 2, 3, 4]
    plain = open_store(tmp_path / "plain")
    plain.pull(url, "run")  # what is there needs no program that knows of tiers
    assert_same(handle(tmp_path / "plain").load(4), model_of(4))
    assert handle(tmp_path / "plain").kept() == {1}


def test_only_what_is_missing_travels_and_deltas_stay_deltas(
    tmp_path: Path, server: Server
) -> None:
    def sizes() -> dict[str, int]:
        return {k: len(v[0]) for k, v in server.objects.items() if k.startswith("containers/")}

    def model(step: int) -> Model:
        made = network(1)
        for seed in range(step):
            train(made, seed, "layer2.weight")
        return made

    with tiers(tmp_path, server) as run:
        run.save(model(0), 0)
        run.drain()
        first = before = sum(sizes().values())
        for step in range(1, 5):
            run.save(model(step), step)
            run.drain()
            after = sum(sizes().values())
            assert 0 < after - before < first / 4  # a third of it has changed
            before = after
        assert any(key.endswith(".delta") for key in sizes())
    for step in range(5):
        assert_same(elsewhere(tmp_path, server).load(step), model(step))


def test_what_was_pulled_is_not_written_again(tmp_path: Path, server: Server) -> None:
    with tiers(tmp_path, server) as run:
        save(run, 0, 1)
    run = restarted(tmp_path, server)
    model = run.load(1)
    saved = run.save(model, 2)
    assert saved.new_bytes == 0
    run.close()
    run.store.gc(0)
    assert_same(run.load(0), model_of(0))  # pulled again
    assert_same(run.load(2), model_of(1))


def test_nothing_leaves_the_fast_tier_before_the_remote_has_it(
    tmp_path: Path, server: Server
) -> None:
    run = tiers(tmp_path, server, keep_last=1)
    save(run, 0)
    run.drain()
    server.open_.clear()
    server.reached.clear()
    save(run, 1, 2, 3)
    assert server.reached.wait(30)
    assert run.undrained() == [1, 2, 3]
    assert near(tmp_path).steps() == [0, 1, 2, 3]
    server.open_.set()
    run.close()
    assert (near(tmp_path).steps(), Remote(server).names()) == ([3], ["run@3"])


def test_the_rules_hold_for_both_and_the_fast_tier_has_its_own(
    tmp_path: Path, server: Server
) -> None:
    rules: dict[str, Any] = {"keep_last": 3, "keep_best": ("loss", 1, "max"), "keep_fast": 2}
    with tiers(tmp_path, server, **rules) as run:
        save(run, 0, 1)
        run.keep(1)
        save(run, 2, 3, 4, 5)
        run.drain()
        assert run.steps() == [0, 1, 3, 4, 5]
        assert near(tmp_path).steps() == [4, 5]
        assert Remote(server).names() == ["run@0", "run@1", "run@3", "run@4", "run@5"]
        assert run.prune(dry_run=True) == []
    with tiers(tmp_path, server, keep_last=1) as run:
        assert run.prune() == [0, 3, 4]
    assert Remote(server).names() == ["run@1", "run@5"]
    assert near(tmp_path).steps() == [5]
    assert Remote(server).verify(full=True).fine


def test_deletions_and_marks_are_those_of_both(tmp_path: Path, server: Server) -> None:
    with tiers(tmp_path, server, keep_fast=None) as run:
        save(run, 0, 1, 2)
        run.drain()
        run.delete(0)
        for act in (lambda: run.delete(0), lambda: run.load(0), lambda: run.keep(0)):
            with pytest.raises(UnknownStepError):
                act()
        assert Remote(server).names() == ["run@1", "run@2"]
        assert near(tmp_path).steps() == [1, 2]
        run.keep(1)
        run.drain()
        assert elsewhere(tmp_path, server).kept() == {1}
        for act in (lambda: run.delete(1), lambda: save(run, 1)):
            with pytest.raises(KeptStepError):
                act()
        run.unkeep(1)
        assert run.kept() == elsewhere(tmp_path, server).kept() == set()
        save(run, 1)
    with restarted(tmp_path, server) as other:
        assert other.latest() == 1
        other.keep(2)  # which is on the remote alone
    with tiers(tmp_path, server) as run:
        assert run.kept() == {2}
        with pytest.raises(KeptStepError):
            run.delete(2)
        run.unkeep(2)
        run.delete(2)
    assert Remote(server).names() == ["run@1"]


def test_a_deleted_step_costs_no_request(tmp_path: Path, server: Server) -> None:
    """A long training leaves many names on the remote that say that they were deleted."""
    with tiers(tmp_path, server, keep_last=1) as run:
        save(run, 0, 1, 2, 3)
    assert sum(key.startswith("refs/") for key in server.objects) == 4
    run = tiers(tmp_path, server)
    before = server.traffic.counts()[1]
    assert run.steps() == [3]
    assert server.traffic.counts()[1] - before == 1


def test_a_run_whose_marks_would_have_too_long_names(tmp_path: Path, server: Server) -> None:
    name = "a/" * 63 + "a"
    with pytest.raises(BadNameError):
        file_of(f"{name}@0@keep")
    run = handle(tmp_path / "fast", name, drain=Remote(server), keep_last=2)
    for step in range(3):
        run.save(model_of(step), step)
    run.close()
    assert run.steps() == [1, 2]
    assert handle(tmp_path / "fast", name).steps() == [2]
    run.delete(1)
    assert run.steps() == [2]


def test_a_step_that_is_saved_again_replaces_the_one_there(tmp_path: Path, server: Server) -> None:
    with tiers(tmp_path, server) as run:
        save(run, 0, 1)
        run.drain()
        run.save(model_of(5), 0)
    assert_same(elsewhere(tmp_path, server).load(0), model_of(5))
    assert in_save_order(elsewhere(tmp_path, server)._places()) == [1, 0]


def test_another_content_under_the_name_is_named_and_not_replaced(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with tiers(tmp_path, server) as run:
        save(run, 0, 1)
    near(tmp_path).save(model_of(7), 2)
    with restarted(tmp_path, server) as run:
        save(run, 2)
    caplog.clear()
    run = tiers(tmp_path, server, keep_last=1)
    (said,) = [message for message in caplog.messages if "will not be drained (2)" in message]
    for text in (str(tmp_path / "fast"), f"push run@2 {server.url} --replace"):
        assert text in said
    save(run, 3)
    run.close()
    assert (run.undrained(), run.stats()["stranded"]) == ([], [2])
    assert_same(run.load(2), model_of(2))  # the remote's counts
    assert_same(near(tmp_path).load(2), model_of(7))  # and the other is not lost
    save(run, 2)
    run.close()
    assert near(tmp_path).manifest(2) == Remote(server).read("run@2").manifest


def test_what_is_no_step_is_not_replaced(tmp_path: Path, server: Server) -> None:
    store = open_store(tmp_path / "imports")
    store.import_(write(tmp_path / "in", {"a.safetensors": safetensors(u8(a=b"x"))}), "run@0")
    store.push(Remote(server), "run@0")
    with tiers(tmp_path, server) as run:
        with pytest.raises(NotATrainingError):
            save(run, 0)
        assert run.append(model_of(1)).step == 1
        with pytest.raises(NotATrainingError):
            run.delete(0)
    assert Remote(server).names() == ["run@0", "run@1"]
    # One that comes while the run is open is found by the drain.
    run = tiers(tmp_path, server)
    store.import_(write(tmp_path / "in2", {"a.safetensors": safetensors(u8(a=b"y"))}), "run@2")
    store.push(Remote(server), "run@2")
    save(run, 2)
    with pytest.raises(DrainError) as caught:
        run.close()
    assert isinstance(caught.value.__cause__, NotATrainingError)
    assert run.undrained() == [2]


@pytest.mark.parametrize("error", [RemoteUnreachableError, RemoteAccessError])
def test_a_remote_that_is_away_holds_up_nobody_until_the_bound(
    tmp_path: Path, server: Server, error: type[RemoteError], caplog: pytest.LogCaptureFixture
) -> None:
    run = tiers(tmp_path, server, drain_backlog=3)
    save(run, 0)
    run.drain()
    server.refuses = error
    with caplog.at_level(logging.WARNING):
        save(run, 1, 2, 3)
        with pytest.raises(DrainError, match="3 steps") as caught:
            run.drain()
    assert isinstance(caught.value.__cause__, error)
    assert (run.latest(), run.steps()) == (3, [0, 1, 2, 3])
    assert_same(run.load(2), model_of(2))
    assert run.stats()["undrained"] == 3
    assert "the test says so" in str(run.stats()["drain_error"])
    assert sum("is not drained yet" in record.message for record in caplog.records) == 1
    waiting = threading.Thread(target=save, args=(run, 4))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    server.refuses = None
    run.drain()
    waiting.join(60)
    assert not waiting.is_alive()
    run.close()
    assert run.stats()["drain_error"] is None
    assert elsewhere(tmp_path, server).steps() == [0, 1, 2, 3, 4]


def draining(tmp_path: Path, server: Server) -> CheckpointStore:
    """A run with a step on the remote, and another that the remote does not take yet."""
    run = tiers(tmp_path, server)
    save(run, 0)
    run.drain()
    server.open_.clear()
    server.reached.clear()
    save(run, 1)
    assert server.reached.wait(30)
    return run


def test_no_save_asks_a_slow_remote(tmp_path: Path, server: Server) -> None:
    run = draining(tmp_path, server)  # the drain waits for the server, and holds what it holds
    server.refuses = RemoteUnreachableError  # to whoever else asks
    save(run, 2, 3, 1)
    run.save_async(model_of(4), 4).wait()
    assert run.append(model_of(5)).step == 5
    run.store.gc(0)
    server.refuses = None
    server.open_.set()
    run.close()
    assert elsewhere(tmp_path, server).steps() == [0, 1, 2, 3, 4, 5]


def test_to_wait_for_a_step_that_is_being_drained_asks_nothing(
    tmp_path: Path, server: Server
) -> None:
    """All that a remote has of a long run is much; only the step itself counts."""
    run = draining(tmp_path, server)
    before = server.traffic.counts()[1]
    run.drain(step=1, wait=False)
    assert server.traffic.counts()[1] == before
    run.drain(step=0, wait=False)  # of others it is not known what the remote has now
    assert server.traffic.counts()[1] > before
    server.open_.set()
    run.drain(step=1)
    assert elsewhere(tmp_path, server).steps() == [0, 1]


@pytest.mark.parametrize(
    "what",
    ["no conditions", "no conditions any more", "away", "refused", "a web server", "another"],
)
def test_a_remote_that_cannot_be_drained_to_is_an_error_at_once(tmp_path: Path, what: str) -> None:
    server = Server(conditions=what != "no conditions")
    expected: type[Exception] = NoConditionsError
    if what == "no conditions any more":
        tiers(tmp_path, server).close()
        server._conditions = False
    elif what in ("away", "refused"):
        expected = RemoteUnreachableError if what == "away" else RemoteAccessError
        server.refuses = expected
    elif what == "another":
        expected = NotARemoteError
        server.put("refs/of-something-else", [memoryview(b"x")])
    elif what == "a web server":
        with tiers(tmp_path, (tmp_path / "remote").as_uri()) as run:
            save(run, 0)
        with web(tmp_path / "remote") as address, pytest.raises(ReadOnlyRemoteError):
            tiers(tmp_path, address)
        return
    with pytest.raises(expected):
        tiers(tmp_path, server)


@pytest.mark.parametrize("text", ["s3:/bucket/x", "oci://127.0.0.1/a:b", "ftp://host/x"])
def test_a_url_that_names_no_remote(tmp_path: Path, text: str) -> None:
    with pytest.raises(RemoteUrlError):
        tiers(tmp_path, text)


def test_the_url_of_a_store_s_folder_is_that_store(tmp_path: Path) -> None:
    second = open_store(tmp_path / "second")
    with tiers(tmp_path, second.path.as_uri()) as run:
        save(run, 0)
    assert second.names() == ["run@0"]


def test_what_is_damaged_on_the_fast_tier_is_read_from_the_remote(
    tmp_path: Path, server: Server
) -> None:
    with tiers(tmp_path, server) as run:
        save(run, 0)
    damage_piece(run.store, "run@0", "layer0.weight")
    assert_same(tiers(tmp_path, server).load(0), model_of(0))


def test_damage_of_the_remote_is_said_and_mended(tmp_path: Path, server: Server) -> None:
    with tiers(tmp_path, server, keep_fast=None) as run:
        save(run, 0)
        run.drain()
        lost = [key for key in server.objects if key.startswith("containers/")]
        for key in lost:
            server.delete(key)
        save(run, 1)
        run.drain()  # what it relies on is sent again
        assert run.undrained() == []
        assert near(tmp_path).steps() == [0, 1]
        faults = Remote(server).verify().faults
        assert {name for each in faults for name in each.affected} == {"run@0"}
        transfer.push(run.store, Remote(server), "run@0", replace=True)
    assert Remote(server).verify(full=True).fine
    assert_same(elsewhere(tmp_path, server).load(1), model_of(1))


def test_a_damaged_reference_is_replaced_and_deleted(tmp_path: Path, server: Server) -> None:
    """It must not hold up the steps behind it."""
    with tiers(tmp_path, server, keep_fast=None) as run:
        save(run, 0, 1, 2)
        run.drain()
        for step in (0, 1):
            key = f"refs/{file_of(f'run@{step}')}"
            assert key in server.objects
            server.put(key, [memoryview(b"damaged")])
    with tiers(tmp_path, server, keep_fast=None) as run:
        save(run, 3)
        run.drain()
        assert run.undrained() == []
        server.put(f"refs/{file_of('run@1')}", [memoryview(b"damaged again")])
        run.delete(1)
        transfer.push(run.store, Remote(server), "run@2", replace=True)
        assert run.steps() == [0, 2, 3]
    assert Remote(server).verify(full=True).fine
    assert_same(elsewhere(tmp_path, server).load(0), model_of(0))


def test_a_manifest_that_is_lost_there_is_sent_again(tmp_path: Path, server: Server) -> None:
    with tiers(tmp_path, server) as run:
        save(run, 0)
    server.delete(next(key for key in server.objects if key.endswith(run.manifest(0))))
    with tiers(tmp_path, server) as run:
        assert_same(run.load(0), model_of(0))
    assert_same(elsewhere(tmp_path, server).load(0), model_of(0))


def test_a_forked_child_says_that_it_cannot_drain(tmp_path: Path) -> None:
    """obstore's threads are its parent's: a request would wait forever."""
    with s3():
        run = tiers(tmp_path, "s3://bucket/x")
        save(run, 0)
        run.drain()

        def child() -> None:
            save(run, 1)
            with pytest.raises(DrainError, match="forked"):
                run.close()

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
        if process.exitcode is None:
            process.kill()
        assert process.exitcode == 0
        run.drain()
        assert Remote.open("s3://bucket/x").names() == ["run@0", "run@1"]
        run.close()


_PROGRAM = """
import sys
sys.path.insert(0, {support!r})
from pathlib import Path
from training_runs.drains import model_of
from store_runs.stores import handle
run = handle(Path(sys.argv[1]), drain=sys.argv[2], compress="always")
Path(sys.argv[1], "opened").touch()
if sys.argv[3] == "away":
    run._tiers.second._bucket.url = "away"
    def refuse(*_, **__):
        from tensor_dedup.remote.errors import RemoteUnreachableError
        raise RemoteUnreachableError.at("away", "nobody is there")
    for name in ("get", "put", "put_if", "list", "head"):
        setattr(run._tiers.second._bucket, name, refuse)
for step in range(3):
    run.save_async(model_of(step), step)
"""


@pytest.mark.parametrize("where", ["there", "away"])
def test_a_program_that_ends_has_drained_its_steps_or_says_so(tmp_path: Path, where: str) -> None:
    with s3():
        program = _PROGRAM.format(support=str(Path(__file__).parents[2] / "support"))
        words = [sys.executable, "-c", program, str(tmp_path / "fast"), "s3://bucket/x", where]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0
        if where == "there":
            assert done.stderr == ""
            assert near(tmp_path).steps() == [2]
        else:
            assert "3 steps of the run 'run' are left to drain" in done.stderr
            assert near(tmp_path).steps() == [0, 1, 2]
            tiers(tmp_path, "s3://bucket/x").close()
        for step in range(3):
            assert_same(elsewhere(tmp_path, "s3://bucket/x").load(step), model_of(step))


def test_from_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str) -> None:
    save(near(tmp_path), 0, 1, 2)
    words = ["runs", "drain", "run", url, "--store", str(tmp_path / "fast")]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert f"{url}: 3 steps of run" in capsys.readouterr().out
    assert near(tmp_path).steps() == [0, 1, 2]
    assert_same(elsewhere(tmp_path, url).load(2), model_of(2))
