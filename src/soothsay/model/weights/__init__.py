"""Weights in files: where checkpoints are, the names of their tensors, loading, writing."""
