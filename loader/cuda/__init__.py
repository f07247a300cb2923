"""Device memory in an engine's process: mapped read-only, seen as tensors, shared by all models."""
