"""What an import encodes, one tensor at a time."""

from contextlib import closing
from pathlib import Path

from stores import KIB, content, open_store, safetensors, weights, write
from tensor_dedup.digest import digest, leaf_digests
from tensor_dedup.store.writing.containers import NewPiece
from tensor_dedup.store.writing.encoder import Encoder
from tensor_dedup.store.writing.hashing import Hashed
from tensor_dedup.store.writing.sources import read_source


def test_nothing_is_stored_against_itself(tmp_path: Path) -> None:
    """Somebody else may store the same after it was looked up: then it is the base's, too."""
    data = weights(1, 300 * KIB)
    store = open_store(tmp_path / "store")
    tensor = ("BF16", (150 * KIB,), data)
    write(tmp_path / "base", {"model.safetensors": safetensors({"w": tensor})})
    store.import_(tmp_path / "base", name="base")
    with store._session() as (index, hasher):
        encoder = Encoder(store._objects, index, hasher)
        with closing(encoder):
            encoder.open_base("base")
            source = read_source(store._files, tmp_path / "base")
            [file] = [each for each in source.files if each.weights]
            [part] = [each for each in file.segments if each.dtype is not None]
            handle = store._files.open(file.path, "read")
            plan = encoder.plan(handle, part, file.prefix)
            assert plan is not None
            assert plan.anchor is not None
            hashed = Hashed(bytes.fromhex(digest(data)), b"".join(leaf_digests(data)))
            new = NewPiece(part.start, part.nbytes, hashed.digest)
            assert not encoder.write(handle, new, hashed, plan)
            store._files.close(handle)
            assert encoder.writer.seal() is None
    assert store.verify(full=True).faults == []
    store.export("base", tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "base")
