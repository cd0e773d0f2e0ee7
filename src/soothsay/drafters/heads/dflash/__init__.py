"""DFlash and its kin."""
