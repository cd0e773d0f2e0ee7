"""Engines to compare. Each runs in its own process, which may use its own Python environment."""
