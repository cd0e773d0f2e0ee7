"""P-EAGLE."""
