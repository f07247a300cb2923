"""Remotes on servers that others have written: SeaweedFS, rclone, Azurite, and a registry's kin.

Base, one changed layer, merged LoRA and a full fine-tune, there and back between two stores; what
conditions the servers keep; and what is said of one that keeps none.
"""

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from remote_runs import real_servers, registries
from remote_runs.remotes import MemoryBucket
from remote_runs.s3_faults import FaultyProxy, Gateway, MemoryGoogle, MemoryS3, client
from store_runs.stores import (
    KIB,
    content,
    layered,
    noise,
    open_store,
    stored,
    tuned,
    weights,
    with_lora,
)
from tensor_dedup import Store
from tensor_dedup.remote import Remote, conditions, layout
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.errors import DamagedRemoteError, NoConditionsError
from tensor_dedup.store.format.tables import PLAIN

RACES, WRITERS = 50, 8


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_servers.weed(tmp_path_factory.mktemp("weed") / "server"):
        yield "s3://bucket"


@pytest.fixture(
    params=[
        "folder",
        pytest.param("seaweed", marks=pytest.mark.long),
        "azurite",
        "google",
        "registry",
    ]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where to push to; `NAME` in it stands for the checkpoint's."""
    if request.param == "folder":
        yield f"file://{tmp_path}/remote"
    elif request.param == "seaweed":
        yield f"{request.getfixturevalue('seaweed')}/{tmp_path.name}"
    elif request.param == "azurite":
        with real_servers.azurite(tmp_path / "azurite"):
            yield "az://models/team"
    elif request.param == "google":
        stand_in = FaultyProxy(MemoryGoogle(MemoryBucket()))
        with real_servers.environment(MemoryGoogle.environment(stand_in.port)):
            yield "gs://bucket/models"
        stand_in.close()
    else:
        pytest.importorskip("requests")
        with (
            registries.registry(tmp_path / "registry") as proxy,
            real_servers.environment({"TENSOR_DEDUP_CACHE": str(tmp_path / "cache")}),
        ):
            yield f"oci://{registries.host(proxy)}/team/NAME:v1"


def checkpoints(root: Path) -> dict[str, Path]:
    """A base, and three kinds of fine-tunes of it."""
    base = [weights(n, 256 * KIB) for n in range(12)]
    kinds = {
        "base": base,
        "one-layer": [noise(1, 256 * KIB), *base[1:]],
        "merged-lora": [with_lora(d, n) if n % 3 == 1 else d for n, d in enumerate(base)],
        "full": [base[0], *(tuned(d, n) for n, d in enumerate(base[1:]))],
    }
    return {name: layered(root, name, layers) for name, layers in kinds.items()}


def test_base_and_fine_tunes_go_there_and_back(tmp_path: Path, place: str) -> None:
    paths = checkpoints(tmp_path)
    store, other = open_store(tmp_path / "store"), open_store(tmp_path / "other")
    for name, path in paths.items():
        store.import_(path, name, compress="auto", base=None if name == "base" else "base")
    with store.checkpoint("full") as held:
        assert any(r.codec != PLAIN for t in held for r in held.records(bytes.fromhex(t.digest)))
    for name, path in paths.items():
        pushed = store.push(place.replace("NAME", name), name)
        assert store.push(place.replace("NAME", name), name).unchanged
        pulled = other.pull(place.replace("NAME", name), name)
        assert other.pull(place.replace("NAME", name), name).unchanged
        whole = sum(map(len, content(path).values()))
        most = {"base": 1.01, "one-layer": 0.12, "merged-lora": 0.4, "full": 0.6}[name]
        if place.startswith("oci"):  # layers are plain, so tensors that changed travel whole
            most = {"full": 1.0}.get(name, most)
        else:
            assert pushed.moved_bytes <= most * whole
        assert pulled.moved_bytes <= most * whole
        other.export(name, tmp_path / "out" / name)
        assert content(tmp_path / "out" / name) == content(path)
        with other.checkpoint(name) as got, store.checkpoint(name) as had:
            assert [*got.items()] == [*had.items()]
    assert other.verify(full=True).fine
    if place.startswith("oci"):
        return
    remote = Remote.open(place)
    assert remote.names() == sorted(paths)
    assert remote.verify(full=True).fine
    remote.delete("full")
    before = {each.key for each in remote.bucket.list("containers/")}
    deleted = {key for key in remote.gc(0).delete if key.startswith("containers/")}
    assert deleted
    assert {each.key for each in remote.bucket.list("containers/")} == before - deleted
    assert remote.gc(0).done
    assert remote.names() == ["base", "merged-lora", "one-layer"]
    assert remote.verify(full=True).fine
    store.push(place, "full")
    third = open_store(tmp_path / "third")
    third.pull(place, "full")
    assert stored(third, "full") == content(paths["full"])


def races(bucket: Bucket, pool: ThreadPoolExecutor) -> list[int]:
    """Of how many of eight writers of one object, in each race, the server said that they won.

    Every second race is about replacing what is there.
    """
    found = []
    for number in range(RACES):
        key, tag = f"races/{secrets.token_hex(4)}", None
        if number % 2:
            bucket.put(key, [memoryview(b"before")])
            held = bucket.get(key, 100)
            assert held is not None
            tag = held[1]
        won = [
            *pool.map(
                lambda n, key=key, tag=tag: bucket.put_if(key, b"writer %d" % n, tag),
                range(WRITERS),
            )
        ]
        found.append(sum(won))
        held = bucket.get(key, 100)
        assert held is not None
        if sum(won) == 1:
            assert held[0] == b"writer %d" % won.index(True)
    return found


@pytest.mark.parametrize(
    "place",
    # A race takes SeaweedFS a second.
    [pytest.param("seaweed", marks=pytest.mark.long), "azurite", "folder"],
    indirect=True,
)
def test_conditions_hold_in_fifty_races_of_eight(place: str) -> None:
    with ThreadPoolExecutor(WRITERS) as pool:
        assert races(Remote.open(place).bucket, pool) == [1] * RACES


def test_a_gateway_without_conditions_is_refused_and_may_be_read(tmp_path: Path) -> None:
    """rclone over a folder: one that many people have, and that loses races."""
    served, store = tmp_path / "served", open_store(tmp_path / "store")
    paths = checkpoints(tmp_path)
    for name, path in paths.items():
        store.import_(path, name, compress="auto")
        store.push(f"file://{served}/bucket/copied", name)
    store.import_(paths["full"], "again")
    with real_servers.rclone(served, tmp_path / "rclone"):
        with ThreadPoolExecutor(WRITERS) as pool:
            won = races(Remote.open("s3://bucket/races").bucket, pool)
        assert sum(count != 1 for count in won) > RACES / 2
        for where in ("new", "copied"):
            with pytest.raises(NoConditionsError, match="push to a server that keeps") as caught:
                store.push(f"s3://bucket/{where}", "again")
            assert caught.value.facts["condition"] == "If-None-Match"
        assert not (served / "bucket" / "new" / "refs").exists()
        assert not (served / "bucket" / "copied" / "refs" / "again").exists()
        other = open_store(tmp_path / "other")
        for name, path in paths.items():
            other.pull("s3://bucket/copied", name)
            assert stored(other, name) == content(path)


PAGE = b"<html>" + bytes(layout.HEAD_BYTES)


@pytest.mark.parametrize("push", ["first", "later", "over another", "over what is damaged"])
@pytest.mark.parametrize(
    ("spoils", "condition"),
    [
        ({"ignores": {"if-none-match"}}, "If-None-Match"),
        ({"ignores": {"if-match"}}, "If-Match"),
        ({"ignores": {"if-match", "if-none-match"}}, "If-None-Match"),
        ({"unknown": "if-none-match"}, "If-None-Match"),
        ({"unknown": "if-match"}, "If-Match"),
        ({"missing": b""}, "404"),
        ({"missing": b"<html>no such page</html>"}, "404"),
        ({"missing": PAGE}, "404"),
    ],
    ids=["create", "match", "both", "create 501", "match 501", "empty", "page", "large page"],
)
def test_a_gateway_that_keeps_one_condition_or_knows_no_missing_key_is_refused(
    full: Store, spoils: dict[str, Any], condition: str, push: str
) -> None:
    """Before anything is written that was not there, also where the remote was copied to it."""
    bucket, name = MemoryBucket(), "base" if push.startswith("over") else "tune"
    if push != "first":
        full.push(Remote(bucket), "base")
    if push == "over another":
        full.rename("base", "first")
        full.rename("tune", "base")
    if push == "over what is damaged":
        bucket.put("refs/base", [memoryview(b"damaged")])
    before = {key: blob for key, (blob, *_) in bucket.objects.items()}
    proxy = FaultyProxy(Gateway(bucket, **spoils))
    remote = Remote(client(proxy.port))
    if condition == "404" and push == "over another":
        # All that this push asks for is there.
        assert not full.push(remote, name, replace=True).unchanged
        proxy.close()
        return
    with pytest.raises(NoConditionsError, match="answers 404 for a missing key; pull") as caught:
        full.push(remote, name, replace=push.startswith("over"))
    assert caught.value.facts["condition"] == condition
    assert {key: blob for key, (blob, *_) in bucket.objects.items()} == before
    if condition != "404" or push == "first":  # the marker of a remote is there
        with pytest.raises(NoConditionsError):
            conditions.prepare(remote.bucket)
        assert {key: blob for key, (blob, *_) in bucket.objects.items()} == before
    if condition != "404" and push != "first":
        with pytest.raises(NoConditionsError):
            remote.delete("base")
        assert {key: blob for key, (blob, *_) in bucket.objects.items()} == before
    proxy.close()


@pytest.mark.parametrize("damaged", [b"", b"<html>no such page</html>", PAGE])
def test_damage_on_a_server_that_knows_missing_keys_is_damage(full: Store, damaged: bytes) -> None:
    proxy = FaultyProxy(MemoryS3(bucket := MemoryBucket()))
    remote = Remote(client(proxy.port))
    full.push(remote, "base")
    for key in ("FORMAT", "refs/base"):
        bucket.put(key, [memoryview(damaged)])
        with pytest.raises(DamagedRemoteError, match=f"{key}: "):
            full.push(remote, "base") if key != "FORMAT" else remote.usage()
    proxy.close()
