#!/usr/bin/env python3
"""What device memory costs to share: the command of `gpu.py`, which says what it measures.

    scripts/bench/cuda.py [--only PART] [--size GIB] [--work DIR] [--write] [--rehearse]

Scripts of this folder find it before NVIDIA's package `cuda`, which torch asks for. Whoever imports
this file by that name is therefore given the package.
"""

import importlib
import sys
from pathlib import Path


def _stand_aside() -> None:
    here, before = Path(__file__).resolve().parent, sys.path[:]
    del sys.modules[__name__]
    sys.path[:] = [each for each in before if Path(each).resolve() != here]
    try:
        importlib.import_module(__name__)
    finally:
        sys.path[:] = before


if __name__ == "__main__":
    from gpu import main

    main()
else:
    _stand_aside()
