"""EAGLE and EAGLE-2."""
