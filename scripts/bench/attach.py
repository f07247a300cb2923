#!/usr/bin/env python3
"""How fast a process gets at a model that is resident in a memory manager.

    scripts/bench/attach.py [--size MB] [--tensors N] [--repeats N] [--json FILE]

From connecting to the first and to the last page of every tensor, beside
`safetensors.torch.load_file` (warm; cold needs the right to drop caches), its copy into private
memory, and requests a second under several clients. Of repeats: lowest and median.
"""

import argparse
import json
import mmap
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from tensor_dedup.memory_manager.client import Client, connect
from tensor_dedup.memory_manager.errors import ManagerGoneError

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

LAYERS = 12
REQUEST_SECONDS = 1.5


@contextmanager
def manager(folder: Path, budget: int) -> Iterator[Path]:
    """A manager for the length of the context; the path of its socket."""
    path = folder / "m.sock"
    command = [sys.executable, "-m", "tensor_dedup.memory_manager.server", "--socket", str(path)]
    process = subprocess.Popen([*command, "--budget", str(budget)], stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                connect(path, keep_connected=False).close()
                break
            except ManagerGoneError:
                time.sleep(0.05)
        yield path
    finally:
        process.terminate()
        process.wait()


def publish(client: Client, tensors: dict[str, torch.Tensor]) -> float:
    """Put a model in, layer by layer; seconds."""
    began = time.perf_counter()
    names = list(tensors)
    for layer in range(LAYERS):
        mine = [tensors[name] for name in names[layer::LAYERS]]
        put = client.reserve([f"layer-{layer}"], "model").put
        assert put is not None
        with put:
            put.allocate([tensor.nbytes for tensor in mine])
            for index, tensor in enumerate(mine):
                put.write(index, tensor.numpy().data.cast("B"))
            leases = put.seal()
            put.publish(f"layer-{layer}", b"record", [lease.digest for lease in leases])
    return time.perf_counter() - began


def attach(path: Path) -> dict[str, float]:
    """Seconds from connecting until all tensors are mapped, and until pages have been read."""
    began = time.perf_counter()
    with connect(path, keep_connected=False) as client:
        found = client.lookup([f"layer-{layer}" for layer in range(LAYERS)], "model")
        views = []
        for layer in found:
            assert layer is not None
            for lease in layer.leases:
                start = lease.offset % mmap.PAGESIZE
                view = mmap.mmap(
                    lease.slab.fileno,
                    start + lease.nbytes,
                    flags=mmap.MAP_PRIVATE,
                    offset=lease.offset - start,
                )
                views.append((view, start))
        mapped = time.perf_counter()
        tensors = [torch.frombuffer(view, dtype=torch.uint8)[start:] for view, start in views]
        total = sum(int(tensor[0]) for tensor in tensors)
        first = time.perf_counter()
        total += sum(int(tensor[:: mmap.PAGESIZE].sum()) for tensor in tensors)
        last = time.perf_counter()
    assert total >= 0
    return {"mapped": mapped - began, "first_pages": first - began, "all_pages": last - began}


def load(path: Path, *, private: bool) -> dict[str, float]:
    """Seconds of load_file until the first and all pages were read, or copied."""
    began = time.perf_counter()
    tensors = load_file(path)
    if private:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    mapped = time.perf_counter()
    step = mmap.PAGESIZE
    total = sum(int(t.view(torch.uint8).flatten()[0]) for t in tensors.values())
    first = time.perf_counter()
    total += sum(int(t.view(torch.uint8).flatten()[::step].sum()) for t in tensors.values())
    last = time.perf_counter()
    assert total >= 0
    return {"mapped": mapped - began, "first_pages": first - began, "all_pages": last - began}


def repeated(
    repeats: int, function: Callable[..., dict[str, float]], *arguments: object, **options: object
) -> dict[str, list[float]]:
    """Lowest and median of each, in seconds."""
    found = [function(*arguments, **options) for _ in range(repeats)]
    columns = {name: sorted(each[name] for each in found) for name in found[0]}
    return {name: [min(column), statistics.median(column)] for name, column in columns.items()}


def ask(path: Path, together: Barrier, answered: "SimpleQueue[int]") -> None:
    """Count the requests that one client gets answered."""
    count = 0
    with connect(path, keep_connected=False) as client:
        together.wait()
        deadline = time.monotonic() + REQUEST_SECONDS
        while time.monotonic() < deadline:
            client.lookup(["none"])
            count += 1
    answered.put(count)


def requests_a_second(path: Path, clients: int) -> float:
    """Look-ups of one layer that is not there, by so many processes at once."""
    context = multiprocessing.get_context("fork")
    together, answered = context.Barrier(clients), context.SimpleQueue()
    crowd = [context.Process(target=ask, args=(path, together, answered)) for _ in range(clients)]
    for each in crowd:
        each.start()
    counts: list[int] = [answered.get() for _ in crowd]
    for each in crowd:
        each.join()
    return sum(counts) / REQUEST_SECONDS


def drop_caches() -> bool:
    """Forget cached files; False where this user may not."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def measure(folder: Path, size: int, count: int, repeats: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    each = size // count // 2
    tensors = {
        f"t{n}": torch.randint(-(2**15), 2**15, (each,), dtype=torch.int16, generator=generator)
        for n in range(count)
    }
    file = folder / "model.safetensors"
    save_file(tensors, file)
    result: dict[str, Any] = {"bytes": each * 2 * count, "tensors": count, "repeats": repeats}
    with manager(folder, 2 * size + (64 << 20)) as path:
        with connect(path, keep_connected=False) as client:
            result["publish_s"] = publish(client, tensors)
        del tensors
        result["attach"] = repeated(repeats, attach, path)
        result["load_file_warm"] = repeated(repeats, load, file, private=False)
        result["private_copy_warm"] = repeated(repeats, load, file, private=True)
        if drop_caches():
            result["load_file_cold"] = load(file, private=False)
        result["requests_a_second"] = {n: requests_a_second(path, n) for n in (1, 16, 64)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", type=int, default=1000, help="MB of the model")
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tensor-dedup-attach-") as folder:
        result = measure(Path(folder), given.size * 1_000_000, given.tensors, given.repeats)
    text = json.dumps(result, indent=2)
    if given.json is not None:
        given.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
