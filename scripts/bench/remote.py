"""How long a pull over loopback takes, beside a plain copy of the same bytes by obstore.

    python scripts/bench/remote.py [--mb MB] [--tensors N] [--pairs N]

A checkpoint of random weights is pushed to a folder, which a server of files with ranges (a process
of its own, with sendfile) serves. It is then pulled into an empty store; and, in pairs with that,
its containers are copied by obstore: the same ranges, as many at once, into files that are synced.
The copy comes first in every other pair. Times and the ratio within a pair are medians with their
95 % intervals, for which there must be six pairs. A pull that finds everything there is timed last.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
import numpy as np
import obstore
from obstore.store import from_url
from safetensors.numpy import save_file

from bench.stats import estimate
from tensor_dedup.store import Store

# Those of a pull.
RANGE_BYTES, AT_ONCE = 32 << 20, 4

_SERVER = r"""
import os, re, socketserver, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

class Files(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = Path(sys.argv[1], self.path.lstrip("/"))
        if not path.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        size, start = path.stat().st_size, 0
        stop, wanted = size, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        self.send_response(206 if wanted else 200)
        if wanted:
            start, stop = int(wanted[1]), min(int(wanted[2]) + 1, size)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Last-Modified", "Mon, 23 Nov 2026 00:00:00 GMT")
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.end_headers()
        with path.open("rb") as file:
            while self.command == "GET" and start < stop:
                sent = os.sendfile(self.connection.fileno(), file.fileno(), start, stop - start)
                start += sent

    do_HEAD = do_GET

    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Files)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder; the URL."""
    command = [sys.executable, "-c", _SERVER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.terminate()


def plain_copy(url: str, remote: Path, target: Path) -> None:
    """Copy all containers of a remote by obstore, in ranges, into files that are synced."""
    store = from_url(url, client_options={"allow_http": True})
    target.mkdir()
    for container in sorted((remote / "containers").rglob("*.*")):
        key, size = container.relative_to(remote).as_posix(), container.stat().st_size
        with (target / container.name).open("wb", buffering=0) as file:

            def copy(start: int, key: str = key, size: int = size, fd: int = file.fileno()) -> None:
                stop = min(start + RANGE_BYTES, size)
                os.pwrite(fd, obstore.get_range(store, key, start=start, end=stop), start)

            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(copy, range(0, size, RANGE_BYTES)))
            os.fsync(file.fileno())


def timed(work: Callable[[], object]) -> float:
    """The seconds that something takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@click.command()
@click.option("--mb", default=100, show_default=True, help="Size of the checkpoint, in 10^6 bytes.")
@click.option("--tensors", default=300, show_default=True)
@click.option("--pairs", default=7, show_default=True)
def main(mb: int, tensors: int, pairs: int) -> None:
    """Print medians of both, and of their ratio."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        each = mb * 10**6 // tensors // 2
        dice = np.random.default_rng(0)
        arrays = {
            f"layers.{n}.weight": dice.integers(0, 1 << 16, each, np.uint16) for n in range(tensors)
        }
        (root / "model").mkdir()
        save_file(arrays, str(root / "model" / "model.safetensors"))
        full, remote = Store.open(root / "full"), root / "remote"
        full.import_(root / "model", "model")
        full.push(f"file://{remote}", "model")
        pulls, copies = list[float](), list[float]()
        with served(remote) as url:
            for number in range(pairs + 1):
                store = Store.open(root / f"store-{number}")
                copy = partial(plain_copy, url, remote, root / f"copy-{number}")
                pull = partial(store.pull, url, "model")
                if number % 2 == 0:
                    copies.append(timed(copy))
                pulls.append(timed(pull))
                if number % 2:
                    copies.append(timed(copy))
                shutil.rmtree(root / f"copy-{number}")
                if number < pairs:
                    shutil.rmtree(root / f"store-{number}")
                os.sync()  # so that no pair pays for what the one before it left
            again = timed(partial(store.pull, url, "model"))
        del pulls[0], copies[0]  # which warm up
        took, plain = estimate(pulls), estimate(copies)
        ratio = estimate([c / p for c, p in zip(copies, pulls, strict=True)])
        click.echo(f"{tensors} tensors, {mb} MB, medians of {pairs} pairs [95 % interval]")
        for what, found in (("pull into an empty store", took), ("plain copy by obstore", plain)):
            click.echo(f"{what:<24}  {found.text()} s  {mb / found.median:,.0f} MB/s")
        click.echo(f"throughput of the pull / of the copy  {ratio.text(2)}")
        click.echo(f"pull of nothing new       {again:.3f} s")


if __name__ == "__main__":
    main()
