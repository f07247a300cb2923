"""Stores in memory; tests/faults has some on the disk."""

from store_runs.stores import tmp_path as tmp_path
