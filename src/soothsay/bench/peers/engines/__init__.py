"""Engines to compare with, each in a process of its own that may have an environment of its own."""
