"""Names that lie in the Hugging Face cache."""

from pathlib import Path

import pytest

from store_runs.stores import write
from tensor_dedup.errors import NoSuchPathError
from tensor_dedup.formats.hub_cache import locate


def test_names_in_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    repository = tmp_path / "models--Qwen--tiny"
    for revision in ("abc111", "abc222", "def333"):
        (repository / "snapshots" / revision).mkdir(parents=True)
    (tmp_path / "models--alone" / "snapshots" / "f00").mkdir(parents=True)
    found = repository / "snapshots"
    assert locate("Qwen/tiny@d") == found / "def333"
    assert locate("Qwen/tiny@abc1") == found / "abc111"
    assert locate("alone") == tmp_path / "models--alone" / "snapshots" / "f00"
    for unclear, said in (
        ("Qwen/tiny", "several revisions in .* Qwen/tiny@abc111, Qwen/tiny@abc222, Qwen/tiny@def"),
        ("Qwen/tiny@abc", "several revisions in .* Qwen/tiny@abc111, Qwen/tiny@abc222$"),
        ("Qwen/tiny@x", "no revision 'x' in .* Qwen/tiny@abc111, "),
        ("Qwen/tiny@../main", "no revision"),
    ):
        with pytest.raises(NoSuchPathError, match=said):
            locate(unclear)
    write(repository / "refs", {"main": b"abc222", "pr": b"def333"})
    assert locate("Qwen/tiny") == found / "abc222"
    assert locate("Qwen/tiny@pr") == found / "def333"
    # A folder of that name counts first; what is in neither place is a path.
    write(tmp_path / "Qwen" / "tiny", {"config.json": b"{}"})
    assert locate("Qwen/tiny") == Path("Qwen/tiny")
    assert locate("Qwen/nothing@1") == Path("Qwen/nothing@1")
    assert locate(tmp_path / "x" / "y") == tmp_path / "x" / "y"
