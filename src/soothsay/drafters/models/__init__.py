"""Drafters that run a whole model: a small one, or the target in part."""
