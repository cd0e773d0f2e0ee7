"""Compares other engines with ours: measures, runs each engine in a process, stores results."""
