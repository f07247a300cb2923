"""Random operations of three writers that are killed, in slices: see `writers`."""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from remote_runs import writers
from remote_runs.versioned import SERVERS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", choices=[*SERVERS], default="moto")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--number", type=int, default=1, help="of the first slice")
    parser.add_argument("--slice", type=float, default=60.0, help="seconds of one slice")
    parser.add_argument("--lease", type=float, default=8.0, help="seconds of a short lease")
    parser.add_argument("--lost", type=int, default=0, help="of so many answers one is lost")
    parser.add_argument("--keep", type=Path, help="where to keep the journals of what was found")
    given = parser.parse_args()
    until, number, found = time.monotonic() + 60 * given.minutes, given.number, 0
    total: Counter[str] = Counter()
    while (left := until - time.monotonic()) > 0:
        seconds = min(given.slice, left)
        done = writers.run(given.server, number, seconds, given.lease, given.lost, given.keep)
        where = f"{given.server}, number {number}"
        say(f"{where}: {done.rounds} rounds, {done.kills} kills, {sum(done.counts.values())} done")
        for each in done.findings:
            say(f"FOUND with {where}: {each}")
        found, total, number = found + len(done.findings), total + done.counts, number + 1
    for what, count in sorted(total.items()):
        say(f"{count:7} {what}")
    return 1 if found else 0


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
