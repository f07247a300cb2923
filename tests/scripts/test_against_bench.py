"""The part of remotes of the benchmark of two commits runs; the others need minutes."""

from pathlib import Path

import pytest

pytest.importorskip("obstore")

from bench import journeys


def test_transfers_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journeys, "_TENSOR_BYTES", 1 << 12)
    monkeypatch.setattr(journeys, "_TRANSFERS", 1)
    (tmp_path / "scratch").mkdir()
    journeys.make_remote(tmp_path)
    found = journeys.remote(tmp_path, tmp_path / "scratch")
    assert [*found] == [
        "first push",
        "push of a fine-tune",
        "push of nothing new",
        "pull of both",
        "pull of the fine-tune alone",
    ]
    assert found["pull of both"] > found["pull of the fine-tune alone"] > 0
