"""Checkpoints of trained heads: published layouts and our own, read and written."""
