"""Device memory in an engine's process: mapped read-only, seen as tensors, lent to all."""
