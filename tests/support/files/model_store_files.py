"""The stores of Ollama and Docker Model Runner, as these tools leave them on disk."""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from files.gguf_files import file_of, info

OLLAMA = "application/vnd.ollama.image."
DOCKER = "application/vnd.docker.ai."
MANIFEST_LIST = "application/vnd.ollama.manifest.list.v2+json"

Layers = Sequence[tuple[str, bytes]]


def gguf_bytes(tensors: Mapping[str, float], alignment: int = 32) -> bytes:
    """A GGUF file in which each of `tensors` is eight F32 numbers of this value."""
    infos, data = [], b""
    for name, value in tensors.items():
        infos.append(info(name, (8,), 0, len(data)))
        data += struct.pack("<8f", *[value] * 8).ljust(alignment, b"\0")
    return file_of((), infos, data)


def safetensors_bytes(tensors: Mapping[str, float], **metadata: str) -> bytes:
    """A safetensors file in which each of `tensors` is two F32 numbers of this value."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for number, name in enumerate(tensors):
        offsets = [8 * number, 8 * number + 8]
        header[name] = {"dtype": "F32", "shape": [2], "data_offsets": offsets}
    text = json.dumps(header).encode()
    data = b"".join(struct.pack("<2f", value, value) for value in tensors.values())
    return struct.pack("<Q", len(text)) + text + data


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def manifest_of(layers: Layers, prefix: str = OLLAMA) -> dict[str, Any]:
    """A manifest in the form of both tools."""
    return {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": {
            "mediaType": "application/vnd.docker.container.image.v1+json",
            "digest": digest(b"{}"),
            "size": 2,
        },
        "layers": [
            {"mediaType": prefix + kind, "digest": digest(data), "size": len(data)}
            for kind, data in layers
        ],
    }


def ollama_model(
    root: Path,
    name: str,
    layers: Layers,
    top: str = "manifests",
    changes: Mapping[str, object] = MappingProxyType({}),
) -> Path:
    """Put a model into the store `root` as Ollama does; return the path of its manifest.

    `name` is HOST/NAMESPACE/MODEL/TAG. `changes` replace fields of the manifest.
    """
    for data in (b"{}", *(data for _, data in layers)):
        write(root / "blobs" / digest(data).replace(":", "-"), data)
    manifest = manifest_of(layers) | dict(changes)
    return write(root / top / name, json.dumps(manifest).encode())


def docker_model(root: Path, tag: str, layers: Layers, paths: Sequence[str | None] = ()) -> Path:
    """Put a model into the store `root` as Docker Model Runner does; return its manifest's path.

    `paths` are the annotations of the layers that say what their files are called.
    """
    manifest = manifest_of(layers, DOCKER)
    for layer, given in zip(manifest["layers"], paths, strict=False):
        if given is not None:
            layer["annotations"] = {"org.cncf.model.filepath": given}
    raw = json.dumps(manifest).encode()
    for data in (b"{}", *(data for _, data in layers)):
        write(root / "blobs" / "sha256" / digest(data).removeprefix("sha256:"), data)
    listed = root / "models.json"
    index = json.loads(listed.read_text()) if listed.exists() else {"models": []}
    index["models"].append({"id": digest(raw), "tags": [tag], "files": []})
    write(listed, json.dumps(index).encode())
    return write(root / "manifests" / "sha256" / digest(raw).removeprefix("sha256:"), raw)
