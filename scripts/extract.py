"""Get checkpoints out of a tensor-dedup store, without tensor-dedup.

  extract.py STORE                lists the names of the checkpoints
  extract.py STORE NAME OUTPUT    writes the files of one into OUTPUT, a new or empty folder

STORE is a store's folder, or a copy of all objects of a remote; it is only read. An imported
checkpoint becomes the files that were imported, byte for byte. A step of a training, RUN@STEP,
becomes its small files, model.safetensors with its weights, and training/state.safetensors with the
rest of its state. All bytes are compared with their digests before a file with them is in OUTPUT.

Exit status: 0, all files are there and right; 1, something is damaged or missing: "error:" names
each file that is left out, and why; 2, wrong use. "warning:" names damage that harms no file.
Needs Python 3.11, blake3, zstandard and numpy. It follows FORMAT.md.
"""

import fcntl
import json
import os
import re
import struct
import sys
from collections import namedtuple
from collections.abc import Iterator
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from blake3 import blake3

LEAF, CONTEXT = 2 << 20, "tensor-dedup digest v1"
NAME = re.compile(r"(?!.+@\d+@keep$)[A-Za-z0-9_][\w.@+=-]*(/[A-Za-z0-9_][\w.@+=-]*)*", re.ASCII)
TABLE = re.compile(r"[0-9a-f]{64}\.(slab|pack|delta|mixed|external|raw\.table)")
CODEC = re.compile(r"raw|leaves|parts:.+|(planes|xor|diff|sparse)[1248]|(step|nibble)[12]")
TYPES = {4: "F4", 6: "F6_E2M3 F6_E3M2", 16: "F16 BF16 I16 U16", 32: "F32 I32 U32"}  # safetensors'
TYPES |= {8: "BOOL I8 U8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ", 64: "F64 I64 U64 C64"}
BITS = {name: bits for bits, names in TYPES.items() for name in names.split()}
# The values of MessagePack with a size: first of the bytes that say so, bytes of the size after it.
FORMS = [(0xC4, bytes, 1), (0xCC, int, 1), (0xD9, str, 1), (0xDC, list, 2), (0xDE, dict, 2)]
# `end`: of the padding behind it. `path` and `origin`: of the file with its bytes.
Record = namedtuple("Record", "digest offset stored nbytes codec base leaves end path origin")
Piece = namedtuple("Piece", "digest nbytes name dtype shape")
Records = dict[bytes, list[Record]]
File = tuple[str, bytes, list[Piece]]  # path, header, and the pieces behind it
# What is raised where something is damaged, missing, or of a later version.
WRONG = (OSError, ValueError, LookupError, struct.error, zstandard.ZstdError)


def say(kind: str, text: object) -> None:
    sys.stderr.write(f"{kind}: {text}\n")


def tree(nbytes: int, leaves: bytes) -> bytes:
    """The digest of `nbytes` bytes with these leaf digests."""
    return blake3(nbytes.to_bytes(8, "little") + leaves, derive_key_context=CONTEXT).digest()


def unpacked(data: BytesIO) -> Any:
    """The next value of MessagePack, of the types that a frame has."""
    kind = data.read(1)[0]
    if kind < 0x80 or kind == 0xC0:
        return None if kind == 0xC0 else kind
    form: type = dict if kind < 0x90 else list if kind < 0xA0 else str
    size = kind & (31 if form is str else 15)
    if kind > 0xC0:
        first, form, width = [each for each in FORMS if each[0] <= kind][-1]
        size = int.from_bytes(data.read(width << (kind - first)))
    if form in (dict, list):
        values = [unpacked(data) for _ in range(size << (form is dict))]
        return values if form is list else dict(zip(values[::2], values[1::2], strict=True))
    return size if form is int else data.read(size) if form is bytes else data.read(size).decode()


def payload(path: Path, kind: bytes, data: bytes | None = None) -> Any:
    """What a frame says, `data` or the whole file, whose digest is the file's name."""
    data = path.read_bytes() if data is None else data
    leaves = b"".join(blake3(data[at : at + LEAF]).digest() for at in range(0, len(data), LEAF))
    if tree(len(data), leaves).hex() != path.name[:64] or blake3(data[:-32]).digest() != data[-32:]:
        raise ValueError(f"{path}: damaged")
    if struct.unpack_from("<4s4sIIQ", data) != (b"TDST", kind, 1, 0, len(data) - 56):
        raise ValueError(f"{path}: of a later version, or of another kind")
    return unpacked(BytesIO(data[24:-32]))


def lines(path: Path) -> list[str]:
    """The lines of a text but for the last, which checks them; none if it is damaged."""
    *body, last = path.read_bytes().splitlines(keepends=True) or [b""]
    good = last == f"check {blake3(b''.join(body)).hexdigest()}\n".encode()
    return b"".join(body).decode().splitlines() if good else []


def streams(chunk: bytes) -> Iterator[bytes]:
    """The streams of a chunk. One that contradicts itself makes a leaf with another digest."""
    while chunk:
        how, kept, size = struct.unpack_from("<BII", chunk)
        data, chunk = chunk[9 : 9 + kept], chunk[9 + kept :]
        if how == 1 and zstandard.frame_content_size(data) == size < 2 * LEAF:
            data = zstandard.ZstdDecompressor(max_window_size=8 << 20).decompress(data)
        yield data


def decoded(codec: str, chunk: bytes, base: bytes) -> bytes:
    """The leaf of which the codec made this chunk; `base` is zeros if it needs none."""
    family, width = codec[:-1], int(codec[-1])
    word, (*parts, rest) = np.dtype(f"<u{width}"), streams(chunk)
    old = np.frombuffer(base, word, len(base) // width)
    planes = np.frombuffer(b"".join(parts[-width:]), "u1").reshape(width, -1)
    numbers = planes.T.copy().view(word).ravel()
    if family in ("planes", "xor"):
        return bytes((old ^ numbers).tobytes()) + rest
    if family == "sparse":
        bits = np.unpackbits(np.frombuffer(parts[2], "u1"), bitorder="little")
        numbers = (numbers << 1 | bits[: len(numbers)]) + 1
    moved = (numbers >> 1) ^ -(numbers & 1)
    if family != "diff":
        gaps, far = np.frombuffer(parts[1], "u1"), moved
        small = np.frombuffer(parts[0] if family != "sparse" else bytes(len(old)), "i1")
        if family == "nibble":
            small = np.concatenate([small & 15, small >> 4 & 15])[: len(old)] - 8
        moved = small.astype(word)
        moved[np.cumsum(np.where(gaps == 0, 255, gaps), dtype="i8")[gaps != 0] - 1] = far
    return bytes((old + moved).tobytes()) + rest


def table(path: Path) -> Iterator[Record]:
    """The records of a container."""
    embedded, data = path.suffix not in (".external", ".table"), None
    if embedded:
        with path.open("rb") as file:
            file.seek(-16, os.SEEK_END)
            start, magic = struct.unpack("<Q8s", file.read())
            if magic != b"TDSTEND\x01":
                raise ValueError(f"{path}: damaged in its last bytes")
            file.seek(start)
            data = file.read(1 << 30)[:-16]
    _, nbytes, records, origin = payload(path, b"tabl", data)
    where = Path(origin[0]) if origin else path if embedded else path.with_suffix("")
    ends = [*(each[1] for each in records[1:]), nbytes]
    for said, end in zip(records, ends, strict=True):
        each = Record._make([*said, end, where, origin])
        known = CODEC.fullmatch(each.codec) and each.offset + each.stored <= end
        if not known or tree(each.nbytes, each.leaves) != each.digest:
            raise ValueError(f"{path}: contradicts itself, or is of a later version")
        yield each


def read(record: Record, offset: int, count: int) -> bytes:
    """Bytes of a record; where they are its last, the padding behind it is checked."""
    with record.path.open("rb") as file:
        now = os.fstat(file.fileno())
        said = [now.st_size, now.st_dev, now.st_ino, now.st_mtime_ns, now.st_ctime_ns]
        if record.origin and record.origin[1:] != [str(number) for number in said]:
            raise ValueError("the file has changed since it was indexed")
        file.seek(record.offset + offset)
        data = bytes(file.read(count))
        if offset + count == record.stored and any(file.read(record.end - file.tell())):
            say("warning", f"{record.path}: damaged padding before byte {record.end}")
    return data


def leaf_in(record: Record, number: int, size: int, records: Records) -> bytes:
    """A leaf as the record has it, not compared with its digest."""
    if (codec := record.codec) == "raw":
        return read(record, number * LEAF, size)
    head = read(record, 0, len(record.leaves) // 2)
    sizes, check = np.frombuffer(head, "<u4")[::4], head[16 * number + 4 :][:12]
    chunk = read(record, len(head) + int(sizes[:number].sum()), int(sizes[number]))
    if blake3(chunk).digest(12) != check:
        raise ValueError(f"damaged in the record at byte {record.offset}")
    if codec.startswith("parts:") and int(codec[6:], 16) >> number & 1:
        return leaf(tree(size, record.leaves[32 * number :][:32]), 0, size, records, alone=True)
    if codec == "leaves" and chunk:
        codec, chunk = str(chunk[1 : 1 + chunk[0]], "ascii"), chunk[1 + chunk[0] :]
    if not codec:
        return chunk
    zeros = codec.startswith("planes")
    base = bytes(size) if zeros else leaf(record.base or b"", number, size, records, alone=True)
    return decoded(codec, chunk, base) if chunk else base


def leaf(piece: bytes, number: int, size: int, records: Records, alone: bool = False) -> bytes:
    """A leaf from any record that has it whole; `alone`, from one that can be an anchor."""
    wrong = list[str]()
    for record in records.get(piece, []):
        try:
            if alone and (record.base or record.origin):
                continue
            data, digest = leaf_in(record, number, size, records), record.leaves[32 * number :][:32]
            if blake3(data).digest() == digest and len(data) == size:
                sys.stderr.writelines(f"warning: {each}\n" for each in wrong)
                return data
            wrong.append(f"{record.path}: damaged in the record at byte {record.offset}")
        except WRONG as error:
            wrong.append(f"{record.path}: {error}")
    raise ValueError("; ".join(wrong) or f"no container has the piece {piece.hex()}")


def references(root: Path) -> dict[str, str]:
    """The manifest of each checkpoint, by name; empty where its reference is damaged."""
    if not re.fullmatch("tensor-dedup (store|remote) version 1", " ".join(lines(root / "FORMAT"))):
        raise ValueError(f"{root / 'FORMAT'} is damaged, or of a later version")
    if (root / "lock").exists():
        fcntl.flock(os.open(root / "lock", os.O_RDONLY), fcntl.LOCK_SH)  # until this process ends
    found = {}
    for path in (root / "refs").iterdir():
        said, name = lines(path), path.name.replace("%2F", "/")
        if NAME.fullmatch(name) and said[:1] != ["tensor-dedup deleted reference"]:
            good = said[:2] == ["tensor-dedup reference", f"name {name}"]
            found[name] = said[2].removeprefix("manifest ") if good else ""
    return found


def files_of(root: Path, manifest: str) -> Iterator[File]:
    """Each file of a checkpoint."""
    folder = root / "manifests"
    said, pages, _, _, notes = payload(folder / manifest[:2] / manifest, b"mani")
    paths = [folder / page.hex()[:2] / page.hex() for page in pages]
    rest = iter([Piece(*each) for path in paths for each in payload(path, b"page")[0]])
    files = {path: list(islice(rest, count)) for path, _, count, _ in said}
    folders = {path[: at.start()] for path in files for at in re.finditer("/", path)}
    for path, nbytes, _, _ in said:
        bad = {"", ".", ".."} & set(path.split("/")) or "\0" in path or path in folders
        if bad or len(files) != len(said) or sum(each.nbytes for each in files[path]) != nbytes:
            raise ValueError(f"the manifest {manifest} contradicts itself at {path!r}")
        yield path, b"", files[path]
    yield from loose(rest, notes.get("weights", ""), {*files}, folders)


def loose(rest: Iterator[Piece], part: str, files: set[str], folders: set[str]) -> Iterator[File]:
    """The files that pieces of none become, beside these files and folders."""
    weights, state = dict[str, Piece](), dict[str, Piece]()
    own = re.compile(f"(?!#){re.escape(part and part + '.')}(?!__metadata__$)(.+)", re.DOTALL)
    for each in rest:
        match, known = own.fullmatch(each.name), each.dtype in BITS
        where, name = (weights, match[1]) if match and known else (state, each.name)
        where[name] = each if known else each._replace(dtype="U8", shape=[each.nbytes])
    for path, pieces in ("model.safetensors", weights), ("training/state.safetensors", state):
        header, at = dict[str, Any](__metadata__={"format": "pt"}), 0
        ordered = sorted(pieces.items(), key=lambda item: -BITS[item[1].dtype])
        for name, each in ordered:
            span = [at, at := at + each.nbytes]
            header[name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": span}
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        while path in files | folders or path.partition("/")[0] in files:
            path = re.sub(r"\b(?=\W)", "_", path, count=1)
        if pieces:
            yield path, len(text).to_bytes(8, "little") + text, [each for _, each in ordered]


def extract(root: Path, manifest: str, output: Path) -> int:
    """Write every file of a checkpoint; 1 if one is left out, else 0."""
    wanted, records, status = list(files_of(root, manifest)), Records(), 0
    for path in sorted(root.glob("containers/??/*")):
        try:
            for record in table(path) if TABLE.fullmatch(path.name) else []:
                records.setdefault(record.digest, []).append(record)
        except WRONG as error:
            say("warning", error if str(path) in str(error) else f"{path}: damaged ({error})")
    part = output / f".{manifest}"  # no file is called so: it is a digest of all names
    for target, header, pieces in wanted:
        (output / target).parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb") as file:
                file.write(header)
                for each in pieces:
                    for number, at in enumerate(range(0, each.nbytes, LEAF)):
                        file.write(leaf(each.digest, number, min(LEAF, each.nbytes - at), records))
            part.rename(output / target)
        except ValueError as error:
            status = 1
            part.unlink()
            say("error", f"{target} is left out: {each.name or 'bytes without a name'}: {error}")
    return status


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 3) or arguments[0].startswith("-"):
        sys.stdout.write(str(__doc__))
        return 0 if arguments in (["-h"], ["--help"]) else 2
    root, (name, output) = Path(arguments[0]), arguments[1:] or ("", "")
    try:
        found = references(root)
        if name in found and not (Path(output).exists() and any(Path(output).iterdir())):
            return extract(root, found[name], Path(output))
        if name:
            say("error", f"{output} is not empty" if name in found else f"no {name} in {root}")
            return 2
        sys.stdout.writelines(f"{each}\n" for each in sorted(found))
        sys.stderr.writelines(f"error: {each}: damaged\n" for each in found if not found[each])
        return int("" in found.values())
    except WRONG as error:
        say("error", error)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
