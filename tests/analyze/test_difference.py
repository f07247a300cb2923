"""What `diff` finds between two checkpoints, against differences made by hand."""

from collections.abc import Mapping
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from tensor_dedup import Store
from tensor_dedup.analyze.difference import diff, prefixes_of

Arrays = Mapping[str, numpy.ndarray]


def write(path: Path, arrays: Arrays) -> Path:
    save_file(dict(arrays), path)
    return path


def numbers(seed: int, *shape: int) -> numpy.ndarray:
    return numpy.random.default_rng(seed).standard_normal(shape).astype(numpy.float32)


def base() -> dict[str, numpy.ndarray]:
    return {f"layers.{n}.weight": numbers(n, 30, 10) for n in range(4)} | {"head": numbers(9, 7)}


def test_by_hand(tmp_path: Path) -> None:
    old, new = base(), base()
    new["layers.1.weight"][3, :5] += 1
    new["layers.2.weight"] = numbers(77, 31, 10)
    new["renamed"] = new.pop("layers.3.weight")
    del new["head"]
    new["other"] = numbers(78, 5)
    found = diff(write(tmp_path / "a.safetensors", old), write(tmp_path / "b.safetensors", new))
    assert (found.unchanged, found.unchanged_bytes) == (1, 1200)
    assert found.renamed == (("layers.3.weight", "renamed"),)
    one, two = found.changed
    assert (one.name, one.numbers, one.differing) == ("layers.1.weight", 300, 5)
    assert (two.old_shape, two.shape, two.numbers, two.differing) == (
        (30, 10),
        (31, 10),
        None,
        None,
    )
    assert (found.added, found.removed) == ((("other", 20),), (("head", 28),))


def test_what_is_wrapped_is_renamed_and_what_changed_in_it_is_changed(tmp_path: Path) -> None:
    old = base()
    new = {f"state.model.{name}": array.copy() for name, array in old.items()}
    new["state.model.head"][2] = 0
    found = diff(write(tmp_path / "a.safetensors", old), write(tmp_path / "b.safetensors", new))
    assert len(found.renamed) == 4
    (head,) = found.changed
    assert (head.old_name, head.name, head.differing) == ("head", "state.model.head", 1)
    assert (found.added, found.removed, found.unchanged) == ((), (), 0)
    back = diff(tmp_path / "b.safetensors", tmp_path / "a.safetensors")
    assert [(each.old_name, each.name) for each in back.changed] == [("state.model.head", "head")]


def test_a_name_that_both_have_is_not_what_another_one_was_called(tmp_path: Path) -> None:
    u, v, old, new, more = (numbers(seed, 4) for seed in range(5))
    a = write(tmp_path / "a.safetensors", {"x.u": u, "x.v": v, "x.w": old})
    b = write(tmp_path / "b.safetensors", {"u": u, "v": v, "w": more, "x.w": new})
    found = diff(a, b)
    assert found.renamed == (("x.u", "u"), ("x.v", "v"))  # so that x.w may have become w, too
    assert [(each.old_name, each.name) for each in found.changed] == [("x.w", "x.w")]
    assert [name for name, _ in found.added] == ["w"]


def test_content_that_moved_between_kept_names_is_changed(tmp_path: Path) -> None:
    one, two = numbers(1, 4), numbers(2, 4)
    a = write(tmp_path / "a.safetensors", {"x": one, "y": two})
    b = write(tmp_path / "b.safetensors", {"x": two, "y": one})
    found = diff(a, b)
    assert [each.name for each in found.changed] == ["x", "y"]
    assert found.renamed == ()


def test_large_tensors_are_compared_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = {"big": numbers(3, 1000)}
    new = {"big": old["big"].copy()}
    new["big"][[0, 15, 16, 17, 999]] += 1
    monkeypatch.setattr("tensor_dedup.analyze.difference._PIECE_BYTES", 64)
    a, b = write(tmp_path / "a.safetensors", old), write(tmp_path / "b.safetensors", new)
    (change,) = diff(a, b).changed
    assert (change.numbers, change.differing) == (1000, 5)
    (uncounted,) = diff(a, b, count=False).changed
    assert (uncounted.numbers, uncounted.differing) == (None, None)


def test_folders_files_and_a_store_give_the_same(tmp_path: Path) -> None:
    new = base()
    new["head"][:3] += 1
    a = write(tmp_path / "a.safetensors", base())
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "model.safetensors", new)
    store = Store.open(tmp_path / "store")
    store.import_(a, "a")
    store.import_(tmp_path / "folder", "b", compress="auto")
    expected = diff(a, tmp_path / "folder").changed
    assert [(each.name, each.differing) for each in expected] == [("head", 3)]
    for one in (a, "store://a"):
        for two in (tmp_path / "folder", "store://b"):
            assert diff(one, two, store=tmp_path / "store").changed == expected
    assert diff("store://a", a, store=tmp_path / "store").changed == ()


def test_prefixes() -> None:
    assert prefixes_of("model.a.b", "a.b") == ("model.", "")
    assert prefixes_of("x", "x") == ("", "")
    assert prefixes_of("old", "new") == ("old", "new")
