"""The benchmarks. Those with a command line are run as `scripts/bench/NAME.py`."""
