"""Reports: what they hold, how they read, and how workers hand theirs over."""

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processes.process_state import forked
from store_runs.clocks import SetClock
from tensor_dedup.loader import report
from tensor_dedup.loader.report import ModelReport, Report
from tensor_dedup.text_table import BETWEEN_PROCESSES, human

CONTRACT = {
    *("name", "pid", "rank", "known", "total_bytes", "shared_bytes", "private_bytes"),
    *("checkpoint_bytes", "bytes_read", "bytes_hashed", "bytes_materialised", "tensors_total"),
    *("tensors_shared", "source_tensors_total", "source_tensors_shared", "seconds", "components"),
    *("skipped", "header_bytes", "source_bytes_shared", "tokens_equal_plain", "collisions"),
    *("bytes_from_store", "stored_as", "leaf_shared_bytes", "frozen_base", "marked"),
    *("known_reads", "checkpoint_digest"),
}
WORKER = """
import sys
from tensor_dedup.loader import report
report.measure_with(lambda: 10, lambda: 1000)
for name in sys.argv[1:]:
    report.add(report.ModelReport(name=name, rank=3, skipped=[("x", "why")]))
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of other tests are not these tests' loads."""
    monkeypatch.setattr(report, "_collection", report._Collection())
    monkeypatch.delenv(report.REPORT_DIR_VARIABLE, raising=False)


def test_loads_are_in_their_order_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SetClock()
    clock.rule(monkeypatch)
    for name in "abc":
        report.add(ModelReport(name=name))
        clock.hours -= 1
    assert [model.name for model in report.report().models] == ["a", "b", "c"]


def work(directory: Path, *names: str) -> None:
    """A worker process that loads models of these names."""
    environment = os.environ | {report.REPORT_DIR_VARIABLE: str(directory)}
    command = [sys.executable, "-c", WORKER, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def names(made: Report) -> list[str]:
    return [model.name for model in made.models]


def test_a_model_has_the_fields_of_the_public_description() -> None:
    made = ModelReport(name="m", skipped=[("layer", "why")])
    values = made.to_dict()
    assert set(values) == CONTRACT
    assert values["pid"] == os.getpid()
    assert set(values["seconds"]) == {"plan", "read", "hash", "process"}
    assert values["skipped"] == [["layer", "why"]]
    assert json.loads(json.dumps(values)) == values


def test_to_dict_does_not_alias_the_report() -> None:
    made = ModelReport()
    made.to_dict()["seconds"]["plan"] = 5.0
    made.to_dict()["components"].append("x")
    assert made.seconds["plan"] == 0.0
    assert made.components == []


def test_loads_are_listed_in_order() -> None:
    assert report.report().to_dict() == {
        "models": [],
        "registry_bytes": 0,
        "resident_bytes": 0,
        "devices": {},
    }
    for name in ("b", "a", "c"):
        report.add(ModelReport(name=name))
    assert names(report.report()) == ["b", "a", "c"]


def test_the_gauges_are_read_when_the_report_is_made() -> None:
    sizes = {"registry": 1, "residents": 2}
    report.measure_with(lambda: sizes["registry"], lambda: sizes["residents"])
    report.add(ModelReport())
    sizes.update(registry=30, residents=40)
    made = report.report()
    assert (made.registry_bytes, made.resident_bytes) == (30, 40)


def test_threads_may_add_at_once() -> None:
    def add(number: int) -> None:
        for _ in range(100):
            report.add(ModelReport(rank=number))

    threads = [threading.Thread(target=add, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ranks = [model.rank for model in report.report().models]
    assert sorted(ranks) == sorted(list(range(8)) * 100)


# The table


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_has_a_row_a_model_and_one_for_all() -> None:
    gib = 1 << 30
    base = ModelReport(
        name="base", known=False, total_bytes=3 * gib, private_bytes=3 * gib, bytes_read=gib
    )
    base.bytes_hashed, base.bytes_materialised = 512, 3 << 10
    base.tensors_total, base.source_tensors_total = 14, 20
    base.seconds |= {"plan": 0.25, "read": 1.0}
    tuned = ModelReport(
        name="tuned", known=True, total_bytes=gib, shared_bytes=gib // 2, private_bytes=gib // 2
    )
    tuned.tensors_total, tuned.tensors_shared = 14, 13
    text = str(Report([base, tuned], registry_bytes=2048, resident_bytes=7 << 20))
    heading, _, first, second, total = rows(text)
    assert heading == [
        *("model", "known", "total", "shared", "private", "by leaf", "read"),
        *("hashed", "materialised", "tensors", "source tensors", "seconds"),
    ]
    assert first == [
        *("base", "no", "3.0 GiB", "0 B", "3.0 GiB", "0 B", "1.0 GiB", "512 B"),
        *("3.0 KiB", "0/14", "0/20", "1.25"),
    ]
    assert second[:5] == ["tuned", "yes", "1.0 GiB", "512.0 MiB", "512.0 MiB"]
    assert total[2:5] == ["4.0 GiB", "512.0 MiB", "3.5 GiB"]
    assert total[9:] == ["13/28", "0/20", "1.25"]
    assert "saved 512.0 MiB of 4.0 GiB (12.5 %)" in text
    assert "residents 7.0 MiB, registry 2.0 KiB" in text


def test_a_name_is_not_markup_and_a_long_one_stays_whole() -> None:
    report.add(ModelReport(name="[red]name[/red]"))
    report.add(ModelReport(name="x" * 300))
    text = str(report.report())
    assert "[red]name[/red]" in text
    assert text.count("x") == 300
    assert "\x1b" not in text


def test_reasons_are_counted() -> None:
    report.add(ModelReport(skipped=[("a", "not covered"), ("b", "not covered"), ("c", "random")]))
    assert str(report.report()).splitlines()[-2:] == [
        "not shared: 2 x not covered",
        "not shared: 1 x random",
    ]
    report.add(ModelReport(skipped=[(str(n), f"reason {n}") for n in range(20)]))
    assert str(report.report()).splitlines()[-1] == "not shared: 12 more reasons"
    report.add(ModelReport(skipped=[(BETWEEN_PROCESSES, "nobody answers")] * 2))
    *_, more, between = str(report.report()).splitlines()
    assert more == "not shared: 12 more reasons"
    assert between == "not all is shared with other processes: nobody answers"


def test_what_was_read_of_a_known_model_is_one_line() -> None:
    groups = [
        {"reason": f"reason {n}", "tensors": n, "bytes": n << 20, "largest": [[f"w{n}", 1 << 20]]}
        for n in range(20, 0, -1)
    ]
    report.add(ModelReport(name="m", known_reads=groups))
    assert str(report.report()).splitlines()[-1] == (
        "read although known: m: 20 x reason 20 (20.0 MiB, w20); 19 x reason 19 (19.0 MiB, w19); "
        "18 x reason 18 (18.0 MiB, w18); 17 more"
    )


def test_no_load_yet_is_said() -> None:
    assert str(report.report()) == "tensor-dedup: no model was loaded yet"


@given(st.integers(0, 1 << 50))
def test_sizes_read_as_what_they_are(nbytes: int) -> None:
    number, unit = human(nbytes).split()
    scale = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]
    assert float(number) * scale == pytest.approx(nbytes, abs=0.051 * scale if scale > 1 else 0)
    assert unit == "GiB" or float(number) < 1024


# Workers


def test_reports_of_workers_are_merged_in_the_order_of_time(tmp_path: Path) -> None:
    report.collect_from(tmp_path)
    report.measure_with(lambda: 1, lambda: 2)
    report.add(ModelReport(name="first"))
    work(tmp_path, "second", "third")
    report.add(ModelReport(name="fourth"))
    work(tmp_path, "fifth")
    made = report.report()
    assert names(made) == ["first", "second", "third", "fourth", "fifth"]
    pids = [model.pid for model in made.models]
    assert pids[0] == pids[3] == os.getpid()
    assert pids[1] == pids[2] not in {os.getpid(), pids[4]}
    assert made.models[1].rank == 3
    assert made.models[1].skipped == [("x", "why")]
    # Two workers, each as of its last load, and this process.
    assert (made.registry_bytes, made.resident_bytes) == (1 + 2 * 10, 2 + 2 * 1000)


def test_only_a_process_that_collects_sees_others(tmp_path: Path) -> None:
    work(tmp_path, "elsewhere")
    assert names(report.report()) == []
    report.collect_from(tmp_path)
    report.collect_from(str(tmp_path))
    assert names(report.report()) == ["elsewhere"]


def test_ones_own_files_are_not_counted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(report.REPORT_DIR_VARIABLE, str(tmp_path))
    report.collect_from(tmp_path)
    report.add(ModelReport(name="mine"))
    assert [path.name for path in tmp_path.iterdir()] == [f"{os.getpid()}-1.json"]
    assert names(report.report()) == ["mine"]


def test_a_forked_worker_reports_its_own_loads_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(report.REPORT_DIR_VARIABLE, str(tmp_path))
    report.collect_from(tmp_path)
    report.add(ModelReport(name="parent"))

    def child() -> list[str]:
        report.add(ModelReport(name="child"))
        return names(report.report())

    assert forked(child) == ["parent", "child"]
    assert names(report.report()) == ["parent", "child"]


GOOD: dict[str, Any] = {"time_ns": 1, "pid": 1, "number": 1, "model": {"name": "good"}}
BROKEN = {
    "cut": json.dumps(GOOD)[:-5].encode(),
    "empty": b"",
    "not an object": b"[]",
    "unknown field": json.dumps(GOOD | {"more": 1}).encode(),
    "wrong type": json.dumps(GOOD | {"model": {"total_bytes": "many"}}).encode(),
    "not text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_skipped_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    (tmp_path / "1-1.json").write_bytes(json.dumps(GOOD).encode())
    (tmp_path / "1-2.json").write_bytes(BROKEN[name])
    (tmp_path / ".1-3.json").write_bytes(b"being written")
    report.collect_from(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert names(report.report()) == names(report.report()) == ["good"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "1-2.json" in caplog.text


@pytest.mark.parametrize("kind", ["absent", "a file"])
def test_a_directory_that_cannot_be_written_fails_no_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    target = tmp_path / "target"
    if kind == "a file":
        target.write_bytes(b"")
    monkeypatch.setenv(report.REPORT_DIR_VARIABLE, str(target))
    report.collect_from(target)
    report.add(ModelReport(name="kept"))
    assert names(report.report()) == ["kept"]
    assert "the report of kept stays" in caplog.text


def test_who_inherits_a_directory_sees_its_own_workers_and_those_above_see_all(
    tmp_path: Path,
) -> None:
    code = """
import os, subprocess, sys
from tensor_dedup.loader import report
path = report.share_with_workers()
assert report.share_with_workers() == path
report.add(report.ModelReport(name="mine"))
subprocess.run([sys.executable, "-c", sys.argv[1], "my worker's"], check=True)
print(*[model.name for model in report.report().models], path, sep=", ")
"""
    report.collect_from(tmp_path)
    work(tmp_path, "another's")
    done = subprocess.run(
        [sys.executable, "-c", code, WORKER],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {report.REPORT_DIR_VARIABLE: "."},
    )
    assert (done.returncode, done.stderr) == (0, "")
    *found, path = done.stdout.strip().split(", ")
    assert found == ["mine", "my worker's"]
    assert Path(path).parent == tmp_path
    assert names(report.report()) == ["another's", "mine", "my worker's"]


def test_a_directory_that_is_gone_is_not_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(report.REPORT_DIR_VARIABLE, str(tmp_path / "gone"))
    path = report.share_with_workers()
    assert path is not None
    assert str(tmp_path / "gone") in caplog.text
    work(path, "a worker's")
    assert names(report.report()) == ["a worker's"]
    assert os.environ[report.REPORT_DIR_VARIABLE] == str(path)
    shutil.rmtree(path)
    again = report.share_with_workers()
    assert again not in (path, None)
    work(Path(os.environ[report.REPORT_DIR_VARIABLE]), "another one's")
    assert names(report.report()) == ["another one's"]


def test_without_room_for_a_directory_workers_are_not_heard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert report.share_with_workers() is None
    assert "loads of worker processes will not be in the report" in caplog.text
    assert report.REPORT_DIR_VARIABLE not in os.environ
    report.add(ModelReport(name="mine"))
    assert names(report.report()) == ["mine"]


def test_who_reports_nothing_leaves_nothing(tmp_path: Path) -> None:
    code = """
import os
from tensor_dedup.loader import report
path = report.share_with_workers()
assert path.is_dir()
if os.fork() == 0:
    assert report.share_with_workers().parent == path
    raise SystemExit(0)  # in the usual way
assert os.wait()[1] == 0
assert path.is_dir()
"""
    environment = os.environ | {report.REPORT_DIR_VARIABLE: str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert list(tmp_path.iterdir()) == []


def test_processes_of_one_number_are_told_apart(tmp_path: Path) -> None:
    for time_ns, name in enumerate(["old", "new"]):
        folder = tmp_path / f"1-{time_ns:08x}"
        folder.mkdir()
        entry = GOOD | {"time_ns": time_ns, "model": {"name": name}}
        (folder / "1-1.json").write_bytes(json.dumps(entry).encode())
    other = tmp_path / "1-user's own"
    other.mkdir()
    (other / "1-1.json").write_bytes(b"somebody's")
    (tmp_path / "2024.json").write_bytes(b"somebody's")
    report.collect_from(tmp_path)
    assert names(report.report()) == ["old", "new"]


def test_sharing_with_workers_lasts_as_long_as_the_process() -> None:
    code = """
import os, subprocess, sys
from tensor_dedup.loader import report
path = report.share_with_workers()
assert report.share_with_workers() == path
subprocess.run([sys.executable, "-c", sys.argv[1], "worker"], check=True)
if os.fork() == 0:
    sys.exit(0)  # a forked child that ends in the usual way leaves the directory
os.wait()
print(*[model.name for model in report.report().models], path)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, WORKER], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    name, path = done.stdout.split()
    assert name == "worker"
    assert not Path(path).exists()
