"""Hydra."""
