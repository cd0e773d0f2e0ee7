"""Drafters that look up what followed the last tokens: in the request, in earlier ones, on disk."""
