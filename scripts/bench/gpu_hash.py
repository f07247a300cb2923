"""The part `hash` of gpu.py: hashing where tensors lie, beside fetching them and hashing here."""

import time
from collections.abc import Callable

import torch

from gpu_place import MIB, Bench
from stats import estimate, verdict
from tensor_dedup.digest import digest, leaf_digests
from tensor_dedup.loader.cuda.hashing import HASHING, DeviceHash, digest_of
from tensor_dedup.loader.report import report
from tensor_dedup.loader.residents.resident import tensor_bytes

SIZES = (MIB, 64 * MIB, 1024 * MIB)
REHEARSED = (MIB // 4, MIB)
REPEATS = 15
LEAST = 1.0  # or it had better not be done there


def hashing(bench: Bench) -> list[str]:
    """GB a second by size, in turns; and how long the first use of a process takes."""
    if bench.rehearsal:  # the host stands in for the kernel
        with HASHING.replaced(
            "cpu", lambda _: DeviceHash(lambda d: leaf_digests(tensor_bytes(d)), 0)
        ):
            return _lines(bench, REHEARSED)
    return _lines(bench, SIZES)


def _lines(bench: Bench, sizes: tuple[int, ...]) -> list[str]:
    began = time.perf_counter()
    HASHING.digest(_bytes(bench, sizes[-1]))
    HASHING.settle()
    if HASHING.digest(_bytes(bench, sizes[-1])) is None:
        return [f"Not run: {report().devices}"]
    lines = [
        f"It was ready after {time.perf_counter() - began:.2f} s: building the kernels, where no "
        "cache has them, which a thread does while the host hashes, and asking for known answers.",
        "",
        "| MiB | there, GB/s | fetched, GB/s | there over fetched | aim |",
        "| --- | --- | --- | --- | --- |",
    ]
    for size in sizes:
        there, fetched = _in_turns(bench, _bytes(bench, size))
        rates = [
            estimate([size / each / 1e9 for each in found]).text(2) for found in (there, fetched)
        ]
        share = estimate([b / a for a, b in zip(there, fetched, strict=True)])
        aim = f"{LEAST}: {verdict(share, least=LEAST)}"
        lines.append(f"| {size / MIB:g} | {rates[0]} | {rates[1]} | {share.text(2)} | {aim} |")
    return lines


def _bytes(bench: Bench, nbytes: int) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, device=bench.place)


def _in_turns(bench: Bench, data: torch.Tensor) -> tuple[list[float], list[float]]:
    """Seconds of each way, turn by turn."""
    ways: tuple[Callable[[], object], ...] = (
        lambda: HASHING.digest(data),
        lambda: digest(tensor_bytes(data.cpu())),
    )
    hashed = HASHING.nbytes
    assert digest_of(data) == digest(tensor_bytes(data.cpu()))
    assert HASHING.nbytes == hashed + data.nbytes, "not hashed there"
    found: tuple[list[float], list[float]] = [], []
    for turn in range(3 if bench.rehearsal else REPEATS):
        for way in (0, 1) if turn % 2 else (1, 0):
            found[way].append(bench.seconds(ways[way]))
    assert HASHING.nbytes == hashed + data.nbytes * (1 + len(found[0]))
    return found
