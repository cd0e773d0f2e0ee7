"""Engines on many machines: Ray places and watches them, and each has a connection to the server."""
