"""Drafters: the protocol, one wing for each kind of method, and the registry of their names."""
