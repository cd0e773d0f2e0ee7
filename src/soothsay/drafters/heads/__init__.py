"""Trained heads that read the features of their target, and their checkpoints."""
