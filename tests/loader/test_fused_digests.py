"""Naming what fills a fused tensor, part by part, without hashing it twice."""

from pathlib import Path
from typing import Any

import torch

from tensor_dedup.digest import digest
from tensor_dedup.loader.deferred.recipe import composite_digest, parts_of
from tensor_dedup.loader.residents.resident import tensor_bytes
from vllm_runs.deferring import Load, deferred, module, save

Q, K = torch.arange(24.0).reshape(4, 6), torch.arange(100.0, 112.0).reshape(2, 6)


def fuse(model: Any, weights: Any) -> None:
    model.qkv.data[:4].copy_(weights["q"])
    model.qkv.data[4:].copy_(weights["k"])


def names(path: Path, load: Load, **shape: Any) -> tuple[str, str, int]:
    """The name with the sources' digests, the one from the bytes, and how many bytes it hashed."""
    with deferred(module(qkv=torch.zeros(6, 6, **shape)), path, load) as run:
        view = run.view("qkv")
        made = tensor_bytes(run.make("qkv"))
        hashed: list[int] = []

        def counting(data: memoryview) -> str:
            hashed.append(data.nbytes)
            return digest(data)

        trusted = composite_digest(view, made, counting)
        assert composite_digest(view, made, digest, trusted=False) == trusted
        return trusted, digest(made), sum(hashed)


def test_the_parts_of_a_fused_tensor_are_not_hashed_again(tmp_path: Path) -> None:
    path = save(tmp_path / "a.safetensors", {"q": Q, "k": K})
    with deferred(module(qkv=torch.zeros(6, 6)), path, fuse) as run:
        assert [(p.start, p.stop) for p in parts_of(run.view("qkv"))] == [(0, 96), (96, 144)]
    name, _, hashed = names(path, fuse)
    assert name.startswith("parts:")
    assert hashed == 0


def test_other_bytes_have_another_name(tmp_path: Path) -> None:
    other = K.clone()
    other[1, 5] += 1
    first = names(save(tmp_path / "a.safetensors", {"q": Q, "k": K}), fuse)
    second = names(save(tmp_path / "b.safetensors", {"q": Q, "k": other}), fuse)
    assert first[0] != second[0]


def test_parts_that_change_places_have_another_name(tmp_path: Path) -> None:
    def swapped(model: Any, weights: Any) -> None:
        model.qkv.data[2:].copy_(weights["q"])
        model.qkv.data[:2].copy_(weights["k"])

    path = save(tmp_path / "a.safetensors", {"q": Q, "k": K})
    assert names(path, fuse)[0] != names(path, swapped)[0]


def test_a_cast_part_is_hashed_and_has_the_name_of_its_equal(tmp_path: Path) -> None:
    half = save(tmp_path / "half.safetensors", {"q": Q.bfloat16(), "k": K.bfloat16()})
    full = save(tmp_path / "full.safetensors", {"q": Q, "k": K})
    shape = {"dtype": torch.bfloat16}
    plain, cast = names(half, fuse, **shape), names(full, fuse, **shape)
    assert plain[0] == cast[0]
    assert (plain[2], cast[2]) == (0, 72)


def test_one_part_is_named_by_its_digest(tmp_path: Path) -> None:
    def whole(model: Any, weights: Any) -> None:
        model.qkv.data.copy_(torch.cat([weights["q"], weights["k"]]))

    path = save(tmp_path / "a.safetensors", {"q": Q, "k": K})
    name, content, _ = names(path, whole)
    assert name == content


def test_writes_that_overlap_are_one_part(tmp_path: Path) -> None:
    def overlapping(model: Any, weights: Any) -> None:
        model.qkv.data[:4].copy_(weights["q"])
        model.qkv.data[4:].copy_(weights["k"])
        model.qkv.data[3:5].copy_(weights["k"])

    path = save(tmp_path / "a.safetensors", {"q": Q, "k": K})
    name, content, _ = names(path, overlapping)
    assert name == content


def test_a_part_that_is_not_written_makes_it_one(tmp_path: Path) -> None:
    def half(model: Any, weights: Any) -> None:
        model.qkv.data[:2].copy_(weights["q"][:2])
        model.qkv.data[4:].copy_(weights["k"])

    path = save(tmp_path / "a.safetensors", {"q": Q, "k": K})
    name, content, _ = names(path, half)
    assert name == content
