"""Writes the new checkpoint: the fine-tune's files, with some tensors replaced by the base's."""

import json
import os
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.formats.checkpoint import Checkpoint, CheckpointFile
from tensor_dedup.formats.files import OpenFile, opened
from tensor_dedup.formats.safetensors import SafetensorsHeader
from tensor_dedup.formats.weight_choice import UNFINISHED

_COPY_BYTES: Final = 8 << 20
_ALIGNMENT: Final = 8
# Weights in another form would be those of the fine-tune, without anything taken from the base.
_WEIGHTS: Final = frozenset(
    (
        *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"),
        *(".npz", ".tflite", ".ot", ".pdparams"),
    )
)
_INDEX: Final = ".index.json"

# Yields the bytes of a tensor of the base, in order.
Taken = Callable[[], Iterator[bytes]]


def write_files(
    checkpoint: Checkpoint,
    target: Path,
    taken: Mapping[str, Taken],
    metadata: Callable[[Sequence[str]], Mapping[str, str]],
) -> list[str]:
    """Write a checkpoint's files below `target`, with the tensors in `taken` replaced.

    * `taken` maps the full name of a tensor to a function that yields its new bytes.
    * `metadata` is called for each file with replaced tensors. It takes the names of these tensors,
      and returns entries to add to the file's metadata.

    Where several files hold a tensor in `taken`, it is replaced in each: some readers ask the index
    which one counts, and others load the last.

    Files without weights are copied, except for hidden ones. Weight files that are not part of the
    checkpoint, such as those in other formats, are not copied, nor are their indexes. The result
    has the paths of these files, relative to the checkpoint's folder.

    Raises:
        UnsupportedError: A weight file of the checkpoint is not a safetensors file, or the files
            lie in the store of another tool. Or another copy of a tensor in `taken` has another
            dtype or shape.
        FormatError: A link leads out of the checkpoint.
    """
    _check_copies(checkpoint, taken)
    root = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    weights = {file.path: file for file in checkpoint.files}
    for file in checkpoint.files:
        if not isinstance(file.header, SafetensorsHeader):
            raise UnsupportedError(
                f"{file.path}: is no safetensors file; save the fine-tune as safetensors first",
                path=str(file.path),
            )
        if not file.path.is_relative_to(root):
            raise UnsupportedError(
                f"{checkpoint.path}: its files lie in the store of another tool; import it with "
                "`tensor-dedup import`, and give store://NAME",
                path=str(checkpoint.path),
            )
        place = target / file.path.relative_to(root)
        place.parent.mkdir(parents=True, exist_ok=True)
        with _reading(checkpoint, file.path) as source, place.open("xb") as out:
            _write(file, source, out, taken, metadata)
            _sync(out)
    left_out = []
    for path in _others(checkpoint, root):
        name = path.relative_to(root)
        if path in weights:
            continue
        if _is_weights(path, weights):
            left_out.append(str(name))
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        with _reading(checkpoint, path) as source, (target / name).open("xb") as out:
            out.writelines(_pieces(source, 0, source.size))
            _sync(out)
    return left_out


def _check_copies(checkpoint: Checkpoint, taken: Collection[str]) -> None:
    counted = {name: (file, spec) for name, file, spec in checkpoint.tensors() if name in taken}
    for name, other, copy in checkpoint.not_indexed():
        if name not in counted:
            continue
        file, spec = counted[name]
        if (copy.dtype, copy.shape) != (spec.dtype, spec.shape):
            shapes = [
                f"{each.dtype} {list(each.shape)} in {checkpoint.relative(place)}"
                for place, each in ((file, spec), (other, copy))
            ]
            raise UnsupportedError(
                f"{name}: {' and '.join(shapes)}, and readers differ in which of the two they "
                "load; leave its layer out, or save the fine-tune again with one of them",
                tensor=name,
                path=str(other.path),
            )


def _write(
    file: CheckpointFile,
    source: OpenFile,
    out: IO[bytes],
    taken: Mapping[str, Taken],
    metadata: Callable[[Sequence[str]], Mapping[str, str]],
) -> None:
    header = file.header
    assert isinstance(header, SafetensorsHeader)
    replaced = [file.prefix + s.name for s in header.tensors if file.prefix + s.name in taken]
    more = metadata(replaced) if replaced else {}
    out.write(_head(header, more))
    instead = set(replaced)
    for spec in header.tensors:
        name = file.prefix + spec.name
        if name in instead:
            out.writelines(taken[name]())
        else:
            out.writelines(_pieces(source, spec.start, spec.nbytes))


def _head(header: SafetensorsHeader, more: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {}
    if header.metadata or more:
        entries["__metadata__"] = {**header.metadata, **more}
    at = 0
    for spec in header.tensors:
        end = at + spec.nbytes
        entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


@contextmanager
def _reading(checkpoint: Checkpoint, path: Path) -> Iterator[OpenFile]:
    with opened(path) as source:
        checkpoint.links.check_open(path, source.fd)
        yield source


def _sync(out: IO[bytes]) -> None:
    out.flush()
    os.fsync(out.fileno())


def _others(checkpoint: Checkpoint, root: Path) -> Iterator[Path]:
    if not checkpoint.path.is_dir():
        return
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def _is_weights(path: Path, written: Collection[Path]) -> bool:
    if path.suffix in _WEIGHTS or path.name.endswith(UNFINISHED):
        return True
    if not path.name.endswith(_INDEX):
        return False
    stem = path.name.removesuffix(_INDEX)
    return not any(
        other.parent == path.parent and other.suffix == Path(stem).suffix for other in written
    )


def _pieces(source: OpenFile, start: int, nbytes: int) -> Iterator[bytes]:
    for at in range(start, start + nbytes, _COPY_BYTES):
        yield source.read(at, min(_COPY_BYTES, start + nbytes - at))
