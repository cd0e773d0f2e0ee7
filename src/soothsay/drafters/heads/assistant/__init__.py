"""Gemma 4's assistants."""
