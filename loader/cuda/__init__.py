"""GPU memory in an engine's process: mapped read-only as tensors and shared by all models."""
