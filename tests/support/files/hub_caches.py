"""Hugging Face caches with a shared blob store, as `huggingface_hub` 2.2 and later leave them.

Files of weights are blobs of the whole cache, to which each repository's blobs are links; other
files are blobs of their repository. The library's own code makes the links, so that a layout which
it gives up fails a test here.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

COMMIT = f"{1:040}"
_WEIGHTS = (".safetensors", ".bin", ".gguf")


def snapshot(
    cache: Path, repository: str, files: Mapping[str, bytes], commit: str = COMMIT
) -> Path:
    """Put a snapshot of `repository` into a cache, which the branch "main" is then at."""
    root = cache.absolute() / f"models--{repository.replace('/', '--')}"
    folder = root / "snapshots" / commit
    for each in (folder, root / "blobs", root / "refs"):
        each.mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(commit)
    for name, data in files.items():
        blob = root / "blobs" / hashlib.sha256(data).hexdigest()
        if not blob.is_symlink():
            blob.write_bytes(data)
            if name.endswith(_WEIGHTS):
                share(blob, cache)
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return folder


def share(blob: Path, cache: Path) -> Path:
    """Move a repository's blob into the shared store, and return its path there."""
    library = pytest.importorskip(
        "huggingface_hub.utils._shared_blobs", reason="pip install 'huggingface_hub>=2.2'"
    )
    data = blob.read_bytes()
    xet = hashlib.sha256(b"xet" + data).hexdigest()
    assert library.publish_blob_to_shared_store(
        blob_path=str(blob), xet_hash=xet, cache_dir=cache.absolute(), expected_size=len(data)
    )
    assert blob.is_symlink()
    return blob.resolve()
