"""Plans activation checkpointing for PyTorch under a memory limit in bytes."""
