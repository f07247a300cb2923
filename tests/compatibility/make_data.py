"""Write the data that `test_old_store` reads: a store, its runs, an index of hints.

    PYTHONPATH=CHECKOUT/src:tests/support python tests/compatibility/make_data.py CHECKOUT/src

It was run with commit ead6e99 in CHECKOUT, and is kept to say how; what it wrote is never written
again by later code, or it would be no proof. Contents are the same at every run, but for times and
for what torch makes of a training.
"""

import json
import sqlite3
import sys
import tarfile
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import compatible
import tensor_dedup

COMMIT = "ead6e99"


def hint_rows(index: Path) -> list[dict[str, Any]]:
    """What an index of hints says, row by row."""
    with closing(sqlite3.connect(index)) as db:
        db.row_factory = sqlite3.Row
        rows = db.execute("SELECT name, algorithm, entries FROM hint ORDER BY name, entries")
        return [dict(row) for row in rows]


def write(folder: Path, code: compatible.Code) -> dict[str, Any]:
    """All of it in a folder; what is to be found there."""
    checkpoints = compatible.write_checkpoints(folder / "checkpoints")
    store = folder / "old" / "store"
    compatible.import_all(code, store, checkpoints)
    compatible.save_runs(store, checkpoints["org/base"])
    compatible.settle_times(store)
    time.sleep(2.1)  # hints are kept of files only that were left alone for 2 s
    hints = folder / "old" / "hints.sqlite"
    places = checkpoints["org/base"], checkpoints["tune"]
    analysis = code.verb("analyze", *places, TENSOR_DEDUP_HINTS=str(hints))
    return {
        "commit": COMMIT,
        "files": {name: compatible.hashes(path) for name, path in checkpoints.items()},
        "steps": compatible.steps_of(store),
        "hints": hint_rows(hints),
        "analysis": compatible.without(analysis, *places),
    }


def pack(folder: Path) -> None:
    """Everything of a folder in one archive: git keeps neither modes nor empty folders."""
    with tarfile.open(compatible.DATA / "old.tar.gz", "w:gz", compresslevel=9) as archive:
        archive.add(folder, "old", filter=_anonymous)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def main(source: Path) -> None:
    """Write, pack, and let the old code say what it finds in what comes out of the archive."""
    assert Path(tensor_dedup.__file__).is_relative_to(source.absolute()), tensor_dedup.__file__
    code = compatible.Code(source.absolute())
    compatible.DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        found = write(Path(made), code)
        pack(Path(made, "old"))
    with tempfile.TemporaryDirectory() as made:
        found["documents"] = compatible.documents(code, compatible.unpack(Path(made)) / "store")
    (compatible.DATA / "expected.json").write_text(json.dumps(found, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
