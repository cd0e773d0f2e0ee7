"""Modules of trained heads: what they compute, and the configuration of each."""
