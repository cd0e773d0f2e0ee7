"""Formats of model files and of quantized weights, one file a format."""
