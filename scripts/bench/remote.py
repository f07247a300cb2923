"""How long a pull over loopback and a push take, beside plain copies of the same bytes by obstore.

    python scripts/bench/remote.py [--mb MB] [--tensors N] [--pairs N]

A checkpoint of random weights is pushed to a folder, which a server of files with ranges (a process
of its own, with sendfile) serves. It is then pulled into an empty store; and, in pairs with that,
its containers are copied by obstore: the same ranges, as many at once over all containers, into
files that are synced as soon as each is complete. It is also pushed to an empty folder; and, in
pairs with that, its containers are written to one by obstore, as many at once, and synced. The copy
comes first in every other pair. Times and the ratio within a pair are medians with their 95 %
intervals, for which there must be six pairs. A pull that finds everything there is timed last.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
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

from bench import options
from bench.stats import estimate
from bench.turns import timed
from tensor_dedup import Store

# Those of a pull.
RANGE_BYTES, AT_ONCE = 32 << 20, 4
# Of a push.
SENT_AT_ONCE = 3

_SERVER = r"""
import os, re, socketserver, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

class Files(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Else what follows the headers waits for a delayed acknowledgement of them, some 40 ms.
    disable_nagle_algorithm = True

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


def containers_of(remote: Path) -> list[Path]:
    """Return the containers of a remote."""
    return sorted((remote / "containers").rglob("*.*"))


def plain_copy(url: str, remote: Path, target: Path) -> None:
    """Copy all containers of a remote by obstore, in ranges, into files that are synced.

    Nothing waits for a container: neither the ranges of the next, nor for its sync.
    """
    store = from_url(url, client_options={"allow_http": True})
    target.mkdir()
    with ExitStack() as files, ThreadPoolExecutor(AT_ONCE) as pool, ThreadPoolExecutor(2) as syncs:
        synced: list[Future[None]] = []

        def copy(key: str, start: int, stop: int, file: int) -> None:
            os.pwrite(file, obstore.get_range(store, key, start=start, end=stop), start)

        def sync(parts: Sequence[Future[None]], file: int) -> None:
            for part in parts:
                part.result()
            os.fsync(file)

        for container in containers_of(remote):
            key, size = container.relative_to(remote).as_posix(), container.stat().st_size
            file = files.enter_context((target / container.name).open("wb", buffering=0)).fileno()
            starts = range(0, size, RANGE_BYTES)
            parts = [
                pool.submit(copy, key, start, min(start + RANGE_BYTES, size), file)
                for start in starts
            ]
            synced.append(syncs.submit(sync, parts, file))
        for each in synced:
            each.result()


def plain_upload(remote: Path, target: Path) -> None:
    """Write all containers of a remote to a folder by obstore, as many at once as a push."""
    target.mkdir()
    store = from_url(target.as_uri())

    def send(container: Path) -> None:
        obstore.put(store, container.name, container.read_bytes(), use_multipart=False)
        with (target / container.name).open("rb") as file:
            os.fsync(file.fileno())

    with ThreadPoolExecutor(SENT_AT_ONCE) as pool:
        list(pool.map(send, containers_of(remote)))


def paired(
    pairs: int, root: Path, ours: Callable[[int], object], theirs: Callable[[int], object]
) -> tuple[list[float], list[float]]:
    """Time both in pairs, after one that warms up; what they write below `root` is removed."""
    took, plain = list[float](), list[float]()
    before = {*root.iterdir()}
    for number in range(pairs + 1):
        if number % 2 == 0:
            plain.append(timed(partial(theirs, number)))
        took.append(timed(partial(ours, number)))
        if number % 2:
            plain.append(timed(partial(theirs, number)))
        for made in {*root.iterdir()} - before:
            shutil.rmtree(made)
        os.sync()  # so that no pair pays for what the one before it left
    return took[1:], plain[1:]


@click.command(context_settings=options.CONTEXT)
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
        with served(remote) as url:

            def pull(number: int) -> None:
                Store.open(root / f"pulled-{number}").pull(url, "model")

            pulled = paired(
                pairs,
                root,
                pull,
                lambda n: plain_copy(url, remote, root / f"copied-{n}"),
            )
            Store.open(root / "pulled-last").pull(url, "model")
            again = timed(partial(Store.open(root / "pulled-last").pull, url, "model"))
        pushed = paired(
            pairs,
            root,
            lambda n: full.push(f"file://{root / f'pushed-{n}'}", "model"),
            lambda n: plain_upload(remote, root / f"sent-{n}"),
        )
        click.echo(f"{tensors} tensors, {mb} MB, medians of {pairs} pairs [95 % interval]")
        rows = (
            ("pull into an empty store", "plain copy by obstore", "the pull / of the copy", pulled),
            (
                "push to an empty folder",
                "plain upload by obstore",
                "the push / of the upload",
                pushed,
            ),
        )
        for ours, theirs, both, (took, plain) in rows:
            for what, found in ((ours, estimate(took)), (theirs, estimate(plain))):
                click.echo(f"{what:<24}  {found.text()} s  {mb / found.median:,.0f} MB/s")
            ratio = estimate([c / p for c, p in zip(plain, took, strict=True)])
            click.echo(f"throughput of {both}  {ratio.text(2)}")
        click.echo(f"pull of nothing new       {again:.3f} s")


if __name__ == "__main__":
    main()
