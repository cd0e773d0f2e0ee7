"""Tokenizers in forms other than tokenizer.json, rebuilt with the `tokenizers` library."""
